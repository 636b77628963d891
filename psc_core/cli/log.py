"""``psc-log``: choose images of a prediction log for people, add their answers, and remove images."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from psc_core import settings
from psc_core.cli import flags
from psc_core.errors import UsageError

_EXAMPLE = """examples:
  psc-log review LOG --out tasks.json --limit 200      (tasks for Label Studio, in the order of use)
  psc-log import LOG labels.json                       (its export; or a CSV, or a folder for each class)
  psc-log delete LOG SHA256                            (one image, wherever it is)
  psc-log prune LOG --days 180                         (everything older)
LOG is what psc-serve --log names: a folder, or s3://BUCKET/PREFIX.
"""


def parser() -> argparse.ArgumentParser:
    """Return the command line of ``psc-log``."""
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
    command = add("import", import_labels, "add the labels that people gave")
    text = "Label Studio's JSON or JSON-MIN, a CSV, or a folder with a folder of images for each class"
    command.add_argument("labels", type=Path, help=text)
    text = "model whose images to label (default: each one that has the image and the class)"
    command.add_argument("--model", metavar="NAME", help=text)
    command = add("delete", delete, "remove an image: its file, its labels, and its digest and path in all rows")
    command.add_argument("sha256", metavar="SHA256", help="SHA-256 of the image's file, as sha256sum prints it")
    command = add("prune", prune_log, "remove everything older than a number of days")
    command.add_argument("--days", type=settings.positive, required=True, metavar="N", help="number of days to keep")
    return cli


def review(args: argparse.Namespace) -> None:
    """Write the images that people should look at as tasks."""
    from psc_core.log.labels import read_labels
    from psc_core.log.review import label_studio_prefix, path_prefix, to_csv, to_label_studio
    from psc_core.log.review import review as choose
    from psc_core.log.store import open_log

    if args.out is None and args.csv is None:
        raise UsageError("there is nothing to write; give --out FILE, --csv FILE or both")
    log = open_log(args.log)
    chosen = choose(log, read_labels(log), model=args.model, sampled=args.sample, limit=args.limit)
    if not chosen:
        raise UsageError(f"{args.log} has no logged image without a label; see --log-images of psc-serve")
    kinds = ((args.out, to_label_studio, label_studio_prefix), (args.csv, to_csv, path_prefix))
    for path, write, default_prefix in kinds:
        if path is not None:
            prefix = default_prefix(log) if args.images is None else args.images
            path.write_text(write(chosen, prefix), encoding="utf-8")
    print(f"{len(chosen)} images, {sum(each.is_sampled for each in chosen)} of them of the random sample")


def import_labels(args: argparse.Namespace) -> None:
    """Add the answers of people to a log as labels."""
    from psc_core.log.labels import labels_of, read_answers, write_labels
    from psc_core.log.store import open_log

    log = open_log(args.log)
    labels = labels_of(log, read_answers(args.labels), args.model)
    if not labels:
        raise UsageError(f"{args.labels} has no answer; label some images and export them again")
    write_labels(log, labels)
    print(f"{args.log}: {len(labels)} labels added")


def delete(args: argparse.Namespace) -> None:
    """Remove one image from a log."""
    from psc_core.log.erase import erase
    from psc_core.log.store import open_log

    done = erase(open_log(args.log), args.sha256)
    print(f"{args.log}: removed {done.files} files and {done.labels} labels; {done.rows} rows no longer name the image")


def prune_log(args: argparse.Namespace) -> None:
    """Remove everything that is older than some days."""
    from psc_core.log.erase import prune
    from psc_core.log.store import open_log

    done = prune(open_log(args.log), args.days)
    files = f"{done.row_files} files of rows, {done.images} images, {done.label_files} files of labels"
    print(f"{args.log}: removed {files} and {done.partial} that were never complete")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``psc-log``."""
    return flags.run(lambda args: args.work(args), parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
