"""The query parameters of each task, and the client's options, which repeat them for type checkers."""

from typing import Any, get_type_hints

import pytest
from pydantic import ValidationError

from app.client import ClassificationOptions, Options, RegressionOptions
from psc_core.answers import ClassificationPolicy, PredictQuery, Target
from psc_core.errors import UsageError
from psc_core.tasks import TASKS


def test_the_client_has_an_option_for_each_parameter() -> None:
    assert get_type_hints(Options).keys() - {"model"} == PredictQuery.model_fields.keys()
    for options, task in ((ClassificationOptions, "classification"), (RegressionOptions, "regression")):
        assert get_type_hints(options).keys() - {"model"} == TASKS[task].query_type.model_fields.keys()


@pytest.mark.parametrize("parameters", [{"alpha": "nan"}, {"alpha": "1"}, {"explain": "perhaps"}, {"colour": "red"}])
def test_rejects_what_no_task_has(parameters: dict[str, str]) -> None:
    with pytest.raises(ValidationError):
        PredictQuery.model_validate_strings(parameters)


@pytest.mark.parametrize(("share", "warns"), [(0.89, False), (0.91, True), (None, False)])
def test_a_promise_that_one_answer_would_keep_is_told(share: float | None, warns: bool) -> None:
    policy = ClassificationPolicy(alpha=0.05, ambiguity_threshold=0.5, coverage=0.95, risk=0.1)
    metrics = {"largest_class": share, "risk_asked": 0.1}
    assert policy.surprises(metrics) == warns
    assert ("one answer to all images would keep that, as 91.0% are of one" in policy.headline(metrics)) == warns


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
