"""Images and their classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from headprune.app.data.encoders.base import Encoder
from headprune.errors import HeadPruneError

_IMAGE_COLUMNS = ("image", "img", "pixel_values", "picture")


class ImageClassification(Encoder):
    def setup(self) -> None:
        self.image = self.column("image", "--text-column", self.options.text_column, _IMAGE_COLUMNS)
        self.label = self.label_column()

    def encode(self, example: Mapping[str, Any], row: int) -> dict[str, Any]:
        image = example[self.image]
        if isinstance(image, str | list):  # an image processor would fetch what the text names, also from a network
            raise HeadPruneError(
                f"column {self.image!r} holds no image.", "Give the images themselves, not their names."
            )
        if self.config.num_channels == 3 and getattr(image, "mode", "RGB") != "RGB":
            image = image.convert("RGB")
        pixels = self.processor(images=image, return_tensors="pt")["pixel_values"][0]
        return {"pixel_values": pixels, **self.labels(example, self.classes.number)}

    def collate(self, features: list[dict[str, Any]]) -> dict[str, Tensor]:
        from transformers import default_data_collator

        return dict(default_data_collator(features))
