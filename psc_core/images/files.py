"""Read image files from folders that others may have filled: regular files of a bounded size only."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import BinaryIO, Final

from psc_core.errors import ImageTooLarge, UnsupportedImage, listed
from psc_core.images import SUFFIXES

MAX_FILE_BYTES: Final = 256 << 20  # maximum size of an image file, bytes
# The folder of a zip file from a Mac that holds a ``._NAME``, which is no image, for each file ``NAME``.
MAC_ARCHIVE: Final = "__MACOSX"

_SHOWN_SUFFIXES: Final = 10


SAMPLED_BYTES: Final = 64  # number of bytes that :func:`sample_file` takes at each of two places


def read_file(path: str | Path, max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """Return the content of a file or of the file that a link points to, at most ``max_bytes``."""
    with _opened(path) as (file, size):
        # A sparse file claims gigabytes that it does not store; of one that grows only this size is read.
        if size > max_bytes:
            raise ImageTooLarge(f"expected a file of at most {max_bytes} bytes, got {size}")
        return file.read(size)


def sample_file(path: str | Path) -> bytes:
    """Return a few bytes of a file that its copies have too, whatever their names, and other images hardly ever.

    They are its size, and bytes of its middle and of its end: images of one camera begin alike.
    """
    with _opened(path) as (file, size):
        parts = [size.to_bytes(8)]
        for start in (size // 2, max(0, size - SAMPLED_BYTES)):
            file.seek(start)
            parts.append(file.read(SAMPLED_BYTES))
        return b"".join(parts)


@contextmanager
def _opened(path: str | Path) -> Iterator[tuple[BinaryIO, int]]:
    """Open a regular file for reading; yields it and its size."""
    # Non-blocking, because opening a pipe blocks until somebody writes to it.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise UnsupportedImage("expected a regular file, got a pipe or a device; remove it")
        yield file, status.st_size


def is_hidden(name: str) -> bool:
    """Return whether a file or folder of this name is some program's: ``.ipynb_checkpoints``, a Mac's ``._1.jpg``."""
    return name.startswith(".") or name == MAC_ARCHIVE


def files_below(root: str | Path) -> Iterator[str]:
    """Yield the path of each file below a folder: its own files by name, then those of its subfolders.

    Hidden files and folders are skipped.  Links to folders are not followed; folders that cannot be listed count as
    empty.
    """
    waiting = [os.fspath(root)]
    while waiting:
        folders: list[str] = []
        with suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if is_hidden(entry.name):
                    continue
                if not entry.is_dir():
                    yield entry.path
                elif not entry.is_symlink():
                    folders.append(entry.path)
        waiting += reversed(folders)


def unread_below(root: str | Path) -> str:
    """Return a line that counts the files below a folder that are not read, by suffix; empty if there is none."""
    each = _by_suffix(path for path in files_below(root) if not path.lower().endswith(SUFFIXES))
    return f"{root}: not read, by their suffix: {each}; convert those that are images to JPEG or PNG" if each else ""


def unread_beside(root: Path) -> str:
    """Return a line that counts the images beside the class folders of a folder, by suffix; empty if there is none."""
    beside = takewhile(lambda path: Path(path).parent == root, files_below(root))  # They come first.
    each = _by_suffix(path for path in beside if path.lower().endswith(SUFFIXES))
    return f"{root}: not read, beside the class folders: {each}; move each into that of its class" if each else ""


def _by_suffix(paths: Iterable[str]) -> str:
    suffixes = (os.fsencode(Path(path).suffix).decode(errors="replace").lower() for path in paths)
    counts = Counter(suffix or "without a suffix" for suffix in suffixes)
    return listed([f"{count} {suffix}" for suffix, count in counts.most_common()], _SHOWN_SUFFIXES)
