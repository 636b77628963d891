"""``psc-recalibrate``: calibrate a bundle on a random sample of its requests that people reviewed, as a new version.

What needs torch is imported when images are read: help, the version and usage errors are there at once.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from psc_core.cli import flags
from psc_core.errors import UsageError
from psc_core.settings import FRACTION, open_unit_interval, positive_number

_EXAMPLE = """example:
  psc-recalibrate bundle --log log --out bundle-2
The bundle stays as it is.  Network, density and head of the new one are the same (--extend-density gives it other
numbers in the same density), so it is served as fast; only reviewed images of the log's random sample calibrate it.
"""


def parser() -> argparse.ArgumentParser:
    """Return the command line of ``psc-recalibrate``."""
    cli = flags.command(
        "psc-recalibrate", "Calibrate a bundle on the reviewed random sample of a prediction log.", _EXAMPLE
    )
    cli.add_argument("bundle", type=Path, help="bundle to calibrate again")
    cli.add_argument(
        "--log", required=True, metavar="LOG", help="prediction log of psc-serve: a folder or s3://BUCKET/PREFIX"
    )
    flags.add_log_flags(cli)
    for name, text in (
        ("--alpha", "false-alarm rate of the OOD decision"),
        ("--coverage", "coverage of the prediction sets, or of the intervals of a regression"),
    ):
        cli.add_argument(name, type=open_unit_interval, metavar="RATE", help=f"{text} (default: the bundle's)")
    text = (
        "maximum error rate of accepted images, for a classifier; auto: the lowest of 0.05, 0.1, 0.15 and 0.2 that can "
        "be shown (default: the bundle's, or else as auto)"
    )
    cli.add_argument("--risk", type=FRACTION.parse_or_auto, metavar="RATE|auto", default=argparse.SUPPRESS, help=text)
    text = (
        "widest interval that counts as certain, in the unit of the numbers, for a regression (default: the bundle's)"
    )
    cli.add_argument("--max-width", type=positive_number, metavar="WIDTH", help=text)
    text = (
        "let labelled images outside the random sample extend the density, if that does no harm on synthetic OOD images"
    )
    cli.add_argument("--extend-density", action="store_true", help=text)
    flags.add_model_flags(cli)
    cli.add_argument("--out", type=Path, metavar="DIR", help="bundle to write (default: BUNDLE-recalibrated)")
    cli.add_argument("--overwrite", action="store_true", help="replace the bundle in --out")
    return cli


def recalibrate(args: argparse.Namespace) -> None:
    """Read the log, calibrate the bundle again, and write the new version."""
    from psc_core.bundle import TRY_FOLDER, check_target
    from psc_core.log.store import open_log
    from psc_core.model import load_model
    from psc_core.recalibrate import read_outside, read_sample, recalibrate_from_sample, seen_examples
    from psc_core.report import page
    from psc_core.report.content import Content
    from psc_core.report.facts import facts_about

    bundle = args.bundle.resolve()
    out = args.out or bundle.with_name(f"{bundle.name}-recalibrated")
    if out.resolve() == bundle:
        raise UsageError(f"expected another --out than {args.bundle}: the old version stays, to go back to")
    check_target(out, overwrite=args.overwrite)
    out = out.resolve()
    model = load_model(bundle, device=args.device, allow_factories=args.allow_factories)
    log, span = open_log(args.log), {"since": args.since, "until": args.until}
    if args.extend_density:
        seen_examples(model)
    sample = read_sample(log, model, args.model, **span)
    more = read_outside(log, model, args.model, **span) if args.extend_density else None
    asked = {name: getattr(args, name) for name in ("alpha", "coverage", "max_width")}
    changes = {name: value for name, value in asked.items() if value is not None}
    changes |= {name: value for name, value in vars(args).items() if name == "risk"}
    print(sample.summary(), flush=True)
    found = recalibrate_from_sample(model, sample, changes, more)
    print(*found.lines, *(f"warning: {text}" for text in found.warnings), sep="\n")
    manifest = found.model.save(out)
    if (bundle / TRY_FOLDER).is_dir():
        shutil.copytree(bundle / TRY_FOLDER, out / TRY_FOLDER, symlinks=True, dirs_exist_ok=True)
    page.remove(out)
    page.write_card(facts_about(out, manifest, found.model.calibration, Content(manifest.version)))
    print(f"wrote {out} (version {manifest.version}, from {model.version})")
    print(f"next: {page.serve_command(out, manifest)}")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``psc-recalibrate``."""
    return flags.run(recalibrate, parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
