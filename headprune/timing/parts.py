"""Which part of a model each of its modules is: found from the traced attention layers and the modules' places, not from names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import nn

from headprune.attention import AttentionLayer, is_inside

PROJECTIONS, ATTENTION, FEED_FORWARD, ENDS, REST, LAUNCH = PARTS = (
    "attention projections", "attention itself", "feed-forward", "embeddings and head", "the rest", "launch overhead",
)  # fmt: skip
"""The parts of a forward pass. ``"the rest"`` is what stands between: norms, sums, masks, layers without attention."""


class Place(NamedTuple):
    """A module's part, and whose time its own is: a projection's or an attention module's name, "" in the other parts."""

    part: str
    owner: str = ""


class Parts:
    """The part of every module of a model.

    A module with a matrix of weights, but for an embedding, is *weighted*. A layer's block is the smallest module that holds its
    attention and a weighted module that is not of the attention: what is weighted there, and what is around that alone, is
    feed-forward. What is outside of all blocks, and not in a list of them, is embeddings or the head.

    Args:
        layers: As the trace found them.
        started: When each module was first called, in any unit; modules that were not called are left out. It tells what
            comes behind an output projection in a module that does more than attention.
    """

    def __init__(self, model: nn.Module, layers: Sequence[AttentionLayer], started: Mapping[str, float]) -> None:
        self._modules, self._started = dict(model.named_modules()), started
        self._attention = list(dict.fromkeys(layer.module for layer in layers))
        outputs = {a.module: a.output_projection.module for a in layers if a.output_projection and not a.concatenates}
        self._output = outputs
        # Where the attention module itself holds the weights of a projection, its time cannot be told from attention's.
        self._projections = {part.module for a in layers for part in a.projections} | set(outputs.values())
        self._projections -= set(self._attention)
        self._matrices = {n for n, m in self._modules.items() if any(p.ndim > 1 for p in m.parameters(recurse=False))}
        self._feeding = {
            n for n in self._matrices
            if n in started and not isinstance(self._modules[n], nn.Embedding)
            and self._innermost(n, self._projections) is None and self._around(n) is None
        }  # fmt: skip
        self._blocks = {b for b in map(self._block, self._attention) if b is not None}
        if "" in self._blocks:  # a model that is one block: what comes last is its head, what comes first its embedding
            first = min(started[n] for n in outputs.values() if n in started) if outputs else 0.0
            late = sorted((n for n in self._feeding if started[n] > first), key=started.__getitem__)
            inner = {n for n in self._feeding if any(b and is_inside(n, b) for b in self._blocks)}
            self._feeding = inner | set(late[:-1])
        else:
            self._feeding = {n for n in self._feeding if self._innermost(n, self._blocks) is not None}

    def place(self, name: str) -> Place:
        """Where the own time of a module belongs: what it spends outside of the modules in it."""
        if (projection := self._innermost(name, self._projections)) is not None:
            return Place(PROJECTIONS, projection)
        if (attention := self._around(name)) is not None:
            weighted = name in self._matrices and not isinstance(self._modules[name], nn.Embedding)
            if name != attention and weighted:
                return Place(PROJECTIONS, attention)  # of no single head, such as an adapter's
            return Place(ATTENTION, attention)
        own = list(self._modules[name].parameters(recurse=False))
        if self._alone(name, self._feeding) and not (own and all(p.ndim < 2 for p in own)):
            return Place(FEED_FORWARD)
        block = self._innermost(name, self._blocks)
        if block or self._listed(name) or self._holds_attention(name):
            return Place(REST)
        return Place(ENDS if block is None or self._alone(name, self._matrices) else REST)

    def _innermost(self, name: str, among: set[str] | list[str]) -> str | None:
        """The innermost of some modules that a module is, or is inside."""
        around = [n for n in among if is_inside(name, n)]
        return max(around, key=len) if around else None

    def _around(self, name: str) -> str | None:
        """The attention module whose attention a module is part of; None where it comes behind the output projection."""
        attention = self._innermost(name, self._attention)
        if attention is None or name == attention:
            return attention
        behind = self._started.get(self._output.get(attention, ""))
        return attention if behind is None or self._started.get(name, 0.0) <= behind else None

    def _block(self, attention: str) -> str | None:
        """The block of an attention module; None if there is nothing but attention."""
        path = attention.split(".") if attention else []
        above = [".".join(path[:n]) for n in range(len(path), -1, -1)]
        return next((b for b in above if any(is_inside(n, b) for n in self._feeding)), None)

    def _holds_attention(self, name: str) -> bool:
        return any(is_inside(a, name) for a in (*self._attention, *self._projections))

    def _alone(self, name: str, some: set[str]) -> bool:
        """Whether a module is in a part of the model that holds some of these, and no attention."""
        path = name.split(".") if name else []
        above = [".".join(path[:n]) for n in range(1, len(path) + 1)]
        top = next((n for n in above if not self._holds_attention(n)), None)
        return top is not None and any(is_inside(n, top) for n in some)

    def _listed(self, name: str) -> bool:
        """Whether a module is an item of a list of blocks, or inside of one."""
        path = name.split(".")
        above = [".".join(path[:n]) for n in range(1, len(path))]
        return any(isinstance(self._modules.get(n), nn.ModuleList) and self._holds_attention(n) for n in above)
