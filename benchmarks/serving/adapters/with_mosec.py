"""mosec: one stage that decodes and predicts, or decoders in front of it (``PSC_BENCH_DECODERS``)."""

from __future__ import annotations

import sys
from typing import Any

from mosec import Server, Worker

from benchmarks.serving.adapters.model import Model
from benchmarks.serving.adapters.settings import MAX_BATCH, option, port


class Classify(Worker):
    """Bytes in, answer out; batched."""

    def __init__(self) -> None:
        super().__init__()
        self._model = Model()

    def deserialize(self, data: bytes) -> Any:
        return self._model.decode(data)

    def forward(self, data: Any) -> Any:
        return self._model.predict(data)

    def serialize(self, data: Any) -> bytes:
        return self._model.dump(data)


class Decode(Worker):
    """Bytes in, pixels out."""

    def deserialize(self, data: bytes) -> Any:
        import torch
        from torchvision.io import ImageReadMode, decode_png

        return decode_png(torch.frombuffer(bytearray(data), dtype=torch.uint8), mode=ImageReadMode.GRAY).numpy()

    def forward(self, data: Any) -> Any:
        return data


class ClassifyPixels(Classify):
    """Pixels in, answer out; batched."""

    def deserialize_ipc(self, data: bytes) -> Any:
        import torch

        return torch.from_numpy(super().deserialize_ipc(data))


def main() -> None:
    """Serve."""
    sys.argv[1:] = ["--address", "127.0.0.1", "--port", str(port()), "--timeout", "30000", "--log-level", "warning"]
    server = Server()
    decoders, copies, wait = option("DECODERS", 0), option("COPIES", 1), option("WAIT_MS", 1)
    batching = {"num": copies, "max_batch_size": MAX_BATCH, "max_wait_time": wait, "timeout": 30, "route": "/predict"}
    if decoders:
        server.append_worker(Decode, num=decoders, route="/predict")
        server.append_worker(ClassifyPixels, **batching)
    else:
        server.append_worker(Classify, **batching)
    server.run()


if __name__ == "__main__":
    main()
