"""The query parameters of each task, and the client's options, which repeat them for type checkers."""

from __future__ import annotations

from typing import get_type_hints

import pytest
from pydantic import ValidationError

from app.client import ClassificationOptions, Options, RegressionOptions
from psc_core.answers import PredictQuery
from psc_core.tasks import TASKS


def test_the_client_has_an_option_for_each_parameter() -> None:
    assert get_type_hints(Options).keys() - {"model"} == PredictQuery.model_fields.keys()
    for options, task in ((ClassificationOptions, "classification"), (RegressionOptions, "regression")):
        assert get_type_hints(options).keys() - {"model"} == TASKS[task].query_type.model_fields.keys()


@pytest.mark.parametrize("parameters", [{"alpha": "nan"}, {"alpha": "1"}, {"explain": "perhaps"}, {"colour": "red"}])
def test_rejects_what_no_task_has(parameters: dict[str, str]) -> None:
    with pytest.raises(ValidationError):
        PredictQuery.model_validate_strings(parameters)
