"""What can be seen to be wrong before the long work begins: goals that ask for nothing, data that is cut otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from headprune.app.data import DataOptions, DataParts
from headprune.app.documents import Cut, Examples, Run
from headprune.app.runs import RunFolder
from headprune.app.workflow.config import PruneConfig
from headprune.app.workflow.scene import Scene
from headprune.app.workflow.targets import subject_for
from headprune.errors import HeadPruneError, ScoresError
from headprune.evaluation import measurable
from headprune.fingerprint import config_hash, has_identity, identity, processor_hash
from headprune.plan_search import constraints_of
from headprune.scoring import HeadScores


def check_search(config: PruneConfig, scene: Scene) -> None:
    """Refuse a search that leaves the model as it is, or names what it has not; and a model whose metric cannot be measured.

    Raises:
        HeadPruneError: All heads would stay, a layer or head is not there, or no accuracy or perplexity can be told.
    """
    _check_heads(config, scene)
    _check_metric(scene)


def _check_heads(config: PruneConfig, scene: Scene) -> None:
    """Refuse a search that leaves the model as it is, or names what it has not."""
    if config.plan is not None:
        config.plan.on(scene.layers)
        if not any(config.plan.drop.values()):
            raise HeadPruneError(
                f"The plan {config.plan_file} drops no head.", 'Name some in its `drop`, such as {"L0": [3]}.'
            )
        return
    constraints_of(config.search, scene.maskable)
    for budget in config.search.budgets:
        budget.check_dense(subject_for(budget, scene))


def _check_metric(scene: Scene) -> None:
    """Refuse a model of whose answers there will be no accuracy, or no perplexity."""
    if scene.metric in measurable(scene.model, scene.parts.report.batches()):
        return
    what, name = f"The {scene.metric} of {scene.options.model}", scene.loaded.task.name
    if scene.metric == "perplexity":
        raise HeadPruneError(
            f"{what} cannot be measured: its own loss is not the cross-entropy of its logits, nor a mean over labels.",
            f"Check --task (it is {name}), or use the Python API, which takes any loss: headprune.score(model, batches).",
        )
    raise HeadPruneError(f"{what} cannot be read off its logits.", f"Check --task (it is {name}).")


def check_scored(scene: Scene, run: Run, where: object) -> list[str]:
    """Refuse scores that were made on another scoring part than this run has.

    A run has one scoring part, for scores, repair and the report. The other two parts share no example with it,
    however they are cut, so they may be larger or smaller than they were.

    Args:
        run: The document of the run that scored.
        where: Its folder, for people.

    Returns:
        A note if the other parts are others now though they are cut alike: the data was changed.

    Raises:
        HeadPruneError: It is another one; the message names the options that make it so.
    """
    before, then, now = run.options.data, run.parts.score, Examples.of(scene.parts.score)
    if then.same(now):
        alike = not changed_options(before, scene.options.data)
        if alike and not run.parts.same(Cut.of(scene.parts)):
            return [
                f"{before.dataset} has changed since it was scored: the examples to choose or to report on are different now."
            ]
        return []
    changed = [flag for flag in changed_options(before, scene.options.data) if flag != "--report-limit"]
    if not changed:
        raise ScoresError(
            f"{before.dataset} no longer holds the examples that were scored for {where}.",
            "Score again, or restore the data.",
        )
    flags = " and ".join(changed)
    raise ScoresError(
        f"The scores in {where} are of {then.examples:,} examples of {then.split!r}; with {flags} the scoring part "
        f"is another one ({now.examples:,} of {now.split!r}), and a run has one, for scores and repair.",
        f"Leave out {flags}, or score again with {'it' if len(changed) == 1 else 'them'}.",
    )


def check_same(scene: Scene, scores: Sequence[HeadScores], source: RunFolder) -> list[str]:
    """Refuse scores of another model, or of examples that are reported; notes on what else changed since they were made.

    Raises:
        HeadPruneError: The model, its config, its tokenizer or the scored examples are others.
    """
    for s in scores:
        if not has_identity(scene.model, s.model):
            raise ScoresError(
                f"The scores in {source.scores_path} are of another model than {scene.options.model} (fingerprint {s.model}, "
                f"this one is {identity(scene.model)}).",
                "Score this model first, or leave it out to prune the one that was scored.",
            )
    run = source.read_run()
    for what in run.model.other_now(run.environment, config_hash(scene.model), processor_hash(scene.loaded.processor)):
        raise ScoresError(
            f"The {what} of {scene.options.model} has changed since {source.path} was scored.",
            "Restore it, or score again.",
        )
    notes = check_scored(scene, run, source.path)
    scene.parts.notes.extend(notes)
    return notes


def seen_before(parts: DataParts, before: DataParts, same_data: bool) -> int:
    """How many examples to report scored or chose the heads before.

    Args:
        same_data: Whether both are of one dataset, so that row numbers tell too: the same text may be cut elsewhere now.
    """
    used = (before.score, before.choose)
    inputs = {key for part in used for key in part.inputs}
    rows = {(part.split, row) for part in used for row in part.rows} if same_data else set()
    report = parts.report
    return sum(
        key in inputs or (report.split, row) in rows for key, row in zip(report.inputs, report.rows, strict=True)
    )


def changed_options(before: DataOptions, now: DataOptions) -> list[str]:
    """The flags by which examples are cut otherwise than before."""
    names = [f.name for f in fields(DataOptions) if f.name not in ("batch_size", "also")]
    return [f"--{n.replace('_', '-')}" for n in names if getattr(before, n) != getattr(now, n)]
