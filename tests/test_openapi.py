"""The OpenAPI document against the running service: schemathesis, all checks, real application and bundle."""

import subprocess
import sys
from pathlib import Path

import pytest

from psc_core.bundle import read_bundle
from tests.conftest import SHIPPED_BUNDLE
from tests.served import GUARD_SECONDS, serve_shipped

pytest.importorskip("schemathesis")

CONFIGURATION = """
[parameters]
"path.name" = "{name}"
"path.version" = "{version}"

# JSON Schema cannot say "these bytes are an image" or "the data has as many numbers as the shape".
[checks.positive_data_acceptance]
expected-statuses = ["2xx", 400, 404, 408, 409, 413, 415, 422, 429]
"""


@pytest.mark.parametrize("examples", [3, pytest.param(15, marks=pytest.mark.slow)])
def test_every_answer_is_one_that_the_document_promises(examples: int, tmp_path: Path) -> None:
    manifest = read_bundle(SHIPPED_BUNDLE).manifest
    configuration = tmp_path / "schemathesis.toml"
    configuration.write_text(CONFIGURATION.format(name=manifest.name, version=manifest.version))
    with serve_shipped("--admin-keys", "key-of-the-test", "--log", str(tmp_path / "log")) as url:
        command = [
            sys.executable, "-m", "schemathesis.cli", "--config-file", str(configuration), "run", f"{url}/openapi.json",
            "--exclude-path-regex", "unload$",  # Nothing else would be answered.
            "--checks", "all", "--max-examples", str(examples), "--seed", "1", "--no-color",
            "-H", "X-API-Key: key-of-the-test",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=GUARD_SECONDS)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "passed" in done.stdout
