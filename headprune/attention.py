"""`AttentionLayer`: the description of an attention layer and its heads; and checks of heads and layer names."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer, TypeAdapter, ValidationError

from headprune.errors import HeadPruneError
from headprune.pruned import HeadArgument, from_ranges, to_ranges

Heads = dict[str, list[int]]
"""Heads by layer: ``{layer_name: [head, ...]}``."""
Layers = Sequence["AttentionLayer"]
"""A model's attention layers, as `headprune.find_attention` gives them."""

_MOST = 2**24  # features of a projection, or entries of a table, in a file; more would only fill memory


def _indices(text: Any) -> Any:
    """As `from_ranges`, for the text of a file: refuses ranges so long that they would fill the memory."""
    if not isinstance(text, str):
        return text
    runs = [[int(end) for end in run.split(":")] for run in text.split(",") if run]
    if not all(0 <= start < stop for start, stop in runs) or sum(stop - start for start, stop in runs) > _MOST:
        raise ValueError(f"{text!r:.60} are no features")
    return from_ranges(text)


Indices = Annotated[tuple[int, ...], BeforeValidator(_indices), PlainSerializer(to_ranges)]


@dataclass(frozen=True)
class HeadFeatures:
    """The features of one module's input or output that belong to each head.

    Attributes:
        module: Qualified name of the module: mostly a linear one (``nn.Linear``, transformers' ``Conv1D``, or a convolution
            with a kernel of 1).
        features: ``features[h]`` are the indices that head ``h`` uses. For W_O, and for a gate, they index its input, for
            every other module its output. A feature may serve several heads (key/value groups); it can go only when all of
            them go.
        dim: The dimension of the input that the features of a gate lie along. Only convolutions have another than the last.
    """

    module: str
    features: tuple[Indices, ...]
    dim: int = -1


@dataclass(frozen=True)
class HeadTable:
    """A parameter or buffer outside the projections that has entries of its own for each head.

    Relative position tables, attention sinks, slopes and scales are of this kind.

    Attributes:
        name: Qualified name of the tensor.
        dim: The dimension that the heads lie along.
        indices: ``indices[h]`` along ``dim`` belong to head ``h``.
    """

    name: str
    dim: int
    indices: tuple[Indices, ...]


@dataclass(frozen=True, repr=False)
class AttentionLayer:
    """One attention layer of a model, as `headprune.find_attention` found it.

    Attributes:
        name: Qualified name of the attention module.
        index: Position in the order of execution; people see head 7 of index 3 as ``L3.H7``.
        kind: ``"encoder"`` (self-attention in both directions), ``"decoder"`` (causal
            self-attention) or ``"cross"``.
        num_heads: Query heads.
        num_kv_heads: Key/value heads (equal to ``num_heads`` without grouping).
        groups: The query heads that share a key/value head; () where none do, or all do.
        head_dim: Width of one head's output, in features.
        prunable: Whether heads can be removed exactly, as far as the trace can tell; `headprune.prune`'s proof decides.
        reason: Why heads cannot be removed; "" if they can.
        output_projection: W_O; its ``features`` are the input columns of each head. Where heads are concatenated and
            returned without a W_O, it names the attention module, and ``features`` index its output.
        gate: Where heads are masked if they cannot be told apart in the last dimension of W_O's input: at the input of a
            module between the attention and W_O, such as a norm or a dropout, or of a W_O that is a convolution.
        mixer: A norm over all heads between the attention and W_O (BitNet's) that maps zeros to zeros. It keeps its width:
            its input has zeros for removed heads, and only the kept heads' part of its output is passed on.
        projections: Every other projection that holds features of single heads (query, key,
            value, a per-head gate, fused or separate).
        values: The value projection (also in `projections`, there with all of its features): ``features[h]`` are head
            ``h``'s values, the same for all heads of a group. None unless there is exactly one such module.
        selections: Modules that compute something over all heads, such as a norm of the queries. They and the projections
            before them keep their width, and only the kept heads' features are taken from their output.
        tables: Parameters and buffers with entries of their own for each head.
        arguments: Arguments that hold something for each head, or whose shape says that they may.
        inner_modules: Modules that may hold numbers of heads as integers: the attention module and
            those inside it that were running when attention was computed.
        side_modules: Other modules inside it that may hold them: those that run before the attention, such as relative
            positions, but also those that count other heads.
        bypass: What happens when all of the layer's heads go. ``"stub"``: the attention
            module is replaced by its output projection's bias; ``"slice"``: the module works without any head;
            ``"ghost"``: one head (or group) stays with zero output, because a cache or a later layer needs what the
            module computes.
        output_arity: Length of the tuple the attention module returns, 0 for a bare tensor.
        heads_dim: The dimension of the attention weights that the heads lie along; 0 if before the examples, or together with them.
    """

    name: str
    index: int
    kind: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    groups: tuple[tuple[int, ...], ...] = ()
    prunable: bool = True
    reason: str = ""
    output_projection: HeadFeatures | None = None
    gate: HeadFeatures | None = None
    mixer: str = ""
    projections: tuple[HeadFeatures, ...] = ()
    values: HeadFeatures | None = None
    selections: tuple[HeadFeatures, ...] = ()
    tables: tuple[HeadTable, ...] = ()
    arguments: tuple[HeadArgument, ...] = ()
    inner_modules: tuple[str, ...] = ()
    side_modules: tuple[str, ...] = ()
    bypass: str = "ghost"
    output_arity: int = 0
    heads_dim: int = 1

    def __repr__(self) -> str:
        """One line with the most important fields; `to_json` has all."""
        name = self.name if len(self.name) <= 64 else f"…{self.name[-63:]}"
        kv = f", {self.num_kv_heads} key/value" if self.num_kv_heads != self.num_heads else ""
        fixed = "" if self.prunable else ", not prunable"
        heads = f"{self.num_heads} heads of {self.head_dim}{kv}{fixed}"
        return f"AttentionLayer(L{self.index} {name!r}: {self.kind}, {heads})"

    @property
    def title(self) -> str:
        """What messages call it: its name, or ``L0`` if it has none because the model itself is the attention module."""
        return self.name or f"L{self.index}"

    @property
    def mask_point(self) -> HeadFeatures | None:
        """Where single heads are switched off: `gate` if there is one, else `output_projection`; None where neither is known."""
        return self.gate or self.output_projection

    @property
    def maskable(self) -> bool:
        """Whether single heads can be switched off."""
        return self.mask_point is not None

    @property
    def module(self) -> str:
        """Qualified name of the attention module (``name`` has a suffix where one module computes several attentions)."""
        return self.name.partition("#")[0]

    @property
    def concatenates(self) -> bool:
        """Whether the module returns its heads side by side, without an output projection."""
        return self.output_projection is not None and self.output_projection.module == self.module

    @property
    def output_inside(self) -> bool:
        """Whether W_O is called inside the attention module."""
        return self.output_projection is not None and is_inside(self.output_projection.module, self.module)

    @property
    def units(self) -> tuple[tuple[int, ...], ...]:
        """The smallest sets of heads that can always be removed: heads, or key/value groups.

        >>> AttentionLayer("a", 0, "decoder", 4, 2, 8, groups=((0, 1), (2, 3))).units
        ((0, 1), (2, 3))
        """
        # If all heads share one key/value head, any query head can be removed.
        return self.groups or tuple((h,) for h in range(self.num_heads))

    def label(self, head: int) -> str:
        """The short address that people see, ``L3.H7``."""
        return f"L{self.index}.H{head}"

    def to_json(self) -> dict[str, Any]:
        # Versions that did not know of other places for heads read files of the usual one.
        usual = {"heads_dim"} if self.heads_dim == 1 else None
        data: dict[str, Any] = _LAYER.dump_python(self, mode="json", exclude=usual)
        return {**data, "output_inside": self.output_inside, "concatenates": self.concatenates}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> AttentionLayer:
        # An older file may lack other fields; a prune that needs one of them fails its proof.
        if missing := {"output_projection", "projections", "inner_modules", "groups"} - set(data):
            raise ValueError(f"{min(missing)} is missing")
        try:
            layer = _LAYER.validate_json(json.dumps(data), strict=True)
        except ValidationError as error:
            fault = error.errors()[0]
            place = " › ".join(map(str, fault["loc"]))
            raise ValueError(f"{place} is {fault['input']!r:.60}: {fault['msg']}") from None
        for number in (layer.index, layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.output_arity):
            if not 0 <= number <= _MOST:
                raise ValueError(f"{number} is no number from 0 to {_MOST}")
        grouped = sorted(h for group in layer.groups for h in group)
        if layer.num_heads < 1 or (grouped and grouped != [*range(layer.num_heads)]):
            raise ValueError(f"layer {layer.name} has {layer.num_heads} heads, and groups of others")
        if layer.mask_point is not None and len(layer.mask_point.features) != layer.num_heads:
            raise ValueError(f"layer {layer.name} has {layer.num_heads} heads, and features of others")
        return layer


_LAYER = TypeAdapter(AttentionLayer)


def is_inside(name: str, module: str) -> bool:
    """Whether a qualified name is that of a module, or of one inside it.

    >>> is_inside("layer.1.attn.out", "layer.1.attn"), is_inside("layer.10", "layer.1"), is_inside("layer.1", "")
    (True, False, True)
    """
    return f"{name}.".startswith(f"{module}." if module else "")


def check_heads(heads: Mapping[str, Sequence[int]], layers: Layers) -> Heads:
    """Validate ``{layer_name: [heads]}`` against the layers of a model.

    Returns:
        A copy in the order of the layers, with their full names (``heads`` may also say ``L3``), sorted heads, and without
        empty lists.

    Raises:
        HeadPruneError: An unknown layer, a head that does not exist, or a head listed twice.
    """
    result: Heads = {}
    if not isinstance(heads, Mapping):
        message = f"{type(heads).__name__} does not say which heads."
        raise HeadPruneError(message, "Give a plan, or a dict {layer_name: [head, …]}.")
    for name, indices in heads.items():
        layer = layer_named(name, layers)
        title = name or layer.title
        listed = list(indices) if isinstance(indices, Iterable) else [indices]
        try:
            if any(isinstance(h, bool) for h in listed):
                raise TypeError
            listed = [operator.index(h) for h in listed]
        except TypeError:
            message = f"Layer {title}: {indices!r} is no list of heads."
            raise HeadPruneError(message, "Heads are whole numbers, such as [0, 3].") from None
        for h in listed:
            if not 0 <= h < layer.num_heads:
                message = f"Layer {title} has no head {h}."
                raise HeadPruneError(message, f"It has {layer.num_heads}: 0 to {layer.num_heads - 1}.")
        if repeats := sorted({h for h in listed if listed.count(h) > 1}):
            raise HeadPruneError(f"Layer {title}: head {repeats[0]} is listed twice.")
        if layer.name in result:
            raise HeadPruneError(f"Layer {title} is named twice.", "Put its heads in one list.")
        result[layer.name] = sorted(listed)
    return {layer.name: result[layer.name] for layer in layers if result.get(layer.name)}


def layer_named(text: str, layers: Layers) -> AttentionLayer:
    """The layer with this name or short address, such as ``L3``.

    Raises:
        HeadPruneError: There is none.
    """
    for layer in layers:
        if text in (layer.name, f"L{layer.index}"):
            return layer
    message = f"There is no attention layer named {text!r} in this model."
    if not layers:
        raise HeadPruneError(message, "It has none.")
    first, last = layers[0].index, layers[-1].index
    addresses = f"layers L{first} to L{last}" if last > first else f"one layer, L{first}"
    raise HeadPruneError(message, f"This model has {addresses} (`headprune inspect` lists them).")


def check_possible(layer: AttentionLayer, dropped: Sequence[int]) -> None:
    """Refuse heads whose removal cannot be exact.

    Raises:
        HeadPruneError: The layer is not prunable, or the key/value groups would keep different numbers of query heads.
    """
    if not layer.prunable:
        raise HeadPruneError(f"Layer {layer.title} cannot be pruned: {layer.reason}.")
    if not layer.groups:
        return
    left = [len(set(unit) - set(dropped)) for unit in layer.units]
    if len({n for n in left if n}) > 1:
        counts = ", ".join(map(str, left))
        part = next(unit for unit in layer.units if 0 < len(set(unit) & set(dropped)) < len(unit))
        head = next(h for h in part if h in dropped)
        raise HeadPruneError(
            f"Layer {layer.title}: head {head} cannot go alone: its key/value groups would keep {counts} query heads, "
            "but groups must stay equal.",
            f"Drop whole groups (such as heads {', '.join(map(str, part))}) or the same number of heads from each.",
        )
