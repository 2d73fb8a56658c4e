"""Runs a model on calibration examples, with hooks that record or replace its output and value projections' outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from headprune.attention import AttentionLayer
from headprune.batches import cost_of, find_rows, is_out_of_memory, nonempty
from headprune.divergence import DenseRuns, real_tokens
from headprune.errors import HeadPruneError
from headprune.inputs import call, inputs_of, model_device, move, tensors, usable, widened
from headprune.parallel import current
from headprune.repairing.examples import logits_by_example, probe_of
from headprune.repairing.mixtures import Mixed, blocks_of, mixed_images, mixed_texts, mixes_only, mixtures_of_each
from headprune.repairing.projections import FOLDS, OutputProjection, Values, at
from headprune.running import checkpointed, frozen, no_progress, quiet, recomputing, wrapped
from headprune.scoring.base import Problem
from headprune.scoring.gradient import independent

T = TypeVar("T")
OnCall = Callable[[str, Tensor, Tensor], Tensor | None]
"""``(name, input, output)``: called for each call of a projection; may return another output."""
Calls = dict[str, list[Tensor]]
"""A tensor for every call of an output projection, by its name."""
Seen = dict[str, list[tuple[Tensor, Tensor, list[Tensor]]]]
"""By linear layer, for every call: the input, the output, and the gradients of some sums of the answers there."""


class Runner:
    """A model and its calibration examples.

    Args:
        projections: The output projections to watch.
        batches: Calibration examples.

    Attributes:
        batches: The non-empty ones, on the model's device; of one example each, if a projection mixes examples up.
        examples: Number of examples.
        rows: How examples lie in the batches.
        mixtures: Of the examples (`headprune.repairing.mixtures`).
        draw: Of the mixtures' pairs; 0 for those that the examples' sums include.
        images: Whether they are mixtures of images.
        seen: How many examples the model was run on so far, a backward pass counting as two.
        dense: The dense model's outputs on any of `batches`, by number, many times.
        dense_answers: The dense model's `answers_to` batches of `everything`, by number, once they are measured.
    """

    def __init__(self, model: nn.Module, projections: Sequence[OutputProjection], batches: Sequence[Any]) -> None:
        self.model, self.projections = model, projections
        self.seen = 0.0
        device = model_device(model)
        with torch.inference_mode(False):
            self.batches = [usable(move(batch, device)) for batch in nonempty(batches, "repair on")]
        with torch.inference_mode(False), self.deterministic_eval():
            self.rows = find_rows(model, self.batches, lambda batch: tensors(call(model, inputs_of(model, batch))))
        self.examples = sum(map(self.rows.size, self.batches))
        self.mixtures: tuple[Mixed, ...] = ()
        self.draw = 0
        self.images = False
        self.dense = DenseRuns(model)
        self.dense_answers: dict[int, Tensor] = {}
        if not self._independent():
            self.batches = [row for batch in self.batches for row in self.rows.singles(batch)]

    @property
    def passes(self) -> float:
        """Forward passes over all examples so far, a backward pass counting as two."""
        return self.seen / self.examples

    def count(self, examples: float) -> None:
        """Add examples that the model was run on to `passes`; a backward pass counts as two."""
        self.seen += examples

    def share(
        self,
        name: str,
        tasks: Sequence[Callable[[], T]],
        batches: Sequence[Any] = (),
        progress: Callable[[int, int], None] | None = None,
    ) -> list[T]:
        """The results of tasks that ranks share out (`headprune.parallel.Ranks.share`); counts the passes of all ranks.

        Args:
            batches: Each task's batch, if it has one; its size tells how long the task takes.
        """
        before, ranks = self.seen, current()
        results = ranks.share(name, tasks, [cost_of(batch) for batch in batches] or None, progress)
        if ranks.size > 1:
            self.seen = before + sum(ranks.gather(f"passes of {name}", self.seen - before))
        return results

    def deterministic_eval(self) -> AbstractContextManager[None]:
        """Context for evaluation mode without a cache, with attention that computes every head by itself."""
        return quiet(self.model, attributes=False)

    @cached_property
    def tokens(self) -> int:
        """About how many tokens the layers read of the examples, with padding."""

        def size(batch: Any) -> int:
            return max(t.shape[:2].numel() for t in tensors(batch))

        # Of samples of sound, and of pixels, convolutions make another number of tokens.
        one, seen = self.rows.take(max(self.batches, key=size), [0]), [0]
        with torch.no_grad(), self.deterministic_eval():
            self.run(one, lambda name, x, y: seen.append(x.shape[:-1].numel()))
        self.count(1)
        return round(sum(map(size, self.batches)) * (max(seen) / size(one) or 1))

    def first(self, index: int) -> int:
        """The number of the first example of a batch of `everything`."""
        return sum(map(self.rows.size, self.everything[:index]))

    @property
    def blocks(self) -> Tensor:
        """The number of every example's block, ``[examples]``; mixtures join examples of one block only."""
        return blocks_of(self.examples, self.draw)

    @property
    def everything(self) -> list[Any]:
        """All batches: those of examples, then those of mixtures."""
        return [*self.batches, *(mixed.inputs for mixed in self.mixtures)]

    @property
    def own(self) -> Sequence[int]:
        """The numbers of the batches of `everything` that are no mixtures."""
        return range(len(self.batches))

    @property
    def mixed_only(self) -> bool:
        """Whether mixtures are fitted to in the examples' place, not as well."""
        # An image's mixtures are mostly that image, so the image stays beside them.
        return bool(self.mixtures) and (mixes_only(self.examples) or (self.draw > 0 and not self.images))

    @property
    def fitted(self) -> Sequence[int]:
        """The numbers of the batches of `everything` that are fitted to."""
        return range(len(self.batches) if self.mixed_only else 0, len(self.everything))

    def size(self, index: int) -> int:
        """Number of examples or mixtures in a batch of `everything`."""
        return len(self.numbers(index))

    def numbers(self, index: int) -> Tensor:
        """Example numbers of a batch of `everything`, ``[examples]``; a mixture has that of its first half."""
        if index >= len(self.batches):
            return self.mixtures[index - len(self.batches)].firsts
        return self.first(index) + torch.arange(self.rows.size(self.batches[index]))

    def fold(self, index: int) -> Tensor:
        """Cross-validation fold of every example of a batch of `everything`, ``[examples]``."""
        return self.numbers(index) % FOLDS

    def add_mixtures(self, images: bool = False, draw: int = 0) -> None:
        """Add mixtures of every text, two of few, or of every image; none, unless the model gives one answer for each.

        Of texts, those in the first batch are tried; the others are when they are summed up.

        Args:
            images: Whether to mix images, not texts.
            draw: As for `blocks_of`; the mixtures of another draw are replaced.
        """
        self.draw = draw
        if images:
            mixtures = mixed_images(self.batches, self.rows, self.blocks)
        else:
            padding = getattr(getattr(self.model, "config", None), "pad_token_id", None) or 0
            times = mixtures_of_each(self.examples, draw)
            mixtures = mixed_texts(self.batches, self.rows, self.blocks, times, padding)
        device = model_device(self.model)
        self.mixtures = tuple(replace(mixed, inputs=move(mixed.inputs, device)) for mixed in mixtures)
        self.dense_answers = {i: known for i, known in self.dense_answers.items() if i in self.own}
        tried = self.mixtures if images else self.mixtures[:1]
        if not all(map(self._takes, range(len(self.batches), len(self.batches) + len(tried)))):
            self.mixtures = ()
        elif images or draw:  # those of the first texts are counted when they are summed up
            self.count(sum(len(mixed.firsts) for mixed in tried))
        self.images = images and bool(self.mixtures)

    def _takes(self, index: int) -> bool:
        """Whether the model answers all mixtures of a batch of `everything`; if so, the answers are kept."""
        with torch.no_grad(), self.deterministic_eval():
            try:
                answers = self.answers_to(index, self.run(self.everything[index]))
            except Exception as error:  # a model may want labels, or a certain end of a text, and raise anything
                if is_out_of_memory(error):
                    raise
                return False
        self.dense_answers |= {} if answers is None else {index: answers}
        return answers is not None

    def answers_to(self, index: int, output: Any) -> Tensor | None:
        """One vector of logits for every example of a batch of `everything`, ``[examples, classes]``, float64 on the CPU.

        None if the model gives other answers.
        """
        try:
            logits = logits_by_example(self, output, self.everything[index]).detach().cpu().double()
        except HeadPruneError:
            return None
        return logits if bool(logits.isfinite().all()) else None

    @property
    def values(self) -> dict[str, Values]:
        """The value projections that can be refitted, by output projection."""
        return {p.name: p.values for p in self.projections if p.values}

    def layer(self, name: str) -> AttentionLayer:
        """The layer that ends in an output projection of this name; the first, if several do."""
        return next(p.layers[0] for p in self.projections if p.name == name)

    def real(self, x: Tensor, batch: Any, kind: str) -> Tensor | None:
        """Mask ``[rows * tokens]`` of ``x``'s tokens without padding, in layers of a kind; None if it is not known."""
        tokens, size = x.shape[:-1].numel(), self.rows.size(batch)
        if tokens % size:
            return None
        real = real_tokens(self.model, batch, kind, self.rows, tokens // size)
        return None if real is None else real.to(x.device).flatten()

    def run(self, batch: Any, on_output: OnCall | None = None, on_value: OnCall | None = None) -> Any:
        """Run the model on a batch with hooks on its projections; returns its output.

        Args:
            on_output: Called with W_O's input and output.
            on_value: Called with those of the `values`, under the name of their output projection.
        """
        with self._calling(on_output, on_value):
            return call(self.model, inputs_of(self.model, batch))

    @contextmanager
    def _calling(
        self, on_output: OnCall | None, on_value: OnCall | None = None, names: Iterable[str] | None = None
    ) -> Iterator[None]:
        """Hooks on the projections while the context lasts, or in place of the output projections on modules of these names."""
        names = [p.name for p in self.projections] if names is None else names
        callbacks = [(name, name, on_output) for name in names if on_output]
        callbacks += [(own.name, name, on_value) for name, own in self.values.items() if on_value]

        def hook(name: str, then: OnCall, module: nn.Module, args: Any, kwargs: Any, out: Tensor) -> Tensor | None:
            return then(name, args[0] if args else next(iter(kwargs.values())), out)

        with ExitStack() as stack:
            for module, name, then in callbacks:
                place = self.model.get_submodule(module)
                stack.callback(place.register_forward_hook(partial(hook, name, then), with_kwargs=True).remove)
            yield

    def recorded(self, batch: Any) -> tuple[Calls, Calls]:
        """W_O's inputs and outputs on a batch."""
        xs: Calls = {p.name: [] for p in self.projections}
        ys: Calls = {p.name: [] for p in self.projections}

        def on_output(name: str, x: Tensor, y: Tensor) -> None:
            xs[name].append(x)
            ys[name].append(y.clone())  # a model may write into it

        self.run(batch, on_output)
        return xs, ys

    def run_with_values(
        self, batch: Any, ys: Calls, on_value: OnCall, rest: Calls | None = None
    ) -> tuple[Calls, list[Tensor]]:
        """W_O's inputs and the answers, with values replaced by ``on_value`` and W_O's outputs held at ``ys``.

        Args:
            rest: What other modules gave when ``ys`` was recorded (`headprune.repairing.directions.Directions.recording`). They do not run;
                the answers mean nothing then.
        """
        inputs: Calls = {name: [] for name in ys}
        before = {name: iter(calls) for name, calls in [*ys.items(), *(rest or {}).items()]}

        def on_output(name: str, x: Tensor, y: Tensor) -> Tensor:
            inputs[name].append(x)
            return next(before[name]).clone()

        def again(name: str, run: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Tensor:
            return next(before[name])

        with wrapped({name: self.model.get_submodule(name) for name in rest or ()}, again):
            output = self.run(batch, on_output, on_value)
        return inputs, tensors(output)

    # -- slopes ------------------------------------------------------------------------------------

    def slopes(
        self, index: int, recording: AbstractContextManager[None], see: Callable[[Any], None] | None = None
    ) -> Seen:
        """W_O's inputs, outputs and the slopes there, for every call on a batch.

        Slopes are gradients of a random projection of the current model's answers (`probe_of`).

        Args:
            recording: A context to run the model in.
            see: Called with the model's output.
        """
        if not self.projections:
            return {}
        batch = self.everything[index]
        self.count(3 * self.rows.size(batch))

        def probe(output: Any) -> list[Tensor]:
            if see:
                see(output)
            return [probe_of(self.model, output, batch, self.first(index), self.rows)]

        return self.slopes_of(batch, [p.name for p in self.projections], probe, recording)

    def recorded_with_weights(
        self, index: int, recording: AbstractContextManager[None]
    ) -> tuple[Calls, Calls, Calls, Tensor | None]:
        """W_O's inputs and outputs on a batch; how much the answers depend on each token ``[rows, ...]``; and `answers_to` it.

        The third is the norm of the token's slope: in expectation, the square root of the Fisher information. With its
        square, only a few tokens of a few examples would count. All come from one forward and backward pass.

        Args:
            recording: As for `slopes`.
        """
        answers: list[Tensor | None] = []
        seen = self.slopes(index, recording, lambda output: answers.append(self.answers_to(index, output)))
        xs = {name: [x for x, _, _ in calls] for name, calls in seen.items()}
        ys = {name: [y for _, y, _ in calls] for name, calls in seen.items()}
        weights = {name: [widened(slope).norm(dim=-1) for _, _, (slope,) in calls] for name, calls in seen.items()}
        return xs, ys, weights, answers[0]

    def slopes_of(
        self,
        batch: Any,
        names: Iterable[str],
        sums_of: Callable[[Any], Sequence[Tensor]],
        recording: AbstractContextManager[None] | None = None,
    ) -> Seen:
        """Linear layers' inputs, outputs and the gradients there of some sums of the model's answers to a batch.

        Args:
            names: Of their modules.
            sums_of: Returns the sums, from the model's output.
            recording: As for `slopes`.
        """
        seen: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {name: [] for name in names}

        def add(name: str, x: Tensor, y: Any) -> Tensor | None:
            if not isinstance(y, Tensor):  # of a linear layer's own kind, as in Megatron
                return None
            if recomputing():
                return y + torch.zeros_like(y, requires_grad=True)
            seen[name].append((x.detach(), y.detach(), torch.zeros_like(y, requires_grad=True)))
            return y + seen[name][-1][2]

        with (
            torch.inference_mode(False), torch.enable_grad(), self.deterministic_eval(), frozen(self.model),
            checkpointed(self.model), self._calling(add, names=seen),
        ):  # fmt: skip
            with recording or nullcontext():
                output = call(self.model, inputs_of(self.model, batch))
            sums = sums_of(output)
            deltas = [delta for calls in seen.values() for *_, delta in calls]
            gradients = [
                torch.autograd.grad(one, deltas, allow_unused=True, retain_graph=i + 1 < len(sums))
                for i, one in enumerate(sums)
            ]
        slopes = (
            [delta.detach() if one is None else one.to(delta.device) for one in each]
            for delta, *each in zip(deltas, *gradients, strict=True)
        )
        return {name: [(x, y, next(slopes)) for x, y, _ in calls] for name, calls in seen.items()}

    def _independent(self) -> bool:
        """Whether each example's rows are adjacent at every W_O, tested on a few examples.

        They are not if a module puts the tokens' dimension before the batch's.
        """
        layers = [layer for projection in self.projections for layer in projection.layers]

        def probes(batch: Any) -> Tensor:
            output, size = call(self.model, inputs_of(self.model, batch)), self.rows.size(batch)
            if not torch.is_grad_enabled():
                return torch.zeros(size)  # only shapes matter
            return torch.stack([probe_of(self.model, output, batch, 0, self.rows, i) for i in range(size)])

        sized = [(batch, self.rows.size(batch)) for batch in self.batches]
        problem = Problem(self.model, layers, sized, probes, 0, no_progress, rows=self.rows)
        with torch.inference_mode(False), self.deterministic_eval(), frozen(self.model):
            return not layers or independent(problem)


def replaced(values: Values, out: Tensor, new: Tensor) -> Tensor:
    """A value projection's output with its values replaced by ``new`` [..., key/value heads, head_dim]."""
    out = out.clone()
    out[..., at(values.features, out.device).flatten()] = new.flatten(-2).to(out.dtype)
    return out
