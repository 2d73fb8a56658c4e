"""What a computation will cost: passes as they are then made, a line that never stops a run, and nothing left changed."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from torch import nn

import headprune as hp
from headprune.app import workflow
from headprune.app.data import DataOptions, load_parts
from headprune.app.data.part import Part
from headprune.app.models import load_model
from headprune.app.options import Options
from headprune.app.runs import RunFolder
from headprune.app.workflow import Goal, PruneRun, estimating, pruning, saving
from headprune.budgets import budget_of
from headprune.errors import HeadPruneError
from headprune.estimating import Limits, TooShortError, bisected
from headprune.estimating.ledger import CostEstimate, Ledger, Load, Rate, summed
from headprune.estimating.meter import Meter, counting, metered
from headprune.estimating.rates import PARTS, Sampler
from headprune.fingerprint import fingerprint
from headprune.ranks import current
from headprune.scoring import METHODS, Settings
from tests.support import zoo
from tests.support.commands import PRUNE, Silent, run
from tests.support.folders import sentences, write_jsonl

NEAR = 0.1  # of the passes: what finds out about a model runs it on a few examples too, and is not counted
Batches = list[dict[str, Any]]


def batches(model: nn.Module, count: int, rows: int = 16, seed: int = 3) -> Batches:
    lengths = [6 + 3 * (i % 3) for i in range(count)]
    return [zoo.labelled(model, zoo.text(rows, n, seed + i), seed + i) for i, n in enumerate(lengths)]


@pytest.fixture(scope="module")
def bert() -> nn.Module:
    return zoo.bert()[0]


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return zoo.llama()[0]


def near(estimated: float, real: float) -> bool:
    return abs(estimated - real) <= NEAR * real


# -- counting --------------------------------------------------------------------------------------


def test_passes_are_counted_forward_and_back(bert: nn.Module) -> None:
    batch = batches(bert, 1, rows=8)[0]
    with metered(bert) as meter:
        with torch.no_grad():
            bert(**batch)
        torch.autograd.grad(bert(**batch).logits.sum(), list(bert.parameters()), allow_unused=True)
    assert (meter.forward, meter.backward) == (16, 8)
    bert(**batch)
    assert meter.forward == 16, "a hook was left behind"


def test_loops_are_timed_by_name(bert: nn.Module) -> None:
    with metered(bert) as meter:
        assert current().share("twice", [lambda: 1, lambda: 2]) == [1, 2]
        current().share("twice", [lambda: 3])
    assert meter.loops["twice"].tasks == 3
    assert meter.rest("twice") <= meter.seconds


def test_an_entry_costs_its_rate_times_its_load() -> None:
    ledger = Ledger()
    ledger.add("one", "a pass", Load(10, 100), 2, low=1, high=4)
    ledger.add("one", "a pass", Load(5, 50))
    ledger.add("never", "a pass", Load(5, 50), 0)
    (phase,), _ = summed(ledger, {"a pass": Rate(0.01, 0.5, 1.0, 2.0, 3.0)})
    assert phase.forward == 2 * 10 + 5
    assert phase.backward == 2 * phase.forward
    assert phase.flops == 3.0 * (2 * 100 + 50)
    assert phase.seconds == pytest.approx(2 * 1.5 + 1.0)
    assert (phase.seconds_low, phase.seconds_high) == pytest.approx((1.5 + 1.0, 4 * 1.5 + 1.0))
    assert (phase.forward_low, phase.forward_high) == (15, 45)


def test_operations_go_by_the_real_lengths(bert: nn.Module) -> None:
    given = batches(bert, 6)
    sampler = Sampler(bert, [], given, 1)
    assert sampler.flops(given) == pytest.approx(sum(_flops(bert, batch) for batch in given), rel=0.02)


def _flops(model: nn.Module, batch: dict[str, Any]) -> int:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        model(**batch)
    return counter.get_total_flops()


# -- passes as they are then made ------------------------------------------------------------------

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "half of a BERT's heads": ("bert", {"keep": "50%"}),
    "several, searched quickly": ("bert", {"keep": ["25%", 8], "effort": "low"}),
    "by one strategy, not repaired": ("bert", {"keep": 6, "strategy": "re-scored", "repair": False}),
    "by scores alone": ("bert", {"keep": 6, "strategy": "one-shot", "methods": ["gradient", "ablation"]}),
    "groups of key/value heads": ("llama", {"keep": "50%"}),
}


QUICK = "by one strategy, not repaired"


@pytest.mark.parametrize("shape", [s if s == QUICK else pytest.param(s, marks=pytest.mark.slow) for s in SHAPES])
def test_a_search_and_repair_take_the_passes_that_were_estimated(shape: str, request: pytest.FixtureRequest) -> None:
    name, asked = SHAPES[shape]
    model = request.getfixturevalue(name)
    given, choose = batches(model, 10), batches(model, 5, seed=50)
    before = fingerprint(model)
    found = hp.estimate(model, given, choose=choose, **asked)
    assert fingerprint(model) == before
    repaired = asked.get("repair", True)
    for part in ({p.name for p in found.phases}, found.memory_parts):
        assert ("statistics for repair" in part) == repaired
    methods, options = asked.get("methods", ["gradient"]), {k: v for k, v in asked.items() if k != "methods"}
    if options.get("strategy") == "re-scored":
        methods = []
    with counting(model, real := Meter()):
        scores = [hp.score(model, given, method) for method in methods]
        plans = hp.search(model, given, choose=choose, scores=scores, **options)
    for plan in plans if repaired else ():
        copied = copy.deepcopy(model)
        with counting(copied, real):
            hp.repair(copied, plan, given)
    n = found.examples
    assert n == 10 * 16
    assert near(found.backward, real.backward / n), (found.backward, real.backward / n)
    assert found.forward_low * (1 - NEAR) <= real.forward / n <= found.forward_high * (1 + NEAR)
    assert near(found.forward, real.forward / n), (found.forward, real.forward / n)


def test_statistics_block_by_block_take_what_they_take_in_memory(llama: nn.Module, tmp_path: Path) -> None:
    """They were estimated at no pass at all, and at the same time for four batches as for a hundred."""
    given = batches(llama, 2, rows=4)
    places = {name: "disk" for name, _ in llama.named_children()}
    spread = dispatch_model(copy.deepcopy(llama), places, main_device="cpu", offload_dir=tmp_path)
    known, found = (Sampler(model, hp.find_attention(model, given[0]), given).statistics() for model in (llama, spread))
    assert found.forward == known.forward > found.backward == known.backward == 1
    assert found.flops == known.flops > 0
    assert found.seconds > 0  # for each of the examples


@pytest.mark.parametrize(
    "method",
    [
        "gradient",
        "ablation",
        *(pytest.param(m, marks=pytest.mark.slow) for m in ("entropy", "l0", "shapley", "integrated-gradients")),
    ],
)
def test_scoring_takes_the_passes_that_were_estimated(bert: nn.Module, method: str) -> None:
    given, settings = batches(bert, 16), Settings(permutations=32, steps=8 if method != "l0" else 40)
    found = hp.estimate(bert, given, methods=method, settings=settings)
    with counting(bert, real := Meter()):
        hp.score(bert, given, method, settings=settings)
    n = found.examples
    # Heads are replayed in stacks, each of which is a pass over more rows; how many is up to the memory.
    assert found.forward_low * 0.8 <= real.forward / n <= found.forward_high * 1.25, (found.forward, real.forward / n)
    assert abs(found.backward - real.backward / n) <= 0.15 * max(found.backward, real.backward / n)


def test_ablation_of_few_examples_takes_gradients_on_all(bert: nn.Module) -> None:
    """These say what the examples that are left out would have given: with few examples they are most of the work."""
    given, settings = batches(bert, 16), Settings(examples=8)
    found = hp.estimate(bert, given, methods="ablation", settings=settings)
    with counting(bert, real := Meter()):
        hp.score(bert, given, "ablation", settings=settings)
    assert near(found.backward, real.backward / found.examples)
    assert found.forward >= 0.7 * real.forward / found.examples
    whole = hp.estimate(bert, given, methods="ablation", settings=Settings(examples=9999))
    assert whole.backward == 0


def test_points_of_integration_double_once_for_all_batches() -> None:
    _, least, most = PARTS["integrated-gradients"].turns(Settings(), 1, 16)
    assert (4 * least, 4 * most) == (4, 4 + 8 + 16 + 32 + 64)
    assert 4 * 10 * PARTS["integrated-gradients"].turns(Settings(), 10, 160)[2] == pytest.approx(
        4 + 8 + 16 + 32 + 10 * 64
    )


def test_an_estimate_leaves_the_model_as_it_was(bert: nn.Module) -> None:
    """A classifier notes its problem type when it first computes a loss: a run that was killed was then another one."""
    config: Any = bert.config
    config.problem_type, before = None, fingerprint(bert)
    told = config.to_dict()
    hp.estimate(bert, batches(bert, 2), methods="gradient")
    assert config.to_dict() == told
    assert fingerprint(bert) == before


def test_every_method_that_is_told_apart_exists() -> None:
    assert set(PARTS) <= set(METHODS)


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("many")
    for split, count, seed in (("train", 256, 1), ("validation", 160, 2), ("test", 160, 3)):
        write_jsonl(folder / f"{split}.jsonl", [{**row, "id": i} for i, row in enumerate(sentences(count, seed))])
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("keep", [("4",), ("6", "25%")])
@pytest.mark.usefixtures("brief", "here")
def test_a_run_takes_the_passes_that_were_estimated(
    keep: tuple[str, ...], bert_folder: Path, many: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of `prune_run` but the timing, which goes by the clock."""
    monkeypatch.setattr(pruning, "_timed", lambda job, environment, made: {"latency": _no_latency()})
    options = Options(str(bert_folder), DataOptions(str(many), limit=192, batch_size=16))
    asked = PruneRun(options, Goal(tuple(budget_of(f"keep {k}") for k in keep)), ["gradient"])
    scene = asked.open([], Silent())
    found = estimating.estimate_prune(asked, scene)
    monkeypatch.setattr(PruneRun, "open", lambda self, scores, console: scene)
    monkeypatch.setattr(pruning, "announce", lambda console, make: None)
    load, real = saving.load, Meter()
    for name in ("write_heads", "publish"):
        monkeypatch.setattr(pruning, name, lambda *_: None)
    monkeypatch.setattr(pruning.report, "write_cards", lambda content: None)
    with ExitStack() as stack:

        def counted(scene: workflow.Scene, path: Path) -> nn.Module:
            model = load(scene, path)
            stack.enter_context(counting(model, real))
            return model

        monkeypatch.setattr(saving, "load", counted)
        stack.enter_context(counting(scene.model, real))
        workflow.prune_run(asked, RunFolder(Path("run")), Silent())
    n = found.examples
    looked = next(p for p in found.phases if p.name.startswith("looking"))
    forward = found.forward - looked.forward
    assert near(found.backward, real.backward / n), (found.backward, real.backward / n)
    assert near(forward, real.forward / n), (forward, real.forward / n, {p.name: p.forward for p in found.phases})


def _no_latency() -> Any:
    from headprune.app.documents import Latency

    return Latency(rows=(), bound=None, typical_length=8)


# -- the line before a run -------------------------------------------------------------------------


def made(**more: Any) -> CostEstimate:
    known: dict[str, Any] = {
        "examples": 1024, "forward": 75.2, "backward": 12.1, "forward_low": 70.0, "forward_high": 80.0, "flops": 2.1e12, "seconds": 185.0,
        "seconds_low": 150.0, "seconds_high": 200.0, "memory": 640_000_000, "memory_parts": {}, "phases": (), "batches": 4, "took": 1.0,
    }  # fmt: skip
    return CostEstimate(**{**known, **more})


def test_the_line_says_it_all() -> None:
    assert made().line == (
        "About 3.1 min: 87 passes over 1,024 examples (75 forward, 12 backward), 2.1 TFLOPs, 640 MB (estimated from 4 calibration batches)."
    )


def failing(error: Exception) -> Callable[..., CostEstimate]:
    def make(*_: object) -> CostEstimate:
        raise error

    return make


def test_an_estimate_that_cannot_be_made_stops_nothing() -> None:
    console = Silent()
    estimating.announce(console, failing(RuntimeError("no\nsuch kernel")))
    assert len(console.said) == 1
    assert "RuntimeError: no" in console.said[0]


def test_what_is_over_soon_is_not_estimated() -> None:
    console = Silent()
    estimating.announce(console, failing(TooShortError()))
    assert console.said == []
    estimating.announce(console, made)
    assert console.said == [made().line]


@pytest.mark.usefixtures("brief", "here")
@pytest.mark.parametrize("fails", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_long_run_says_it_before_it_begins(
    fails: bool, bert_folder: Path, data_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimating, "BEFORE_A_RUN", Limits())
    for room in (pruning, workflow.scoring):
        monkeypatch.setattr(room, "BEFORE_A_RUN", Limits())
    if fails:
        monkeypatch.setattr(estimating, "add_scoring", failing(ValueError("nothing known")))
    for command in (["score", "-m", "gradient"], [*[a for a in PRUNE if a != "-q"], "4"]):
        options = [] if command[0] == "prune" else [bert_folder, "-d", data_folder, "-L", 40]
        told = " ".join(run(command[0], *options, *command[1:]).stderr.split())
        assert ("could not be estimated" if fails else "passes over 40 examples") in told
        assert told.index("estimated") < told.index(" …")


@pytest.mark.usefixtures("brief", "here")
def test_a_short_run_says_nothing(bert_folder: Path, data_folder: Path) -> None:
    told = run("score", bert_folder, "-d", data_folder, "-L", 40, "-m", "gradient").stderr
    assert "estimated" not in told


@pytest.mark.usefixtures("brief", "here")
def test_where_a_method_was_interrupted_nothing_is_estimated(
    bert_folder: Path, data_folder: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in its first method, a run has finished no stage yet: it was announced as if all of it were still to do."""
    monkeypatch.setattr(workflow.scoring, "announce", failing(AssertionError()))
    (here / "out" / ".unfinished" / "gradient-0").mkdir(parents=True)
    run("score", bert_folder, "-d", data_folder, "-L", 40, "-m", "gradient", "-o", "out")


# -- the command -----------------------------------------------------------------------------------


def estimated(*arguments: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run("estimate", *arguments, "--json").stdout)
    return found


@pytest.mark.usefixtures("here")
def test_the_command_estimates_a_run_and_writes_nothing(bert_folder: Path, data_folder: Path, here: Path) -> None:
    found = estimated(bert_folder, "-d", data_folder, "-L", 40, "--keep", "4")
    assert found["examples"] == 40
    assert found["line"].startswith("About")
    assert {"scoring by gradient", "statistics for repair", "timing", "report"} <= {p["name"] for p in found["phases"]}
    assert found["seconds"] == pytest.approx(sum(p["seconds"] for p in found["phases"]))
    assert found["memory"] == sum(found["memory_parts"].values())
    assert list(here.iterdir()) == []


@pytest.mark.slow
def test_the_command_takes_what_prune_takes(bert_folder: Path, data_folder: Path, here: Path) -> None:
    """A line for `prune` with a device map or an export could not be estimated: there were no such options."""
    places = {"bert.embeddings": "cpu", "bert.encoder": "disk", "bert.pooler": "cpu", "classifier": "cpu"}
    (here / "map.json").write_text(json.dumps(places))
    found = estimated(
        bert_folder, "-d", data_folder, "-L", 40, "--keep", "4", "--device-map", "map.json", "--offload-folder", "off"
    )
    assert found["seconds"] > 0
    exported = estimated(bert_folder, "-d", data_folder, "-L", 40, "--keep", "4", "--export", "stock")
    assert "The export to stock is not counted." in exported["notes"]


@pytest.mark.usefixtures("here")
def test_without_a_budget_it_is_about_scores(bert_folder: Path, data_folder: Path) -> None:
    names = [p["name"] for p in estimated(bert_folder, "-d", data_folder, "-L", 40, "-m", "fisher")["phases"]]
    assert names == ["scoring by fisher", "looking at what the heads do", "report"]


def test_with_scores_nothing_is_scored(scored: Path) -> None:
    assert scored.is_dir()
    found = estimated("--keep", "4")
    assert not any(p["name"].startswith("scoring") for p in found["phases"])


@pytest.mark.usefixtures("here")
def test_a_table_for_people(bert_folder: Path, data_folder: Path) -> None:
    told = run("estimate", bert_folder, "-d", data_folder, "-L", 40, "--keep", "4", "--finetune", "1").stdout
    assert "fine-tuning" in told
    assert "Memory:" in told
    assert told.strip().splitlines()[-1].startswith("About")


def test_a_budget_that_is_found_out_has_a_note(bert: nn.Module) -> None:
    found = hp.estimate(bert, batches(bert, 4), budgets="flops 90%")
    assert any("flops 90%" in note for note in found.notes)


def test_budgets_that_are_found_out_have_a_plan_each(bert: nn.Module) -> None:
    """Both were taken to keep half of the heads, so that a plan, its repair and its measurement were missing."""
    asked = [budget_of("flops 90%"), budget_of("latency 80%"), budget_of("keep 3")]
    found = bisected(asked, Ledger(), total=8, orders=1, seconds=0.1)
    assert [str(budget) for budget in found] == ["keep 6", "keep 4", "keep 3"]
    assert [str(budget) for budget in bisected(asked[:1], Ledger(), 8, 1, 0.1)] == ["keep 4"]


def test_a_time_without_end_is_no_limit(bert: nn.Module) -> None:
    found = hp.estimate(bert, batches(bert, 4), methods="ablation", settings=Settings(seconds=math.inf))
    assert math.isfinite(found.seconds)
    assert found.forward > 0


def test_what_asks_for_pruning_needs_a_budget(bert_folder: Path, data_folder: Path) -> None:
    """Options of `prune` were ignored where no budget was given, and scoring was estimated."""
    for option in (["--finetune", 1], ["--no-repair"]):
        refused = run("estimate", bert_folder, "-d", data_folder, *option, code=1)
        assert "How many heads to keep?" in refused.stderr


def test_what_makes_no_sense_is_refused(bert: nn.Module) -> None:
    with pytest.raises(HeadPruneError, match="Nothing is asked for"):
        hp.estimate(bert, batches(bert, 1))
    with pytest.raises(HeadPruneError, match="no examples"):
        hp.estimate(bert, [], keep="50%")
    with pytest.raises(HeadPruneError, match="calibrate_on"):
        hp.estimate(bert, batches(bert, 1), keep="50%", calibrate_on=0)


def test_a_part_counts_as_its_batches(bert_folder: Path, data_folder: Path) -> None:
    loaded = load_model(str(bert_folder), device="cpu")
    part: Part = load_parts(DataOptions(str(data_folder), batch_size=8), loaded).report
    exact = Load.of(part.batches())
    found = estimating.load_of(part)
    assert found.examples == exact.examples
    assert found.units == pytest.approx(exact.units, rel=0.05)


def test_random_numbers_are_as_they_were(bert: nn.Module) -> None:
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    hp.estimate(bert, batches(bert, 2), keep="50%")
    assert torch.equal(torch.rand(3), wanted)
