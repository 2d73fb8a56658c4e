"""`prune` with every kind of budget, with constraints, and with plans from files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import headprune as hp
from tests.support.commands import PRUNE, metrics_of, run, stderr_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("brief")]


def parameters(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.fixture(autouse=True)
def _counting_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that counts parameters, so that latencies repeat and take no time."""

    monkeypatch.setattr("headprune.latency.timer", lambda model, example: lambda: parameters(model) / 1000)
    monkeypatch.setattr("headprune.latency.MIN_SECONDS", 0.0)
    monkeypatch.setattr("headprune.app.workflow.scene._shapes", lambda scene: [(2, 8)])


def budget_of(folder: Path) -> dict[str, Any]:
    (budget,) = json.loads((folder / "metrics.json").read_text())["budgets"]
    return budget


@pytest.mark.parametrize("flag", ["--target-latency", "--target-params"])
def test_a_share_of_the_dense_model(flag: str, scored: Path, bert_folder: Path) -> None:
    run("prune", flag, "90%", "--strategy", "per-layer", "--protect", "L0.H1", "--min-heads-per-layer", 1, "-q")
    budget = budget_of(scored)
    told = budget["budget"]
    assert told["asked"] == f"{flag.removeprefix('--target-')} 90%"
    assert told["reading"]["value"] <= told["reading"]["high"] <= 0.9
    model = hp.load(scored / budget["checkpoint"])
    metrics = json.loads((scored / "metrics.json").read_text())
    assert parameters(model) / metrics["dense"]["parameters"] == pytest.approx(told["reading"]["value"])
    assert 1 not in budget["drop"].get("bert.encoder.layer.0.attention.self", [])
    plan = hp.PruningPlan.load(scored / "plan.json")
    assert (plan.strategy, plan.budget) == ("per-layer", told["asked"])
    text = (scored / "report.md").read_text()
    assert "Asked: at most 90 % of the dense model's" in text
    assert "Protected heads: L0.H1." in text
    assert "- **per-layer:** Every layer keeps its share" in text


@pytest.mark.slow
def test_flops_and_max_drop(scored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drop is measured on what will be saved: with all steps of repair, which other budgets' plans are compared without.

    On choosing examples; so nothing is fitted to these, as the last step is for other budgets.
    """
    told, others = list[str](), list[bool]()
    whole = hp.plan_search.checked_repair

    def checked_repair(calibration: Any, drop: Any, choose: Any) -> Any:
        told.append(json.dumps(drop, sort_keys=True))
        others.append(bool(calibration.others))
        return whole(calibration, drop, choose)

    monkeypatch.setattr(hp.plan_search, "checked_repair", checked_repair)
    run("prune", "--target-flops", "90%", "-o", "flops", "--scores", scored, "-q")
    assert budget_of(Path("flops"))["budget"]["reading"]["value"] <= 0.9
    metrics = json.loads(Path("flops/metrics.json").read_text())
    assert metrics["budgets"][0]["flops"] <= 0.9 * metrics["dense"]["flops"]
    assert metrics["planning"]["effort"]["name"] == "normal"
    assert metrics["planning"]["work"]["re-scored"]["flops"] > 0
    assert "- **re-scored:** In steps" in Path("flops/report.md").read_text()
    assert all(others)
    told.clear()
    others.clear()
    run("prune", "--max-drop", "0.9", "-s", "per-layer", "-o", "drop", "--scores", scored, "-q")
    budget = budget_of(Path("drop"))
    assert told.count(json.dumps(budget["drop"], sort_keys=True)) >= 2
    assert not any(others)
    assert budget["budget"]["reading"]["high"] <= 0.9
    assert budget["kept"] < 8
    assert "Asked: a loss of no more than 0.9" in Path("drop/report.md").read_text()


def test_the_cache_of_a_decoder(here: Path, llama_folder: Path, data_folder: Path) -> None:
    run("prune", llama_folder, "-d", data_folder, "-L", 20, "-m", "gradient", "--target-kv-cache", "80%", "-o", "run", "-q")  # fmt: skip
    budget = budget_of(here / "run")
    assert budget["budget"]["reading"]["value"] == 0.75
    assert [len(heads) for heads in budget["drop"].values()] == [2]


def test_a_plan_edited_by_hand(scored: Path, bert_folder: Path, data_folder: Path, here: Path) -> None:
    """What `prune` writes can be edited and applied, on a model that was never scored too."""
    run(*PRUNE, 4, "--no-repair")
    document = json.loads((scored / "plan.json").read_text())
    document["drop"] = {"L0": [1], "bert.encoder.layer.1.attention.self": [3, 0]}
    (here / "mine.json").write_text(json.dumps(document))
    assert "keeps 5 of 8. Asked: plan mine.json." in run("prune", "--plan", "mine.json", "--dry-run").stdout
    run("prune", bert_folder, "-d", data_folder, "-L", 20, "--plan", "mine.json", "--no-repair", "-o", "own", "-q")
    names = {p.name for p in (here / "own").iterdir()}
    assert "pruned-5" in names
    assert not names & {"scores.json", "importance.png"}
    assert budget_of(here / "own")["drop"] == {
        "bert.encoder.layer.0.attention.self": [1], "bert.encoder.layer.1.attention.self": [0, 3],
    }  # fmt: skip
    assert len(budget_of(here / "own")["random"]) == 3
    text = (here / "own" / "report.md").read_text()
    assert "| 5 | `mine.json` | `pruned-5/` |" in text
    assert "## Importance" not in text
    model = hp.load(here / "own" / "pruned-5")
    assert [layer.attention.self.query.out_features for layer in model.bert.encoder.layer] == [24, 16]
    # With scores: that run's model and data.
    run("prune", "--plan", "mine.json", "--no-repair", "--scores", scored, "-o", "with-scores", "-q")
    assert "## Importance" in (here / "with-scores" / "report.md").read_text()
    assert hp.PruningPlan.load(here / "with-scores" / "plan.json").drop == budget_of(here / "own")["drop"]


def test_what_was_repaired_is_told(scored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headprune.repairing.steps.better", lambda before, after: True)
    run(*PRUNE, 1)
    repair, text = budget_of(scored)["repair"], (scored / "report.md").read_text()
    assert repair["layers"]
    assert all(f["after"] <= f["before"] + 1e-9 for f in repair["layers"].values())
    assert repair["answers"]["held_out"] < repair["answers"]["before"]
    assert "repaired layer by layer only" in text
    assert "Repair fits the weights that stay by least squares, on the" in text
    run("prune", "-k", 4, "-s", "one-shot", "-m", "gradient", "--no-repair", "-o", "plain", "--scores", scored, "-q")
    assert budget_of(Path("plain"))["repair"] is None
    assert "Repair fits" not in Path("plain/report.md").read_text()


def test_training_after_pruning(scored: Path) -> None:
    run(*PRUNE, 4, "--finetune", "1", "-o", "tuned", "--scores", scored)
    budget = budget_of(Path("tuned"))
    assert budget["kept"] == 4
    assert budget["finetune"]["steps"] > 0
    text = Path("tuned/report.md").read_text()
    assert "Fine-tuned on" in text
    assert "before training" in text
    assert not (Path("tuned") / ".unfinished").exists()
    hp.load(Path("tuned") / budget["checkpoint"])


def test_strategies_by_name(scored: Path, here: Path) -> None:
    message = stderr_of("prune", "-k", 4, "-s", "swap", "-q", code=1)
    assert "do not weigh pairs of heads. Score with --method fisher" in " ".join(message.split())
    run("prune", "-k", 4, "-s", "greedy", "-o", "greedy", "--scores", scored / "scores.json", "-q")
    assert budget_of(Path("greedy"))["strategy"] == "greedy"
    assert Path("greedy/scores.json").is_file()
    assert not (scored / "metrics.json").exists()


def test_biases_that_the_repair_adds_count(here: Path, llama_folder: Path, data_folder: Path) -> None:
    run("prune", llama_folder, "-d", data_folder, "-L", 20, "--target-params", "99%", "-o", "run", "-q")
    budget, dense = budget_of(Path("run")), metrics_of(Path("run"))["dense"]["parameters"]
    model = hp.load(Path("run") / budget["checkpoint"])
    assert budget["repair"]["biases"]
    assert parameters(model) == budget["parameters"] <= 0.99 * dense
