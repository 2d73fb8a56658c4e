"""Loads a model by its id or path, with its processor and its task."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from headprune import checkpoint
from headprune.app import sources
from headprune.app.options import TASKS, LoadOptions, Task
from headprune.divergence import regresses
from headprune.errors import HeadPruneError, first_line
from headprune.input_specs import build, of_config, with_own_dtype
from headprune.inputs import model_device, move, positions_of
from headprune.offload import make_loaders_copy

_BASE, _USUAL = Task("base", "", "text", ""), LoadOptions()
_MODALITIES = {"pixel_values": "image", "input_values": "audio", "input_features": "audio"}  # by the first input's name


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to use.

    Attributes:
        model: In evaluation mode, on its device.
        processor: Tokenizer, image processor or feature extractor, as the task needs.
        source: The id or path that it was loaded from, as it was given.
        name: The last part of ``source``.
        notes: What a reader should know about how it was loaded.
        stored: The half precision that the checkpoint is stored in, if the model was widened to float32 by default; else None.
    """

    model: nn.Module
    processor: Any
    task: Task
    source: str
    name: str
    notes: tuple[str, ...] = ()
    stored: torch.dtype | None = None

    @property
    def config(self) -> Any:
        """The model's config."""
        return self.model.config


def load_model(
    source: str, options: LoadOptions = _USUAL, *, with_processor: bool | None = True, any_task: bool = False
) -> LoadedModel:
    """Load a Hugging Face model, a local folder, or a folder that `headprune.save` wrote.

    Args:
        source: Hub id (or ``ID@REVISION``) or path; for a run folder, the pruned model in it, if it holds just one.
        options: The device ``"auto"`` is CUDA, then MPS, then CPU; the dtype ``"auto"`` is the stored one, but float32 on a CPU. Code
            that comes with the model runs only if the user said so for this run, never because a file says so.
        with_processor: Whether to load a tokenizer or image processor too; None: if there is one, else with a note.
        any_task: Accept a base model (without a task's head), or one for an unknown task, too: its task is then ``"base"``.

    Raises:
        HeadPruneError: No such model, an unknown task, a missing tokenizer, weights that do not load or are not numbers,
            code that comes with the model and may not run.
    """
    options.check()
    sources.check_source(source)
    named, path = source, sources.resolved(source)
    source, revision = sources.split_revision(path)
    dtype = sources.dtype_named(options.dtype, sources.pick_device(options.device))
    common = {"revision": revision, "trust_remote_code": options.trust_remote_code}
    config = config_of(source, common)
    kind = task_of(config, options.task, source, any_task)
    half = sources.half_of(config) if options.dtype == "auto" and dtype == torch.float32 else None
    ours = checkpoint.is_checkpoint(source)  # the code in its folder is only for use without headprune
    if ours:
        model = _load_saved(source, options, dtype, half)
    else:
        model = _load_dense(source, kind, config, dtype, options, common)
    _check_numbers(model.eval(), source)
    if kind is _BASE:
        kind = replace(kind, modality=_MODALITIES.get(str(getattr(model, "main_input_name", "")), "text"))
    processor, notes = None, []
    try:
        processor = processor_of(source, kind, common) if with_processor is not False else None
    except HeadPruneError as error:
        if with_processor:
            raise
        notes.append(str(error.args[0]))
    if kind.modality == "text" and processor is not None:
        set_padding(model.config, processor.pad_token_id)
    if path != named:
        notes.append(
            f"{named} is a run folder: the model in it that was pruned already, {Path(source).name}, is taken. (To keep another number of the "
            f"dense model's heads, continue that run: `headprune prune -o {named} --overwrite --keep …`.)"
        )
    if not ours and not options.trust_remote_code and kind.auto_class in (getattr(config, "auto_map", None) or {}):
        notes.append(
            f"{source} comes with code of its own, which was not run (--trust-remote-code runs it): "
            f"transformers' {type(model).__name__} was used instead."
        )
    # Some configs name another dtype than their weights have.
    stored = half if half is not None and sources.holds(model, half) else None
    return LoadedModel(model, processor, kind, source, Path(source.rstrip("/")).name or source, tuple(notes), stored)


@contextmanager
def _translate_errors(source: str, problem: str, hint: str) -> Iterator[None]:
    """Turn any library's exception into one error; code that may not run and damaged weights have their own messages."""
    try:
        yield
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise HeadPruneError(
                f"{source} needs code that comes with it, and headprune does not run such code unasked.",
                "Read that code; if you trust it, add --trust-remote-code.",
            ) from error
        raise checkpoint.damaged(source, error) or HeadPruneError(f"{problem} ({first_line(error)}).", hint) from error


def config_of(source: str, common: dict[str, Any]) -> Any:
    problem = f"There is no model {source!r}: no such folder, and it could not be loaded from the Hugging Face hub"
    hint = "Check the spelling, the network (HF_HUB_OFFLINE), and your access to it."
    if Path(source).is_dir():
        problem = f"{source} is a folder without a config.json that transformers reads"
        hint = "Pass a folder made by save_pretrained or by headprune."
    with _translate_errors(source, problem, hint):
        config = transformers.AutoConfig.from_pretrained(source, **common)
    if not common["trust_remote_code"]:
        checkpoint.check_attention(source, config)
    return config


def _load_saved(source: str, options: LoadOptions, dtype: torch.dtype | str, half: torch.dtype | None) -> nn.Module:
    """A model that headprune saved.

    Args:
        half: The half precision to widen it from, if any.
    """
    places = sources.placing_of(options.device_map, options.device_memory)
    places = places or {"device": sources.pick_device(options.device)}
    model = checkpoint.load(source, **places, trust_remote_code=options.trust_remote_code)
    if half is not None:
        sources.widen(model)
    elif isinstance(dtype, torch.dtype) and options.dtype != "auto":
        for parameter in model.parameters():  # not the buffers: rotary frequencies must not be rounded
            parameter.data = parameter.data.to(dtype)
    return model


def _load_dense(
    source: str, kind: Task, config: Any, dtype: torch.dtype | str, options: LoadOptions, common: dict[str, Any]
) -> nn.Module:
    """A model that transformers loads.

    Raises:
        HeadPruneError: It does not load, some of its weights are missing (a randomly initialized head would be measured as if it
            were trained), or it is another model than its config says.
    """
    auto = getattr(transformers, kind.auto_class)
    placing = sources.placing_of(options.device_map, options.device_memory)
    how = {"config": config, "dtype": dtype, **common, **placing}
    with _translate_errors(source, f"{source} does not load as {kind.auto_class}", "Check --task and the folder."):
        model, info = auto.from_pretrained(source, output_loading_info=True, **how)
    if missing := sorted(info.get("missing_keys") or []):
        raise HeadPruneError(
            f"{source} has no weights for {', '.join(missing[:3])}{', …' if len(missing) > 3 else ''}: "
            f"it was not trained for {kind.name}.",
            "Pass a fine-tuned model, or the --task that it was trained for.",
        )
    checkpoint.unite_tied(model)
    checkpoint.check_tied(model, source)
    make_loaders_copy(model) if placing else model.to(sources.pick_device(options.device))
    loaded: nn.Module = model
    return loaded


def numbers_given(loaded: LoadedModel) -> str | None:
    """What a regression head gives instead of classes, such as ``"3 numbers"``; None for any other head."""
    labels, task = getattr(loaded.config, "num_labels", 2), loaded.task
    of_labels = task.metric == "accuracy" and task.name != "question-answering"
    if not of_labels or (labels != 1 and not regresses(loaded.model)):
        return None
    return f"{labels} number{'s' if labels > 1 else ''}"


def dummy_input(loaded: LoadedModel, batch: int, length: int) -> dict[str, Any]:
    """A made-up input of the right form: for listing heads and for timing, not for measuring accuracy.

    Args:
        batch: Examples.
        length: Tokens per example, for texts.

    Raises:
        HeadPruneError: It is not known what a base model takes: none of the inputs that its config suggests runs.
    """
    model, known = loaded.model, loaded.task.name != _BASE.name
    specs = with_own_dtype(model, of_config(model, batch, length, length, 16000, 224))
    for spec in specs[1:] if known else specs:
        example = move(build(spec), model_device(model))
        with suppress(Exception), torch.no_grad():  # a model may refuse an input with any error
            if not known:
                model(**example)
            return dict(example)
    hint = f"Say what it is for with --task: {', '.join(TASKS)}."
    raise HeadPruneError(f"It is not known what {type(model).__name__} takes.", hint)


def check_length(loaded: LoadedModel, length: int) -> None:
    """Refuse texts that are longer than a model's table of position embeddings.

    Raises:
        HeadPruneError: The table has fewer positions.
    """
    most = positions_of(loaded.model)
    named = loaded.model.named_modules()
    table = any(isinstance(m, nn.Embedding) and name.rpartition(".")[2] in _POSITION_TABLES for name, m in named)
    if table and most is not None and most < length:
        raise HeadPruneError(
            f"{loaded.source} does not take texts of {length:,} tokens: it has {most:,} positions.",
            f"Use --lengths up to {most}.",
        )


# Embeddings with a row for each position, by the last part of their name.
_POSITION_TABLES = {"position_embeddings", "wpe", "embed_positions", "position_embedding"}


def task_of(config: Any, task: str | None, source: str, any_task: bool = False) -> Task:
    from transformers.models.auto import modeling_auto

    if task is not None:
        return TASKS[task]
    named = getattr(config, "architectures", None)
    architecture = str(named[0]) if isinstance(named, list | tuple) and named else ""
    # Many classifiers of sounds, such as Wav2Vec2ForSequenceClassification, are called like classifiers of texts.
    if architecture in modeling_auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES.values():
        return TASKS["audio-classification"]
    for kind in TASKS.values():
        if kind.fits(architecture):
            if architecture in modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES.values():
                return TASKS["speech-seq2seq"]
            if kind.name == "seq2seq" and not config.is_encoder_decoder:
                return TASKS["causal-lm"]  # Gemma 3 and others that look at images too
            return kind
    if any_task:
        return _BASE
    raise HeadPruneError(
        f"The task of {source} cannot be read from its architecture ({architecture or 'none given'}).",
        f"Say it with --task: {', '.join(TASKS)}.",
    )


def set_padding(config: Any, token: int) -> None:
    """Set a config's padding token, if it has none: GPT-2 as a classifier refuses batches without it.

    The config of a model of several parts, such as Gemma 3's, may not have the field; then the config of its text part counts.
    """
    parts = (config, config.get_text_config())
    if all(getattr(part, "pad_token_id", None) is None for part in parts):
        for part in parts:
            part.pad_token_id = token


def _check_numbers(model: nn.Module, source: str) -> None:
    """Refuse weights that are NaN: every loss would be NaN, and the data would be blamed."""
    for name, parameter in model.named_parameters():
        if parameter.is_meta or not parameter.is_floating_point() or parameter.element_size() < 2:
            continue
        # A sum is quick and needs no memory. Values are counted only if it is not finite.
        if not parameter.detach().sum().isfinite() and (wrong := int(parameter.isnan().sum())):
            raise HeadPruneError(
                f"{source} has weights that are not numbers: {wrong:,} of {parameter.numel():,} values of {name} are NaN.",
                "Its training diverged, or the file is damaged: use an earlier checkpoint, or fetch it again.",
            )


def processor_of(source: str, kind: Task, common: dict[str, Any]) -> Any:
    name, what = _PROCESSORS[kind.modality]
    name = "AutoProcessor" if kind.name == "speech-seq2seq" else name
    hint = f"Put the {what}'s files into the folder (for instance with {what.replace(' ', '_')}.save_pretrained)."
    with _translate_errors(source, f"{source} has no {what} that loads", hint):
        try:
            processor = getattr(transformers, name).from_pretrained(source, **common)
        except ImportError:
            # Up to 5.17 AutoImageProcessor asks for torchvision even where the class itself does without.
            base = transformers.image_processing_utils.BaseImageProcessor
            stored, _ = base.get_image_processor_dict(source, revision=common["revision"])
            own: Any = getattr(transformers, stored["image_processor_type"].removesuffix("Fast"))
            if not issubclass(own, base):  # the name is from a file
                raise TypeError(f"{stored['image_processor_type']} is no image processor") from None
            processor = own.from_pretrained(source, **common)
        # transformers builds an empty tokenizer where there are no files: every word would be unknown.
        if kind.modality == "text" and len(processor) <= len(processor.all_special_ids):
            raise ValueError("no vocabulary is there")
        if kind.modality == "text" and processor.pad_token is None:
            # Decoders classify by the last token that is not padding: not by the one before it, where texts end in the padding.
            end = processor.convert_ids_to_tokens(processor("")["input_ids"][-1:])
            tokens = list(filter(None, (processor.eos_token, processor.unk_token, processor.bos_token)))
            processor.pad_token = next((token for token in tokens if token not in end), next(iter(tokens), None))
            if processor.pad_token is None:
                raise ValueError("it has no token to pad with")
    return processor


_PROCESSORS = {
    "text": ("AutoTokenizer", "tokenizer"),
    "image": ("AutoImageProcessor", "image processor"),
    "audio": ("AutoFeatureExtractor", "feature extractor"),
}
