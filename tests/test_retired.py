"""Options and commands that older versions had: one line says what to type instead."""

import json
import re
from typing import Any

import pytest
import typer

from headprune.cli import app
from headprune.cli.app import RETIRED
from tests.support.commands import run

TYPED = {
    "--examples": (("score", "MODEL", "--examples", "64"), "-m ablation:examples=64"),
    "--time": (("score", "MODEL", "--time", "60"), "-m ablation:time=60"),
    "--max-memory": (("score", "MODEL", "--max-memory", "4GB"), "-m ablation:memory=4GB"),
    "--normalise": (("score", "MODEL", "--normalise"), "-m gradient:normalise"),
    "--steps": (("score", "MODEL", "--steps", "40"), "-m l0:steps=400"),
    "--permutations": (("score", "MODEL", "--permutations", "9"), "-m shapley:permutations=64"),
    "--sparsity": (("score", "MODEL", "--sparsity", "0.1"), "-m l0:sparsity=0.02"),
    "--keep": (("score", "MODEL", "--keep", "36"), "-m l0:keep=36"),
    "--revision": (("prune", "MODEL", "--revision", "main"), "MODEL@REVISION"),
    "--offload-folder": (("prune", "MODEL", "--offload-folder", "x"), "TMPDIR"),
    "--streaming": (("prune", "MODEL", "--plan", "plan.json", "--streaming"), "--device-map auto"),
    "--pad": (("export", "MODEL", "--to", "stock", "--pad"), "headprune prune --strategy uniform"),
    "estimate": (("estimate", "MODEL"), "headprune score"),
}


@pytest.mark.parametrize("name", TYPED)
def test_one_line_says_what_to_type(name: str) -> None:
    typed, instead = TYPED[name]
    told = run(*typed, code=2)
    assert told.stdout == ""
    assert told.stderr.count("\n") == 1
    assert name in told.stderr
    assert "is gone" in told.stderr
    assert instead in told.stderr
    document = json.loads(run(*typed, "--json", code=2).stdout)
    assert f"headprune: {document['error']} {document['hint']}\n" == told.stderr


def test_every_row_is_tried_and_names_what_there_is() -> None:
    """Nobody is sent from one retired option to the next."""
    assert TYPED.keys() == RETIRED.keys()
    commands: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    options = {flag for command in commands.values() for p in command.params for flag in p.opts}
    for name, hint in RETIRED.items():
        assert set(re.findall(r"`headprune (\w+)", hint)) <= commands.keys(), name
        assert set(re.findall(r"--[a-z-]+", hint)) <= options, name
