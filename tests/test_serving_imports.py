"""A service that has answered a request has loaded no library that only a fit needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from psc_core.tasks import TASKS

PROGRAM: Final = """
import io, sys, time
import numpy

from psc_core import load_model

load_model(sys.argv[1], device="cpu", allow_factories=["tests.tiny:network"]).predict([numpy.zeros((28, 28), "uint8")])
assert "scipy" not in sys.modules  # (the service's drift test needs it)

from fastapi.testclient import TestClient
from PIL import Image

from app.main import create_app
from app.settings import load_settings

file = io.BytesIO()
Image.fromarray(numpy.zeros((28, 28), "uint8")).save(file, "PNG")
settings = {"bundle": sys.argv[1], "device": "cpu", "backend": "folded", "max_batch_size": 1,
            "allow_factories": ["tests.tiny:network"]}
with TestClient(create_app(load_settings(settings))) as client:
    deadline = time.monotonic() + 60
    while client.get("/readyz").status_code != 200 and time.monotonic() < deadline:
        time.sleep(0.05)
    answer = client.post("/predict?explain=true", content=file.getvalue(), headers={"content-type": "image/png"})
    assert answer.status_code == 200, answer.text
print(*sys.modules)
"""

BUNDLES: Final = {"classification": "tiny_bundle", "regression": "neighbours_bundle"}
"""Task → fixture of a bundle of it."""

OFFLINE: Final = (
    "laplace", "matplotlib", "psc_core.cli", "psc_core.evaluation", "psc_core.fit", "psc_core.report", "tensorly",
)  # fmt: skip


@pytest.mark.parametrize("task", TASKS)
def test_serving_loads_no_fitting_code(task: str, request: pytest.FixtureRequest) -> None:
    bundle: Path = request.getfixturevalue(BUNDLES[task])
    command = [sys.executable, "-c", PROGRAM, str(bundle)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    loaded = done.stdout.split()
    assert f"psc_core.tasks.{task}" in loaded
    assert [name for name in loaded if f"{name}.".startswith(tuple(f"{part}." for part in OFFLINE))] == []


def test_importing_the_service_loads_no_compiler() -> None:
    """It would take as long as PyTorch itself, again."""
    program = "import sys, app.server, psc_core.cli.job; sys.exit('torch._dynamo' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
