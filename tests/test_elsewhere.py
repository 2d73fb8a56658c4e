"""Folders from elsewhere, and the network: nothing outside a folder is written or removed, and no one is called unasked."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import transformers as tf

import headprune as hp
from tests.support.commands import invoke, run, stderr_of
from tests.support.documents import RUN
from tests.support.folders import sentences, write_jsonl
from tests.support.zoo import bert, vit

ROOT = Path(__file__).parent.parent


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """What belongs to the user, beside the folder that was sent: it must stay as it is."""
    folder = tmp_path / "mine"
    (folder / "deep").mkdir(parents=True)
    (folder / "file").write_text("mine")
    (folder / "deep" / "file").write_text("mine")
    yield folder
    assert sorted(p.name for p in folder.rglob("*")) == ["deep", "file", "file"]
    assert (folder / "file").read_text() == (folder / "deep" / "file").read_text() == "mine"


def write(path: Path, kind: str, **data: Any) -> None:
    """A document of headprune's, as somebody else may write it: without a checksum."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"headprune": kind, "schema": 1, **data}))


@pytest.fixture
def sent(tmp_path: Path) -> Path:
    """A run folder that somebody sent."""
    write(tmp_path / "sent" / "run.json", "run", **RUN)
    return tmp_path / "sent"


def use(sent: Path) -> None:
    """What people do with a run folder."""
    for typed in (["report", sent], ["prune", "-k", 4, "--scores", sent], ["prune", "-k", 4, "-o", sent], ["inspect", sent],
                  ["prune", "m", "-d", "d", "-k", 4, "-o", sent, "--overwrite"],
                  ["finetune", sent / "pruned-4", "-o", sent]):  # fmt: skip
        result = invoke(*map(str, typed))
        assert isinstance(result.exception, SystemExit | None), result.exception
        assert "unexpected" not in result.stderr, result.stderr


@pytest.mark.parametrize("name", ["../mine", "../mine/file", "{victim}", "..", ".", "a/../../mine", "\0", 3, ["x"]])
def test_a_publication_removes_nothing_elsewhere(name: Any, sent: Path, victim: Path) -> None:
    """It was enough to look at such a folder: `headprune report sent` removed what the file named."""
    name = name.format(victim=victim) if isinstance(name, str) else name
    write(sent / ".ready" / ".gone.json", "publication", gone=[name])
    if name == "../mine":
        use(sent)
    else:
        invoke("report", str(sent))
    assert (sent / "run.json").exists()
    assert not (sent / ".ready").exists()


def test_a_publication_of_names_is_finished(sent: Path) -> None:
    (sent / "old.md").touch()
    write(sent / ".ready" / ".gone.json", "publication", gone=["old.md"])
    (sent / ".ready" / "new.md").touch()
    run("report", sent)
    assert not (sent / "old.md").exists()
    assert {"new.md", "run.json"} <= {p.name for p in sent.iterdir()}


@pytest.mark.parametrize("link", [".unfinished", ".ready", ".lock"])
@pytest.mark.parametrize("ready", [False, True])
def test_links_in_the_place_of_our_own_are_not_followed(link: str, ready: bool, sent: Path, victim: Path) -> None:
    """`.unfinished` was emptied, and `.lock` overwritten, wherever they led."""
    target = victim / "file" if link == ".lock" else victim
    (sent / link).symlink_to(os.path.relpath(target, sent) if ready else target)
    if ready and link != ".ready":
        (sent / ".ready").mkdir()
        use(sent)
    assert "is a link, which headprune never makes there" in stderr_of("report", sent, code=1)


def test_a_lock_is_no_link(tmp_path: Path, victim: Path) -> None:
    (tmp_path / ".model.lock").symlink_to(victim / "file")
    with pytest.raises(hp.HeadPruneError, match="cannot be written"):
        hp.save(bert()[0], tmp_path / "model")


def test_what_is_written_replaces_links(sent: Path, victim: Path) -> None:
    for name in ("report.md", "report.html", "importance.png", "tradeoff.png", "metrics.json", "heads.png"):
        (sent / name).symlink_to(victim / "file")
    (sent / "metrics.json").unlink()
    run("report", sent)
    assert not (sent / "report.md").is_symlink()
    temporary = sent / f".plan.json.{os.getpid()}.tmp"  # a name that can be guessed
    temporary.symlink_to(victim / "file")
    plan = hp.PruningPlan({"L0": [1]}, 4)
    plan.save(sent / "plan.json")
    assert hp.PruningPlan.load(sent / "plan.json") == plan


@pytest.mark.parametrize("value", [3, ["dict", [["tuple", ["key", "a"]]]]])
def test_a_damaged_note_of_an_interrupted_command(value: Any, sent: Path) -> None:
    """It was indexed blindly: KeyError."""
    content = json.dumps({"name": "key", "seconds": 0.0, "value": value}).encode() + b"\n"
    (sent / ".unfinished").mkdir()
    note = sent / ".unfinished" / f"key-{sha256(b'key').hexdigest()[:12]}.part"
    note.write_bytes(sha256(content).digest() + content)
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
from tests.support.commands import run
from tests.support.interrupted import load
import headprune as hp
load()
for line in sys.argv[1:]:
    run(*shlex.split(line))
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
    error = stderr_of("score", name, "-d", data_folder, code=1)
    assert "no such folder, and on the Hugging Face Hub no model can have this name" in error
    error = stderr_of("score", "./gone", "-d", f"{name}.jsonl", code=1)
    assert "There is no file or folder" in error
    assert cut == []


@pytest.mark.parametrize(
    "address", ["http://127.0.0.1:9/a.jsonl", "hf://datasets/some/data/a.jsonl", "file:///etc/passwd"]
)
@pytest.mark.parametrize("file", ["README.md", ".huggingface.yaml"])
def test_data_name_no_address(address: str, file: str, cut: list[Any], here: Path, bert_folder: Path) -> None:
    """`datasets` would fetch what its README names."""
    write_jsonl(here / "data" / "train.jsonl", sentences(9, 0))
    text = f"configs:\n- config_name: default\n  data_files: {address}\n"
    (here / "data" / file).write_text(f"---\n{text}---\n# Data\n" if file == "README.md" else text)
    assert "names files elsewhere" in stderr_of("score", bert_folder, "-d", "data", "-m", "random", code=1)
    assert cut == []


def test_a_readme_may_have_links(here: Path, bert_folder: Path, data_folder: Path) -> None:
    shutil.copytree(data_folder, here / "data")
    files = "[{split: train, path: train.jsonl}, {split: test, path: test.jsonl}]"
    text = (
        f"---\nlicense: mit\nconfigs:\n- config_name: default\n  data_files: {files}\n---\nFrom https://example.org.\n"
    )
    (here / "data" / "README.md").write_text(text)
    assert "to score (train)" in stderr_of("score", bert_folder, "-d", "data", "-L", 8, "--dry-run")


def test_a_row_names_no_image_elsewhere(cut: list[Any], here: Path) -> None:
    """transformers' image processors fetch what a text names."""
    vit()[0].save_pretrained("vit")
    tf.ViTImageProcessor(size={"height": 8, "width": 8}).save_pretrained("vit")
    for image in ("http://127.0.0.1:9/a.png", "/etc/passwd", ["http://127.0.0.1:9/a.png"]):
        data = write_jsonl(here / "x.jsonl", [{"image": image, "label": 0}] * 9)
        error = stderr_of("score", "vit", "-d", data, "-m", "random", code=1)
        assert "column 'image' holds no image" in error
    assert not [host for host in cut if "127" in str(host)]  # datasets may have looked for news of its own
