"""The record of :mod:`benchmarks.serving.peers` as targets, tables and a plot."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.plots import figure
from benchmarks.runs import Json, markdown_table, where, write_section
from benchmarks.serving.ceilings import SIZES, best_images_per_s, images_per_s, least_tail_ms
from benchmarks.serving.histogram import survival
from benchmarks.serving.servers import BY_NAME, COMPUTE, OVERHEAD, SERVERS

PLOT = "serving-peers.svg"
TIMES_PEERS, TIMES_MOSEC, OF_BARE, OF_BARE_MANY, TAIL = 5.0, 1.0, 0.95, 0.90, 3.0
_FIVE_TIMES = ("litserve", "bentoml", "ray", "fastapi")


def step_ms(record: Json, network: str) -> dict[str, float]:
    """Of the bare device step by batch size: the mean of before and after; empty when it was not measured."""
    found = [
        record["bare"][name]["step_ms"]
        for when in ("before", "after")
        if (name := f"{network}, {when}") in record["bare"]
    ]
    return {str(size): statistics.fmean(one[str(size)] for one in found) for size in SIZES} if found else {}


def targets(record: Json) -> list[Json]:
    """What must hold, what was measured, and whether it holds; a peer that did not run is left out."""
    checks: list[tuple[str, bool, str]] = []
    small, large = (_ran(record["servers"][network]) for network in (OVERHEAD, COMPUTE))
    for ours in ("psc", "psc-workers"):
        if ours in small:
            label, rate = BY_NAME[ours].label, small[ours]["closed"]["requests_per_s"]
            for name, least in (*((name, TIMES_PEERS) for name in _FIVE_TIMES), ("mosec", TIMES_MOSEC)):
                if name in small:
                    ratio = rate / small[name]["closed"]["requests_per_s"]
                    what = f"{OVERHEAD}, single images: {label} ≥ {least:g} × {BY_NAME[name].label}"
                    checks.append((what, ratio >= least, f"{ratio:.2f} ×"))
    bare = step_ms(record, COMPUTE)
    if "psc" in large:
        ours_found = large["psc"]
        rate, batch = ours_found["closed"]["images_per_s"], ours_found["closed"].get("mean_batch")
        if bare and batch:
            share = rate / images_per_s(bare, batch)
            what = f"{COMPUTE}, single images ÷ bare step at the mean batch ({batch:g}) ≥ {OF_BARE:g}"
            checks.append((what, share >= OF_BARE, f"{share:.3f}"))
        peers = {name: found["closed"]["images_per_s"] for name, found in large.items() if not BY_NAME[name].ours}
        if peers:
            best = max(peers, key=peers.__getitem__)
            what = f"{COMPUTE}, single images: above every peer"
            checks.append((what, rate > peers[best], f"{rate / peers[best]:.2f} × the best ({BY_NAME[best].label})"))
        if bare and "many" in ours_found:
            share = ours_found["many"]["images_per_s"] / best_images_per_s(bare)
            count = record["many"]["images"]
            what = f"{COMPUTE}, requests of {count} images ÷ bare step at its best batch ≥ {OF_BARE_MANY:g}"
            checks.append((what, share >= OF_BARE_MANY, f"{share:.3f}"))
    for network, servers in ((COMPUTE, large), (OVERHEAD, small)):
        if "psc" in servers and "steady" in servers["psc"]:
            ratio = _tail(servers["psc"])
            what = f"{network}, open loop at 70 % of the peak: p99 ≤ {TAIL:g} × the unloaded median"
            checks.append((what, ratio <= TAIL, f"{ratio:.1f} ×{_least_tail(record, network)}"))
    return [{"target": what, "met": met, "measured": value} for what, met, value in checks]


def _ran(servers: Mapping[str, Json]) -> dict[str, Json]:
    return {name: found for name, found in servers.items() if "failed" not in found}


def _tail(found: Json) -> float:
    return float(found["steady"]["p99_ms"] / found["unloaded"]["p50_ms"])


def _least_tail(record: Json, network: str) -> str:
    """What the same arrivals would give a server that costs nothing but its device steps."""
    bare = step_ms(record, network)
    if not bare:
        return ""
    per_s = record["servers"][network]["psc"]["steady"]["requests_per_s"]
    least = least_tail_ms(bare, per_s)
    return f"; {least / bare['1']:.1f} × for a server that costs nothing but these steps (simulated)"


def section(record: Json) -> str:
    """The record as Markdown."""
    env, seconds = record["environment"], record["seconds"]
    merged = any(found["run"] != record["run"] for servers in record["servers"].values() for found in servers.values())
    lines = [
        f"{where(env)}.",
        f"One PNG digit a request, {record['clients']} clients in a closed loop, {seconds:g} s a phase after a "
        "warm-up. The load generator is one process, pinned to no core; "
        f"client and server share the {env['cpus']} cores, so CPU time of both is given.",
        "Every server runs the same bundle on the same torch and its answer was checked against the library's; peers "
        "decode with torchvision and answer only probabilities, entropy, log density and p-value, psc-serve its whole "
        "answer.",
        "Unloaded: one client in a closed loop. Latencies at 70 % of a server's own peak count from when a request was "
        "due, Poisson arrivals.",
        *([record["note"]] if record["note"] else []),
        *(["† measured in another run and merged."] if merged else []),
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
    lines += ["", "### Ceilings", "", _ceilings(record), "", f"![throughput and latency]({PLOT})"]
    lines += ["", "### Versions and settings", "", _settings(record)]
    return "\n".join(lines)


def _table(record: Json, network: str) -> str:
    many = network == COMPUTE
    header = ["server", "images/s", "psc ÷ it", "p50", "p99", "mean batch", "server CPU", "client CPU"]
    header += ["unloaded p50", "p99 at 70 %", "÷ unloaded p50"]
    header += [f"images/s, {record['many']['images']} a request"] if many else []
    servers = record["servers"][network]
    ours = servers.get("psc", {}).get("closed", {}).get("images_per_s")
    rows = []
    for server in SERVERS:
        if (found := servers.get(server.name)) is None:
            continue
        label = server.label + (" †" if found["run"] != record["run"] else "")
        if "failed" in found:
            rows.append([label, "did not run", *[""] * (len(header) - 2)])
            continue
        closed, steady, quiet = found["closed"], found.get("steady", {}), found["unloaded"]
        row = [
            label,
            f"{closed['images_per_s']:,.0f}" + _refused(closed),
            f"{ours / closed['images_per_s']:.2f}" if ours else "",
            *(_ms(closed, key) for key in ("p50_ms", "p99_ms")),
            f"{closed['mean_batch']:.1f}" if "mean_batch" in closed else "",
            *(_cpu(closed, key) for key in ("server_cpu_s", "client_cpu_s")),
            _ms(quiet, "p50_ms"),
            _ms(steady, "p99_ms") + _refused(steady),
            f"{_tail(found):.1f}" if "p99_ms" in steady else "",
        ]
        rows.append([*row, f"{found['many']['images_per_s']:,.0f}" if "many" in found else ""] if many else row)
    return markdown_table(header, rows)


def _ms(phase: Json, key: str) -> str:
    return f"{phase[key]:,.1f} ms" if key in phase else ""


def _cpu(phase: Json, key: str) -> str:
    return f"{1000 * phase[key] / max(1, phase['requests']):,.2f} ms"


def _refused(phase: Json) -> str:
    others = {status: count for status, count in phase.get("statuses", {}).items() if status != "200"}
    return f" ({', '.join(f'{count} × {status}' for status, count in others.items())})" if others else ""


def _ceilings(record: Json) -> str:
    rows = []
    for network in (OVERHEAD, COMPUTE):
        if found := step_ms(record, network):
            rates = ", ".join(f"{1000 * size / found[str(size)]:,.0f} at {size}" for size in SIZES)
            name = f"model only, {network}: bare device step, images/s by batch size"
            rows.append([name, rates])
    ceilings = record["ceilings"]
    if "decode" in ceilings:
        rows.append(["decode only: `app.decoding`, one core, images/s", f"{ceilings['decode']:,.0f}"])
    for name, text in (
        ("bare", "HTTP only: uvicorn and an application with constant bytes, requests/s"),
        ("instant", "psc-serve with a network that answers at once, requests/s"),
    ):
        if name in ceilings:
            found = ceilings[name]
            rows.append([text, f"{found['requests_per_s']:,.0f} ({_cpu(found, 'server_cpu_s')} server CPU a request)"])
    return markdown_table(["ceiling", "measured"], rows)


def _settings(record: Json) -> str:
    rows = []
    for server in SERVERS:
        networks = [servers[server.name] for servers in record["servers"].values() if server.name in servers]
        found = next((one["versions"] for one in networks if "versions" in one), {})
        failed = next((one["failed"] for one in networks if "failed" in one), None)
        shown = ", ".join(f"{name} {version}" for name, version in found.items() if name != "torch")
        text = record["settings"][server.name] + (f"; did not run: {failed}" if failed else "")
        rows.append([server.label, " ".join(text.split()), shown])
    return markdown_table(["server", "settings", "versions"], rows)


def draw(record: Json, folder: Path) -> None:
    """Throughput of each server, and the share of answers that took longer than a latency."""
    with figure(folder / PLOT, 2, 2, width=4.6, height=3.0) as axes:
        for column, network in enumerate((OVERHEAD, COMPUTE)):
            servers = _ran(record["servers"][network])
            shown = [server for server in SERVERS if server.name in servers]
            colours = {server.name: f"C{index}" for index, server in enumerate(SERVERS)}
            rates = [servers[server.name]["closed"]["images_per_s"] for server in shown]
            bars: Any = axes[0][column]
            bars.barh([server.label for server in shown], rates, color=[colours[server.name] for server in shown])
            bars.invert_yaxis()
            bars.set(title=f"{network}, {record['clients']} clients", xlabel="images/s")
            tails: Any = axes[1][column]
            for server in shown:
                if "steady" in servers[server.name]:
                    edges, shares = survival(servers[server.name]["steady"]["histogram"])
                    tails.step(edges, shares, color=colours[server.name], label=server.label, lw=1.2)
            tails.set(
                title="at 70 % of its own peak",
                xlabel="latency, ms",
                ylabel="share that took longer",
                xscale="log",
                yscale="log",
                ylim=(1e-4, 1.1),
            )
        axes[1][0].legend(frameon=False, fontsize=7)


def write_report(record: Json, folder: Path) -> None:
    """The plot and the section of ``README.md``."""
    draw(record, folder)
    write_section(folder, "serving-peers", section(record), "Serving against peers")
