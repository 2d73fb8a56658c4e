"""Local folders that look like what users have: models with tokenizers, and datasets. No network."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as in the command line; before torch is imported
os.environ.setdefault("HF_MODULES_CACHE", tempfile.mkdtemp())  # where transformers copies the code in saved folders

import pytest
import torch
import transformers as tf
from hypothesis import settings

from headprune import latency, timing
from headprune.app.workflow import results
from tests.support.commands import run
from tests.support.folders import common, sentences, tokenizer, write_jsonl
from tests.support.interrupted import Processes
from tests.support.reports import reported
from tests.support.saved_by_transformers import unpacked
from tests.support.zoo import randomise

# The machine may be slow, so nothing here has a deadline; in CI (.ci/run) the same examples are tried each time.
settings.register_profile("headprune", deadline=None, max_examples=50, derandomize="CI" in os.environ)
settings.load_profile("headprune")
torch.set_num_threads(1)  # pytest-xdist runs two workers on two cores
latency.MIN_SECONDS, latency.bench = 0.02, partial(latency.bench, min_runs=5)  # tests of timing say how long themselves
timing.MIN_PASSES = 1
time_parts = results.time_parts
results.time_parts = lambda model, layers, shapes, *more: time_parts(
    model, layers, shapes[:1], *more
)  # one is enough here
os.fsync = lambda _: None  # no machine loses its power here


def pytest_collection_finish() -> None:
    """The libraries stay, so the garbage collector need not look through them: a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)


@pytest.fixture(scope="session")
def bert_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sequence classifier with its tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "tiny-bert"
    config = tf.BertConfig(**common(id2label={0: "negative", 1: "positive"}, label2id={"negative": 0, "positive": 1}))
    randomise(tf.BertForSequenceClassification(config)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A causal language model with key/value groups."""
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    randomise(tf.LlamaForCausalLM(tf.LlamaConfig(**common(num_key_value_heads=2)))).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train, validation and test in JSONL."""
    folder = tmp_path_factory.mktemp("data")
    for split, count, seed in (("train", 60, 1), ("validation", 30, 2), ("test", 40, 3)):
        write_jsonl(folder / f"{split}.jsonl", sentences(count, seed))
    return folder


@pytest.fixture(scope="session")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders that headprune 0.1 saved, and that were saved with older versions of transformers."""
    folder = unpacked(tmp_path_factory.mktemp("older"))
    shutil.copytree(Path(__file__).parent / "support" / "saved_by_0_1", folder / "0.1")
    return folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def scored_once(tmp_path_factory: pytest.TempPathFactory, bert_folder: Path, data_folder: Path) -> Path:
    """A folder in which `headprune score` has run."""
    folder = tmp_path_factory.mktemp("scored")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run("score", bert_folder, "-d", data_folder, "-L", 40, "-b", 32, "-q")
    return folder


@pytest.fixture
def scored(here: Path, scored_once: Path) -> Path:
    """The run in a test's own folder."""
    shutil.copytree(scored_once, here, dirs_exist_ok=True)
    return here / "reports" / "tiny-bert-1"


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Benchmarks of one run, for tests of commands in which times do not matter."""
    monkeypatch.setattr("headprune.latency.MIN_SECONDS", 0.001)
    monkeypatch.setattr(latency, "bench", partial(latency.bench, min_runs=1, min_seconds=0.001))


@pytest.fixture
def report(tmp_path: Path) -> Callable[..., str]:
    """The report.md of documents: ``report(metrics, *scores, run=…, heads=…)``; report.html lies in ``tmp_path / "r"``, too."""
    return partial(reported, tmp_path / "r")


@pytest.fixture
def saved_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fine-tuning writes a checkpoint after every step, so that a test may stop it at any."""
    monkeypatch.setattr("headprune.app.finetune.SAVE_SECONDS", 0.0)
    monkeypatch.setattr("headprune.app.finetune._SAVE_SHARE", float("inf"))


@pytest.fixture(autouse=True)
def _undrawn(request: pytest.FixtureRequest) -> Iterator[None]:
    """Pictures are put together, but not painted: that is a fifth of a run's time. Tests marked ``drawn`` paint."""
    with pytest.MonkeyPatch.context() as patch:  # one of its own: tests undo theirs
        if not request.node.get_closest_marker("drawn"):
            patch.setattr("headprune.app.pictures.png", lambda figure: b"")
        yield


@pytest.fixture(scope="session")
def processes() -> Iterator[Processes]:
    """Runs commands in processes of their own, which can be stopped (`tests.support.interrupted`)."""
    made = Processes()
    yield made
    made.close()
