"""Draw the figures of the benchmarks as reproducible SVG."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

COLOURS = {"in-distribution": "#3b6ea8", "ambiguous": "#d99000", "out-of-distribution": "#b03a48"}


@contextmanager
def figure(file: Path, rows: int, columns: int, *, width: float = 4.2, height: float = 2.9) -> Iterator[Any]:
    """Yield a grid of axes (rows, columns), and save the figure when the block ends."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    style: Any = {"svg.hashsalt": "psc", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    with mpl.rc_context(style):
        canvas, axes = plt.subplots(
            rows, columns, figsize=(width * columns, height * rows), squeeze=False, layout="constrained"
        )
        yield axes
        canvas.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
        plt.close(canvas)


def histograms(groups: Mapping[str, Tensor], bins: int = 60) -> dict[str, Any]:
    """Return the fraction of each group in common bins; the first bin also holds values below the 2 % quantile."""
    together = torch.cat([values.double() for values in groups.values()])
    low = min(float(values.double().quantile(0.02)) for values in groups.values())
    high = float(together.max())
    edges = torch.linspace(low, max(high, low + 1e-6), bins + 1, dtype=torch.float64)
    fractions = {
        name: torch.histogram(values.double().clamp(low, edges[-1].item()), edges).hist / len(values)
        for name, values in groups.items()
    }
    return {"edges": edges.tolist(), "fractions": {name: fraction.tolist() for name, fraction in fractions.items()}}


def draw_histograms(axis: Any, counts: Mapping[str, Any], *, title: str, xlabel: str) -> None:
    """Draw the output of :func:`histograms` as step histograms."""
    for name, fraction in counts["fractions"].items():
        axis.stairs(fraction, counts["edges"], fill=True, alpha=0.45, color=COLOURS[name], label=name)
    axis.set(title=title, xlabel=xlabel, ylabel="fraction of images")


def draw_layers(
    axis: Any,
    series: Mapping[str, Sequence[float]],
    boxes: Mapping[str, Sequence[int]],
    *,
    title: str,
    cutoff: float | None = None,
) -> None:
    """Draw a value at every layer for several networks, with boxes around chosen layers."""
    for index, (name, values) in enumerate(series.items()):
        colour = f"C{index}"
        axis.plot(range(len(values)), values, ".-", lw=1, ms=4, color=colour, label=name)
        for at in boxes.get(name, ()):
            axis.plot([at], [values[at]], "s", ms=11, mfc="none", mec=colour, mew=1.4)
    if cutoff is not None:
        axis.axhline(cutoff, ls="--", lw=0.8, color="0.4")
    axis.set(title=title, xlabel="layer, in order of execution", ylim=(-0.02, 1.02))


def draw_sizes(
    axis: Any, values: Sequence[Sequence[float]], sizes: Sequence[int], *, title: str, cutoff: float | None = None
) -> None:
    """Draw a value against d_proj, one line for each c_proj; ``values[c − 1]`` belongs to c_proj = c."""
    from matplotlib import colormaps

    colours = colormaps["viridis"]
    for index, c in enumerate(sizes):
        row = values[c - 1]
        axis.plot(
            range(1, len(row) + 1), row, lw=1.2, color=colours(index / max(1, len(sizes) - 1)), label=f"c_proj {c}"
        )
    if cutoff is not None:
        axis.axhline(cutoff, ls="--", lw=0.8, color="0.4")
    axis.set(title=title, xlabel="d_proj", ylim=(-0.02, 1.02))
