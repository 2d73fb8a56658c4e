"""The line before a run, on what it will cost: always there, and nothing is left changed."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from headprune.app import workflow
from headprune.app.data import DataOptions
from headprune.app.options import Options
from headprune.app.workflow import Goal, cost
from headprune.budgets import budget_of
from headprune.fingerprint import fingerprint
from tests.support.commands import PRUNE, Silent, run


def one_line(text: str) -> str:
    """As it was before the terminal wrapped it."""
    return " ".join(text.split())


LINE = r"Roughly .*: (\d+) forward passes over 40 examples"


def test_every_run_says_what_it_will_take(bert_folder: Path, data_folder: Path, here: Path, brief: None) -> None:
    """Most runs said nothing."""
    given = [bert_folder, "-d", data_folder, "-L", 40]
    assert re.search(LINE, one_line(run("score", *given, "--dry-run").stdout))
    assert re.search(LINE, one_line(run("prune", *given, "-k", 4, "--dry-run").stderr))
    loud = [each for each in PRUNE if each != "-q"]
    assert re.search(LINE, one_line(run(*loud, 4, *given).stderr))
    assert re.search(LINE, one_line(run(*loud, 6).stderr)), "with scores that are there"


def test_passes_are_those_that_are_counted(bert_folder: Path, data_folder: Path) -> None:
    scene = workflow.open_scene(Options(str(bert_folder), DataOptions(str(data_folder), limit=40)), Silent())
    state, random = fingerprint(scene.model), torch.get_rng_state()
    grads = [p.requires_grad for p in scene.model.parameters()]
    heads = sum(layer.num_heads for layer in scene.maskable)
    assert workflow.cost_of_scores(scene, ["gradient"]).passes == 3
    assert workflow.cost_of_scores(scene, ["ablation", "random"]).passes == 1 + heads / 2
    one, two = (Goal(tuple(budget_of(f"keep {k}") for k in keep)) for keep in ((4,), (4, 6)))
    least, more = (workflow.cost_of_pruning(scene, goal, ["gradient"]) for goal in (one, two))
    assert 3 < least.passes < more.passes
    assert min(least.seconds, more.seconds) > 0
    assert fingerprint(scene.model) == state
    assert [p.requires_grad for p in scene.model.parameters()] == grads
    assert torch.equal(torch.get_rng_state(), random)


def test_what_cannot_be_told_stops_nothing() -> None:
    def failing() -> cost.Cost:
        raise RuntimeError("no\nsuch kernel")

    console = Silent()
    cost.announce(console, failing)
    assert len(console.said) == 1
    assert "RuntimeError: no" in console.said[0]


def test_a_quick_mode_is_named_with_its_time() -> None:
    console = Silent()
    cost.announce(console, lambda: cost.Cost(90, 600, 40), lambda: cost.Cost(20, 60, 40))
    cost.announce(console, lambda: cost.Cost(90, 600, 40), lambda: cost.Cost(80, 590, 40))
    assert "With --effort low about 60 s" in console.said[0]
    assert "--effort low" not in console.said[1]
