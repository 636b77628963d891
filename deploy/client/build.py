"""Build the wheel ``psc-client``: the Python client and ``psc-predict`` as the package ``psc_client``, without torch.

    python deploy/client/build.py dist

There is one source for each type of an answer, in the service's packages; the modules that the client needs are copied
into the one package, those of ``psc_core`` below ``psc_client.core``.
"""

from __future__ import annotations

import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

MODULES = [
    "app.client",
    "app.client_cli",
    "psc_core.answers",
    "psc_core.errors",
    "psc_core.images",
    "psc_core.images.files",
    "psc_core.text",
    "psc_core.settings",
]

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

[tool.setuptools.packages.find]
include = ["psc_client*"]

[tool.setuptools.package-data]
psc_client = ["py.typed"]
"""


def renamed(text: str) -> str:
    """Return a name or a source with the package of the wheel in place of ours."""
    renames = {"app.client_cli": "psc_client.cli", "app.client": "psc_client", "psc_core": "psc_client.core"}
    for ours, theirs in renames.items():
        text = text.replace(ours, theirs)
    return text


def source_of(module: str) -> Path:
    """Return the file of a module or of a package."""
    path = ROOT / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def build(out: Path) -> None:
    """Write the wheel into ``out``."""
    version = runpy.run_path(str(source_of("psc_core")))["__version__"]
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "psc_client"
        for module in MODULES:
            source, copy = source_of(module), Path(folder) / renamed(module).replace(".", "/")
            is_package = source.name == "__init__.py" or module == "app.client"
            copy = copy / "__init__.py" if is_package else copy.with_suffix(".py")
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(renamed(source.read_text()))
        (package / "py.typed").touch()
        (package / "core" / "__init__.py").write_text(f'__version__ = "{version}"\n')
        shutil.copy(ROOT / "LICENSE", folder)  # Which setuptools takes into the wheel by its name.
        (Path(folder) / "pyproject.toml").write_text(PROJECT.format(version=version))
        command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(out), folder]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
