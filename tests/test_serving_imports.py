"""A service that has answered a request has loaded no library that only a fit needs."""

import subprocess
import sys
from pathlib import Path
from typing import Final

from psc_core.tasks import TASKS

PROGRAM: Final = """
import io, sys, time
from pathlib import Path
import numpy

from psc_core import load_model

for bundle in sys.argv[1:]:
    model = load_model(bundle, device="cpu", allow_factories=["tests.tiny:network"])
    model.predict([numpy.zeros((28, 28), "uint8")])
assert "scipy" not in sys.modules  # (the service's drift test needs it)

from fastapi.testclient import TestClient
from PIL import Image

from app.main import create_app
from app.settings import load_settings

file = io.BytesIO()
Image.fromarray(numpy.zeros((28, 28), "uint8")).save(file, "PNG")
settings = {"bundle": ",".join(sys.argv[1:]), "device": "cpu", "backend": "folded", "max_batch_size": 1,
            "allow_factories": ["tests.tiny:network"]}
with TestClient(create_app(load_settings(settings))) as client:
    deadline = time.monotonic() + 60
    while client.get("/readyz").status_code != 200 and time.monotonic() < deadline:
        time.sleep(0.05)
    for bundle in sys.argv[1:]:
        path, headers = f"/models/{Path(bundle).name}/predict?explain=true", {"content-type": "image/png"}
        answer = client.post(path, content=file.getvalue(), headers=headers)
        assert answer.status_code == 200, answer.text
print(*sys.modules)
"""

OFFLINE: Final = (
    "laplace", "matplotlib", "psc_core.cli", "psc_core.evaluation", "psc_core.fit", "psc_core.report", "tensorly",
)  # fmt: skip


def test_serving_loads_no_fitting_code(tiny_bundle: Path, neighbours_bundle: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tiny_bundle), str(neighbours_bundle)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    loaded = done.stdout.split()
    assert {f"psc_core.tasks.{task}" for task in TASKS} <= {*loaded}
    assert [name for name in loaded if f"{name}.".startswith(tuple(f"{part}." for part in OFFLINE))] == []
