"""From what was typed to what the workflow takes: options, the run whose scores are used, and the folder that is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headprune.app.options import DataOptions, LoadOptions, Options
from headprune.cli.options import Typed
from headprune.errors import HeadPruneError, ScoresError

if TYPE_CHECKING:
    from headprune.app.console import Console
    from headprune.app.runs import RunFolder
    from headprune.app.workflow import PruneConfig


def key_of(command: str, **given: Any) -> str:
    """A name for what was typed: whoever types the same again continues that work.

    Args:
        given: All arguments that change what is done, and not only how the command tells of it.
    """
    from headprune.app.folders import key_of as name

    return name(command, sorted(given.items()))


def options_of(
    source: RunFolder | None, model: str | None, data: DataOptions, loading: LoadOptions, typed: Typed, **more: Any
) -> Options:
    """What was typed, over what the scores' run was made with, over the defaults.

    Args:
        more: Further fields of `Options`; those that were not typed are left out.

    Raises:
        HeadPruneError: No dataset; a value that is surely wrong.
    """
    own = {name: value for name, value in more.items() if name != "seed" or "seed" in typed}
    if "seed" in own:
        data = replace(data, seed=own["seed"])
    if source is None:
        options = Options(model or "", data, loading, **own)
    else:
        base = source.read_run().options
        options = replace(
            base,
            model=model or base.model,
            data=replace(base.data, **_typed(data, typed)),
            loading=replace(base.loading, **_typed(loading, typed)),
            **own,
        )
    options.check()
    return options


def _typed(group: Any, typed: Typed) -> dict[str, Any]:
    """The fields of options that were typed."""
    return {field.name: getattr(group, field.name) for field in fields(group) if field.name in typed}


def known_methods(texts: Sequence[str]) -> tuple[str, ...]:
    """The scoring methods that were typed, with their settings, each once.

    Raises:
        HeadPruneError: There is no such method or setting, or a method stands twice.
    """
    from headprune.scoring import method_named
    from headprune.scoring.base import method_and_settings

    names = [method_named(method_and_settings(text)[0]).name for text in dict.fromkeys(texts)]
    if twice := [name for i, name in enumerate(names) if name in names[:i]]:
        raise HeadPruneError(f"--method {twice[0]} is there twice, with different settings.", "Give it once.")
    return tuple(dict.fromkeys(texts))


def refuse_unused(config: PruneConfig, distil: bool) -> None:
    """Refuse options for scoring where nothing will be scored: to ignore them would be to mislead.

    Raises:
        HeadPruneError: There is one.
    """
    if not config.uses_scores and (config.methods or distil):
        why = "a plan says which heads go" if config.plan else f"--strategy {config.search.strategy} takes no scores"
        flag = "--method" if config.methods else "--distil"
        raise HeadPruneError(f"{flag} has no use here: {why}.", f"Leave out {flag}.")
    if config.source is None:
        return
    late = "--distil" if distil else next((f"--method {method}" for method in config.methods if ":" in method), None)
    if late:
        raise ScoresError(
            f"{late} has no use here: the scores in {config.source.path} are made already.",
            f"Leave it out, or score anew: `headprune score` with {late}, or here with another folder by -o.",
        )


def scores_first(strategy: str, methods: Sequence[str]) -> str:
    """What is going to be scored, where there are no scores yet."""
    line = f"There are no scores yet: heads are scored by {' and '.join(methods)} first"
    if strategy != "auto":
        return f"{line}."
    return f"{line}, which is enough for auto, as it makes orders of its own (-m ablation -m gradient scores by both)."


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
    newest = newest_scores(output, model)
    if newest is None and model is None:
        raise HeadPruneError(
            f"There are no scores in {output or REPORTS}.",
            "Run `headprune score MODEL -d DATASET` first, or name a MODEL.",
        )
    if newest is not None:
        console.say(f"Using the scores in {newest.path}")
    return newest


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


_LARGEST = 1_000_000  # examples in a batch, or tokens in a text, that anyone may want to time


def numbers_in(flag: str, text: str) -> list[int]:
    """Numbers from a list such as ``1,8,32``.

    Raises:
        HeadPruneError: It is none.
    """
    try:
        numbers = [int(n) for n in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1 or max(numbers) > _LARGEST:
        raise HeadPruneError(
            f"{flag} {text!r} is no list of numbers from 1 to {_LARGEST:,}.", f"Write it as {flag} 1,8,32."
        )
    return numbers
