"""An environment for each peer: its own packages from PyPI, and torch and ``psc_core`` of the running interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / "out" / "peers"
_VERSIONS = """
import importlib.metadata as m, json, sys
found = {}
for name in sys.argv[1:]:
    try: found[name] = m.version(name)
    except m.PackageNotFoundError: pass
print(json.dumps(found))
"""


def commands(folder: Path, requirement: str) -> list[list[str]]:
    """Commands that build the environment: an empty one, then the peer with its dependencies."""
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    return [[sys.executable, "-m", "venv", "--clear", str(folder)], [*pip, requirement]]


def shared_paths() -> str:
    """Text of the ``.pth`` file: searched behind the peer's own packages, so its versions win."""
    return f"{sysconfig.get_path('purelib')}\n{ROOT}\n"


def build(name: str, requirement: str, home: Path = HOME) -> Path:
    """The environment's interpreter; built if there is none for this requirement.

    Raises:
        RuntimeError: pip failed; the message ends with its output.
    """
    folder = home / name
    python, mark = folder / "bin" / "python", folder / "psc-benchmark.json"
    built = {"requirement": requirement, "shared": shared_paths()}
    if mark.exists() and json.loads(mark.read_text()) == built:
        return python
    for command in commands(folder, requirement):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{requirement} could not be installed: {done.stderr.strip()[-500:]}")
    site = next((folder / "lib").glob("python*/site-packages"))
    (site / "psc-benchmark.pth").write_text(shared_paths())
    mark.write_text(json.dumps(built))
    return python


def versions(python: Path, packages: Sequence[str]) -> dict[str, str]:
    """Versions of ``packages`` and torch in an interpreter's environment."""
    command = [str(python), "-c", _VERSIONS, *packages, "torch"]
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    found: dict[str, str] = json.loads(subprocess.run(command, capture_output=True, check=True, env=clean).stdout)
    return found
