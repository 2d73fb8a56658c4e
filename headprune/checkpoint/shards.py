"""Weights that are not all in memory, in and out: written shard by shard, and loaded onto the places of a device map."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headprune.errors import HeadPruneError, first_line
from headprune.jsonio import write_text
from headprune.offload import Offloaded, aligned, with_numbers

MAX_SHARD = "5GB"  # of a model that is not all in memory, by default: so much is in memory at once
_PATTERN = "model{suffix}.safetensors"


@dataclass(frozen=True)
class Placing:
    """Where a model's weights go; what `from_pretrained` of transformers takes under these names.

    Attributes:
        device_map: ``"auto"``, ``"balanced"``, ``"balanced_low_0"``, ``"sequential"``, or the device of every module, by name: a device,
            ``"cpu"`` or ``"disk"``.
        max_memory: The most to put on each device, by its number or name, such as ``{0: "20GB", "cpu": "60GB"}``; what is free, by default.
        offload_folder: For weights on disk that are not read from the checkpoint itself.
    """

    device_map: str | Mapping[str, Any]
    max_memory: Mapping[int | str, int | str] | None = None
    offload_folder: str | Path | None = None

    def options(self) -> dict[str, Any]:
        """As arguments of ``from_pretrained``."""
        device_map = self.device_map if isinstance(self.device_map, str) else dict(self.device_map)
        memory = None if self.max_memory is None else dict(self.max_memory)
        return {"device_map": device_map, "max_memory": memory, "offload_folder": self.offload_folder}


def write_shards(model: nn.Module, names: Iterable[str], folder: Path, max_shard_size: str | int) -> None:
    """The files of a model's weights, as ``huggingface_hub.save_torch_state_dict`` writes them, with one shard in memory at a time."""
    import json

    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    stored = Offloaded(model)
    split = split_torch_state_dict_into_shards(
        {name: stored.placeholder(name) for name in names}, filename_pattern=_PATTERN, max_shard_size=max_shard_size
    )
    for old in (*folder.glob("model.safetensors*"), *folder.glob("model-*-of-*.safetensors")):  # of another model
        old.unlink()
    for file, own in split.filename_to_tensors.items():
        # Each has memory of its own: slices of one tensor share theirs, which a file of weights cannot.
        shard = {name: stored[name].detach().to("cpu", copy=True).contiguous() for name in own}
        save_file(shard, str(folder / file), metadata={"format": "pt"})
        del shard
    if split.is_sharded:
        index = {"metadata": {**split.metadata, "format": "pt"}, "weight_map": split.tensor_to_filename}
        write_text(folder / f"{_PATTERN.format(suffix='')}.index.json", json.dumps(index, indent=2))


def fill_placed(model: Any, files: Sequence[Path], placing: Placing) -> dict[str, Any]:
    """Give a model whose parameters are on the meta device its saved values, each on its place.

    Returns:
        The arguments of `dispatch`.

    Raises:
        KeyError, ValueError: The weights are not the model's.
        HeadPruneError: There is no such place.
    """
    from accelerate.utils import set_module_tensor_to_device
    from safetensors import safe_open

    with_numbers(model)
    places = _places(model, placing)
    own = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    on_disk: dict[str, dict[str, str]] = {}
    filled: set[str] = set()
    for file in files:
        with safe_open(str(file), framework="pt") as content:
            for name in content.keys():  # noqa: SIM118
                shape = torch.Size(content.get_slice(name).get_shape())
                if not shape.numel() and (name not in own or not own[name].numel()):
                    continue  # it stands for weights that are gone
                if name not in own:
                    raise KeyError(f"there is no place for {name}")
                if own[name].shape != shape:
                    raise ValueError(f"{name} has shape {tuple(own[name].shape)}, the file {tuple(shape)}")
                value, place = content.get_tensor(name), _place(places, name)
                filled.add(name)
                owner, _, last = name.rpartition(".")
                if place == "disk" and isinstance(own[name], nn.Parameter):
                    on_disk[name] = {
                        "safetensors_file": str(file.absolute()),
                        "weight_name": name,
                        "dtype": str(value.dtype).removeprefix("torch."),
                    }
                    empty = torch.empty(shape, dtype=value.dtype, device="meta")
                    model.get_submodule(owner)._parameters[last] = nn.Parameter(empty, value.is_floating_point())
                else:  # a copy, because a tensor may start at any byte of the file
                    where = "cpu" if place == "disk" else place
                    set_module_tensor_to_device(model, name, where, value=value.clone(), dtype=value.dtype)
    _tie(model, filled, on_disk)
    return {"device_map": places, "offload_index": on_disk or None, "offload_dir": placing.offload_folder}


def dispatch(model: Any, arguments: Mapping[str, Any]) -> None:
    """Put Accelerate's hooks on a model that `fill_placed` has filled."""
    from accelerate import dispatch_model

    skip = getattr(model, "_skip_keys_device_placement", None)
    dispatch_model(model, **arguments, skip_keys=skip)
    aligned(model)


def _places(model: Any, placing: Placing) -> dict[str, Any]:
    """The device of every module, by name."""
    from accelerate import infer_auto_device_map
    from accelerate.utils import check_device_map, get_balanced_memory

    whole, memory = getattr(model, "_no_split_modules", None), placing.options()["max_memory"]
    try:
        if not isinstance(placing.device_map, str):
            check_device_map(model, dict(placing.device_map))
            return dict(placing.device_map)
        if placing.device_map != "sequential":
            low = placing.device_map == "balanced_low_0"
            memory = get_balanced_memory(model, memory, no_split_module_classes=list(whole or ()), low_zero=low)
        found: dict[str, Any] = infer_auto_device_map(model, memory, no_split_module_classes=list(whole or ()))
    except (ValueError, RuntimeError, KeyError) as error:
        raise HeadPruneError(f"The device map does not work: {first_line(error)}.", "Try auto.") from error
    return found


def _place(places: Mapping[str, Any], name: str) -> Any:
    """The device of a tensor: of the innermost module that the map names."""
    while name and name not in places:
        name = name.rpartition(".")[0]
    return places.get(name, "cpu")


def _tie(model: Any, filled: set[str], on_disk: dict[str, dict[str, str]]) -> None:
    """Give weights that are saved once all of their names."""
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    for name, source in tied.items():
        for one, other in ((name, source), (source, name)):
            if one not in filled and other in filled:
                owner, _, last = one.rpartition(".")
                held: Tensor = model.get_parameter(other)
                model.get_submodule(owner)._parameters[last] = held
                filled.add(one)
                if other in on_disk:
                    on_disk[one] = on_disk[other]
    for name, tensor in model.state_dict().items():
        if tensor.numel() and name not in filled:
            raise KeyError(f"{name} is not in the file")
