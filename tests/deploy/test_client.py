"""The wheel of the client: complete, and without torch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

SCRIPT = ROOT / "deploy" / "client" / "build.py"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the wheel is installed, alone."""
    pytest.importorskip("setuptools")  # Of this environment, so that nothing is downloaded.
    folder = tmp_path_factory.mktemp("client")
    environment = {**os.environ, "PIP_NO_BUILD_ISOLATION": "0"}
    subprocess.run([sys.executable, str(SCRIPT), str(folder)], check=True, capture_output=True, env=environment)
    (wheel,) = folder.glob("psc_client-*.whl")
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(folder / "site"), str(wheel)]
    subprocess.run(pip, check=True, capture_output=True)
    return folder / "site"


def python(installed: Path, code: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=installed, env=environment, capture_output=True, text=True, check=True
    )
    return ended.stdout


def test_it_needs_nothing_of_the_service(installed: Path) -> None:
    said = python(
        installed,
        "import pkgutil, sys, psc_client\n"
        "for module in pkgutil.walk_packages(psc_client.__path__, 'psc_client.'): __import__(module.name)\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "print(sorted(loaded & {'torch', 'numpy', 'app', 'psc_core', 'fastapi'}), psc_client.__all__)",
    )
    assert said.startswith("[] ")
    from app import client

    assert str(client.__all__) in said


def test_no_module_imports_what_is_not_in_the_wheel(installed: Path) -> None:
    for module in (installed / "psc_client").rglob("*.py"):
        assert re.findall(r"^\s*(?:from|import) (?:app|psc_core)\b.*", module.read_text(), re.MULTILINE) == [], (
            module.name
        )


def test_it_knows_the_answers_of_every_task(installed: Path) -> None:
    said = python(
        installed,
        "from psc_client.core.answers import ClassificationResponse, RegressionResponse, response_type\n"
        "answers = [ClassificationResponse, RegressionResponse]\n"
        "assert [response_type(dict.fromkeys(answer.model_fields)) for answer in answers] == answers\n"
        "print('all')",
    )
    assert said == "all\n"


def test_the_command_line_works(installed: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    words = [sys.executable, "-m", "psc_client.cli", "absent.png", "--url", "http://127.0.0.1:9"]
    ended = subprocess.run(words, cwd=installed, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 2 and "cannot read absent.png" in ended.stdout
