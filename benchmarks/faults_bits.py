"""Damaged files, for benchmarks/faults.py: one bit flipped, or the end cut off, in every kind of file that headprune reads."""

from __future__ import annotations

import json
import random
import re
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faults_world as w
from faults_machine import Base, Trial, drawn

CUTS = 3 / 8  # of the flips


@dataclass(frozen=True)
class Kind:
    """Files of one kind.

    Attributes:
        name: For the table.
        world: The state that they lie in: of `Base.world`, or left by a command that was killed.
        pattern: Their paths in it.
        reads: The reader: a step's name, or a function of `READERS`.
        again: Whether the reader computes the damaged part anew.
    """

    name: str
    world: str
    pattern: str
    reads: str
    again: bool = False


PRUNED, TUNED = f"{w.RUN}/pruned-3", w.TUNED
KINDS = (
    Kind("`scores.json`", "before prune", f"{w.RUN}/scores.json", "prune"),
    Kind("`run.json`", "before prune", f"{w.RUN}/run.json", "prune"),
    Kind("`scores.json`, `run.json`, `metrics.json`, `heads.json` (by `report`)", "after prune", f"{w.RUN}/*.json", "report"),
    Kind("`plan.json`", "after prune", f"{w.RUN}/plan.json", "plan"),
    Kind("pruned model: weights", "after prune", f"{PRUNED}/model.safetensors", "model"),
    Kind("pruned model: `headprune.json`", "after prune", f"{PRUNED}/headprune.json", "model"),
    Kind("pruned model: probe and buffers (`headprune.safetensors`)", "after prune", f"{PRUNED}/headprune.safetensors", "model"),
    Kind("pruned model: `config.json`", "after prune", f"{PRUNED}/config.json", "model"),
    Kind("pruned model: tokenizer", "after prune", f"{PRUNED}/tokenizer*.json", "model"),
    Kind("exported stock folder", "after export", f"{w.EXPORTED}/*[ng]*.*s*n*", "exported"),
    Kind("`finetune.json`", "after finetune", f"{TUNED}/finetune.json", "record"),
    Kind("dense model's weights, after scoring", "before prune", "m/model.safetensors", "prune"),
    Kind("dense model's config, after scoring", "before prune", "m/config.json", "prune"),
    Kind("dense model's tokenizer, after scoring", "before prune", "m/tokenizer*.json", "prune"),
    Kind("data, after scoring", "before prune", "d/*.jsonl", "prune"),
    Kind("dense model's weights and config, before `finetune`", "before finetune", "m/*o*[gl].*s*", "finetune"),
    Kind("interrupted `score`: parts", "left score", f"{w.RUN}/.unfinished/*/*.npy", "score", again=True),
    Kind("interrupted `score`: scores", "left score", f"{w.RUN}/.unfinished/*/*.json", "score", again=True),
    Kind("interrupted `prune`: stages", "left prune", f"{w.RUN}/.unfinished/prune-*/*.json", "prune", again=True),
    Kind("interrupted `prune`: tensors", "left prune", f"{w.RUN}/.unfinished/prune-*/*.npy", "prune", again=True),
    Kind("interrupted `prune`: pruned model", "left prune", f"{w.RUN}/.unfinished/prune-*/content/pruned-3/*[a-z]", "prune", again=True),
    Kind("interrupted `finetune`: state of the training", "left finetune", f"{TUNED}/.unfinished/training/*.pt", "finetune"),
    Kind("interrupted `finetune`: measurements", "left finetune", f"{TUNED}/.unfinished/measured-*/*.json", "finetune", again=True),
    Kind("which command was interrupted (`command.json`)", "left prune", f"{w.RUN}/.unfinished/command.json", "prune", again=True),
    Kind("what a publication removes (`.gone.json`)", "moved prune", f"{w.RUN}/.ready/.gone.json", "prune"),
)  # fmt: skip


# -- what reads a file --------------------------------------------------------------------------


def answers(folder: str) -> Any:
    """A saved model's losses on the data, as every command loads and measures it."""
    from headprune.app.data import DataOptions, load_parts
    from headprune.app.models import load_model
    from headprune.evaluation import evaluate

    loaded = load_model(folder, device="cpu")
    parts = load_parts(DataOptions("d"), loaded)
    measured = evaluate(loaded.model, parts.report.batches())
    return [measured.metrics, measured.loss.tolist()]


def record() -> Any:
    from headprune.app.documents import FinetuneRecord

    return w.told(json.loads(FinetuneRecord.read(Path(TUNED, "finetune.json")).model_dump_json()))


def within(question: Callable[[], Any]) -> Callable[[Path], tuple[Any, w.Ended]]:
    """A reader from a function, with errors and warnings told as the command line does."""

    def told() -> Any:
        from headprune.app.console import Console
        from headprune.cli.asked import fail
        from headprune.cli.session import quieten
        from headprune.errors import HeadPruneError

        quieten(False)
        try:
            return question()
        except HeadPruneError as error:
            fail(Console(), str(error.args[0]), error.hint)
            sys.exit(1)

    return lambda world: w.asked(world, told)


def reported(world: Path) -> tuple[Any, w.Ended]:
    ended = w.command(world, ["report", w.RUN]).ended()
    return [(world / w.RUN / name).read_text(errors="replace") for name in ("report.md", "report.html")], ended


def planned(world: Path) -> tuple[Any, w.Ended]:
    ended = w.command(world, ["prune", "--plan", f"{w.RUN}/plan.json", "--dry-run", "--scores", w.RUN]).ended()
    return ended.stdout, ended


def stepped(step: str, over: bool) -> Callable[[Path], tuple[Any, w.Ended]]:
    def read(world: Path) -> tuple[Any, w.Ended]:
        ended = w.command(world, [*w.STEPS[step], *(w.OVER[step] if over else [])]).ended()
        return w.view(world)[0], ended

    return read


READERS: dict[str, Callable[[Path], tuple[Any, w.Ended]]] = {
    "report": reported,
    "plan": planned,
    "model": within(lambda: answers(PRUNED)),
    "exported": within(lambda: answers(w.EXPORTED)),
    "record": within(record),
    **{step: stepped(step, over=False) for step in w.STEPS},
}


# -- damage -------------------------------------------------------------------------------------


def damage(file: Path, how: str, rng: random.Random) -> None:
    """Flip a bit, or cut the end off."""
    content = bytearray(file.read_bytes())
    if how == "flip":
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    else:
        del content[rng.randrange(len(content)) :]
    file.write_bytes(bytes(content))


class Worlds:
    """The states that files are damaged in, and what their readers give when nothing is."""

    def __init__(self, base: Base) -> None:
        self.base = base
        self.expected: dict[tuple[str, str], Any] = {}

    def of(self, name: str) -> Path:
        kind, _, step = name.partition(" ")
        path = self.base.world(kind, step)
        if not path.exists():
            self._interrupt(step, path, moved=kind == "moved")
        return path

    def _interrupt(self, step: str, path: Path, moved: bool) -> None:
        """A command killed just before it publishes what it made, or in the middle of that."""
        trial = Trial(self.base, step, over=False)
        world = trial.world()
        w.command(world, trial.arguments).ended()
        targets = (w.beside() / "renames").read_text().splitlines()
        commit = next(n for n, target in enumerate(targets, 1) if target.endswith(".ready"))
        world = trial.world()
        stop = commit + 3 if moved else commit
        ended = w.command(world, trial.arguments, before_rename=(stop, signal.SIGKILL)).ended()
        assert ended.status == -signal.SIGKILL, ended.said
        w.copy(world, path)

    def undisturbed(self, kind: Kind) -> Any:
        key = (kind.world, kind.reads)
        if key not in self.expected:
            self.expected[key], ended = READERS[kind.reads](w.copy(self.of(kind.world), self.base.scratch))
            assert ended.status == 0, (kind, ended.said)
        return self.expected[key]


def tried(worlds: Worlds, kind: Kind, how: str, rng: random.Random) -> dict[str, Any]:
    """Damage a file of a kind, and read it."""
    expected = worlds.undisturbed(kind)
    world = w.copy(worlds.of(kind.world), worlds.base.scratch)
    file = rng.choice(sorted(path for path in world.glob(kind.pattern) if path.is_file() and path.stat().st_size))
    damage(file, how, rng)
    found, ended = READERS[kind.reads](world)
    row = {"part": "bits", "fault": kind.name, "step": kind.reads, "how": how, "file": file.name, "fine": True}
    if ended.status != 0:
        fine = ended.clean
        return row | {"outcome": "said" if fine else "wrong", "fine": fine, "why": ended.said[-400:]}
    if found == expected:
        return row | {"outcome": "made again" if kind.again else "no matter"}
    said = re.search(r"headprune: |was changed after|has changed since", ended.said + ended.stdout)
    if said and isinstance(found, type(expected)):
        return row | {"outcome": "said", "why": ended.said[-400:]}
    return row | {"outcome": "wrong", "fine": False, "why": f"unnoticed: {str(found)[:300]} {ended.said[-300:]}"}


def trials(
    base: Base, counts: dict[str, int], seed: int, skipped: dict[str, str]
) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """As those of `faults_machine`."""
    worlds, flips = Worlds(base), counts["bits"]
    chosen = KINDS if flips > 1 else random.Random(seed).sample(KINDS, 5)
    for kind in chosen:
        for how, count in (("flip", flips), ("cut", max(1, round(flips * CUTS)))):
            for number in range(count):
                name = f"bits {kind.name} {how} {number}"
                rng = drawn(name, number, seed)
                yield name, lambda kind=kind, how=how, rng=rng: tried(worlds, kind, how, rng)
