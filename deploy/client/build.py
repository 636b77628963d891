"""Build the wheel ``psc-client``: the Python client and ``psc-predict`` as the package ``psc_client``, without torch.

    python deploy/client/build.py dist

There is one source for each type of an answer, in the service's packages; the modules that the client needs are copied
under their new names.
"""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

MODULES = {
    "app.client.client": "client",
    "app.client.errors": "errors",
    "app.client.cli": "cli",
    "app.client": "__init__",
    "app.response": "response",
    "psc_core.policy": "policy",
    "psc_core.prediction": "prediction",
    "psc_core.target": "target",
    "psc_core.value_prediction": "value_prediction",
    "psc_core.errors": "core_errors",
    "psc_core.images": "images",
    "psc_core.version": "version",
}
"""Modules by their names here and in the wheel."""

PROJECT = """\
[build-system]
requires = ["setuptools>=61"]
build-backend = "setuptools.build_meta"

[project]
name = "psc-client"
version = "{version}"
description = "Client of a PSC service: image classification and regression with uncertainty"
license = {{text = "Apache-2.0"}}
requires-python = ">=3.11"
dependencies = ["httpx>=0.28", "pydantic>=2.12"]

[project.scripts]
psc-predict = "psc_client.cli:main"

[tool.setuptools]
packages = ["psc_client"]

[tool.setuptools.package-data]
psc_client = ["py.typed"]
"""


def renamed(source: str) -> str:
    """A module's source with the imports of the wheel."""
    for old, new in MODULES.items():
        name = "psc_client" if new == "__init__" else f"psc_client.{new}"
        source = re.sub(rf"^from {re.escape(old)} import", f"from {name} import", source, flags=re.MULTILINE)
    return source


def build(out: Path) -> None:
    """Write the wheel into ``out``."""
    version = runpy.run_path(str(ROOT / "psc_core" / "version.py"))["__version__"]
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "psc_client"
        package.mkdir()
        for old, new in MODULES.items():
            path = ROOT / old.replace(".", "/")
            source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            (package / f"{new}.py").write_text(renamed(source.read_text()))
        (package / "py.typed").touch()
        (Path(folder) / "pyproject.toml").write_text(PROJECT.format(version=version))
        command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(out), folder]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
