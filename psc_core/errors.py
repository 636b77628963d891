"""The error tree, one class for each arrow of the pipeline, and helpers for error messages.

Messages say what is wrong and what to do.  The command line prints them in one line and exits with code 2; the service
maps them to HTTP in one table (``app/errors.py``).
"""

from __future__ import annotations

import inspect
import os
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from enum import IntEnum
from importlib import import_module
from pathlib import Path
from typing import Any, Final


class ExitCode(IntEnum):
    """The exit codes of the command lines."""

    OK = 0
    FAILURE = 1  # a bug or a failed device; Python itself exits with 1 after a traceback
    BAD_INPUT = 2  # bad usage or bad input, reported in one line; argparse uses the same code
    INTERRUPTED = 130  # Ctrl-C, 128 + SIGINT; psc-serve exits with OK instead, because a signal is how it is stopped


class PSCError(Exception):
    """The base class of every error that this project raises on purpose."""


class UsageError(PSCError):
    """A command-line flag or function argument that cannot be used."""


class DataError(PSCError):
    """A data set that is missing, empty, or laid out wrongly."""


class NetworkError(PSCError):
    """A network or its weights that cannot be built, loaded, traced or cut."""


class FitError(PSCError):
    """Features from which the model cannot be fitted."""


class BundleError(PSCError):
    """A bundle that is missing, damaged, of another schema, or that names a factory that is not on the allow-list."""


class ImageError(PSCError):
    """An image that cannot be used; the subclasses say why."""


class UnsupportedImage(ImageError):
    """Bytes that are no image of a supported format, or an intact image of a kind that is not read."""


class ImageTooLarge(ImageError):
    """An image whose header claims more pixels than the limit."""


class UndecodableImage(ImageError):
    """An image of a supported format whose data is damaged, or made to be expensive to decode."""


class DeviceError(PSCError):
    """A failure of the compute device, after which the process should be replaced."""


class LoaderWarning(UserWarning):
    """A loader that can be read, but whose images may void the guarantees of a model."""


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line by which a program called this package, however deep the cause lies."""
    frame, level, outermost = inspect.currentframe(), 0, 0
    while frame is not None:
        level += 1
        name = str(frame.f_globals.get("__name__"))
        # Behind our outermost frame may lie that of a decorator.
        if name.startswith(f"{__package__}.") or (name == "contextlib" and outermost == level - 1):
            outermost = level
        frame = frame.f_back
    warnings.warn(text, category, stacklevel=outermost + 1)


def needs(what: str, extra: str, *modules: str, error: type[PSCError] = UsageError) -> Any:
    """Import the modules of an optional dependency and return the last, or raise ``error``: ``what`` needs it."""
    try:
        return [import_module(name) for name in modules][-1]
    except ModuleNotFoundError as missing:
        raise error(f"{what} needs {missing.name or modules[-1]}; pip install 'psc[{extra}]'") from missing
    except ImportError as broken:
        name = next((module for module in modules if module not in sys.modules), modules[-1])
        raise error(f"{what} needs {name}, which cannot be imported: {broken}; install it again") from broken


def import_from(module: str, name: str, *, error: type[PSCError]) -> Any:
    """Return the attribute ``name`` of a user's module, which may be a training script."""
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError):
        raise
    except (Exception, SystemExit) as failed:  # SystemExit: argparse, which takes our arguments for its own.
        raise error(
            f"importing {module} runs it, which failed with {type(failed).__name__}: {failed}; put what only a run of "
            'it as a program should do below if __name__ == "__main__":'
        ) from failed


def of_this_machine(error: OSError | ImportError) -> str:
    """Return the cause and the cure of an error for which a file that was read is not to blame."""
    if isinstance(error, ImportError):
        return f"a package cannot be imported ({error.name or type(error).__name__}, see the log); install psc again"
    cause = shorten(error.strerror or type(error).__name__)
    return f"{cause}; free space there, or set TMPDIR and TORCHINDUCTOR_CACHE_DIR to folders that may be written to"


def join_names(names: Sequence[str], at_most: int) -> str:
    """Join the first ``at_most`` names for a message, with an ellipsis if there are more."""
    return ", ".join(names[:at_most]) + (", …" if len(names) > at_most else "")


EXPORTED: Final = ("model.onnx", "model-any-size.onnx")  # the graphs of a folder of psc-export, which is no bundle


def why_no_bundle(folder: Path) -> str:
    """Return why a folder is no bundle, and what to do; empty if it has a manifest."""
    manifest = folder / "manifest.json"
    try:
        manifest.stat()
        return ""
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        return f"user {os.geteuid()} cannot read {manifest} ({error.strerror}); check the path and its permissions"
    if any((folder / graph).exists() for graph in EXPORTED):
        return (
            f"{folder} was written by psc-export and is no bundle; give the bundle that it came from, "
            "as in psc-serve --bundle BUNDLE"
        )
    return f"{folder} is not a bundle, it has no manifest.json; make one with psc-fit"


def shorten(text: str, at_most: int = 200) -> str:
    """Return the text, or its beginning and end if it is long; input from outside may have any length."""
    half = at_most // 2
    return text if len(text) <= at_most else f"{text[:half]}…{text[-half:]}"


def hint(name: str, known: Sequence[str], otherwise: str | None = None) -> str:
    """Return the end of a message about a name that is not known: the nearest known names, or else all of them."""
    near = get_close_matches(name, known)
    if not near:
        return otherwise or f"they are {', '.join(known)}"
    return f"did you mean {', '.join(near)}?"


_OBJECT: Final = "expected an object"
_WHOLE: Final = "expected a whole number"
_BOOL: Final = "expected true or false"
# The messages of pydantic's errors by their type; pydantic's own name Python's classes.
_FAULTS: Final[Mapping[str, str]] = {
    "missing": "expected a value, got none",
    "extra_forbidden": "unknown; leave it out",
    "model_type": _OBJECT,
    "model_attributes_type": _OBJECT,
    "dict_type": _OBJECT,
    "list_type": "expected a list",
    "string_type": "expected text",
    "int_type": _WHOLE,
    "int_parsing": _WHOLE,
    "int_from_float": _WHOLE,
    "float_type": "expected a number",
    "float_parsing": "expected a number",
    "finite_number": "expected a finite number",
    "bool_type": _BOOL,
    "bool_parsing": _BOOL,
    "literal_error": "expected {expected}",
    "greater_than": "expected more than {gt:.15g}",
    "greater_than_equal": "expected at least {ge:.15g}",
    "less_than": "expected less than {lt:.15g}",
    "less_than_equal": "expected at most {le:.15g}",
    "string_too_short": "expected at least {min_length} characters",
    "string_too_long": "expected at most {max_length} characters",
    "string_pattern_mismatch": "expected text that matches {pattern}",
    "too_short": "expected at least {min_length} items",
    "too_long": "expected at most {max_length} items",
}


def fault(item: Any, noun: str = "") -> str:
    """Format an error that pydantic found as ``"noun where: message"``."""
    where, ours = ".".join(map(str, item["loc"])), _FAULTS.get(item["type"])
    message = ours.format_map(item.get("ctx", {})) if ours else item["msg"].removeprefix("Value error, ")
    return f"{noun} {where}: {message}".lstrip() if where else message


def all_faults(items: Iterable[Any], noun: str = "") -> str:
    """Join the :func:`fault` of every item into one line."""
    return "; ".join(fault(item, noun) for item in items)
