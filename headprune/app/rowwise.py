"""A step of training whose batch is shared out among ranks by rows, with the gradients of the whole batch.

Every rank computes the losses of its rows, and the gradients are summed: those of the mean over all rows, however many each
rank has. Dropout draws for the whole batch on every rank, which uses its rows of that: on a CPU a step is the same as on one
process but for rounding. On a GPU dropout has kernels that draw by themselves, and differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from headprune.batches import Rows, apparent_size
from headprune.ranks import Ranks, current

_SAME = 1e-4  # relative: how much losses may differ between rows in a batch and rows alone


class Shared:
    """Losses of the batches of a training, shared out by rows where that gives the same.

    Args:
        model: What is trained.
        loss: ``loss(batch)`` gives one loss for every row, ``[batch]``.
        rows: How examples lie in batches.
        examples: Gives batches to try it on: the largest is taken. The model is in evaluation mode.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Mapping[str, Any]], Tensor],
        rows: Rows,
        examples: Callable[[], Sequence[Any]],
    ) -> None:
        self.model, self.loss, self.rows = model, loss, rows
        self.ranks = current()
        self.by_rows = self.ranks.size > 1 and self._fits(max(examples(), key=apparent_size))

    def backward(self, batch: Mapping[str, Any]) -> Tensor:
        """Add the gradients of a batch's mean loss, and give that loss; both the same on all ranks."""
        if not self.by_rows:
            mean = self.loss(batch).mean()
            if mean.isfinite():
                mean.backward()  # type: ignore[no-untyped-call]
            return mean.detach()
        size = apparent_size(batch)
        first, last = own_rows(size, self.ranks)
        total = torch.zeros(1, dtype=torch.float64)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        if last > first:
            with _Draws(size, first, last):
                mean = self.loss(self.rows.take(batch, range(first, last))).sum() / size
                mean.backward()  # type: ignore[no-untyped-call]
            total += mean.detach().cpu().double()
        # Weights that a loss does not depend on have no gradient, and the optimizer leaves them as they are.
        has = self.ranks.gather("which have gradients", [p.grad is not None for p in trained])
        reached = [p for p, each in zip(trained, zip(*has, strict=True), strict=True) if any(each)]
        each = [torch.zeros_like(p) if p.grad is None else p.grad for p in reached]
        wide = torch.float64 if any(grad.dtype == torch.float64 for grad in each) else torch.float32
        flat = torch.cat([grad.flatten().to(wide) for grad in each])
        self.ranks.add("gradients", [flat])
        self.ranks.add("loss", [total])
        for parameter, part in zip(reached, torch.split(flat, [p.numel() for p in reached]), strict=True):
            parameter.grad = part.view_as(parameter).to(parameter)
        return total[0]

    def _fits(self, example: Any) -> bool:
        """Whether a row's loss is the same in a batch and apart from it, and nothing else mixes rows in training."""
        if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in self.model.modules()):
            return False
        size = apparent_size(example)
        with torch.no_grad():
            whole = self.loss(example)
            if size < 2 or whole.shape != (size,):
                return False
            alone = torch.cat([self.loss(self.rows.take(example, [i])) for i in range(min(size, 3))])
        near = bool((alone - whole[: len(alone)]).abs().max() <= _SAME * whole.abs().max().clamp(min=1e-12))
        return self.ranks.first("by rows", lambda: near)


def own_rows(size: int, ranks: Ranks) -> tuple[int, int]:
    """The first of a rank's rows of a batch, and the one behind its last: equally many on all, but for one."""
    return ranks.rank * size // ranks.size, (ranks.rank + 1) * size // ranks.size


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What is drawn at random for some rows of a batch is drawn for all, and the rows' part used."""

    def __init__(self, size: int, first: int, last: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.size, self.first, self.last = size, first, last

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.ops.aten.bernoulli_.float or args[0].device.type != "cpu":
            return func(*args, **kwargs)
        return args[0].copy_(self._whole(args[0], *args[1:], **kwargs))

    def _whole(self, like: Tensor, chance: float = 0.5, **more: Any) -> Tensor:
        rows = self.last - self.first
        if not like.ndim or like.shape[0] % rows:  # not by rows
            return torch.empty_like(like).bernoulli_(chance, **more)
        each = like.shape[0] // rows
        shape = [each * self.size, *like.shape[1:]]
        order = sorted(
            range(like.ndim), key=lambda d: (-like.stride()[d], d)
        )  # numbers are drawn as they lie in memory
        whole = like.new_empty([shape[d] for d in order]).permute([order.index(d) for d in range(like.ndim)])
        return whole.bernoulli_(chance, **more)[each * self.first : each * self.last]
