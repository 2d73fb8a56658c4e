"""What CONTRIBUTING tells a newcomer works, as it is written there."""

import ast
import re
import sys
import textwrap
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import headprune as hp
from headprune.app import pictures
from headprune.app import report as reporting
from headprune.app.report import content, measured
from headprune.budgets import BUDGETS
from headprune.exporting import FORMATS
from headprune.planning import STRATEGIES
from headprune.repairing import calibrate, checked_repair
from headprune.repairing.steps import STEPS, Step
from headprune.scoring import METHODS
from tests.support.documents import GENERATION, METRICS
from tests.support.zoo import bert, labelled, text

TESTS = Path(__file__).parent
ROOT = TESTS.parent


def blocks(language: str) -> list[str]:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    return [textwrap.dedent(b) for b in re.findall(rf"^ *```{language}\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)]


CODE = blocks("python")


def run_example(mark: str) -> dict[str, Any]:
    """The names that the example with this text in it defines."""
    names: dict[str, Any] = {"__name__": "example"}
    exec(next(code for code in CODE if mark in code), names)
    return names


@contextmanager
def registered(register: MutableMapping[str, Any], mark: str, name: str) -> Iterator[Any]:
    """What an example puts into a register, as long as the context lasts."""
    before = dict(register)
    try:
        run_example(mark)
        assert set(register) - set(before) == {name}
        yield register[name]
    finally:
        register.clear()
        register.update(before)


def test_the_example_of_a_method_scores() -> None:
    with registered(METHODS, "@method(", "depth") as depth:
        assert depth.about.startswith("Nobody (2026)")
        model, example = bert()
        scores = hp.score(model, [labelled(model, example)], method="depth")
        assert scores.flat().tolist() == [0] * 4 + [-1] * 4 + [-2] * 4
        assert hp.plan(scores, 4).drop.keys() == {a.name for a in scores.layers[1:]}


def test_the_example_of_a_strategy_plans() -> None:
    """Heads go by the gradient with those masked that went before; what is protected stays, and the model is as it was."""
    with registered(STRATEGIES, "@strategy(", "gradual"):
        model, example = bert()
        batches = [labelled(model, example)]
        before = {name: t.clone() for name, t in model.state_dict().items()}
        plans = hp.search(model, batches, keep=[11, 10], strategy="gradual", protect="L2.H1", repair=False)
        assert [plan.kept for plan in plans] == [11, 10]
        assert all(set(heads) <= set(plans[1].drop[name]) for name, heads in plans[0].drop.items())
        assert all(1 not in plan.drop.get("bert.encoder.layer.2.attention.self", []) for plan in plans)
        with hp.mask(model, plans[0], batches[0]):
            again = hp.score(model, batches, "gradient")
        first, second = ({(n, h) for n, heads in plan.drop.items() for h in heads} for plan in plans)
        value = {(a.name, h): float(again.values[a.name][h]) for a in again.layers for h in range(a.num_heads)}
        stays = value.keys() - second - {("bert.encoder.layer.2.attention.self", 1)}
        assert max(value[head] for head in second - first) <= min(value[head] for head in stays)
        assert all((t == before[name]).all() for name, t in model.state_dict().items())


def test_the_example_of_a_step_repairs() -> None:
    step = Step("stronger pull", run_example("10 * before.facts.ridge")["fit"], by_layer=True)
    model, example = bert()
    calibration = calibrate(model, hp.find_attention(model, example), [text(8, 9)])
    weights = checked_repair(calibration, {"bert.encoder.layer.0.attention.self": [1]}, steps=[STEPS[0], step])
    assert [trial.step for trial in weights.trials] == ["output projections", "stronger pull"]


def test_the_example_of_a_budget_is_held() -> None:
    with registered(BUDGETS, "@budget(", "weights"):
        model, example = bert()
        batches = [labelled(model, example)]
        scores = hp.score(model, batches, method="random")
        (plan,) = hp.search(model, batches, budgets="weights 0.17MB", strategy="one-shot", scores=scores, repair=False)
        hp.prune(model, plan, example)
        assert 160_000 < sum(4 * p.numel() for p in model.parameters()) <= 170_000


def test_the_example_of_a_section_is_reported(report: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (section,) = blocks("jinja")
    code = next(code for code in CODE if "cache_table" in code)
    exec(code, room := {**vars(measured), "Figure": content.Figure, "new_figure": pictures.new_figure})
    for name in ("cache_table", "cache_figure"):
        monkeypatch.setattr(measured, name, room[name], raising=False)
    monkeypatch.setattr(reporting, "TEMPLATE", reporting.TEMPLATE + section)
    text = report({**METRICS, "generation": [GENERATION]})
    assert "## The cache\n\n<details>" in text
    table = "| model | per token |\n|---|---|\n| dense | 12.3 kB |"
    assert f"![bytes of the cache per token, by model](cache.png)\n\n{table}" in text


def test_the_example_of_an_export_format_writes(tmp_path: Path) -> None:
    with registered(FORMATS, "@exporter", "npz") as npz:
        done = hp.export(bert()[0], tmp_path / "model.npz", "npz", dtype="float16")
        assert npz.about == "A file of NumPy arrays by name."
        assert done.path.is_file()


@pytest.mark.parametrize("room", ["scoring", "planning", "budgets", "exporting"])
def test_every_file_that_may_register_something_is_imported(room: str) -> None:
    files = {f"headprune.{room}.{path.stem}" for path in (ROOT / "headprune" / room).glob("[!_]*.py")}
    assert set() < files <= sys.modules.keys()


def test_test_files_import_from_support_alone() -> None:
    """What two test files need is in `tests/support/`, so that one can be changed, split or deleted without the other."""
    for path in TESTS.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = [f"{n.module}.{a.name}" for n in nodes if isinstance(n, ast.ImportFrom) and n.module for a in n.names]
        names += [a.name for n in nodes if isinstance(n, ast.Import) for a in n.names]
        assert not [n for n in names if n.startswith("tests") and not n.startswith("tests.support.")], path.name
