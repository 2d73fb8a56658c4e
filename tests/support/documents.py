"""Documents of a small run, as JSON holds them: what a test changes of them is what it is about."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headprune.app.documents import Heads, LayerProfile, Positions, Sample, SampleLayer
from headprune.attention import AttentionLayer
from headprune.files import CHECKSUM, dumps, loads, write_json
from headprune.scoring.scores import HeadScores, save_scores
from headprune.seeing import HeadProfile


def opened(path: Path) -> dict[str, Any]:
    """A file of headprune's as a person may edit it: without its checksum."""
    document: dict[str, Any] = json.loads(path.read_text())
    document.pop(CHECKSUM, None)
    return document


# What a page or a terminal must show as it is.
HOSTILE = """</script><script>alert("1")</script><img src=x onerror=alert(2)> & "'`{{ 7*7 }}"""
LAYER = AttentionLayer("block.0.attn", 0, "encoder", 4, 4, 8)
SPEED = {"ratio": 1.01, "low": 0.98, "high": 1.04, "verdict": "no measurable change"}
TIMING = {"median": 2.0, "p95": 2.5, "runs": 20, "low": 1.9, "high": 2.1}
ENVIRONMENT: dict[str, Any] = {
    "headprune": "0", "python": "3", "torch": "2", "transformers": "5", "system": "Linux", "device": "cpu",
    "device_name": "a CPU", "threads": 2,
}  # fmt: skip
PARTS: dict[str, Any] = {
    "score": {"split": "train", "examples": 100, "rows_hash": "a"},
    "choose": {"split": "validation", "examples": 50, "rows_hash": "b"},
    "report": {"split": "test", "examples": 200, "rows_hash": "c"},
}
MEASURED = {"metrics": {"accuracy": 0.6, "loss": 0.7}, "low": 0.5, "high": 0.7, "examples": 200}
CHANGE: dict[str, Any] = {
    "metric": "accuracy", "value": -0.1, "low": -0.15, "high": -0.05, "p_value": 0.001, "verdict": "worse",
    "examples": 200, "carried_by": 20.0,
}  # fmt: skip
RUN: dict[str, Any] = {
    "commands": ["headprune score m -d d", "headprune prune --keep 2"],
    "when": "today",
    "seconds": [1.0, 2.0],
    "options": {"model": "m", "seed": 0, "data": {"dataset": "d"}},
    "environment": ENVIRONMENT,
    "parts": PARTS,
    "columns": {"text": "text"},
    "notes": [],
    "model": {
        "class": "M", "task": "t", "metric": "accuracy", "dtype": "float32", "attention": None, "parameters": 1000,
        "fingerprint": "f", "heads": 4,
        "layers": [{
            "name": LAYER.name, "index": 0, "kind": "encoder", "num_heads": 4, "num_kv_heads": 4, "head_dim": 8,
            "prunable": True, "reason": "",
        }],
    },
}  # fmt: skip
METRICS: dict[str, Any] = {
    "metric": "accuracy",
    "dense": {
        "metrics": {"accuracy": 0.8, "loss": 0.5}, "low": 0.75, "high": 0.85, "examples": 200, "parameters": 1000,
        "flops": 5000,
    },
    "budgets": [
        {
            "name": "2 heads", "asked": 2, "kept": 2, "total": 4, "method": "ablation", "notes": [],
            "drop": {LAYER.name: [1, 2]},
            "pruned": {"metrics": {"accuracy": 0.7, "loss": 0.6}, "low": 0.64, "high": 0.76, "examples": 200},
            "change": CHANGE,
            "random": [0.5, 0.6, 0.7], "parameters": 900, "flops": 4000, "checkpoint": "pruned-2",
            "proof": {"difference": 1e-7, "tolerance": 1e-4, "inputs": 3, "ghosts": [], "reload_difference": 0.0},
        }
    ],
    "curve": [
        {"method": "dense", "kept": 4, "asked": 4, "value": 0.81, "low": 0.74, "high": 0.88, "loss": 0.5},
        {"method": "ablation", "kept": 2, "asked": 2, "value": 0.72, "low": 0.6, "high": 0.8, "loss": 0.6},
    ],
    "latency": {
        "bound": "no heads", "bound_ghosts": 0, "typical_length": 9,
        "rows": [
            {
                "batch": 1, "length": 9, "timings": {"dense": TIMING, "2 heads": TIMING, "no heads": TIMING},
                "speedups": {"2 heads": SPEED, "no heads": {**SPEED, "ratio": 1.2}},
            }
        ],
    },
}  # fmt: skip
TRAINING: dict[str, Any] = {
    "examples": 60, "steps": 8, "planned": 8, "best": 4, "resumed": None, "seconds": 1.5,
    "history": [
        {"step": 0, "epoch": 0.0, "accuracy": 0.5, "loss": 0.9}, {"step": 4, "epoch": 1.0, "accuracy": 0.75, "loss": 0.6},
        {"step": 8, "epoch": 2.0, "accuracy": 0.625, "loss": 0.7},
    ],
}  # fmt: skip
OPTIONS: dict[str, Any] = {
    "epochs": 2.0, "learning_rate": 1e-3, "mixture": {"alpha": 0.5, "temperature": 2.0, "hidden_states": False},
    "weight_decay": 0.01, "patience": 2, "seed": 0,
}  # fmt: skip
TRAINED = {**TRAINING, "options": OPTIONS, "before": MEASURED}
FINETUNE: dict[str, Any] = {
    "command": "headprune finetune r/pruned-2", "when": "today", "environment": ENVIRONMENT, "pruned": "r/pruned-2",
    "teacher": "m", "task": "t", "metric": "accuracy", "options": {**OPTIONS, "dtype": "float32", "train_limit": None},
    "data": {"dataset": "d"}, "parts": {**PARTS, "train": {"split": "train", "examples": 60, "rows_hash": "d"}},
    "notes": ["A note."], "seconds": 2.5, "training": TRAINING,
    "models": {"dense": MEASURED, "pruned": MEASURED, "finetuned": MEASURED},
    "changes": {"pruned": CHANGE, "finetuned": {**CHANGE, "verdict": "no measurable change"}, "gain": CHANGE},
}  # fmt: skip


def repaired(**more: Any) -> dict[str, Any]:
    """What metrics.json says of a budget's repair."""
    fit = {"before": 0.5, "after": 0.2, "ridge": 0.1, "values": True}
    return {
        "layers": {LAYER.name: fit}, "examples": 100, "mixtures": 0, "passes": 9, "biases": [], "notes": [],
        "answers": None, "without": MEASURED, **more,
    }  # fmt: skip


TIME: dict[str, Any] = {
    "batch": 1, "length": 9, "total": 2.0, "bounds": {"2 heads": 1.25, "no heads": 1.6},
    "parts": {
        "attention projections": 0.5, "attention itself": 0.25, "feed-forward": 0.85, "embeddings and head": 0.1, "the rest": 0.1,
        "launch overhead": 0.2,
    },
}  # fmt: skip
GENERATION: dict[str, Any] = {
    "batch": 1, "length": 9, "new": 16, "prefill": {"dense": TIMING, "2 heads": TIMING},
    "token": {"dense": TIMING, "2 heads": {**TIMING, "median": 1.6}}, "prefill_speedups": {"2 heads": SPEED},
    "token_speedups": {"2 heads": {**SPEED, "ratio": 1.25, "low": 1.2, "high": 1.3, "verdict": "faster"}},
    "tokens_per_second": {"dense": 500.0, "2 heads": 625.0}, "cache": {"dense": 12288.0, "2 heads": 6144.0},
}  # fmt: skip


ALL_METRICS = {**METRICS, "time": [TIME], "generation": [GENERATION]}
ALL_METRICS["budgets"] = [{**METRICS["budgets"][0], "repair": repaired(), "finetune": TRAINED}]


def scores_of(values: list[float], method: str = "ablation", layer: AttentionLayer = LAYER) -> HeadScores:
    """Scores of one layer's heads."""
    return HeadScores(
        method, "loss (nats) added when the head is removed", {layer.name: torch.tensor(values, dtype=torch.float64)},
        {layer.name: torch.full((len(values),), 0.01, dtype=torch.float64)}, 100, (layer,),
    )  # fmt: skip


def heads_document(title: str = "", token: str = "a", role: str = "", samples: int = 1, unseen: str = "") -> Heads:
    """What heads.json says of the one layer: three tokens, and head h attends to token h - 1 alone."""
    weights = np.zeros((4, 3, 3), np.float32)
    for h in range(4):
        weights[h, :, max(0, h - 1)] = 1
    profile = HeadProfile(9, 1.25, role=role, because="0.81 of its attention goes there" if role else "")
    return Heads(
        examples=1, tokens=3, unit="tokens", layers=(
            LayerProfile(name=LAYER.name, index=0, kind="encoder", heads=() if unseen else (profile,) * 4, unseen=unseen),
        ), samples=tuple(
            Sample(
                title=title or f"sample {i}", positions={"input": Positions(labels=(token, "b", "c"))},
                layers=(SampleLayer.packed(0, weights, "input", "input"),),
            ) for i in range(samples)
        ),
    )  # fmt: skip


def large_heads_document(layers: int, heads: int, tokens: int) -> Heads:
    """What heads.json says of so many layers, named ``layer.0`` and so on; their attention in one example is random."""
    profile = HeadProfile(900, 1.2345, role="attends to the previous token", because="0.81 of its attention goes to it")
    weights = np.random.default_rng(0).random((heads, tokens, tokens), np.float32)
    sample = Sample(title="", positions={"input": Positions(labels=("token",) * tokens)}, layers=tuple(
        SampleLayer.packed(n, weights, "input", "input") for n in range(layers)
    ))  # fmt: skip
    return Heads(examples=1, tokens=2, unit="tokens", samples=(sample,), layers=tuple(
        LayerProfile(name=f"layer.{n}", index=n, kind="decoder", heads=(profile,) * heads) for n in range(layers)
    ))  # fmt: skip


def _profile(role: str, clarity: float) -> dict[str, Any]:
    """A head's figures, few of which matter to a report."""
    return vars(HeadProfile(30, 1.0, 0.5, 0.4, 3.0, 1.0, role=role, because=f"{clarity:.0%} is there", clarity=clarity))


HEADS: dict[str, Any] = {
    "examples": 3, "tokens": 30, "repeated": 0, "unit": "tokens",
    "layers": [{
        "name": LAYER.name, "index": 0, "kind": "encoder", "unseen": "",
        "heads": [_profile("next token", 0.6), _profile("broad", 0.96), _profile("next token", 0.9), _profile("mixed", 0.1)],
    }],
    "samples": [],
}  # fmt: skip


def write_run(folder: Path) -> Path:
    """A run folder with these documents."""
    for kind, data in (("run", RUN), ("metrics", METRICS), ("heads", heads_document().to_json())):
        write_json(folder / f"{kind}.json", kind, loads(dumps(data)))
    save_scores(folder / "scores.json", [scores_of([0.1, 0.2, 0.3, 0.4])])
    return folder
