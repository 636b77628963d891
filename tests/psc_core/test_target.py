from typing import Any

import pytest
from pydantic import ValidationError

from psc_core.answers import Target
from psc_core.errors import UsageError


def test_says_its_name_and_unit() -> None:
    assert [str(Target(name="angle", unit="degrees")), str(Target(name="score"))] == ["angle, degrees", "score"]


def test_needs_a_name() -> None:
    with pytest.raises(ValidationError):
        Target(name="")


def test_one_name_however_it_is_written() -> None:
    assert Target(name=" A\u0308ge\u00a0", unit="\u00b0C ") == Target(name="\u00c4ge", unit="\u00b0C")


@pytest.mark.parametrize("name", ["", " ", 3, None, "x" * 201])
def test_a_name_from_a_caller_is_checked(name: Any) -> None:
    with pytest.raises(UsageError, match="name"):
        Target.of(name)
