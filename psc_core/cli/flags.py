"""The parts that the command lines share: how they begin and end, and flags of several of them."""

from __future__ import annotations

import argparse
import errno
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from psc_core.allocator import keep_freed_memory
from psc_core.errors import ExitCode, PSCError, UsageError
from psc_core.settings import by_commas, day
from psc_core.tables import print_any_text
from psc_core.version import __version__

_ENDS = "Exit codes: 0 done, 2 bad usage or bad input, 130 interrupted, 1 a failure."


def command(prog: str, description: str, example: str) -> argparse.ArgumentParser:
    """Return a command line with ``--version`` and an example below its help."""
    cli = argparse.ArgumentParser(
        prog=prog,
        description=description,
        epilog=f"{example}\n\n{_ENDS}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cli.add_argument("--version", action="version", version=f"psc {__version__}")
    return cli


def run(main: Callable[[argparse.Namespace], None], cli: argparse.ArgumentParser, argv: Sequence[str] | None) -> int:
    """Parse the flags, run ``main``, and return its errors as an :class:`psc_core.errors.ExitCode`."""
    args = cli.parse_args(argv)
    keep_freed_memory()
    print_any_text()
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
    cli.add_argument(
        "--model", metavar="NAME", help="name that the model was served under (default: the only one in the log)"
    )
    cli.add_argument("--since", type=day, metavar="DAY", help="first day of the log to use, YYYY-MM-DD")
    cli.add_argument("--until", type=day, metavar="DAY", help="last day of the log to use, YYYY-MM-DD")


def add_model_flags(cli: argparse.ArgumentParser) -> None:
    """Add the flags of a bundle that is loaded."""
    cli.add_argument("--device", default="auto", help="device: auto, cpu, cuda or cuda:N (default: auto)")
    text = "network factories that the bundle may import, as package.module:factory"
    cli.add_argument("--allow-factories", action="extend", type=by_commas, default=[], metavar="SPEC[,SPEC]", help=text)


def check_free(folder: Path, names: Iterable[str]) -> None:
    """Check that a command writes over nothing, before it computes for hours."""
    if found := [name for name in names if (folder / name).exists()]:
        raise UsageError(
            f"{folder} holds {' and '.join(found)} already; give --overwrite to replace what it holds, or another --out"
        )
