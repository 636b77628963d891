"""Serving loads no fitting code; ``pyproject.toml`` has the same rule as an import contract.

The contract sees imports that are written down; a task's modules are imported by their name, so what a service has
loaded is looked at too.
"""

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
    "laplace",
    "psc_core.cli",
    "psc_core.collapse",
    "psc_core.compute.passes",
    "psc_core.data",
    "psc_core.evaluation",
    "psc_core.fitting",
    "psc_core.metrics",
    "psc_core.report",
    "psc_core.scoring",
    "tensorly",
)


@pytest.mark.parametrize("task", TASKS)
def test_serving_loads_no_fitting_code(task: str, request: pytest.FixtureRequest) -> None:
    bundle: Path = request.getfixturevalue(BUNDLES[task])
    command = [sys.executable, "-c", PROGRAM, str(bundle)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    loaded = done.stdout.split()
    assert f"psc_core.tasks.{task}.task" in loaded
    fits = [name for name in loaded if name.startswith("psc_core.") and "fit" in name.split(".")]
    assert fits == []
    assert [name for name in loaded if f"{name}.".startswith(tuple(f"{part}." for part in OFFLINE))] == []


def test_importing_the_service_loads_no_compiler() -> None:
    """It would take as long as PyTorch itself, again."""
    program = "import sys, app.server, psc_core.cli.job; sys.exit('torch._dynamo' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
