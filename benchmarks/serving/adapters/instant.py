"""What our service takes around the network: ``psc-serve`` with a network that answers at once."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from typing import Any

import torch
import uvicorn
from torch import Tensor

from app.main import create_app
from app.runtime import UvicornRuntime, prepare_process
from app.server import uvicorn_config
from app.settings import BACKLOG, Settings
from benchmarks.serving.adapters.settings import FACTORY, port
from psc_core.model.pipeline import Pipeline
from psc_core.model.predictor import PSC


class Instant(Pipeline):
    """A pipeline that gives ``row`` as the outputs of every image."""

    row: Tensor

    def __init__(self, pipeline: Pipeline, row: Tensor) -> None:
        super().__init__(pipeline.scorer, pipeline.calibration_scores, gates=pipeline.gates)
        self.register_buffer("row", row)

    def forward(self, images: Tensor) -> Tensor:
        """(n, S + K + G)."""
        return self.row.expand(len(images), -1)


def main() -> None:
    """Serve until SIGTERM."""
    settings = Settings(device="cpu", log_level="error", backend="folded")
    psc = PSC.load(os.environ["BENCH_BUNDLE"], device="cpu", allow_factories=[FACTORY])
    size = psc.preprocess
    with torch.inference_mode():
        row = psc.pipeline(torch.zeros((1, size.channels, size.height, size.width), dtype=torch.uint8))[0]
    model: Any = replace(psc, pipeline=Instant(psc.pipeline, row))
    prepare_process(settings)
    config = uvicorn_config(settings, lambda: create_app(settings, {"instant": model}, runtime=UvicornRuntime()))
    uvicorn.Server(config).run([socket.create_server(("127.0.0.1", port()), backlog=BACKLOG)])


if __name__ == "__main__":
    main()
