"""How pixels became the inputs of a loader: as a user says, or as far as their range shows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from psc_core import PRESETS
from psc_core.data.loaders import LoaderPreprocessing, ObservedPreprocess
from psc_core.errors import UsageError


def test_mean_and_std_make_a_preprocess_of_the_inputs_size() -> None:
    stated = LoaderPreprocessing(mean=(0.1, 0.2, 0.3), std=torch.tensor([0.5, 0.6, 0.7]))
    found = stated.preprocess_of((3, 4, 5), [0.0], [1.0])
    assert (found.mode, found.shape, found.resize, found.mean) == ("RGB", (3, 4, 5), None, (0.1, 0.2, 0.3))
    assert found.std == pytest.approx((0.5, 0.6, 0.7)) and found.is_known
    grey = LoaderPreprocessing(mean=0.1307, std=0.3081).preprocess_of((1, 28, 28), [0.0], [1.0])
    assert grey == PRESETS["mnist"]


def test_a_preprocess_is_taken_where_the_size_is_its_own() -> None:
    said = LoaderPreprocessing(PRESETS["mnist"])
    assert said.preprocess_of((1, 28, 28), [0.0], [1.0]) is PRESETS["mnist"]
    with pytest.raises(UsageError, match=r"shape \(1, 28, 28\), got \(1, 32, 32\)"):
        said.preprocess_of((1, 32, 32), [0.0], [1.0])


@given(st.lists(st.tuples(st.floats(-100, 100), st.floats(1, 100)), min_size=3, max_size=3))
def test_the_range_of_the_inputs_is_taken_for_black_to_white(ranges: list[tuple[float, float]]) -> None:
    low, high = [bottom for bottom, _ in ranges], [bottom + wide for bottom, wide in ranges]
    observed = LoaderPreprocessing().preprocess_of((3, 1, 2), low, high)
    ends = torch.tensor([low, high]).T[None, :, None, :]
    assert observed.to_pixels(ends)[0, :, 0].tolist() == [[0, 255]] * 3
    torch.testing.assert_close(observed.standardise(observed.to_pixels(ends)), ends, atol=1e-4, rtol=1e-4)


def test_an_observed_preprocess_is_no_known_one() -> None:
    observed = LoaderPreprocessing().preprocess_of((1, 2, 2), [0.5], [0.5])  # A constant channel.
    assert isinstance(observed, ObservedPreprocess) and not observed.is_known
    assert replace(observed) == observed and "inputs from a loader" in str(observed)
    known = PRESETS["mnist"]
    assert ObservedPreprocess(**vars(known)) != known


def test_half_of_the_statistics_or_both_ways_are_refused() -> None:
    with pytest.raises(UsageError, match="expected both mean and std"):
        LoaderPreprocessing(mean=0.5)
    with pytest.raises(UsageError, match="expected a preprocess, or mean and std"):
        LoaderPreprocessing(PRESETS["mnist"], 0.5, 0.5)
    with pytest.raises(UsageError, match="expected images of 1 channel"):
        LoaderPreprocessing(mean=(0.0,) * 4, std=(1.0,) * 4).preprocess_of((4, 2, 2), [0.0], [1.0])
    with pytest.raises(UsageError, match="expected 3 means"):
        LoaderPreprocessing(mean=(0.5,) * 2, std=(0.5,) * 2).preprocess_of((3, 2, 2), [0.0], [1.0])
