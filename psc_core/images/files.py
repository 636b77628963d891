"""Read image files from folders that others may have filled: regular files of a bounded size only."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from psc_core.errors import ImageTooLarge, UnsupportedImage, listed
from psc_core.images import SUFFIXES

MAX_FILE_BYTES: Final = 256 << 20
"""Maximum size of an image file, bytes."""

MAC_ARCHIVE: Final = "__MACOSX"
"""The folder of a zip file from a Mac that holds a ``._NAME``, which is no image, for each file ``NAME``."""

_SHOWN_SUFFIXES: Final = 10


def read_file(path: str | Path, max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """Return the content of a file or of the file that a link points to, at most ``max_bytes``.

    Raises:
        UnsupportedImage: If it is not a regular file: a pipe would block for ever, a device has no end.
        ImageTooLarge: If it has more than ``max_bytes``.
        OSError: If it cannot be read, for example because it is a folder.
        ValueError: If no file can have this path.
    """
    # Non-blocking, because opening a pipe blocks until somebody writes to it.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise UnsupportedImage("expected a regular file, got a pipe or a device; remove it")
        # A sparse file claims gigabytes that it does not store; of one that grows only this size is read.
        if status.st_size > max_bytes:
            raise ImageTooLarge(f"expected a file of at most {max_bytes} bytes, got {status.st_size}")
        return file.read(status.st_size)


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
    others = (path for path in files_below(root) if not path.lower().endswith(SUFFIXES))
    suffixes = (os.fsencode(Path(path).suffix).decode(errors="replace").lower() for path in others)
    counts = Counter(suffix or "without a suffix" for suffix in suffixes)
    each = listed([f"{count} {suffix}" for suffix, count in counts.most_common()], _SHOWN_SUFFIXES)
    return f"{root}: not read, by their suffix: {each}; convert those that are images to JPEG or PNG" if each else ""
