"""Makes heads.json: what heads do on a part of the data, or on one text or image, with the attention of samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headprune.app.data import Part
from headprune.app.documents import Heads, LayerProfile, Positions, Sample, SampleLayer
from headprune.app.models import LoadedModel
from headprune.app.pictures import as_uri
from headprune.attention import AttentionLayer
from headprune.batches import by_names
from headprune.errors import HeadPruneError, first_line
from headprune.inputs import model_device, move, without_labels
from headprune.running import quiet
from headprune.seeing import HeadProfile, profile_heads
from headprune.seeing.maps import Weights, collect, on_device
from headprune.seeing.sums import Grid, names_of, sequences_of

_ANSWER = 24  # tokens that an encoder-decoder generates
_EXAMPLES = 64  # that profiles are computed from, at most
_WEIGHTS = 3e8  # attention weights computed for these, about
_LONGEST = 48  # positions of a sample up to which all of its rows are stored
_ROWS = 6  # rows that are stored of a longer sample
_BYTES = 1_400_000  # of all samples in the document, about
_WIDE = 20  # positions that each sample must have room for, if there is more than one
_TITLE = 80  # characters


# -- inputs to look at -------------------------------------------------------------------------------


def of_text(loaded: LoadedModel, text: str) -> dict[str, Any]:
    """A text as a model's inputs; for an encoder-decoder, with the text that it generates as the decoder's input.

    Raises:
        HeadPruneError: The model takes no text, or the text has no tokens.
    """
    if loaded.task.modality != "text":
        raise HeadPruneError(f"{loaded.name} is for {loaded.task.name}: it takes no text.", "Use --image or --dataset.")
    inputs: dict[str, Any] = dict(loaded.processor(text, return_tensors="pt", truncation=True))
    if not inputs["input_ids"].numel():
        raise HeadPruneError("The text has no tokens.", "Give a longer one.")
    model: Any = loaded.model
    inputs = move(inputs, model_device(model))
    if getattr(loaded.config, "is_encoder_decoder", False) and hasattr(model, "generate"):
        with torch.no_grad():
            inputs["decoder_input_ids"] = model.generate(**inputs, max_new_tokens=_ANSWER, do_sample=False, num_beams=1)
    return inputs


def of_image(loaded: LoadedModel, path: Path) -> dict[str, Any]:
    """An image file as a model's inputs.

    Raises:
        HeadPruneError: The model takes no images; there is no such file, or it is no image.
    """
    from PIL import Image

    if loaded.task.modality != "image":
        raise HeadPruneError(f"{loaded.name} is for {loaded.task.name}: it takes no image.", "Use --text or --dataset.")
    try:
        with Image.open(path) as opened:
            image = opened.convert("L" if getattr(loaded.config, "num_channels", 3) == 1 else "RGB")
    except Exception as error:
        hint = "Give a PNG or JPEG that is there."
        raise HeadPruneError(f"{path} cannot be read as an image: {first_line(error)}.", hint) from error
    return dict(loaded.processor(images=image, return_tensors="pt"))


def look(loaded: LoadedModel, part: Part, layers: Sequence[AttentionLayer], seed: int = 0) -> Heads:
    """Profile the heads on some examples of a part, and take the attention of a few samples of it.

    Raises:
        HeadPruneError: No layer's attention weights can be read.
    """
    heads = sum(layer.num_heads for layer in layers)
    # How long samples with all rows may be, and how many samples there are, so that the document stays small.
    sizes = [(min(_LONGEST, int((_BYTES * 0.75 / count / heads) ** 0.5)), count) for count in (3, 2, 1)]
    longest, count = next((size for size in sizes if size[0] >= _WIDE), sizes[-1])
    samples = _samples(part, longest, count, getattr(loaded.processor, "all_special_ids", []))
    return _document(loaded, layers, list(_batches(part, layers)), samples, longest, seed)


def look_at(loaded: LoadedModel, inputs: dict[str, Any], layers: Sequence[AttentionLayer], seed: int = 0) -> Heads:
    """Profile the heads on one input, which has a single example.

    Raises:
        HeadPruneError: No layer's attention weights can be read.
    """
    return _document(loaded, layers, [inputs], [inputs], _LONGEST, seed)


def _batches(part: Part, layers: Sequence[AttentionLayer]) -> Iterator[dict[str, Tensor]]:
    """Batches of examples of all lengths, few enough to be profiled soon."""
    order, lengths = part.order(), part.lengths()
    heads = sum(layer.num_heads for layer in layers)
    middle = lengths[order[len(order) // 2]]
    count = min(len(order), _EXAMPLES, max(2, int(_WEIGHTS / (heads * max(middle, 14) ** 2))))
    chosen = [order[i * len(order) // count] for i in range(count)]
    size = min(8, part.batch_size)
    for start in range(0, count, size):
        yield part.collate([part.features[i] for i in chosen[start : start + size]])


def _samples(part: Part, most: int, count: int, special: Sequence[int]) -> list[Any]:
    """A few examples, truncated for display; texts that fit are preferred."""
    order, lengths = part.order(), part.lengths()
    if short := [i for i in order if 4 <= lengths[i] <= most]:
        wanted = [most * (k + 1) // (count + 1) if count > 1 else most * 2 // 3 for k in range(count)]
        chosen = [min(short, key=lambda i: abs(lengths[i] - n)) for n in wanted]
    else:
        chosen = [order[i * len(order) // count] for i in range(count)]
    return [_cut(part.collate([part.features[i]]), most, special) for i in dict.fromkeys(chosen)]


def _cut(inputs: dict[str, Tensor], most: int, special: Sequence[int]) -> dict[str, Tensor]:
    """An example truncated to ``most`` tokens. A special token at the end is kept."""
    ids, short = inputs.get("input_ids"), dict(inputs)
    ends = ids is not None and int(ids[0, -1]) in special
    for name, t in inputs.items():
        if t.ndim == 2 and t.shape[1] > most and (ids is not None or name == "labels"):
            whole = ids is not None and t.shape == ids.shape and ends
            short[name] = torch.cat([t[:, : most - 1], t[:, -1:]], dim=1) if whole else t[:, :most]
    return short


# -- the document ------------------------------------------------------------------------------------


def _document(
    loaded: LoadedModel, layers: Sequence[AttentionLayer], batches: Sequence[Any], samples: Sequence[Any],
    longest: int, seed: int,
) -> Heads:  # fmt: skip
    separators: list[Any] = [getattr(owner, "sep_token_id", None) for owner in (loaded.processor, loaded.config)]
    profiles = profile_heads(loaded.model, batches, layers, separators=separators, seed=seed)
    seen = [layer for layer in layers if layer.name not in profiles.unseen]
    shown = [_sample(loaded, seen, inputs, profiles.grid, longest) for inputs in samples]
    described = tuple(
        LayerProfile(
            name=layer.name, index=layer.index, kind=layer.kind, heads=tuple(map(_rounded, profiles[layer.name])),
            unseen=profiles.unseen.get(layer.name, ""),
        ) for layer in layers
    )  # fmt: skip
    return Heads(
        examples=profiles.examples, tokens=profiles.tokens, repeated=profiles.repeated, layers=described,
        unit="tokens" if profiles.grid is None else "patches", samples=tuple(sample for sample in shown if sample.layers),
    )  # fmt: skip


def _rounded(profile: HeadProfile) -> HeadProfile:
    short: dict[str, Any] = {k: round(v, 5) for k, v in asdict(profile).items() if isinstance(v, float)}
    return replace(profile, **short)


def _sample(
    loaded: LoadedModel, layers: Sequence[AttentionLayer], inputs: Any, grid: Grid | None, longest: int
) -> Sample:
    """The attention of all layers in one example."""
    inputs = on_device(loaded.model, without_labels(loaded.model, inputs))
    sequences, tokenizer = sequences_of(loaded.model, inputs, by_names(inputs)), loaded.processor
    known = {name: s.ids[0] for name, s in sequences.items() if s.ids is not None}
    known = known if hasattr(tokenizer, "convert_ids_to_tokens") else {}
    texts = {name: Positions(labels=token_labels(ids, tokenizer)) for name, ids in known.items()}
    image = next((t[0] for t in inputs.values() if grid and t.ndim == 4 and t.is_floating_point()), None)
    picture = None if image is None else as_uri(image)
    positions: dict[str, Positions] = {}

    def keep(weights: Weights) -> SampleLayer | None:
        names = names_of(weights.layer, sequences)
        named = _tokens(weights, names, texts) if grid is None else _patches(weights, grid, picture)
        if named is None or not weights.ordered:
            return None
        positions.update(named)
        queries, keys = weights.shape[2] // weights.windows, weights.shape[3]
        (ours, _), (theirs, at_keys) = named
        rows = None if max(queries, keys) <= longest else _some_rows(queries, grid)
        table = torch.stack(weights.whole()[0].chunk(weights.windows, dim=1)).mean(dim=0)  # over windows
        table = table[:, slice(None) if rows is None else list(rows), : len(at_keys.labels)]  # without sinks
        return SampleLayer.packed(weights.layer.index, table.cpu().float().numpy(), ours, theirs, rows)

    with quiet(loaded.model), torch.no_grad():
        runs = collect(loaded.model, layers, inputs, 1, keep).values()
    held = (next(filter(None, calls), None) for calls in runs)  # a layer may run several times
    source = known.get(next(iter(sequences)))
    title = "" if source is None else _title(tokenizer.decode(source.tolist(), skip_special_tokens=True))
    return Sample(title=title, positions=positions, layers=tuple(filter(None, held)))


def _title(text: str) -> str:
    """The beginning of a text, in one line."""
    line = " ".join(printable(text.strip()).replace("·", " ").split())
    return line if len(line) <= _TITLE else f"{line[:_TITLE]}…"


Named = tuple[str, Positions]


def _tokens(weights: Weights, names: tuple[str, str], texts: dict[str, Positions]) -> tuple[Named, Named] | None:
    """The names and tokens of the texts at a layer's queries and keys; None if unknown."""
    kind, queries, keys = weights.layer.kind, weights.shape[2] // weights.windows, weights.shape[3]
    ours, theirs = names
    if not {ours, theirs} <= texts.keys() or (kind == "cross" and ours == theirs):
        return None
    width = len(texts[theirs].labels)
    if len(texts[ours].labels) != queries or keys < width or (keys > width and kind != "decoder"):
        return None
    return (ours, texts[ours]), (theirs, texts[theirs])


def _patches(weights: Weights, grid: Grid, picture: str | None) -> tuple[Named, Named] | None:
    """The names and patches of the images at a layer's queries and keys; None if unknown."""
    named = []
    for count in (weights.shape[2] // weights.windows, weights.shape[3]):
        own = grid.of(count)
        if own is None:
            return None
        whole = weights.windows == 1
        name = ("input" if own == grid else f"{own.rows} x {own.columns} patches") if whole else "window"
        before = ["[CLS]", *(f"[{i}]" for i in range(1, own.before))][: own.before]
        patches = [f"{r},{c}" for r in range(own.rows) for c in range(own.columns)]
        shown = picture if whole else None
        named.append((name, Positions(labels=(*before, *patches), grid=(own.rows, own.columns), image=shown)))
    return named[0], named[1]


def _some_rows(count: int, whole: Grid | None) -> tuple[int, ...]:
    """A few positions: the first, and others spread over the text or the image."""
    grid = whole.of(count) if whole is not None else None
    if grid is None:
        return tuple(sorted({i * (count - 1) // (_ROWS - 1) for i in range(_ROWS)}))
    places = [(1, 1), (1, 3), (2, 2), (3, 1), (3, 3)]
    patches = [grid.before + (grid.rows * r // 4) * grid.columns + grid.columns * c // 4 for r, c in places]
    return tuple(dict.fromkeys([0, *patches]))


def token_labels(ids: Tensor, tokenizer: Any) -> tuple[str, ...]:
    """Tokens as text, with invisible and unprintable characters made visible; a space is ``·``."""
    labels = []
    for token in ids.tolist():
        text = tokenizer.decode([token], clean_up_tokenization_spaces=False)
        if not text or "\ufffd" in text:  # a part of a character, or a token without text
            text = str(tokenizer.convert_ids_to_tokens(token))
        elif not text.startswith(" ") and str(tokenizer.convert_ids_to_tokens(token)).startswith(("▁", "Ġ")):
            text = f" {text}"  # some tokenizers drop it where a text begins
        labels.append(printable(text))
    return tuple(labels)


def printable(text: str) -> str:
    """A text in one line, with control characters made visible.

    >>> printable(" a\\tb\\x1b[1m"), printable("\\n")
    ('·a→b␛[1m', '⏎')
    """
    shown = {"\n": "⏎", "\t": "→", "\r": "␍", " ": "·"}
    return "".join(shown.get(c, c if c.isprintable() else chr(0x2400 + ord(c)) if ord(c) < 32 else "�") for c in text)
