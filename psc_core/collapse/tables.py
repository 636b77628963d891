"""A collapse report as text for a terminal and as CSV."""

from __future__ import annotations

import csv
import io

from psc_core.collapse.report import NC4, Candidate, CollapseReport


def to_text(report: CollapseReport, candidate: Candidate) -> str:
    """A table of all layers with the candidate marked and its reason below."""
    width = max(len("layer"), *(len(entry.name) for entry in report.layers))
    lines = [f"{'#':>4}  {'layer':<{width}}  {'kind':<8}  {'channels×spatial':>16}  {'NC1':>7}  {report.measure:>7}"]
    for entry in report.layers:
        marks = ["◀ candidate"] if entry.name in candidate.layers else []
        marks += [entry.role] if entry.role != "hidden" else []
        size = f"{entry.shape[0]}×{entry.shape[1]}"
        numbers = f"{entry.nc1:7.4f}  {entry.nc4:7.4f}"
        line = f"{entry.index:>4}  {entry.name:<{width}}  {entry.kind:<8}  {size:>16}  {numbers}"
        lines.append("  ".join([line, *marks]))
    lines.append(f"candidate: {candidate.reason}")
    lines += [f"note: {note}" for note in candidate.notes]
    if report.penultimate not in candidate.layers:
        lines.append(f"penultimate: {report.named(report.layer(report.penultimate))}, for comparison (DDU)")
    return "\n".join(lines)


def to_csv(report: CollapseReport) -> str:
    """One line per layer, with a header."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        ["index", "layer", "kind", "channels", "spatial", "role", "nc1", "nc4" if report.measure == NC4 else "r2"]
    )
    for entry in report.layers:
        writer.writerow([entry.index, entry.name, entry.kind, *entry.shape, entry.role, entry.nc1, entry.nc4])
    return text.getvalue()
