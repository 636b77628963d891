"""``psc-score``: write every output for a folder, a list or a Parquet column of images, part by part.

What needs torch is imported when images are scored: help, the version and usage errors are there at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

from psc_core import settings
from psc_core.cli import flags
from psc_core.errors import ExitCode, UsageError
from psc_core.images.files import unread_below
from psc_core.settings import COLUMN, TABLE_FORMATS

_EXAMPLE = """examples:
  psc-score --bundle bundle images --out scores                  (a folder; scores/part-00000.jsonl, …)
  psc-score --bundle bundle images.parquet --column image --out scores --format parquet
  torchrun --nproc-per-node 4 -m psc_core.cli.score --bundle bundle images --out scores
An interrupted run goes on with the same command.
An image that cannot be read is a row with its error; if all are, the exit code is 1, but with torchrun 0.
"""


def parser() -> argparse.ArgumentParser:
    cli = flags.command("psc-score", "Compute every output of a bundle for many images.", _EXAMPLE)
    text = "folder of images, table, or text file with one path per line, absolute or relative to that file's folder"
    cli.add_argument("input", type=Path, help=text)
    cli.add_argument("--bundle", type=Path, required=True, metavar="DIR", help="bundle to score with")
    cli.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the outputs, in parts")
    cli.add_argument(
        "--format", choices=TABLE_FORMATS, default=TABLE_FORMATS[0], help="format of the parts (default: jsonl)"
    )
    text = f"column of a Parquet input with encoded images or paths (default: {COLUMN})"
    cli.add_argument("--column", metavar="NAME", help=text)
    text = "folder for a grey PNG of each image, PART-ROW.png, brighter where it is more unusual"
    cli.add_argument("--maps", type=Path, metavar="DIR", help=text)
    text = "number of images in a part, the most that an interruption loses (default: 1024)"
    cli.add_argument("--part-images", type=settings.positive, default=1024, metavar="N", help=text)
    text = "score on a Ray cluster with N actors, each with a GPU where there are any (extra psc[ray])"
    cli.add_argument("--ray", type=settings.positive, metavar="N", help=text)
    text = "number of threads that decode images (default: one per CPU)"
    cli.add_argument("--threads", type=settings.positive, metavar="N", help=text)
    flags.add_model_flags(cli)
    return cli


def score(args: argparse.Namespace) -> ExitCode:
    from psc_core.bundle import read_bundle
    from psc_core.compute import LOG_SECONDS, launched_process
    from psc_core.model import load_model
    from psc_core.scoring import NamedImage, PartFolder, PartWriter, in_parts, named_images, write_on_ray, write_parts

    rank, world, gpu = launched_process()
    if args.ray and world > 1:
        raise UsageError(f"expected --ray or {world} processes of torchrun, got both; leave one out")
    device = args.device
    if world > 1 and device == "auto" and gpu is not None:
        device = f"cuda:{gpu}"
    source, out = args.input.absolute(), args.out.absolute()
    if args.maps is not None and source.is_dir():
        flags.check_outside(args.maps, "--maps", [source])
    bundle, maps = args.bundle.absolute(), None if args.maps is None else args.maps.absolute()

    def make_parts() -> Iterator[list[NamedImage]]:
        return in_parts(named_images(source, args.column), args.part_images)

    manifest, folder = read_bundle(bundle).manifest, PartFolder(out, args.format, maps)
    folder.check(manifest.version, manifest.map is not None, make_parts(), rank=rank, world=world)

    def make_writer() -> PartWriter:
        model = load_model(bundle, device=device, allow_factories=args.allow_factories)
        writer = PartWriter(model, out, args.format, args.threads, maps)
        writer.found = folder.found
        return writer

    if args.ray:
        counts = write_on_ray(make_writer, make_parts, args.ray)
    else:
        counts = write_parts(make_writer(), make_parts(), rank=rank, world=world)
    images = errors = there = 0
    seconds = 0.1 if sys.stderr.isatty() else LOG_SECONDS
    with tqdm(unit=" images", desc="scored", disable=rank > 0, mininterval=seconds) as progress:
        for count in counts:
            images, errors = images + count.images, errors + count.errors
            there += 0 if count.written else count.images
            progress.update(count.images)
    if images == 0 and rank == 0:
        raise UsageError(f"{args.input} has no images; give a folder of them, one table or a text file that has some")
    by_process = f" of process {rank}" if world > 1 else ""
    print(f"{args.out}: {images} images{by_process}, {there} of them were there already, {errors} with an error")
    if rank == 0 and (unread := unread_below(args.input)):
        print(unread)
    return ExitCode.FAILURE if errors == images and world == 1 else ExitCode.OK  # torchrun would end the others.


def main(argv: Sequence[str] | None = None) -> int:
    return flags.run(score, parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
