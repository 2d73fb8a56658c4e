"""Pushing to the Hub: a small server stands for it, as no test reaches the network."""

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard, constants

import headprune as hp
from headprune.checkpoint import add_figures, upload
from tests.support.commands import run
from tests.support.zoo import ZOO


class Hub(ThreadingHTTPServer):
    """What `HfApi` asks for when it makes a repository and commits small files to it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.files: dict[str, bytes] = {}
        self.created: list[dict[str, Any]] = []
        self.commits: list[str] = []
        self.refuse = 0
        self.address = f"http://127.0.0.1:{self.server_address[1]}"


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, document: Any = None, body: bytes = b"", **headers: str) -> None:
        body = json.dumps(document).encode() if document is not None else body
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2]
        if name not in self.server.files:
            self.answer(404, {"error": "no"}, X_Error_Code="EntryNotFound", X_Repo_Commit="b" * 40)
            return
        self.answer(200, body=self.server.files[name], ETag='"e"', X_Repo_Commit="b" * 40)

    def do_POST(self) -> None:
        sent = self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.refuse:
            self.answer(self.server.refuse, {"error": "no"})
        elif self.path == "/api/repos/create":
            self.server.created.append(json.loads(sent))
            self.answer(200, {"url": f"{self.server.address}/me/smaller"})
        elif self.path == "/api/validate-yaml":
            self.answer(200, {"warnings": [], "errors": []})
        elif "/preupload/" in self.path:
            files = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in json.loads(sent)["files"]
            ]
            self.answer(200, {"files": files})
        elif "/commit/" in self.path:
            for line in map(json.loads, sent.decode().splitlines()):
                if line["key"] == "header":
                    self.server.commits.append(line["value"]["summary"])
                else:
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self.answer(200, {"commitUrl": f"{self.server.address}/me/smaller/commit/c", "commitOid": "c" * 40})
        else:
            self.answer(404, {"error": self.path})


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", server.address)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.address + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN", "hf_made_up")
    yield server
    server.shutdown()
    server.server_close()


def pruned() -> Any:
    model, example = ZOO["bert"]()
    hp.prune(model, {hp.find_attention(model, example)[0].name: [0, 1]}, example)
    return model


def made_private(hub: Hub) -> bool:
    return "private" in (hub.created[0].get("visibility"), hub.created[0].get("private") and "private")


def in_folder(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_folder_is_pushed_whole(hub: Hub, tmp_path: Path) -> None:
    folder = hp.save(pruned(), tmp_path / "m")
    (folder / ".lock").write_text("")
    done = run("push", folder, "me/smaller", "--private", "--json")
    (folder / ".lock").unlink()
    assert json.loads(done.stdout)["url"].endswith("/me/smaller/commit/c")
    assert made_private(hub)
    assert (hub.created[0]["organization"], hub.created[0]["name"]) == ("me", "smaller")
    assert hub.files == in_folder(folder)
    assert {"modeling_headprune.py", "README.md", "headprune.json", "headprune.safetensors"} <= hub.files.keys()


def test_a_dry_run_says_what_would_be_uploaded(hub: Hub, tmp_path: Path) -> None:
    folder = hp.save(pruned(), tmp_path / "m")
    (folder / ".lock").write_text("")
    add_figures(folder, "fast", "nyu-mll/glue")
    told = run("push", folder, "me/smaller", "--dry-run").stdout
    assert not hub.created
    assert not hub.files
    assert "Nothing was uploaded." in told
    assert "datasets: ['nyu-mll/glue']" in told
    assert "license: not in the card" in told
    done = json.loads(run("push", folder, "me/smaller", "--dry-run", "--json").stdout)
    assert done["files"].keys() == in_folder(folder).keys() - {".lock"}


def test_a_model_pushes_what_it_saves(hub: Hub, tmp_path: Path) -> None:
    model = pruned()
    model.push_to_hub("me/smaller", tags=["mine"], commit_message="first")
    model.save_pretrained(tmp_path / "m")
    own = in_folder(tmp_path / "m")
    card = ModelCard(hub.files.pop("README.md").decode())
    assert "10 of 12 attention heads" in card.text
    assert card.data.tags == ["headprune", "pruning", "custom_code", "mine"]
    own.pop("README.md")
    assert hub.files == own
    assert hub.commits == ["first"]
    hub.files["README.md"] = str(card).encode()  # as it was pushed: ours, so the next push replaces it
    model.push_to_hub("me/smaller")
    assert b"mine" not in hub.files["README.md"]
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        model.push_to_hub("me/smaller", colour="red")


def test_save_pretrained_pushes(hub: Hub, tmp_path: Path) -> None:
    pruned().save_pretrained(tmp_path / "m", push_to_hub=True, repo_id="me/smaller", commit_message="x", private=True)
    assert hub.files == in_folder(tmp_path / "m")
    assert hub.commits == ["x"]
    assert made_private(hub)


def test_a_card_that_people_wrote_on_the_hub_stays(hub: Hub, tmp_path: Path) -> None:
    hub.files["README.md"] = b"---\nlicense: mit\n---\n# Ours\n"
    upload(hp.save(pruned(), tmp_path / "m"), "me/smaller")
    assert hub.files["README.md"].endswith(b"# Ours\n")
    assert "modeling_headprune.py" in hub.files


@pytest.mark.parametrize(
    ("status", "why"), [(401, "you are not logged in. Run `hf auth login`"), (403, "your token may not write there")]
)
def test_refusals_are_one_line(status: int, why: str, hub: Hub, tmp_path: Path) -> None:
    folder = hp.save(pruned(), tmp_path / "m")
    hub.refuse = status
    done = run("push", folder, "me/smaller", code=1)
    assert f"me/smaller could not be pushed to: {why}" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not hub.files


def test_offline_unreachable_and_misspelt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = hp.save(pruned(), tmp_path / "m")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(hp.HeadPruneError, match="HF_HUB_OFFLINE is set"):
        upload(folder, "me/smaller")
    with pytest.raises(hp.HeadPruneError, match="no name of a repository"):
        upload(folder, "me//smaller/")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(hp.HeadPruneError, match="Check the name and the network"):
        upload(folder, "me/smaller", token="hf_made_up")


def test_a_damaged_folder_is_not_pushed(hub: Hub, tmp_path: Path) -> None:
    folder = hp.save(pruned(), tmp_path / "m")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0\1")
    assert "not those that were saved" in run("push", folder, "me/smaller", code=1).stderr
    assert "no folder" in run("push", tmp_path / "none", "me/smaller", code=1).stderr
    assert not hub.created
