"""A fake model behind the real server: ``serve_fake.py [--flags] [step=SECONDS] [die-after=SECONDS] [bad=1]``."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from app.cli import EXIT_BAD_INPUT, settings_from
from app.logs import configure_logs
from app.sockets import inherited_socket, make_socket
from app.supervisor import Supervisor


def main() -> int:
    flags = [each for each in sys.argv[1:] if each.startswith("--")]
    extras = dict(each.split("=") for each in sys.argv[1:] if not each.startswith("--"))
    settings = settings_from(flags)
    configure_logs(settings.log_level)
    listener = inherited_socket()
    shared = listener is not None
    if listener is None:
        listener = make_socket(settings.host, settings.port)
        print(f"port {listener.getsockname()[1]}", flush=True)
    if settings.workers > 1 and not shared:
        command = [sys.executable, *sys.argv]
        return Supervisor(command, listener, workers=settings.workers, drain_seconds=settings.drain_seconds).run()
    if "bad" in extras:
        return EXIT_BAD_INPUT
    from app.main import create_app
    from app.server import Server
    from tests.app.fakes import FakeModel

    model = FakeModel()
    model.pipeline.seconds = float(extras.get("step", 0))
    if "die-after" in extras:
        threading.Timer(float(extras["die-after"]), setattr, (model.pipeline, "dead", True)).start()
    server = Server(create_app(settings, {"m": model}), settings, shared_socket=shared)
    server.run([listener])
    return server.service.exit_code


if __name__ == "__main__":
    sys.exit(main())
