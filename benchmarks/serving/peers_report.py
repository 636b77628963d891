"""The record of :mod:`benchmarks.serving.peers` as targets, tables and a plot."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.plots import figure
from benchmarks.runs import Json, markdown_table, where, write_section
from benchmarks.serving.ceilings import SIZES, best_images_per_s, images_per_s, minimum_tail_ms
from benchmarks.serving.histogram import survival
from benchmarks.serving.servers import BY_NAME, COMPUTE, OVERHEAD, SERVERS

TIMES_PEERS, TIMES_MOSEC, OF_BARE, OF_BARE_MANY, TAIL = 5.0, 1.0, 0.95, 0.90, 3.0
_FIVE_TIMES = ("litserve", "bentoml", "ray", "fastapi")


def name_of(device: str) -> str:
    """Name of record, plot and section."""
    return "serving-peers" if device == "cpu" else f"serving-peers-{device}"


def step_ms(record: Json, network: str) -> dict[str, float]:
    """Milliseconds of the bare device step by batch size, medians over the rounds."""
    rounds = [found["step_ms"] for found in record["bare"][network]]
    return {str(size): statistics.median(one[str(size)] for one in rounds) for size in SIZES}


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


def rates(found: Json, phase: str) -> list[float]:
    """Images/s in every round."""
    return [turn[phase]["images_per_s"] for turn in found["rounds"]]


def times(ours: Json, theirs: Json) -> Ratio:
    """Our images/s over theirs, with single images."""
    pairs = zip(rates(ours, "closed"), rates(theirs, "closed"), strict=True)
    return Ratio((mine / other for mine, other in pairs), " ×")


def of_bare(record: Json, found: Json, phase: str) -> Ratio:
    """Images/s of a phase over those of the bare step, at the phase's mean batch or else at the best batch."""
    ratios = []
    for turn, bare in zip(found["rounds"], record["bare"][COMPUTE], strict=True):
        steps, batch = bare["step_ms"], turn[phase].get("mean_batch")
        maximum = images_per_s(steps, batch) if phase == "closed" and batch else best_images_per_s(steps)
        ratios.append(turn[phase]["images_per_s"] / maximum)
    return Ratio(ratios)


def tail(found: Json) -> Ratio:
    """p99 at 70 % of the peak over the unloaded median."""
    return Ratio((turn["steady"]["p99_ms"] / turn["unloaded"]["p50_ms"] for turn in found["rounds"]), " ×")


def targets(record: Json) -> list[Json]:
    """Targets, measured values, and whether they are met; peers that did not run are left out."""
    checks: list[tuple[str, bool, str]] = []
    small, large = (_ran(record["servers"][network]) for network in (OVERHEAD, COMPUTE))

    def at_least(what: str, ratio: Ratio, minimum: float) -> None:
        checks.append((f"{what} ≥ {minimum:g}", ratio.median >= minimum, str(ratio)))

    for ours in ("psc", "psc-workers"):
        for name, minimum in (*((name, TIMES_PEERS) for name in _FIVE_TIMES), ("mosec", TIMES_MOSEC)):
            if ours in small and name in small:
                what = f"{OVERHEAD}, single images: {BY_NAME[ours].label} ÷ {BY_NAME[name].label}"
                at_least(what, times(small[ours], small[name]), minimum)
    if "psc" in large:
        what = f"{COMPUTE}, single images ÷ bare step at the mean batch"
        at_least(what, of_bare(record, large["psc"], "closed"), OF_BARE)
        for ours in ("psc", "psc-workers"):
            ratios = {
                name: times(large[ours], found)
                for name, found in large.items()
                if ours in large and not BY_NAME[name].ours
            }
            if ratios:
                best = min(ratios, key=lambda name: ratios[name].median)
                what = f"{COMPUTE}, single images: {BY_NAME[ours].label} above every peer"
                checks.append((what, ratios[best].median > 1, f"{ratios[best]} the best ({BY_NAME[best].label})"))
        what = f"{COMPUTE}, requests of {record['many']['images']} images ÷ bare step at its best batch"
        at_least(what, of_bare(record, large["psc"], "many"), OF_BARE_MANY)
    for network, servers in ((COMPUTE, large), (OVERHEAD, small)):
        if "psc" in servers:
            ratio = tail(servers["psc"])
            what = f"{network}, open loop at 70 % of the peak: p99 ≤ {TAIL:g} × the unloaded median"
            checks.append((what, ratio.median <= TAIL, f"{ratio}{_minimum_tail(record, network)}"))
    return [{"target": what, "met": met, "measured": value} for what, met, value in checks]


def _ran(servers: Mapping[str, Json]) -> dict[str, Json]:
    return {name: found for name, found in servers.items() if found.get("rounds")}


def _minimum_tail(record: Json, network: str) -> str:
    """The tail of an ideal server that takes no time besides its device steps."""
    steps = step_ms(record, network)
    per_s = _middle(record["servers"][network]["psc"], "steady", "requests_per_s")
    minimum = minimum_tail_ms(steps, per_s)
    return f"; {minimum / steps['1']:.1f} × for an ideal server that takes only these steps (simulated)"


def _middle(found: Json, phase: str, key: str) -> float:
    return float(statistics.median(turn[phase][key] for turn in found["rounds"]))


def section(record: Json) -> str:
    """The record as Markdown."""
    env, rounds = record["environment"], max(map(len, record["bare"].values()))
    lines = [
        f"{where(env)}.",
        f"One PNG digit a request, {record['clients']} clients in a closed loop, {record['seconds']:g} s a phase. "
        "The load generator is one process, pinned to no core; "
        f"client and server share the {env['cpus']} cores, so the CPU time of both is given.",
        "All servers of a table run at once, suspended except the one whose turn it is. "
        f"Each had {rounds} turns: numbers are medians over them, ratios are medians of the ratios within a round, "
        "with minimum and maximum.",
        "Every server runs the same bundle on the same torch and was checked against the library; peers decode with "
        "torchvision and answer only probabilities, entropy, log density and p-value, psc-serve its whole response.",
        "Unloaded: one client in a closed loop. Latencies at 70 % of the peak of the same turn count from when a "
        "request was due, Poisson arrivals.",
        *([record["note"]] if record["note"] else []),
        "",
        f"    {record['command']}",
        "",
        markdown_table(
            ["target", "measured", "met"],
            [[one["target"], one["measured"], "yes" if one["met"] else "**no**"] for one in targets(record)],
        ),
    ]
    about = {
        OVERHEAD: "two convolutions of four channels: the network costs next to nothing",
        COMPUTE: "the shipped Dirty-MNIST ResNet-18",
    }
    for network, text in about.items():
        lines += ["", f"### {network.capitalize()}: {text}", "", _table(record, network)]
    lines += [
        "",
        "### Ceilings",
        "",
        _ceilings(record),
        "",
        f"![throughput and latency]({name_of(record['device'])}.svg)",
    ]
    lines += ["", "### Versions and settings", "", _settings(record)]
    return "\n".join(lines)


def _table(record: Json, network: str) -> str:
    many = network == COMPUTE
    on_gpu = record["device"] != "cpu"
    header = ["server", "images/s", "psc ÷ it", "p50", "p99", "mean batch", "server CPU", "client CPU"]
    header += ["GPU busy"] if on_gpu else []
    header += ["unloaded p50", "p99 at 70 %", "÷ unloaded p50"]
    header += [f"images/s, {record['many']['images']} a request"] if many else []
    servers = record["servers"][network]
    ran = _ran(servers)
    rows = []
    for server in SERVERS:
        if server.name in servers and server.name not in ran:
            rows.append([server.label, "did not run", *[""] * (len(header) - 2)])
        if (found := ran.get(server.name)) is None:
            continue
        row = [
            server.label,
            f"{_middle(found, 'closed', 'images_per_s'):,.0f}" + _other_statuses(found, "closed"),
            str(times(ran["psc"], found)) if "psc" in ran and server.name != "psc" else "",
            *(f"{_middle(found, 'closed', key):,.1f} ms" for key in ("p50_ms", "p99_ms")),
            f"{_middle(found, 'closed', 'mean_batch'):.1f}" if "mean_batch" in found["rounds"][0]["closed"] else "",
            *(
                f"{statistics.median(_cpu_ms(turn['closed'], side) for turn in found['rounds']):.2f} ms"
                for side in ("server", "client")
            ),
            *([_gpu(found)] if on_gpu else []),
            f"{_middle(found, 'unloaded', 'p50_ms'):,.1f} ms",
            f"{_middle(found, 'steady', 'p99_ms'):,.1f} ms" + _other_statuses(found, "steady"),
            str(tail(found)),
        ]
        several = f"{_middle(found, 'many', 'images_per_s'):,.0f}" if "many" in found["rounds"][0] else ""
        rows.append([*row, several] if many else row)
    return markdown_table(header, rows)


def _cpu_ms(phase: Json, side: str) -> float:
    """CPU milliseconds of a request."""
    return 1000 * float(phase[f"{side}_cpu_s"]) / max(1, phase["requests"])


def _gpu(found: Json) -> str:
    fractions = [turn["closed"]["gpu_utilisation"] for turn in found["rounds"] if "gpu_utilisation" in turn["closed"]]
    return f"{statistics.median(fractions):.0%}" if fractions else ""


def _other_statuses(found: Json, phase: str) -> str:
    others: Counter[str] = Counter()
    for turn in found["rounds"]:
        others.update({status: count for status, count in turn[phase]["statuses"].items() if status != "200"})
    return f" ({', '.join(f'{count} × {status}' for status, count in others.items())})" if others else ""


def _ceilings(record: Json) -> str:
    rows = []
    for network in (OVERHEAD, COMPUTE):
        steps = step_ms(record, network)
        text = ", ".join(f"{1000 * size / steps[str(size)]:,.0f} at {size}" for size in SIZES)
        rows.append([f"model only, {network}: bare device step, images/s by batch size", text])
    ceilings = record["ceilings"]
    if "decode" in ceilings:
        rows.append(["decode only: `app.inference.decoder`, one core, images/s", f"{ceilings['decode']:,.0f}"])
    for name, text in (
        ("bare", "HTTP only: uvicorn and an application that sends constant bytes, requests/s"),
        ("instant", "psc-serve with a network that takes no time, requests/s"),
    ):
        if (found := ceilings.get(name)) is None:
            continue
        if "failed" in found:
            rows.append([text, f"did not run: {' '.join(found['failed'].split())}"])
        else:
            rate, cpu_ms = found["requests_per_s"], _cpu_ms(found, "server")
            rows.append([text, f"{rate:,.0f} ({cpu_ms:.2f} ms server CPU a request)"])
    return markdown_table(["ceiling", "measured"], rows)


def _settings(record: Json) -> str:
    rows = []
    for server in SERVERS:
        networks = [servers[server.name] for servers in record["servers"].values() if server.name in servers]
        if not networks:
            continue
        found = next((one["versions"] for one in networks if "versions" in one), {})
        failed = next((one["failed"] for one in networks if "failed" in one), None)
        shown = ", ".join(f"{name} {version}" for name, version in found.items() if name != "torch")
        text = record["settings"][server.name] + (f"; did not run: {failed}" if failed else "")
        rows.append([server.label, " ".join(text.split()), shown])
    return markdown_table(["server", "settings", "versions"], rows)


def draw(record: Json, folder: Path) -> None:
    """Throughput of each server, and the fraction of responses that took longer than a latency."""
    with figure(folder / f"{name_of(record['device'])}.svg", 2, 2, width=4.6, height=3.0) as axes:
        for column, network in enumerate((OVERHEAD, COMPUTE)):
            servers = _ran(record["servers"][network])
            shown = [server for server in SERVERS if server.name in servers]
            colours = {server.name: f"C{index}" for index, server in enumerate(SERVERS)}
            bars: Any = axes[0][column]
            for server in shown:
                found = rates(servers[server.name], "closed")
                middle = statistics.median(found)
                spread = [[middle - min(found)], [max(found) - middle]]
                bars.barh(server.label, middle, xerr=spread, color=colours[server.name], ecolor="0.3")
            bars.invert_yaxis()
            bars.set(title=f"{network}, {record['clients']} clients", xlabel="images/s, median and range of the turns")
            tails: Any = axes[1][column]
            for server in shown:
                together: Counter[str] = Counter()
                for turn in servers[server.name]["rounds"]:
                    together.update(turn["steady"]["histogram"])
                edges, fractions = survival(together)
                tails.step(edges, fractions, color=colours[server.name], label=server.label, lw=1.2)
            tails.set(
                title="at 70 % of its own peak",
                xlabel="latency, ms",
                ylabel="fraction that took longer",
                xscale="log",
                yscale="log",
                ylim=(1e-4, 1.1),
            )
        axes[1][0].legend(frameon=False, fontsize=7)


def write_report(record: Json, folder: Path) -> None:
    """The plot and the section of ``serving.md``."""
    draw(record, folder)
    title = "Serving against peers" + ("" if record["device"] == "cpu" else f", {record['device']}")
    write_section(folder / "serving.md", name_of(record["device"]), section(record), title)
