"""A small world for benchmarks/faults.py: a tiny model and its data, commands run in forks of this process, and what readers then see."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 300  # seconds that a command may take
RUN = "reports/m-1"
TUNED = f"{RUN}/pruned-3-finetuned"
EXPORTED = f"{TUNED}-stock"
FILE = "reports/l.gguf"

# What a user types, in this order. A step's old state is what the same step made with other options.
STEPS: dict[str, list[str]] = {
    "score": ["score", "m", "-d", "d", "-b", "4", "-m", "gradient", "-m", "ablation"],
    "prune": ["prune", "-k", "3", "-m", "gradient"],
    "finetune": ["finetune", f"{RUN}/pruned-3", "--epochs", "2", "--learning-rate", "1e-3"],
    "export": ["export", TUNED, "--to", "stock", "--pad", "-o", EXPORTED],
    "export a file": ["export", "l", "--to", "gguf", "-o", FILE],
}
OTHERWISE: dict[str, list[str]] = {
    "score": [*STEPS["score"], "--seed", "5"],
    "prune": ["prune", "-k", "3", "-m", "ablation"],
    "finetune": [*STEPS["finetune"], "--seed", "5"],
    "export": [*STEPS["export"], "--dtype", "float16"],
    "export a file": [*STEPS["export a file"], "--dtype", "float16"],
}
OVER: dict[str, list[str]] = {name: ["--overwrite"] for name in STEPS}
OVER["score"] = ["-o", RUN, "--overwrite"]

# What documents say of time and effort, and what depends on the number of times that a command was typed.
COSTS = {
    "seconds", "passes", "latency", "time", "generation", "energy", "environment", "when", "resumed", "command", "commands", "checksum", "checksums",
}  # fmt: skip


@dataclass
class Ended:
    """What became of a command: its exit status (below 0 a signal), what it said, and how long it took."""

    status: int
    said: str = ""
    stdout: str = ""
    seconds: float = 0.0

    @property
    def lines(self) -> list[str]:
        """headprune's own errors."""
        return [line for line in self.said.splitlines() if line.startswith("headprune: ")]

    @property
    def clean(self) -> bool:
        """Whether it ended as a command should that could not go on: one line and no traceback; nothing where a signal came before it had begun."""
        if self.status in (130, 143) and not self.said.strip():
            return True
        return self.status > 0 and len(self.lines) == 1 and "Traceback" not in self.said


@dataclass
class Fork:
    """A command that runs in a fork of this process."""

    pid: int
    streams: Path
    began: float = field(default_factory=time.monotonic)

    def wait(self, until: float | None = None) -> Ended | None:
        """How it ended; None if it still runs ``until`` seconds after its beginning."""
        deadline = self.began + (PATIENCE if until is None else until)
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            now = time.monotonic()
            if pid:
                out, err = ((self.streams / name).read_text(errors="replace") for name in ("stdout", "stderr"))
                return Ended(os.waitstatus_to_exitcode(status), err, out, now - self.began)
            if now >= deadline:
                if until is not None:
                    return None
                os.kill(self.pid, signal.SIGKILL)
                until = 1e9
            time.sleep(0.002)

    def ended(self) -> Ended:
        found = self.wait()
        assert found is not None
        return found


def beside() -> Path:
    """A folder on another disk than the world's, for what commands say."""
    return Path(os.environ["HEADPRUNE_FAULTS_SAID"])


def fork(world: Path, work: Callable[[], None], environment: dict[str, str] | None = None, name: str = "") -> Fork:
    """Run a function in a fork, in the folder ``world``."""
    streams = beside() / f"said{name}"
    streams.mkdir(exist_ok=True)
    for stream in ("stdout", "stderr"):
        (streams / stream).write_text("")
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return Fork(pid, streams)
    status = 70
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell runs in the background ignores it
        os.chdir(world)
        for number, stream in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(streams / stream, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115
        os.environ.update({"COLUMNS": "2000", **(environment or {})})  # a message is a line
        work()
        status = 0
    except SystemExit as stopped:
        status = stopped.code if isinstance(stopped.code, int) else int(stopped.code is not None)
    except KeyboardInterrupt:  # before the command listened
        status = 130
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    raise AssertionError


def command(
    world: Path,
    arguments: Sequence[str],
    *,
    before_rename: tuple[int, int] | None = None,
    first: Callable[[], None] | None = None,
    **more: Any,
) -> Fork:
    """Run headprune in a fork.

    Args:
        before_rename: n and a signal: the process gets it before it puts its n-th file in place.
        first: Called in the fork before the command.
        more: As for `fork`.
    """

    counted = beside() / "renames"
    counted.write_bytes(b"")

    def work() -> None:
        original, count = os.replace, 0

        def replace(*given: Any) -> None:
            nonlocal count
            count += 1
            with open(counted, "a") as file:
                file.write(f"{given[1]}\n")
            if before_rename is not None and count == before_rename[0]:
                os.kill(os.getpid(), before_rename[1])
            original(*given)

        os.replace = replace  # type: ignore[assignment]
        if first is not None:
            first()
        sys.argv = ["headprune", *arguments]
        from headprune.cli import main

        main()

    return fork(world, work, **more)


def asked(world: Path, question: Callable[[], Any]) -> tuple[Any, Ended]:
    """A function's answer (as JSON holds it), from a fork in the folder ``world``."""
    answer = beside() / "answer.json"
    answer.unlink(missing_ok=True)

    def work() -> None:
        found = question()
        answer.write_text(json.dumps(found))

    ended = fork(world, work).ended()
    return (json.loads(answer.read_text()) if ended.status == 0 else None), ended


# -- what is there ------------------------------------------------------------------------------


def make(world: Path) -> None:
    """A classifier ``m`` with a layer of four heads, data ``d``, and a language model ``l`` that llama.cpp reads."""
    import transformers as tf

    from tests.support.decoders import bytewise
    from tests.support.folders import common, sentences, tokenizer, write_jsonl
    from tests.support.zoo import randomise

    config = tf.BertConfig(**common(num_hidden_layers=1, hidden_size=16, intermediate_size=8))
    randomise(tf.BertForSequenceClassification(config)).save_pretrained(world / "m")
    tokenizer().save_pretrained(world / "m")
    words = bytewise()  # llama.cpp has no tokenizer of whole words
    sizes = {"vocab_size": len(words), "intermediate_size": 16, "num_key_value_heads": 4}
    small = tf.LlamaConfig(**common(**sizes, bos_token_id=1, eos_token_id=0))
    randomise(tf.LlamaForCausalLM(small)).save_pretrained(world / "l")
    words.save_pretrained(world / "l")
    for split, count, seed in (("train", 12, 1), ("validation", 8, 2), ("test", 10, 3)):
        write_jsonl(world / "d" / f"{split}.jsonl", sentences(count, seed))


def told(value: Any) -> Any:
    """A document without what it says of time and effort."""
    if isinstance(value, dict):
        return {k: told(v) for k, v in value.items() if k not in COSTS}
    if isinstance(value, list):
        return [told(v) for v in value if not (isinstance(v, str) and "forward passes" in v)]
    return value


def seen(world: Path) -> dict[str, Any]:
    """All that the commands of `STEPS` gave, as their readers find it: documents, checkpoints that load, hashes of files.

    Reports, cards and pictures say times, so only their names count. The world's `m` and `d` are the user's own.
    """
    import hashlib

    import headprune as hp
    from headprune.app.runs import RunFolder

    found: dict[str, Any] = {}
    run = RunFolder(world / RUN)
    for folder in (run, RunFolder(world / TUNED)):
        if folder.path.exists():
            folder.settle()
    if run.run_path.exists():
        found["scores"] = [s.to_json() for s in run.read_scores()]
        found["run"] = run.read_run().to_json()
        found["heads"] = (heads := run.read_heads()) and heads.to_json()
        found["metrics"] = (metrics := run.read_metrics()) and metrics.to_json()
    found = {name: told(json.loads(json.dumps(value, default=str))) for name, value in found.items()}
    for path in sorted((world / "reports").rglob("*")):
        name = path.relative_to(world).as_posix()
        hidden = any(
            part.startswith(".") for part in path.relative_to(world).parts
        )  # left by a command that was killed
        if hidden or name.startswith("reports/m-2") or not path.is_file():
            continue
        document = path.suffix == ".json" and not path.name.startswith(("tokenizer", "config", "generation"))
        whole = (
            path.suffix in (".safetensors", ".gguf") or path.parent.name.startswith("pruned-") or path.suffix == ".json"
        )
        if document:
            found[name] = told(json.loads(path.read_text()))
        elif whole and path.suffix != ".md":
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            found[name] = None
        if path.name == "headprune.json":
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message="headprune: ")
                hp.load(path.parent)
    return found


def view(world: Path) -> tuple[dict[str, Any] | None, str]:
    """`seen` from a fork, as of a user who looks; None, and why, where it does not read."""
    found, ended = asked(world, lambda: seen(Path()))
    return found, ended.said


def copy(world: Path, to: Path) -> Path:
    """A world's copy, with all that interrupted runs left."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(world, to, symlinks=True)
    return to


def load() -> None:
    """Import what commands need, once for all forks."""
    sys.path.insert(0, str(ROOT))
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    os.environ.pop("HEADPRUNE_DEBUG", None)
    import headprune.cli  # noqa: F401
    from tests.support import interrupted

    interrupted.load()
