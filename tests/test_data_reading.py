"""Data that cannot be read: the file, the line and what to try; rows are named by what the user has."""

import json
from pathlib import Path

import pytest

import headprune as hp
from headprune.app.data import DataOptions, load_parts
from headprune.app.data.reading import read_splits
from headprune.app.models import load_model
from tests.support.folders import sentences, write_jsonl

ROWS = [json.dumps(row) for row in sentences(60, 0)]
TABLE = ["text,label", *(f"text {i},1" for i in range(60))]


def with_line(lines: list[str], number: int, text: str) -> bytes:
    """The lines, of which one (from 1) is another."""
    return "".join(f"{line}\n" for line in [*lines[: number - 1], text, *lines[number:]]).encode()


BROKEN: dict[str, tuple[str, bytes, str]] = {
    "cut": ("x.jsonl", with_line(ROWS, 44, '{"text": "good", "label": '), "line 44: Expecting value: column 27"),
    "comma": ("x.jsonl", with_line(ROWS, 44, '{"text": "a" "label": 1}'), "line 44: .*delimiter: column 14"),
    "after a blank line": ("x.jsonl", b"\n" + with_line(ROWS, 44, "{"), "line 45: Expecting property name"),
    "a list": ("x.jsonl", with_line(ROWS, 44, "[1, 2]"), "line 44: it is no JSON object"),
    "json with lines": ("x.json", with_line(ROWS, 44, "{"), "JSON parse error: .* in row 43"),
    "json": ("x.json", b'[\n{"text": "a", "label": 1},\n{"text" "b"}\n]', "No ':' found .* at position 37"),
    "fields": ("x.csv", with_line(TABLE, 44, "good, but long,1"), "Expected 2 fields in line 44, saw 3"),
    "tabs": ("x.tsv", with_line([t.replace(",", "\t") for t in TABLE], 44, "a\tb\t1"), "2 fields in line 44, saw 3"),
    "quote": ("x.csv", with_line(TABLE, 44, '"good,1'), "EOF inside string starting at row 43"),
    "latin": ("x.csv", with_line(TABLE, 44, "schön,1").decode().encode("latin-1"), "line 44: .*in position 3"),
    "parquet": ("x.parquet", b"PAR1, but no more", "Parquet magic bytes not found"),
    "null": ("x.jsonl", with_line(ROWS, 44, "null"), "line 44: it holds null"),  # pyarrow would crash
    "deep": ("x.jsonl", with_line(ROWS, 44, "[" * 50_000 + "]" * 50_000), "line 44: .*more than 1,000 deep"),  # likewise
    "deep in lines": ("x.json", b'[{"text": 1, "label":\n' + b"[\n" * 2000 + b"]\n" * 2000 + b"}]", "line 1,00.: .* deep"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.parametrize("in_folder", [False, True], ids=["file", "folder"])
def test_the_broken_line_is_named(case: str, in_folder: bool, tmp_path: Path) -> None:
    name, content, message = BROKEN[case]
    data = tmp_path / "data"
    data.mkdir()
    if in_folder:
        name = f"train.{name.partition('.')[2]}"
        write_jsonl(data / "notes" / "fine.jsonl", sentences(3, 0))  # is not what is wrong
    (data / name).write_bytes(content)
    with pytest.raises(hp.HeadPruneError, match=message) as error:
        read_splits(str(data if in_folder else data / name))
    assert str(error.value).startswith(f"{data / name} cannot be read as a dataset: ")
    assert error.value.hint
    assert "\n" not in str(error.value)


def test_files_that_do_not_go_together_are_the_folder(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for i, row in enumerate(({"text": "a"}, {"more": "b", "than": "that"})):
        write_jsonl(tmp_path / "a" / f"train-{i}.jsonl", [row] * 3)
    with pytest.raises(hp.HeadPruneError, match=r"a cannot be read as a dataset: .*\. Check the files in it"):
        read_splits(str(tmp_path / "a"))


@pytest.mark.parametrize(("name", "text"), [
    ("x.jsonl", '\n{"text": "a\\nb"}\r\n\n{"text": "c"}'),
    ("x.json", '[\n {"text": "a"}\n]'),
    ("x.json", '{"text": "a"}\n{"text": "b"}\n'),
    ("x.csv", 'text,label\n"two\nlines, and a ""word""",1\n\nshort\n'),
    ("x.csv", "text\n0,a\n1,b\n"),  # row numbers without a name
    ("x.csv", "text,label\n" + "a" * 200_000 + ",1\n"),
    ("x.tsv", "text\tlabel\na, b\t1\n"),
    ("x.txt", "{\n"),
    ("x.jsonl", json.dumps({"text": "{[" * 2000}) + "\n"),  # brackets in texts
    ("x.jsonl", json.dumps({"text": "a", "more": [[1]] * 2000}) + "\n"),
    ("x.json", '[{"text":\nnull\n}, {"text": "a"}]'),
])  # fmt: skip
def test_what_can_be_read_is_read(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    assert len(read_splits(str(tmp_path / name))["all"]) > 0
    (tmp_path / "z.parquet").write_text("PAR1")
    with pytest.raises(hp.HeadPruneError) as error:
        read_splits(str(tmp_path))
    assert str(tmp_path / name) not in str(error.value)  # another file is broken


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
