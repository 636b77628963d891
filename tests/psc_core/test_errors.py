"""Sentences about pydantic's errors."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, ValidationError, model_validator

from psc_core.errors import all_faults, fault


class _Order(BaseModel):
    counts: list[int]
    name: str = "x"

    @model_validator(mode="after")
    def _check(self) -> _Order:
        if not self.counts:
            raise ValueError("order something")
        return self


def _errors(**values: object) -> list[object]:
    with pytest.raises(ValidationError) as caught:
        _Order.model_validate(values)
    return list(caught.value.errors())


def test_names_the_place_of_each_fault() -> None:
    errors = _errors(counts=[1, "many"], name=5)
    assert fault(errors[0], "field").startswith("field counts.1: Input should be a valid integer")
    assert all_faults(errors) == "; ".join(map(fault, errors))
    assert fault(errors[1]) == "name: Input should be a valid string"


def test_a_fault_of_the_whole_is_only_its_message() -> None:
    assert all_faults(_errors(counts=[]), "field") == "order something"
