"""Serving loads no fitting code; ``pyproject.toml`` has the same rule as an import contract."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
import numpy
from psc_core import PSC

PSC.load(sys.argv[1], device="cpu").predict([numpy.zeros((28, 28), numpy.uint8)])
print(*sys.modules)
"""

FITTING = (
    "laplace",
    "psc_core.calibration.fit",
    "psc_core.cli",
    "psc_core.collapse",
    "psc_core.compute.passes",
    "psc_core.data",
    "psc_core.density.fit",
    "psc_core.evaluation",
    "psc_core.fitting",
    "psc_core.heads.fit",
    "psc_core.metrics",
    "psc_core.projection.fit",
    "scipy",
    "tensorly",
)


def test_serving_loads_no_fitting_code(shipped_bundle: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(shipped_bundle)]
    loaded = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert "psc_core.model.predictor" in loaded
    assert [name for name in loaded if name.startswith(tuple(f"{part}." for part in FITTING)) or name in FITTING] == []
