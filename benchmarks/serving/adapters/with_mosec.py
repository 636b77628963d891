"""mosec: one stage that decodes and predicts; the image as the raw body."""

from __future__ import annotations

import sys
from typing import Any

from mosec import Server, Worker

from benchmarks.serving.adapters.model import Model
from benchmarks.serving.adapters.settings import MAX_BATCH, option, port


class Classify(Worker):
    """The stage: bytes in, answer out, in batches."""

    def __init__(self) -> None:
        super().__init__()
        self._model = Model()

    def deserialize(self, data: bytes) -> Any:
        return self._model.decode(data)

    def forward(self, data: Any) -> Any:
        return self._model.predict(data)

    def serialize(self, data: Any) -> bytes:
        return self._model.dump(data)


def main() -> None:
    sys.argv[1:] = ["--address", "127.0.0.1", "--port", str(port()), "--timeout", "30000", "--log-level", "warning"]
    server = Server()
    server.append_worker(
        Classify,
        num=option("COPIES", 1),
        max_batch_size=MAX_BATCH,
        max_wait_time=option("WAIT_MS", 1),
        timeout=30,
        route="/predict",
    )
    server.run()


if __name__ == "__main__":
    main()
