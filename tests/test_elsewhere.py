"""Folders from elsewhere, and the network: nothing outside a folder is written or removed, and no one is called unasked."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import headprune as hp
from headprune.app.data.reading import read_splits
from headprune.app.folders import Folder
from headprune.app.runs import RunFolder
from headprune.files import locked, write_file, write_json
from tests.support.commands import run, runner
from tests.support.documents import RUN
from tests.support.folders import write_jsonl
from tests.support.zoo import vit

ROOT = Path(__file__).parent.parent


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """What belongs to the user, beside the folder that was sent."""
    folder = tmp_path / "mine"
    (folder / "deep").mkdir(parents=True)
    (folder / "file").write_text("mine")
    (folder / "deep" / "file").write_text("mine")
    return folder


@pytest.fixture
def sent(tmp_path: Path) -> Path:
    """A run folder that somebody sent."""
    folder = tmp_path / "sent"
    folder.mkdir()
    write_json(folder / "run.json", "run", RUN)
    return folder


def untouched(victim: Path) -> None:
    assert sorted(p.name for p in victim.rglob("*")) == ["deep", "file", "file"]
    assert (victim / "file").read_text() == (victim / "deep" / "file").read_text() == "mine"


def use(sent: Path) -> None:
    """What people do with a run folder."""
    from headprune.cli import app

    for typed in (["report", sent], ["prune", "-k", 4, "--scores", sent], ["prune", "-k", 4, "-o", sent], ["inspect", sent],
                  ["prune", "m", "-d", "d", "-k", 4, "-o", sent, "--overwrite"],
                  ["finetune", sent / "pruned-4", "-o", sent]):  # fmt: skip
        result = runner.invoke(app, [str(a) for a in typed])
        assert isinstance(result.exception, SystemExit | None), result.exception
        assert "unexpected" not in result.stderr, result.stderr


@pytest.mark.parametrize(
    "name", ["../mine", "../mine/file", "{victim}", "{victim}/file", "..", ".", "a/../../mine", "\0", 3, None, ["x"]]
)
def test_a_publication_removes_nothing_elsewhere(name: Any, sent: Path, victim: Path) -> None:
    """It was enough to look at such a folder: `headprune report sent` removed what the file named."""
    name = name.format(victim=victim) if isinstance(name, str) else name
    write_json(sent / ".ready" / ".gone.json", "publication", {"gone": [name]})
    RunFolder(sent).settle()
    if name == "../mine":
        use(sent)
    untouched(victim)
    assert (sent / "run.json").exists()


def test_a_publication_of_names_is_finished(sent: Path) -> None:
    (sent / "old.md").touch()
    (sent / ".ready").mkdir()
    (sent / ".ready" / "new.md").touch()
    write_json(sent / ".ready" / ".gone.json", "publication", {"gone": ["old.md"]})
    RunFolder(sent).settle()
    assert sorted(p.name for p in sent.iterdir() if p.name[0] != ".") == ["new.md", "run.json"]


@pytest.mark.parametrize("link", [".unfinished", ".ready", ".lock"])
@pytest.mark.parametrize("ready", [False, True])
def test_links_in_the_place_of_our_own_are_not_followed(link: str, ready: bool, sent: Path, victim: Path) -> None:
    """`.unfinished` was emptied, and `.lock` overwritten, wherever they led."""
    target = victim / "file" if link == ".lock" else victim
    (sent / link).symlink_to(os.path.relpath(target, sent) if ready else target)
    if ready and link != ".ready":
        (sent / ".ready").mkdir()
        use(sent)
    with pytest.raises(hp.HeadPruneError, match="is a link, which headprune never makes there"):
        RunFolder(sent).settle()
    with pytest.raises(hp.HeadPruneError, match="is a link"):
        Folder(sent).clear_unfinished()
    untouched(victim)


def test_a_lock_is_no_link(tmp_path: Path, victim: Path) -> None:
    (tmp_path / ".model.lock").symlink_to(victim / "file")
    with (
        pytest.raises(hp.HeadPruneError, match="cannot be written"),
        locked(tmp_path / ".model.lock", "The folder", "test"),
    ):
        pass
    untouched(victim)


def test_what_is_written_replaces_links(sent: Path, victim: Path) -> None:
    for name in ("report.md", "report.html", "importance.png", "tradeoff.png", "metrics.json", "heads.png"):
        (sent / name).symlink_to(victim / "file")
    (sent / "metrics.json").unlink()
    run("report", sent)
    assert not (sent / "report.md").is_symlink()
    untouched(victim)
    temporary = sent / f".plan.json.{os.getpid()}.tmp"  # a name that can be guessed
    temporary.symlink_to(victim / "file")
    write_file(sent / "plan.json", "{}")
    assert (sent / "plan.json").read_text() == "{}"
    untouched(victim)


@pytest.mark.parametrize("key", [3, None, ["x"], {"key": "a"}])
def test_a_damaged_note_of_an_interrupted_command(key: Any, sent: Path) -> None:
    """It was indexed blindly: KeyError."""
    RunFolder(sent).store().keep("key", key)
    assert RunFolder(sent).left_by == key
    if key == 3:
        use(sent)


# -- the network ------------------------------------------------------------------------------------------------------


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """No connection can be made; who tries is noted."""
    tried: list[Any] = []

    def refuse(self: Any, address: Any) -> None:
        tried.append(address)
        raise OSError(101, "Network is unreachable")

    def unknown(host: Any, *_: object, **__: object) -> None:
        tried.append(host)
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for module in list(sys.modules.values()):  # where it was imported by value
        if getattr(module, "__name__", "").startswith(("transformers", "datasets", "huggingface_hub")):
            for name in ("HF_HUB_OFFLINE", "_is_offline_mode", "HF_DATASETS_OFFLINE"):
                if isinstance(vars(module).get(name), bool):
                    monkeypatch.setattr(module, name, False)
    return tried


LOCAL = """
import shlex, socket, sys

def note(event, given):
    if event in ("socket.connect", "socket.getaddrinfo"):
        tried.append(given)
        raise OSError(101, "Network is unreachable")

tried = []
sys.addaudithook(note)
from tests.support.interrupted import load
from headprune.cli import app
import headprune as hp
load()
for line in sys.argv[1:]:
    try:
        app(shlex.split(line))
    except SystemExit as done:
        assert not done.code, line
hp.save(hp.load("r/pruned-4"), "again")
assert not tried, tried
try:
    socket.create_connection(("1.1.1.1", 80), 1)
except OSError:
    assert tried
"""


@pytest.mark.slow
def test_local_work_calls_no_one(here: Path, bert_folder: Path, data_folder: Path) -> None:
    """Without HF_HUB_OFFLINE; and, where such namespaces may be made, where there is no network at all."""
    lines = f"""inspect {bert_folder}
        score {bert_folder} -d {data_folder} -m gradient -L 20 -o r
        prune -k 4 -s one-shot --scores r -o r
        report r
        show r --text "good film"
        export r --to onnx -o m.onnx
        bench {bert_folder} r --batch-sizes 1 --lengths 8
        finetune r/pruned-4 --epochs 0.2 -o f"""
    cut = ["unshare", "-rn"] if shutil.which("unshare") else []
    if cut and subprocess.run([*cut, "true"], capture_output=True, check=False).returncode:
        cut = []
    environment = {k: v for k, v in os.environ.items() if k not in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")}
    done = subprocess.run(
        [*cut, sys.executable, "-c", LOCAL, *map(str.strip, lines.splitlines())], capture_output=True, text=True, check=False,
        env={**environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert {"report.md", "report.html", "pruned-4"} <= {p.name for p in (here / "r").iterdir()}
    assert (here / "m.onnx").stat().st_size > 1000
    assert json.loads((here / "r" / "metrics.json").read_text())["headprune"] == "metrics"


@pytest.mark.parametrize("name", ["./gone", "../gone", "gone/a/b", "/gone", "~/gone"])
def test_a_path_is_not_looked_for_on_the_hub(name: str, cut: list[Any], here: Path, data_folder: Path) -> None:
    error = run("score", name, "-d", data_folder, code=1).stderr
    assert "no such folder, and on the Hugging Face Hub no model can have this name" in error
    error = run("score", "./gone", "-d", f"{name}.jsonl", code=1).stderr
    assert "There is no file or folder" in error
    assert cut == []


@pytest.mark.parametrize(
    "address", ["http://127.0.0.1:9/a.jsonl", "hf://datasets/someone/data/a.jsonl", "file:///etc/passwd"]
)
@pytest.mark.parametrize("file", ["README.md", ".huggingface.yaml"])
def test_a_folder_of_data_names_no_address(address: str, file: str, cut: list[Any], here: Path) -> None:
    """`datasets` would fetch what its README names."""
    (here / "data").mkdir()
    text = f"configs:\n- config_name: default\n  data_files: {address}\n"
    (here / "data" / file).write_text(f"---\n{text}---\n# Data\n" if file == "README.md" else text)
    (here / "data" / "train.jsonl").write_text('{"text": "a", "label": 1}\n')
    with pytest.raises(hp.HeadPruneError, match="names files elsewhere"):
        read_splits("data")
    assert cut == []


def test_a_readme_may_have_links(here: Path) -> None:
    (here / "data").mkdir()
    (here / "data" / "README.md").write_text(
        "---\nlicense: mit\nconfigs:\n- config_name: default\n  data_files: train.jsonl\n---\nFrom https://example.org.\n"
    )
    (here / "data" / "train.jsonl").write_text('{"text": "a", "label": 1}\n')
    assert len(read_splits("data")["train"]) == 1


def test_a_row_names_no_image_elsewhere(cut: list[Any], here: Path) -> None:
    """transformers' image processors fetch what a text names."""
    from headprune.app.data import DataOptions, load_parts
    from headprune.app.models import TASKS, LoadedModel

    loaded = LoadedModel(vit()[0], None, TASKS["image-classification"], "x", "x")
    for image in ("http://127.0.0.1:9/a.png", "/etc/passwd", ["http://127.0.0.1:9/a.png"]):
        data = write_jsonl(here / "x.jsonl", [{"image": image, "label": 0}] * 9)
        with pytest.raises(hp.HeadPruneError, match="column 'image' holds no image"):
            load_parts(DataOptions(str(data)), loaded)
    assert not [host for host in cut if "127" in str(host)]  # datasets may have looked for news of its own
