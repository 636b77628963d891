"""Write the results into the pages of ``benchmarks/results``, one section for each script.

    python -m benchmarks.paper.report

A section lies between ``<!-- begin NAME -->`` and ``<!-- end NAME -->`` and is replaced as a whole; the rest of
the file stays.  It is made from the JSON of the largest scale (full, else cpu); for a script without results it
shows the command to run.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.runs import RESULTS, Json, write_section

SECTIONS: Mapping[str, str] = {
    "ddu_case_study": "benchmarks.paper.ddu_case_study",
    "collapse_figure": "benchmarks.paper.collapse_figure",
    "projection_table": "benchmarks.paper.projection_table",
    "cifar10_uq": "benchmarks.paper.cifar10_uq",
    "sign_example": "benchmarks.paper.sign_example",
    "methods_table": "benchmarks.paper.methods_table",
    "ood": "benchmarks.ood.run",
    "regression": "benchmarks.regression.run",
    "regression_tables": "benchmarks.regression.tables",
}
"""Sections in order, and their scripts."""

PAGES = {"ood": "ood.md", "regression": "regression.md", "regression_tables": "regression.md"}
"""Pages of the sections that are not in ``paper.md``."""

FRAGMENTS = {"benchmarks.ood.run": "benchmarks.ood.tables"}
"""Modules whose ``fragment`` is in another one."""

KEPT_SCALES = ("full", "cpu")


def section(results: Path, name: str, module: str) -> str:
    """Text of one section."""
    for scale in KEPT_SCALES:
        file = results / f"{name}-{scale}.json"
        if file.exists():
            record: Json = json.loads(file.read_text())
            fragment: Callable[[Json], str] = importlib.import_module(FRAGMENTS.get(module, module)).fragment
            return fragment(record).strip()
    return f"## {name}\n\nNot run: `python -m {module} --scale cpu --data ROOT`."


def main(argv: list[str] | None = None) -> None:
    """Rewrite the sections."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    results = cli.parse_args(argv).results
    for name, module in SECTIONS.items():
        write_section(results / PAGES.get(name, "paper.md"), name, section(results, name, module))


if __name__ == "__main__":
    main()
