"""How deep a reader must go: from the command `prune` to a solver of its repair, counted in our own functions, both included."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import headprune as hp
from tests.support.commands import run

HOUSE = str(Path(hp.__file__).parent)
MOST = 12


def test_few_frames_lie_between_prune_and_the_solver(
    bert_folder: Path, data_folder: Path, here: Path, brief: None,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    chains: set[tuple[str, ...]] = set()
    solve = torch.linalg.solve

    def counting(*arguments: Any, **more: Any) -> Any:
        names, frame = [], sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if (
                code.co_filename.startswith(HOUSE) and code.co_name[0] != "<"
            ):  # comprehensions are part of their function
                names.append(f"{Path(code.co_filename).stem}.{code.co_name}")
            if code.co_name == "prune" and "cli" in code.co_filename:
                chains.add(tuple(reversed(names)))
                break
            frame = frame.f_back  # type: ignore[assignment]
        return solve(*arguments, **more)

    monkeypatch.setattr(torch.linalg, "solve", counting)
    run("prune", bert_folder, "-d", data_folder, "-L", 20, "--keep", 4, "-s", "one-shot", "-m", "gradient", "-q")
    shortest, longest = (pick(chains, key=len) for pick in (min, max))
    with capsys.disabled():
        for chain in (shortest, longest):
            print(f"\n{len(chain)} frames: {' → '.join(chain)}")
    assert len(shortest) <= MOST
