"""Draw the figures of a report, and write its page, its pictures and the model card of a bundle; a replay's page too.

The functions of figures return one, or None if there is nothing to draw.  Colours have the same meaning everywhere:
blue for images of known classes, orange for synthetic and out-of-distribution images, grey for limits."""

from __future__ import annotations

import io
import math
import shlex
from collections.abc import Sequence
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from jinja2 import Environment, PackageLoader, StrictUndefined, Template, pass_eval_context
from jinja2.nodes import EvalContext
from matplotlib import rc_context
from matplotlib.figure import Figure
from torch import Tensor

from psc_core.bundle import CARD, REPORT, Manifest, fit_command
from psc_core.collapse import CollapseReport
from psc_core.evaluation.evaluate import Report
from psc_core.evaluation.replay import Fraction, Replay
from psc_core.images.decode import SMALL, as_base64, png_of
from psc_core.model import model_class_of
from psc_core.network.described import NetworkSpec
from psc_core.report import FIGURE_FILES, FIGURES, PAGE
from psc_core.report.content import Facts, Role, ScoredSet
from psc_core.text import align, in_one_line

Figures = dict[str, Figure | None]  # figures by name; None if there is nothing to draw
KNOWN: Final = "#2b6cb0"
UNKNOWN: Final = "#c05621"
LIMIT: Final = "#555555"
TICKS: Final = 7  # number of ticks on the axis of a score, evenly spaced
_STYLE: Final[Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "text.parse_math": False,  # names may contain dollars
}


@rc_context(_STYLE)
def draw(facts: Facts) -> dict[str, Figure]:
    manifest, content = facts.manifest, facts.content
    unknown = [images for images in content.sets if images.role is Role.OOD]
    unknown = unknown or [images for images in content.sets if images.role is Role.SYNTHETIC]
    sized, size = content.sizes, (manifest.projection.c_proj, manifest.projection.d_proj)
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
    # Far from them the axis is logarithmic, so that the limit is seen among them and far images are too.
    low = min(*(float(values.quantile(0.005)) for _, values, _ in rows), math.inf if limit is None else limit)
    high = max(float(values.quantile(0.995)) for _, values, _ in rows)
    high = max(high, float(known.quantile(0.995)), low + 1e-6, low if limit is None else limit + (limit - low) / 4)
    centre, spread = float(known.median()), max(float(known.quantile(0.75) - known.quantile(0.25)), 1e-9)

    def squeeze(x: Any) -> Any:
        return np.arcsinh((np.asarray(x) - centre) / spread)

    def stretch(y: Any) -> Any:
        return centre + spread * np.sinh(y)

    edges = stretch(np.linspace(squeeze(low), squeeze(high), 80))
    figure, axis = axes_of(7.5, 0.8 + 0.42 * len(rows))
    axis.set_xscale("function", functions=(squeeze, stretch))
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
    ticks = stretch(np.linspace(squeeze(low), squeeze(high), TICKS))
    gaps = np.pad(np.diff(ticks), 1, constant_values=math.inf)
    apart = zip(ticks, map(min, gaps, gaps[1:]), strict=True)
    ticks = [round(tick, -math.floor(math.log10(gap))) for tick, gap in apart if gap > 0]
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
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


OF_METHOD: Final = frozenset({"collapse", "sizes"})  # figures for those who ask how it was fitted
_WIDE: Final = 5.0  # the width, in inches, from which a figure takes a whole line of the page
_HERE: Final = Path()  # the path of the bundle in commands, which are the same wherever the bundle lies


@pass_eval_context
def _plain(template: EvalContext, value: object) -> object:
    """Return a text without control characters, and without tags on the card; the page is escaped as a whole."""
    if not isinstance(value, str):
        return value
    plain = in_one_line(value)
    return plain if template.autoescape else plain.replace("<", "&lt;")


TEMPLATES: Final = Environment(
    loader=PackageLoader("psc_core.report", ""),
    autoescape=lambda name: name is not None and name.endswith(".html.jinja"),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    finalize=_plain,
)


def write(facts: Facts, folder: Path, measured: Report | None = None) -> Path:
    """Write :data:`PAGE` and :data:`FIGURES` into ``folder``, replacing another report, and return the page's path.

    The page of an evaluation shows what it ``measured``.
    """
    drawn = draw(facts)
    pngs = {name: png(figure) for name, figure in drawn.items()}
    words, limits = facts.of_task, facts.limits
    shown = [
        {
            "name": name,
            "title": title,
            "text": words.no_limit[name] if limits.get(name, 0) is None else text,
            "png": as_base64(pngs[name]),
            "of_method": name in OF_METHOD,
            "is_wide": drawn[name].get_figwidth() >= _WIDE,
        }
        for name, (title, text) in words.texts.items()
        if name in drawn
    ]
    page = folder / PAGE
    page.write_text(
        _template(facts, PAGE).render(
            **_values(facts),
            figures=shown,
            measured=measured,
            gallery=_gallery(facts),
            glossary=words.glossary,
            today=date.today().isoformat(),
        ),
        encoding="utf-8",
    )
    (folder / FIGURES).mkdir(exist_ok=True)  # After the page: without one, figures are somebody else's.
    _remove_figures(folder)
    for name, data in pngs.items():
        (folder / FIGURES / f"{name}.png").write_bytes(data)
    return page


def card(facts: Facts, repository: str = "") -> str:
    """Return the model card of a bundle in its folder, or in a ``repository`` of the Hugging Face hub."""
    return _template(facts, CARD).render(**_values(facts, repository))


def write_card(facts: Facts) -> None:
    (facts.folder / CARD).write_text(card(facts), encoding="utf-8")


def remove(folder: Path) -> None:
    """Remove page, figures, content and card from a bundle's folder, because after a new fit they are out of date."""
    for name in REPORT:
        (folder / name).unlink(missing_ok=True)
    _remove_figures(folder)
    with suppress(OSError):  # missing, or it holds other files, such as an evaluation's
        (folder / FIGURES).rmdir()


def _remove_figures(folder: Path) -> None:
    for name in FIGURE_FILES:
        (folder / FIGURES / name).unlink(missing_ok=True)


def serve_command(folder: Path, manifest: Manifest, name: str = "") -> str:
    """Return the command that serves a bundle, under a name of its own or that of its folder."""
    named = f"{name}={folder}" if name else str(folder)
    return f"psc-serve --bundle {shlex.quote(named)}{_permission(manifest)}"


def _permission(manifest: Manifest) -> str:
    """Return the flag that permits importing the factory of a network, if the bundle needs it."""
    network = manifest.backbone.network
    if network is None or not NetworkSpec(**dict(network)).is_factory:
        return ""
    return f" --allow-factories {shlex.quote(network.spec)}"


def _template(facts: Facts, name: str) -> Template:
    return TEMPLATES.get_template(f"{facts.of_task.templates}.{name}.jinja")


def _values(facts: Facts, repository: str = "") -> dict[str, Any]:
    images, permission = facts.of_task.test_images, _permission(facts.manifest)
    return {
        "facts": facts,
        "manifest": facts.manifest,
        "fit": fit_command(facts.manifest.model_dump(include={"provenance", "target"})),
        "repository": repository,
        "model_class": model_class_of(facts.manifest.task).__name__,
        "serve": serve_command(Path("bundle") if repository else _HERE, facts.manifest),
        "evaluate": f"psc-eval --bundle {_HERE} --id {images} --ood NAME=images/others --out report{permission}",
    }


def _gallery(facts: Facts) -> list[dict[str, Any]]:
    classes = (*facts.manifest.classes, "none of the classes")  # the last for NO_CLASS
    found: dict[int, dict[str, list[dict[str, Any]]]] = {}
    for picture in facts.content.pictures:
        entry = {
            "png": as_base64(png_of(picture.pixels.numpy(), SMALL)),
            "predicted": classes[picture.predicted],
            "right": picture.predicted == picture.label,
            "ood_score": picture.ood_score,
            "entropy": picture.entropy,
        }
        found.setdefault(picture.label, {}).setdefault(picture.why, []).append(entry)
    return [{"name": classes[label], "reasons": reasons} for label, reasons in found.items()]


_Table = tuple[str, list[str], list[list[str]]]


def replay_text(replay: Replay) -> str:
    first, last = replay.days
    lines = [f"{replay.name} from {first} to {last} under the bundle {replay.version}"]
    for title, header, rows in [*_tables(replay), *_moved(replay)]:
        lines += ["", title, *align([header, *rows], left=range(len(header)))]
    if replay.sample:
        relabelled = replay.relabelled()
        label = f"; another label: {_cell(relabelled)}" if relabelled else ""
        lines += ["", f"another decision: {_cell(replay.flipped())}{label}"]
    return "\n".join(lines)


def write_replay(replay: Replay, file: Path) -> None:
    flips = [
        {
            "before": before,
            "after": after,
            "rows": replay.count(before, after),
            "examples": [
                {
                    "png": as_base64(png_of(replay.images.image(row.position), SMALL)),
                    "label": row.after.label,
                    "changed": row.before.label != row.after.label,
                    "ood_score": row.ood_score,
                }
                for row in examples
            ],
        }
        for before, after, examples in replay.flips()
    ]
    relabelled = replay.relabelled() if replay.sample else None
    file.write_text(
        TEMPLATES.get_template("replay.html.jinja").render(
            replay=replay,
            tables=_tables(replay),
            moved=_moved(replay),
            flips=flips,
            flipped=_cell(replay.flipped()) if replay.sample else None,
            relabelled=_cell(relabelled) if relabelled else None,
        ),
        encoding="utf-8",
    )


def _tables(replay: Replay) -> list[_Table]:
    """Return the title, header and rows of each table, with logged decisions in rows and new ones in columns."""
    names = replay.decisions
    header = ["answered", *names]
    counts = [[before, *(str(replay.count(before, after)) for after in names)] for before in names]
    stored = (f"The {len(replay.rows)} logged images themselves, whatever they were stored for", header, counts)
    if not replay.sample:
        return [stored]
    cells = [[before, *(_cell(replay.fraction(before, after)) for after in names)] for before in names]
    title = f"Of all answered images, by the {len(replay.sample)} of the random sample, with 95 % intervals"
    return [(title, header, cells), stored]


def _moved(replay: Replay) -> list[_Table]:
    """Return tables of how far the numbers in the answers moved; none where answers are no numbers."""
    sets = {
        f"the numbers in all answers moved ({replay.task.number()}), by the random sample": replay.sampled_moves(),
        f"the numbers in the logged answers moved ({replay.task.number()})": replay.moves(),
    }
    return [
        (
            f"How far {title}",
            ["", "median", "largest"],
            [[each.name, f"{each.median:.4g}", f"{each.largest:.4g}"] for each in moves],
        )
        for title, moves in sets.items()
        if moves
    ]


def _cell(fraction: Fraction) -> str:
    low, high = fraction.interval
    return f"{fraction.value:.1%} ({low:.1%} to {high:.1%})"
