"""A text or an image that somebody names, as a model takes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from headprune.app.models import LoadedModel
from headprune.errors import HeadPruneError, first_line
from headprune.inputs import model_device, move

_ANSWER = 24  # tokens of a text that an encoder-decoder writes


def of_text(loaded: LoadedModel, text: str) -> dict[str, Any]:
    """A text; an encoder-decoder's decoder reads what the model answers to it.

    Raises:
        HeadPruneError: The model takes no text, or the text has no tokens.
    """
    if loaded.task.modality != "text":
        raise HeadPruneError(f"{loaded.name} is for {loaded.task.name}: it takes no text.", "Use --image or --dataset.")
    inputs: dict[str, Any] = dict(loaded.processor(text, return_tensors="pt", truncation=True))
    if not inputs["input_ids"].numel():
        raise HeadPruneError("The text has no tokens.", "Give a longer one.")
    model: Any = loaded.model
    inputs = move(inputs, model_device(model))
    if getattr(loaded.config, "is_encoder_decoder", False) and hasattr(model, "generate"):
        with torch.no_grad():
            inputs["decoder_input_ids"] = model.generate(**inputs, max_new_tokens=_ANSWER, do_sample=False, num_beams=1)
    return inputs


def of_image(loaded: LoadedModel, path: Path) -> dict[str, Any]:
    """An image file.

    Raises:
        HeadPruneError: The model takes no images; there is no such file, or it is no image.
    """
    from PIL import Image

    if loaded.task.modality != "image":
        raise HeadPruneError(f"{loaded.name} is for {loaded.task.name}: it takes no image.", "Use --text or --dataset.")
    try:
        with Image.open(path) as opened:
            image = opened.convert("L" if getattr(loaded.config, "num_channels", 3) == 1 else "RGB")
    except FileNotFoundError:
        raise HeadPruneError(f"There is no file {path}.", "Give an image file.") from None
    except Exception as error:
        raise HeadPruneError(
            f"{path} cannot be read as an image: {first_line(error)}.", "Give a PNG or JPEG."
        ) from error
    return dict(loaded.processor(images=image, return_tensors="pt"))
