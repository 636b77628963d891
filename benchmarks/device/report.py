"""``device-*.json`` as a section of ``benchmarks/results/device.md``: targets first, then the tables."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.device.backends import SIZES
from benchmarks.device.subjects import MEMBERS, SAMPLES
from benchmarks.runs import RESULTS, Json, where, write_section

PARTS = ("standardise", "backbone", "projection", "density", "head", "pack")


def section(results: Path) -> str:
    """The text of the results of all devices."""
    reports = {
        kind: json.loads(file.read_text())
        for kind in ("cpu", "cuda")
        if (file := results / f"device-{kind}.json").exists()
    }
    missing = ["Not measured on a GPU: `python -m benchmarks.device.run --device cuda`."]
    parts = [_device(kind, report) for kind, report in reports.items()] + ([] if "cuda" in reports else missing)
    return "\n\n".join(parts)


def write_report(results: Path = RESULTS) -> None:
    """Rewrite the section from the results of all devices."""
    write_section(results / "device.md", "device", section(results))


def targets(kind: str, report: Json) -> list[tuple[str, str, str, str]]:
    """Quantity, target, measured value, and whether the target is met."""
    rows = []
    for name, subject in report["subjects"].items():
        best = best_batches(subject["cells"])
        rows.append(
            (
                f"{name}: PSC step ÷ plain forward, images/s, best batch of each",
                "≥ 1.0×",
                "; ".join(f"{precision} {plain:.2f}×, fused {fused:.2f}×" for precision, plain, fused in best),
                _met(*(ratio >= 1.0 for row in best for ratio in row[1:])),
            )
        )
    for name, subject in report["subjects"].items():
        cells = [cell for cell in subject["cells"] if "tail_fraction" in cell]
        low, high = (pick(cells, key=lambda cell: cell["tail_fraction"]) for pick in (min, max))
        rows.append(
            (
                f"{name}: projection + density + head",
                "≤ 10 % of the step",
                f"{low['tail_fraction']:.1%} ({_where(low)}) to {high['tail_fraction']:.1%} ({_where(high)})",
                _met(*(cell["tail_fraction"] <= 0.1 for cell in cells)),
            )
        )
    for row in report.get("large_tail", []):
        rows.append(
            (
                f"projection + density ({row['density']}, {row['components']} components) + head alone, "
                "1,000 classes, 2,048 features, batch 64",
                "≤ 1 ms on a GPU",
                f"{row['ms']:.2f} ms",
                _met(row["ms"] <= 1.0) if kind == "cuda" else "no GPU",
            )
        )
    for name, subject in report["subjects"].items():
        for entry in subject["alternatives"]:
            over = {name: value[0] for name, value in entry["over_psc"].items()}
            rows.append(
                (
                    f"{name}: {MEMBERS}-member ensemble, {SAMPLES}-sample MC dropout ÷ PSC, time",
                    "≥ 5×",
                    f"ensemble {over['ensemble']:.1f}×, {over['ensemble_fused']:.1f}× fused; "
                    f"MC dropout {over['mc_dropout_fused']:.1f}× fused ({_where(entry)})",
                    _met(*(value >= 5.0 for value in over.values())),
                )
            )
    return rows


def best_batches(cells: Sequence[Json]) -> list[tuple[str, float, float]]:
    """By precision: PSC's images/s over those of the plain and of the fused network, each at its best batch."""
    rows = []
    for precision in dict.fromkeys(cell["precision"] for cell in cells):
        own = [cell for cell in cells if cell["precision"] == precision]
        speed = {name: max(cell["bucket"] / cell["ms"][name] for cell in own) for name in own[0]["ms"]}
        rows.append((precision, speed["psc"] / speed["plain"], speed["psc"] / speed["plain_fused"]))
    return rows


def _met(*which: bool) -> str:
    return "yes" if all(which) else "in part" if any(which) else "**no**"


def _where(cell: Json) -> str:
    return f"{cell['precision']}, batch {cell['bucket']}"


def _device(kind: str, report: Json) -> str:
    limits = next(iter(report["subjects"].values()))["limits"] if report["subjects"] else None
    lines = [
        f"## {kind.upper()}",
        "",
        f"{where(report['environment'])}.",
        "",
        f"    {report['command']}",
        "",
        "A step is what the service runs: uint8 images on the host to outputs on the host.  *Plain* is the whole "
        "original network from the same images to softmax, in the same precision, memory format and mode; *fused* also "
        "fuses the operations that the PSC's backbone fuses.  Ratios are medians over rounds in which variants took "
        "turns, quartiles in brackets.  Only the first network is fitted; the others have random weights, and a random "
        "projection, density and head of the shapes that a fit gives.  *Tied*: one covariance for all classes.  "
        "*Tail*: projection, density and head.",
        "",
        "| quantity | target | measured | met |",
        "| --- | --- | --- | --- |",
        *(f"| {what} | {target} | {got} | {met} |" for what, target, got, met in targets(kind, report)),
    ]
    if limits is not None:
        speeds = ", ".join(f"{name} {value / 1e9:,.0f} GFLOP/s" for name, value in limits["operations_per_s"].items())
        lines += [
            "",
            f"Floor: the time of the operations at the speed of a plain matrix product ({speeds}), or of the bytes "
            f"that they read and write at the speed of a plain copy ({limits['bytes_per_s'] / 1e9:,.1f} GB/s), "
            "whichever is larger; data in a cache can beat the second.",
        ]
    lines += ["", *_steps(report), "", *_parts(report)]
    if "backends" in report:
        lines += ["", *_backends(report["backends"])]
    return "\n".join(lines)


def _steps(report: Json) -> Iterator[str]:
    columns = "PSC, ms | plain, ms | fused, ms | plain ÷ PSC | fused ÷ PSC | fused ÷ PSC, tied | step ÷ floor"
    yield f"| network, layer | precision | mode | batch | {columns} |"
    yield "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    for name, subject in report["subjects"].items():
        for cell in subject["cells"]:
            ms = cell["ms"]
            tied = cell.get("tied_throughput_over_plain_fused")
            floor = f"{cell['step_over_floor']:.2f}" if "step_over_floor" in cell else "—"
            yield (
                f"| {name}, `{subject['layer']}` | {cell['precision']} | {cell['mode']} | {cell['bucket']} "
                f"| {ms['psc']:.2f} | {ms['plain']:.2f} | {ms['plain_fused']:.2f} "
                f"| {_spread(cell['throughput_over_plain'])} | {_spread(cell['throughput_over_plain_fused'])} "
                f"| {'—' if tied is None else _spread(tied)} | {floor} |"
            )


def _parts(report: Json) -> Iterator[str]:
    yield f"| network | precision | batch | {' | '.join(f'{name}, ms' for name in PARTS)} | tail ÷ step |"
    yield f"| --- | --- | ---: | {'---: | ' * len(PARTS)}---: |"
    for name, subject in report["subjects"].items():
        for cell in subject["cells"]:
            if "parts_ms" in cell:
                times = " | ".join(f"{cell['parts_ms'][part]:.3f}" for part in PARTS)
                yield f"| {name} | {cell['precision']} | {cell['bucket']} | {times} | {cell['tail_fraction']:.1%} |"


def _backends(sets: Json) -> Iterator[str]:
    yield (
        "The shipped bundle in float32 on each backend of the service and compiled, beside the whole network without "
        "PSC; *start* is from the loaded bundle to the last first batch, compiling included.  The backend that the "
        "service chose is in bold.  ONNX Runtime ignores the variables that choose the instruction set and uses what "
        "the CPU has."
    )
    yield ""
    columns = " | ".join(f"{size}, ms" for size in SIZES)
    yield f"| instruction set | variant | start | {columns} | ÷ whole network, slowest to fastest batch |"
    yield f"| --- | --- | ---: | {'---: | ' * len(SIZES)}---: |"
    for instructions, found in sets.items():
        for name, row in found["variants"].items():
            label = f"| {instructions} | {f'**{name}**' if name == found['chosen'] else name} "
            if "failed" in row:
                yield f"{label}| failed: {' '.join(row['failed'].split())} | {'| ' * len(SIZES)}|"
                continue
            over = sorted(median for median, _, _ in row["over_whole"].values())
            times = " | ".join(f"{row['ms'][str(size)]:.2f}" for size in SIZES)
            yield f"{label}| {row['start_s']:.1f} s | {times} | {over[-1]:.2f}–{over[0]:.2f}× |"


def _spread(ratio: list[float]) -> str:
    return f"{ratio[0]:.2f}× ({ratio[1]:.2f}–{ratio[2]:.2f})"
