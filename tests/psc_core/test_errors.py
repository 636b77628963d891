"""Sentences about pydantic's errors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field, ValidationError, model_validator

from psc_core.errors import UsageError, all_faults, fault, hint, needs


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
    assert fault(errors[0], "field") == "field counts.1: expected a whole number"
    assert all_faults(errors) == "; ".join(map(fault, errors))
    assert fault(errors[1]) == "name: expected text"


def test_a_fault_of_the_whole_is_only_its_message() -> None:
    assert all_faults(_errors(counts=[]), "field") == "order something"


class _Setting(BaseModel, extra="forbid", allow_inf_nan=False):
    on: bool = True
    kind: Literal["a", "b"] = "a"
    rate: Annotated[float, Field(gt=0, le=1)] = 1.0
    images: Annotated[int, Field(ge=1, lt=9)] = 1
    name: Annotated[str, Field(min_length=1, max_length=3, pattern="^[a-z]*$")] = "a"
    sizes: Annotated[list[int], Field(min_length=1, max_length=2)] = [1]
    order: _Order = _Order(counts=[1])


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"on": "maybe"}, "on: expected true or false"),
        ({"kind": "c"}, "kind: expected 'a' or 'b'"),
        ({"rate": 0}, "rate: expected more than 0"),
        ({"rate": 2}, "rate: expected at most 1"),
        ({"rate": float("nan")}, "rate: expected a finite number"),
        ({"rate": "x"}, "rate: expected a number"),
        ({"images": 0}, "images: expected at least 1"),
        ({"images": 9}, "images: expected less than 9"),
        ({"images": 1.5}, "images: expected a whole number"),
        ({"images": None}, "images: expected a whole number"),
        ({"name": ""}, "name: expected at least 1 characters"),
        ({"name": "abcd"}, "name: expected at most 3 characters"),
        ({"name": "B"}, "name: expected text that matches ^[a-z]*$"),
        ({"name": 5}, "name: expected text"),
        ({"sizes": []}, "sizes: expected at least 1 items"),
        ({"sizes": [1, 2, 3]}, "sizes: expected at most 2 items"),
        ({"sizes": 5}, "sizes: expected a list"),
        ({"order": 5}, "order: expected an object"),
        ({"order": {}}, "order.counts: expected a value, got none"),
        ({"more": 1}, "more: unknown; leave it out"),
    ],
)
def test_faults_are_said_in_plain_words(values: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError) as caught:
        _Setting.model_validate(values)
    assert all_faults(caught.value.errors()) == said


def test_a_name_that_is_not_known_is_met_with_the_nearest() -> None:
    assert hint("modle", ["model", "limit"]) == "did you mean model?"
    assert hint("zz", ["model", "limit"]) == "they are model, limit"


def test_a_dependency_that_cannot_be_imported_is_not_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_standin.py").write_text("raise ImportError('libcudnn.so.9: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match=r"broken_standin.*libcudnn") as caught:
        needs("a test", "onnx", "json", "broken_standin")
    assert "pip install" not in str(caught.value)
    with pytest.raises(UsageError, match=r"no_such_module.*pip install 'psc\[onnx\]'"):
        needs("a test", "onnx", "no_such_module")
