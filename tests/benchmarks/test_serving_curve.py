"""Latency over arrival rate: the rates, when a server no longer keeps up, and what is read from the points."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest

from benchmarks.serving import curve
from benchmarks.serving.curve import Json, end_of, goal_rate, sweep


def test_rates_go_from_a_quarter_of_the_peak_upwards() -> None:
    assert list(islice(curve.rates(1234.5), 5)) == [309.0, 617.0, 926.0, 1390.0, 2080.0]
    assert [curve.duration(rate, 2.0) for rate in (5.0, 500.0)] == [4.0, 2.0]  # slow rates for longer


@pytest.mark.parametrize(
    ("more", "end"),
    [
        ({"requests": 199, "statuses": {"200": 199, "503": 1}}, None),
        ({"requests": 190, "statuses": {"200": 190, "429": 10}}, "errors"),
        ({"requests": 0, "statuses": {}}, "no request"),
        ({"p99_ms": 1001.0}, "p99"),
        ({"seconds": 2.3}, "behind"),
        ({"seconds": 2.3, "p50_ms": 120.0}, None),  # The last answer comes late because every answer takes long.
        ({"seconds": 2.3, "client_cpu_s": 2.2}, "load generator"),
        ({"client_cpu_s": 2.0}, None),
    ],
)
def test_end_of_a_server(more: dict[str, Any], end: str | None) -> None:
    usual = {"requests": 200, "statuses": {"200": 200}, "p50_ms": 10.0, "p99_ms": 50.0}
    assert end_of({**usual, "seconds": 2.05, "client_cpu_s": 0.1, **more}, 2.0) == end


def scripted(capacity: dict[str, float], order: list[tuple[str, float]]) -> Any:
    """Servers whose p99 is 1 ms for each percent of their capacity."""

    def send(name: str, rate: float) -> Json | None:
        order.append((name, rate))
        if not capacity[name]:
            return None
        ms = 100 * rate / capacity[name]
        return {"per_s": rate, "end": "behind" if ms > 150 else None, "p50_ms": ms / 2, "p99_ms": ms}

    return send


def test_sweep_offers_each_rate_to_all_before_the_next() -> None:
    order: list[tuple[str, float]] = []
    found = sweep(100.0, ["slow", "gone", "fast"], scripted({"slow": 60.0, "gone": 0.0, "fast": 160.0}, order), 0)
    assert order[:5] == [("slow", 25.0), ("gone", 25.0), ("fast", 25.0), ("slow", 50.0), ("fast", 50.0)]
    assert [one["per_s"] for one in found["slow"]] == [25.0, 50.0, 75.0, 112.0]
    assert [one["end"] for one in found["slow"]] == [None, None, None, "behind"]
    assert found["gone"] == [] and found["fast"][-1]["per_s"] == 253.0


def test_rates_between_two_of_the_grid_narrow_the_goal() -> None:
    found = sweep(100.0, ["a"], scripted({"a": 88.0}, []))["a"]
    assert [one["per_s"] for one in found] == [25.0, 50.0, 75.0, 112.0, 169.0, 91.7, 82.9]
    assert goal_rate(found) == 82.9
    assert curve.grid(100.0, [[found]]) == [25.0, 50.0, 75.0, 112.0, 169.0]
    assert goal_rate(sweep(100.0, ["a"], scripted({"a": 20.0}, []))["a"]) == 0.0


def test_a_rate_counts_if_most_sweeps_sustain_it() -> None:
    sweeps = [
        [{"per_s": 25.0, "end": "p99" if ms > 1000 else None, "p50_ms": 1.0, "p99_ms": ms}] for ms in (10.0, 30.0, 2e3)
    ]
    assert curve.at(sweeps, 25.0) == (1.0, 20.0)
    assert curve.at(sweeps[1:], 25.0) is None and curve.at(sweeps, 50.0) is None
    assert (curve.ends_at(sweeps, 25.0), curve.ends_at(sweeps[:1], 25.0)) == ("p99", None)
