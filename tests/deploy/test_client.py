"""The wheel of the client: complete, and without torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from app import client
from tests.conftest import ROOT

SCRIPT = ROOT / "deploy" / "client" / "build.py"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("setuptools")  # Of this environment, so that nothing is downloaded.
    folder = tmp_path_factory.mktemp("client")
    environment = {**os.environ, "PIP_NO_BUILD_ISOLATION": "0"}
    subprocess.run([sys.executable, str(SCRIPT), str(folder)], check=True, capture_output=True, env=environment)
    (wheel,) = folder.glob("psc_client-*.whl")
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(folder / "site"), str(wheel)]
    subprocess.run(pip, check=True, capture_output=True)
    return folder / "site"


def python(installed: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=installed, env=environment, capture_output=True, text=True, check=False)


def test_it_needs_nothing_of_the_service(installed: Path) -> None:
    code = (
        "import pkgutil, sys, psc_client\n"
        "for module in pkgutil.walk_packages(psc_client.__path__, 'psc_client.'): __import__(module.name)\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "bad = {'torch', 'numpy', 'PIL', 'app', 'psc_core', 'fastapi', 'starlette', 'uvicorn'}\n"
        "print(sorted(loaded & bad), psc_client.__all__)"
    )
    assert python(installed, "-c", code).stdout == f"[] {client.__all__}\n"


def test_it_has_the_text_of_the_licence(installed: Path) -> None:
    (licence,) = installed.glob("psc_client-*.dist-info/**/LICENSE")
    assert licence.read_text() == (ROOT / "LICENSE").read_text()


def test_the_command_line_works(installed: Path) -> None:
    ended = python(installed, "-m", "psc_client.cli", "absent.png", "--url", "http://127.0.0.1:9")
    assert ended.returncode == 2 and "cannot read absent.png" in ended.stdout
