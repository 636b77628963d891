"""Print the functions of this project in the order of their first calls: ``python -m tests.docs.calls predict|fit``."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import urllib.request
from types import FrameType
from typing import Any

from tests.conftest import ROOT, SHIPPED_BUNDLE


class Calls:
    """Names of called functions, by first call; recorded in every thread that starts after this was made.

    Attributes:
        names: ``module.qualified_name``; empty it to begin again.
    """

    def __init__(self) -> None:
        self.names: dict[str, None] = {}
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        module = frame.f_globals.get("__name__", "")
        if event == "call" and module.startswith(("app.", "psc_core.")):
            self.names.setdefault(f"{module}.{frame.f_code.co_qualname}")


def predict() -> list[str]:
    """One photograph, so large that a thread decodes it, sent to the shipped bundle."""
    import io

    import numpy as np
    import uvicorn
    from PIL import Image

    from app.server import build, uvicorn_config
    from app.settings import load_settings

    settings = {"bundle": str(SHIPPED_BUNDLE), "device": "cpu", "backend": "folded", "max_batch_size": 1}
    app = build(load_settings(settings))
    server = uvicorn.Server(uvicorn_config(load_settings(settings), lambda: app))
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (300, 300), np.uint8)).save(file, "PNG")
    calls = Calls()
    names: list[str] = []

    def client() -> None:
        while not server.started or app.state.service.reasons():
            threading.Event().wait(0.05)
        calls.names.clear()
        request = urllib.request.Request(f"{url}/predict?alpha=0.1", file.getvalue(), {"Content-Type": "image/png"})
        with urllib.request.urlopen(request) as answer:
            assert answer.status == 200
        names.extend(calls.names)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=client, daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt):
        server.run([listener])
    return names


def fit(arguments: list[str]) -> list[str]:
    """A fit with the defaults."""
    from psc_core.cli import fit as cli

    calls = Calls()
    assert cli.main(arguments) == 0
    sys.setprofile(None)
    return list(calls.names)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    found = predict() if sys.argv[1] == "predict" else fit(sys.argv[2:])
    print("\n".join(["calls:", *found]))
    sys.stdout.flush()
    os._exit(0)
