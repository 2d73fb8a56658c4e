"""How a pruned model's modules differ from their classes: read as data, and applied to a freshly built model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn

from headprune.pruned.hooks import HOOK_DATA
from headprune.pruned.modules import ConfigView, EmptyAttention, OnlyBias, convert, emptied, is_ours

Structure = dict[str, Any]
"""The result of `structure_of`: values that JSON can hold."""

VERSION = 1
# Attributes of a pruned model. A model that transformers loaded has them from its folder's code, so their names must stay.
_BIASES, _GHOSTS, _REMOVED = "_headprune_biases", "_headprune_ghosts", "_headprune_removed"
_HEADS, _WAS_REPAIRED = "_headprune_heads", "_headprune_was_repaired"


@dataclass(frozen=True)
class Edited:
    """Which tensors and integers of a module differ from its class's; and whether it is a stand-in that stays."""

    name = "_headprune_edited"
    tensors: frozenset[str] = frozenset()
    numbers: frozenset[str] = frozenset()
    stand_in: bool = False

    @classmethod
    def of(cls, module: nn.Module) -> Edited:
        """The record of a module so far."""
        return vars(module).get(cls.name) or cls()

    @classmethod
    def add(cls, module: nn.Module, tensors: Iterable[str] = (), numbers: Iterable[str] = ()) -> None:
        """Note more tensors and numbers of a module."""
        old = cls.of(module)
        vars(module)[cls.name] = cls(old.tensors.union(tensors), old.numbers.union(numbers), old.stand_in)


def structure_of(model: nn.Module) -> Structure:
    """How a model's modules differ from their classes, because it was pruned or repaired.

    Returns:
        ``{}`` for a model that was never pruned or repaired; else ``version``; ``modules``, by qualified name; ``shared``, groups
        of names of one tensor; and by name the ``biases`` that were added and the ``ghosts`` (layers without heads that keep
        one with zero output).
    """
    modules: dict[str, dict[str, Any]] = {}
    names: dict[int, list[str]] = {}  # of the tensors that changed
    replaced: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if replaced and name.startswith(replaced):
            continue  # what an emptied module holds in the place of its weights
        if is_ours(module, EmptyAttention, OnlyBias):
            modules[name] = cast(Any, module).to_json()
            replaced += (f"{name}.",)
            continue
        if entry := _differences(module):
            modules[name] = entry
        for own in entry.get("tensors", ()):
            names.setdefault(id(holder_of(module, own)[own]), []).append(_joined(name, own))
    inner, prefix = home(model)
    biases, kept = [prefix + name for name in vars(inner).get(_BIASES, [])], sorted(ghosts(model))
    if not (modules or biases or kept):
        return {}
    shared = [group for group in names.values() if len(group) > 1]
    return {"version": VERSION, "modules": modules, "shared": shared, "biases": biases, "ghosts": kept}


def _differences(module: nn.Module) -> dict[str, Any]:
    """How one module differs from its class."""
    edited = Edited.of(module)
    entry: dict[str, Any] = {"stand_in": True} if edited.stand_in else {}
    held = {own: holder_of(module, own).get(own) for own in sorted(edited.tensors)}
    parts = {
        "tensors": {own: list(tensor.shape) for own, tensor in held.items() if tensor is not None},
        "numbers": {own: getattr(module, own) for own in sorted(edited.numbers)},
        "configs": {own: dict(v.own) for own, v in vars(module).items() if is_ours(v, ConfigView)},
        "carried": {kind: of.to_json() for kind, cls in HOOK_DATA.items() if (of := cls.of(module)) is not None},
    }
    return entry | {key: part for key, part in parts.items() if part}


def restructure(model: nn.Module, structure: Mapping[str, Any]) -> None:
    """Give a dense model's modules the shapes, numbers and hooks of a pruned model; its weights have to be loaded afterwards.

    Args:
        model: Dense, of the class and config that ``structure`` was read off; or its base model, or a model with a head on that.
        structure: Of `structure_of`; it may also say which heads were ``removed``, of how many (``heads``), and whether it
            was ``repaired``.
    """
    if not structure:
        return
    if structure["version"] > VERSION:
        raise ValueError(f"this folder was saved by a newer headprune (structure {structure['version']})")
    first_of = {name: group[0] for group in structure["shared"] for name in group}
    tensors: dict[str, Tensor] = {}  # by the first of their names in the structure
    here: dict[str, str] = {}  # the names in this model of tensors that differ
    for saved, entry in structure["modules"].items():
        if (name := _renamed(model, saved)) is None:
            continue
        module = replace_by_stand_in(model, name) if entry.get("stand_in") else model.get_submodule(name)
        if empty := entry.get("empty") or entry.get("only_bias"):
            bias = _new(next(module.parameters()), [empty["width"]]) if empty["bias"] else None
            arity = empty.get("arity")
            new = OnlyBias(module, bias) if arity is None else emptied(module, empty["width"], bias, arity)
            set_module(model, name, new)
            continue
        for own, shape in entry.get("tensors", {}).items():
            full = _joined(saved, own)
            key = first_of.get(full, full)
            if key not in tensors:
                tensors[key] = _new(holder_of(module, own).get(own), shape, next(module.parameters(), None))
            hold(module, own, tensors[key])
            here[full] = _joined(name, own)
        vars(module).update(entry.get("numbers", {}))
        Edited.add(module, entry.get("tensors", ()), entry.get("numbers", ()))
        for own, fields in entry.get("configs", {}).items():
            vars(module)[own] = ConfigView(getattr(module, own), dict(fields))
        for kind, data in entry.get("carried", {}).items():
            HOOK_DATA[kind].from_json(data).attach(module)
    _correct_ties(model, here, first_of)
    biases, kept = ([_renamed(model, name) for name in structure[key]] for key in ("biases", "ghosts"))
    vars(model)[_BIASES] = [name for name in biases if name is not None]
    drops = [{_renamed(model, n) or n: heads for n, heads in drop.items()} for drop in structure.get("removed", ())]
    heads = {_renamed(model, n) or n: count for n, count in structure.get("heads", {}).items()}
    record = {"removed": drops, "heads": heads, "repaired": structure.get("repaired")}
    add_record(model, record, [name for name in kept if name is not None])


def _correct_ties(model: nn.Module, here: Mapping[str, str], first_of: Mapping[str, str]) -> None:
    """Tell transformers which of the changed tensors are tied, so that it ties no others when it loads a folder.

    Layers that share their weights (Zamba 2) may have lost different heads; they must not get each other's.

    Args:
        here: The names in this model of the tensors that differ, by their names in the structure.
        first_of: The first name of each shared tensor, by all of its names in the structure.
    """
    tied = getattr(model, "all_tied_weights_keys", None)
    if tied is None:
        return
    for saved, name in here.items():
        tied.pop(name, None)
        if (first := first_of.get(saved, saved)) != saved and first in here:
            tied[name] = here[first]


def _renamed(model: nn.Module, saved: str) -> str | None:
    """A saved module's name in this model, with or without the base model's prefix; None if it is not there."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    for name in (saved, saved.removeprefix(prefix), prefix + saved):
        try:
            model.get_submodule(name)
        except AttributeError:
            continue
        return name
    return None


def _joined(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name


def holder_of(module: nn.Module, name: str) -> dict[str, Any]:
    """The dict of a module's buffers if ``name`` is one of them, else that of its parameters."""
    return module._buffers if name in module._buffers else module._parameters


def _new(like: Tensor | None, shape: Sequence[int], beside: Tensor | None = None) -> Tensor:
    """A tensor or parameter to be filled, as ``like``; as the parameter ``beside`` if the class has none there."""
    source = like if like is not None else beside
    assert source is not None
    new = source.detach().new_empty(shape)  # no memory is taken until it is filled
    if like is not None and not isinstance(like, nn.Parameter):
        return new
    return nn.Parameter(new, requires_grad=source.requires_grad)


def hold(module: nn.Module, name: str, value: Tensor | None) -> None:
    """Set a module's tensor. A buffer becomes persistent, since no class can compute a buffer that was cut."""
    holder_of(module, name)[name] = value
    if name in module._buffers:
        module._non_persistent_buffers_set.discard(name)


def set_module(model: nn.Module, name: str, new: nn.Module) -> None:
    """Replace a module by another."""
    parent_name, _, child = name.rpartition(".")
    model.get_submodule(parent_name)._modules[child] = new


def replace_by_stand_in(model: nn.Module, name: str) -> nn.Module:
    """Replace a module for good by its stand-in (`headprune.pruned.modules`), if any; returns the module in place."""
    module = model.get_submodule(name)
    new = convert(module)
    if new is None:
        return module
    set_module(model, name, new)
    vars(new)[Edited.name] = Edited(stand_in=True)
    for outer_name, outer in model.named_modules():
        if isinstance(outer, nn.TransformerEncoder) and f"{name}.".startswith(f"{outer_name}." if outer_name else ""):
            vars(outer)["use_nested_tensor"] = False  # it needs the fused kernel that is gone
    return new


# -- what is noted of a model as a whole --------------------------------------------------------------


def unwrapped(model: nn.Module) -> nn.Module:
    """A model without the wrapper of `torch.compile`, which is of no class that can be built again."""
    return getattr(model, "_orig_mod", model)


def home(model: nn.Module) -> tuple[nn.Module, str]:
    """The model that holds the record, and the prefix of its modules' names in ``model``.

    For PEFT's wrapper that is the inner model, which stays when the adapters are merged; for torch.compile's what it wraps.
    """
    get = getattr(model, "get_base_model", None)
    inner: nn.Module = get() if callable(get) else unwrapped(model)
    return inner, next((f"{name}." for name, module in model.named_modules() if module is inner and name), "")


def add_biases(model: nn.Module, names: Sequence[str]) -> None:
    """Give modules a bias of zeros, for a repair, and record it."""
    inner, prefix = home(model)
    own, modules = vars(inner).setdefault(_BIASES, []), dict(model.named_modules())
    for name in names:
        if name.removeprefix(prefix) not in own and name in modules:  # a stand-in's is there once it stays for good
            weight: Any = modules[name].weight
            modules[name].bias = nn.Parameter(weight.new_zeros(weight.shape[0]), requires_grad=weight.requires_grad)
            Edited.add(modules[name], tensors=("bias",))
            own.append(name.removeprefix(prefix))


def remove_biases(model: nn.Module, names: Sequence[str]) -> None:
    """Undo `add_biases`."""
    inner, prefix = home(model)
    own = vars(inner).setdefault(_BIASES, [])
    for name in [name for name in names if name.removeprefix(prefix) in own]:
        model.get_submodule(name)._parameters["bias"] = None
        own.remove(name.removeprefix(prefix))


def record_of(model: nn.Module) -> dict[str, Any]:
    """What was done to a model.

    Returns:
        ``removed``, the heads of each prune, numbered within what the one before left; ``heads``, how many each layer
        had before the first prune, in the layers' order ({} if there was none, or it is not known); and whether it was
        ``repaired``.
    """
    inner, prefix = home(model)
    notes = vars(inner)
    drops = [{prefix + name: heads for name, heads in drop.items()} for drop in notes.get(_REMOVED, ())]
    heads = {prefix + name: count for name, count in notes.get(_HEADS, {}).items()}
    return {"removed": drops, "heads": heads, "repaired": _WAS_REPAIRED in notes}


def add_record(model: nn.Module, record: Mapping[str, Any], new_ghosts: Sequence[str] = ()) -> None:
    """Add to a model's record (`record_of`) of ``removed``, ``heads`` and ``repaired``, and to its `ghosts`."""
    inner, prefix = home(model)
    notes = vars(inner)
    drops = [{name.removeprefix(prefix): heads for name, heads in drop.items()} for drop in record.get("removed", ())]
    notes[_REMOVED] = [*notes.get(_REMOVED, ()), *drops]
    notes[_GHOSTS] = {*notes.get(_GHOSTS, ()), *(name.removeprefix(prefix) for name in new_ghosts)}
    if "heads" in record:
        notes[_HEADS] = {name.removeprefix(prefix): count for name, count in record["heads"].items()}
    if record.get("repaired"):
        notes[_WAS_REPAIRED] = True


def ghosts(model: nn.Module) -> set[str]:
    """Layers whose heads were all removed, but that keep one head with zero output."""
    inner, prefix = home(model)
    return {prefix + name for name in vars(inner).get(_GHOSTS, ())}
