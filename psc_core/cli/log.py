"""The commands of a prediction log: ``psc-log``, ``psc-replay`` and ``psc-recalibrate``.

``psc-log`` chooses images for people, adds their labels and removes images; ``psc-replay`` answers logged images again,
with another bundle; ``psc-recalibrate`` calibrates a bundle on the labelled random sample, as a new version.  What
needs torch is imported when images are read: help, the version and usage errors are there at once.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from psc_core import settings
from psc_core.cli import flags
from psc_core.errors import UsageError
from psc_core.settings import FRACTION, open_unit_interval, positive_number

_EXAMPLE = """examples:
  psc-log review LOG --out tasks.json --limit 200      (tasks for Label Studio, in the order of use)
  psc-log import LOG labels.json                       (its export; or a CSV, or a folder for each class)
  psc-log rename LOG OLD NEW                           (a class that is called otherwise now)
  psc-log delete LOG SHA256                            (one image, wherever it is)
  psc-log prune LOG --days 180                         (everything older)
LOG is what psc-serve --log names: a folder, or s3://BUCKET/PREFIX.
"""


def parser() -> argparse.ArgumentParser:
    cli = flags.command("psc-log", "Work with the prediction log of psc-serve.", _EXAMPLE)
    commands = cli.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, work: Callable[[argparse.Namespace], None], text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        command.add_argument("log", metavar="LOG", help="folder or s3://BUCKET/PREFIX")
        command.set_defaults(work=work)
        return command

    command = add("review", review, "write logged images as tasks for people, the most informative first")
    command.add_argument("--out", type=Path, metavar="FILE", help="tasks in Label Studio's JSON")
    command.add_argument("--csv", type=Path, metavar="FILE", help="tasks in CSV, with an empty column label")
    command.add_argument("--model", metavar="NAME", help="model whose images to choose (default: all, in turn)")
    text = "choose from the random sample only, the fair sample that psc-recalibrate needs"
    command.add_argument("--sample", action="store_true", help=text)
    command.add_argument(
        "--limit", type=settings.positive, default=200, metavar="N", help="maximum number of images (default: 200)"
    )
    text = "prefix of each image's path (default: the log's place; in --out, of a folder, /data/local-files/?d=)"
    command.add_argument("--images", metavar="PREFIX", help=text)
    text = (
        "instead of unreviewed images those reviewed as none_of_the_classes without a name, in clusters of what this "
        "bundle sees; the log gets a name for each cluster, or else --csv, for people to correct"
    )
    command.add_argument("--clusters", type=Path, metavar="BUNDLE", help=text)
    text = "replace the files of --out and --csv, with what people may have written there"
    command.add_argument("--overwrite", action="store_true", help=text)
    flags.add_model_flags(command)
    command = add("import", import_labels, "add the labels that people gave")
    text = "Label Studio's JSON or JSON-MIN, a CSV, or a folder with a folder of images for each class"
    command.add_argument("labels", type=Path, help=text)
    text = "model whose images to label (default: the one an answer names, or each that has the image and the class)"
    command.add_argument("--model", metavar="NAME", help=text)
    command = add("rename", rename_class, "label images of a class again, which has another name now or was dropped")
    command.add_argument("old", metavar="OLD", help="class that the labels name")
    command.add_argument("new", metavar="NEW", help="class that they name from now on, or none_of_the_classes")
    command.add_argument("--model", metavar="NAME", help="model whose labels to change (default: the only one)")
    command = add("delete", delete, "remove an image: its file, its labels, and its digest and path in all rows")
    command.add_argument("sha256", metavar="SHA256", help="SHA-256 of the image's file, as sha256sum prints it")
    command = add("prune", prune_log, "remove everything older than a number of days")
    command.add_argument("--days", type=settings.DAYS.parse, required=True, metavar="N", help="number of days to keep")
    return cli


def review(args: argparse.Namespace) -> None:
    from psc_core.log.labels import read_labels
    from psc_core.log.review import label_studio_prefix, path_prefix, to_csv, to_label_studio
    from psc_core.log.review import review as choose
    from psc_core.log.store import open_log

    if args.clusters is not None:
        review_clusters(args)
        return
    if args.out is None and args.csv is None:
        raise UsageError("there is nothing to write; give --out FILE, --csv FILE or both")
    log = open_log(args.log)
    chosen = choose(log, read_labels(log), model=args.model, sampled=args.sample, limit=args.limit)
    if not chosen:
        raise UsageError(f"{args.log} has no logged image without a label; see --log-images of psc-serve")
    _check_files(args)
    kinds = ((args.out, to_label_studio, label_studio_prefix), (args.csv, to_csv, path_prefix))
    for path, write, default_prefix in kinds:
        if path is not None:
            prefix = default_prefix(log) if args.images is None else args.images
            path.write_text(write(chosen, prefix), encoding="utf-8")
    print(f"{len(chosen)} images, {sum(each.is_sampled for each in chosen)} of them of the random sample")


def _check_files(args: argparse.Namespace) -> None:
    """Check that no labels that people wrote into a file are written over."""
    for file in () if args.overwrite else filter(None, (args.out, args.csv)):
        flags.check_free(file.parent, [file.name])


def review_clusters(args: argparse.Namespace) -> None:
    """Name images reviewed as none of the classes by cluster, in the log or in a CSV that ``psc-log import`` takes."""
    from psc_core.calibrate import clusters_of
    from psc_core.log.labels import LATER, NONE_OF_THE_CLASSES, OF, Label, write_labels
    from psc_core.log.review import path_prefix
    from psc_core.log.sample import labelled_data, unknown_of
    from psc_core.log.store import logged_model, open_log
    from psc_core.model import load_model

    if args.out is not None or args.sample or (args.csv is None and args.images is not None):
        raise UsageError("--clusters goes without --out and --sample, and with --images only beside --csv")
    log = open_log(args.log)
    prefix, of = path_prefix(log) if args.images is None else args.images, logged_model(log, args.model)
    model = load_model(args.clusters, device=args.device, allow_factories=args.allow_factories)
    images = [image for image in unknown_of(log, model, of) if image.label is None]
    if not images:
        raise UsageError(f"{args.log} has no image reviewed as none_of_the_classes without a name")
    _check_files(args)
    clusters = clusters_of(model, labelled_data(log, model, images))
    rows = sorted(zip(clusters, images, strict=True), key=lambda row: row[0])
    named = [(f"cluster {at + 1}", image) for at, image in rows]
    if args.csv is None:
        times = [(image.label_time or image.time) + LATER for _, image in named]
        given = [(None, None, image.sha256, NONE_OF_THE_CLASSES, name, "psc-log review") for name, image in named]
        write_labels(log, [Label(*each, time, of) for each, time in zip(given, times, strict=True)])
        then = "the page's Review tab names them (To name)"
    else:
        with args.csv.open("w", newline="", encoding="utf-8") as file:
            lines = csv.writer(file)
            lines.writerow(["image", "image_sha256", "day", "label"])
            for name, image in named:
                label = f"{NONE_OF_THE_CLASSES}{OF}{name}"
                lines.writerow([prefix + image.path, image.sha256, image.day.isoformat(), label])
        then = f"give each its name in {args.csv}, import it"
    sizes = ", ".join(str(count) for _, count in sorted(Counter(clusters).items()))
    print(f"{len(images)} images in {max(clusters) + 1} clusters: {sizes}; {then}")


def import_labels(args: argparse.Namespace) -> None:
    from psc_core.log.labels import labels_of, read_answers, write_labels
    from psc_core.log.store import open_log

    log = open_log(args.log)
    answers = [answer for answer in read_answers(args.labels) if answer.is_of(args.model)]
    if not answers:
        named = "" if args.model is None else f" for {args.model}"
        raise UsageError(f"{args.labels} has no answer{named}; label some images and export them again")
    if labels := labels_of(log, answers, args.model):
        write_labels(log, labels)
    print(f"{args.log}: {len(labels)} labels added")


def rename_class(args: argparse.Namespace) -> None:
    from psc_core.log.labels import rename
    from psc_core.log.store import logged_model, open_log

    log = open_log(args.log)
    model = logged_model(log, args.model)
    if not (count := rename(log, model, args.old, args.new)):
        raise UsageError(f"{args.log} has no image of {model} with the label {args.old}; check its spelling")
    print(f"{args.log}: {count} labels {args.old} are {args.new} now")


def delete(args: argparse.Namespace) -> None:
    from psc_core.log.erase import erase
    from psc_core.log.store import open_log

    done = erase(open_log(args.log), args.sha256)
    print(f"{args.log}: removed {done.files} files and {done.labels} labels; {done.rows} rows no longer name the image")


def prune_log(args: argparse.Namespace) -> None:
    from psc_core.log.erase import prune
    from psc_core.log.store import open_log

    done = prune(open_log(args.log), args.days)
    files = f"{done.row_files} files of rows, {done.images} images, {done.label_files} files of labels"
    print(f"{args.log}: removed {files} and {done.partial} that were never complete")


def main(argv: Sequence[str] | None = None) -> int:
    return flags.run(lambda args: args.work(args), parser(), argv)


_REPLAY_EXAMPLE = """example:
  psc-replay --bundle bundle-2 --log log --out replay.html
"""


def replay_parser() -> argparse.ArgumentParser:
    cli = flags.command("psc-replay", "Answer the logged images of a prediction log again.", _REPLAY_EXAMPLE)
    cli.add_argument("--bundle", type=Path, required=True, metavar="DIR", help="bundle that answers this time")
    flags.add_log_flags(cli)
    flags.add_model_flags(cli)
    cli.add_argument(
        "--out", type=Path, metavar="FILE", help="page to write, with the images whose answers changed most"
    )
    cli.add_argument("--overwrite", action="store_true", help="replace the page at --out")
    cli.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return cli


def replay(args: argparse.Namespace) -> None:
    from psc_core.evaluation.replay import replay as answer_again
    from psc_core.log.store import open_log
    from psc_core.model import load_model
    from psc_core.report.page import replay_text, write_replay

    if args.out and not args.overwrite:
        flags.check_free(args.out.parent, [args.out.name])
    model = load_model(args.bundle, device=args.device, allow_factories=args.allow_factories)
    found = answer_again(open_log(args.log), model, args.model, since=args.since, until=args.until)
    print(json.dumps(found.to_json(), indent=2) if args.json else replay_text(found))
    if args.out:
        write_replay(found, args.out)
        if not args.json:
            print(f"page: {args.out}")


def replay_main(argv: Sequence[str] | None = None) -> int:
    return flags.run(replay, replay_parser(), argv)


_RECALIBRATE_EXAMPLE = """example:
  psc-recalibrate --bundle bundle --log log --out bundle-2
The bundle stays as it is.  Network, density and head of the new one are the same (--extend-density gives it other
numbers in the same density, --learn another check, --add-class one more class), so it is served as fast; only reviewed
images of the log's random sample calibrate it.
"""


def recalibrate_parser() -> argparse.ArgumentParser:
    cli = flags.command(
        "psc-recalibrate", "Calibrate a bundle on the reviewed random sample of a prediction log.", _RECALIBRATE_EXAMPLE
    )
    cli.add_argument("--bundle", type=Path, required=True, metavar="DIR", help="bundle to calibrate again")
    flags.add_log_flags(cli)
    for name, text in (
        ("--alpha", "false-alarm rate of the OOD decision"),
        ("--coverage", "coverage of the prediction sets, or of the intervals of a regression"),
    ):
        cli.add_argument(name, type=open_unit_interval, metavar="RATE", help=f"{text} (default: the bundle's)")
    text = (
        "maximum error rate of clear images, for a classifier; auto: the lowest of 0.05, 0.1, 0.15 and 0.2 that can "
        "be shown (default: the bundle's, or else as auto)"
    )
    cli.add_argument("--risk", type=FRACTION.parse_or_auto, metavar="RATE|auto", default=argparse.SUPPRESS, help=text)
    text = (
        "widest interval that counts as certain, in the unit of the numbers, for a regression (default: the bundle's "
        "if one was asked for, else the width of an interval that is the same for all images)"
    )
    cli.add_argument("--max-width", type=positive_number, metavar="WIDTH", help=text)
    text = (
        "let labelled images outside the random sample extend the density, if that does no harm on synthetic OOD images"
    )
    cli.add_argument("--extend-density", action="store_true", help=text)
    text = (
        "let images reviewed as none_of_the_classes, inside and outside the random sample, become the check reviewed, "
        "if that helps on those that it has not learnt from"
    )
    cli.add_argument("--learn", action="store_true", help=text)
    text = (
        "add a class of the images outside the random sample that people named so (none_of_the_classes:NAME); those in "
        "the sample calibrate"
    )
    cli.add_argument("--add-class", metavar="NAME", help=text)
    flags.add_model_flags(cli)
    cli.add_argument("--out", type=Path, metavar="DIR", help="bundle to write (default: BUNDLE-recalibrated)")
    cli.add_argument("--overwrite", action="store_true", help="replace the bundle in --out")
    return cli


def recalibrate(args: argparse.Namespace) -> None:
    from psc_core.bundle import TRY_FOLDER, check_target
    from psc_core.calibrate import recalibrate_from_sample, seen_examples, with_class
    from psc_core.log.sample import read_named, read_outside, read_sample, read_unknown
    from psc_core.log.store import logged_model, open_log
    from psc_core.model import load_model
    from psc_core.report import page
    from psc_core.report.content import Content, facts_about

    bundle = args.bundle.resolve()
    out = args.out or bundle.with_name(f"{bundle.name}-recalibrated")
    if out.resolve() == bundle:
        raise UsageError(f"expected another --out than {args.bundle}: the old version stays, to go back to")
    if args.extend_density and args.add_class is not None:
        raise UsageError("--extend-density and --add-class do not go together; extend first, then add to the result")
    check_target(out, overwrite=args.overwrite)
    out = out.resolve()
    model = load_model(bundle, device=args.device, allow_factories=args.allow_factories)
    log, span = open_log(args.log), {"since": args.since, "until": args.until}
    if args.extend_density or args.add_class is not None:
        seen_examples(model)
    wide = model if args.add_class is None else with_class(model, args.add_class)
    sample = read_sample(log, wide, args.model, **span)
    named = None if wide is model else (wide, read_named(log, wide, args.model, **span))
    more = read_outside(log, model, args.model, **span) if args.extend_density else None
    unknown = read_unknown(log, wide, args.model, **span) if args.learn else None
    asked = {name: getattr(args, name) for name in ("alpha", "coverage", "max_width")}
    changes = {name: value for name, value in asked.items() if value is not None}
    changes |= {name: value for name, value in vars(args).items() if name == "risk"}
    print(sample.summary(), flush=True)
    found = recalibrate_from_sample(model, sample, changes, more, unknown, named)
    print(*found.lines, *(f"warning: {text}" for text in found.warnings), sep="\n")
    manifest = found.model.save(out)
    if (bundle / TRY_FOLDER).is_dir():
        shutil.copytree(bundle / TRY_FOLDER, out / TRY_FOLDER, symlinks=True, dirs_exist_ok=True)
    page.remove(out)
    page.write_card(facts_about(out, manifest, found.model.calibration, Content(manifest.version)))
    print(f"wrote {out} (version {manifest.version}, from {model.version})")
    print(f"next: {page.serve_command(out, manifest, logged_model(log, args.model))}")


def recalibrate_main(argv: Sequence[str] | None = None) -> int:
    return flags.run(recalibrate, recalibrate_parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
