"""What `headprune prune --streaming` does: a checkpoint is cut by a plan, and never loaded whole."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from headprune.app import runs
from headprune.app.documents import StreamedProof, StreamedRun
from headprune.app.models import config_of, processor_of, task_of
from headprune.app.runs import PARTS, RunFolder
from headprune.app.workflow import Console
from headprune.errors import HeadPruneError
from headprune.fingerprint import versions
from headprune.planning import strategy_named
from headprune.plans import PruningPlan
from headprune.store import digest
from headprune.streaming import check_source, cut_checkpoint

_NOTHING = {"revision": None, "trust_remote_code": False}


def check_streaming(model: str, plan: PruningPlan, no_repair: bool) -> None:
    """Refuse what cannot be streamed, before anything is read but headers.

    Raises:
        HeadPruneError: A plan that counts on repair, or a model that would have to be loaded.
    """
    if plan.strategy and strategy_named(plan.strategy).runs_model and not no_repair:
        raise HeadPruneError(
            f"This plan (--strategy {plan.strategy}) counts on a repair of the heads that stay, which needs statistics of the whole model, so "
            "it cannot be streamed.",
            "Add --no-repair to cut without it, and measure the result; or leave out --streaming.",
        )
    check_source(Path(model))


def stream_run(
    model: str,
    task: str | None,
    plan: PruningPlan,
    folder: RunFolder,
    console: Console,
    did: Callable[[str], bool] = lambda of: False,
) -> StreamedRun:
    """Cut a checkpoint by a plan, and write the plan, the cut checkpoint and what was proved of it.

    Args:
        model: A folder.
        folder: Where to write; it changes when all is done.
        did: Whether that was done already, of this plan and these files (`Folder.already_published`).
    """
    files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(Path(model).iterdir())]
    if did(of := digest(versions(), plan.to_json(), files)):  # to read them would take as long as to cut them
        return StreamedRun.read(folder.streamed_path)
    kind = task_of(config_of(model, _NOTHING), task, model)
    processor = processor_of(model, kind, _NOTHING)
    content = RunFolder(folder.unfinished / "content")
    shutil.rmtree(content.path, ignore_errors=True)  # of a run that was killed; nothing of it is used
    console.say(f"cutting {model} in its files, and proving the result …")
    made = cut_checkpoint(
        model,
        plan,
        content.path / "pruned",
        processor=processor,
        overwrite=True,
        about={"task": kind.name, "from": model},
    )
    place = content.checkpoint_path(made.kept)
    made.path.rename(place)
    same = (made.kept, made.total) == (plan.kept, plan.total)
    counted = (
        replace(plan, drop=made.drop)
        if same
        else PruningPlan(made.drop, made.kept, made.total, made.kept, model=plan.model)
    )
    counted.save(content.plan_path(made.kept, first=True))
    proof = StreamedProof(**asdict(made.proof), reload_difference=made.reload_difference, told=made.told())
    done = StreamedRun(
        command=runs.command_line(), when=runs.now(), environment=runs.environment("cpu"), model=model, task=kind.name,
        kept=made.kept, total=made.total, checkpoint=place.name, loads=made.loads.call(), proof=proof, weights=made.weights,
        left=made.left, files=made.files, in_memory=made.in_memory, seconds=made.seconds,
    )  # fmt: skip
    done.write(content.streamed_path)
    folder.publish(content.path, PARTS, of)
    return done
