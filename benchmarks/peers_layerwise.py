"""More of what `baselines` holds: methods that look at one layer's W_O and its inputs at a time, and mostly refit W_O.

Heads alone go. Inputs are those of tokens that are no padding. ``gram`` is ``X^T X``, the sum over these tokens, in float32 as
in the authors' code.

FLAP's scores are of the dense model. All else is sequential, as it is by default in the authors' code: a layer's inputs come from
the model whose earlier layers are pruned and refitted already, and what W_O made of *these* inputs is to be met again. Known
flaw of them all: nothing tells what earlier layers have lost already, nor what the loss makes of a layer's output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch
from baselines import Baseline, Batches, Layers, _bias, _stack, _weight, applied, least, method, michel, shuffled
from torch import Tensor, nn

from headprune.attention import AttentionLayer, Heads
from headprune.inputs import call, inputs_of
from headprune.running import evaluating, exact_attention, quiet

RIDGE = 1e-3  # GRAIL's --ridge_lambda
DAMPING = 1e-2  # OSSCAR's --lambda2
ROUNDS = 2  # OSSCAR's --update_iter2: heads that go at a time
SWAPPED, TRIES = 5, 30  # OSSCAR's local_swap and --local_iter

Choose = Callable[[AttentionLayer, Tensor, Tensor], Sequence[int]]
"""Which heads of a layer go, by W_O's weight ``[out, in]`` and the Gram matrix ``[in, in]`` of its inputs."""

Refit = Callable[[Tensor, Tensor, Sequence[int]], Tensor]
"""W_O's new weight, by the old one, the Gram matrix and the columns that stay; 0 in all other columns."""


class _EnoughError(Exception):
    """Every layer that is looked at has run."""


@torch.no_grad()
def watch(
    model: nn.Module, batches: Batches, layers: Layers, take: Callable[[AttentionLayer, list[Tensor]], None]
) -> None:
    """Call ``take`` with a layer and W_O's inputs, ``[tokens, features]`` for each example, batch after batch.

    As often as a layer runs: ALBERT's does many times a batch. What follows the last run is left out, from the second batch on.
    """
    mask: Tensor | None = None
    runs, most = 0, -1

    def seen(layer: AttentionLayer) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            take(layer, _real(args[0], mask))
            nonlocal runs
            runs += 1
            if runs == most:
                raise _EnoughError

        return hook

    with ExitStack() as stack:
        stack.enter_context(evaluating(model))
        stack.enter_context(exact_attention(model))
        for layer in layers:
            stack.callback(_output(model, layer).register_forward_pre_hook(seen(layer)).remove)
        for batch in batches:
            mask, runs = batch.get("attention_mask"), 0
            with suppress(_EnoughError):
                call(model, inputs_of(model, batch))
            most = runs


def _real(inputs: Tensor, mask: Tensor | None) -> list[Tensor]:
    """Each example's rows that are no padding."""
    rows = list(inputs)
    return rows if mask is None else [row[real] for row, real in zip(rows, mask.bool(), strict=True)]


def sequential(
    model: nn.Module,
    batches: Batches,
    layers: Layers,
    choose: Choose,
    refit: Refit | None,
    biases: Mapping[str, Tensor] | None = None,
) -> Baseline:
    """Prune and refit layer after layer, each by its inputs behind the ones before.

    Args:
        model: The dense model.
        batches: Scoring examples.
        layers: In the order in which they run.
        choose: Which heads go.
        refit: What W_O becomes; None leaves it. As in the authors' code also where no head goes.
        biases: What is added to biases, ``{layer_name: [out]}``.
    """
    drop: Heads = {}
    outputs: dict[str, tuple[Tensor, Tensor | None]] = {}
    try:
        walk = _Walk(model, batches, layers)
    except ValueError:
        walk = None
    for layer in layers:
        output = _output(model, layer)
        weight: Tensor = _weight(output).detach()
        gram = torch.zeros(weight.shape[1], weight.shape[1])

        def add(layer: AttentionLayer, rows: list[Tensor], gram: Tensor = gram) -> None:
            every = torch.cat(rows).float()
            gram += every.T @ every

        with applied(model, layers, Baseline(drop, outputs=outputs)):
            if walk is None:
                watch(model, batches, [layer], add)
            else:
                walk.watch(layer, add)
        gone = sorted(choose(layer, weight, gram))
        kept = [h for h in range(layer.num_heads) if h not in gone]
        if gone:
            drop = {**drop, layer.name: gone}
        extra = (biases or {}).get(layer.name)
        if (refit and kept) or extra is not None:
            assert layer.output_projection is not None
            bias: Any = output.bias if extra is None else (_bias(output) + extra).detach()
            new = refit(weight, gram, _columns(layer, kept)) if refit and kept else weight
            outputs = {**outputs, layer.output_projection.module: (new.to(weight), bias)}
        if walk is not None:
            with applied(model, layers, Baseline(drop, outputs=outputs)):
                walk.go_on()
    return Baseline(drop, outputs=outputs)


class _Walk:
    """A walk through a model's blocks, with what enters the next one, for each batch.

    It costs about two passes, where one from the start to every layer costs half as many passes as there are layers.

    Raises:
        ValueError: The model is not known to be a stack of blocks that run once.
    """

    def __init__(self, model: nn.Module, batches: Batches, layers: Layers) -> None:
        with torch.no_grad(), quiet(model):
            self.blocks, self.hidden = _stack(model, batches, layers)
        if any(len(block.calls) != len(batches) for block in self.blocks):
            raise ValueError("a block runs several times")
        self.model, self.masks = model, [batch.get("attention_mask") for batch in batches]

    def watch(self, layer: AttentionLayer, take: Callable[[AttentionLayer, list[Tensor]], None]) -> None:
        """As the function `watch`, for the layer of the next block."""
        masks = iter(self.masks)

        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            take(layer, _real(args[0], next(masks)))
            raise _EnoughError

        handle = self.blocks[0].output.register_forward_pre_hook(hook)
        for run in self._runs():
            with suppress(_EnoughError):
                run()
        handle.remove()

    def go_on(self) -> None:
        """Run the next block as the model is now."""
        self.hidden = [run() for run in self._runs()]
        del self.blocks[0]

    def _runs(self) -> Iterator[Callable[[], Tensor]]:
        block = self.blocks[0]

        def run(hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
            with torch.no_grad(), quiet(self.model):
                output = block.module(hidden, *args, **kwargs)
            return output[0] if isinstance(output, tuple) else output

        return (partial(run, x, *rest) for x, rest in zip(self.hidden, block.calls, strict=True))


# -- FLAP --------------------------------------------------------------------------------------


@method("FLAP")
def flap(model: nn.Module, batches: Batches, layers: Layers, keep: int, seed: int) -> Baseline:
    """An et al. (AAAI 2024, arXiv:2312.11983), lib/prune.py and layerwrapper.py of CASIA-IVA-Lab/FLAP: WIFV, AL-AM.

    A channel's score is the square of its input's fluctuation times the squared norm of W_O's column (the paper doesn't square); each
    layer's channels are standardised; a head has the mean of its channels, a key/value group that of its heads. Heads are ranked over
    all layers (AL-AM weighs them against neurons, of which none go here). W_O's bias takes over the mean of what goes. As in the code, the
    mean is that of examples' means, and deviations are taken from the mean so far, the first example's not at all (`fluctuation`);
    the order of examples is drawn by ``seed``. Not as in the code: means aren't rounded to float16, and a bias that is there stays.
    Known flaw: standardised, a layer that matters little as a whole keeps as much as any other; a few channels decide, being squared.
    """
    drop, biases = _flap(model, batches, layers, keep, seed)
    outputs: dict[str, tuple[Tensor, Tensor | None]] = {}
    for layer in layers:
        if layer.name in drop:
            assert layer.output_projection is not None
            output = _output(model, layer)
            bias = (_bias(output) + biases[layer.name]).detach()
            outputs[layer.output_projection.module] = (_weight(output).detach(), bias)
    return Baseline(drop, outputs=outputs)


def fluctuation(counts: Tensor, sums: Tensor, squares: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and fluctuation of each channel, as FLAP's BiasGPT has them after the last example.

    Args:
        counts: Tokens of each example, ``[examples, 1]``, in the order in which they are met.
        sums: Of its inputs, ``[examples, channels]``.
        squares: Of its inputs' squares.
    """
    number = torch.arange(1, len(counts) + 1, dtype=torch.float64)[:, None]
    means = (sums / counts).cumsum(0) / number
    deviations = squares - 2 * means * sums + counts * means.square()
    # f_n = f_(n-1) (n - 2) / (n - 1) + d_n / n, written out
    return means[-1], (deviations * (number - 1) / number).sum(0) / max(len(counts) - 1, 1)


def _flap(model: nn.Module, batches: Batches, layers: Layers, keep: int, seed: int) -> tuple[Heads, dict[str, Tensor]]:
    """What FLAP drops, and what it adds to the biases of layers that lose heads."""
    found: dict[str, list[Tensor]] = {layer.name: [] for layer in layers}

    def take(layer: AttentionLayer, rows: list[Tensor]) -> None:
        for row in (row.double() for row in rows):
            count = torch.full_like(row[0], len(row))
            found[layer.name].append(torch.stack([count, row.sum(0), row.square().sum(0)]))

    watch(model, batches, layers, take)
    scores, means = [], {}
    for layer in layers:
        counts, sums, squares = shuffled(torch.stack(found[layer.name]), seed).unbind(1)
        means[layer.name], moved = fluctuation(counts[:, :1], sums, squares)
        channels = (moved * _weight(_output(model, layer)).detach().double().square().sum(0)).square()
        channels = (channels - channels.mean()) / channels.std()
        scores += [channels[_columns(layer, unit)].mean() for unit in layer.units]
    drop = least(layers, torch.stack(scores), keep)
    biases = {}
    for layer in layers:
        if layer.name in drop:
            gone = _columns(layer, drop[layer.name])
            weight = _weight(_output(model, layer)).detach()
            biases[layer.name] = weight[:, gone] @ means[layer.name][gone].to(weight)
    return drop, biases


# -- Wanda-sp ----------------------------------------------------------------------------------


@method("Wanda-sp")
def wanda(model: nn.Module, batches: Batches, layers: Layers, keep: int, seed: int) -> Baseline:
    """Wanda (Sun et al., ICLR 2024, arXiv:2306.11695) for whole heads, as FLAP's authors have it: prune_wanda_sp in lib/prune.py.

    A head's score is the sum over its channels of the mean ``|weight|`` of W_O's column times the norm of the channel's input. Every
    layer loses the same share (`shares`), and what goes leaves nothing behind in a bias. Known flaw: the uniform share.
    """
    return sequential(model, batches, layers, _wanda(layers, keep), None)


def _wanda(layers: Layers, keep: int) -> Choose:
    left = shares(layers, keep)

    def choose(layer: AttentionLayer, weight: Tensor, gram: Tensor) -> list[int]:
        channels = weight.abs().mean(0) * gram.diagonal().sqrt()
        scores = torch.stack([channels[_columns(layer, unit)].sum() for unit in layer.units])
        gone = scores.argsort(stable=True)[: len(layer.units) - left[layer.name]].tolist()
        return [h for u in gone for h in layer.units[u]]

    return choose


def shares(layers: Layers, keep: int) -> dict[str, int]:
    """How many units each layer keeps: the same share of all, rounded down; the first layers keep one more of what is left.

    Raises:
        ValueError: Units of different sizes.
    """
    sizes = {len(unit) for layer in layers for unit in layer.units}
    if len(sizes) > 1:
        raise ValueError("a uniform share needs key/value groups of one size")
    units, total = keep // sizes.pop(), sum(len(layer.units) for layer in layers)
    found = {layer.name: units * len(layer.units) // total for layer in layers}
    for layer in layers[: units - sum(found.values())]:
        found[layer.name] += 1
    return found


# -- GRAIL -------------------------------------------------------------------------------------


@method("FLAP + GRAIL")
def flap_grail(model: nn.Module, batches: Batches, layers: Layers, keep: int, seed: int) -> Baseline:
    """FLAP's heads, then GRAIL (Tang et al., CPAL 2026, arXiv:2602.23795), grail-llm of TWWinde/GRAIL_Compensation: `grail`.

    Layer by layer W_O is refitted by ridge regression to give its dense weight's output from the kept inputs, without an intercept. With
    the code's defaults FLAP's bias, of the dense model's means, is added as well. Known flaw: so the mean of what goes is made up for twice.
    """
    drop, biases = _flap(model, batches, layers, keep, seed)
    return sequential(model, batches, layers, _given(drop), grail, biases)


@method("FLAP + GRAIL, no bias")
def flap_grail_alone(model: nn.Module, batches: Batches, layers: Layers, keep: int, seed: int) -> Baseline:
    """`flap_grail` with the code's --no_bias_compensation."""
    return sequential(model, batches, layers, _given(_flap(model, batches, layers, keep, seed)[0]), grail)


@method("Wanda-sp + GRAIL")
def wanda_grail(model: nn.Module, batches: Batches, layers: Layers, keep: int, seed: int) -> Baseline:
    """`wanda`, each layer refitted by `grail` before the next one is scored: prune_wanda_sp with --compensate."""
    return sequential(model, batches, layers, _wanda(layers, keep), grail)


@method("Michel + GRAIL")
def michel_grail(model: nn.Module, batches: Batches, layers: Layers, keep: int, seed: int) -> Baseline:
    """`michel`'s heads, refitted by `grail`: a combination that nobody published, since GRAIL takes any choice."""
    return sequential(model, batches, layers, _given(michel(model, batches, layers, keep, seed).drop), grail)


def grail(weight: Tensor, gram: Tensor, columns: Sequence[int]) -> Tensor:
    """``W G[:, kept] (G[kept, kept] + lambda)^-1``, all in float32; lambda is 0.001 times (the kept diagonal's mean + 0.001).

    So the pull is to 0, not to the old weight, and W_O also shrinks a little where nothing goes.
    """
    gram, kept = gram.float()[columns], torch.zeros_like(weight)
    own = gram[:, columns]
    ridge = RIDGE * (own.diagonal().mean() + 1e-3)
    kept[:, columns] = (weight.float() @ torch.linalg.solve(own + ridge * torch.eye(len(own)), gram).T).to(weight)
    return kept


def _given(drop: Heads) -> Choose:
    return lambda layer, weight, gram: drop.get(layer.name, [])


# -- OSSCAR ------------------------------------------------------------------------------------


@method("OSSCAR")
def osscar(model: nn.Module, batches: Batches, layers: Layers, keep: int, seed: int) -> Baseline:
    """Meng et al. (ICML 2024, arXiv:2403.12983), prune_algo.py and osscar_prune.py of mazumder-lab/OSSCAR with --local_out.

    Every layer loses the same share (`shares`) of its heads: those that `search` finds, for the least squared error of W_O's output with
    W_O refitted by least squares on the kept inputs. To the Gram matrix 0.01 times its diagonal's mean is added, so the pull is to the old
    weight; all that follows is in float64. Key/value groups go whole, as in LinkedIn's fmchisel. Known flaw: the uniform share.
    """
    left = shares(layers, keep)

    def choose(layer: AttentionLayer, weight: Tensor, gram: Tensor) -> list[int]:
        blocks = [_columns(layer, unit) for unit in layer.units]
        kept = search(weight, gram, blocks, left[layer.name])
        return [h for u, unit in enumerate(layer.units) if u not in kept for h in unit]

    return sequential(model, batches, layers, choose, least_squares)


def least_squares(weight: Tensor, gram: Tensor, columns: Sequence[int]) -> Tensor:
    """The kept columns that give the least `error`."""
    gram, found = _damped(gram), torch.zeros_like(weight)
    target = gram[columns] @ weight.double().T
    found[:, columns] = torch.linalg.solve(gram[columns][:, columns], target).T.to(weight)
    return found


def search(weight: Tensor, gram: Tensor, blocks: Sequence[Sequence[int]], keep: int) -> list[int]:
    """Which blocks of columns stay.

    First the two go that cost least one by one, again and again (three at a time, or one, as the number needs it). Then up to 30 times
    five go like this, and the five come in that help most one by one, as long as the error falls. Not as in the code: where five or
    fewer are kept, all of these are swapped, where the code fails.
    """
    gram = _damped(gram)
    target = gram @ weight.double().T

    def gain(units: Sequence[int]) -> float:
        """How much less the error is than without any of W_O, halved."""
        columns = [c for u in units for c in blocks[u]]
        own = target[columns]
        return 0.5 * float((own * torch.linalg.solve(gram[columns][:, columns], own)).sum())

    def without(units: Sequence[int], count: int) -> list[int]:
        order = sorted(units, key=lambda u: -gain([v for v in units if v != u]))
        return [u for u in units if u not in order[:count]]

    kept = list(range(len(blocks)))
    number = len(blocks) - keep
    rounds = max(number // ROUNDS, 1)
    for k in range(rounds):
        kept = without(kept, number // rounds + (k < number % rounds))
    best, swapped = gain(kept), min(SWAPPED, keep)
    for _ in range(TRIES if 0 < keep < len(blocks) else 0):
        rest = without(kept, swapped)
        others = sorted(set(range(len(blocks))).difference(rest), key=lambda u: -gain([*rest, u]))
        new = sorted(rest + others[:swapped])
        if gain(new) <= best * (1 + 1e-9):
            break
        kept, best = new, gain(new)
    return kept


def _damped(gram: Tensor) -> Tensor:
    return (gram + DAMPING * gram.diagonal().mean() * torch.eye(len(gram))).double()


def _columns(layer: AttentionLayer, heads: Sequence[int]) -> list[int]:
    """W_O's columns of some heads, in their order."""
    assert layer.output_projection is not None
    return sorted(c for h in heads for c in layer.output_projection.features[h])


def _output(model: nn.Module, layer: AttentionLayer) -> nn.Module:
    """W_O."""
    if layer.output_projection is None:
        raise ValueError(f"{layer.name} has no W_O that tells heads apart")
    return model.get_submodule(layer.output_projection.module)
