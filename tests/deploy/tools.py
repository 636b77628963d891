"""Programs that the deployment files are checked with, and those files."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"

_BESIDE_PYTHON = Path(sys.executable).parent


def program(name: str, package: str) -> str:
    path = shutil.which(name, path=str(_BESIDE_PYTHON)) or shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed ({package})")
    return path


def checked(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
