"""Turn the record of :mod:`benchmarks.serving.peers` into tables and a plot."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.plots import figure
from benchmarks.runs import Json, markdown_table, measured
from benchmarks.serving.ceilings import best_images_per_s, images_per_s
from benchmarks.serving.curve import GOAL_MS, at, ends_at, goal_rate, grid
from benchmarks.serving.servers import BY_NAME, CASES, COMPUTE, OURS, SERVERS


def fragment(record: Json) -> str:
    """Return our servers beside the best peer, then every server of every table, and their upper bounds."""
    parts = [measured(record), _summary(record)]
    for table in record["tables"]:
        title = table["title"]
        parts += [
            f"### {title[0].upper()}{title[1:]}",
            f"{table.get('served', CASES[table['case']])}.",
            _servers(record, table),
            *([f"p50/p99 in ms at equal load, {title}:", _curves(table)] if record["sweeps"] else []),
        ]
    plot = f"![p99 over arrival rate]({name_of(record['device'])}.svg)"
    return "\n\n".join(
        [*parts, plot, "### Ceilings", _ceilings(record), "### Versions and settings", _settings(record)]
    )


def name_of(device: str) -> str:
    return "serving-peers" if device == "cpu" else f"serving-peers-{device}"


# -- numbers of a record --------------------------------------------------------------------------------------


def ran(table: Json) -> dict[str, Json]:
    """Return the servers of a table that did not fail, of those that there are still."""
    return {name: found for name, found in table["servers"].items() if found.get("rounds") and name in BY_NAME}


def times(ours: Json, theirs: Json) -> list[float]:
    """Return our images/s over theirs with single images, in every round."""
    pairs = zip(ours["rounds"], theirs["rounds"], strict=True)
    return [mine["closed"]["images_per_s"] / other["closed"]["images_per_s"] for mine, other in pairs]


def spread(values: Sequence[float]) -> str:
    """Format the median, minimum and maximum of ratios."""
    digits = 3 if max(values) < 1.2 else 2 if max(values) < 10 else 1
    median, low, high = (f"{value:.{digits}f}" for value in (statistics.median(values), min(values), max(values)))
    return f"{median} ×" + (f" ({low} to {high})" if len(values) > 1 else "")


def of_bare(table: Json, found: Json, phase: str) -> list[float]:
    """Return images/s of a phase over those of the best bare step, at the phase's mean batch if it has one."""
    ratios = []
    for turn, bare in zip(found["rounds"], table["bare"], strict=True):
        steps, batch = bare["step_ms"], turn[phase].get("mean_batch")
        maximum = images_per_s(steps, batch) if phase == "closed" and batch else best_images_per_s(steps)
        ratios.append(turn[phase]["images_per_s"] / maximum)
    return ratios


def of_best(table: Json, found: Json) -> list[float]:
    """Return images/s of the closed loop over those of the fastest bare step at its best batch, in every round."""
    pairs = zip(found["rounds"], table["bare"], strict=True)
    return [turn["closed"]["images_per_s"] / best_images_per_s(bare["step_ms"]) for turn, bare in pairs]


def goal(found: Json) -> float:
    """Return the highest rate with a p99 of at most :data:`~benchmarks.serving.curve.GOAL_MS`, median of the sweeps."""
    return statistics.median(map(goal_rate, found["sweeps"])) if found["sweeps"] else 0.0


def offered(table: Json) -> list[float]:
    return grid(table["slowest_peak"], [found["sweeps"] for found in ran(table).values()])


def lower_tails(table: Json, ours: Json, peers: Mapping[str, Json]) -> tuple[int, int]:
    """Return at how many of the rates that a peer sustains our p99 is lower, and the number of these rates."""
    won = total = 0
    for found in peers.values():
        for rate in offered(table):
            if (theirs := at(found["sweeps"], rate)) is not None:
                mine = at(ours["sweeps"], rate)
                won += mine is not None and mine[1] < theirs[1]
                total += 1
    return won, total


# -- tables ---------------------------------------------------------------------------------------------------


def _summary(record: Json) -> str:
    rows = []
    for table in record["tables"]:
        servers = ran(table)
        peers = {name: found for name, found in servers.items() if name not in OURS}
        for name in OURS if peers else ():
            if (ours := servers.get(name)) is None:
                continue
            ratios = {peer: times(ours, found) for peer, found in peers.items()}
            best = min(ratios, key=lambda peer: statistics.median(ratios[peer]))
            furthest = max(peers, key=lambda peer: goal(peers[peer]))
            won, total = lower_tails(table, ours, peers)
            rows.append(
                [
                    table["title"],
                    BY_NAME[name].label,
                    f"{spread(ratios[best])}, {BY_NAME[best].label}",
                    f"{won} of {total}",
                    f"{goal(ours):,.0f}/s",
                    f"{goal(peers[furthest]):,.0f}/s, {BY_NAME[furthest].label}",
                    *(
                        spread(of_bare(table, ours, phase)) if name == "psc" and table["case"] == COMPUTE else ""
                        for phase in ("closed", "many")
                    ),
                ]
            )
    header = ["table", "server", "÷ the best peer", "p99 below a peer's, rates", f"rate at a p99 of {GOAL_MS:g} ms"]
    many = f"{record['many']['images']} a request ÷ bare step"
    return markdown_table([*header, "the best peer's", "single images ÷ bare step", many], rows)


def _servers(record: Json, table: Json) -> str:
    many, on_gpu = table["case"] == COMPUTE, record["device"] != "cpu"
    header = ["server", "backend", "images/s", "psc ÷ it", "p50", "p99", "mean batch", "server CPU", "client CPU"]
    loaded = record.get("load")
    header += ["GPU busy", "÷ bare step"] if on_gpu else []
    header += [f"p99 at {loaded:.0%} of its peak"] if loaded else []
    header += ["unloaded p50", "start"]
    header += [f"images/s, {record['many']['images']} a request"] if many else []
    finished, rows = ran(table), []
    for server in SERVERS:
        if server.name not in table["servers"]:
            continue
        if (found := finished.get(server.name)) is None:
            rows.append([server.label, "did not run", *[""] * (len(header) - 2)])
            continue
        row = [
            server.label,
            found["backend"],
            f"{_middle(found, 'closed', 'images_per_s'):,.0f}{_other_statuses(found)}",
            spread(times(finished["psc"], found)) if "psc" in finished and server.name != "psc" else "",
            *(f"{_middle(found, 'closed', key):,.1f} ms" for key in ("p50_ms", "p99_ms")),
            f"{_middle(found, 'closed', 'mean_batch'):.1f}" if "mean_batch" in found["rounds"][0]["closed"] else "",
            *(f"{_cpu_ms(found, side):.2f} ms" for side in ("server", "client")),
            *([_gpu(found), spread(of_best(table, found))] if on_gpu else []),
            *([f"{_middle(found, 'loaded', 'p99_ms'):,.1f} ms"] if loaded else []),
            f"{_middle(found, 'unloaded', 'p50_ms'):,.1f} ms",
            f"{found['start_s']:.1f} s",
        ]
        several = f"{_middle(found, 'many', 'images_per_s'):,.0f}" if "many" in found["rounds"][0] else ""
        rows.append([*row, several] if many else row)
    return markdown_table(header, rows)


def _middle(found: Json, phase: str, key: str) -> float:
    return float(statistics.median(turn[phase][key] for turn in found["rounds"]))


def _cpu_ms(found: Json, side: str) -> float:
    turns = [turn["closed"] for turn in found["rounds"]]
    return statistics.median(1000 * float(turn[f"{side}_cpu_s"]) / max(1, turn["requests"]) for turn in turns)


def _gpu(found: Json) -> str:
    fractions = [turn["closed"]["gpu_utilisation"] for turn in found["rounds"] if "gpu_utilisation" in turn["closed"]]
    return f"{statistics.median(fractions):.0%}" if fractions else ""


def _other_statuses(found: Json) -> str:
    others: Counter[str] = Counter()
    for turn in found["rounds"]:
        others.update({status: count for status, count in turn["closed"]["statuses"].items() if status != "200"})
    return f" ({', '.join(f'{count} × {status}' for status, count in others.items())})" if others else ""


def _curves(table: Json) -> str:
    columns, finished = offered(table), ran(table)
    header = ["server", *(f"{rate:g}/s" for rate in columns), f"rate at a p99 of {GOAL_MS:g} ms"]
    rows = [
        [
            server.label,
            *(_point(finished[server.name], rate) for rate in columns),
            f"{goal(finished[server.name]):,.0f}/s" if goal(finished[server.name]) else "none",
        ]
        for server in SERVERS
        if server.name in finished
    ]
    return markdown_table(header, rows)


def _point(found: Json, rate: float) -> str:
    """Return the latencies of a sustained rate, or why it is not sustained."""
    if (ms := at(found["sweeps"], rate)) is not None:
        return "/".join(f"{value:.1f}" if value < 100 else f"{value:.0f}" for value in ms)
    return f"*{end}*" if (end := ends_at(found["sweeps"], rate)) else ""


def _ceilings(record: Json) -> str:
    steps = []
    for table in record["tables"]:
        for backend in table["bare"][0]["step_ms"]:
            rounds = [found["step_ms"][backend] for found in table["bare"]]
            sizes = sorted(rounds[0], key=int)
            rates = [1000 * int(size) / statistics.median(one[size] for one in rounds) for size in sizes]
            steps.append([table["title"], f"`{backend}`", *(f"{rate:,.0f}" for rate in rates)])
    header = ["bare device step, images/s", "backend", *(f"batch {size}" for size in sizes)]
    decoders = [[case, f"{rate:,.0f}"] for case, rate in record["ceilings"]["decode"].items()]
    decode = markdown_table(["decoding alone, one core", "images/s"], decoders)
    return f"{markdown_table(header, steps)}\n\n{decode}"


def _settings(record: Json) -> str:
    rows = []
    for server in SERVERS:
        entries = [table["servers"][server.name] for table in record["tables"] if server.name in table["servers"]]
        if entries:
            versions: Json = next((one["versions"] for one in entries if "versions" in one), {})
            failed = next((f"; did not run: {one['failed']}" for one in entries if "failed" in one), "")
            shown = ", ".join(f"{name} {version}" for name, version in versions.items() if name != "torch")
            rows.append([server.label, " ".join((record["settings"][server.name] + failed).split()), shown])
    return markdown_table(["server", "settings", "versions"], rows)


def draw(record: Json, folder: Path) -> None:
    """Plot p99 over arrival rate, a panel for each table with sweeps; a cross marks a rate that is not sustained."""
    tables = [table for table in record["tables"] if offered(table)]
    if not tables:
        return
    with figure(folder / f"{name_of(record['device'])}.svg", 1, len(tables), width=4.4, height=3.4) as axes:
        for axis, table in zip(axes[0], tables, strict=True):
            for index, server in enumerate(SERVERS):
                if (found := ran(table).get(server.name)) is not None:
                    _draw_curve(axis, offered(table), found, color=f"C{index}", label=server.label)
            axis.axhline(GOAL_MS, ls="--", lw=0.8, color="0.4")
            axis.set(title=table["title"], xlabel="requests/s", ylabel="p99, ms", xscale="log", yscale="log")
        axes[0][0].legend(frameon=False, fontsize=7)


def _draw_curve(axis: Any, rates: list[float], found: Json, **style: str) -> None:
    ms = {rate: at(found["sweeps"], rate) for rate in rates}
    kept = {rate: value[1] for rate, value in ms.items() if value is not None}
    axis.plot(list(kept), list(kept.values()), ".-", lw=1.2, ms=4, **style)
    end = next((rate for rate in ms if rate not in kept), None)
    if end is not None and kept:
        axis.plot([end], [max(kept.values())], "x", ms=5, color=style["color"])
