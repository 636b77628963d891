"""Write the results into the pages of ``benchmarks/results``, one section per benchmark.

    python -m benchmarks.report

A section lies between ``<!-- begin NAME -->`` and ``<!-- end NAME -->`` and is replaced as a whole; the text around it
is written by hand.  A section is made from the JSON of the largest scale (full, else cpu).
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path

from benchmarks.runs import RESULTS, plain_parser

SECTIONS: Mapping[str, tuple[str, str]] = {
    "ddu_case_study": ("paper.md", "benchmarks.paper.ddu_case_study"),
    "collapse_figure": ("paper.md", "benchmarks.paper.collapse_figure"),
    "projection_table": ("paper.md", "benchmarks.paper.projection_table"),
    "cifar10_uq": ("paper.md", "benchmarks.paper.cifar10_uq"),
    "ood": ("ood.md", "benchmarks.ood.tables"),
    "maps": ("maps.md", "benchmarks.maps"),
    "ood-pretrained": ("pretrained.md", "benchmarks.ood.tables"),
    "regression": ("regression.md", "benchmarks.regression.run"),
    "recalibration": ("recalibration.md", "benchmarks.recalibration"),
    "extension": ("recalibration.md", "benchmarks.extension"),
    "fit-scaling": ("fitting.md", "benchmarks.fit.scaling"),
    "fit-doors": ("fitting.md", "benchmarks.fit.doors"),
    "device-cpu": ("device.md", "benchmarks.device.report"),
    "device-cuda": ("device.md", "benchmarks.device.report"),
    "serving-peers": ("serving.md", "benchmarks.serving.report"),
    "serving-peers-cuda": ("serving.md", "benchmarks.serving.report"),
    "serving-load": ("serving.md", "benchmarks.serving.load"),
}
"""Maps a section to its page and to the module whose ``fragment`` makes the section from the record."""


def section(results: Path, name: str) -> str | None:
    """Return the text of a section; None without results."""
    for scale in ("-full", "-cpu", ""):
        file = results / f"{name}{scale}.json"
        if file.exists():
            text: str = importlib.import_module(SECTIONS[name][1]).fragment(json.loads(file.read_text()))
            return text.strip()
    return None


def updated(page: str, name: str, text: str) -> str:
    """Return ``page`` with a section replaced, or appended under its name if the page has none."""
    first, last = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    head, found, rest = page.partition(first)
    if found:
        return f"{head}{first}\n{text}\n{last}{rest.partition(last)[2]}"
    return f"{page.rstrip()}\n\n## {name}\n\n{first}\n{text}\n{last}\n"


def main(argv: list[str] | None = None) -> None:
    """Rewrite the sections that have results."""
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
