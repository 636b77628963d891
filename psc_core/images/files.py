"""Read image files from folders that others may have filled: regular files of a bounded size only.

Once reading has failed, say what the file is, so that one of another kind is not called damaged.
"""

from __future__ import annotations

import io
import os
import stat
import struct
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

from psc_core.errors import DataError, ImageTooLarge, UnsupportedImage, join_names
from psc_core.images import SUFFIXES
from psc_core.text import printable

if TYPE_CHECKING:
    from PIL.TiffImagePlugin import ImageFileDirectory_v2

MAX_FILE_BYTES: Final = 256 << 20  # maximum size of an image file, bytes
MAC_ARCHIVE: Final = "__MACOSX"  # the folder of a zip file from a Mac that holds a ``._NAME``, no image, for each file
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
    """Return a file's size and bytes of its middle and end, which copies share and other images hardly ever."""
    with _opened(path) as (file, size):
        parts = [size.to_bytes(8)]
        for start in (size // 2, max(0, size - SAMPLED_BYTES)):
            file.seek(start)
            parts.append(file.read(SAMPLED_BYTES))
        return b"".join(parts)


@contextmanager
def _opened(path: str | Path) -> Iterator[tuple[BinaryIO, int]]:
    # Non-blocking, because opening a pipe blocks until somebody writes to it.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise UnsupportedImage("expected a regular file, got a pipe or a device; remove it")
        yield file, status.st_size


def is_hidden(name: str) -> bool:
    """Return whether a file or folder of this name is some program's: ``.ipynb_checkpoints``, a Mac's ``._1.jpg``."""
    return name.startswith(".") or name == MAC_ARCHIVE


def files_below(root: str | Path, *, linked: bool = True) -> Iterator[str]:
    """Yield the files below a folder by name, then those of subfolders, each folder once; hidden ones are skipped.

    ``linked`` folders are skipped in what a stranger may have written, because they lead anywhere.  A folder that
    cannot be listed is an error: its images would be missing without a word.
    """
    waiting, seen = [os.fspath(root)], set[tuple[int, int]]()
    while waiting:
        folders: list[str] = []
        for entry in _entries(waiting.pop(), seen):
            if is_hidden(entry.name):
                continue
            if not _is_folder(entry):
                yield entry.path
            elif linked or not entry.is_symlink():
                folders.append(entry.path)
        waiting += reversed(folders)


def _entries(folder: str, seen: set[tuple[int, int]]) -> list[os.DirEntry[str]]:
    """Return what is in a folder, by name; nothing of one that is none, is gone, or was seen under another name."""
    try:
        status = Path(folder).stat()
        if (status.st_dev, status.st_ino) in seen:
            return []
        seen.add((status.st_dev, status.st_ino))
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise DataError(f"cannot list the folder {folder} ({error.strerror}); let this user read it") from error


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # A link in a circle, or to where this user may not look.
        return False


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
    suffixes = (printable(Path(path).suffix).lower() for path in paths)
    counts = Counter(suffix or "without a suffix" for suffix in suffixes)
    return join_names([f"{count} {suffix}" for suffix, count in counts.most_common()], _SHOWN_SUFFIXES)


CONVERT: Final = "convert the image to a PNG of 8 or 16 bits"

# The first bytes of other formats.
_FORMATS: Final = (
    (b"\0\0\0\x0cjP  ", "JPEG 2000"),
    (b"\xff\x4f\xff\x51", "JPEG 2000"),
    (b"\0\0\0\x0cJXL ", "JPEG XL"),
    (b"\xff\x0a", "JPEG XL"),
    (b"II\xbc\x01", "JPEG XR"),
    (b"8BPS", "Photoshop"),
    (b"%PDF", "PDF"),
    (b"%!PS", "PostScript"),
    (b"\xc5\xd0\xd3\xc6", "PostScript"),
    (b"<svg", "SVG"),
    (b"\0\0\1\0", "ICO"),
    (b"icns", "ICNS"),
    (b"DDS ", "DDS"),
    (b"qoif", "QOI"),
    (b"SIMPLE", "FITS"),
    (b"\x76\x2f\x31\x01", "OpenEXR"),
    (b"#?RADIANCE", "Radiance HDR"),
    (b"\x93NUMPY", "NumPy"),
    (b"\x89HDF", "HDF5"),
    (b"PK\x03\x04", "ZIP"),
    (b"\x1f\x8b", "gzip"),
    *((f"P{number}".encode() + space, "PNM") for number in range(1, 8) for space in (b"\n", b" ", b"\r")),
)

# The first letters of the brand of an ISO media file, after ``ftyp``.
_BRANDS: Final = ((b"avi", "AVIF"), (b"hei", "HEIC"), (b"hev", "HEIC"), (b"mif", "HEIC"), (b"mp4", "MP4"))

# The beginning of texts in lower case, and what to do about them.
_TEXTS: Final = (
    (b"version https://git-lfs", "a pointer of Git LFS to the image; run git lfs pull"),
    (b"/annex/objects/", "a pointer of git-annex to the image; run git annex get"),
    (b"<!doctype html", "a web page (HTML), as a server answers in place of an image; download the image again"),
    (b"<html", "a web page (HTML), as a server answers in place of an image; download the image again"),
    (b"<?xml", "XML, as a server answers in place of an image; download the image again, or convert an SVG to PNG"),
    (b"{", "JSON, as a server answers in place of an image; download the image again"),
    (b"data:image/", "a data URL; decode its base64 and use these bytes"),
    (b"/9j/", "base64 text; decode it and use these bytes"),
    (b"ivborw0kggo", "base64 text; decode it and use these bytes"),
)

_MAX_TEXT: Final = 64
# Tags of a TIFF and values of two; the last are the places and sizes of its strips, and of its tiles.
_WIDTH, _HEIGHT, _BITS, _COMPRESSION, _PHOTOMETRIC, _CHANNELS, _PLANAR, _FORM = 256, 257, 258, 259, 262, 277, 284, 339
_YCBCR, _SEPARATE = 6, 2
_PIECES: Final = ((273, 279), (324, 325))
_FORMS: Final = {1: "unsigned", 2: "signed", 3: "floating-point", 4: "untyped", 5: "complex", 6: "complex"}
_PHOTOMETRICS: Final = {
    0: "grey, white is zero", 1: "grey", 2: "RGB", 3: "palette", 4: "mask", 5: "CMYK", 6: "YCbCr", 8: "CIELab",
    9: "ICCLab", 10: "ITULab", 32803: "camera raw", 34892: "linear raw", 32844: "LogL", 32845: "LogLuv",
}  # fmt: skip
_COMPRESSIONS: Final = {
    2: "CCITT", 6: "old JPEG", 7: "JPEG", 32766: "NeXT", 32809: "ThunderScan", 33003: "JPEG 2000", 33005: "JPEG 2000",
    34676: "SGILog", 34677: "SGILog", 34712: "JPEG 2000", 34887: "LERC", 34925: "LZMA", 34933: "PNG",
    34934: "JPEG XR", 50000: "Zstandard", 50001: "WebP", 50002: "JPEG XL", 52546: "JPEG XL",
}  # fmt: skip
# The compressions of a TIFF that every build of Pillow reads, so that an error means damaged data.
_ALWAYS_READ: Final = frozenset({1, 3, 4, 5, 7, 8, 32773, 32946})

# The kinds of JPEG by the marker of their frame, but for baseline and progressive ones.
_PROCESSES: Final = {
    0xC3: "lossless", 0xC5: "hierarchical", 0xC6: "hierarchical", 0xC7: "hierarchical", 0xC9: "arithmetic-coded",
    0xCA: "arithmetic-coded", 0xCB: "lossless", 0xCD: "hierarchical", 0xCE: "hierarchical", 0xCF: "hierarchical",
    0xF7: "lossless (JPEG-LS)",
}  # fmt: skip

_MAX_SEGMENTS: Final = 10_000
_FRAMES: Final = frozenset({0xC0, 0xC1, 0xC2, *_PROCESSES})
# Compressions and bits of the BMPs that are read, and the bits that there are.
_PLAIN_BMP: Final = frozenset({(0, 1), (0, 4), (0, 8), (0, 16), (0, 24), (0, 32), (1, 8), (2, 4)})
_BMP_BITS: Final = frozenset({0, 1, 2, 4, 8, 16, 24, 32, 64})


def other_format(data: bytes) -> str:
    """Say what a file is that is no image of a supported format, and what to do."""
    if not data:
        return "no data; use an intact copy"
    text = data[:_MAX_TEXT].removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    for start, remedy in _TEXTS:
        if text.startswith(start):
            return remedy
    names = [name for start, name in _FORMATS if data.startswith(start)]
    names += [name for start, name in _BRANDS if data[4:8] == b"ftyp" and data[8:].startswith(start)]
    what = f"{names[0]}, another format" if names else f"{len(data)} bytes of another format"
    return f"{what}; convert the image to JPEG or PNG"


def unread_kind(data: bytes, *, is_open: bool = False) -> str | None:
    """Name the kind of an intact file that Pillow does not read (``is_open``: but its header); None if damaged."""
    with suppress(Exception):  # A damaged header may give any; then the file is damaged.
        if data.startswith(b"\xff\xd8\xff"):
            return _jpeg_kind(data, is_open=is_open)
        if data[:2] in (b"II", b"MM") and (42 in data[2:4] or 43 in data[2:4]):
            return _tiff_kind(data, is_open=is_open)
        if data.startswith(b"BM"):
            return _bmp_kind(data)
        if data.startswith(b"\x89PNG") and data[12:16] == b"CgBI":
            return "a PNG in Apple's own form (CgBI)"
    return None


def _jpeg_kind(data: bytes, *, is_open: bool) -> str | None:
    at = 2
    for _ in range(_MAX_SEGMENTS):
        if data[at] != 0xFF:
            return None
        marker, length = data[at + 1], int.from_bytes(data[at + 2 : at + 4], "big")
        if marker in _FRAMES:
            bits, channels = data[at + 4], data[at + 9]
            break
        at += 1 if marker == 0xFF else 2 + length
    else:
        return None
    is_whole = data.rstrip(b"\0").endswith(b"\xff\xd9")
    if not is_whole or not 2 <= bits <= 16:
        return None
    process = _PROCESSES.get(marker)
    if process or (not is_open and bits != 8):
        return f"a {process + ' ' if process else ''}JPEG with {bits}-bit samples"
    return None if is_open or channels in (1, 3, 4) else f"a JPEG with {channels} channels"


def _tiff_kind(data: bytes, *, is_open: bool) -> str | None:
    if data.startswith(b"MM\0+"):
        return "a big-endian BigTIFF"
    tags = _tiff_tags(data)
    compression = tags.get(_COMPRESSION, 1)
    packing = _COMPRESSIONS.get(compression, "")
    how = f"compression {packing} ({compression})" if packing else f"compression {compression}"
    if is_open and compression not in _ALWAYS_READ:
        return f"a TIFF with {how}"
    if is_open and compression != 1:
        return None
    if tags[_WIDTH] < 1 or tags[_HEIGHT] < 1 or not _has_pixels(tags, len(data)):
        return None
    bits, forms = tags.get(_BITS, (1,)), tags.get(_FORM, (1,))
    channels = tags.get(_CHANNELS, 1)
    if not all(1 <= each <= 128 for each in bits) or not all(each in _FORMS for each in forms):
        return None
    colours = _PHOTOMETRICS.get(tags.get(_PHOTOMETRIC, 0), f"photometric {tags.get(_PHOTOMETRIC)}")
    parts = [f"{' and '.join(map(str, sorted({*bits})))}-bit {_FORMS[forms[0]]} samples"]
    parts += [colours if channels == 1 else f"{colours} in {channels} channels"]
    parts += [how] if compression != 1 else []
    parts += ["separate planes"] if tags.get(_PLANAR, 1) == _SEPARATE else []
    parts += ["big-endian"] if data.startswith(b"MM") else []
    return f"a TIFF with {', '.join(parts)}"


def _tiff_tags(data: bytes) -> ImageFileDirectory_v2:
    file = io.BytesIO(data)
    from PIL.TiffImagePlugin import ImageFileDirectory_v2  # not at the top: the client has no Pillow

    tags = ImageFileDirectory_v2(data[:16] if data[2] == 43 else data[:8])
    file.seek(tags.next)
    tags.load(file)
    return tags


def _has_pixels(tags: ImageFileDirectory_v2, size: int) -> bool:
    """Return whether all strips or tiles of a TIFF lie in the file, and hold enough where they are not compressed."""
    for at, count in _PIECES:
        if at in tags and count in tags:
            starts, sizes = (each if isinstance(each, tuple) else (each,) for each in (tags[at], tags[count]))
            bits, channels = tags.get(_BITS, (1,)), tags.get(_CHANNELS, 1)
            needed = tags[_WIDTH] * tags[_HEIGHT] * (sum(bits) if len(bits) == channels else bits[0] * channels) // 8
            if tags.get(_COMPRESSION, 1) == 1 and tags.get(_PHOTOMETRIC) != _YCBCR and sum(sizes) < needed:
                return False
            return len(starts) == len(sizes) and all(a + n <= size for a, n in zip(starts, sizes, strict=True))
    return False


def _bmp_kind(data: bytes) -> str | None:
    offset, head = struct.unpack_from("<II", data, 10)
    bits, compression = (data[24], 0) if head == 12 else struct.unpack_from("<HI", data, 28)
    if bits not in _BMP_BITS or offset >= len(data) or (compression, bits) in _PLAIN_BMP:
        return None
    return f"a BMP with {bits}-bit samples and compression {compression}"
