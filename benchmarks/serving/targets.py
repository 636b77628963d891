"""What is required of the service beside its peers, and whether a record meets it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping

from benchmarks.runs import Json
from benchmarks.serving.ceilings import best_images_per_s, images_per_s
from benchmarks.serving.curve import GOAL_MS, at, goal_rate, grid
from benchmarks.serving.servers import BY_NAME, COMPUTE, OVERHEAD

TIMES_PEERS, OF_BARE, OF_BARE_MANY = 4.0, 0.95, 0.90
TIMES_THESE = ("litserve", "bentoml", "fastapi")
OURS = ("psc", "psc-workers")
Check = tuple[str, bool, str]
"""What is required, whether it is met, and what was measured."""


class Ratio:
    """A ratio measured in every round; its text has median, minimum and maximum."""

    def __init__(self, values: Iterable[float], unit: str = "") -> None:
        self._values, self._unit = sorted(values), unit

    @property
    def median(self) -> float:
        """Over the rounds."""
        return statistics.median(self._values)

    def __str__(self) -> str:
        digits = 3 if self._values[-1] < 1.2 else 2 if self._values[-1] < 10 else 1
        median, low, high = (f"{value:.{digits}f}" for value in (self.median, self._values[0], self._values[-1]))
        return f"{median}{self._unit} ({low} to {high})" if len(self._values) > 1 else f"{median}{self._unit}"


def ran(servers: Mapping[str, Json]) -> dict[str, Json]:
    """The servers of a case that did not fail."""
    return {name: found for name, found in servers.items() if found.get("rounds")}


def rates(found: Json, phase: str) -> list[float]:
    """Images/s in every round."""
    return [turn[phase]["images_per_s"] for turn in found["rounds"]]


def times(ours: Json, theirs: Json) -> Ratio:
    """Our images/s over theirs, with single images."""
    pairs = zip(rates(ours, "closed"), rates(theirs, "closed"), strict=True)
    return Ratio((mine / other for mine, other in pairs), " ×")


def of_bare(table: Json, found: Json, phase: str) -> Ratio:
    """Images/s of a phase over those of the best bare step, at the phase's mean batch or else at the best batch."""
    ratios = []
    for turn, bare in zip(found["rounds"], table["bare"], strict=True):
        steps, batch = bare["step_ms"], turn[phase].get("mean_batch")
        maximum = images_per_s(steps, batch) if phase == "closed" and batch else best_images_per_s(steps)
        ratios.append(turn[phase]["images_per_s"] / maximum)
    return Ratio(ratios)


def goal(found: Json) -> float:
    """Highest rate with a p99 of at most :data:`~benchmarks.serving.curve.GOAL_MS`, median of the sweeps."""
    return statistics.median(map(goal_rate, found["sweeps"])) if found["sweeps"] else 0.0


def offered(table: Json) -> list[float]:
    """The rates of a table's curves."""
    return grid(table["slowest_peak"], [found["sweeps"] for found in ran(table["servers"]).values()])


def lost_tails(table: Json, ours: str) -> tuple[int, int, str]:
    """Rates that peers sustain with a p99 not above ours, of how many, and the worst of them as text."""
    servers = ran(table["servers"])
    lost, total, worst, text = 0, 0, 1.0, ""
    for name, found in servers.items():
        for rate in () if BY_NAME[name].ours else offered(table):
            if (theirs := at(found["sweeps"], rate)) is None:
                continue
            total += 1
            mine = at(servers[ours]["sweeps"], rate)
            times_theirs = mine[1] / theirs[1] if mine else float("inf")
            lost += times_theirs >= 1
            if times_theirs >= worst:
                much = f"{times_theirs:.1f} × its p99" if mine else "which we do not sustain"
                worst, text = times_theirs, f", worst {BY_NAME[name].label} at {rate:g}/s, {much}"
    return lost, total, text


def targets(record: Json) -> list[Json]:
    """Targets, measured values, and whether they are met; peers that did not run are left out."""
    checks = [check for table in record["tables"] for check in _of_table(table, record["many"]["images"])]
    return [{"target": what, "met": met, "measured": value} for what, met, value in checks]


def _of_table(table: Json, many: int) -> Iterator[Check]:
    servers, title = ran(table["servers"]), table["title"]
    peers = {name: found for name, found in servers.items() if not BY_NAME[name].ours}
    for ours in OURS if peers else ():
        if ours not in servers:
            continue
        label = f"{title}, single images: {BY_NAME[ours].label}"
        ratios = {name: times(servers[ours], found) for name, found in peers.items()}
        if table["case"] == OVERHEAD:
            for name in filter(ratios.__contains__, TIMES_THESE):
                yield _at_least(f"{label} ÷ {BY_NAME[name].label}", ratios[name], TIMES_PEERS)
        else:
            best = min(ratios, key=lambda name: ratios[name].median)
            text = f"{ratios[best]} the best ({BY_NAME[best].label})"
            yield f"{label} above every peer", ratios[best].median > 1, text
        if servers[ours]["sweeps"]:
            yield from _of_tails(table, ours, peers)
    if table["case"] == COMPUTE and "psc" in servers:
        what = f"{title}, single images ÷ best bare step at the mean batch"
        yield _at_least(what, of_bare(table, servers["psc"], "closed"), OF_BARE)
        what = f"{title}, requests of {many} images ÷ best bare step at its best batch"
        yield _at_least(what, of_bare(table, servers["psc"], "many"), OF_BARE_MANY)


def _at_least(what: str, ratio: Ratio, minimum: float) -> Check:
    return f"{what} ≥ {minimum:g}", ratio.median >= minimum, str(ratio)


def _of_tails(table: Json, ours: str, peers: Mapping[str, Json]) -> Iterator[Check]:
    lost, total, worst = lost_tails(table, ours)
    mine, best = goal(table["servers"][ours]), max(peers, key=lambda name: goal(peers[name]))
    label = f"{table['title']}, equal load: {BY_NAME[ours].label}"
    yield (
        f"{label}, p99 below every peer's at every rate that the peer sustains",
        lost == 0,
        f"at {total - lost} of {total} (peer, rate){worst}",
    )
    yield (
        f"{label}, rate at a p99 of {GOAL_MS:g} ms above every peer's",
        mine > goal(peers[best]),
        f"{mine:,.0f}/s, the best peer {goal(peers[best]):,.0f}/s ({BY_NAME[best].label})",
    )
