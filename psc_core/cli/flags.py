"""The parts that the command lines share: how they begin and end, and the flags of several of them.

The flags of the preprocessing have to describe what the network was trained with: a wrong size or filter costs accuracy
without any error.  ``--preprocess`` takes it from where it is written down: a JSON file with the fields of
:class:`psc_core.images.preprocess.Preprocess` (as under ``preprocess`` in a manifest), the transforms of torchvision's
weights, or the data configuration of a timm model.  Without it and without ``--preset``, the description of a network
that has one counts (:mod:`psc_core.network.described`).  The other flags change single fields.

What needs torch is imported when the flags have been parsed.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from psc_core import __version__
from psc_core.allocator import keep_freed_memory, let_waiting_threads_sleep
from psc_core.errors import ExitCode, PSCError, UsageError, fault, needs
from psc_core.images import BACKGROUNDS, INTERPOLATIONS, PRESET_FIELDS
from psc_core.images.files import is_hidden
from psc_core.settings import by_commas, day, positive
from psc_core.text import print_any_text

if TYPE_CHECKING:
    from psc_core.images.described import Aspect
    from psc_core.images.preprocess import Preprocess
    from psc_core.network.described import NetworkSpec


_ENDS = "Exit codes: 0 done, 2 bad usage or bad input, 130 interrupted, 1 a failure."


def command(prog: str, description: str, example: str) -> argparse.ArgumentParser:
    """Return a command line with ``--version`` and an example below its help."""
    epilog, as_written = f"{example}\n\n{_ENDS}", argparse.RawDescriptionHelpFormatter
    cli = argparse.ArgumentParser(prog=prog, description=description, epilog=epilog, formatter_class=as_written)
    cli.add_argument("--version", action="version", version=f"psc {__version__}")
    return cli


def run(main: Callable[[argparse.Namespace], Any], cli: argparse.ArgumentParser, argv: Sequence[str] | None) -> int:
    """Parse the flags, run ``main``, and return its code, or its errors as an :class:`psc_core.errors.ExitCode`."""
    args = cli.parse_args(argv)
    keep_freed_memory()
    let_waiting_threads_sleep()
    print_any_text()
    sys.path.append(str(Path.cwd()))  # Where package.module:factory specs are looked up last.
    try:
        code = main(args)
        if sys.stdout is not None:  # as where it was closed from the beginning
            sys.stdout.flush()
    except BrokenPipeError as error:  # The reader, such as head, has enough; Python writes what is left when it ends.
        if sys.stdout is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"{cli.prog}: standard output, or a connection, was closed ({error})", file=sys.stderr)
        return ExitCode.FAILURE
    except (PSCError, OSError) as error:  # OSError: a full disk, a folder that may not be written to.
        remedy = ""
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            elsewhere = f"where the results go and in {tempfile.gettempdir()}, or set TMPDIR to a folder with more"
            remedy = f"; free space {'there' if error.filename else elsewhere}"
        print(f"{cli.prog}: {error}{remedy}", file=sys.stderr)
        is_full = getattr(error.__cause__ or error, "errno", 0) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        return ExitCode.FAILURE if is_full else ExitCode.BAD_INPUT
    except KeyboardInterrupt:
        print(f"{cli.prog}: interrupted", file=sys.stderr)
        return ExitCode.INTERRUPTED
    return code or ExitCode.OK


def add_log_flags(cli: argparse.ArgumentParser) -> None:
    cli.add_argument(
        "--log", required=True, metavar="LOG", help="prediction log of psc-serve: a folder or s3://BUCKET/PREFIX"
    )
    cli.add_argument(
        "--model", metavar="NAME", help="name that the model was served under (default: the only one in the log)"
    )
    cli.add_argument("--since", type=day, metavar="DAY", help="first day of the log to use, YYYY-MM-DD")
    cli.add_argument("--until", type=day, metavar="DAY", help="last day of the log to use, YYYY-MM-DD")


def add_model_flags(cli: argparse.ArgumentParser) -> None:
    cli.add_argument("--device", default="auto", help="device: auto, cpu, cuda or cuda:N (default: auto)")
    text = "network factories that the bundle may import, as package.module:factory"
    cli.add_argument("--allow-factories", action="extend", type=by_commas, default=[], metavar="SPEC[,SPEC]", help=text)


def check_free(folder: Path, names: Iterable[str]) -> None:
    """Check that a command writes over nothing, before it computes for hours."""
    if found := [name for name in names if (folder / name).exists()]:
        raise UsageError(
            f"{folder} holds {' and '.join(found)} already; give --overwrite to replace what it holds, or another --out"
        )


def check_outside(folder: Path, flag: str, sources: Iterable[Path]) -> None:
    """Check that the images which a command writes will not be found among those that it reads."""
    for inside, source in ((folder.resolve(), each.resolve()) for each in sources):
        if inside.is_relative_to(source) and not any(map(is_hidden, inside.relative_to(source).parts)):
            raise UsageError(f"{flag} {folder} lies in {source}, whose images are read; give another folder")


DEFAULT: Final = "imagenet"  # preset for networks that say nothing of their preprocessing
_REMEDY: Final = "give a JSON file"


def add_flags(cli: argparse.ArgumentParser) -> None:
    """Add the flags that :func:`preprocess_from` reads."""
    group = cli.add_argument_group("preprocessing")
    text = f"size, colour mode and statistics (default: those in the network's folder, else {DEFAULT})"
    group.add_argument("--preset", choices=sorted(PRESET_FIELDS), help=text)
    text = "preprocessing instead of a preset: a JSON file, torchvision:ResNet50_Weights.IMAGENET1K_V2 or timm:NAME"
    group.add_argument("--preprocess", metavar="FROM", help=text)
    group.add_argument("--size", type=positive, metavar="N", help="resize to N × N pixels and crop nothing")
    group.add_argument("--resize", type=positive, metavar="N", help="length of the shorter side before --crop")
    group.add_argument("--crop", type=positive, metavar="N", help="keep the N × N pixels in the middle")
    group.add_argument("--interpolation", choices=INTERPOLATIONS, help="filter for resizing")
    text = f"background of alpha (default: the network's, else {BACKGROUNDS[0]}); none drops alpha, as torchvision does"
    group.add_argument("--background", choices=BACKGROUNDS, help=text)
    group.add_argument("--mean", type=float, nargs="+", help="mean of each channel, of pixels in [0, 1]")
    group.add_argument("--std", type=float, nargs="+", help="standard deviation of each channel, of pixels in [0, 1]")


def preprocess_from(args: argparse.Namespace, described: NetworkSpec | None = None) -> Preprocess:
    from psc_core.images.preprocess import PRESETS

    if args.size and (args.resize or args.crop):
        raise UsageError("expected --size (no crop) or --resize and --crop, got both; leave one out")
    if bool(args.resize) != bool(args.crop):
        raise UsageError("expected --resize and --crop together, got one; for no crop use --size")
    if args.preset and args.preprocess:
        raise UsageError("expected --preset or --preprocess, got both; leave one out, each is a whole preprocessing")
    if args.preprocess:
        start = read_preprocess(args.preprocess)
    elif args.preset or described is None or described.preprocess is None:
        start = PRESETS[args.preset or DEFAULT]
    else:
        start = described.preprocess
        check_unlike_replaced(start, described.unlike, args)
    changes: dict[str, Any] = {}
    if args.size or args.crop:
        side = args.size or args.crop
        changes = {"height": side, "width": side, "resize": args.resize}
        of_transformers = described is not None and start is described.preprocess and described.is_factory
        changes |= {"crop_rounding": "even"} if start.resize is None and not of_transformers else {}
    for name in ("mean", "std"):
        if getattr(args, name):
            changes[name] = tuple(getattr(args, name))
    changes |= {name: given for name in ("interpolation", "background") if (given := getattr(args, name))}
    return replace(start, **changes)


def check_unlike_replaced(near: Preprocess, unlike: Mapping[Aspect, str], args: argparse.Namespace) -> None:
    """Require flags for each part of a network's preprocessing that PSC cannot do as it is written down."""
    nearest = f"--size {near.height}" if near.resize is None else f"--resize {near.resize} --crop {near.height}"
    remedies: dict[Aspect, tuple[bool, str]] = {
        "whole": (False, "--preset or --preprocess"),
        "size": (bool(args.size or args.crop), f"{nearest}, which is near, or another size"),
        "interpolation": (bool(args.interpolation), f"--interpolation {' or '.join(INTERPOLATIONS)}"),
        "statistics": (bool(args.mean and args.std), "--mean and --std"),
    }
    for part, (is_replaced, remedy) in remedies.items():
        if part in unlike and not is_replaced:
            raise UsageError(f"{unlike[part]}; say how images are prepared by {remedy}")


def read_preprocess(source: str) -> Preprocess:
    """Read preprocessing from a JSON file, torchvision weights (``torchvision:NAME``) or timm (``timm:NAME``)."""
    library, _, name = source.partition(":")
    if library == "torchvision":
        return from_torchvision(name)
    return from_timm(name) if library == "timm" else from_file(Path(source))


def from_file(file: Path) -> Preprocess:
    from pydantic import TypeAdapter, ValidationError

    from psc_core.images.preprocess import Preprocess

    try:
        return TypeAdapter(Preprocess).validate_json(file.read_bytes())
    except OSError as error:
        raise UsageError(
            f"expected --preprocess to be a JSON file, torchvision:WEIGHTS or timm:NAME, got {file}: {error.strerror}"
        ) from error
    except ValidationError as error:
        raise UsageError(f"{file}: {fault(error.errors()[0], 'field')}") from error


def from_torchvision(name: str) -> Preprocess:
    """Return the preprocessing of torchvision's weights, named as ``ResNet50_Weights.IMAGENET1K_V2``."""
    from torchvision.models import get_weight

    from psc_core.images.described import read_torchvision, whole

    try:
        transforms = get_weight(name).transforms()
    except (ValueError, KeyError) as error:
        raise UsageError(
            f"torchvision has no weights {name!r}; they are called as ResNet50_Weights.IMAGENET1K_V2"
        ) from error
    return whole(read_torchvision(transforms, name), _REMEDY)


def from_timm(name: str) -> Preprocess:
    """Return the preprocessing of a timm model, named as ``resnet50.a1_in1k``."""
    from psc_core.images.described import read_timm, whole

    timm = needs(f"timm:{name}", "timm", "timm")
    try:
        config = timm.get_pretrained_cfg(name) if timm.is_model(name) else None
    except RuntimeError:  # The model has no weights of this tag.
        config = None
    if config is None:
        raise UsageError(f"timm has no model {name!r}")
    return whole(read_timm(asdict(config), name), _REMEDY)
