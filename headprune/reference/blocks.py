"""A model run block by block over all examples, so that the weights of one block are in memory at a time, each loaded once a pass.

As GPTQ (Frantar et al. 2022, arXiv:2210.17323) and SparseGPT (2023, arXiv:2301.00774) do it. What every block gives for every batch is
stored on disk. To run one block, the model itself is called: blocks before it answer with what they gave, and behind it the call ends. So
nothing needs to be known of how a model prepares what its blocks are given (masks, positions). The backward pass goes block by block, too:
a block runs once more from its stored input, and the slope at its output is handed down.

Only for models whose blocks run once each, one behind the other, and of which each reads the one before: `Steps.of` tries that on a few
examples, and a model of which the slopes differ in a single bit is run as a whole.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headprune.inputs import call, inputs_of
from headprune.memory import is_out_of_memory
from headprune.offload import is_offloaded, loaded
from headprune.ranks import current
from headprune.reference.runner import Runner, Seen, Stop
from headprune.reference.token_weights import probe_of
from headprune.running import blocks_of, frozen, uncached, wrapped
from headprune.scoring.kept import OpaqueError, mapped, tensors_in


class Steps:
    """The blocks of a runner's model, and what they give for its batches.

    Attributes:
        names: Of the blocks, in the order in which they run.
        own: The output projections in each, by its name.
        loops: Names of what is done for all batches, forward and backward, for whoever times it; loading weights is not part of it.
    """

    loops = ("directions", "statistics")

    def __init__(self, runner: Runner, names: Sequence[str], folder: Path) -> None:
        self.runner, self.names, self.folder = runner, list(names), folder
        self.own = {
            block: [p.name for p in runner.projections if f"{p.name}.".startswith(f"{block}.")] for block in names
        }
        self._shapes: dict[tuple[int, int], Any] = {}
        modules = dict(runner.model.named_modules())
        self._inside = [[m for n, m in modules.items() if f"{n}.".startswith(f"{block}.")] for block in names]
        within = {id(m) for block in self._inside for m in block}
        self._outside = [m for m in modules.values() if id(m) not in within]

    @classmethod
    @contextmanager
    def of(cls, runner: Runner) -> Iterator[Steps | None]:
        """The steps of a model whose weights are kept elsewhere; None for any other, and for one that does not run so."""
        alone = current().size == 1  # several processes share batches out, each its own
        names = _order(runner) if alone and is_offloaded(runner.model) else None
        if names is None:
            yield None
            return
        with tempfile.TemporaryDirectory(prefix="headprune-") as folder:
            found = cls(runner, names, Path(folder))
            yield found if found._agree() else None

    def forward(self, batches: Sequence[Any], see: Callable[[int], Any] | None = None) -> None:
        """One pass over all batches.

        Args:
            see: Called with the number of a batch while only one block runs, instead of the model: it calls the runner.
        """
        with torch.no_grad(), loaded(self._outside):
            for number, modules in enumerate(self._inside):
                with loaded(modules):
                    current().share(
                        self.loops[0], [partial(self._run, i, batch, number, see) for i, batch in enumerate(batches)]
                    )

    def _run(self, index: int, batch: Any, number: int, see: Callable[[int], Any] | None) -> None:
        """Run one block on a batch."""
        with self.only(index, number):
            if see is not None and index < len(self.runner.batches):
                see(index)
            else:
                self.runner.call(batch)

    def backward(
        self, batches: Sequence[Any], see: Callable[[int, list[str], Seen], None], progress: Callable[[int], None]
    ) -> None:
        """The slopes of every batch's probe (`probe_of`), from the last block to the first; after `forward` on the same batches.

        Args:
            see: Called for every block and batch with the batch's number, the output projections in the block, and what was seen there.
            progress: Called with the number of blocks that are done.
        """
        model = self.runner.model
        with loaded(self._outside), frozen(model):
            current().share(
                self.loops[1], [partial(self._slope_at_the_end, i, batch) for i, batch in enumerate(batches)]
            )
            for number in reversed(range(len(self.names))):
                with loaded(self._inside[number]):
                    current().share(
                        self.loops[1], [partial(self._back, i, batch, number, see) for i, batch in enumerate(batches)]
                    )
                progress(len(self.names) - number)

    def _back(self, index: int, batch: Any, number: int, see: Callable[[int, list[str], Seen], None]) -> None:
        """Run one block on a batch again, and back from there."""
        own = self.own[self.names[number]]
        seen = self._slopes(index, batch, number, own)
        if own:
            with self.only(index, number):
                see(index, own, seen)

    @contextmanager
    def only(self, index: int, number: int, leaf: Tensor | None = None) -> Iterator[None]:
        """While the context lasts, calls of the model run one block on a batch's stored input, and end there (`Stop`).

        Args:
            number: The block's; one behind the last runs what comes after all blocks.
            leaf: Stands for the first tensor of what the block before gave.
        """
        places = {name: k for k, name in enumerate(self.names)}

        def around(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
            k = places[name]

            def run(*args: Any, **kwargs: Any) -> Any:
                if k == number:
                    output = original(*args, **kwargs)
                    if (index, k) not in self._shapes:
                        self._keep(index, k, output)
                    raise Stop(output)
                return self._given(index, k, leaf) if k == number - 1 else self._hollow(index, k)

            return run

        modules = {name: self.runner.model.get_submodule(name) for name in self.names}
        with uncached(self.runner.model), wrapped(modules, around):
            yield

    # -- what blocks gave ----------------------------------------------------------------------------

    def _keep(self, index: int, k: int, output: Any) -> None:
        parts = tensors_in(output)
        if parts is None:
            raise OpaqueError
        torch.save([t.detach() for t in parts], self._path(index, k))
        self._shapes[index, k] = mapped(output, lambda t: t.detach().to("meta"))

    def _given(self, index: int, k: int, leaf: Tensor | None) -> Any:
        """What a block gave; with ``leaf`` for its first tensor."""
        parts = self.parts(index, k)
        each = iter(parts if leaf is None else [leaf, *parts[1:]])
        return mapped(self._shapes[index, k], lambda t: next(each).clone())

    def parts(self, index: int, k: int) -> list[Tensor]:
        """The tensors that a block gave for a batch."""
        found: list[Tensor] = torch.load(self._path(index, k), weights_only=True)
        return found

    def _hollow(self, index: int, k: int) -> Any:
        """Zeros of that shape, without memory, for a block that only reads them to be skipped itself."""
        device = next((p.device for p in self._outside_tensors()), torch.device("cpu"))
        return mapped(self._shapes[index, k], lambda t: torch.zeros((), dtype=t.dtype, device=device).expand(t.shape))

    def _outside_tensors(self) -> Iterator[Tensor]:
        return (t for m in self._outside for t in (*m._parameters.values(), *m._buffers.values()) if t is not None)

    def _path(self, index: int, k: int) -> Path:
        return self.folder / f"{index}-{k}.pt"

    # -- slopes ---------------------------------------------------------------------------------------

    def _slope_at_the_end(self, index: int, batch: Any) -> None:
        """Store the slope of a batch's probe at the last block's output."""
        runner, last = self.runner, len(self.names) - 1
        leaf = self.parts(index, last)[0].requires_grad_()
        with torch.enable_grad(), self.only(index, last + 1, leaf):
            output = call(runner.model, inputs_of(runner.model, batch))
            probe = probe_of(runner.model, output, batch, runner.first(index), runner.rows)
            (slope,) = torch.autograd.grad(probe, [leaf])
        torch.save(slope, self.folder / f"{index}-slope.pt")

    def _slopes(self, index: int, batch: Any, number: int, own: Sequence[str]) -> Seen:
        """What was seen at the output projections of a block; the slope at its input takes the place of that at its output."""
        path = self.folder / f"{index}-slope.pt"
        slope = torch.load(path, weights_only=True)
        leaf = self.parts(index, number - 1)[0].requires_grad_() if number else None
        seen: Seen = {name: [] for name in own}

        def add(name: str, x: Tensor, y: Tensor) -> Tensor | None:
            if name not in seen:
                return None
            seen[name].append((x.detach(), y.detach(), [torch.zeros_like(y, requires_grad=True)]))
            return y + seen[name][-1][2][0]

        with torch.enable_grad(), self.only(index, number, leaf):
            output = self.runner.run(batch, add)
            deltas = [delta for calls in seen.values() for *_, (delta,) in calls]
            reached = [*deltas, *([] if leaf is None else [leaf])]
            first = (tensors_in(output) or [torch.zeros(0)])[0]
            found = torch.autograd.grad(first, reached, slope, allow_unused=True) if reached else ()
        if leaf is not None:
            torch.save(torch.zeros_like(leaf) if found[-1] is None else found[-1], path)
        each = iter(found)
        slopes = iter([d.detach() if (g := next(each)) is None else g.to(d.device) for d in deltas])
        return {name: [(x, y, [next(slopes)]) for x, y, _ in calls] for name, calls in seen.items()}

    # -- whether a model runs so ----------------------------------------------------------------------

    def _agree(self) -> bool:
        """Whether the slopes of a few examples are the same to the bit as those of the model run as a whole."""
        runner = self.runner
        if any(p.name not in {n for own in self.own.values() for n in own} for p in runner.projections):
            return False
        index = min(range(len(runner.batches)), key=lambda i: runner.rows.size(runner.batches[i]))
        few = runner.alone(index)
        tried = Steps(few, self.names, self.folder)
        tried.loops = ("trying", "trying")
        found: Seen = {}
        try:
            tried.forward(few.batches)
            tried.backward(few.batches, lambda i, own, seen: found.update(seen), lambda done: None)
            whole = few.slopes(0)
        except Exception as error:  # a model may give what cannot be stored, or not take it
            if is_out_of_memory(error):
                raise
            return False
        finally:
            for file in self.folder.iterdir():
                file.unlink()
        return all(
            len(found.get(name, ())) == len(calls)
            and all(
                torch.equal(x, a) and torch.equal(y, b) and torch.equal(slope, c)
                for (x, y, slope), (a, b, (c,)) in zip(calls, found[name], strict=True)
            )
            for name, calls in whole.items()
        )


def _order(runner: Runner) -> list[str] | None:
    """The blocks in the order in which they run; None if one does not run exactly once."""
    blocks = blocks_of(runner.model)
    ran: list[str] = []

    def note(name: str) -> Callable[..., None]:
        return lambda module, args: ran.append(name)

    handles = [module.register_forward_pre_hook(note(name)) for name, module in blocks.items()]
    try:
        with torch.no_grad():
            runner.call(runner.alone(0).batches[0])
    finally:
        for handle in handles:
            handle.remove()
    return ran if ran and sorted(ran) == sorted(blocks) else None
