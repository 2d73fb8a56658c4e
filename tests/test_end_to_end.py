"""The runs that the committed reports come from, shorter. Slow."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MINILM = ROOT.parent / "shared" / "real" / "minilm-rt"


def headprune(*arguments: object, cwd: Path) -> str:
    code = "from headprune.cli import main; main()"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_nothing_that_is_ignored_is_committed() -> None:
    """Else a fresh clone would find what it says it makes."""
    git = ["git", "ls-files", "--cached", "--ignored", "--exclude-standard"]
    found = subprocess.run(git, capture_output=True, text=True, cwd=ROOT, check=False)
    if found.returncode or not (ROOT / ".git").exists():
        pytest.skip("no checkout")
    assert found.stdout == ""


@pytest.mark.slow
def test_demo(tmp_path: Path) -> None:
    """From nothing, as in a fresh clone: the ViT is trained here."""
    assert not list(tmp_path.iterdir())
    began = time.time()
    headprune("demo", "-q", cwd=tmp_path)
    trained = tmp_path / ".headprune" / "digits"
    assert (trained / "trained.json").stat().st_mtime > began
    assert len(list((trained / "data").glob("*.parquet"))) == 3
    run = tmp_path / "reports" / "demo"
    metrics = json.loads((run / "metrics.json").read_text())
    assert metrics["dense"]["metrics"]["accuracy"] >= 0.97
    half = next(b for b in metrics["budgets"] if b["kept"] == 12)
    assert half["pruned"]["metrics"]["accuracy"] > max(half["random"])
    assert half["parameters"] < metrics["dense"]["parameters"]
    assert "has been run" in headprune("demo", "-q", cwd=tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(not MINILM.is_dir(), reason="needs ../shared/real/minilm-rt, which is not part of the product")
def test_minilm(tmp_path: Path) -> None:
    shutil.copytree(MINILM, tmp_path / "minilm-rt")
    model, data = "minilm-rt", "minilm-rt/data"
    headprune("score", model, "-d", data, "--split", "train", "-m", "gradient", "-L", 96, "-b", 16, "-q", cwd=tmp_path)
    headprune("prune", "--keep", 36, "-q", cwd=tmp_path)
    metrics = json.loads((tmp_path / "reports" / "minilm-rt-1" / "metrics.json").read_text())
    assert metrics["dense"]["metrics"]["accuracy"] == pytest.approx(0.826, abs=0.002)
    (budget,) = metrics["budgets"]
    assert budget["kept"] == 36
    assert budget["pruned"]["metrics"]["accuracy"] > 0.75
    assert budget["proof"]["difference"] < 1e-4
    assert budget["proof"]["reload_difference"] == 0
