"""What HTTP alone takes: uvicorn with an application that reads the body and sends constant bytes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import uvicorn

from benchmarks.serving.adapters.settings import port


class Constant:
    """An ASGI application with one answer: the file that ``BENCH_ANSWER`` names."""

    def __init__(self) -> None:
        self._body = Path(os.environ["BENCH_ANSWER"]).read_bytes()
        self._head = [(b"content-type", b"application/json"), (b"content-length", str(len(self._body)).encode())]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request."""
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": self._head})
        await send({"type": "http.response.body", "body": self._body})


if __name__ == "__main__":
    uvicorn.run(Constant(), host="127.0.0.1", port=port(), log_level="error", access_log=False, lifespan="off")
