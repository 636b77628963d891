"""``psc-export``: write a bundle's decision as one ONNX file, and compare the runtimes that are installed.

What needs torch is imported when a bundle is read: help, the version and usage errors are there at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from psc_core.cli import flags
from psc_core.errors import NetworkError, UsageError

_EXAMPLE = """examples:
  psc-export --bundle bundle --out exported --images images/val
  psc-export --check exported          (on the machine that will run it)
"""


def parser() -> argparse.ArgumentParser:
    cli = flags.command("psc-export", "Write a bundle's decision as one ONNX file: pixels in, decision out.", _EXAMPLE)
    cli.add_argument("--bundle", type=Path, metavar="DIR", help="bundle to export")
    cli.add_argument("--out", type=Path, metavar="DIR", help="folder to write, with graph, test images and README")
    text = "folder whose first images, at most 64, travel along with their answers (default: the bundle's examples)"
    cli.add_argument("--images", type=Path, metavar="DIR", help=text)
    text = "compare the runtimes of this machine on an exported folder, instead of exporting"
    cli.add_argument("--check", type=Path, metavar="DIR", help=text)
    cli.add_argument("--overwrite", action="store_true", help="replace an exported folder at --out")
    flags.add_model_flags(cli)
    return cli


def export(args: argparse.Namespace) -> None:
    from psc_core.bundle import TRY_FOLDER
    from psc_core.export import GRAPH, README, VECTORS, check, export_model, images_below, table
    from psc_core.model import load_model

    if (args.check is None) == (args.bundle is None) or (args.bundle is None) != (args.out is None):
        raise UsageError("give --bundle DIR and --out DIR to export, or --check DIR")
    if args.check is None:
        if not args.overwrite:
            flags.check_free(args.out, [GRAPH, VECTORS, README])
        model = load_model(args.bundle, device="cpu", allow_factories=args.allow_factories)
        given = args.bundle / TRY_FOLDER if args.images is None else args.images
        export_model(model, args.out, images_below(given, must=args.images is not None))
        size = (args.out / GRAPH).stat().st_size
        print(f"wrote {args.out / GRAPH} ({size / 2**20:.1f} MiB) of {args.bundle} (version {model.version})")
    compared = check(args.check or args.out)
    print(table(compared))
    if not all(each.agrees for each in compared):
        raise NetworkError("a runtime answers differently; do not use it for this graph, and please report it")


def main(argv: Sequence[str] | None = None) -> int:
    return flags.run(export, parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
