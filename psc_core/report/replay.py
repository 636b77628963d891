"""Present a replay as one page, and as lines for the terminal."""

from __future__ import annotations

from pathlib import Path

from psc_core.evaluation.replay import Fraction, Replay
from psc_core.images.decode import SMALL, as_base64, png_of
from psc_core.report.page import TEMPLATES
from psc_core.tables import aligned

_Table = tuple[str, list[str], list[list[str]]]


def to_text(replay: Replay) -> str:
    first, last = replay.days
    lines = [f"{replay.name} from {first} to {last} under the bundle {replay.version}"]
    for title, header, rows in [*_tables(replay), *_moved(replay)]:
        lines += ["", title, *aligned([header, *rows], left=range(len(header)))]
    if replay.sample:
        relabelled = replay.relabelled()
        label = f"; another label: {_cell(relabelled)}" if relabelled else ""
        lines += ["", f"another decision: {_cell(replay.flipped())}{label}"]
    return "\n".join(lines)


def write(replay: Replay, file: Path) -> None:
    """Write the page; may raise ``OSError``, and :class:`.DataError` as :func:`.replay` does."""
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
