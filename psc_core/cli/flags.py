"""The common parts of the command lines: how they end, and types of arguments."""

from __future__ import annotations

import argparse
import errno
import io
import json
import math
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from psc_core.compute.allocator import keep_freed_memory
from psc_core.errors import ExitCode, PSCError, UsageError
from psc_core.rates import check_fraction
from psc_core.version import __version__

_ENDS = "Exit codes: 0 done, 2 bad usage or bad input, 130 interrupted, 1 a failure."
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def command(prog: str, description: str, example: str) -> argparse.ArgumentParser:
    """A command line with ``--version`` and an example below its help."""
    cli = argparse.ArgumentParser(
        prog=prog,
        description=description,
        epilog=f"{example}\n\n{_ENDS}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cli.add_argument("--version", action="version", version=f"psc {__version__}")
    return cli


def run(main: Callable[[argparse.Namespace], None], cli: argparse.ArgumentParser, argv: Sequence[str] | None) -> int:
    """Parse, run, and turn errors into :class:`psc_core.errors.ExitCode`."""
    args = cli.parse_args(argv)
    keep_freed_memory()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # A terminal may lack some of the tables' characters.
    sys.path.append(str(Path.cwd()))  # Where package.module:factory specs are looked up last.
    try:
        main(args)
    except (PSCError, OSError) as error:  # OSError: a full disk, a folder that may not be written to.
        is_full = isinstance(error, OSError) and error.errno == errno.ENOSPC and not error.filename
        where = f"; free space in {tempfile.gettempdir()}, or set TMPDIR to a folder with more" if is_full else ""
        print(f"{cli.prog}: {error}{where}", file=sys.stderr)
        return ExitCode.BAD_INPUT
    except KeyboardInterrupt:
        print(f"{cli.prog}: interrupted", file=sys.stderr)
        return ExitCode.INTERRUPTED
    return ExitCode.OK


def add_log_flags(cli: argparse.ArgumentParser) -> None:
    """Add the flags that choose rows of a prediction log."""
    cli.add_argument("--model", metavar="NAME", help="by which it was served (default: the only one in the log)")
    cli.add_argument("--since", type=day, metavar="DAY", help="first day of the log to use, YYYY-MM-DD")
    cli.add_argument("--until", type=day, metavar="DAY", help="last day of the log to use, YYYY-MM-DD")


def add_model_flags(cli: argparse.ArgumentParser) -> None:
    """Add the flags of a bundle that is loaded."""
    cli.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    text = "network factories package.module:factory that the bundle may import"
    cli.add_argument("--allow-factories", action="extend", type=by_commas, default=[], metavar="SPEC[,SPEC]", help=text)


def check_free(folder: Path, names: Iterable[str]) -> None:
    """Check that a command writes over nothing, before it computes for hours.

    Raises:
        UsageError: The folder has an entry of one of these names.
    """
    if found := [name for name in names if (folder / name).exists()]:
        raise UsageError(
            f"{folder} holds {' and '.join(found)} already; give --overwrite to replace what it holds, or another --out"
        )


def check_no_bundle(out: Path, is_allowed: bool) -> None:
    """Check that a bundle is not replaced unless that is allowed.

    Raises:
        UsageError: ``out`` holds one.
    """
    from psc_core.bundle.io import is_bundle

    if not is_allowed and is_bundle(out):
        raise UsageError(f"{out} holds a bundle already; give --overwrite to replace it, or another --out")


def by_commas(text: str) -> list[str]:
    """The parts of ``a,b``; for flags with ``action="extend"``."""
    return [part.strip() for part in text.split(",") if part.strip()]


def key_values(pairs: Sequence[str]) -> dict[str, Any]:
    """``["a=1", "b=x"]`` → ``{"a": 1, "b": "x"}``: values are JSON where they parse, text elsewhere."""
    result: dict[str, Any] = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or not key:
            raise UsageError(f"expected key=value, got {pair!r}")
        try:
            result[key] = json.loads(value)
        except ValueError:
            result[key] = value
    return result


def day(text: str) -> str:
    """A day as YYYY-MM-DD (argparse type)."""
    try:
        if date.fromisoformat(text).isoformat() == text:
            return text
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"expected a day as YYYY-MM-DD, got {text!r}")


def positive(text: str, wanted: str = "a positive integer") -> int:
    """A positive integer (argparse type)."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected {wanted}, got {text!r}")
    return int(text)


def whole(text: str) -> int:
    """Zero or a positive integer (argparse type)."""
    return 0 if text == "0" else positive(text, "0 or a positive integer")


def positive_or_auto(text: str) -> int | None:
    """``"auto"`` → None, else a positive integer (argparse type)."""
    return None if text == "auto" else positive(text, "a positive integer or auto")


def seed(text: str) -> int:
    """A seed (argparse type)."""
    if not text.isdecimal() or int(text) >= 1 << 63:
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 to 2**63 - 1, got {text!r}")
    return int(text)


def byte_count(text: str) -> int:
    """``"512M"``, ``"2G"`` or a number of bytes (argparse type)."""
    match = re.fullmatch(r"(\d+)([kmg]?)i?b?", text.strip().lower())
    if not match or int(match[1]) < 1:
        raise argparse.ArgumentTypeError(f"expected a size such as 512M or 2G, got {text!r}")
    return int(match[1]) * _UNITS[match[2]]


def positive_number(text: str) -> float:
    """A finite number above 0 (argparse type)."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value


def open_unit_interval(text: str) -> float:
    """A number strictly between 0 and 1 (argparse type)."""
    try:
        value = float(text)
        check_fraction(value, "a number")
    except (ValueError, UsageError) as error:
        raise argparse.ArgumentTypeError(f"expected a number between 0 and 1, got {text!r}") from error
    return value
