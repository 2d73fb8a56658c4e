"""Repair without training: refit what W_O makes of the heads that stay, in closed form.

When heads go, W_O loses some of its inputs. What they carried is partly known to the heads that stay, so W_O is fitted
anew, layer by layer, to give what the dense model's W_O gives: ridge regression towards the old weights, with a bias that
takes up the removed heads' mean. Only W_O and its bias change, so a repaired model prunes like any other.

A first fit takes the dense model's own activations: one pass serves any choice of heads (`Refit.quick`). Each further
sweep takes the inputs that W_O really gets, behind layers that are repaired already, so errors do not add up on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from headprune.attention import AttentionLayer, Heads, check_heads
from headprune.divergence import IGNORED
from headprune.errors import HeadPruneError
from headprune.inputs import call, model_device, move, tensors, usable
from headprune.loss import batch_size, inputs_of, rows_of, singles
from headprune.modules import exact_attention, uncompiled
from headprune.scoring.gradient import frozen, unlike
from headprune.trace import evaluating

RIDGES = (1e-4, 1e-2, 1e-1, 0.3, 1.0, 3.0, 10.0)  # of the mean variance of an input
_FOLDS = 2

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class LayerRepair:
    """One layer's refit.

    Attributes:
        before: Mean squared error per token of W_O's output with the old weights and without the removed heads, divided
            by the variance of the dense model's output.
        after: The same with the new weights.
        ridge: The strength that was best on held-out examples; infinite where the old weights were.
    """

    before: float
    after: float
    ridge: float


@dataclass(frozen=True)
class Repair:
    """What `repair` did.

    Attributes:
        layers: By layer; on the calibration examples, in the last sweep.
        examples: Calibration examples.
        passes: Forward passes over them.
        biases: Output projections that had no bias, and have one now.
        notes: What could not be refitted, and why.
    """

    layers: dict[str, LayerRepair]
    examples: int
    passes: int
    biases: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "layers": {name: vars(fitted) for name, fitted in self.layers.items()},
            "examples": self.examples, "passes": self.passes, "biases": list(self.biases), "notes": list(self.notes),
        }  # fmt: skip


def repair(
    model: nn.Module,
    drop: Mapping[str, Sequence[int]],
    batches: Sequence[Any],
    *,
    layers: Sequence[AttentionLayer],
    sweeps: int = 0,
    ridge: float | None = None,
    progress: Progress | None = None,
) -> Repair:
    """Refit the output projections of a model in place, so that the heads in ``drop`` can go.

    Every W_O from the first layer on that loses a head is fitted to give the dense model's outputs on the kept heads'
    outputs, by least squares over all tokens but padding. The columns of removed heads become zero: the model answers as
    it will when they are pruned (`headprune.prune` is still to come).

    Minimised is ``mean_t |y_t - W x_t - b|^2 + ridge * v * |W - W_old|^2``, y being the dense W_O's output at token t, x the
    kept heads' outputs, v their mean variance. Statistics are sums over tokens (float64), so memory does not grow with the
    data. This is the reconstruction of He et al. (2017, arXiv:1707.06168, section 3.1) and, towards the old weights, the
    refit of SparseGPT's kind (Frantar and Alistarh 2023, arXiv:2301.00774) for whole heads.

    Args:
        model: The dense model; or one pruned before, which is then what is fitted to.
        drop: ``{layer_name: [head, ...]}`` that will go.
        batches: What the model is called with, labels or not; or pairs ``(inputs, labels)``, as where inputs are a tuple.
            Never those that results are reported on.
        layers: From `headprune.find_attention`.
        sweeps: Passes with the pruned model's own activations, behind one with the dense model's.
        ridge: Strength of the pull towards the old weights; by default what is best by cross-validation, for each layer.
        progress: Called with (passes done, passes in all, note).

    Raises:
        HeadPruneError: An unknown layer or head, or no examples.
    """
    checked = check_heads(drop, layers)
    refit = Refit(model, layers, batches, ridge=ridge, progress=progress)
    weights = refit.fitted(checked, sweeps)
    refit.apply(weights)
    return refit.report(weights)


BIASES = "_headprune_biases"


def added_biases(model: nn.Module) -> list[str]:
    """Modules of a repaired model that have got a bias."""
    return list(model.__dict__.get(BIASES, []))


def add_biases(model: nn.Module, names: Sequence[str]) -> None:
    """Give modules a bias of zeros, as a repair had to: for a skeleton whose weights are loaded afterwards."""
    own = model.__dict__.setdefault(BIASES, [])
    modules = dict(model.named_modules())
    for name in names:
        if name not in own and name in modules:  # a stand-in's is there once it stays for good
            module = modules[name]
            weight: Any = module.weight
            module.bias = nn.Parameter(weight.new_zeros(weight.shape[0]), requires_grad=weight.requires_grad)
            own.append(name)


def remove_biases(model: nn.Module, names: Sequence[str]) -> None:
    """Take away what `add_biases` gave."""
    own = model.__dict__.setdefault(BIASES, [])
    for name in names:
        if name in own:
            module: Any = model.get_submodule(name)
            module.bias = None
            own.remove(name)


@dataclass
class Weights:
    """New weights by module.

    Attributes:
        of: ``{module: (W [in, out], b [out] or None)}``; modules that stay as they are, are not in it.
        ridges: The strengths they were fitted with, by module.
        facts: What the fits were like, by layer.
    """

    of: dict[str, tuple[Tensor, Tensor | None]] = field(default_factory=dict)
    ridges: dict[str, float] = field(default_factory=dict)
    facts: dict[str, LayerRepair] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.of)


@dataclass(frozen=True)
class Place:
    """An output projection that can be refitted.

    Attributes:
        name: Of the module.
        layers: That end in it (mostly one).
        weight, bias: The dense model's, ``[in, out]`` and ``[out]``, float64.
        has_bias: Whether the module has one, or can be given one.
        own_bias: Whether it has one.
    """

    name: str
    layers: tuple[AttentionLayer, ...]
    weight: Tensor
    bias: Tensor
    has_bias: bool
    own_bias: bool

    def kept(self, drop: Heads) -> Tensor:
        """The inputs of W_O that stay."""
        gone = {
            f
            for layer in self.layers
            if layer.output_projection
            for h in drop.get(layer.name, ())
            for f in layer.output_projection.features[h]
        }
        return torch.tensor([i for i in range(self.weight.shape[0]) if i not in gone], dtype=torch.long)


class _Moments:
    """Sums over tokens, by fold: of W_O's inputs with a 1 behind them, and of the outputs that are wanted."""

    def __init__(self, inputs: int, outputs: int, device: torch.device) -> None:
        place = torch.device("cpu") if device.type == "mps" else device  # mps has no float64
        self.xx = torch.zeros(_FOLDS, inputs + 1, inputs + 1, dtype=torch.float64, device=place)
        self.xy = torch.zeros(_FOLDS, inputs + 1, outputs, dtype=torch.float64, device=place)
        self.yy = torch.zeros(_FOLDS, dtype=torch.float64, device=place)

    def add(self, fold: int, x: Tensor, y: Tensor, weight: Tensor) -> None:
        """Tokens ``x`` [tokens, in] and ``y`` [tokens, out], with a weight each."""
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        x = torch.cat([x.to(wide), x.new_ones(len(x), 1, dtype=wide)], dim=1)
        y, weight = y.to(wide), weight.to(wide)[:, None]
        weighted = (x * weight).T
        self.xx[fold] += (weighted @ x).to(self.xx)
        self.xy[fold] += (weighted @ y).to(self.xy)
        self.yy[fold] += (y**2 * weight).sum().to(self.yy)


class Refit:
    """The output projections of one model, and their fits for any choice of heads.

    Args:
        model: The dense model.
        layers: Its attention layers.
        batches: Calibration examples.
        ridge: As for `repair`.
        progress: Called after every batch of a pass.

    Attributes:
        notes: What cannot be refitted, and why.
        passes: Forward passes over the calibration examples, so far.
        added: Modules that get a bias.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[AttentionLayer],
        batches: Sequence[Any],
        *,
        ridge: float | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.model, self.layers, self.ridge, self.progress = model, layers, ridge, progress
        device = model_device(model)
        with torch.inference_mode(False):
            self.batches = [usable(move(batch, device)) for batch in batches if batch_size(batch)]
        if not self.batches:
            raise HeadPruneError("There are no examples to repair on.", "Check the dataset, its split and --limit.")
        self.examples = sum(map(batch_size, self.batches))
        self.notes: list[str] = []
        self.passes = 0
        with torch.inference_mode(False):
            self.places = list(_places(model, layers, self.notes))
        self.added = [p.name for p in self.places if p.has_bias and not p.own_bias]
        if not self._independent():
            self.batches = [row for batch in self.batches for row in singles(batch)]
        self._dense: dict[str, _Moments] | None = None
        self._sensitivities: dict[int, dict[str, list[Tensor]]] = {}

    def fitted(self, drop: Heads, sweeps: int = 0) -> Weights:
        """New weights for the kept heads.

        Args:
            drop: ``{layer_name: [head, ...]}``.
            sweeps: 0 fits to the dense model's activations: after one pass they serve any choice of heads. Each sweep
                then takes two passes, with the inputs that W_O gets behind repaired layers.
        """
        if not any(drop.values()):
            return Weights()
        with torch.inference_mode(False), torch.no_grad():
            weights = self._fitted(self.dense_moments(), drop, dense=True)
            for _ in range(sweeps):
                weights = self._fitted(self._moments(weights), drop, dense=False)
        return weights

    def dense_moments(self) -> dict[str, _Moments]:
        """Of the dense model's activations."""
        if self._dense is None:
            with torch.inference_mode(False):
                self._dense = self._moments(None)
        return self._dense

    @contextmanager
    def applied(self, weights: Weights) -> Iterator[None]:
        """The model with other weights, while the context lasts."""
        own = {p.name: (p.weight, p.bias if p.own_bias else None) for p in self.places}
        self.apply(weights)
        try:
            yield
        finally:
            self._write({name: own[name] for name in weights.of})

    def apply(self, weights: Weights) -> None:
        """Write weights into the model."""
        self._write(weights.of)

    def hessian(self, place: Place, kept: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
        """Of the ridge regression, ``[kept, kept]``, and the inputs' mean that it was taken around, ``[kept]``."""
        xx, xy = _rows_of(self.dense_moments()[place.name], kept)
        a, _, mean, _ = _centred(xx.sum(0).cpu(), xy.sum(0).cpu(), place.has_bias)
        strength = ridge * float(a.diagonal().mean()) if len(a) else 0.0
        # Inputs that never change have nothing to be fitted to.
        return a + max(strength, 1e-12) * torch.eye(len(a), dtype=a.dtype), mean if place.has_bias else mean * 0

    def matters(self, place: Place) -> bool:
        """Whether the model's answers depend on a W_O at all, so that there is something to fit it to."""
        return bool(self.dense_moments()[place.name].xx[:, -1, -1].sum() > 0)

    def report(self, weights: Weights) -> Repair:
        """What was done."""
        biases = tuple(name for name in self.added if name in weights.of)
        return Repair(dict(weights.facts), self.examples, self.passes, biases, tuple(self.notes))

    # -- statistics --------------------------------------------------------------------------------

    def _moments(self, weights: Weights | None) -> dict[str, _Moments]:
        """Of W_O's inputs in the model with ``weights`` (None: the dense one) and its outputs in the dense model."""
        found = {p.name: _Moments(p.weight.shape[0], p.weight.shape[1], model_device(self.model)) for p in self.places}
        with torch.no_grad(), self.calm():
            for i, batch in enumerate(self.batches):
                wanted: dict[str, list[Tensor]] = {p.name: [] for p in self.places}
                told = {p.name: iter(self._sensitivity(i)[p.name]) for p in self.places}

                def see(name: str, x: Tensor, y: Tensor, i: int = i, wanted: Any = wanted, told: Any = told) -> None:
                    if weights is None:
                        self._sum(found[name], x, y, next(told[name]), i, name)
                    else:
                        wanted[name].append(y)

                def fit(name: str, x: Tensor, y: Tensor, i: int = i, wanted: Any = wanted, told: Any = told) -> None:
                    self._sum(found[name], x, wanted[name].pop(0), next(told[name]), i, name)

                self._run(batch, see)
                if weights is not None:
                    with self.applied(weights):
                        self._run(batch, fit)
                if self.progress:
                    self.progress(i + 1, len(self.batches), "")
        self.passes += 1 if weights is None else 2
        for place in self.places:
            moments = found[place.name]
            if not all(bool(m.isfinite().all()) for m in (moments.xx, moments.xy, moments.yy)):
                raise _not_finite(place.layers[0], "the slopes of the model's answers there are")
        return found

    def slopes(self, index: int) -> dict[str, list[tuple[Tensor, Tensor]]]:
        """W_O's inputs and the slopes at its outputs, by module, for every call, on a batch.

        Slopes are of a random projection of the model's answers as it is now (`probe`).
        """
        found = self._slopes(self.batches[index], self._first(index))
        if index == len(self.batches) - 1:
            self.passes += 3  # a backward pass costs about two
        return found

    def probe(self, output: Any, index: int) -> Tensor:
        """A number whose gradient, squared, is on average the Fisher information of the answers to a batch."""
        return self._probe(output, self.batches[index], self._first(index))

    def _slopes(self, batch: Any, first: int, alone: bool = False) -> dict[str, list[tuple[Tensor, Tensor]]]:
        seen: dict[str, list[tuple[Tensor, Tensor]]] = {p.name: [] for p in self.places}

        def add(name: str, x: Tensor, y: Tensor) -> Tensor:
            seen[name].append((x.detach(), torch.zeros_like(y, requires_grad=True)))
            return y + seen[name][-1][1]

        with torch.inference_mode(False), torch.enable_grad(), self.calm(), frozen(self.model):
            probe = self._probe(self._run(batch, add), batch, first, alone)
            flat = [delta for calls in seen.values() for _, delta in calls]
            slopes = iter(torch.autograd.grad(probe, flat, allow_unused=True))
        return {
            name: [(x, delta if (slope := next(slopes)) is None else slope) for x, delta in calls]
            for name, calls in seen.items()
        }

    def _sensitivity(self, index: int) -> dict[str, list[Tensor]]:
        """How much each token of W_O's output matters for the dense model's answer: ``[rows, ...]`` by module and call.

        The norm of its slope, which is the square root of the Fisher information in expectation. The square would leave
        but a few tokens of a few examples to fit to.
        """
        if index not in self._sensitivities:
            self._sensitivities[index] = {
                name: [_wide(slope).norm(dim=-1) for _, slope in calls] for name, calls in self.slopes(index).items()
            }
        return self._sensitivities[index]

    @contextmanager
    def calm(self) -> Iterator[None]:
        """The model as it answers alike every time, with its heads apart."""
        with uncompiled(), evaluating(self.model), exact_attention(self.model):
            yield

    def _first(self, index: int) -> int:
        """The number of a batch's first example."""
        return sum(map(batch_size, self.batches[:index]))

    def _independent(self) -> bool:
        """Whether rows of one example stay together at every W_O, tried on up to three.

        A module that puts tokens before the batch would mix them up.
        """
        batch = max(self.batches, key=batch_size)
        if batch_size(batch) == 1 or not self.places:
            return True
        some = rows_of(batch, unlike(batch, batch_size(batch)))
        found = [slope for calls in self._slopes(some, 0, alone=True).values() for _, slope in calls]
        return not any(bool(slope[-(-len(slope) // batch_size(some)) :].any()) for slope in found)

    def _run(self, batch: Any, see: Callable[[str, Tensor, Tensor], Tensor | None]) -> Any:
        """The model's output; ``see`` hears W_O's input and output, and may give another output."""
        handles = [
            self._module(p).register_forward_hook(
                lambda module, args, kwargs, out, name=p.name: see(
                    name, args[0] if args else next(iter(kwargs.values())), out
                ),
                with_kwargs=True,
            )
            for p in self.places
        ]
        try:
            return call(self.model, inputs_of(self.model, batch))
        finally:
            for handle in handles:
                handle.remove()

    # -- weights -----------------------------------------------------------------------------------

    def _fitted(self, moments: Mapping[str, _Moments], drop: Heads, *, dense: bool) -> Weights:
        weights = Weights()
        started = False  # what comes before the first layer that loses a head sees nothing new
        for place in self.places:
            kept = place.kept(drop)
            loses = len(kept) < len(place.weight)
            started |= loses
            # On the dense model's own inputs a W_O that keeps them all is right as it is.
            if (loses if dense else started) and float(moments[place.name].xx[:, -1, -1].sum()):
                weight, bias, facts = _fit(moments[place.name], place, kept, self.ridge)
                weights.of[place.name] = weight, bias
                weights.ridges[place.name] = facts.ridge
                weights.facts |= {layer.name: facts for layer in place.layers}
        return weights

    def _write(self, weights: Mapping[str, tuple[Tensor, Tensor | None]]) -> None:
        """Into the model; a bias that is None goes, where there was none."""
        new = [name for name in self.added if name in weights]
        with torch.inference_mode(False), torch.no_grad(), exact_attention(self.model):
            remove_biases(self.model, [name for name in new if weights[name][1] is None])
            add_biases(self.model, [name for name in new if weights[name][1] is not None])
            for place in self.places:
                if place.name in weights:
                    module: Any = self._module(place)
                    weight, bias = weights[place.name]
                    # In place, since stand-ins share their weights with what they stand in for.
                    module.weight.copy_(weight if _transposed(module) else weight.T)
                    if bias is not None and module.bias is not None:
                        module.bias.copy_(bias)

    def _module(self, place: Place) -> nn.Module:
        return self.model.get_submodule(place.name)

    def _layer(self, name: str) -> AttentionLayer:
        return next(p.layers[0] for p in self.places if p.name == name)

    def _probe(self, output: Any, batch: Any, first: int, alone: bool = False) -> Tensor:
        """See `probe`; ``alone`` looks at the first example's answers only."""
        seeds = range(first, first + batch_size(batch))
        mask = _mask(self.model, batch, "decoder")

        def noise(like: Tensor) -> Tensor:
            found = _noise(like, mask, seeds)
            if alone and len(found) == len(seeds):
                found[1:] = 0
            return found

        logits = getattr(output, "logits", None)
        if isinstance(logits, Tensor) and logits.shape[-1] > 1:
            chances = _wide(logits).log_softmax(-1)
            root = chances.detach().exp().sqrt()
            return (_across(root, noise(chances)) * root * chances).sum()
        found = [_wide(t) for t in tensors(output) if t.is_floating_point() and t.requires_grad]
        if not found:
            raise HeadPruneError("The model's answers do not depend on any head by what can be differentiated.")
        return torch.stack([(noise(t) * t).sum() for t in found]).sum()

    def _sum(self, moments: _Moments, x: Tensor, y: Tensor, told: Tensor, index: int, name: str) -> None:
        """Add a batch's tokens without padding, by how much they matter; every other example to the other fold."""
        batch, layer = self.batches[index], self._layer(name)
        real = _real(x, _mask(self.model, batch, layer.kind))
        rows, tokens, size = x.shape[0], x.shape[:-1], batch_size(batch)
        if self.examples == 1:  # its tokens take turns
            fold = torch.arange(tokens.numel(), device=x.device) % _FOLDS
        else:
            # Tokens flattened into rows, or windows cut out of every example: rows of one example stay together.
            example = self._first(index) + torch.arange(rows, device=x.device) * size // rows
            fold = (example % _FOLDS).view(-1, *[1] * (len(tokens) - 1)).expand(tokens).flatten()
        x, y = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
        for i in range(_FOLDS):
            chosen = (fold == i) if real is None else (fold == i) & real
            if not bool(x[chosen].isfinite().all() & y[chosen].isfinite().all()):
                raise _not_finite(layer, "what goes through its output projection is")
            moments.add(i, x[chosen], y[chosen], told.flatten()[chosen])


def _places(model: nn.Module, layers: Sequence[AttentionLayer], notes: list[str]) -> Iterator[Place]:
    """The output projections that can be refitted, in the order of the layers."""
    by_module: dict[str, list[AttentionLayer]] = {}
    real = dict(model.named_modules())
    for layer in layers:
        if why := _why_not(layer):
            notes.append(f"{layer.name} keeps its old weights: {why}.")
        elif layer.output_projection:
            by_module.setdefault(layer.output_projection.module, []).append(layer)
    with exact_attention(model):
        owners: dict[int, list[str]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            weight = getattr(module, "weight", None)
            if isinstance(weight, Tensor):
                owners.setdefault(_place_of(weight), []).append(name)
        for name, those in by_module.items():
            projection: Any = model.get_submodule(name)
            weight = getattr(projection, "weight", None)
            bias = getattr(projection, "bias", None)
            own = "weight" in projection._parameters  # and not made of others, as an adapter's
            if (
                not isinstance(weight, Tensor)
                or not own
                or weight.ndim != 2
                or not weight.is_floating_point()
                or weight.is_meta
            ):
                notes.append(f"{those[0].name} keeps its old weights: {name} is no plain linear layer in memory.")
            elif len(owners.get(_place_of(weight), ())) > 1:
                notes.append(f"{those[0].name} keeps its old weights: {name} shares them with another module.")
            else:
                matrix = weight.detach().double() if _transposed(projection) else weight.detach().double().T
                can = bias is not None or (isinstance(projection, nn.Linear) and real.get(name) is projection)
                zeros = matrix.new_zeros(matrix.shape[1])
                start = zeros if bias is None else bias.detach().double().clone()
                yield Place(name, tuple(those), matrix.clone(), start, can, bias is not None)


def _place_of(weight: Tensor) -> int:
    """Where a weight lies: stand-ins have parameters of their own in the same place."""
    return id(weight) if weight.is_meta else weight.data_ptr() or id(weight)


def _why_not(layer: AttentionLayer) -> str:
    if layer.output_projection is None or layer.concatenates:
        return "it has no output projection"
    if layer.gate is not None or layer.mixer:
        return "something comes between its heads and the output projection"
    return "" if layer.prunable else layer.reason


def _transposed(module: nn.Module) -> bool:
    """Whether a weight is [in, out], as transformers' Conv1D has it."""
    return type(module).__name__ == "Conv1D"


def _mask(model: nn.Module, batch: Any, kind: str) -> Tensor | None:
    """Which tokens are no padding, ``[batch, tokens]``, for layers of a kind; None where that is not known."""
    if isinstance(batch, tuple | list):  # a pair, with labels
        batch = batch[0]
    if not isinstance(batch, Mapping):
        return None
    translates = "decoder_input_ids" in batch or getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    found = batch.get("attention_mask")
    if translates and kind != "encoder":
        labels = batch.get("labels")
        if isinstance(labels, Tensor) and labels.ndim == 2:  # what is decoded is made of them
            found = labels != IGNORED
        elif "decoder_input_ids" in batch:
            found = None
        found = batch.get("decoder_attention_mask", found)
    return found.bool() if isinstance(found, Tensor) and found.ndim == 2 else None


def _across(root: Tensor, draw: Tensor) -> Tensor:
    """Noise ``[..., classes]`` without its part along the square roots of the classes' probabilities, which would change nothing.

    The rest gets the length that it has on average. So with two classes nothing is left to chance but a sign.
    """
    rest = draw - root * (root * draw).sum(-1, keepdim=True)
    length = rest.norm(dim=-1, keepdim=True).clamp(min=1e-12)
    scaled: Tensor = rest * ((root.shape[-1] - 1) ** 0.5 / length)
    return scaled


def _noise(like: Tensor, mask: Tensor | None, seeds: Sequence[int]) -> Tensor:
    """Random numbers ``[examples, ...]``: the same for an example in any batch, none at padding."""
    if not like.ndim or len(like) != len(seeds):
        return torch.randn(like.shape, generator=torch.Generator().manual_seed(seeds[0])).to(like)
    found = torch.zeros(like.shape)
    for row, seed in enumerate(seeds):
        generator = torch.Generator().manual_seed(seed)
        if mask is not None and like.ndim > 2 and mask.shape == like.shape[:2]:
            told = mask[row].cpu()
            found[row, told] = torch.randn(int(told.sum()), *like.shape[2:], generator=generator)
        else:
            found[row] = torch.randn(like.shape[1:], generator=generator)
    return found.to(like)


def _wide(t: Tensor) -> Tensor:
    return t if t.dtype == torch.float64 else t.float()


def _not_finite(layer: AttentionLayer, what: str) -> HeadPruneError:
    return HeadPruneError(
        f"Layer {layer.name} cannot be repaired: {what} not finite.",
        "Leave out the example that does it, use --dtype float32, or do without repair.",
    )


def _real(x: Tensor, mask: Tensor | None) -> Tensor | None:
    """Which tokens ``[batch * tokens]`` are no padding; None where that is not known."""
    if mask is None or mask.numel() != x.shape[:-1].numel():
        return None
    return mask.to(x.device).flatten()


def _fit(
    moments: _Moments, place: Place, kept: Tensor, ridge: float | None
) -> tuple[Tensor, Tensor | None, LayerRepair]:
    """The best weights for the inputs that stay, ``[in, out]`` with rows of zeros for the others."""
    xx, xy = (m.cpu() for m in _rows_of(moments, kept))
    yy = moments.yy.cpu()
    old = place.weight.cpu()[kept], place.bias.cpu()
    chosen = ridge
    if chosen is None:
        tried = [_held_out(xx, xy, yy, old, place.has_bias, r) for r in RIDGES]
        stays = sum(_error(xx[i], xy[i], yy[i], *old) for i in range(_FOLDS))
        chosen = float("inf") if stays <= min(tried) else RIDGES[tried.index(min(tried))]
    all_xx, all_xy, all_yy = xx.sum(0), xy.sum(0), yy.sum(0)
    weight, bias = old if chosen == float("inf") else _solved(all_xx, all_xy, old, place.has_bias, chosen)
    tokens = float(all_xx[-1, -1])
    spread = float(all_yy) / tokens - float((all_xy[-1] / tokens).square().sum())
    unit = tokens * max(spread, 1e-30)
    facts = LayerRepair(
        _error(all_xx, all_xy, all_yy, *old) / unit, _error(all_xx, all_xy, all_yy, weight, bias) / unit, chosen
    )
    whole = torch.zeros_like(place.weight, device="cpu")
    whole[kept] = weight
    return whole, bias if place.has_bias else None, facts


def _held_out(xx: Tensor, xy: Tensor, yy: Tensor, old: tuple[Tensor, Tensor], has_bias: bool, ridge: float) -> float:
    """Squared error on every fold of what was fitted on the others."""
    error = 0.0
    for i in range(_FOLDS):
        if float(xx.sum(0)[-1, -1] - xx[i, -1, -1]) <= 0:
            return float("inf")
        fitted = _solved(xx.sum(0) - xx[i], xy.sum(0) - xy[i], old, has_bias, ridge)
        error += _error(xx[i], xy[i], yy[i], *fitted)
    return error


def _solved(xx: Tensor, xy: Tensor, old: tuple[Tensor, Tensor], has_bias: bool, ridge: float) -> tuple[Tensor, Tensor]:
    """Ridge regression towards the old weights, the bias free: ``W [in, out]``, ``b [out]``."""
    a, c, mean_x, mean_y = _centred(xx, xy, has_bias)
    if not len(a):
        return old[0], mean_y if has_bias else old[1]
    strength = ridge * float(a.diagonal().mean())
    if strength <= 0:  # inputs that never change
        return old[0], mean_y - mean_x @ old[0] if has_bias else old[1]
    weight = torch.linalg.solve(a + strength * torch.eye(len(a), dtype=a.dtype), c + strength * old[0])
    return weight, mean_y - mean_x @ weight if has_bias else old[1]


def _centred(xx: Tensor, xy: Tensor, has_bias: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Second moments ``[in, in]`` and ``[in, out]`` per token, and the means of inputs and outputs."""
    tokens = xx[-1, -1]
    mean_x, mean_y = (xx[-1, :-1] / tokens, xy[-1] / tokens)
    if not has_bias:  # nothing may be taken out that nothing can put back
        return xx[:-1, :-1] / tokens, xy[:-1] / tokens, mean_x, mean_y
    a = xx[:-1, :-1] / tokens - torch.outer(mean_x, mean_x)
    return a, xy[:-1] / tokens - torch.outer(mean_x, mean_y), mean_x, mean_y


def _rows_of(moments: _Moments, kept: Tensor) -> tuple[Tensor, Tensor]:
    """What concerns the inputs that stay, and the 1 behind them."""
    both = torch.cat([kept, torch.tensor([moments.xx.shape[-1] - 1])]).to(moments.xx.device)
    return moments.xx[:, both][:, :, both], moments.xy[:, both]


def _error(xx: Tensor, xy: Tensor, yy: Tensor, weight: Tensor, bias: Tensor) -> float:
    """Sum over tokens of ``|y - W x - b|^2``."""
    w = torch.cat([weight, bias[None]])
    return float(yy - 2 * (w * xy).sum() + (w * (xx @ w)).sum())
