"""BentoML: one service with a batchable endpoint; images as base64 in JSON, one or many a request."""

from __future__ import annotations

import binascii
from typing import Any

import bentoml

from benchmarks.serving.adapters.model import Model
from benchmarks.serving.adapters.settings import MAX_BATCH, option


@bentoml.service(
    workers=option("COPIES", 1),
    threads=1,
    traffic={"timeout": 30},
    metrics={"enabled": False},
    logging={"access": {"enabled": False}},
)
class Classify:
    """The service: base64 in, answers out."""

    def __init__(self) -> None:
        self._model = Model()

    @bentoml.api(batchable=True, max_batch_size=MAX_BATCH, max_latency_ms=option("LATENCY_MS", 1000))
    def predict(self, images: list[str]) -> list[dict[str, Any]]:
        return self._model.predict([self._model.decode(binascii.a2b_base64(image)) for image in images])
