"""The application on a real socket, in a thread of this process: for clients that are not ours."""

import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import uvicorn

from app.main import create_app
from app.settings import load_settings
from tests.app.fakes import FakeModel
from tests.served import GUARD_SECONDS


@contextmanager
def live_server(models: Mapping[str, Any] | None = None, **settings: Any) -> Iterator[str]:
    """Serve ``models`` (default: one fake, named ``m``) and give the URL, ready to answer."""
    app = create_app(load_settings({"max_batch_size": 8, **settings}), models or {"m": FakeModel()})
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="on"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        end = time.monotonic() + GUARD_SECONDS
        while not server.started or app.state.service.reasons():
            assert time.monotonic() < end, "the server did not become ready"
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()
