"""What several processes do together in tests of `headprune.parallel`: each function is called in every one of them."""

from __future__ import annotations

import copy
import os
import signal
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from torch import Tensor, nn

import headprune as hp
from headprune.app.runs import Folder, claimed
from headprune.errors import HeadPruneError
from headprune.parallel import Ranks, current, launcher_ranks
from headprune.scoring import Settings
from tests.support.zoo import bert, labelled, randomise, sizes, text


def small() -> tuple[nn.Module, list[dict[str, Tensor]]]:
    """A BERT with three layers of four heads, and batches of 6, 2, 5, 4 and (ragged) 1 examples."""
    model, _ = bert()
    return model, [labelled(model, text(rows, 7, seed=rows), seed=rows) for rows in (6, 2, 5, 4, 1)]


def threads_left() -> list[str]:
    """Names of gloo's threads once the ranks have parted, where a library was first imported while they were together."""
    for name in [name for name in sys.modules if name.startswith("torch.distributed.nn.")]:
        del sys.modules[name]
    with launcher_ranks():
        import_module("torch.distributed.nn.functional")
    return [name for file in Path("/proc/self/task").glob("*/comm") if "gloo" in (name := file.read_text())]


def scores_by(method: str, count: int = 5, work: str = "", **settings: Any) -> dict[str, Any]:
    """Scores of the small model on its first batches."""
    model, batches = small()
    scores = hp.score(
        model, batches[:count], method, seed=3, settings=Settings(**settings), work=Path(work) if work else None
    )
    return scores.to_json()


def scored(methods: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Scores of the small model by methods, each with its settings, by ranks."""
    with launcher_ranks():
        return [scores_by(method, **settings) for method, settings in methods]


def pruned(strategy: str = "auto", effort: str = "normal") -> dict[str, Any]:
    """The small model searched, repaired, pruned and evaluated; numbers and weights of all that comes out."""
    model, _ = small()
    model = model.double()
    batches = [labelled(model, text(rows, 7, seed=rows), seed=rows) for rows in (24, 30, 20, 27, 1)]
    held_out = [labelled(model, text(rows, 7, seed=90 + rows), seed=rows) for rows in (3, 5)]
    with launcher_ranks() as ranks:
        plans = hp.search(model, batches, [8, 4], choose=held_out, strategy=strategy, effort=effort)
        before = hp.evaluate(model, held_out)
        repair = hp.repair(model, plans[1], batches)
        hp.prune(model, plans[1], batches[0])
        after = hp.evaluate(model, held_out)
    return {
        "plans": [plan.to_json() for plan in plans],
        "repair": repair.to_json(),
        "weights": torch.cat([p.detach().flatten() for p in model.parameters()]),
        "losses": torch.from_numpy(after.loss),
        "metrics": {**before.metrics, **{f"after {k}": v for k, v in after.metrics.items()}},
        "size": ranks.size,
    }


def together(kinds: list[str]) -> list[Any]:
    """Small things that ranks do, one after the other."""
    with launcher_ranks() as ranks:
        return [KINDS[kind](ranks) for kind in kinds]


def _asked(ranks: Ranks) -> Any:
    """A folder claimed by ranks that were given different options, such as a learning rate."""
    try:
        with claimed(lambda: Folder(Path("r")), f"key {ranks.rank}", "headprune finetune", say=print):
            return "went on"
    except HeadPruneError as error:
        return str(error), Path("r").exists()


def _order(ranks: Ranks) -> Any:
    """Which rank did what, and that tasks know of no others."""
    tasks = [partial(lambda i: (i, ranks.rank, current().size), i) for i in range(7)]
    return (
        ranks.share("in turn", tasks),
        ranks.share("by cost", tasks, [1.0, 1, 1, 1, 1, 1, 9]),
        ranks.share("none", []),
    )


def _sums(ranks: Ranks) -> Any:
    whole = torch.full((3, 2), ranks.rank + 1.0, dtype=torch.float64)
    ranks.add("sums", [part := whole[:, 1], whole[:, 0]])
    return whole, part, ranks.gather("numbers", ranks.rank), ranks.first("first", lambda: ranks.rank)


def _fails(ranks: Ranks) -> Any:
    """Tasks 2, 3 and 5 fail; everybody hears of 2, and goes on."""

    def task(i: int) -> int:
        if i in (2, 3, 5):
            raise HeadPruneError(f"Task {i} fails.", "Give it up.")
        return i

    try:
        ranks.share("failing", [partial(task, i) for i in range(7)])
    except HeadPruneError as error:
        return str(error.args[0]), error.hint, ranks.gather("after", ranks.rank)
    return None


def _strange(ranks: Ranks) -> Any:
    """An error of a class that no other process can know."""

    class StrangeError(Exception):
        pass

    def task() -> None:
        raise StrangeError("so be it")

    try:
        ranks.share("strange", [lambda: None, task])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _alone(ranks: Ranks) -> Any:
    """Rank 1 fails where the others do not."""
    try:
        with_one = ranks.share("together", [lambda: 1])
        if ranks.rank == 1:
            raise HeadPruneError("Only here.", "Look there.")
        return ranks.share("never", with_one)
    except HeadPruneError as error:
        if ranks.rank == 1:
            raise
        return str(error)


def _steps(ranks: Ranks) -> Any:
    try:
        ranks.gather("one" if ranks.rank else "other", 1)
    except HeadPruneError as error:
        return str(error.args[0])
    return None


def _gone(ranks: Ranks) -> Any:
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        ranks.gather("somebody", 1)
    except HeadPruneError as error:
        return str(error)
    return None


KINDS = {f.__name__[1:]: f for f in (_asked, _order, _sums, _fails, _strange, _alone, _steps, _gone)}


def accelerated(what: str) -> Any:
    """By an Accelerator."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, batches = small()
    if what == "nothing":  # a process group alone shares nothing
        model.calls = 0  # type: ignore[assignment]

        def count(*_: Any) -> None:
            model.calls += 1  # type: ignore[operator]

        model.register_forward_hook(count)
        hp.evaluate(model, batches)
        return model.calls
    if what == "other":
        batches = batches[accelerator.process_index :]
    if what == "wrapped":
        model = nn.parallel.DistributedDataParallel(model)
    try:
        scores = hp.score(model, batches, "ablation", accelerator=accelerator)
        return scores.to_json(), hp.evaluate(model, batches, accelerator=accelerator).metrics
    except HeadPruneError as error:
        return str(error)


def finetuned(
    dropout: float = 0.1, alpha: float = 0.5, hidden: bool = False, steps: int = 6, work: str = "work"
) -> dict[str, Any]:
    """The small model trained after heads went, on batches of 6, 2, 5, 4 and 1 rows; its weights and what was measured."""
    from headprune.app import finetune
    from headprune.app.options import FinetuneOptions, Mixture
    from tests.support.finetuning import tuned

    dropouts = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    config = tf.BertConfig(**sizes("sdpa", num_hidden_layers=2, **dropouts))
    dense = randomise(tf.BertForSequenceClassification(config)).double()
    batches = [labelled(dense, text(rows, 7, seed=rows), seed=rows) for rows in (6, 2, 5, 4, 1)]
    pruned = copy.deepcopy(dense)
    hp.prune(pruned, {hp.find_attention(pruned, batches[0])[0].name: [1, 2]}, batches[0])
    options = FinetuneOptions(
        epochs=steps / 5, seed=1, learning_rate=1e-3, mixture=Mixture(alpha=alpha, hidden_states=hidden)
    )
    rows: set[int] = set()
    loss = finetune.DistillationLoss.forward

    def noting(self: Any, batch: Any) -> Tensor:
        if self.student.training:
            rows.add(len(batch["labels"]))
        return loss(self, batch)

    finetune.DistillationLoss.forward = noting  # type: ignore[method-assign]
    with launcher_ranks():
        model, training = tuned(pruned, dense, batches, batches[:2], Path(work), options)
    return {
        "weights": torch.cat([p.detach().flatten() for p in model.parameters()]),
        "history": training.history,
        "best": training.best,
        "largest": max(rows),
        "moved": float((next(model.parameters()) - next(pruned.parameters())).detach().abs().max()),
    }
