"""A fake model behind the real server: ``serve_fake.py [--flags] [step=SECONDS] [die-after=SECONDS] [bad=FILE]``."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from app.cli import EXIT_BAD_INPUT, settings_from
from app.dispatch import inherited_channel
from app.observability.logs import configure_logs
from app.sockets import make_socket
from app.supervisor import Supervisor


def main() -> int:
    flags = [each for each in sys.argv[1:] if each.startswith("--")]
    extras = dict(each.split("=") for each in sys.argv[1:] if not each.startswith("--"))
    settings = settings_from(flags)
    configure_logs(settings.log_level)
    channel = inherited_channel()
    listeners = []
    if channel is None:
        listeners = [make_socket(settings.host, settings.port)]
        print(f"port {listeners[0].getsockname()[1]}", flush=True)
    if settings.workers > 1 and channel is None:
        command = [sys.executable, *sys.argv]
        return Supervisor(command, listeners[0], workers=settings.workers, drain_seconds=settings.drain_seconds).run()
    if Path(extras.get("bad", "/nothing")).exists():
        return EXIT_BAD_INPUT
    from app.main import create_app
    from app.server import Server
    from tests.app.fakes import FakeModel

    model = FakeModel()
    model.pipeline.seconds = float(extras.get("step", 0))
    if "die-after" in extras:
        threading.Timer(float(extras["die-after"]), setattr, (model.pipeline, "dead", True)).start()
    server = Server(create_app(settings, {"m": model}), settings, channel=channel)
    server.run(listeners)
    return server.service.exit_code


if __name__ == "__main__":
    sys.exit(main())
