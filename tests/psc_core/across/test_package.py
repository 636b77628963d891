"""The names of the package, loaded when first used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import psc_core


def test_package_lists_its_names() -> None:
    assert set(psc_core.__all__) == set(dir(psc_core)) == set(psc_core._MODULES)
    assert all(getattr(psc_core, name) is not None for name in psc_core.__all__)
    with pytest.raises(AttributeError, match="it has BasePrediction, ClassificationPrediction, PRESETS, PSC"):
        psc_core.nonsense  # noqa: B018


def test_importing_the_package_is_light() -> None:
    code = (
        "import sys, psc_core; heavy = {'torch', 'torchvision', 'tensorly', 'laplace', 'fastapi', "
        "'prometheus_client', 'numpy'} & set(sys.modules); assert not heavy, heavy; "
        "import psc_core.model, psc_core.fit, psc_core.cli.job, psc_core.evaluation.evaluate; "
        "web = {'fastapi', 'starlette', 'uvicorn', 'prometheus_client', 'app'} & set(sys.modules); "
        "assert not web, web"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])
