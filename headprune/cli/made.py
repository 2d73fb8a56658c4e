"""From what was typed to what the workflow takes: options, goals, and the runs that are read and written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from headprune.budgets import BUDGETS, Budget
from headprune.cli.asked import bytes_of
from headprune.cli.options import Budgets, Data, Loading, Placing, Planning, Scoring, typed
from headprune.errors import HeadPruneError

if TYPE_CHECKING:
    from headprune.app.console import Console
    from headprune.app.runs import RunFolder
    from headprune.app.workflow import Options
    from headprune.plans import PruningPlan
    from headprune.searching import SearchOptions


def key_of(command: str, *groups: Any, **others: Any) -> str:
    """A name for what was typed: whoever types the same again continues that work.

    Args:
        groups: Groups of options.
        others: Further arguments. What changes only how a command tells of itself does not belong here.
    """
    from headprune.app.folders import key_of as name

    given = dict(others)
    for group in groups:
        given |= {k: v for k, v in vars(group).items() if k not in ("dry_run", "no_resume")}
    return name(command, sorted(given.items()))


def options_of(
    source: RunFolder | None,
    model: str | None,
    data: Data,
    scoring: Scoring,
    loading: Loading,
    seed: int | None,
    keep: str | None,
    also: list[str] | None = None,
    placing: Placing | None = None,
) -> Options:
    """What was typed, over what the scores' run was made with, over the defaults.

    Raises:
        HeadPruneError: No dataset; a value that is surely wrong.
    """
    from dataclasses import replace

    from headprune.app.data import DataOptions
    from headprune.app.workflow import Options
    from headprune.scoring import Settings

    known = {"model": model, "seed": seed, "keep": keep, "distil": scoring.distil or None}
    own = {**typed(loading), **(typed(placing) if placing else {}), **{k: v for k, v in known.items() if v is not None}}
    examples = {**typed(data), **({} if seed is None else {"seed": seed}), **({"also": tuple(also)} if also else {})}
    told = typed(scoring)
    told.pop("distil", None)
    if "max_memory" in told:
        told["max_memory"] = bytes_of(told["max_memory"])
    if source is not None:
        base = source.read_run().options
        found = replace(base, **own, data=replace(base.data, **examples), scoring=Settings(**told))
    elif data.dataset is None:
        raise HeadPruneError(
            "No dataset was given.", "Name one with -d, for instance: -d stanfordnlp/imdb, or -d data/train.jsonl."
        )
    else:
        found = Options(**own, data=DataOptions(**examples), scoring=Settings(**told))
    found.check()
    return found


def search_of(budgets: Budgets, planning: Planning, no_repair: bool, seed: int) -> SearchOptions:
    """What is searched for: budgets of one kind, with their constraints.

    Raises:
        HeadPruneError: No budget, two kinds of them, or an unknown strategy or effort.
    """
    from headprune.planning import strategy_named
    from headprune.planning.effort import effort_named
    from headprune.searching import SearchOptions

    return SearchOptions(
        _budgets(budgets),
        strategy_named(planning.strategy or "auto").name,
        planning.protect or "",
        planning.min_heads_per_layer or 0,
        not no_repair,
        effort_named(planning.effort or "normal").name,
        seed,
    )


def plan_of(budgets: Budgets, planning: Planning, method: list[str] | None) -> PruningPlan | None:
    """The plan's file that was given, read.

    Raises:
        HeadPruneError: No plan, or one together with what would change it.
    """
    from headprune.plans import PruningPlan

    if budgets.plan is None:
        return None
    changing = {**vars(planning), "method": method}
    if useless := [name for name, value in changing.items() if value is not None]:
        flag = f"--{useless[0].replace('_', '-')}"
        raise HeadPruneError(f"--plan says which heads go, so {flag} has no use.", f"Leave out {flag}.")
    return PruningPlan.load(budgets.plan)


def check_epochs(finetune: float | None) -> None:
    """Refuse what is no number of epochs.

    Raises:
        HeadPruneError: It is not above 0, or not finite.
    """
    if finetune is not None and not 0 < finetune < float("inf"):
        raise HeadPruneError(f"--finetune {finetune:g} is no number of epochs.", "Give 1, or a fraction.")


def _budgets(given: Budgets) -> tuple[Budget, ...]:
    """The budgets that were given, of one kind; none where a plan was."""
    flags = [BUDGETS[kind].flag for kind in given.asked] + (["--plan"] if given.plan else [])
    if not flags:
        raise HeadPruneError(
            "How many heads to keep?",
            "Say it with --keep, for instance --keep 50%, or with another budget (headprune prune --help).",
        )
    if len(flags) > 1:
        hint = "Give one of them."
        if (drop := BUDGETS["drop"].flag) in flags:
            hint += f" {drop} keeps the fewest heads that it allows: what that run reports of speed and size is the most that this loss can buy."
        raise HeadPruneError(f"{' and '.join(flags)} are different kinds of budget.", hint)
    found = tuple(BUDGETS[kind].parse(text) for kind, texts in given.asked.items() for text in texts)
    for budget in found:
        budget.check()
    return found


def source_of(model: str | None, scores: Path | None, output: Path | None, console: Console) -> RunFolder | None:
    """The run whose scores `prune` uses, if any.

    Raises:
        HeadPruneError: There is no such run; there are no scores, and no model was named.
    """
    from headprune.app.runs import REPORTS, RunFolder, newest_scores

    if scores is not None:
        if not scores.exists():
            raise HeadPruneError(f"There is no file or folder {scores}.", "Pass a run folder, or its scores.json.")
        folder = RunFolder(scores if scores.is_dir() else scores.parent)
        if not scores.is_dir() and scores.name != folder.scores_path.name:
            raise HeadPruneError(f"{scores} is not a run's scores.json.", "Pass a run folder, or its scores.json.")
        folder.read_scores()
        return folder
    found = newest_scores(output, model)
    if found is None and model is None:
        raise HeadPruneError(
            f"There are no scores in {output or REPORTS}.",
            "Run `headprune score MODEL -d DATASET` first, or name a MODEL.",
        )
    if found is not None:
        console.say(f"Using the scores in {found.path}")
    return found


def prune_folder(source: RunFolder | None, output: Path | None, model: str, overwrite: bool, key: str) -> RunFolder:
    """Where `prune` writes: the scores' own run, unless that was pruned before, or another prune was interrupted there.

    Raises:
        HeadPruneError: That folder is taken.
    """
    from headprune.app.runs import choose_folder

    if source is not None and output in (None, source.path, source.path.parent):
        free = not source.pruned or overwrite or source.done_by(key)
        if free and (output == source.path or source.command is None or source.left_by(key)):
            return source
        if output == source.path:
            raise HeadPruneError(
                f"{source.path} was pruned before.", "Choose another folder with -o, or add --overwrite."
            )
        output = None
    return choose_folder(output, Path(model.rstrip("/")).name, overwrite, key)
