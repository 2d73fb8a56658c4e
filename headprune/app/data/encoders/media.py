"""Images and sounds: their classes, and what is said in a sound."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headprune.app.data.encoders.base import Encoder, padded_labels
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


_AUDIO_COLUMNS = ("audio", "speech", "sound")
_TRANSCRIPT_COLUMNS = ("text", "sentence", "transcription", "transcript", "normalized_text")


class AudioEncoder(Encoder):
    def setup(self) -> None:
        self.audio = self.column("audio", "--text-column", self.options.text_column, _AUDIO_COLUMNS)

    def samples(self, example: Mapping[str, Any]) -> Any:
        """The sound as a mono array at the model's rate."""
        import numpy as np

        sound = example[self.audio]
        extractor = getattr(self.processor, "feature_extractor", self.processor)
        if isinstance(sound, Mapping):
            array, rate = np.asarray(sound["array"], dtype=np.float32), int(sound["sampling_rate"])
        elif hasattr(sound, "get_all_samples"):  # torchcodec's decoder, as datasets gives it
            decoded = sound.get_all_samples()
            array, rate = decoded.data.mean(dim=0).numpy(), int(decoded.sample_rate)
        else:
            raise HeadPruneError(
                f"column {self.audio!r} holds no sound.", "Give {array, sampling_rate}, or install torchcodec."
            )
        if rate != extractor.sampling_rate:
            raise HeadPruneError(
                f"the sound has {rate} samples a second, the model takes {extractor.sampling_rate}.",
                "Resample the dataset (datasets: cast_column with Audio(sampling_rate=…)).",
            )
        return array


class AudioClassification(AudioEncoder):
    def setup(self) -> None:
        super().setup()
        self.label = self.label_column()

    def encode(self, example: Mapping[str, Any], row: int) -> dict[str, Any]:
        rate = self.processor.sampling_rate
        coded = self.processor(self.samples(example), sampling_rate=rate)
        feature = {k: torch.as_tensor(v[0]) for k, v in coded.items()}
        return {**feature, **self.labels(example, self.classes.number)}


class SpeechSeq2Seq(AudioEncoder):
    def setup(self) -> None:
        super().setup()
        self.target = self.column("transcript", "--label-column", self.options.label_column, _TRANSCRIPT_COLUMNS)

    def encode(self, example: Mapping[str, Any], row: int) -> dict[str, Any]:
        extractor, tokenizer = self.processor.feature_extractor, self.processor.tokenizer
        coded = extractor(self.samples(example), sampling_rate=extractor.sampling_rate, return_tensors="pt")
        target = self.shortened(partial(tokenizer, str(example[self.target])), self.options.max_length or 448)
        labels = list(target["input_ids"])
        if labels[:1] == [self.config.decoder_start_token_id]:
            labels = labels[1:]  # the model puts it there itself when it shifts the labels
        return {"input_features": coded["input_features"][0], "labels": labels}

    def collate(self, features: list[dict[str, Any]]) -> dict[str, Tensor]:
        return {
            "input_features": torch.stack([f["input_features"] for f in features]),
            "labels": padded_labels([f["labels"] for f in features]),
        }
