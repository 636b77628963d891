"""``psc-replay``: answer the logged images of a log again, with another bundle or another version of it.

What needs torch is imported when images are read: help, the version and usage errors are there at once.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from psc_core.cli import flags

_EXAMPLE = """example:
  psc-replay log bundle-2 --out replay.html
"""


def parser() -> argparse.ArgumentParser:
    """Return the command line of ``psc-replay``."""
    cli = flags.command("psc-replay", "Answer the logged images of a prediction log again.", _EXAMPLE)
    cli.add_argument("log", metavar="LOG", help="prediction log of psc-serve: a folder or s3://BUCKET/PREFIX")
    cli.add_argument("bundle", type=Path, help="bundle that answers this time")
    flags.add_log_flags(cli)
    flags.add_model_flags(cli)
    cli.add_argument(
        "--out", type=Path, metavar="FILE", help="page to write, with the images whose answers changed most"
    )
    cli.add_argument("--overwrite", action="store_true", help="replace the page at --out")
    cli.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return cli


def replay(args: argparse.Namespace) -> None:
    """Answer the images again, print the differences, and write the page."""
    from psc_core.evaluation.replay import replay as answer_again
    from psc_core.log.store import open_log
    from psc_core.model import load_model
    from psc_core.report.replay import to_text, write

    if args.out and not args.overwrite:
        flags.check_free(args.out.parent, [args.out.name])
    model = load_model(args.bundle, device=args.device, allow_factories=args.allow_factories)
    found = answer_again(open_log(args.log), model, args.model, since=args.since, until=args.until)
    print(json.dumps(found.to_json(), indent=2) if args.json else to_text(found))
    if args.out:
        write(found, args.out)
        if not args.json:
            print(f"page: {args.out}")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``psc-replay``."""
    return flags.run(replay, parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
