"""The soak loses nothing of a few seconds, and measures growth."""

from __future__ import annotations

import httpx
import numpy as np
import pytest

from tests.attacks import soak
from tests.served import serve_fake


@pytest.mark.parametrize("growth", [0.0, 50.0])
def test_slope_of_the_last_half(growth: float) -> None:
    generator = np.random.default_rng(3)
    seconds = np.arange(0.0, 1800.0)
    noise = np.repeat(generator.normal(0, 4e5, 180), 10)  # Readings that depend on their neighbours.
    rss = 1e9 * (seconds < 900) + growth * seconds + noise
    readings = [soak.Reading(time, int(size), 17, 3) for time, size in zip(seconds, rss, strict=True)]
    slope, error = soak.slope(readings)
    assert abs(slope - 3600 * growth) < 4 * error
    last = [each for each in readings if each.seconds >= 900]
    fitted = np.polyfit([each.seconds for each in last], [each.rss for each in last], 1)[0]
    assert slope == pytest.approx(3600 * fitted, abs=error)


def test_a_short_soak_loses_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert soak.main(["--minutes=0.05", "--pause=0", "--reload-seconds=1"]) == 0
    table = capsys.readouterr().out
    for kind in (*soak.KINDS, "reload"):
        assert getattr(kind, "__name__", kind) in table
    assert "| lost, wrong, or an error in the log | 0 |" in table


def test_a_wrong_answer_counts_as_lost(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    answers = iter(range(10**9))

    def changing(_client: httpx.Client) -> int:
        return next(answers)

    monkeypatch.setattr(soak, "KINDS", (changing,))
    monkeypatch.setattr(soak, "serve", lambda *_flags: serve_fake())
    assert soak.main(["--minutes=0.02", "--clients=1", "--pause=0.01"]) == 1
    assert "changing: 1" in capsys.readouterr().out
