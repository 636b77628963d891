"""Write the results into the pages of ``benchmarks/results``, one section per benchmark.

    python -m benchmarks.report

A section lies between ``<!-- begin NAME -->`` and ``<!-- end NAME -->`` and is replaced as a whole; the text around it
is written by hand.  A section is made from the JSON of the largest scale (full, else cpu).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks import reviewed
from benchmarks.device import report as device
from benchmarks.ood import tables as ood
from benchmarks.paper import cifar10_uq, collapse_figure, ddu_case_study, projection_table
from benchmarks.regression import run as regression
from benchmarks.runs import RESULTS, Json, plain_parser
from benchmarks.serving import report as serving

# The page of each section, and what makes the section from its record.
SECTIONS: Mapping[str, tuple[str, Callable[[Json], str]]] = {
    "ddu_case_study": ("paper.md", ddu_case_study.fragment),
    "collapse_figure": ("paper.md", collapse_figure.fragment),
    "projection_table": ("paper.md", projection_table.fragment),
    "cifar10_uq": ("paper.md", cifar10_uq.fragment),
    "ood": ("ood.md", ood.fragment),
    "ood-pretrained": ("pretrained.md", ood.fragment),
    "ood-many": ("many.md", ood.fragment),
    "reviewed": ("recalibration.md", reviewed.table),
    "regression": ("regression.md", regression.fragment),
    "device-cpu": ("device.md", device.fragment),
    "device-cuda": ("device.md", device.fragment),
    "serving-peers": ("serving.md", serving.fragment),
    "serving-peers-cuda": ("serving.md", serving.fragment),
}


def section(results: Path, name: str) -> str | None:
    """Return the text of a section; None without results."""
    for scale in ("-full", "-cpu", ""):
        file = results / f"{name}{scale}.json"
        if file.exists():
            return SECTIONS[name][1](json.loads(file.read_text())).strip()
    return None


def updated(page: str, name: str, text: str) -> str:
    """Return ``page`` with a section replaced, or appended under its name if the page has none."""
    first, last = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    head, found, rest = page.partition(first)
    if found:
        return f"{head}{first}\n{text}\n{last}{rest.partition(last)[2]}"
    return f"{page.rstrip()}\n\n## {name}\n\n{first}\n{text}\n{last}\n"


def main(argv: list[str] | None = None) -> None:
    cli = plain_parser(__doc__)
    cli.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    results = cli.parse_args(argv).results
    for name, (file, _) in SECTIONS.items():
        text = section(results, name)
        if text is not None:
            page = results / file
            page.write_text(updated(page.read_text() if page.exists() else "", name, text))


if __name__ == "__main__":
    main()
