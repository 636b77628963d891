"""Images that come again count once, and what that does to the drift monitor."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.metrics import RepeatFilter
from tests.app.observability.support import monitor_of

N = 2000
DISTINCT = np.arange(N, dtype=np.float32)


def served(calibration: npt.NDArray[np.floating], scores: npt.NDArray[np.floating]) -> npt.NDArray[np.float32]:
    """p-values as the service gives them."""
    above = len(calibration) - np.searchsorted(np.sort(calibration), scores, side="left")
    return ((1.0 + above) / (1.0 + len(calibration))).astype(np.float32)


def counted(repeats: RepeatFilter, fingerprints: list[int], p_value: float = 0.5) -> list[bool]:
    return repeats.counts(np.full(len(fingerprints), p_value, np.float32), fingerprints).tolist()


@given(st.lists(st.integers(0, 12), max_size=40), st.integers(1, 10))
def test_an_image_counts_again_when_as_many_others_came_since(images: list[int], remembered: int) -> None:
    expected, order = [], list[int]()
    for image in images:
        expected.append(image not in order[-remembered:])
        order = [other for other in order if other != image] + [image]
    assert counted(RepeatFilter.of(DISTINCT, remembered=remembered), images) == expected


def test_no_more_is_remembered_than_said() -> None:
    repeats = RepeatFilter.of(DISTINCT, remembered=100)
    counted(repeats, list(range(100_000)))
    assert len(repeats._recent) == 100


def test_repeats_count_where_calibration_images_are_equal() -> None:
    """Blank pages, say: seven in ten of the calibration images."""
    calibration = np.concatenate([np.arange(3.0), np.full(7, 5.0), [8.0, 9.0]])
    repeats = RepeatFilter.of(calibration)
    for score, counts in (
        (5.0, True),
        (np.nextafter(5.0, 0), True),
        (np.nextafter(5.0, 9), True),
        (9.0, False),
        (1.5, False),
    ):
        p_value = float(served(calibration, np.array([score]))[0])
        assert counted(repeats, [hash(score)] * 2, p_value) == [True, counts], score


def test_images_equal_to_no_other_are_all_left_in() -> None:
    """What the bound on false alarms needs: a stream without repeats passes as it is."""
    assert all(counted(RepeatFilter.of(DISTINCT), list(range(30_000))))


def test_data_with_many_identical_images_raise_no_alarm() -> None:
    """Four in ten of all images are one blank page, whose score is typical."""
    alarms = 0
    for seed in range(20):
        generator = np.random.default_rng(seed)

        def scores(count: int, generator: np.random.Generator = generator) -> npt.NDArray[np.float64]:
            return np.where(generator.random(count) < 0.4, -1.0, generator.normal(size=count))

        calibration, stream = scores(1000), scores(5000)
        p_values = served(calibration, stream)
        monitor, repeats = monitor_of(1000, 0.05), RepeatFilter.of(calibration)
        alarms += monitor.update(p_values[repeats.counts(p_values, stream.view(np.int64).tolist())])
    assert alarms == 0


@pytest.mark.parametrize("times", [8, 1000])
def test_a_few_images_again_and_again_raise_no_alarm(times: int) -> None:
    """The README's three: sure, ambiguous, strange; amid other images or alone."""
    for others in (0, 20):
        generator = np.random.default_rng(7)
        calibration = generator.normal(size=N)
        monitor, repeats = monitor_of(N, 0.05, false_alarm_probability=1e-4), RepeatFilter.of(calibration)
        for _ in range(times):
            stream = np.concatenate([[-0.5, 0.3, 60.0], generator.normal(size=others)])
            p_values = served(calibration, stream)
            monitor.update(p_values[repeats.counts(p_values, stream.view(np.int64).tolist())])
        assert monitor.state.alarms == 0
        assert monitor.state.window_images == min(1000, 3 + others * times)


def test_nobody_hides_an_image_by_sending_it_first() -> None:
    """Strange images that a client sent before others do are found as if these had been the first."""
    monitor, repeats = monitor_of(N, 0.05), RepeatFilter.of(DISTINCT)
    strange = served(DISTINCT, np.full(10, 1e9))
    images = list(range(10))
    alarms = sum(monitor.update(strange[repeats.counts(strange, images)]) for _ in range(2))
    assert alarms == 1


def test_a_stream_that_loops_over_more_images_than_are_remembered_raises_no_alarm() -> None:
    """A load test with a folder of ordinary images."""
    alarms = 0
    for seed in range(10):
        generator = np.random.default_rng(seed)
        calibration, folder = generator.normal(size=N), generator.normal(size=300)
        monitor, repeats = (
            monitor_of(N, 0.05, false_alarm_probability=1e-4),
            RepeatFilter.of(calibration, remembered=200),
        )
        p_values = served(calibration, folder)
        for _ in range(30):
            alarms += monitor.update(p_values[repeats.counts(p_values, folder.view(np.int64).tolist())])
    assert alarms == 0
