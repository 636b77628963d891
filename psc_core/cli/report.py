"""``psc-report``: draw the report of a bundle again, from what its fit kept beside it.

What needs torch is imported when the page is drawn: help, the version and usage errors are there at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from psc_core.cli import flags

_EXAMPLE = """example:
  psc-report --bundle bundle --out public
"""


def parser() -> argparse.ArgumentParser:
    """Return the command line of ``psc-report``."""
    text = "Draw a bundle's report again, from what its fit kept; a classifier's has pictures of validation images."
    cli = flags.command("psc-report", text, _EXAMPLE)
    cli.add_argument("--bundle", type=Path, required=True, metavar="DIR", help="bundle that psc-fit wrote")
    cli.add_argument("--out", type=Path, metavar="DIR", help="folder for report.html (default: the bundle's)")
    cli.add_argument("--overwrite", action="store_true", help="replace a report outside the bundle too")
    return cli


def report(args: argparse.Namespace) -> None:
    """Write the page and say where it is."""
    from psc_core.bundle import read_bundle
    from psc_core.report import FIGURES, PAGE, page
    from psc_core.report.content import Content
    from psc_core.report.facts import facts_of

    out = args.out or args.bundle
    if out.resolve() != args.bundle.resolve() and not args.overwrite:
        flags.check_free(out, (PAGE, FIGURES))
    out.mkdir(parents=True, exist_ok=True)
    bundle = read_bundle(args.bundle)
    facts = facts_of(bundle, Content.load(args.bundle, type(bundle.manifest.task)))
    print(facts.to_text())
    print(f"report: {page.write(facts, out)}")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``psc-report``."""
    return flags.run(report, parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
