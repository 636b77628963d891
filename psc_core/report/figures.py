"""Draw the figures of a report that all tasks share, with Matplotlib.

Each function returns one figure, or None if there is nothing to draw.  Colours have the same meaning everywhere: blue
for images of known classes, orange for synthetic and out-of-distribution images, grey for limits.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from torch import Tensor

from psc_core.collapse import CollapseReport
from psc_core.report.content import Role, ScoredSet
from psc_core.report.facts import Facts

Figures = dict[str, Figure | None]  # figures by name; None if there is nothing to draw

KNOWN: Final = "#2b6cb0"
UNKNOWN: Final = "#c05621"
LIMIT: Final = "#555555"
_STYLE: Final[Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "text.parse_math": False,  # names may contain dollars
}


@rc_context(_STYLE)
def draw(facts: Facts) -> dict[str, Figure]:
    """Draw every figure for which there is data, by name."""
    manifest, content = facts.manifest, facts.content
    sized = content.sizes
    unknown = [images for images in content.sets if images.role is Role.OOD]
    unknown = unknown or [images for images in content.sets if images.role is Role.SYNTHETIC]
    size = (manifest.projection.c_proj, manifest.projection.d_proj)
    found: Figures = {
        "collapse": None if facts.collapse is None else collapse(facts.collapse, manifest.layers),
        "sizes": sizes(sized["nc1"], sized["nc4"], size) if sized else None,
        "ood-scores": scores(content.sets, "ood_score", "OOD score, nats", facts.ood_threshold),
        "roc": None if facts.measured is None else roc(facts.measured, unknown),
        **facts.of_task.draw(facts),
    }
    return {name: figure for name, figure in found.items() if figure is not None}


@rc_context(_STYLE)
def png(figure: Figure) -> bytes:
    """Encode a drawn figure as PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def axes_of(width: float, height: float, columns: int = 1) -> tuple[Figure, Any]:
    """Return a figure of this size in inches and its axes: one, or an array of ``columns``."""
    figure = Figure(figsize=(width, height), layout="constrained", dpi=110)
    return figure, figure.subplots(1, columns)


def collapse(report: CollapseReport, chosen: Sequence[str]) -> Figure:
    """Draw NC1 and NC4 (or R²) after every layer, the cutoff ε, and the layers that PSC reads."""
    figure, axis = axes_of(7.5, 3.2)
    depth = range(len(report.layers))
    axis.plot(depth, [layer.nc1 for layer in report.layers], ".-", color=UNKNOWN, label="NC1 (variability left)")
    axis.plot(depth, [layer.quality for layer in report.layers], ".-", color=KNOWN, label=report.measure.legend)
    axis.axhline(report.epsilon, ls="--", lw=0.8, color=LIMIT, label=f"ε = {report.epsilon:g}")
    for position, layer in enumerate(report.layers):
        if layer.name in chosen:
            axis.axvspan(position - 0.4, position + 0.4, color="#f0d9b5", label=f"PSC reads {layer.name}")
    step = max(1, len(report.layers) // 25)
    axis.set_xticks(depth[::step], [layer.name for layer in report.layers[::step]], rotation=60, ha="right", fontsize=6)
    axis.set(ylim=(-0.02, 1.02), xlabel="layer, in order of execution")
    axis.legend(fontsize=7)
    return figure


def sizes(nc1: Tensor, nc4: Tensor, chosen: tuple[int, int]) -> Figure:
    """Draw NC1 and NC4 for every size of the projection, with the chosen size marked; curves if one size is fixed."""
    if 1 in nc1.shape:
        return _sizes_curve(nc1.flatten(), nc4.flatten(), max(chosen))
    figure, axes = axes_of(7.5, 3.2, 2)
    for axis, values, title in zip(axes, (nc1, nc4), ("NC1 (higher is better)", "NC4 (higher is better)"), strict=True):
        extent = (0.5, values.shape[1] + 0.5, 0.5, values.shape[0] + 0.5)
        shown = axis.imshow(
            values.numpy(), aspect="auto", origin="lower", extent=extent, cmap="viridis", interpolation="none"
        )
        figure.colorbar(shown, ax=axis)
        axis.plot(chosen[1], chosen[0], "s", ms=9, mfc="none", mec="white", mew=1.6)
        axis.set(title=title, xlabel="spatial components d", ylabel="channel components c")
    return figure


def _sizes_curve(nc1: Tensor, nc4: Tensor, chosen: int) -> Figure:
    figure, axis = axes_of(7.5, 3.2)
    components = range(1, len(nc1) + 1)
    axis.plot(components, nc1.numpy(), color=UNKNOWN, label="NC1 (higher is better)")
    axis.plot(components, nc4.numpy(), color=KNOWN, label="NC4 (higher is better)")
    axis.plot([chosen] * 2, [float(nc1[chosen - 1]), float(nc4[chosen - 1])], "s", ms=9, mfc="none", mec=LIMIT, mew=1.6)
    axis.set(ylim=(-0.02, 1.02), xlabel="components")
    axis.legend(fontsize=7)
    return figure


def scores(sets: Sequence[ScoredSet], score: str, title: str, limit: float | None) -> Figure | None:
    """Draw a histogram for each set of images, or each group of a set, on one axis with the limit of the decision."""
    rows = [(name, values, images.role) for images in sets for name, values in _groups(images, score)]
    if not rows:
        return None
    known = torch.cat([values for _, values, role in rows if role.is_known] or [rows[0][1]])
    # In-distribution images set the range, so that far outliers do not squeeze them into a few bins.
    low = min(*(float(values.quantile(0.005)) for _, values, _ in rows), math.inf if limit is None else limit)
    high = max(float(values.quantile(0.9)) for _, values, _ in rows)
    high = max(high, float(known.quantile(0.995)), low + 1e-6 if limit is None else limit + (limit - low) / 4)
    edges = np.linspace(low, high, 80)
    figure, axis = axes_of(7.5, 0.8 + 0.42 * len(rows))
    for row, (_, values, role) in enumerate(rows):
        counts, _ = np.histogram(values.clamp(low, high).numpy(), edges)
        base = len(rows) - 1 - row
        colour = KNOWN if role.is_known else UNKNOWN
        axis.stairs(
            base + 0.9 * counts / max(counts.max(), 1), edges, baseline=base, fill=True, color=colour, alpha=0.8
        )
        if limit is not None:
            above = float((values > limit).double().mean())
            axis.text(1.01, base + 0.3, f"{above:.1%} above", transform=axis.get_yaxis_transform(), fontsize=7)
    if limit is not None:
        axis.axvline(limit, ls="--", lw=1, color=LIMIT)
    axis.set_yticks([len(rows) - 1 - row + 0.3 for row in range(len(rows))], [name for name, _, _ in rows])
    axis.tick_params(axis="y", length=0)
    axis.set(xlabel=f"{title}; each set drawn to its own height, ends hold what lies beyond")
    return figure


def _groups(images: ScoredSet, score: str) -> list[tuple[str, Tensor]]:
    values: Tensor = getattr(images, score)
    parts = {name: values[positions] for name, positions in sorted(images.groups.items()) if len(positions)}
    return [(f"{images.name}: {name}", part) for name, part in parts.items()] or [(images.name, values)]


def roc(inside: ScoredSet, outside: Sequence[ScoredSet]) -> Figure | None:
    """Draw the detection rate of the OOD score against its false-alarm rate, for each set of OOD images."""
    if not outside:
        return None
    figure, axis = axes_of(3.8, 3.4)
    for number, images in enumerate(outside):
        both = torch.cat([inside.ood_score, images.ood_score])
        order = both.argsort(descending=True, stable=True)
        is_outside = order >= len(inside.ood_score)
        ends = torch.cat([both[order].diff() != 0, torch.tensor([True])])  # ties are one step
        found = is_outside.cumsum(0)[ends] / len(images.ood_score)
        alarms = (~is_outside).cumsum(0)[ends] / len(inside.ood_score)
        axis.plot([0, *alarms.tolist()], [0, *found.tolist()], lw=1, label=images.name, color=f"C{number}")
    axis.set(xlabel="false alarms", ylabel="OOD images found", xlim=(-0.01, 1), ylim=(0, 1.01))
    axis.legend(fontsize=7, loc="lower right")
    return figure
