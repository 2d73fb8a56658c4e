"""Public ways to choose heads, computed as their authors' code computes them: what headprune's own are measured against.

Every method is a function ``(model, batches, layers, keep, seed) -> Baseline`` in `METHODS`, for any model that headprune
traces; ``layers`` are its maskable layers, ``keep`` is a number of heads, and whole key/value groups go. `applied` gives the
model that the method made. Rescaling (`kwon`) needs a stack of blocks like BERT's, ViT's, GPT-2's or Llama's.

Where authors differentiate the mean loss of a batch, the batch's mean of per-example gradients is taken, which is the same
if examples weigh equally in the loss: always with one label per example, in language models with windows of one length.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.pytorch_utils import Conv1D

from headprune.attention import AttentionLayer, Heads
from headprune.fingerprint import fingerprint
from headprune.gates import gated, zero_gates
from headprune.inputs import call, inputs_of
from headprune.losses import ExampleLoss
from headprune.planning import GROUPS, Search, arrange
from headprune.running import evaluating, exact_attention
from headprune.scoring.base import Problem
from headprune.scoring.gradient import gate_gradients
from headprune.scoring.scores import HeadScores

Batch = Mapping[str, Any]
Batches = Sequence[Batch]
Layers = Sequence[AttentionLayer]
KWON_BATCH = 32  # examples per gradient in Kwon's main.py
FARTHEST = 10.0  # Kwon's rescaling stops for good at a factor beyond


@dataclass(frozen=True)
class Baseline:
    """What a method decided.

    Attributes:
        drop: ``{layer_name: [head, ...]}``.
        heads: Factors on heads' outputs, ``{layer_name: [num_heads]}``: what W_O's columns would be multiplied by.
        neurons: Factors on the input of feed-forward layers' last linear, ``{module: [neurons]}``.
        outputs: What W_O becomes where it is refitted, ``{module: (weight [out, in], bias [out] or None)}``; of a module without a bias,
            the bias is added behind it.
    """

    drop: Heads
    heads: dict[str, Tensor] = field(default_factory=dict)
    neurons: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, tuple[Tensor, Tensor | None]] = field(default_factory=dict)


Run = Callable[[nn.Module, Batches, Layers, int, int], Baseline]
METHODS: dict[str, Run] = {}


def method(name: str) -> Callable[[Run], Run]:
    """Register a method under the name that tables show."""

    def register(run: Run) -> Run:
        METHODS[name] = run
        return run

    return register


@contextmanager
def applied(model: nn.Module, layers: Layers, baseline: Baseline) -> Iterator[nn.Module]:
    """The model as the method leaves it, while the context lasts."""
    gates = zero_gates(baseline.drop, layers)
    for name, factors in baseline.heads.items():
        gates[name] = gates[name] * factors if name in gates else factors
    with gated(model, layers, gates), _scaled(model, baseline.neurons), _refitted(model, baseline.outputs):
        yield model


# -- gradients ---------------------------------------------------------------------------------


class _Gradients:
    """``dL_i/dxi_h`` of every example, ``[examples, heads]`` in the order of ``batches``; the last ones are remembered.

    Every method and head count of a draw of examples asks for the same.

    Attributes:
        saved: Seconds that remembering saved so far: to be added to what a method took.
    """

    def __init__(self) -> None:
        self.saved = 0.0
        self._key: tuple[str, list[str]] | None = None
        self._batches: Batches | None = None  # held, so that no other list takes its identity
        self._found = torch.empty(0)
        self._seconds = 0.0

    def __call__(self, model: nn.Module, batches: Batches, layers: Layers) -> Tensor:
        key = (fingerprint(model), [layer.name for layer in layers])
        if self._batches is batches and self._key == key:
            self.saved += self._seconds
            return self._found
        started = time.perf_counter()
        losses = ExampleLoss(model)
        with evaluating(model), exact_attention(model):
            kept = [(batch, losses.rows.size(batch)) for batch in losses.prepare(list(batches))]
            self._found, _ = gate_gradients(
                Problem(model, layers, kept, losses, 0, lambda done, total, note="": None, rows=losses.rows)
            )
        self._key, self._batches, self._seconds = key, batches, time.perf_counter() - started
        return self._found


gradients = _Gradients()


def unit_gradients(model: nn.Module, batches: Batches, layers: Layers) -> Tensor:
    """Gradients for one gate per unit, a head or a whole key/value group, since a unit is what goes: ``[examples, units]``.

    A group's gate moves all of its heads, so their gradients add up, signs and all: the mean of its heads' absolute values
    is another number, and on SmolLM2 a worse one.
    """
    parts = torch.split(gradients(model, batches, layers), [layer.num_heads for layer in layers], dim=1)
    return torch.stack(
        [part[:, list(unit)].sum(1) for layer, part in zip(layers, parts, strict=True) for unit in layer.units], dim=1
    )


def by_layer(layers: Layers, units: Tensor) -> tuple[Tensor, ...]:
    """``[..., units]`` cut into each layer's."""
    return torch.split(units, [len(layer.units) for layer in layers], dim=-1)


def least(layers: Layers, scores: Tensor, keep: int) -> Heads:
    """What goes when units are ranked by ``scores`` ``[units]`` over all layers."""
    values = {}
    for layer, part in zip(layers, by_layer(layers, scores.double()), strict=True):
        values[layer.name] = torch.zeros(layer.num_heads, dtype=torch.float64)
        for unit, value in zip(layer.units, part, strict=True):
            values[layer.name][list(unit)] = value
    search = Search(layers, HeadScores("", "", values, values, 0, tuple(layers)))
    return arrange(search, "one-shot", [keep], kinds=[GROUPS]).plan(keep).drop


def normalised(layers: Layers, scores: Tensor) -> Tensor:
    """Each layer's scores divided by their L2 norm."""
    return torch.cat([part / (part.norm() + 1e-20) for part in by_layer(layers, scores)])


def shuffled(examples: Tensor, seed: int) -> Tensor:
    """Rows in the order in which a loader would have met them: scoring examples come sorted by length."""
    return examples[torch.randperm(len(examples), generator=torch.Generator().manual_seed(seed))]


# -- rankings ----------------------------------------------------------------------------------


@method("random")
def random(model: nn.Module, batches: Batches, layers: Layers, keep: int, seed: int) -> Baseline:
    """Heads drawn by ``seed``: the control of every comparison (Budhraja et al., EMNLP 2020, main.260)."""
    units = sum(len(layer.units) for layer in layers)
    return Baseline(least(layers, torch.rand(units, generator=torch.Generator().manual_seed(seed)), keep))


@method("reverse")
def reverse(model: nn.Module, batches: Batches, layers: Layers, keep: int, seed: int) -> Baseline:
    """The heads go that `michel` calls the most important: whatever does no worse than this shows that scores tell nothing."""
    return Baseline(least(layers, -unit_gradients(model, batches, layers).abs().mean(0), keep))


@method("run_bertology")
def run_bertology(model: nn.Module, batches: Batches, layers: Layers, keep: int, seed: int) -> Baseline:
    """transformers' examples/research_projects/bertology/run_bertology.py, its importance ranked once.

    Meant is Michel et al. (2019), equation (2). With the script's defaults a batch is one example, layers are divided by
    their L2 norm, and ``head_mask.grad`` is never zeroed. Known flaw: so every step adds the absolute value of the sum of
    all gradients so far, and the result depends on the order of the examples (here: drawn by ``seed``). The script then
    masks a tenth of the heads at a time and scores again; this is its formula alone.
    """
    return Baseline(
        least(layers, bertology_scores(shuffled(unit_gradients(model, batches, layers), seed), layers), keep)
    )


def bertology_scores(slopes: Tensor, layers: Layers) -> Tensor:
    """``sum_i |sum_(j <= i) g_j|`` of gradients ``[examples, units]`` in the order of the steps, normalised by layer."""
    return normalised(layers, slopes.cumsum(0).abs().sum(0))


@method("Michel")
def michel(model: nn.Module, batches: Batches, layers: Layers, keep: int, seed: int) -> Baseline:
    """Michel et al. (2019, arXiv:1905.10650), equation (2): the mean of ``|dL_i/dxi_h|``, ranked once over all layers.

    Known flaw: heads are weighed one by one at the dense model, so of two that stand in for each other both seem to be
    unimportant.
    """
    return Baseline(least(layers, unit_gradients(model, batches, layers).abs().mean(0), keep))


@method("Michel, layer L2")
def michel_normalised(model: nn.Module, batches: Batches, layers: Layers, keep: int, seed: int) -> Baseline:
    """`michel` with each layer's scores divided by their L2 norm (their section 4.1, after Molchanov et al. 2017).

    Known flaw: a layer that matters little as a whole keeps as many heads as any other.
    """
    return Baseline(least(layers, normalised(layers, unit_gradients(model, batches, layers).abs().mean(0)), keep))


# -- Kwon et al. 2022 --------------------------------------------------------------------------


@method("Kwon, Fisher")
def kwon_fisher(model: nn.Module, batches: Batches, layers: Layers, keep: int, seed: int) -> Baseline:
    """Mask search of Kwon et al. (2022, arXiv:2204.09656): prune/fisher.py and search.py of WoosukKwon/retraining-free-pruning.

    The diagonal of the masks' Fisher information as the code takes it: the sum over batches of 32 of the squared gradient of
    the batch's mean loss. With heads alone to prune, its search for the largest sum of importance within a cost keeps the
    largest. A key/value group has one mask. Known flaw: squared after the mean over a batch, the scores depend on the batch
    size, and examples of opposite sign cancel.
    """
    return Baseline(_searched(layers, _batch_slopes(model, batches, layers, seed), keep))


@method("Kwon, Fisher + swap")
def kwon_swapped(model: nn.Module, batches: Batches, layers: Layers, keep: int, seed: int) -> Baseline:
    """`kwon_fisher`, then their mask rearrangement (prune/rearrange.py).

    Within each layer, as many heads as the search took go anew, by the layer's whole block of the Fisher information. Known flaw:
    how many heads each layer loses still comes from the diagonal, and pairs across layers are never weighed.
    """
    slopes = _batch_slopes(model, batches, layers, seed)
    return Baseline(_rearranged(layers, slopes, _searched(layers, slopes, keep)))


@method("Kwon, Fisher + swap + rescaling")
def kwon(model: nn.Module, batches: Batches, layers: Layers, keep: int, seed: int) -> Baseline:
    """`kwon_swapped`, then their mask tuning (prune/rescale.py): the whole method, heads alone pruned.

    Layer by layer, factors of the kept heads and of all neurons are fitted by least squares, so that the pruned model's
    residual stream behind a sub-layer comes near a teacher's, over all tokens that are no padding (the class token alone
    behind a classifier's last feed-forward). As in the code: the teacher is not the dense model but the one that the search
    makes at the square root of the constraint; heads have an intercept that is thrown away; the first layer's heads stay as they
    are; a factor beyond 10, or a solver that does not converge, ends the tuning. Each head of a key/value group has its own factor.
    Known flaw: with one factor a head the kept ones cannot take over another direction of W_O's output.
    """
    slopes = _batch_slopes(model, batches, layers, seed)
    student = _rearranged(layers, slopes, _searched(layers, slopes, keep))
    total = sum(layer.num_heads for layer in layers)
    teacher = _searched(layers, slopes, int((keep * total) ** 0.5))
    return Baseline(student, *rescaled(model, batches, layers, teacher, student))


def _batch_slopes(model: nn.Module, batches: Batches, layers: Layers, seed: int) -> Tensor:
    """Gradients of batches' mean losses, ``[batches, units]``."""
    examples = shuffled(unit_gradients(model, batches, layers), seed)
    return torch.stack([part.mean(0) for part in examples.split(KWON_BATCH)])


def _searched(layers: Layers, slopes: Tensor, keep: int) -> Heads:
    """What goes by the diagonal of the Fisher information."""
    return least(layers, slopes.square().sum(0), keep)


def _rearranged(layers: Layers, slopes: Tensor, drop: Heads) -> Heads:
    found = {}
    for layer, own in zip(layers, by_layer(layers, slopes), strict=True):
        if layer.name not in drop:
            continue
        if len({len(unit) for unit in layer.units}) > 1:  # a swap would change how many heads go
            found[layer.name] = drop[layer.name]
            continue
        count = len(drop[layer.name]) // len(layer.units[0])
        units = rearrange(own.T @ own, count)
        found[layer.name] = sorted(h for u in units for h in layer.units[u])
    return found


def rearrange(fisher: Tensor, count: int) -> list[int]:
    """``count`` units whose common removal costs little: ``sum fisher[i, j]`` over all pairs of them.

    Greedy: begins with the least of the diagonal; every other unit in turn joins, and the one leaves whose going makes the
    rest cheapest. So the cost never rises.

    Args:
        fisher: One layer's block, ``[units, units]``.
        count: How many units go.
    """
    order = fisher.diagonal().sort().indices.tolist()
    gone = order[:count]
    for unit in order[count:] if count else ():
        gone.append(unit)
        block = fisher[gone][:, gone]
        change = block.diagonal() - 2 * block.sum(1)  # of the cost, when one leaves
        del gone[int(change.argmin())]
    return sorted(gone)


# -- rescaling ---------------------------------------------------------------------------------


@dataclass
class _Block:
    """One block of the stack, and where in it to look.

    Attributes:
        layer: Its attention.
        module: The block.
        output: W_O.
        last: The feed-forward layer's last linear, by name.
        norm: A norm behind the second residual sum, if there is one (BERT's).
        calls: What it was called with besides the hidden states, for each batch.
    """

    layer: AttentionLayer
    module: nn.Module
    output: nn.Module
    last: str = ""
    norm: nn.Module | None = None
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)


@dataclass(frozen=True)
class _Seen:
    """What one run of a block showed: W_O's input, the last linear's, the second residual sum, and the block's output."""

    heads: Tensor
    neurons: Tensor
    sums: Tensor
    output: Tensor


@torch.no_grad()
def rescaled(
    model: nn.Module, batches: Batches, layers: Layers, teacher: Heads, student: Heads
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Factors for a model without the heads ``student``, to come near the one without ``teacher``; see `kwon`.

    Returns:
        Factors of heads and of neurons, as in `Baseline`.

    Raises:
        ValueError: The model is no stack of blocks that each hold one attention and one feed-forward layer.
    """
    heads: dict[str, Tensor] = {}
    neurons: dict[str, Tensor] = {}
    closed, half = zero_gates(student, layers), zero_gates(teacher, layers)
    with evaluating(model), exact_attention(model):
        blocks, first = _stack(model, batches, layers)
        taught, told = list(first), list(first)  # hidden states of both models, for each batch
        for i, block in enumerate(blocks):
            name = block.layer.name
            behind = i == len(blocks) - 1 and type(model).__name__.endswith(
                ("SequenceClassification", "ImageClassification")
            )
            gate = closed.get(name, torch.ones(block.layer.num_heads))
            shown = [_run(model, block, k, hidden, half.get(name)) for k, hidden in enumerate(taught)]
            if i and gate.any():
                seen = [_run(model, block, k, hidden, gate) for k, hidden in enumerate(told)]
                missing = [
                    t + s.heads @ _weight(block.output).T - hidden
                    for t, s, hidden in zip(taught, shown, told, strict=True)
                ]
                fitted = _fit_heads(block, batches, seen, missing, gate)
                if fitted is None:
                    break
                heads[name] = fitted
                gate = gate * fitted
            seen = [_run(model, block, k, hidden, gate) for k, hidden in enumerate(told)]
            last: Any = model.get_submodule(block.last)
            residual = [s.sums - last(s.neurons) for s in seen]
            missing = [s.sums - r - _bias(last) for s, r in zip(shown, residual, strict=True)]
            fitted = _fit_neurons(last, batches, seen, missing, behind)
            if fitted is None:
                break
            neurons[block.last] = fitted
            sums = [r + last(s.neurons * fitted) for r, s in zip(residual, seen, strict=True)]
            taught, told = [s.output for s in shown], [x if block.norm is None else block.norm(x) for x in sums]
    return heads, neurons


def damped(gram: Tensor, moment: Tensor) -> Tensor | None:
    """Factors near 1 that solve ``gram @ x = moment``, by Kwon's utils/linalg.py; None if they are refused.

    LSMR with damping 1 on the normal equations, for the difference from 1.
    """
    from scipy.sparse.linalg import lsmr

    rest = moment - gram.sum(1)
    if len(rest) == 1:
        return 1 + rest / gram[0]
    # cupyx, which they use, stops after 5 n steps; scipy's default is n.
    found, why, *_ = lsmr(gram.numpy(), rest.numpy(), damp=1.0, maxiter=5 * len(rest))
    return torch.from_numpy(found) + 1 if why < 3 else None


def _fit_heads(
    block: _Block, batches: Batches, seen: Sequence[_Seen], missing: Sequence[Tensor], gate: Tensor
) -> Tensor | None:
    """Factors ``[num_heads]`` by which the open heads come near what is ``missing`` from the residual stream, per batch."""
    assert block.layer.output_projection is not None
    features = block.layer.output_projection.features
    kept = gate.nonzero().flatten().tolist()
    weight = _weight(block.output)
    gram, moment = torch.zeros(len(kept) + 1, len(kept) + 1).double(), torch.zeros(len(kept) + 1).double()
    for batch, one, goal in zip(batches, seen, missing, strict=True):
        inputs, wanted = _tokens(one.heads, batch), _tokens(goal, batch).flatten()
        parts = [(inputs[:, list(features[h])] @ weight[:, list(features[h])].T).flatten() for h in kept]
        rows = torch.stack([*parts, torch.ones_like(wanted)])
        gram += rows @ rows.T
        moment += rows @ wanted
    found = damped(gram, moment)
    if found is None or _far(found[:-1]):
        return None
    factors = torch.ones(block.layer.num_heads)
    factors[kept] = found[:-1].float()
    return factors


def _fit_neurons(
    last: nn.Module, batches: Batches, seen: Sequence[_Seen], missing: Sequence[Tensor], first_token: bool
) -> Tensor | None:
    """Factors ``[neurons]``, likewise; by the first token of each example alone, or by all."""
    weight = _weight(last)
    gram, moment = torch.zeros(weight.shape[1], weight.shape[1]).double(), torch.zeros(weight.shape[1]).double()
    for batch, one, goal in zip(batches, seen, missing, strict=True):
        inputs, wanted = (x[:, 0] if first_token else _tokens(x, batch) for x in (one.neurons, goal))
        gram += inputs.T @ inputs
        moment += (inputs * (wanted @ weight)).sum(0)
    found = damped(gram * (weight.T @ weight), moment)
    return None if found is None or _far(found) else found.float()


def _far(factors: Tensor) -> bool:
    return bool((factors > FARTHEST).any() or (factors < -FARTHEST).any())


def _stack(model: nn.Module, batches: Batches, layers: Layers) -> tuple[list[_Block], list[Tensor]]:
    """The blocks of a model, and the hidden states that enter the first one, for each batch."""
    blocks = []
    for layer in layers:
        path = layer.module.split(".")
        above = [n for n in range(1, len(path)) if isinstance(model.get_submodule(".".join(path[:n])), nn.ModuleList)]
        if not above or layer.output_projection is None:
            raise ValueError(f"{layer.name} is in no list of blocks, or has no W_O that tells heads apart")
        module = model.get_submodule(".".join(path[: above[-1] + 1]))
        blocks.append(_Block(layer, module, model.get_submodule(layer.output_projection.module)))
    if len({id(block.module) for block in blocks}) < len(blocks):
        raise ValueError("a block has several attention layers")
    first: list[Tensor] = []
    ran: list[tuple[str, nn.Module]] = []

    def entered(block: _Block) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden, rest = (args[0], args[1:]) if args else (kwargs["hidden_states"], ())
            if block is blocks[0]:
                first.append(hidden)
            # A cache would be filled by every run again.
            rest = tuple(None if isinstance(a, Cache) else a for a in rest)
            others = {k: v for k, v in kwargs.items() if k != "hidden_states" and not isinstance(v, Cache)}
            block.calls.append((rest, others))

        return hook

    def left(name: str) -> Callable[..., None]:
        return lambda module, args, output: ran.append((name, module))

    with ExitStack() as stack:
        for block in blocks:
            stack.callback(block.module.register_forward_pre_hook(entered(block), with_kwargs=True).remove)
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear | Conv1D) or "Norm" in type(module).__name__:
                stack.callback(module.register_forward_hook(left(name)).remove)
        for k, batch in enumerate(batches):
            call(model, inputs_of(model, batch))
            if k == 0:
                order = list(ran)
    for block in blocks:
        inside = {id(m) for m in block.module.modules()}
        mine = [(name, module) for name, module in order if id(module) in inside]
        linears = [n for n, (_, module) in enumerate(mine) if isinstance(module, nn.Linear | Conv1D)]
        if not linears or mine[linears[-1]][1] is block.output:
            raise ValueError(f"no feed-forward layer follows {block.layer.name} in its block")
        block.last = mine[linears[-1]][0]
        block.norm = mine[-1][1] if linears[-1] < len(mine) - 1 else None
    return blocks, first


def _run(model: nn.Module, block: _Block, number: int, hidden: Tensor, gate: Tensor | None) -> _Seen:
    """One block on the hidden states of batch ``number``."""
    name = block.layer.name
    args, kwargs = block.calls[number]
    watched = {"heads": block.output, "neurons": model.get_submodule(block.last)}
    if block.norm is not None:
        watched["sums"] = block.norm
    seen: dict[str, Tensor] = {}

    def watch(key: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            seen[key] = args[0]

        return hook

    with ExitStack() as stack:
        if gate is not None:
            stack.enter_context(gated(model, [block.layer], {name: gate}))
        for key, module in watched.items():
            stack.callback(module.register_forward_pre_hook(watch(key)).remove)
        output = block.module(hidden, *args, **kwargs)
        output = output[0] if isinstance(output, tuple) else output
    if block.norm is not None and not torch.equal(block.norm(seen["sums"]), output):
        raise ValueError(f"the block of {name} does not end with the norm of a residual sum")
    return _Seen(seen["heads"], seen["neurons"], seen.get("sums", output), output)


@contextmanager
def _scaled(model: nn.Module, factors: Mapping[str, Tensor]) -> Iterator[None]:
    """Multiply modules' inputs by factors ``[features]`` while the context lasts."""

    def by(factor: Tensor) -> Callable[..., tuple[Any, ...]]:
        return lambda module, args: (args[0] * factor.to(args[0]), *args[1:])

    with ExitStack() as stack:
        for name, factor in factors.items():
            stack.callback(model.get_submodule(name).register_forward_pre_hook(by(factor)).remove)
        yield


@contextmanager
def _refitted(model: nn.Module, outputs: Mapping[str, tuple[Tensor, Tensor | None]]) -> Iterator[None]:
    """Other weights and biases of linear modules while the context lasts."""

    def instead(weight: Tensor, bias: Tensor | None) -> Callable[..., Tensor]:
        return lambda module, args, output: nn.functional.linear(
            args[0], weight.to(args[0]), None if bias is None else bias.to(args[0])
        )

    with ExitStack() as stack:
        for name, (weight, bias) in outputs.items():
            stack.callback(model.get_submodule(name).register_forward_hook(instead(weight, bias)).remove)
        yield


def _tokens(hidden: Tensor, batch: Batch) -> Tensor:
    """``[tokens, features]`` without padding."""
    mask = batch.get("attention_mask")
    return hidden[mask.bool()] if mask is not None else hidden.flatten(0, 1)


def _weight(linear: nn.Module) -> Tensor:
    """``[outputs, inputs]``."""
    weight: Any = linear.weight
    return weight.T if isinstance(linear, Conv1D) else weight


def _bias(linear: nn.Module) -> Tensor | float:
    bias: Any = linear.bias
    return 0.0 if bias is None else bias
