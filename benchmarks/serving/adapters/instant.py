"""What our service takes around the network: ``psc-serve`` with a network that answers at once."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from app.main import create_app
from app.server import Server
from app.settings import load_settings
from app.sockets import make_socket
from benchmarks.serving.adapters.settings import FACTORY, port
from psc_core.model.predictor import PSC


class Instant(nn.Module):
    """The same row for every image."""

    row: Tensor
    scale: Tensor
    concurrent = True

    def __init__(self, row: Tensor) -> None:
        super().__init__()
        self.register_buffer("row", row)
        self.register_buffer("scale", torch.empty(0))

    def forward(self, images: Tensor) -> Tensor:
        """(n, SCORES + K)."""
        return self.row.expand(len(images), -1)


def main() -> None:
    """Serve until told to stop."""
    settings = load_settings({"device": "cpu", "log_level": "error"}, environment={})
    psc = PSC.load(os.environ["PSC_BENCH_BUNDLE"], device="cpu", allow_factories=[FACTORY])
    size = psc.preprocess
    with torch.inference_mode():
        row = psc.pipeline(torch.zeros((1, size.channels, size.height, size.width), dtype=torch.uint8))[0]
    model: Any = replace(psc, pipeline=Instant(row))
    listener = make_socket("127.0.0.1", port())
    Server(create_app(settings, {"instant": model}), settings).run([listener])


if __name__ == "__main__":
    main()
