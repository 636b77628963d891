"""``psc-eval``: measure a bundle on test images, beside the detectors that people use instead.

``psc-report`` draws the report of a bundle again, from what its fit kept beside it.  What needs torch is imported when
images are measured or a page is drawn: help, the version and usage errors are there at once.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from psc_core import settings
from psc_core.cli import flags
from psc_core.data import MAX_BAD_IMAGES
from psc_core.errors import UsageError, join_names
from psc_core.images.files import is_hidden
from psc_core.report import FIGURE_FILES, FIGURES, PAGE
from psc_core.settings import BATCH_IMAGES

if TYPE_CHECKING:
    from psc_core.data.dataset import ImageDataset
    from psc_core.images.preprocess import Preprocess


WRITTEN = (PAGE, FIGURES, "report.json", "report.md")  # files that are written to ``--out``

_EXAMPLE = """example:
  psc-eval --bundle bundle --id images/test --ood textures=images/textures --out report
  psc-eval … --weights net.safetensors --train images/train --val images/val    (baselines beside PSC)
"""


def parser() -> argparse.ArgumentParser:
    description = "Measure accuracy or error, calibration, OOD detection and nominal rates of a bundle."
    cli = flags.command("psc-eval", description, _EXAMPLE)
    cli.add_argument("--bundle", type=Path, required=True, metavar="DIR", help="bundle to measure")
    cli.add_argument("--id", required=True, metavar="DIR", help="in-distribution test images, with labels or numbers")
    text = "column of the tables with the classes or numbers (default: the only one; for numbers, the bundle's)"
    cli.add_argument("--target", metavar="NAME", help=text)
    text = "out-of-distribution images: a name, and a directory or a table; may be repeated"
    cli.add_argument("--ood", action="append", default=[], metavar="NAME=DIR", help=text)
    beside = cli.add_argument_group("baselines (all three or none)")
    beside.add_argument("--weights", type=Path, metavar="FILE", help="checkpoint of the whole network, as for psc-fit")
    beside.add_argument("--train", metavar="DIR", help="training images of the fit")
    beside.add_argument("--val", metavar="DIR", help="validation images of the fit")
    flags.add_model_flags(cli)
    text = f"number of images sent through the network at once (default: {BATCH_IMAGES})"
    cli.add_argument("--batch-images", type=settings.positive, default=BATCH_IMAGES, metavar="N", help=text)
    text = "leave out up to N images that cannot be decoded; N above 0 costs another pass"
    text = f"{text} (default: {MAX_BAD_IMAGES})"
    cli.add_argument("--max-bad-images", type=settings.whole, default=MAX_BAD_IMAGES, metavar="N", help=text)
    cli.add_argument("--out", type=Path, metavar="DIR", help=f"folder for {', '.join(WRITTEN)}")
    cli.add_argument("--overwrite", action="store_true", help="replace the report in --out")
    cli.add_argument("--verbose", action="store_true", help="print all measurements too, which --out writes anyway")
    return cli


def evaluate(args: argparse.Namespace) -> None:
    """Measure the bundle, print the report, and write it where ``--out`` says."""
    from psc_core.bundle import CONTENT, read_bundle
    from psc_core.data.cache import readable
    from psc_core.data.open import folder_of, is_table, unread_files
    from psc_core.evaluation.evaluate import evaluate as measure
    from psc_core.evaluation.evaluate import (
        repeated_warning,
        seen_warning,
        shared_warning,
        shared_with,
        weights_warning,
    )
    from psc_core.model import model_class_of
    from psc_core.report import page
    from psc_core.report.content import Content, collect_test, facts_of

    given = [value is not None for value in (args.weights, args.train, args.val)]
    if any(given) and not all(given):
        raise UsageError("expected --weights, --train and --val together, or none of them")
    if args.target is not None and not any(map(is_table, filter(None, (args.id, args.train, args.val)))):
        raise UsageError(
            f"no images come from a table, so --target {args.target!r} has no effect; leave it out, or give a table"
        )
    if args.out:
        check_replaced(args.out, WRITTEN, overwrite=args.overwrite)
    bundle = read_bundle(args.bundle)
    model_class = model_class_of(bundle.manifest.task)
    model = model_class.from_bundle(bundle, device=args.device, allow_factories=args.allow_factories).probed()
    task = model.task.evaluator()
    if all(given) and not task.has_baselines:
        raise UsageError(f"a {model.task.noun} has no baselines; leave out --weights, --train and --val")
    id_data = task.open_images(model, args.id, target=args.target)
    model.task.check_images(model.classes, id_data)
    ood = open_others(args.ood, model.preprocess)
    of_ood = (line for data in ood.values() for line in unread_files(data, labelled_images=False))
    for line in (*unread_files(id_data), *id_data.notes, *of_ood):
        print(line)
    if args.out:
        flags.check_outside(args.out, "--out", filter(None, map(folder_of, (id_data, *ood.values()))))
        args.out.mkdir(parents=True, exist_ok=True)
    splits = {"train": args.train, "val": args.val} if all(given) else {}
    fitted_on = {
        split: task.open_images(model, spec, split=split, target=args.target) for split, spec in splits.items()
    }
    of_weights = weights_warning(model, args.weights) if fitted_on else ""
    opened = (id_data, *ood.values(), *fitted_on.values())
    (id_data, *others), left_out = readable(opened, args.max_bad_images)
    ood, fitted_on = dict(zip(ood, others, strict=False)), dict(zip(fitted_on, others[len(ood) :], strict=True))
    for line in left_out[:-1]:
        print(line)
    repeated, shared = map(repeated_warning, (id_data, *ood.values())), shared_with(id_data, ood)
    of_shared = (shared_warning(id_data, name, ood[name], count) for name, count in shared.items())
    told = (seen_warning(model, id_data, fitted_on), of_weights, *left_out[-1:], *repeated, *of_shared)
    warnings = tuple(filter(None, told))
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    baselines = None
    if fitted_on:
        baselines = task.open_baselines(model, args.weights, **fitted_on, batch_images=args.batch_images)
    found = measure(model, id_data, ood, baselines, batch_images=args.batch_images)
    measured = replace(found.report, warnings=warnings, shared=shared)
    text = measured.to_text(verbose=args.verbose)
    if args.out:
        (args.out / "report.json").write_text(json.dumps(measured.to_json(), indent=2) + "\n")
        (args.out / "report.md").write_text(measured.to_markdown(), encoding="utf-8")
        fitted = Content(model.version)
        if (args.bundle / CONTENT).exists():
            kept = Content.load(args.bundle, type(model.task))
            fitted = kept if kept.version == model.version else fitted
        content = fitted.extended_by(collect_test(model, id_data, ood, found))
        text += f"\nreport: {page.write(facts_of(bundle, content), args.out, measured)}"
    print(text)


def check_replaced(out: Path, names: Sequence[str], *, overwrite: bool) -> None:
    """Check that only a report is written over, and by request only; images may be in a folder `report`."""
    ours = {*WRITTEN, *(FIGURE_FILES if (out / PAGE).exists() else ())}  # An evaluation may be in the bundle's figures.
    others = sorted(file.name for file in (out / FIGURES).glob("*") if not (file.name in ours or is_hidden(file.name)))
    if others:
        raise UsageError(
            f"{out / FIGURES} holds {join_names(others, 3)}, of no report in {out}; move it away, or give another --out"
        )
    if not overwrite:
        flags.check_free(out, names)


def open_others(given: Iterable[str], preprocess: Preprocess) -> dict[str, ImageDataset]:
    """Open the out-of-distribution images of ``--ood NAME=DIR``, by name."""
    from psc_core.data.open import open_dataset

    ood: dict[str, ImageDataset] = {}
    for text in given:
        name, _, spec = text.partition("=")
        if not name or not spec:
            raise UsageError(f"expected --ood NAME=DIR, got {text!r}")
        if name in ood:
            raise UsageError(f"--ood {name}=… is given twice; use another name")
        ood[name] = open_dataset(spec, split="test", preprocess=preprocess, labelled_images=False)
    return ood


def main(argv: Sequence[str] | None = None) -> int:
    return flags.run(evaluate, parser(), argv)


_REPORT_EXAMPLE = """example:
  psc-report --bundle bundle --out public
"""


def report_parser() -> argparse.ArgumentParser:
    text = "Draw a bundle's report again, from what its fit kept; a classifier's has pictures of validation images."
    cli = flags.command("psc-report", text, _REPORT_EXAMPLE)
    cli.add_argument("--bundle", type=Path, required=True, metavar="DIR", help="bundle that psc-fit wrote")
    cli.add_argument("--out", type=Path, metavar="DIR", help="folder for report.html (default: the bundle's)")
    cli.add_argument("--overwrite", action="store_true", help="replace a report outside the bundle too")
    return cli


def report(args: argparse.Namespace) -> None:
    from psc_core.bundle import read_bundle
    from psc_core.report import page
    from psc_core.report.content import Content, facts_of

    out = args.out or args.bundle
    if out.resolve() != args.bundle.resolve():
        check_replaced(out, (PAGE, FIGURES), overwrite=args.overwrite)
    out.mkdir(parents=True, exist_ok=True)
    bundle = read_bundle(args.bundle)
    facts = facts_of(bundle, Content.load(args.bundle, type(bundle.manifest.task)))
    print(facts.to_text())
    print(f"report: {page.write(facts, out)}")


def report_main(argv: Sequence[str] | None = None) -> int:
    return flags.run(report, report_parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
