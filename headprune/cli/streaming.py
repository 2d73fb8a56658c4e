"""`headprune prune --streaming`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headprune.budgets import BUDGETS
from headprune.cli.made import prune_folder, source_of
from headprune.cli.options import Budgets, Loading, Writing, typed
from headprune.errors import HeadPruneError

if TYPE_CHECKING:
    from headprune.app.console import Console
    from headprune.app.runs import RunFolder

_FLAGS = {"seconds": "--time"}  # where an option is not named as its argument


def stream(
    model: str | None, budgets: Budgets, loading: Loading, writing: Writing, no_repair: bool, key: str, others: dict[str, Any],
    console: Console,
) -> None:  # fmt: skip
    """Cut a checkpoint that is never loaded whole.

    Args:
        key: Of the command.
        others: All else that was typed; none of it can be had here.

    Raises:
        HeadPruneError: Something was asked for that needs the model in memory, or data.
    """
    from headprune.app.folders import claimed
    from headprune.app.models import resolved
    from headprune.app.runs import command_line
    from headprune.app.streaming import check_streaming, stream_run
    from headprune.plans import PruningPlan
    from headprune.ranks import current

    _refuse(budgets, loading, others)
    assert budgets.plan is not None
    plan = PruningPlan.load(budgets.plan)
    if current().size > 1:
        raise HeadPruneError(
            "--streaming is the work of one process.", "Start it without torchrun or accelerate launch."
        )
    source = None
    if model is None:
        source = source_of(None, None, writing.output, console)
        assert source is not None
        model = source.read_run().options.model
    model = resolved(model)
    check_streaming(model, plan, no_repair)

    def choose() -> RunFolder:
        return prune_folder(None, writing.output, str(model), writing.overwrite, key)

    if writing.dry_run:
        dropped = sum(map(len, plan.drop.values()))
        console.document({"folder": str(choose().path), "plans": [plan.to_json()]})
        console.result(f"Would cut {dropped} heads from {model} and write {choose().path}. Nothing was written.")
        return
    with claimed(choose, key, command_line(), resume=not writing.no_resume, say=console.say) as folder:
        did = partial(folder.did, key, writing.overwrite)  # it may have been killed just after the end
        stream_run(model, loading.task, plan, folder, console, did)
    _print(console, folder)


def _refuse(budgets: Budgets, loading: Loading, others: dict[str, Any]) -> None:
    """Refuse what was typed and cannot be had without the model in memory."""
    flags = [BUDGETS[kind].flag for kind in budgets.asked]
    if flags or budgets.plan is None:
        raise HeadPruneError(
            f"--streaming cuts by a plan{f', and {flags[0]} would have to find one' if flags else ''}.",
            "Give --plan FILE, such as the plan.json that `headprune prune` writes.",
        )
    asked = {**typed(loading), **others}
    given = [
        name for name, value in asked.items() if name != "task" and value is not None and value != []
    ]  # 0 was typed
    given = [name for name in given if (name, loading.device) != ("device", "cpu")]
    if not given:
        return
    flag = _FLAGS.get(given[0], f"--{given[0].replace('_', '-')}")
    if given[0] == "finetune":
        raise HeadPruneError(
            f"{flag} trains the model, which --streaming never loads.",
            "Train the result: headprune finetune reports/MODEL-1/pruned-N.",
        )
    raise HeadPruneError(
        f"{flag} has no use with --streaming, which only cuts: on the CPU, in the type of the stored weights, without data.",
        f"Leave out {flag}; `headprune prune` without --streaming measures and repairs.",
    )


def _print(console: Console, folder: RunFolder) -> None:
    from headprune.amounts import size
    from headprune.app.documents import StreamedRun
    from headprune.cli.tables import print_loading
    from headprune.jsonio import SCHEMA

    done = StreamedRun.read(folder.streamed_path)
    console.result(
        f"Keeps {done.kept} of {done.total} heads; {size(done.left, 3)} of {size(done.weights, 3)} of weights. Not repaired, not measured."
    )
    console.result(f"{done.proof.told[0].upper()}{done.proof.told[1:]}")
    model = folder.path / Path(done.checkpoint)
    console.result(f"Model:  {model}")
    print_loading(console, model)
    console.document({"folder": str(folder.path), "headprune": done.kind, "schema": SCHEMA, **done.to_json()})
