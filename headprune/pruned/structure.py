"""How a pruned model's modules differ from their classes, read off and given to a freshly built model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn

from headprune.pruned.carried import CARRIED, Edited
from headprune.pruned.empty import ConfigView, EmptyAttention, OnlyBias, emptied
from headprune.pruned.standins import convert, is_ours

Structure = dict[str, Any]
"""What `structure_of` gives: values that JSON can hold."""

VERSION = 1
_BIASES, _GHOSTS, _REMOVED = "_headprune_biases", "_headprune_ghosts", "_headprune_removed"
_HEADS, _WAS_REPAIRED = "_headprune_heads", "_headprune_was_repaired"


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
        entry = _entry(module)
        if entry:
            modules[name] = entry
        for own in entry.get("tensors", ()):
            names.setdefault(id(_held(module, own)[own]), []).append(f"{name}.{own}" if name else own)
    biases, kept = added_biases(model), sorted(ghosts(model))
    if not (modules or biases or kept):
        return {}
    shared = [group for group in names.values() if len(group) > 1]
    return {"version": VERSION, "modules": modules, "shared": shared, "biases": biases, "ghosts": kept}


def _entry(module: nn.Module) -> dict[str, Any]:
    """How one module differs from its class."""
    edited = Edited.of(module) or Edited()
    entry: dict[str, Any] = {"stand_in": True} if edited.stand_in else {}
    if tensors := {
        n: list(_held(module, n)[n].shape) for n in sorted(edited.tensors) if _held(module, n).get(n) is not None
    }:
        entry["tensors"] = tensors
    if numbers := {n: getattr(module, n) for n in sorted(edited.numbers)}:
        entry["numbers"] = numbers
    if configs := {n: dict(v.own) for n, v in vars(module).items() if is_ours(v, ConfigView)}:
        entry["configs"] = configs
    if carried := {kind: cls.of(module).to_json() for kind, cls in CARRIED.items() if cls.of(module) is not None}:
        entry["carried"] = carried
    return entry


def restructure(model: nn.Module, structure: Mapping[str, Any]) -> None:
    """Make a dense model's modules differ from their classes as ``structure`` says; tensors' values mean nothing then.

    Args:
        model: Dense, of the class and config that ``structure`` was read off; or its base model, or a model with a head on that.
        structure: Of `structure_of`; it may also say which heads were ``removed``, of how many (``heads``), and whether it
            was ``repaired``.
    """
    if not structure:
        return
    if structure["version"] > VERSION:
        raise ValueError(f"this folder was saved by a newer headprune (structure {structure['version']})")
    made: dict[str, Tensor] = {}
    here: dict[str, str] = {}  # the names in this model of tensors that differ
    group_of = {name: group[0] for group in structure["shared"] for name in group}
    for saved, entry in structure["modules"].items():
        name = _renamed(model, saved)
        if name is None:
            continue
        module = model.get_submodule(name)
        if entry.get("stand_in"):
            module = replace_by_stand_in(model, name)
        if "empty" in entry:
            bias = _new(next(module.parameters()), [entry["empty"]["width"]]) if entry["empty"]["bias"] else None
            set_module(model, name, emptied(module, entry["empty"]["width"], bias, entry["empty"]["arity"]))
            continue
        if "only_bias" in entry:
            bias = (
                _new(next(module.parameters()), [entry["only_bias"]["width"]]) if entry["only_bias"]["bias"] else None
            )
            set_module(model, name, OnlyBias.of(module, bias))
            continue
        for own, shape in entry.get("tensors", {}).items():
            held, full = _held(module, own), f"{saved}.{own}" if saved else own
            key = group_of.get(full, full)
            if key not in made:
                made[key] = _new(held.get(own), shape, next(module.parameters(), None))
            hold(module, own, made[key])
            here[full] = f"{name}.{own}" if name else own
        vars(module).update(entry.get("numbers", {}))
        edited = Edited(
            frozenset(entry.get("tensors", ())), frozenset(entry.get("numbers", ())), bool(entry.get("stand_in"))
        )
        if edited != Edited():
            vars(module)[Edited.name] = edited
        for own, fields in entry.get("configs", {}).items():
            vars(module)[own] = ConfigView(getattr(module, own), dict(fields))
        for kind, data in entry.get("carried", {}).items():
            CARRIED[kind].from_json(data).carried_by(module)
    _tie_as_pruned(model, here, structure["shared"])
    vars(model)[_BIASES] = [n for n in (_renamed(model, b) for b in structure["biases"]) if n is not None]
    vars(model)[_GHOSTS] = {n for n in (_renamed(model, g) for g in structure["ghosts"]) if n is not None}
    note_removed(
        model, [{_renamed(model, n) or n: h for n, h in drop.items()} for drop in structure.get("removed", ())]
    )
    note_heads(model, {_renamed(model, n) or n: count for n, count in structure.get("heads", {}).items()})
    if structure.get("repaired"):
        note_was_repaired(model)


def _tie_as_pruned(model: nn.Module, here: Mapping[str, str], shared: Sequence[Sequence[str]]) -> None:
    """Let transformers tie, of the tensors that differ from their class's, only those that are one in the pruned model.

    Layers that share their weights (Zamba 2) may have lost different heads. transformers gave them each other's weights when it loaded the folder.

    Args:
        here: Names of these tensors in this model, by their names in the structure.
        shared: Groups of names (in the structure) of one tensor.
    """
    tied: dict[str, str] | None = getattr(model, "all_tied_weights_keys", None)
    if tied is not None:
        for name in here.values():
            tied.pop(name, None)
        for first, *others in ([here[name] for name in group if name in here] or [""] for group in shared):
            tied.update(dict.fromkeys(others, first))


def _renamed(model: nn.Module, saved: str) -> str | None:
    """The name that a module has in this model: another where only the base model is loaded, or where a head is put on it."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    for name in (saved, saved.removeprefix(prefix), prefix + saved):
        try:
            model.get_submodule(name)
        except AttributeError:
            continue
        return name
    return None


def _held(module: nn.Module, name: str) -> dict[str, Any]:
    """The parameters or the buffers of a module, wherever ``name`` is (or belongs)."""
    return module._buffers if name in module._buffers else module._parameters


def _new(like: Tensor | None, shape: Sequence[int], beside: Tensor | None = None) -> Tensor:
    """A tensor or parameter to be filled; of the type of ``beside`` where the class has none there."""
    source = like if like is not None else beside
    assert source is not None
    new = source.detach().new_empty(shape)  # no memory is taken until it is filled
    if like is not None and not isinstance(like, nn.Parameter):
        return new
    return nn.Parameter(new, requires_grad=source.requires_grad)


def hold(module: nn.Module, name: str, value: Tensor | None) -> None:
    """Put a tensor into a module. A buffer that was cut is saved with the weights from then on: no class can compute it."""
    _held(module, name)[name] = value
    if name in module._buffers:
        module._non_persistent_buffers_set.discard(name)


def set_module(model: nn.Module, name: str, new: nn.Module) -> nn.Module:
    """Replace a module by another; returns the old one."""
    parent_name, _, child = name.rpartition(".")
    held = model.get_submodule(parent_name)._modules
    old, held[child] = held[child], new
    assert old is not None
    return old


def replace_by_stand_in(model: nn.Module, name: str) -> nn.Module:
    """Replace a module by its stand-in (`headprune.standins`) for good."""
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


# -- what was added to a model as a whole -----------------------------------------------------------


def home(model: nn.Module) -> tuple[nn.Module, str]:
    """The model that notes are kept on, and what comes before its modules' names: of PEFT's wrapper the model within, which is
    what stays once the adapters are merged."""
    get = getattr(model, "get_base_model", None)
    inner: nn.Module = get() if callable(get) else model
    return inner, next((f"{name}." for name, module in model.named_modules() if module is inner and name), "")


def added_biases(model: nn.Module) -> list[str]:
    """Modules of a repaired model that have got a bias."""
    inner, prefix = home(model)
    return [prefix + name for name in vars(inner).get(_BIASES, [])]


def add_biases(model: nn.Module, names: Sequence[str]) -> None:
    """Give modules a bias of zeros, as a repair had to."""
    inner, prefix = home(model)
    own, modules = vars(inner).setdefault(_BIASES, []), dict(model.named_modules())
    for name in names:
        if name.removeprefix(prefix) not in own and name in modules:  # a stand-in's is there once it stays for good
            weight: Any = modules[name].weight
            modules[name].bias = nn.Parameter(weight.new_zeros(weight.shape[0]), requires_grad=weight.requires_grad)
            Edited.add(modules[name], tensors=("bias",))
            own.append(name.removeprefix(prefix))


def remove_biases(model: nn.Module, names: Sequence[str]) -> None:
    """Take away what `add_biases` gave."""
    inner, prefix = home(model)
    own = vars(inner).setdefault(_BIASES, [])
    for name in names:
        if (noted := name.removeprefix(prefix)) in own:
            module: Any = model.get_submodule(name)
            module.bias = None
            own.remove(noted)


def note_removed(model: nn.Module, removed: Sequence[Mapping[str, Sequence[int]]]) -> None:
    """Note which heads a model has lost, prune by prune."""
    inner, prefix = home(model)
    noted = [{name.removeprefix(prefix): heads for name, heads in drop.items()} for drop in removed]
    vars(inner)[_REMOVED] = [*vars(inner).get(_REMOVED, ()), *noted]


def removed(model: nn.Module) -> list[dict[str, list[int]]]:
    """Which heads a model has lost, prune by prune: each counts within what the prune before left."""
    inner, prefix = home(model)
    return [{prefix + name: heads for name, heads in drop.items()} for drop in vars(inner).get(_REMOVED, ())]


def note_heads(model: nn.Module, heads: Mapping[str, int]) -> None:
    """Note how many heads each layer has before its first prune."""
    inner, prefix = home(model)
    vars(inner)[_HEADS] = {name.removeprefix(prefix): count for name, count in heads.items()}


def heads_before(model: nn.Module) -> dict[str, int]:
    """How many heads each layer had before the first prune, in the layers' order; {} if there was none, or it is not known."""
    inner, prefix = home(model)
    return {prefix + name: count for name, count in vars(inner).get(_HEADS, {}).items()}


def note_was_repaired(model: nn.Module) -> None:
    """Note that a repair refitted a model."""
    vars(home(model)[0])[_WAS_REPAIRED] = True


def was_repaired(model: nn.Module) -> bool:
    """What `note_was_repaired` was told."""
    return _WAS_REPAIRED in vars(home(model)[0])


def note_ghosts(model: nn.Module, names: Sequence[str]) -> None:
    """Note layers whose heads were all removed, but that keep one head with zero output."""
    inner, prefix = home(model)
    vars(inner)[_GHOSTS] = {*vars(inner).get(_GHOSTS, ()), *(name.removeprefix(prefix) for name in names)}


def ghosts(model: nn.Module) -> set[str]:
    """What `note_ghosts` was told."""
    inner, prefix = home(model)
    return {prefix + name for name in vars(inner).get(_GHOSTS, ())}
