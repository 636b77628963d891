"""The float formats are the same wherever they are named."""

from __future__ import annotations

from typing import get_type_hints

from psc_core import FitSettings
from psc_core.bundle import Manifest
from psc_core.compute import Compute
from psc_core.settings import PRECISIONS, Precision


def test_fit_and_bundle_name_the_same_formats() -> None:
    """The default of a fit is the first format, and a manifest admits the formats and no others."""
    assert FitSettings().precision == PRECISIONS[0]
    assert get_type_hints(Manifest)["precision"] == get_type_hints(Compute)["precision"] == Precision
