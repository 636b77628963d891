"""The model behind every peer: decode an image, run the pipeline on a batch, return predictions.

Environment variables name the bundle (``BENCH_BUNDLE``), a directory for the counts of steps and images
(``BENCH_COUNTS``), the number of torch's threads (``BENCH_THREADS``) and the device (``BENCH_DEVICE``).
"""

from __future__ import annotations

import io
import mmap
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import torch
from PIL import Image
from torch import Tensor
from torchvision.io import ImageReadMode, decode_png

from benchmarks.serving.adapters.settings import COUNTS, FACTORY, JPEG, MAX_BATCH, option
from psc_core.answers import CLASSIFICATION_SCORES
from psc_core.model import PSC

ANSWERED = ("predictive_entropy", "log_density", "ood_p_value")  # The scores that every server answers with.


class Model:
    def __init__(self) -> None:
        torch.set_num_threads(option("THREADS", 1))
        device = os.environ.get("BENCH_DEVICE", "cpu")
        psc = PSC.load(os.environ["BENCH_BUNDLE"], device=device, allow_factories=[FACTORY])
        self._device = psc.device
        self._pipeline = psc.pipeline
        self._of_classes = slice(len(CLASSIFICATION_SCORES), len(CLASSIFICATION_SCORES) + len(psc.classes))
        self._preprocess = replace(psc.preprocess, resizer="pillow") if option("PILLOW", 0) else psc.preprocess
        self._mode = ImageReadMode.GRAY if psc.preprocess.channels == 1 else ImageReadMode.RGB
        self._shape = psc.preprocess.shape
        self._counts = _open_counts()
        self._steps = self._images = 0
        for count in (1, MAX_BATCH):
            self.packed([torch.zeros(self._shape, dtype=torch.uint8)] * count)

    def decode(self, data: bytes) -> Tensor:
        """Return ``uint8 (channels, height, width)``: a JPEG decoded and resized by Pillow or as the service does."""
        if data.startswith(JPEG):
            if self._preprocess.resizer == "pillow":
                return torch.from_numpy(self._preprocess.from_image(Image.open(io.BytesIO(data))))
            return torch.from_numpy(self._preprocess.from_bytes(data))
        image: Tensor = decode_png(torch.frombuffer(bytearray(data), dtype=torch.uint8), mode=self._mode)
        if tuple(image.shape) != self._shape:
            raise ValueError(f"expected an image of {self._shape}, got {tuple(image.shape)}")
        return image

    @torch.inference_mode()
    def packed(self, images: Sequence[Tensor]) -> list[list[float]]:
        """Return the packed outputs of the pipeline, one row for each image."""
        self._steps += 1
        self._images += len(images)
        COUNTS.pack_into(self._counts, 0, self._steps, self._images)
        packed: list[list[float]] = self._pipeline(torch.stack(list(images)).to(self._device)).tolist()
        return packed

    def predict(self, images: Sequence[Tensor]) -> list[dict[str, Any]]:
        return [
            {
                "probabilities": row[self._of_classes],
                **{name: row[CLASSIFICATION_SCORES.index(name)] for name in ANSWERED},
            }
            for row in self.packed(images)
        ]

    @staticmethod
    def dump(answer: Any) -> bytes:
        return orjson.dumps(answer)


def _open_counts() -> mmap.mmap:
    file = Path(os.environ["BENCH_COUNTS"]) / str(os.getpid())
    file.write_bytes(bytes(COUNTS.size))
    with file.open("r+b") as stream:
        return mmap.mmap(stream.fileno(), COUNTS.size)
