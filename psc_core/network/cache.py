"""Cache what takes seconds to find out about a network: its export, the fastest backend for it.

Entries lie in the user's cache folder (``$XDG_CACHE_HOME/psc``, else ``~/.cache/psc``), which may be deleted at any
time and need not be writable.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.metadata
import json
import logging
import os
import stat
import tempfile
from pathlib import Path
from tempfile import NamedTemporaryFile

import torch

from psc_core.network.onnx import PACKAGES
from psc_core.version import __version__

logger = logging.getLogger("psc.cache")


def need_no_folder() -> None:
    """Let PyTorch be imported where no folder may be written to, as in a container with a read-only file system.

    The import of ``torch.compile``, which torchvision asks for, makes a folder for what it would compile.
    """
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.sep)  # Exists, so that none is made.


def cache_file(suffix: str, *given: bytes) -> Path:
    """Return the path in the cache for a result that depends on ``given`` and the versions of the packages."""
    versions = [torch.__version__, *map(version_of, PACKAGES)]
    key = hashlib.sha256(b"\0".join([json.dumps([__version__, *versions]).encode(), *given])).hexdigest()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    return folder / "psc" / f"{key}.{suffix}"


def version_of(module: str) -> str:
    """Return the version of an installed module; empty if it cannot be imported or does not tell.

    Most distributions bear the name of their module, and asking them does not import it, which takes seconds.  Others
    bring it under another name, as onnxruntime-gpu, onnxruntime-openvino and onnxruntime-directml do.
    """
    try:
        return importlib.metadata.version(module)
    except importlib.metadata.PackageNotFoundError:
        pass
    try:
        return str(importlib.import_module(module).__version__)
    except Exception:  # An installation may be broken in any way; whoever needs the module reports it.
        return ""


def read_checked(file: Path) -> bytes | None:
    """Return the bytes that :func:`write_checked` wrote, or None if the file is missing or has changed.

    The digest in the file detects damage, not forgery, so a file that another user could have written is not read.
    """
    try:
        with open(file, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW)) as kept:
            status = os.fstat(kept.fileno())
            if not (stat.S_ISREG(status.st_mode) and is_private(status) and is_private(file.parent.stat())):
                logger.warning("cache not used", extra={"file": str(file), "reason": "others may write to it"})
                return None
            data = kept.read()
    except OSError:
        return None
    digest, content = data[:32], data[32:]
    return content if hashlib.sha256(content).digest() == digest else None


def is_private(status: os.stat_result) -> bool:
    """Return whether a file or folder belongs to this user and nobody else may write to it."""
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def write_checked(file: Path, content: bytes) -> None:
    """Write bytes after their digest, atomically; do nothing if the cache folder is not writable."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=file.parent, delete=False) as part:
            try:
                part.write(hashlib.sha256(content).digest() + content)
                part.flush()
                Path(part.name).replace(file)
            except OSError:
                Path(part.name).unlink()
