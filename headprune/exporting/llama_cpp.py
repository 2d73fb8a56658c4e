"""llama.cpp itself, where PyPI's xllamacpp is installed: what it answers when it reads a file."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headprune.errors import HeadPruneError

MOST = 4096  # tokens whose log-probabilities are asked for, the likeliest first


def is_installed() -> bool:
    """Whether there is an engine."""
    return importlib.util.find_spec("xllamacpp") is not None


def complete(
    file: Path,
    requests: Sequence[dict[str, Any]],
    *,
    context: int = 512,
    threads: int | None = None,
    exact: bool = True,
) -> tuple[str, list[dict[str, Any]]]:
    """Let llama.cpp answer requests, in a process of its own.

    Args:
        file: A GGUF file.
        requests: What llama.cpp's server takes for completions, such as ``{"prompt": [1, 2], "n_predict": 1, "n_probs": 10}``.
        context: Tokens that fit.
        threads: By default as many as torch uses.
        exact: Keep keys and values in float32. Else in float16, as llama.cpp does by default.

    Returns:
        xllamacpp's version, and the answers.

    Raises:
        HeadPruneError: It does not read the file, or ended before it had answered.
    """
    with tempfile.TemporaryDirectory(prefix="headprune-") as folder:
        answers = Path(folder, "answers.json")
        asked = {
            "path": sys.path, "file": os.fspath(file.absolute()), "answers": str(answers), "context": context, "exact": exact,
            "threads": threads or torch.get_num_threads(), "requests": list(requests),
        }  # fmt: skip
        child = Path(__file__).with_name("llama_cpp_child.py")
        for verbose in (False, True):  # what it says is wanted only once it has failed
            ended = subprocess.run(
                [sys.executable, "-I", str(child)], input=json.dumps({**asked, "verbose": verbose}),
                capture_output=True, text=True, errors="replace", check=False,
            )  # fmt: skip
            if ended.returncode == 0 and answers.exists():
                document = json.loads(answers.read_text(encoding="utf-8"))
                return document["version"], document["answers"]
    raise HeadPruneError(
        f"llama.cpp does not run the file: {_reason(ended.stderr) or f'it ended with {ended.returncode}'}.",
        "Another version of xllamacpp may (pip install -U xllamacpp).",
    )


def log_probabilities(answer: dict[str, Any], size: int) -> Tensor:
    """Of the first token that was generated, ``[size]``; NaN for those that were not told.

    Raises:
        HeadPruneError: The answer has none.
    """
    values = torch.full((size,), math.nan)
    try:
        for told in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
            values[told["id"]] = told["logprob"]
    except (KeyError, IndexError, TypeError):
        raise HeadPruneError(
            f"llama.cpp gave no log-probabilities: {json.dumps(answer)[:200]}.", "Report this with xllamacpp's version."
        ) from None
    return values


def generated(answer: dict[str, Any]) -> list[int]:
    """The ids of the tokens that were generated, where log-probabilities were asked for."""
    return [token["id"] for token in answer["choices"][0]["logprobs"]["content"]]


def _reason(text: str) -> str:
    """The line of llama.cpp's log that says what is wrong."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if any(word in line for word in ("error", "GGML_ASSERT", "failed", "Error"))]
    return (telling or lines or [""])[0][:300].rstrip(".")
