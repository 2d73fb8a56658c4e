"""What the last step of a repair costs, in forward passes over the scoring examples; its last line is one JSON document.

    python benchmarks/last_step.py                    # all models
    python benchmarks/last_step.py --only bert digits --repeat 5

CPU time of the step (`headprune.repairing.steps.logits`, from the old weights in the place of the layers' fits, which are not timed) is divided by that of
one forward pass of the dense model over the same examples (with the one that tries the step on the examples that choose, it is one more), both taken in one process and in turn: so other work on the machine changes
both. Models are a BERT of 12 x 4 heads with 10 classes (random, as are its texts), minilm-rt with 2 (left out if it is not there),
and the demo's ViT with 10.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
import transformers as tf
from scores import MINILM, LeftOutError, about, say
from torch import nn

import headprune as hp
from headprune.app import demo
from headprune.app.data import DataOptions, load_parts
from headprune.app.models import load_model
from headprune.attention import Heads
from headprune.reference import DenseReference, calibrate
from headprune.reference.answers import DenseAnswers, dense_answers
from headprune.reference.directions import Directions
from headprune.reference.runner import Runner
from headprune.repairing import Refit, Weights
from headprune.repairing.steps import logits

Batch = dict[str, Any]
Subject = tuple[nn.Module, list[Batch], float]
"""The model, its examples, and which share of the heads stays."""

PARTS: dict[str, tuple[object, str]] = {
    "slopes": (Runner, "slopes_of"),
    "coordinates": (logits, "longest"),
    "solution": (logits, "solved"),
}
"""What a step spends its time in, and what does it."""


def bert(options: argparse.Namespace) -> Subject:
    """Lengths are like those of sentences: half of them between 18 and 34 tokens."""
    torch.manual_seed(0)
    config = tf.BertConfig(
        vocab_size=1000, hidden_size=256, num_attention_heads=4, num_hidden_layers=12, intermediate_size=1024, num_labels=10,
        initializer_range=0.1,
    )  # fmt: skip
    lengths = np.random.default_rng(0).lognormal(3.2, 0.5, options.examples or 512).clip(5, 64).astype(int)
    batches = []
    for part in np.array_split(lengths, max(1, len(lengths) // 32)):
        real = torch.arange(int(part.max())) < torch.tensor(part)[:, None]
        batches.append({"input_ids": torch.randint(5, 1000, real.shape) * real, "attention_mask": real.long()})
    return tf.BertForSequenceClassification(config).eval(), batches, 1 / 3


def minilm(options: argparse.Namespace) -> Subject:
    path = options.minilm or MINILM
    if not path.is_dir():
        raise LeftOutError("minilm-rt is not there (--minilm PATH); benchmarks/build_minilm_rt.py builds it")
    return *_loaded(path, path / "data", options.examples or 1024), 1 / 2


def digits(options: argparse.Namespace) -> Subject:
    model_path, data_path, _ = demo.prepare(demo.HOME, lambda done, total: None)
    return *_loaded(model_path, data_path, options.examples or 1000), 1 / 2


def _loaded(model: Path, data: Path, examples: int) -> tuple[nn.Module, list[Batch]]:
    loaded = load_model(str(model), device="cpu")
    parts = load_parts(DataOptions(str(data), limit=examples, report_limit=1), loaded)
    return loaded.model, list(parts.score.batches())


SUBJECTS: dict[str, Callable[[argparse.Namespace], Subject]] = {"bert": bert, "minilm": minilm, "digits": digits}


def dropped(layers: Sequence[hp.AttentionLayer], share: float) -> Heads:
    """Heads drawn at random, so that ``share`` of each layer's stay, at least one."""
    draw = np.random.default_rng(0)
    counts = {layer.name: layer.num_heads - max(1, round(share * layer.num_heads)) for layer in layers}
    return {layer.name: sorted(draw.permutation(layer.num_heads)[: counts[layer.name]].tolist()) for layer in layers}


def removed(weight: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """With zeros for the inputs that go."""
    found = torch.zeros_like(weight)
    found[kept] = weight[kept]
    return found


def seconds(work: Callable[[], Any]) -> float:
    """CPU time of all threads."""
    started = time.process_time()
    work()
    return time.process_time() - started


@contextmanager
def watched(spent: dict[str, float]) -> Iterator[None]:
    """Adds up the CPU time that goes into every one of `PARTS`."""

    def timed(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            started = time.process_time()
            found = work(*args, **kwargs)
            spent[name] += time.process_time() - started
            return found

        return run

    patches = [patch.object(owner, at, timed(name, getattr(owner, at))) for name, (owner, at) in PARTS.items()]
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()


def examine(subject: Subject, repeat: int) -> dict[str, Any]:
    model, batches, share = subject
    layers = [layer for layer in hp.find_attention(model, _inputs(batches[0])) if layer.maskable]
    calibration, drop = calibrate(model, layers, batches, values=False), dropped(layers, share)
    old = Weights({p.name: (removed(p.weight, p.kept(drop)), p.bias) for p in calibration.projections})
    runner = calibration.runner.with_mixtures(1)
    answers = dense_answers(runner)  # asked for once for all steps
    assert isinstance(answers, DenseAnswers)
    # Layers are not fitted, so nothing else is measured.
    nothing = Directions(runner, {}, {})
    known: dict[str, Any] = {**vars(calibration), "runner": runner}
    refit = Refit(DenseReference(**known, directions=nothing, moments={}, passes=0.0, answers=answers))

    def forward() -> None:
        with torch.inference_mode():
            for batch in batches:
                model(**_inputs(batch))

    forward()
    passes: dict[str, list[float]] = {"step": [], **{name: [] for name in PARTS}}
    units: list[float] = []
    done: list[bool] = []
    for _ in range(repeat):
        spent = dict.fromkeys(PARTS, 0.0)
        before = seconds(forward)
        with watched(spent):
            spent["step"] = seconds(lambda: done.append(isinstance(logits.fit(refit, drop, old), Weights)))
        units.append((before + seconds(forward)) / 2)
        for name, found in spent.items():
            passes[name].append(found / units[-1])
    return {
        "examples": runner.examples, "directions": answers.count, "mixtures": bool(runner.mixtures),
        "forward_seconds": round(statistics.median(units), 3), "taken": all(done),
        "passes": {name: round(statistics.median(found), 2) for name, found in passes.items()},
    }  # fmt: skip


def _inputs(batch: Batch) -> Batch:
    return {k: v for k, v in batch.items() if k != "labels"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(SUBJECTS), help="these models")
    parser.add_argument("--examples", type=int, help="instead of 512, 1,024 and 1,000")
    parser.add_argument("--repeat", type=int, default=3, help="the median of so many")
    parser.add_argument("--threads", type=int, default=1, help="torch's")
    parser.add_argument("--minilm", type=Path, help="where minilm-rt is")
    options = parser.parse_args()
    tf.utils.logging.set_verbosity_error()
    tf.utils.logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    found: dict[str, Any] = {}
    for name in options.only or SUBJECTS:
        try:
            found[name] = examine(SUBJECTS[name](options), options.repeat)
        except LeftOutError as error:
            found[name] = {"left_out": str(error)}
        say(f"{name}: {found[name]}")
    print(json.dumps({**about("last_step.py"), "models": found}))


if __name__ == "__main__":
    main()
