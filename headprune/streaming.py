"""A checkpoint that is cut without ever being loaded whole.

Its weights stay in their safetensors files, which are mapped into memory: the system reads a page when it is needed and forgets it when
memory is short. On that model everything is done as on any other (`headprune.surgery`, `headprune.checkpoint`), so the result cannot differ. What
the cut makes goes to files that are mapped, too (`headprune.surgery.scratch`).
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headprune.arguments import Plan, heads_of
from headprune.attention import Heads, check_heads, check_possible
from headprune.checkpoint import (
    MAX_SHARD,
    SIDECAR,
    Loading,
    check_attention,
    check_merged,
    check_plain,
    check_tied,
    complete,
    damaged,
    is_checkpoint,
    load_mapped,
    loading_of,
    replaced,
    unite_tied,
    weight_files,
    write,
)
from headprune.errors import HeadPruneError, check_writable, first_line
from headprune.inputs import Example
from headprune.jsonio import read_json
from headprune.plans import PruningPlan
from headprune.stock import on_meta
from headprune.surgery import Proof, prune
from headprune.surgery.scratch import on_disk
from headprune.trace import example_for, find_attention

IN_MEMORY = 64 * 2**20  # bytes of weights that may be in memory, beside a sixteenth of all
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_PLAIN = {*_DTYPES, "I64", "I32", "I16", "BOOL", "C64"}  # what weights and buffers may be
_LOAD = "Leave out --streaming, where the model fits in memory (headprune.prune, headprune.save)."


@dataclass(frozen=True)
class Streamed:
    """A checkpoint that `cut_checkpoint` wrote, and what was proved of it.

    Attributes:
        path: The folder.
        drop: The heads that went, ``{layer_name: [head, …]}``.
        kept: Heads that it has, over all layers.
        total: Heads of the model that it was cut from.
        proof: The cut model's answers, and what its layers give, compared with those of the model with these heads masked.
        reload_difference: By how much the written folder's answers differ from the cut model's, as a share of the largest; None
            where it is not known what the model takes.
        loads: How the folder loads.
        weights: Bytes of the files of weights, before.
        left: Bytes of the files of weights that were written.
        files: How many these are.
        in_memory: Bytes of weights that could not stay in their files, such as small buffers; None where the system does not tell.
        seconds: That it took.
    """

    path: Path
    drop: Heads
    kept: int
    total: int
    proof: Proof
    reload_difference: float | None
    loads: Loading
    weights: int
    left: int
    files: int
    in_memory: int | None
    seconds: float

    def told(self) -> str:
        """What was proved, in a line."""
        proof = self.proof
        cut = (
            f"proved on {proof.inputs} inputs: the cut model's answers differ from the masked dense model's by at most "
            f"{proof.difference:.1e} of the largest value (allowed: {proof.tolerance:.0e})"
        )
        if self.reload_difference is None:
            return f"{cut}; the written folder has the cut model's weights; it holds no answers to compare."
        return f"{cut}; the written folder was read again: the same weights, and its answers differ by {self.reload_difference:.1e}."

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "path": str(self.path), "loads": self.loads.call(str(self.path))}


def cut_checkpoint(
    source: str | Path,
    plan: Plan,
    path: str | Path,
    *,
    example: Example | None = None,
    processor: Any = None,
    overwrite: bool = False,
    about: dict[str, Any] | None = None,
    max_shard_size: str | int = MAX_SHARD,
) -> Streamed:
    """Remove heads from a saved transformers model that is never loaded whole, and save the result.

    Writes what `prune` and `save` write for the loaded model, to the bit, and proves it as they do. Weights stay in their files, which are
    mapped into memory; what must be in memory is a layer's activations and one tensor that is being cut. On the CPU, in the type in
    which the weights are stored. The files are read some tens of times, so they should lie on a fast disk.

    Args:
        source: A folder with the model in safetensors files, sharded or not: of transformers' ``save_pretrained``, or of `save`.
        plan: A `PruningPlan`, or ``{layer_name: [head, ...]}`` to remove.
        path: The folder to write; it appears complete or not at all. While it is written, its disk also needs room for the tensors
            that are cut.
        example: A batch without labels, as for `prune`; by default an input is made up.
        processor: A tokenizer or image processor to save beside the model.
        overwrite: Replace what is there.
        about: More to store in the sidecar (such as the dataset).
        max_shard_size: The size from which on weights are split over several files. safetensors before 0.8 needs memory for one of
            these files.

    Raises:
        HeadPruneError: The folder's weights are not plain safetensors (pickles, quantised), or have to be converted as they are loaded; it has code
            of its own; the plan does not fit the model; ``path`` is taken.
        PruneError: The cut model would not give the masked model's answers; nothing is written.
    """
    source, path, began = Path(source), Path(path), time.monotonic()
    files = check_source(source)
    _check_target(source, path, overwrite)
    model = _mapped(source, files)
    in_memory = _check_mapped(source, model, files)
    if isinstance(plan, PruningPlan):
        plan.check_model(model)
    example = example_for(model) if example is None else example
    layers = find_attention(model, example)
    drop = check_heads(heads_of(plan), layers)
    for layer in layers:
        if layer.name in drop:
            check_possible(layer, drop[layer.name])
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path, overwrite) as folder:
        with tempfile.TemporaryDirectory(prefix=".cut-", dir=folder) as scratch, on_disk(Path(scratch)):
            proof = prune(model, plan, example, layers=layers)
            write(model, folder, about=about, max_shard_size=max_shard_size)
        complete(folder, processor)
        del model
        _, difference = load_mapped(folder)
    written = weight_files(path, {})
    total = sum(layer.num_heads for layer in layers)
    return Streamed(
        path, drop, total - sum(map(len, drop.values())), total, proof, difference, loading_of(path), _bytes(files), _bytes(written),
        len(written), in_memory, round(time.monotonic() - began, 1),
    )  # fmt: skip


def check_source(source: Path) -> list[Path]:
    """The files of weights of a folder that can be cut without loading it.

    Raises:
        HeadPruneError: It cannot.
    """
    from safetensors import safe_open

    if sys.platform == "win32":
        raise HeadPruneError("A checkpoint cannot be streamed on Windows, where its files are read whole.", _LOAD)
    if not source.is_dir():
        raise HeadPruneError(
            f"There is no folder {source}, and only folders can be streamed.",
            "Download a model of the Hub first: hf download NAME --local-dir FOLDER.",
        )
    ours = is_checkpoint(source)
    files = weight_files(source, read_json(source / SIDECAR, "checkpoint") if ours else {})
    if missing := [file for file in files if not file.is_file()]:
        if any(source.glob("*.bin")) and not any(source.glob("*.safetensors")):
            raise HeadPruneError(
                f"{source} has its weights in .bin files, which load whole.",
                "Convert them once, on a machine that holds the model: from_pretrained(folder).save_pretrained(other).",
            )
        raise HeadPruneError(f"{missing[0]} is missing.", "Copy or download the model again.")
    stored: dict[str, int] = {}
    for file in files:
        try:
            with safe_open(str(file), framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    part = opened.get_slice(name)
                    kind, count = part.get_dtype(), _product(part.get_shape())
                    if kind not in _PLAIN:
                        raise HeadPruneError(
                            f"{name} in {file} is quantised ({kind}), and only plain weights can be cut.",
                            "Cut the model as it was before, and quantise the result as it loads (quantization_config=…).",
                        )
                    stored[kind] = stored.get(kind, 0) + count
        except HeadPruneError:
            raise
        except Exception as error:
            raise damaged(source, error) or HeadPruneError(
                f"{file} is not readable: {first_line(error)}.", "Copy it again."
            ) from error
    if not ours:
        _check_class(source, _config(source), {_DTYPES[k]: n for k, n in stored.items() if k in _DTYPES})
    return files


def _check_class(source: Path, config: Any, stored: Mapping[str, int]) -> None:
    """Refuse what transformers would convert as it loads it: that takes the memory of all that is converted."""
    if getattr(config, "quantization_config", None) is not None:
        raise HeadPruneError(
            f"{source} is quantised, and only plain weights can be cut.",
            "Cut the model as it was before, and quantise the result as it loads (quantization_config=…).",
        )
    wanted = str(getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None) or "")
    wanted = wanted.removeprefix("torch.")
    most = max(stored, key=lambda kind: stored[kind], default="")
    if wanted and most and wanted != most:
        raise HeadPruneError(
            f"{source} is stored in {most}, and its config.json says {wanted}: it would be converted, whole, as it loads.",
            f'Write "dtype": "{most}" into config.json, or leave out --streaming.',
        )
    cls = _class_of(source, config)
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter
    except ImportError:  # before 5.0's last changes; what is in memory then is counted (`_check_mapped`)
        return
    if any(isinstance(c, WeightConverter) for c in get_model_conversion_mapping(on_meta(cls, config)) or ()):
        raise HeadPruneError(
            f"{source} stores weights of {cls.__name__} in another layout than the model computes with (such as each expert by itself): "
            "they would be converted in memory.",
            _LOAD,
        )


def _config(source: Path) -> Any:
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise HeadPruneError(
                f"{source} holds a class that comes with it, as code, which is not run to cut files.", _LOAD
            ) from error
        raise HeadPruneError(
            f"{source} is a folder without a config.json that transformers reads ({first_line(error)}).",
            "Pass a folder made by save_pretrained or by headprune.",
        ) from error
    check_attention(source, config)
    return config


def _class_of(source: Path, config: Any) -> Any:
    import transformers

    name = str((getattr(config, "architectures", None) or ["none"])[0])
    cls = getattr(transformers, name, None)
    if not isinstance(cls, type) or not issubclass(cls, transformers.PreTrainedModel):
        raise HeadPruneError(
            f"config.json in {source} names no class of transformers as its architecture ({name}).",
            "Name it under architectures, such as LlamaForCausalLM; models with code of their own cannot be streamed.",
        )
    return cls


def _mapped(source: Path, files: Sequence[Path]) -> nn.Module:
    """The model with its weights in their files."""
    if is_checkpoint(source):
        return load_mapped(source)[0]
    config = _config(source)
    cls = _class_of(source, config)
    try:
        model, info = cls.from_pretrained(
            source, config=config, dtype="auto", output_loading_info=True, use_safetensors=True
        )
    except Exception as error:
        raise damaged(source, error) or HeadPruneError(
            f"{source} does not load as {cls.__name__}: {first_line(error)}.", "Check the folder."
        ) from error
    if missing := sorted(info.get("missing_keys") or []):
        raise HeadPruneError(
            f"{source} has no weights for {', '.join(missing[:3])}{', …' if len(missing) > 3 else ''}.",
            "Pass the whole model, and name the class that it was trained as under architectures in config.json.",
        )
    check_merged(model)
    check_plain(model, model.state_dict())
    unite_tied(model)
    check_tied(model, str(source))
    made: nn.Module = model
    return made.eval()


def _check_mapped(source: Path, model: nn.Module, files: Sequence[Path]) -> int | None:
    """Bytes of weights that are in memory, not in their files; None where the system does not tell.

    Raises:
        HeadPruneError: They are many.
    """
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    names = {str(file.resolve()) for file in files}
    found = [line.split(maxsplit=5) for line in lines]
    ranges = [tuple(int(end, 16) for end in parts[0].split("-")) for parts in found if parts[-1] in names]
    tensors = {t.data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers()) if t.numel()}
    loose = sum(size for where, size in tensors.items() if not any(low <= where < high for low, high in ranges))
    if loose > IN_MEMORY + sum(tensors.values()) // 16:
        raise HeadPruneError(
            f"{source} cannot be streamed: {loose / 2**30:.1f} GiB of its weights are converted as they load, in memory.",
            _LOAD,
        )
    return loose


def _check_target(source: Path, path: Path, overwrite: bool) -> None:
    if source.resolve().is_relative_to(path.resolve()):
        raise HeadPruneError(
            f"{path} holds the model itself, whose files are read as they are needed.", "Choose another folder."
        )
    if path.exists() and (not path.is_dir() or any(path.iterdir())) and not overwrite:
        raise HeadPruneError(f"{path} exists.", "Choose another folder, or allow overwriting.")
    check_writable(path)


def _bytes(files: Sequence[Path]) -> int:
    return sum(file.stat().st_size for file in files)


def _product(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())
