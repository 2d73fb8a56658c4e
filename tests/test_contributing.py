"""What CONTRIBUTING tells a newcomer works, as it is written there."""

import ast
import importlib
import re
import sys
import textwrap
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

import headprune as hp
from headprune.budgets import BUDGETS
from headprune.exporting import FORMATS
from headprune.planning import STRATEGIES
from headprune.repairing import checked
from headprune.repairing.steps import STEPS
from headprune.scoring import METHODS
from tests.support.documents import GENERATION, METRICS
from tests.support.repairs import refit_of
from tests.support.zoo import bert, labelled, text

TESTS = Path(__file__).parent
ROOT = TESTS.parent
CODE = [
    textwrap.dedent(found)
    for found in re.findall(
        r"^ *```python\n(.*?)^ *```", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE | re.DOTALL
    )
]


def test_the_example_of_a_method_scores() -> None:
    before = dict(METHODS)
    try:
        exec(CODE[0], {"__name__": "example"})
        assert set(METHODS) - set(before) == {"depth"}
        assert METHODS["depth"].about.startswith("Nobody (2026)")
        model, example = bert()
        scores = hp.score(model, [labelled(model, example)], method="depth")
        assert scores.flat().tolist() == [0] * 4 + [-1] * 4 + [-2] * 4
        assert hp.plan(scores, 4).drop.keys() == {a.name for a in scores.layers[1:]}
    finally:
        METHODS.clear()
        METHODS.update(before)


def test_the_example_of_a_strategy_plans() -> None:
    before = dict(STRATEGIES)
    try:
        exec(CODE[1], {"__name__": "example"})
        assert set(STRATEGIES) - set(before) == {"top-down"}
        model, example = bert()
        scores = hp.score(model, [labelled(model, example)], method="random")
        plan = hp.plan(scores, 6, strategy="top-down", protect="L2.H1")
        assert {name: len(heads) for name, heads in plan.drop.items()} == {
            scores.layers[1].name: 3, scores.layers[2].name: 3,
        }  # fmt: skip
    finally:
        STRATEGIES.clear()
        STRATEGIES.update(before)


def test_the_example_of_a_step_repairs() -> None:
    room: dict[str, Any] = {"__name__": "example"}
    exec(next(code for code in CODE if "Step(" in code), room)
    model, example = bert()
    refit = refit_of(model, hp.find_attention(model, example), [text(8, 9)])
    found = checked(refit, {"bert.encoder.layer.0.attention.self": [1]}, steps=[STEPS[0], room["STEP"]])
    assert [trial.step for trial in found.trials] == ["output projections", "stronger pull"]


def test_the_example_of_a_budget_is_held() -> None:
    before = dict(BUDGETS)
    try:
        exec(CODE[2], {"__name__": "example"})
        assert set(BUDGETS) - set(before) == {"weights"}
        model, example = bert()
        batches = [labelled(model, example)]
        scores = hp.score(model, batches, method="random")
        (plan,) = hp.search(model, batches, budgets="weights 0.17MB", strategy="one-shot", scores=scores, repair=False)
        hp.prune(model, plan, example)
        assert 160_000 < sum(4 * p.numel() for p in model.parameters()) <= 170_000
    finally:
        BUDGETS.clear()
        BUDGETS.update(before)


def test_the_example_of_a_section_is_reported(report: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    room: dict[str, Any] = {"__name__": "example"}
    exec(next(code for code in CODE if "Section(" in code), room)
    monkeypatch.setattr("headprune.app.report.sections.PRUNED", (room["cache"],))
    text = report({**METRICS, "generation": [GENERATION]})
    assert "## The cache\n\n<details>" in text
    assert (
        "![bytes of the cache per token, by model](cache.png)\n\n| model | per token |\n|---|---|\n| dense | 12.3 kB |"
        in text
    )


def test_the_example_of_an_export_format_writes(tmp_path: Path) -> None:
    try:
        exec(next(code for code in CODE if "@exporter" in code), {"__name__": "example"})
        done = hp.export(bert()[0], tmp_path / "model.npz", "npz", dtype="float16")
        assert FORMATS["npz"].about == "A file of NumPy arrays by name."
        assert done.path.is_file()
    finally:
        FORMATS.pop("npz", None)


@pytest.mark.parametrize(
    ("room", "decorator"),
    [("scoring", "method"), ("planning", "strategy"), ("budgets", "budget"), ("exporting", "exporter")],
)
def test_every_file_that_registers_is_imported(room: str, decorator: str) -> None:
    importlib.import_module(f"headprune.{room}")
    files = [p for p in (ROOT / "headprune" / room).glob("*.py") if f"\n@{decorator}(" in p.read_text()]
    assert files
    for path in files:
        assert f"headprune.{room}.{path.stem}" in sys.modules


def test_test_files_import_from_support_alone() -> None:
    """What two test files need is in `tests/support/`, so that one can be changed, split or deleted without the other."""
    for path in TESTS.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = [f"{n.module}.{a.name}" for n in nodes if isinstance(n, ast.ImportFrom) and n.module for a in n.names]
        names += [a.name for n in nodes if isinstance(n, ast.Import) for a in n.names]
        assert not [n for n in names if n.startswith("tests") and not n.startswith("tests.support.")], path.name


def test_every_module_has_its_tests_and_every_test_file_its_module() -> None:
    """By the table of CONTRIBUTING: a file that is new is named there."""
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("## Where the tests are")[2]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| ") and "`test_" in line]
    modules, patterns = ({name for row in rows for name in re.findall(r"`([^`]+)`", row[i])} for i in (0, 1))
    code = ROOT / "headprune"
    entries = [
        p for p in (*code.iterdir(), *(code / "app").iterdir()) if p.suffix == ".py" or (p / "__init__.py").exists()
    ]
    there = {p.relative_to(code).as_posix() + "/" * p.is_dir() for p in entries if p.name not in ("__init__.py", "app")}
    assert there == modules - {"headprune/", "benchmarks/"}
    files = {p.name for p in TESTS.glob("test_*.py")}
    assert files == {f for f in files if any(fnmatch(f, pattern) for pattern in patterns)}
    assert all(any(fnmatch(f, pattern) for f in files) for pattern in patterns)
