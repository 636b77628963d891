"""The same image always falls the same way, and as often as its probability says."""

from __future__ import annotations

import pytest

from app.log import Sampling, number_of
from app.settings import load_settings
from psc_core.answers import Target
from psc_core.errors import UsageError
from psc_core.tasks.classification import Classification
from psc_core.tasks.regression import Regression


def sampling(task: object = None, **settings: object) -> Sampling:
    return Sampling.of(load_settings(settings), task or Classification())  # type: ignore[arg-type]


def test_probabilities_by_decision() -> None:
    assert sampling() == Sampling(0.01, (1.0, 1.0, 1.0), (0.01, 1.0, 1.0))
    drawn = sampling(log_rows=0.1, log_sample=0.02, log_images="abstain_ood,abstain_ambiguous:0.5,accept:0.01")
    assert drawn == Sampling(0.02, (0.1, 0.5, 1.0), (0.02, 0.5, 1.0))
    of_value = sampling(Regression(target=Target(name="x")), log_rows=0, log_images="abstained:0.3,accept:0.2")
    assert of_value == Sampling(0.01, (0.2, 0.3, 0.3), (0.2, 0.3, 0.3))
    assert sampling(log_images="", log_sample=0, log_rows=0) == Sampling(0.0, (0.0, 0.0, 0.0), (0.0, 0.0, 0.0))


def test_numbers_are_fixed_and_uniform() -> None:
    assert number_of("0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331", 3) == 0.0861575455817638
    numbers = [number_of(f"request {n // 4}", n % 4) for n in range(20_000)]
    assert len(set(numbers)) == len(numbers) and min(numbers) >= 0 and max(numbers) < 1
    for threshold in (0.01, 0.1, 0.5):  # Six standard deviations.
        share = sum(each < threshold for each in numbers) / len(numbers)
        assert abs(share - threshold) < 6 * (threshold * (1 - threshold) / len(numbers)) ** 0.5


@pytest.mark.parametrize("text", ["reject", "accept:2", "accept:x", "accept:-1", "accept:nan", "accept:"])
def test_what_is_no_decision_or_fraction_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"expected log_images to name some of abstained, accept, .* got"):
        load_settings({"log_images": text})
