"""The record of :mod:`benchmarks.serving.peers` as targets, tables and a plot."""

from __future__ import annotations

import statistics
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.plots import figure
from benchmarks.runs import Json, markdown_table, where, write_section
from benchmarks.serving.curve import FACTOR, GOAL_MS, LIMIT_MS, at, ends_at
from benchmarks.serving.servers import CASES, COMPUTE, SERVERS
from benchmarks.serving.targets import goal, offered, ran, targets, times


def name_of(device: str) -> str:
    """Name of record, plot and section."""
    return "serving-peers" if device == "cpu" else f"serving-peers-{device}"


def _middle(found: Json, phase: str, key: str) -> float:
    return float(statistics.median(turn[phase][key] for turn in found["rounds"]))


def section(record: Json) -> str:
    """The record as Markdown."""
    env, tables = record["environment"], record["tables"]
    lines = [
        f"{where(env)}; vector instructions: {' '.join(env['cpu_flags'])}.",
        f"One image a request; {record['clients']} clients in a closed loop, one for the unloaded latency; "
        f"{record['seconds']:g} s a phase. The load generator is one process, pinned to no core; "
        f"client and server share the {env['cpus']} cores, so the CPU time of both is given.",
        "All servers of a table run at once, suspended except the one whose turn it is. "
        f"Each had {max(len(table['bare']) for table in tables)} turns in closed loops: numbers are medians over them, "
        "ratios are medians of the ratios within a round, with minimum and maximum.",
        "Every server runs the same bundle on the same torch and was checked against the library. Peers decode digits "
        "with torchvision and photographs with Pillow; they answer only probabilities, entropy, log density and "
        "p-value, psc-serve its whole response.",
        "*Instruction set*: all servers of a table start with the same `ONEDNN_MAX_CPU_ISA` and `ATEN_CPU_CAPABILITY`. "
        "*Backend*: psc-serve chooses its own by measuring, peers run the library's default. ONNX Runtime (`onnx`) "
        "ignores both variables and uses what the CPU has; Pillow and torchvision do too.",
        f"Equal load: Poisson arrivals at the same rates for all, from a quarter of the slowest peer's peak in steps "
        f"of {FACTOR:g} up to each one's end: over 1 % errors, answers that fall behind, or a p99 above "
        f"{LIMIT_MS / 1000:g} s. Latencies count from when a request was due. Medians of {record['sweeps']} sweeps.",
        *([record["note"]] if record["note"] else []),
        "",
        f"    {record['command']}",
        "",
        markdown_table(
            ["target", "measured", "met"],
            [[one["target"], one["measured"], "yes" if one["met"] else "**no**"] for one in targets(record)],
        ),
    ]
    for table in tables:
        title = table["title"]
        lines += ["", f"### {title[0].upper()}{title[1:]}", "", f"{CASES[table['case']]}.", "", _table(record, table)]
        lines += ["", f"p50/p99 in ms at equal load, {title}:", "", _curves(table)]
    lines += ["", f"![p99 over arrival rate]({name_of(record['device'])}.svg)"]
    lines += ["", "### Ceilings", "", _ceilings(record)]
    lines += ["", "### Versions and settings", "", _settings(record)]
    return "\n".join(lines)


def _table(record: Json, table: Json) -> str:
    many = table["case"] == COMPUTE
    on_gpu = record["device"] != "cpu"
    header = ["server", "backend", "images/s", "psc ÷ it", "p50", "p99", "mean batch", "server CPU", "client CPU"]
    header += ["GPU busy"] if on_gpu else []
    header += ["unloaded p50", "start"]
    header += [f"images/s, {record['many']['images']} a request"] if many else []
    servers = table["servers"]
    finished = ran(servers)
    rows = []
    for server in SERVERS:
        if server.name in servers and server.name not in finished:
            rows.append([server.label, "did not run", *[""] * (len(header) - 2)])
        if (found := finished.get(server.name)) is None:
            continue
        row = [
            server.label,
            found["backend"],
            f"{_middle(found, 'closed', 'images_per_s'):,.0f}" + _other_statuses(found, "closed"),
            str(times(finished["psc"], found)) if "psc" in finished and server.name != "psc" else "",
            *(f"{_middle(found, 'closed', key):,.1f} ms" for key in ("p50_ms", "p99_ms")),
            f"{_middle(found, 'closed', 'mean_batch'):.1f}" if "mean_batch" in found["rounds"][0]["closed"] else "",
            *(
                f"{statistics.median(_cpu_ms(turn['closed'], side) for turn in found['rounds']):.2f} ms"
                for side in ("server", "client")
            ),
            *([_gpu(found)] if on_gpu else []),
            f"{_middle(found, 'unloaded', 'p50_ms'):,.1f} ms",
            f"{found['start_s']:.1f} s",
        ]
        several = f"{_middle(found, 'many', 'images_per_s'):,.0f}" if "many" in found["rounds"][0] else ""
        rows.append([*row, several] if many else row)
    return markdown_table(header, rows)


def _curves(table: Json) -> str:
    columns = offered(table)
    header = ["server", *(f"{rate:g}/s" for rate in columns), f"rate at a p99 of {GOAL_MS:g} ms"]
    rows = []
    for server in SERVERS:
        if (found := ran(table["servers"]).get(server.name)) is not None:
            cells = [_cell(found, rate) for rate in columns]
            rows.append([server.label, *cells, f"{goal(found):,.0f}/s" if goal(found) else "none"])
    return markdown_table(header, rows)


def _cell(found: Json, rate: float) -> str:
    """Latencies of a sustained rate, or why it is not sustained."""
    if (ms := at(found["sweeps"], rate)) is not None:
        return "/".join(f"{value:.1f}" if value < 100 else f"{value:.0f}" for value in ms)
    return f"*{end}*" if (end := ends_at(found["sweeps"], rate)) else ""


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
    for table in record["tables"]:
        for backend in table["bare"][0]["step_ms"]:
            rounds = [found["step_ms"][backend] for found in table["bare"]]
            rates = {size: 1000 * int(size) / statistics.median(one[size] for one in rounds) for size in rounds[0]}
            text = ", ".join(f"{rate:,.0f} at {size}" for size, rate in rates.items())
            rows.append(
                [f"model only, {table['title']}: bare device step on `{backend}`, images/s by batch size", text]
            )
    ceilings = record["ceilings"]
    for case, rate in ceilings.get("decode", {}).items():
        rows.append([f"decode only, {case}: one core, images/s", f"{rate:,.0f}"])
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
        shares = [table["servers"][server.name] for table in record["tables"] if server.name in table["servers"]]
        if not shares:
            continue
        found = next((one["versions"] for one in shares if "versions" in one), {})
        failed = next((one["failed"] for one in shares if "failed" in one), None)
        shown = ", ".join(f"{name} {version}" for name, version in found.items() if name != "torch")
        text = record["settings"][server.name] + (f"; did not run: {failed}" if failed else "")
        rows.append([server.label, " ".join(text.split()), shown])
    return markdown_table(["server", "settings", "versions"], rows)


def draw(record: Json, folder: Path) -> None:
    """p99 over arrival rate, a panel for each table; a cross marks a rate that is not sustained."""
    tables = record["tables"]
    with figure(folder / f"{name_of(record['device'])}.svg", 1, len(tables), width=4.4, height=3.4) as axes:
        for axis, table in zip(axes[0], tables, strict=True):
            for index, server in enumerate(SERVERS):
                if (found := ran(table["servers"]).get(server.name)) is not None:
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


def write_report(record: Json, folder: Path) -> None:
    """The plot and the section of ``serving.md``."""
    draw(record, folder)
    title = "Serving against peers" + ("" if record["device"] == "cpu" else f", {record['device']}")
    write_section(folder / "serving.md", name_of(record["device"]), section(record), title)
