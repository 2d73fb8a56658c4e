"""The documents of a run folder: one definition each, so that a renamed key fails here."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

import headprune as hp
from headprune.app.documents import Cut, FinetuneRecord, Heads, Metrics, Run
from headprune.app.options import DataOptions, Options
from headprune.app.report.cards import finetune_report
from headprune.documents import File, from_json
from headprune.files import dumps, loads, write_json
from headprune.plans import PruningPlan
from headprune.scoring import load_scores, save_scores
from tests.support.documents import FINETUNE, HEADS, METRICS, RUN, TRAINED, repaired

ROOT = Path(__file__).parent.parent
REPORTS = sorted((ROOT / "reports").glob("*/"))
FULL: dict[type[File], dict[str, Any]] = {Run: RUN, Metrics: METRICS, FinetuneRecord: FINETUNE, Heads: HEADS}


def same(a: Any, b: Any) -> bool:
    """Equal, and of one type everywhere: 1 is not 1.0 in a file."""
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and bool(a == b)


@pytest.mark.parametrize("folder", REPORTS, ids=lambda path: path.name)
def test_committed_reports_are_written_again_as_they_are(folder: Path, tmp_path: Path) -> None:
    """A key that is renamed, dropped or added breaks the folders that users have."""
    for kind in (Run, Metrics, *([Heads] if (folder / "heads.json").exists() else [])):
        name = f"{kind.kind}.json"
        kind.read(folder / name).write(tmp_path / name)
    save_scores(tmp_path / "scores.json", load_scores(folder / "scores.json"))
    for plan in folder.glob("plan*.json"):
        PruningPlan.load(plan).save(tmp_path / plan.name)
    written = sorted(tmp_path.iterdir())
    assert [path.name for path in written] == sorted(path.name for path in folder.glob("*.json"))
    for path in written:
        assert same(loads(path.read_text()), loads((folder / path.name).read_text())), path.name


def holds(whole: Any, part: Any) -> bool:
    """Whether a document says all that another does; what it has beside is nothing, or empty."""
    if isinstance(part, dict):
        more = whole.keys() - part.keys()
        return all(holds(whole[k], part[k]) for k in part) and not any(whole[k] for k in more)
    if isinstance(part, list):
        return len(whole) == len(part) and all(map(holds, whole, part))
    return bool(whole == part)


@pytest.mark.parametrize("kind", FULL, ids=lambda kind: kind.kind)
def test_what_was_read_is_what_is_written(kind: type[File]) -> None:
    data = loads(dumps(FULL[kind]))
    if kind is Metrics:
        data["budgets"][0] |= {"repair": repaired(), "finetune": TRAINED}
    again = loads(dumps(from_json(kind, data).to_json()))
    assert from_json(kind, again) == from_json(kind, data)
    for key in data.keys() - {"options", "data", "latency"}:  # whose defaults are written out
        assert holds(again[key], data[key]), key


def test_older_files_lack_what_was_added_later() -> None:
    """They are readable, and nothing is made up for what they lack."""
    metrics = copy.deepcopy(METRICS)
    del metrics["latency"]["bound_ghosts"], metrics["budgets"][0]["change"]["carried_by"]
    assert not from_json(Metrics, metrics).planning.work
    assert from_json(Metrics, metrics).budgets[0].change.carried_by == 0
    assert from_json(Run, copy.deepcopy(RUN)).parts.score.content_hash is None


def holders(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where the objects of a document are."""
    if isinstance(value, dict):
        yield place
        for key, part in value.items():
            yield from holders(part, (*place, key))
    elif isinstance(value, list):
        for i, part in enumerate(value):
            yield from holders(part, (*place, i))


OPEN = {
    "metrics",
    "columns",
    "layers",
    "drop",
    "timings",
    "speedups",
    "history",
    "work",
}  # whose keys are names of the run


@pytest.mark.parametrize("kind", FULL, ids=lambda kind: kind.kind)
def test_an_unknown_key_is_told_with_the_file_and_its_place(kind: type[File], tmp_path: Path) -> None:
    path = tmp_path / f"{kind.kind}.json"
    for place in holders(FULL[kind]):
        if OPEN & set(place[-2:]):
            continue
        data = loads(dumps(FULL[kind]))
        inner: Any = data
        for step in place:
            inner = inner[step]
        inner["made-up"] = 1
        write_json(path, kind.kind, data)
        with pytest.raises(hp.HeadPruneError) as error:
            kind.read(path)
        told = " › ".join(map(str, (*place, "made-up")))
        assert error.value.args[0] == f"{path} is damaged, or of another version: this headprune does not know {told}."


def test_a_part_is_the_same_as_far_as_both_sides_say() -> None:
    cut = from_json(Cut, RUN["parts"])
    texts = replace(cut, score=replace(cut.score, content_hash="x"))
    assert cut.same(texts)
    assert texts.same(cut)
    assert not texts.same(replace(cut, score=replace(cut.score, content_hash="y")))
    assert not cut.same(replace(cut, report=replace(cut.report, examples=3)))


def test_the_report_of_a_fine_tuning() -> None:
    text = finetune_report("r", from_json(FinetuneRecord, FINETUNE))
    assert (
        "Kept: the weights after epoch 1, by accuracy on 50 choosing examples (`validation`): 50.0 % after 0 epochs, "
        in text
    )
    assert "75.0 % after 1 epoch, 62.5 % after 2 epochs." in text
    assert (
        "| pruned, fine-tuned | 60.0 % (50.0 % to 70.0 %) | -10.00 points (-15.00 to -5.00) | no measurable change |"
        in text
    )


# -- every field serves somebody --------------------------------------------------------------

# What no report and no command reads: for people and for other programs.
FOR_PEOPLE = {
    "after", "biases", "held_out", "patience", "resumed", "ridge", "strength", "train", "weight_decay",
    "evenness", "induction", "duplicate", "itself", "next", "previous", "separator", "sink",
}  # fmt: skip


def models(kind: Any) -> Iterator[type]:
    """A document's type, and all that are in it; not the options, which are the command line's."""
    if isinstance(kind, type) and is_dataclass(kind) and not issubclass(kind, (Options, DataOptions)):
        yield kind
        for hint in get_type_hints(kind).values():
            yield from models(hint)
    for inner in get_args(kind):
        yield from models(inner)


def test_every_field_is_read_by_a_report_or_a_command() -> None:
    """A field that nothing reads may go, unless it is listed above."""
    rooms = ("app/documents", "app/report", "app/seeing", "app/workflow", "cli", "seeing")
    files = [p for room in rooms for p in (ROOT / "headprune" / room).rglob("*") if p.suffix in (".py", ".j2")]
    files += [ROOT / "headprune" / "app" / name for name in ("finetune_run.py", "runs.py")]
    read = set(re.findall(r"(?:\.|attribute=\")(\w+)", "\n".join(path.read_text() for path in files)))
    declared = {name for file in FULL for kind in models(file) for name in [f.name for f in fields(kind)]}
    assert declared - read == FOR_PEOPLE
