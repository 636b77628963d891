"""``psc-serve`` with a fake model in place of its bundles: ``python -m tests.app.serve_fake [--flags] [step=SECONDS]
[state=FOLDER] [linger=SECONDS] [moves=SECONDS] [memory=BYTES]``.

A file in the folder changes what happens from then on.  ``dead``: every step fails.  ``hang``: the next step never ends
and leaves a file ``hanging``.  ``bad``: no bundle can be loaded.  ``bug``: fronts fail.
"""

import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

import app.front
import app.main
import app.memory
import app.models
from app.cli import main
from app.inference.decoder import EncodedImage, fingerprints
from psc_core.errors import BundleError
from tests.app.fakes import FakeModel, FakePipeline

WORDS = [each for each in sys.argv[1:] if not each.startswith("--")]
OPTIONS = dict(each.split("=") for each in WORDS)
STATE = Path(OPTIONS.get("state", "/nowhere"))


class ControlledPipeline(FakePipeline):
    def __call__(self, images: Tensor, /) -> Tensor:
        self.dead = (STATE / "dead").exists()
        if (STATE / "hang").exists():
            (STATE / "hanging").touch()
            threading.Event().wait()
        return super().__call__(images)


def load(*_: Any, **__: Any) -> FakeModel:
    if (STATE / "bad").exists():
        raise BundleError("the bundle is bad")
    model = FakeModel(pipeline=ControlledPipeline())
    model.pipeline.seconds = float(OPTIONS.get("step", 0))
    return model


async def fingerprints_or_bug(images: Sequence[EncodedImage]) -> list[int]:
    if (STATE / "bug").exists():
        raise ValueError("a bug")
    return await fingerprints(images)


if __name__ == "__main__":
    app.models.build_model = load  # type: ignore[assignment]
    app.front.fingerprints = fingerprints_or_bug
    app.models.check_affordable = lambda *_, **__: None  # type: ignore[assignment]
    app.main.LINGER_SECONDS = float(OPTIONS.get("linger", 1.0))  # type: ignore[misc]
    if "memory" in OPTIONS:
        app.memory.limits = lambda: [(int(OPTIONS["memory"]), 0)]
    if "moves" in OPTIONS:
        from app import processes

        processes.HANG_SECONDS = float(OPTIONS["moves"])  # type: ignore[misc]
    sys.argv[1:] = [each for each in sys.argv[1:] if each.startswith("--")]
    main()
