"""Data that cannot be read: the file, the line and what to try; rows are named by what the user has."""

import json
from pathlib import Path

import pytest

import headprune as hp
from headprune.app.data import DataOptions, load_parts
from headprune.app.data.broken import first_broken
from headprune.app.data.reading import read_splits
from headprune.app.models import load_model
from tests.support.folders import sentences, write_jsonl

ROWS = [json.dumps(row) for row in sentences(60, 0)]
TABLE = ["text,label", *(f"text {i},1" for i in range(60))]


def with_line(lines: list[str], number: int, text: str) -> bytes:
    """The lines, of which one (from 1) is another."""
    return "".join(f"{line}\n" for line in [*lines[: number - 1], text, *lines[number:]]).encode()


BROKEN: dict[str, tuple[str, bytes, str]] = {
    "cut": ("x.jsonl", with_line(ROWS, 44, '{"text": "good", "label": '), "line 44 is not valid JSON .Expecting value"),
    "comma": ("x.jsonl", with_line(ROWS, 44, '{"text": "a" "label": 1}'), "line 44 is not valid JSON .*column 14"),
    "after a blank line": ("x.jsonl", b"\n" + with_line(ROWS, 44, "{"), "line 45 is not valid JSON"),
    "a list": ("x.jsonl", with_line(ROWS, 44, "[1, 2]"), "line 44 holds a list instead of a JSON object"),
    "json with lines": ("x.json", with_line(ROWS, 44, "{"), "line 44 is not valid JSON"),
    "json": ("x.json", b'[\n{"text": "a", "label": 1},\n{"text" "b"}\n]', "it is not valid JSON .line 3, column 9"),
    "fields": ("x.csv", with_line(TABLE, 44, "good, but long,1"), "line 44 has 3 fields where 2 are expected.*commas"),
    "tabs": ("x.tsv", with_line([t.replace(",", "\t") for t in TABLE], 44, "a\tb\t1"), "line 44 has 3 fields.*tabs"),
    "after a text of two lines": (
        "x.csv", with_line(TABLE, 9, '"two\nlines",1\na,b,c'), "line 11 has 3 fields where 2 are expected",
    ),
    "quote": ("x.csv", with_line(TABLE, 44, '"good,1'), "quotes .* of the row that begins in line 44 do not match"),
    "latin": ("x.csv", with_line(TABLE, 44, "schön,1").decode().encode("latin-1"), "line 44 is not UTF-8.*position 4"),
    "parquet": ("x.parquet", b"PAR1, but no more", "x.parquet cannot be read as a dataset: it is no Parquet file"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.parametrize("in_folder", [False, True], ids=["file", "folder"])
def test_the_broken_line_is_named(case: str, in_folder: bool, tmp_path: Path) -> None:
    name, content, message = BROKEN[case]
    data = tmp_path / "data"
    data.mkdir()
    if in_folder:
        name = f"train.{name.partition('.')[2]}"
        message = message.replace("x.parquet", "train.parquet")
        write_jsonl(data / "notes" / "fine.jsonl", sentences(3, 0))  # is not what is wrong
    (data / name).write_bytes(content)
    with pytest.raises(hp.HeadPruneError, match=message) as error:
        read_splits(str(data if in_folder else data / name))
    assert str(data / name) in str(error.value)
    assert error.value.hint
    assert "\n" not in str(error.value)


def test_the_cause_is_told_where_no_line_is_to_blame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headprune.app.data.reading.first_broken", lambda path: None)
    path = tmp_path / "x.csv"
    path.write_bytes(with_line(TABLE, 44, "a,b,c"))
    with pytest.raises(hp.HeadPruneError, match="Expected 2 fields in line 44, saw 3"):
        read_splits(str(path))


@pytest.mark.parametrize(("name", "text"), [
    ("x.jsonl", '\n{"text": "a\\nb"}\r\n\n{"text": "c"}'),
    ("x.json", '[\n {"text": "a"}\n]'),
    ("x.json", '{"text": "a"}\n{"text": "b"}\n'),
    ("x.csv", 'text,label\n"two\nlines, and a ""word""",1\n\nshort\n'),
    ("x.csv", "text\n0,a\n1,b\n"),  # row numbers without a name
    ("x.csv", "text,label\n" + "a" * 200_000 + ",1\n"),
    ("x.tsv", "text\tlabel\na, b\t1\n"),
    ("x.txt", "{\n"),
    ("README.md", "{"),
])  # fmt: skip
def test_nothing_is_found_in_what_can_be_read(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    assert first_broken(tmp_path) is None
    if name != "README.md":
        assert len(read_splits(str(tmp_path / name))["all"]) > 0


def test_rows_are_named_by_the_file_or_the_split(bert_folder: Path, tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"text": "good film", "label": 7 if i == 3 else 1} for i in range(8)]
    loaded = load_model(str(bert_folder))
    file = write_jsonl(tmp_path / "reviews.jsonl", rows)
    with pytest.raises(hp.HeadPruneError, match=r"^Row 3 of reviews.jsonl \(the first is row 0\): label 7 does not"):
        load_parts(DataOptions(str(file)), loaded)
    write_jsonl(tmp_path / "folder" / "train.jsonl", sentences(40, 0))
    write_jsonl(tmp_path / "folder" / "test.jsonl", rows)
    with pytest.raises(hp.HeadPruneError, match=r"^Row 3 of split 'test' \(the first is row 0\): label 7 does not"):
        load_parts(DataOptions(str(tmp_path / "folder")), loaded)
    file = write_jsonl(tmp_path / "few.jsonl", sentences(40, 0))
    assert "There is no other split to report on: few.jsonl was cut by seed 0." in (
        load_parts(DataOptions(str(file)), loaded).notes
    )


def test_a_name_is_no_pattern(tmp_path: Path) -> None:
    """`datasets` takes names of files for patterns: data[1].jsonl was "no rows", and a*.jsonl could be another file."""
    for name in ("data[1].jsonl", "a*.jsonl", "b?.csv", "[x]/train.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text('{"text": "good"}\n' if path.suffix == ".jsonl" else "text\ngood\n")
        (tmp_path / name.replace("*", "b").replace("?", "c")).with_suffix(path.suffix).touch()
        assert read_splits(str(path))["all"]["text"][:] == ["good"]
    with pytest.raises(hp.HeadPruneError, match=r"takes \*, \? and \[ in .* for patterns of names"):
        read_splits(str(tmp_path / "[x]"))
    lines = tmp_path / "a\nb"
    lines.mkdir()
    (lines / "train.jsonl").write_text('{"text": "good"}\n')
    with pytest.raises(hp.HeadPruneError, match="name has a line end in it"):  # it was "no rows", too
        read_splits(str(lines))
    assert read_splits(str(lines / "train.jsonl"))["all"]["text"][:] == ["good"]
