"""Newer public ways to choose heads, re-implemented from their papers, heads alone pruned: more of `baselines.METHODS`.

All of them compare the pruned model with the dense one and look at no label. Whole key/value groups go, with one mask each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from baselines import Baseline, Batches, Layers, _bias, _Block, _stack, _tokens, _weight, applied, by_layer, method
from torch import Tensor, nn

from headprune.attention import Heads
from headprune.divergence import KNOWN, logits_of
from headprune.gates import gated
from headprune.inputs import call, inputs_of
from headprune.losses import ExampleLoss
from headprune.running import frozen, quiet

TEMPERATURE = 2.0  # K-prune's
LAMBDAS = (2.5e-4, 1.0)  # K-prune's weights of representational knowledge
DRAWS = 4  # labels for each example, of which K-prune's curvature is the mean
# Steps, and rates, width and weights of DDP, were chosen on digits, by 320 examples drawn with another seed and the choose part.
STEPS = 640  # of every learned mask, a quarter of them for the factors of what stays
DDP_RATE = 0.05  # falls to 0
DDP_WIDTH = 2.0  # of the smooth count, falls to a tenth
DDP_PRICE = 1.0  # by which the multiplier rises, per step and share of heads too many
DDP_SQUARE = 50.0  # weight of the squared share
GRASP_RATE = 0.01  # this and the next two are its train.py's
GRASP_SOFT = 1.5  # divides scores in the sigmoid
GRASP_RANGE = 0.5  # factors lie within 1 plus or minus this
SLIM_SHARPNESS = 10.0  # of layers' shares

# -- units, masks, and what the model's parts see -----------------------------------------------


def spread(layers: Layers, units: Tensor) -> dict[str, Tensor]:
    """Gates of heads from one factor for each unit, ``[..., units]``."""
    gates = {}
    for layer, part in zip(layers, by_layer(layers, units), strict=True):
        owner = torch.empty(layer.num_heads, dtype=torch.long)
        for u, unit in enumerate(layer.units):
            owner[list(unit)] = u
        gates[layer.name] = part[..., owner]
    return gates


def best(layers: Layers, scores: Tensor, keep: int) -> Tensor:
    """1 for the units with the highest scores, as many as ``keep`` heads allow; 0 for the others: ``[units]``."""
    sizes, opened = _sizes(layers), torch.zeros(len(scores))
    for u in scores.argsort(descending=True).tolist():
        if sizes[u] <= keep:
            opened[u] = 1.0
            keep -= int(sizes[u])
    return opened


def _sizes(layers: Layers) -> Tensor:
    return torch.tensor([len(unit) for layer in layers for unit in layer.units])


def _closed(layers: Layers, opened: Tensor) -> Heads:
    found = {name: (gate == 0).nonzero().flatten().tolist() for name, gate in spread(layers, opened).items()}
    return {name: heads for name, heads in found.items() if heads}


@contextmanager
def _ready(model: nn.Module, batches: Batches) -> Iterator[tuple[ExampleLoss, list[Any]]]:
    """The divergence from the dense model, and batches with its answers; weights get no gradients."""
    with quiet(model), frozen(model):
        losses = ExampleLoss(model, distil=True)
        yield losses, losses.prepare(list(batches))


@contextmanager
def _watched(blocks: Sequence[_Block]) -> Iterator[dict[tuple[int, str], tuple[Tensor, Tensor]]]:
    """Input and output of each ``"block"``, and of its W_O (``"heads"``), in the latest run."""
    seen: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}

    def watch(key: tuple[int, str]) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            first = args[0] if args else kwargs["hidden_states"]
            seen[key] = first.detach(), (output[0] if isinstance(output, tuple) else output).detach()

        return hook

    with ExitStack() as stack:
        for i, block in enumerate(blocks):
            for name, part in (("block", block.module), ("heads", block.output)):
                stack.callback(part.register_forward_hook(watch((i, name)), with_kwargs=True).remove)
        yield seen


def _columns(block: _Block) -> list[list[int]]:
    """W_O's inputs of each unit."""
    place: Any = block.layer.output_projection
    return [[c for head in unit for c in place.features[head]] for unit in block.layer.units]


def contributions(block: _Block, heads: Tensor) -> Tensor:
    """What each unit adds to W_O's output ``[tokens, outputs, units]``, from W_O's input ``[tokens, features]``."""
    weight = _weight(block.output).detach()
    return torch.stack([heads[:, columns] @ weight[:, columns].T for columns in _columns(block)], dim=-1)


# -- K-prune ------------------------------------------------------------------------------------


@method("K-prune")
def kprune(model: nn.Module, batches: Batches, layers: Layers, keep: int, seed: int) -> Baseline:
    """Park, Choi, Kang (ICLR 2024, arXiv:2308.03449), from the paper: masks and weights, sub-layer by sub-layer from the bottom.

    A head's importance is its predictive knowledge, half the squared gradient of the divergence by its mask (temperature 2), plus
    lambda times its representational knowledge, the squared norm of what it adds to the residual stream, both as means over the
    examples. One threshold over all heads that are not decided yet decides those of the lowest layer. Then W_O's weights of
    its kept heads are solved by least squares, so that the residual stream behind comes near the dense model's, and the rest is scored
    again in the model so far. The better of two lambdas, by the divergence on the same examples; mu weighs heads against
    neurons, of which none go here.

    At the dense model the divergence has no gradient, so labels are drawn from the dense model's softened answers: the mean square
    of their loss's gradient is the divergence's curvature there, and later that plus its squared gradient.
    Known flaw: the diagonal alone, and no ridge where there are fewer tokens than W_O has inputs (here: the least change).
    """
    with _ready(model, batches) as (losses, known):
        found = [kpruned(model, known, layers, keep, seed, weight, losses) for weight in LAMBDAS]
        distances = []
        for one in found:
            with applied(model, layers, one), torch.no_grad():
                distances.append(torch.cat([losses.divergence(batch) for batch in known]).mean().item())
    return found[distances.index(min(distances))]


def kpruned(
    model: nn.Module, known: Batches, layers: Layers, keep: int, seed: int, weight: float, losses: ExampleLoss
) -> Baseline:
    """`kprune` with one lambda."""
    with torch.no_grad():
        blocks, _ = _stack(model, known, layers)
    drop: Heads = {}
    outputs: dict[str, tuple[Tensor, Tensor | None]] = {}
    goals: list[list[Tensor]] = []  # the dense residual stream behind each attention, without W_O's bias
    generator = torch.Generator().manual_seed(seed)
    for i, block in enumerate(blocks):
        with applied(model, layers, Baseline(drop, outputs=outputs)):
            predicts, represents, seen = _knowledge(model, known, blocks[i:], losses, generator)
        goals = goals or [[x + h @ _weight(b.output).T for x, h in s] for b, s in zip(blocks, seen, strict=True)]
        opened = best(layers[i:], predicts + weight * represents, keep)
        mine = opened[: len(block.layer.units)]
        drop |= _closed(layers[i : i + 1], mine)
        keep -= int((mine * _sizes(layers[i : i + 1])).sum())
        columns = [c for unit, one in zip(_columns(block), mine, strict=True) if one for c in unit]
        if columns:
            fitted = refit(_weight(block.output), columns, [h for _, h in seen[0]],
                           [goal - x for goal, (x, _) in zip(goals[i], seen[0], strict=True)])  # fmt: skip
            outputs[block.layer.output_projection.module] = fitted, block.output.bias  # type: ignore
    return Baseline(drop, outputs=outputs)


def _knowledge(
    model: nn.Module, known: Batches, blocks: Sequence[_Block], losses: ExampleLoss, generator: torch.Generator
) -> tuple[Tensor, Tensor, list[list[tuple[Tensor, Tensor]]]]:
    """Predictive and representational knowledge of the blocks' units, and what entered each block and its W_O, for each batch."""
    layers = [block.layer for block in blocks]
    units, examples = len(_sizes(layers)), 0
    predicts, represents = torch.zeros(units).double(), torch.zeros(units).double()
    tokens: list[list[tuple[Tensor, Tensor]]] = [[] for _ in blocks]
    for batch in known:
        chances = (batch[KNOWN] / TEMPERATURE).softmax(-1)
        gates = torch.ones(len(chances), units, dtype=chances.dtype, requires_grad=True)
        with _watched(blocks) as seen, gated(model, layers, spread(layers, gates)):
            now = logits_of(call(model, inputs_of(model, batch)), batch) / TEMPERATURE
        for _ in range(DRAWS):
            drawn = torch.multinomial(chances.flatten(0, -2), 1, generator=generator).view(*chances.shape[:-1], 1)
            loss = losses.divergence.mean(-now.log_softmax(-1).gather(-1, drawn)[..., 0], batch)
            (slope,) = torch.autograd.grad(loss.sum(), gates, retain_graph=True)
            predicts += TEMPERATURE**2 / 2 / DRAWS * slope.double().square().sum(0)
        for k in range(len(blocks)):
            tokens[k].append((_tokens(seen[k, "block"][0], batch), _tokens(seen[k, "heads"][0], batch)))
        parts = [contributions(b, t[-1][1]).square().sum((0, 1)) for b, t in zip(blocks, tokens, strict=True)]
        represents += torch.cat(parts)
        examples += len(chances)
    return predicts / examples, represents / examples, tokens


def refit(weight: Tensor, columns: list[int], inputs: Sequence[Tensor], goals: Sequence[Tensor]) -> Tensor:
    """``weight`` ``[outputs, inputs]`` with other ``columns``, with which ``inputs`` come nearest to ``goals``.

    Least squares over all tokens; of several solutions the one nearest to the present weight.
    """
    found = weight.detach().clone()
    gram, moment = torch.zeros(len(columns), len(columns)).double(), torch.zeros(len(columns), len(weight)).double()
    for x, goal in zip(inputs, goals, strict=True):
        read = x[:, columns]
        gram += (read.T @ read).double()
        moment += (read.T @ (goal - read @ found[:, columns].T)).double()
    change = torch.linalg.pinv(gram, rtol=1e-7, hermitian=True) @ moment
    found[:, columns] += change.T.to(found.dtype)
    return found


# -- learned masks ------------------------------------------------------------------------------

Gates = Callable[[Tensor, int], tuple[Tensor, Tensor | float]]
"""From trained values and a step to a factor for each unit, and what is added to the loss."""


def _trained(
    model: nn.Module, known: Batches, losses: ExampleLoss, layers: Layers, values: Tensor, gates: Gates,
    steps: int, rate: float, end: float, seed: int,
) -> Tensor:  # fmt: skip
    """Values after Adam's steps on the divergence from the dense model, a batch each; the rate goes to ``end`` times what it was."""
    values = values.clone().requires_grad_()
    optimiser = torch.optim.Adam([values], lr=rate, betas=(0.9, 0.99))
    falling = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, end, steps)
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    for step in range(steps):
        order = order or torch.randperm(len(known), generator=generator).tolist()
        factors, penalty = gates(values, step)
        with gated(model, layers, spread(layers, factors)):
            loss = losses.divergence(known[order.pop()]).mean() + penalty
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        falling.step()
    return values.detach()


def _scaled_mask(layers: Layers, opened: Tensor, factors: Tensor) -> Baseline:
    return Baseline(_closed(layers, opened), heads=spread(layers, factors))


@method("Learned masks, DDP")
def ddp(model: nn.Module, batches: Batches, layers: Layers, keep: int, seed: int) -> Baseline:
    """Huang et al. (ICML 2026, arXiv:2603.08065): deterministic masks relu(z), trained by distillation with frozen weights.

    Their number is held by an augmented Lagrangian on a smooth count of open heads, ``(1 + w^2) m^2 / (m^2 + w^2)``, whose width w
    falls from 2 to 0.2 while the number that is asked for falls from all to ``keep``, in the first half of the steps. After three
    quarters, the largest masks stay, and for the last quarter their values alone are trained. From the abstract: the count's form, the
    schedule and that last quarter are ours. Known flaw: a mask that reached 0 gets no gradient, so no head ever comes back.
    """
    sizes = _sizes(layers).float()
    total, first, price = int(sizes.sum()), STEPS * 3 // 4, 0.0

    def budgeted(values: Tensor, step: int) -> tuple[Tensor, Tensor]:
        nonlocal price
        masks, done = values.relu(), min(1.0, step / (STEPS / 2))
        width = DDP_WIDTH * 0.1**done
        count = (sizes * (1 + width**2) * masks**2 / (masks**2 + width**2)).sum()
        over = (count - total - (keep - total) * done) / total
        price += DDP_PRICE * over.item()
        return masks, price * over + DDP_SQUARE * over**2

    with _ready(model, batches) as (losses, known):
        values = _trained(model, known, losses, layers, torch.ones(len(sizes)), budgeted, first, DDP_RATE, 0.0, seed)
        opened = best(layers, values, keep)
        values = _trained(model, known, losses, layers, values.relu(), lambda v, _: (v.relu() * opened, 0.0),
                          STEPS - first, DDP_RATE, 0.0, seed)  # fmt: skip
    return _scaled_mask(layers, opened, values.relu())


@method("Learned masks, GRASPrune")
def grasprune(model: nn.Module, batches: Batches, layers: Layers, keep: int, seed: int) -> Baseline:
    """Wang et al. (ACL 2026, arXiv:2604.19398): scores trained through the mask that keeps to the budget at every step.

    Forward, the ``keep`` heads with the highest scores are open and the others closed; backward, the gradient by a mask goes to
    the sigmoid of its score as it is. Then factors of the kept heads, within 1 plus or minus 0.5, are trained in the same way
    ("scaling calibration", a quarter of the steps). Rates and ranges as in ZiY-Wang/GRASPrune. Here the loss is the divergence from
    the dense model (theirs is the text's own), the factors act on heads' outputs (theirs on keys too), and a layer may lose all
    heads. Known flaw: a closed head's gradient tells of a small opening, not of all of it; the mask goes on changing to the end.
    """
    start = 1e-3 * torch.randn(len(_sizes(layers)), generator=torch.Generator().manual_seed(seed))

    def projected(values: Tensor, step: int) -> tuple[Tensor, float]:
        soft = (values / GRASP_SOFT).sigmoid()
        return best(layers, soft.detach(), keep) + soft - soft.detach(), 0.0

    with _ready(model, batches) as (losses, known):
        first = STEPS * 3 // 4
        scores = _trained(model, known, losses, layers, start, projected, first, GRASP_RATE, 1.0, seed)
        opened = best(layers, scores, keep)

        def scaling(values: Tensor) -> Tensor:
            return opened * (1 + GRASP_RANGE * values.tanh())

        factors = _trained(model, known, losses, layers, torch.zeros_like(start), lambda v, _: (scaling(v), 0.0),
                           STEPS - first, GRASP_RATE, 1.0, seed)  # fmt: skip
    return _scaled_mask(layers, opened, scaling(factors))


# -- SlimLLM ------------------------------------------------------------------------------------


@method("SlimLLM")
@torch.no_grad()
def slimllm(model: nn.Module, batches: Batches, layers: Layers, keep: int, seed: int) -> Baseline:
    """Guo et al. (ICML 2025, arXiv:2505.22689; guojialong1/Slimllm): Pearson similarity of an attention's output with its own without heads.

    Layers lose heads in proportion to the softmax of 10 times the cosine similarity between what enters and leaves their block
    (here of every layer, capped at all of its heads, and rounded to the budget). From the bottom, each layer's heads go whose removal leaves
    the output most similar; then a removed head takes the place of a kept one where that is better still. The output is
    brought back by linear regression with a slope and an intercept for each output feature, on the input that the pruned layers
    below give. Formulas as in the authors' code. Known flaw: similarity is relative, so a layer's budget does not depend on what its heads do to the answers.
    """
    with quiet(model):
        blocks, _ = _stack(model, batches, layers)
        totals = torch.zeros(len(blocks) + 1).double()
        for batch in batches:
            with _watched(blocks) as seen:
                call(model, inputs_of(model, batch))
            for i in range(len(blocks)):
                near = torch.cosine_similarity(*seen[i, "block"], dim=-1)
                totals[i] += _tokens(near[..., None], batch).sum()
            totals[-1] += _tokens(near, batch).numel()
        size = len(layers[0].units[0])
        shares = (SLIM_SHARPNESS * totals[:-1] / totals[-1]).softmax(0)
        rooms = torch.tensor([len(layer.units) for layer in layers])
        lost = allotted(shares, rooms, (sum(layer.num_heads for layer in layers) - keep) // size)
        drop: Heads = {}
        outputs: dict[str, tuple[Tensor, Tensor | None]] = {}
        for i, block in enumerate(blocks):
            if not lost[i]:
                continue
            with applied(model, layers, Baseline(drop, outputs=outputs)):
                mean, spreads = moments(model, batches, block)
            opened = chosen(spreads, int(rooms[i] - lost[i]))
            drop |= _closed(layers[i : i + 1], opened)
            joint, own, _ = _variances(spreads, opened)
            slope = torch.where(own > 0, joint / own.clamp(min=1e-30), 0.0)
            intercept = mean.sum(1) - slope * (mean @ opened.double())
            weight = _weight(block.output)
            outputs[block.layer.output_projection.module] = (  # type: ignore[union-attr]
                slope.to(weight)[:, None] * weight, intercept.to(weight) + _bias(block.output)
            )  # fmt: skip
    return Baseline(drop, outputs=outputs)


def allotted(shares: Tensor, rooms: Tensor, count: int) -> Tensor:
    """``count`` dealt out in proportion to ``shares``, to none more than there is room for."""
    free, ideal = torch.ones(len(shares), dtype=torch.bool), rooms.double()
    while free.any():
        ideal = torch.where(free, shares / shares[free].sum() * (count - rooms[~free].sum()), rooms.double())
        over = free & (ideal > rooms)
        if not over.any():
            break
        free &= ~over
    whole = ideal.floor().long()
    whole[(ideal - whole).argsort(descending=True)[: count - int(whole.sum())]] += 1
    return whole


def moments(model: nn.Module, batches: Batches, block: _Block) -> tuple[Tensor, Tensor]:
    """Over tokens, of what units add to W_O's output: mean ``[outputs, units]``, covariance ``[outputs, units, units]``."""
    count, first, second = 0, torch.tensor(0.0), torch.tensor(0.0)
    for batch in batches:
        with _watched([block]) as seen:
            call(model, inputs_of(model, batch))
        parts = contributions(block, _tokens(seen[0, "heads"][0], batch)).double()
        count, first = count + len(parts), first + parts.sum(0)
        second = second + torch.einsum("tdu,tdv->duv", parts, parts)
    mean = first / count
    return mean, second / count - mean[:, :, None] * mean[:, None, :]


def _variances(spreads: Tensor, opened: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For each output feature: covariance of the open units' sum with that of all, and both variances."""
    joint = spreads @ opened.to(spreads)
    return joint.sum(1), joint @ opened.to(spreads), spreads.sum((1, 2))


def similarity(spreads: Tensor, opened: Tensor) -> float:
    """Mean over output features of the absolute Pearson correlation between W_O's output with the open units and with all."""
    joint, own, whole = _variances(spreads, opened)
    return (joint / (own * whole).clamp(min=1e-30).sqrt()).abs().mean().item()


def chosen(spreads: Tensor, keep: int) -> Tensor:
    """1 for the ``keep`` units that stay, by `similarity`: one by one, then by swaps."""
    alone = torch.tensor([similarity(spreads, 1 - one) for one in torch.eye(spreads.shape[-1])])
    order = alone.argsort(descending=True).tolist()
    gone = order[: len(order) - keep]
    opened = torch.ones(len(order)).index_fill(0, torch.tensor(gone, dtype=torch.long), 0.0)
    for back in gone:
        one = torch.eye(len(order))
        swaps = [opened, *(opened + one[back] - one[u] for u in opened.nonzero().flatten().tolist())]
        opened = max(swaps, key=lambda swap: similarity(spreads, swap))
    return opened
