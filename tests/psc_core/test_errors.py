from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field, ValidationError, model_validator

from psc_core.errors import UsageError, all_faults, hint, needs


class _Setting(BaseModel, extra="forbid", allow_inf_nan=False):
    kind: Literal["a", "b"] = "a"
    rate: Annotated[float, Field(gt=0, le=1)] = 1.0
    sizes: Annotated[list[int], Field(min_length=1)] = [1]

    @model_validator(mode="after")
    def _check(self) -> _Setting:
        if self.rate == len(self.sizes):
            raise ValueError("order something")
        return self


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"kind": "c"}, "field kind: expected 'a' or 'b'"),
        ({"rate": 0}, "field rate: expected more than 0"),
        ({"rate": float("nan")}, "field rate: expected a finite number"),
        ({"sizes": [1, "many"], "kind": 5}, "field kind: expected 'a' or 'b'; field sizes.1: expected a whole number"),
        ({"sizes": []}, "field sizes: expected at least 1 items"),
        ({"more": 1}, "field more: unknown; leave it out"),
        ({"rate": 1, "sizes": [1]}, "order something"),
    ],
)
def test_faults_name_their_place_in_plain_words(values: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError) as caught:
        _Setting.model_validate(values)
    assert all_faults(caught.value.errors(), "field") == said


def test_a_name_that_is_not_known_is_met_with_the_nearest() -> None:
    assert hint("modle", ["model", "limit"]) == "did you mean model?"
    assert hint("zz", ["model", "limit"]) == "they are model, limit"


def test_a_dependency_that_is_broken_is_not_called_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_standin.py").write_text("raise ImportError('libcudnn.so.9: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match=r"broken_standin.*libcudnn") as caught:
        needs("a test", "onnx", "json", "broken_standin")
    assert "pip install" not in str(caught.value)
    with pytest.raises(UsageError, match=r"no_such_module.*pip install 'psc\[onnx\]'"):
        needs("a test", "onnx", "no_such_module")
