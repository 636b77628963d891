"""Read two formats of data sets: IDX arrays (MNIST and its relatives) and a tar archive of encoded images."""

from __future__ import annotations

import gzip
import tarfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from psc_core.errors import DataError

_UNSIGNED_BYTE = 0x08


def read_idx(path: Path, *, ndim: int | None = None) -> npt.NDArray[np.uint8]:
    """Read an IDX file of unsigned bytes, plain or compressed (with ``.gz`` after its name).

    The header is two zero bytes, the type code, the number of axes, and the length of each axis as big-endian uint32.

    Raises:
        DataError: No such file, another type, or a length that does not match the header.
    """
    packed = path.with_name(path.name + ".gz")
    try:
        data = gzip.decompress(packed.read_bytes()) if packed.exists() else path.read_bytes()
    except (OSError, EOFError) as error:
        raise DataError(f"cannot read the IDX file {packed} or {path}: {error}") from error
    if len(data) < 4 or data[:3] != bytes((0, 0, _UNSIGNED_BYTE)):
        raise DataError(f"{path}: expected an IDX header of unsigned bytes, got {data[:4]!r}")
    axes = data[3]
    shape = tuple(int(n) for n in np.frombuffer(data, ">u4", count=axes, offset=4))
    if (ndim is not None and axes != ndim) or len(data) != 4 + 4 * axes + int(np.prod(shape)):
        raise DataError(
            f"{path}: expected {ndim or axes} axes and {shape} bytes, got {axes} axes and "
            f"{len(data) - 4 - 4 * axes} bytes"
        )
    return np.frombuffer(data, np.uint8, offset=4 + 4 * axes).reshape(shape).copy()


def read_tar(path: Path, prefix: str) -> tuple[list[str], list[bytes]]:
    """Names and contents of the files below ``prefix`` in a tar archive, sorted by name, read into memory.

    Raises:
        DataError: Not a tar archive, or no files below ``prefix``.
    """
    try:
        with tarfile.open(path) as tar:
            members = sorted((m for m in tar if m.isfile() and m.name.startswith(prefix)), key=lambda m: m.name)
            files = [(member.name, tar.extractfile(member)) for member in members]
            pairs = [(name, handle.read()) for name, handle in files if handle is not None]
    except (OSError, tarfile.TarError, EOFError) as error:
        raise DataError(f"cannot read the tar archive {path}: {error}") from error
    if not pairs:
        raise DataError(f"{path} has no files below {prefix}; give the whole archive")
    return [name for name, _ in pairs], [data for _, data in pairs]
