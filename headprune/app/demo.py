"""The demo: a small ViT on scikit-learn's digits, trained on this machine, without a network."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import torch.nn.functional as F
import transformers
from PIL import Image
from sklearn.datasets import load_digits

from headprune import checkpoint
from headprune.app.runs import RunFolder
from headprune.errors import HeadPruneError
from headprune.files import read_json, write_json

HOME = Path(".headprune") / "digits"
REPORT = Path("reports") / "demo"
KEEP = ("12", "18", "6", "4")  # of 24 heads; the report explains the first

_TRAIN, _VALIDATION = 1000, 297  # of 1,797; the last 500 are the test split
_RECIPE: dict[str, Any] = {
    "seed": 0, "epochs": 50, "batch": 100, "label_smoothing": 0.1,
    "optimizer": {"lr": 2e-3, "weight_decay": 0.2, "betas": [0.9, 0.98]},
    "config": {
        "image_size": 8, "num_channels": 1, "patch_size": 2, "num_hidden_layers": 4, "num_attention_heads": 6,
        "hidden_size": 96, "intermediate_size": 192, "initializer_range": 0.1,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,  # dropout would take a third of the time
    },
}  # fmt: skip


def prepare(home: Path, progress: Callable[[int, int], None]) -> tuple[Path, Path, float]:
    """Train the ViT and write the digits, unless an earlier run did.

    Returns:
        The model's folder, the data's folder, and the test accuracy.

    Raises:
        HeadPruneError: The trained model has less than 96 % accuracy on the test split.
    """
    model_path, data_path, done = home / "model", home / "data", home / "trained.json"
    if done.is_file() and checkpoint.is_checkpoint(model_path):
        document = read_json(done, "demo")
        accuracy = document.get("accuracy")
        if document.get("recipe") == _RECIPE and isinstance(accuracy, float):
            return model_path, data_path, accuracy
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))  # always the same one
    images, labels = digits.images[order].astype("uint8"), digits.target[order].astype(int)
    _write_data(data_path, images, labels)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # another number rounds sums differently, and so trains another model
    try:
        model, processor, accuracy = _train(images, labels, progress)
    finally:
        torch.set_num_threads(threads)
    if accuracy < 0.96:
        raise HeadPruneError(f"The demo's ViT reached only {accuracy:.1%} on the test digits.", "Please report this.")
    checkpoint.save(model, model_path, processor=processor, overwrite=True, about={"task": "image-classification"})
    write_json(done, "demo", {"recipe": _RECIPE, "accuracy": accuracy})
    return model_path, data_path, accuracy


def was_run(folder: RunFolder) -> bool:
    """Whether a folder has the report of a demo: of a pruned model that `prepare` trained."""
    return folder.pruned and folder.read_run().options.model == str(HOME / "model")


def _write_data(path: Path, images: Any, labels: Any) -> None:
    """Parquet files that `headprune score -d` reads like any other image dataset."""
    path.mkdir(parents=True, exist_ok=True)
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list("0123456789"))})
    bounds = {"train": (0, _TRAIN), "validation": (_TRAIN, _TRAIN + _VALIDATION), "test": (_TRAIN + _VALIDATION, None)}
    for split, (start, stop) in bounds.items():
        rows = {"image": [Image.fromarray(x) for x in images[start:stop]], "label": labels[start:stop].tolist()}
        datasets.Dataset.from_dict(rows, features=features).to_parquet(str(path / f"{split}.parquet"))


def _train(images: Any, labels: Any, progress: Callable[[int, int], None]) -> tuple[Any, Any, float]:
    """The trained ViT, its image processor and its test accuracy: AdamW, one-cycle learning rate, images shifted by up to a pixel."""
    torch.manual_seed(_RECIPE["seed"])
    names = {d: str(d) for d in range(10)}
    config = transformers.ViTConfig(**_RECIPE["config"], id2label=names, label2id={v: k for k, v in names.items()})
    model = transformers.ViTForImageClassification(config)
    processor = transformers.ViTImageProcessor(
        size={"height": 8, "width": 8}, do_resize=False, rescale_factor=1 / 16, image_mean=[0.5], image_std=[0.5]
    )
    pixels = (torch.tensor(images, dtype=torch.float32) / 16 - 0.5) / 0.5
    x, y = pixels[:, None], torch.tensor(labels)
    steps = _RECIPE["epochs"] * (_TRAIN // _RECIPE["batch"])
    optimizer = torch.optim.AdamW(model.parameters(), **_RECIPE["optimizer"], foreach=True)  # the same result, faster
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RECIPE["optimizer"]["lr"], total_steps=steps)
    model.train()
    # Every epoch's order is drawn when it begins.
    epochs = (torch.split(torch.randperm(_TRAIN), _RECIPE["batch"]) for _ in range(_RECIPE["epochs"]))
    for step, rows in enumerate(chain.from_iterable(epochs), 1):
        logits = model(pixel_values=_shift(x[rows])).logits
        loss = F.cross_entropy(logits, y[rows], label_smoothing=_RECIPE["label_smoothing"])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        progress(step, steps)
    model.eval()
    with torch.inference_mode():
        test = slice(_TRAIN + _VALIDATION, None)
        accuracy = (model(pixel_values=x[test]).logits.argmax(-1) == y[test]).float().mean().item()
    return model, processor, accuracy


def _shift(x: Any) -> Any:
    """Images ``[batch, 1, 8, 8]``, each moved by up to one pixel in each direction; the free edge is empty (-1)."""
    padded = F.pad(x, (1, 1, 1, 1), value=-1.0)
    dy, dx = torch.randint(0, 3, (2, len(x), 1, 1))
    rows, columns = dy + torch.arange(8).view(1, 8, 1), dx + torch.arange(8).view(1, 1, 8)
    return padded[torch.arange(len(x)).view(-1, 1, 1), 0, rows, columns][:, None]
