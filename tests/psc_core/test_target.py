"""A target and its unit."""

import pytest
from pydantic import ValidationError

from psc_core.target import Target


def test_says_its_name_and_unit() -> None:
    assert [str(Target(name="angle", unit="degrees")), str(Target(name="score"))] == ["angle, degrees", "score"]


def test_needs_a_name() -> None:
    with pytest.raises(ValidationError):
        Target(name="")
