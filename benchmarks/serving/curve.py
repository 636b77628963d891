"""Measure latency over arrival rate: every server gets the same Poisson arrivals, until it no longer keeps up.

Rates are 25, 50 and 75 % of the slowest peer's peak, and then each is half as high again as the one before.  A sweep
offers a rate to all servers before it goes on to the next.  Between the last rate whose p99 is at most :data:`GOAL_MS`
and the next one, two more are tried, so that the rate at that p99 is known to a ninth.  A latency starts when its
request was due.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

Json = dict[str, Any]
Sweep = list[Json]  # The points of one server, by ascending rate in the grid, then those between two rates of the grid.

FRACTIONS = (0.25, 0.5, 0.75)
FACTOR, MAX_RATES, BETWEEN = 1.5, 12, 2
LIMIT_MS, GOAL_MS = 1000.0, 100.0
MAX_ERRORS = 0.01
MAX_LAG = 0.1  # A server falls behind if its last answer is later than the median by this fraction of the phase.
BUSY_CLIENT = 0.9  # The cores above which the load generator itself may be why answers are late.
MINIMUM_ARRIVALS = 20
KEPT = ("requests", "requests_per_s", "statuses", "p50_ms", "p99_ms", "server_cpu_s", "client_cpu_s", "mean_batch")


def rates(slowest_peak: float) -> Iterator[float]:
    """Yield arrivals/s, ascending, rounded to three digits."""
    for fraction in FRACTIONS:
        yield _three_digits(fraction * slowest_peak)
    rate = FRACTIONS[-1] * slowest_peak
    while True:
        rate *= FACTOR
        yield _three_digits(rate)


def duration(per_s: float, seconds: float) -> float:
    """Return the seconds of a phase: at least ``seconds``, and enough for :data:`MINIMUM_ARRIVALS`."""
    return max(seconds, MINIMUM_ARRIVALS / per_s)


def end_of(phase: Json, seconds: float) -> str | None:
    """Return why a server does not sustain the rate of a phase, or None if it does."""
    total = sum(phase["statuses"].values())
    if total - phase["requests"] > MAX_ERRORS * total:
        return "errors"
    if not phase["requests"]:
        return "no request"
    late = phase["p99_ms"] > LIMIT_MS
    behind = phase["seconds"] - seconds > MAX_LAG * seconds + phase["p50_ms"] / 1000
    if not (late or behind):
        return None
    if phase["client_cpu_s"] > BUSY_CLIENT * phase["seconds"]:
        return "load generator"
    return "p99" if late else "behind"


def sweep(
    peak: float, servers: Sequence[str], send: Callable[[str, float], Json | None], between: int = BETWEEN
) -> dict[str, Sweep]:
    """Return the points of every server, up to and including the one at which it stops keeping up."""
    found: dict[str, Sweep] = {name: [] for name in servers}
    going = list(servers)

    def offer(name: str, rate: float) -> bool:
        point = send(name, rate)
        if point is not None:
            found[name].append(point)
        return point is not None and point["end"] is None

    for rate in islice(rates(peak), MAX_RATES):
        going = [name for name in going if offer(name, rate)]
        if not going:
            break
    for _ in range(between):
        for name, points in found.items():
            if (middle := _next_between(points)) is not None:
                offer(name, middle)
    return found


def point(phase: Json, per_s: float, seconds: float) -> Json:
    return {
        "per_s": per_s,
        "end": end_of(phase, seconds),
        **{key: phase[key] for key in KEPT if key in phase},
    }


def meets_goal(one: Json) -> bool:
    """Return whether a point is sustained with a p99 of at most :data:`GOAL_MS`."""
    return one["end"] is None and one["p99_ms"] <= GOAL_MS


def goal_rate(points: Sweep) -> float:
    """Return the highest rate that meets the goal, arrivals/s; 0 if none does."""
    return max((one["per_s"] for one in points if meets_goal(one)), default=0.0)


def at(sweeps: Sequence[Sweep], rate: float) -> tuple[float, float] | None:
    """Return the medians of p50 and p99 over the sweeps, ms; None if half of the sweeps do not sustain the rate."""
    kept = [one for points in sweeps for one in points if one["per_s"] == rate and one["end"] is None]
    if 2 * len(kept) <= len(sweeps):
        return None
    return statistics.median(one["p50_ms"] for one in kept), statistics.median(one["p99_ms"] for one in kept)


def ends_at(sweeps: Sequence[Sweep], rate: float) -> str | None:
    """Return the first reason for which a sweep ended at a rate."""
    return next((one["end"] for points in sweeps for one in points if one["per_s"] == rate and one["end"]), None)


def grid(peak: float, servers: Sequence[Sequence[Sweep]]) -> list[float]:
    """Return the rates that were offered to every server that still kept up, without those in between."""
    offered = {one["per_s"] for sweeps in servers for points in sweeps for one in points}
    return [rate for rate in islice(rates(peak), MAX_RATES) if rate in offered]


def _next_between(points: Sweep) -> float | None:
    low = goal_rate(points)
    above = [one["per_s"] for one in points if one["per_s"] > low]
    return _three_digits((low * min(above)) ** 0.5) if low and above else None


def _three_digits(rate: float) -> float:
    return float(f"{rate:.3g}")
