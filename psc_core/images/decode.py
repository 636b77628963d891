"""Decode an image file after checking every limit on it, and encode pictures.

Fitting, evaluation and the service share this decoder, so calibrated thresholds hold for served images.  An image of
more than ``max_pixels``, or one that would cost far more than its pixels, is rejected by its header: some formats let a
small file demand far more work than its pixels and bytes suggest, so scans of a JPEG, tiles and strips of a TIFF,
segments of a header and EXIF are limited too.

Plain JPEGs are decoded by simplejpeg (extra ``psc[fast]``), which gives Pillow's pixels in less time.  It decodes
strictly and leaves to Pillow any file that libjpeg would warn about, so the errors are always Pillow's.  Each library
brings its own libjpeg-turbo; if the two differ in a pixel of a trial image, simplejpeg is not used.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import io
import logging
import math
import re
import struct
import warnings
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image, ImageOps
from PIL.TiffImagePlugin import ImageFileDirectory_v2

from psc_core.errors import ImageError, ImageTooLarge, UndecodableImage, UnsupportedImage
from psc_core.images import BACKGROUNDS
from psc_core.images.files import CONVERT, other_format, unread_kind

DEFAULT_MAX_PIXELS: Final = 25_000_000  # maximum of width × height: the 24 megapixels of a camera fit
PILLOW_MAX_PIXELS: Final = 178_956_970  # maximum number of pixels that Pillow itself reads
# Maximum number of scans of a JPEG, because a scan of 80 bytes may cost a pass over all pixels. libjpeg writes 10 (18
# for CMYK); libtiff sets the same limit for JPEG in TIFF.
MAX_SCANS: Final = 100
_MAX_PIECES: Final = 10_000  # JPEG segments and bytes between them, PNG chunks, GIF blocks: Pillow reads each in Python
_PASSES: Final = 10  # maximum of pixels in all scans of a JPEG, in units of ``max_pixels``; small ones may have more
MAX_EXIF_BYTES: Final = 1 << 20  # of EXIF, because Pillow needs two hundred times as much memory to unpack it
# Maximum numbers of what 1 kB of a PNG may unpack to 1 MB of, in up to 8 ms: the format has one profile, programs write
# up to ten compressed texts.
_MAX_PROFILES: Final = 2
_MAX_TEXTS: Final = 16
_MAX_TAGS: Final = 4096  # maximum number of tags of a TIFF; libtiff sets the same limit
_MAX_VALUES: Final = 3 << 16  # of a TIFF tag, the size of a transfer function: Pillow makes an object of each value
_MAX_OVERLAP: Final = 10  # maximum number of times that the strips of a TIFF may cover its bytes, on average
# The start of a JPEG segment; in compressed pixels 0xFF is followed by 0 or a restart marker, 0xD0 to 0xD7.
_MARKER: Final = re.compile(rb"\xff[\xc0-\xc7\xc9-\xcf\xd9-\xef\xfe]")
_SCAN, _END, _APP1 = 0xDA, 0xD9, 0xE1
_FRAMES: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
# TIFF tags: width and height of the image, width and height of a tile, bytes of each strip and of each tile.
_SIDES: Final = (256, 257, 322, 323)
_STRIP_BYTES, _TILE_BYTES = 279, 325
_NUMBERS: Final = {3: "u2", 4: "u4", 16: "u8"}
_TEXTS: Final = (1, 2, 7)  # the types of TIFF tags that hold bytes; the types in :data:`_NUMBERS` hold integers


def check_file(data: bytes, max_pixels: int) -> io.BytesIO:
    """Check everything that would be expensive when Pillow opens or loads the file, and return a file for Pillow."""
    check_pixels(*_webp_size(data), max_pixels)
    if data.startswith(b"\xff\xd8\xff"):
        _check_jpeg(data, max_pixels)
    elif data.startswith(b"\x89PNG"):
        _check_png(data)
    elif data.startswith(b"GIF8"):
        return _Reader(data)
    elif data[:2] in (b"II", b"MM") and (42 in data[2:4] or 43 in data[2:4]):
        _check_tiff(data, max_pixels)
    return io.BytesIO(data)


def check_pixels(width: int, height: int, max_pixels: int, what: str = "the header declares") -> None:
    if width * height > max_pixels:
        raise ImageTooLarge(
            f"expected at most {max_pixels} pixels, {what} {width}×{height} = {width * height}; shrink the image"
        )


def check_limit(what: str, maximum: int, got: int) -> None:
    if got > maximum:
        raise UndecodableImage(f"expected at most {maximum} {what}, got {got} or more; save the image again")


class _Reader(io.BytesIO):
    """A file that Pillow can read in a limited number of pieces."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        # An honest file of this size may have more pieces than the constant.
        self._maximum = _MAX_PIECES + len(data) // 32
        self._reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        self._reads += 1
        check_limit("pieces in a file of this size", self._maximum, self._reads)
        return super().read(size)


def _check_png(data: bytes) -> None:
    # An honest file of this size may have more chunks than the constant.
    at, maximum, chunks, profiles, texts, chunk_type = 8, _MAX_PIECES + len(data) // 128, 0, 0, 0, b""
    while chunk_type != b"IEND" and at + 8 <= len(data):
        length, chunk_type = struct.unpack_from(">I4s", data, at)
        start, at = at + 8, at + 12 + length
        chunks += 1
        profiles += chunk_type == b"iCCP"
        texts += chunk_type == b"zTXt" or (chunk_type == b"iTXt" and _is_compressed(data, start, start + length))
        check_limit("colour profiles", _MAX_PROFILES, profiles)
        check_limit("compressed texts", _MAX_TEXTS, texts)
        check_limit("chunks in a file of this size", maximum, chunks)


def _is_compressed(data: bytes, start: int, stop: int) -> bool:
    """Return whether an international text says so, in the byte after the end of its keyword."""
    flag = data.find(b"\0", start, stop) + 1
    return 0 < flag < min(stop, len(data)) and data[flag] != 0


def _check_jpeg(data: bytes, max_pixels: int) -> None:
    """Limit the scans, their pixels and the segments of a JPEG's first image, walking them as libjpeg does."""
    at, scans, segments, exif, pixels = 2, 0, 0, 0, 0
    while found := _MARKER.search(data, at):
        segments += 1 if scans else 1 + found.start() - at
        at = found.end()
        marker = data[at - 1]
        if marker == _END:
            if scans:
                return
            continue
        length = max(2, int.from_bytes(data[at : at + 2], "big"))
        if marker == _SCAN:
            scans += 1
            check_limit("scans", MAX_SCANS, scans)
            check_limit("pixels in all scans together", _PASSES * max_pixels, scans * pixels)
        elif marker in _FRAMES:
            height, width = struct.unpack(">HH", data[at + 3 : at + 7].ljust(4, b"\0"))
            check_pixels(width, height, max_pixels)
            pixels = max(pixels, width * height)
        elif marker == _APP1 and data.startswith(b"Exif\0\0", at + 2):
            exif += length
            check_limit("bytes of EXIF", MAX_EXIF_BYTES, exif)
        check_limit("segments", _MAX_PIECES, segments)
        at += length


def _check_tiff(data: bytes, max_pixels: int) -> None:
    """Limit what the first directory of a TIFF declares: pixels including tile padding, values, bytes of all strips."""
    order, big = "<" if data[:2] == b"II" else ">", data[2] == 43
    (at,) = struct.unpack_from(order + ("Q" if big else "L"), data, 8 if big else 4)
    (number,) = struct.unpack_from(order + ("Q" if big else "H"), data, at)
    check_limit("tags", _MAX_TAGS, number)
    at += 8 if big else 2
    entry = struct.Struct(order + ("HHQ8s" if big else "HHL4s"))
    number = min(number, (len(data) - at) // entry.size)
    found: dict[int, int] = {}
    for tag, number_type, count, value in entry.iter_unpack(data[at : at + number * entry.size]):
        if number_type not in _TEXTS:
            check_limit(f"values of tag {tag}", _MAX_VALUES, count)
        if tag not in (*_SIDES, _STRIP_BYTES, _TILE_BYTES):
            continue
        if number_type not in _NUMBERS or tag in found:
            raise UndecodableImage(f"expected tag {tag} once, as integers; save the image again")
        form = np.dtype(order + _NUMBERS[number_type])
        size = count * form.itemsize
        start = int.from_bytes(value, "little" if order == "<" else "big")
        stored = value[:size] if size <= len(value) else data[start : start + size]
        found[tag] = int(np.frombuffer(stored, form, len(stored) // form.itemsize).sum(dtype=np.float64))
    for tag in (_STRIP_BYTES, _TILE_BYTES):
        check_limit("bytes of strips", _MAX_OVERLAP * len(data), found.get(tag, 0))
    width, height, tile_width, tile_height = (found.get(tag, 0) for tag in _SIDES)
    if tile_width and tile_height:
        check_pixels(tile_width, tile_height, max_pixels, "a tile has")
        columns, rows = -(-width // tile_width), -(-height // tile_height)
        # Padding up to whole tiles at most doubles each side of an image that is larger than a tile.
        check_pixels(columns * tile_width, rows * tile_height, 4 * max_pixels, "the tiles have")


def _webp_size(data: bytes) -> tuple[int, int]:
    """Return (width, height) of a WebP, whose canvas Pillow allocates on opening; (0, 0) for any other file."""
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP" or len(data) < 30:
        return 0, 0
    chunk_type = data[12:16]
    if chunk_type == b"VP8X":
        return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
    if chunk_type == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if chunk_type == b"VP8 ":
        return int.from_bytes(data[26:28], "little") & 0x3FFF, int.from_bytes(data[28:30], "little") & 0x3FFF
    return 0, 0


HAS_SIMPLEJPEG: Final = find_spec("simplejpeg") is not None
FORMS: Final = {"RGB": "RGBX", "L": "GRAY"}  # simplejpeg's names; Pillow stores four bytes per RGB pixel

_TRIALS: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("L", {}),
    ("RGB", {"subsampling": "4:2:0"}),
    ("RGB", {"subsampling": "4:2:2", "progressive": True}),
)

logger = logging.getLogger("psc.images")


def _decode(data: bytes, mode: str) -> npt.NDArray[np.uint8]:
    import simplejpeg

    samples: npt.NDArray[np.uint8] = simplejpeg.decode_jpeg(data, FORMS[mode], strict=True)
    return samples


@cache
def _agrees() -> bool:
    """Return whether simplejpeg decodes the trial images as Pillow does."""
    # Odd sides, because libjpeg versions may differ in the padding of blocks and of subsampled colours.
    noise = np.random.default_rng(0).integers(0, 256, (67, 93, 3)).astype(np.uint8)
    for mode, options in _TRIALS:
        file = io.BytesIO()
        Image.fromarray(noise).convert(mode).save(file, "JPEG", quality=80, **options)
        expected = np.atleast_3d(np.asarray(Image.open(file)))
        try:
            agrees = np.array_equal(_decode(file.getvalue(), mode)[..., : expected.shape[2]], expected)
        except Exception as error:
            logger.warning("simplejpeg cannot be used, so Pillow is: %s: %s", type(error).__name__, error)
            return False
        if not agrees:
            logger.warning(
                "simplejpeg and Pillow decode different pixels, so Pillow is used; install other versions of both"
            )
            return False
    return True


FAST: Final = 1  # the zlib level for pictures that a client waits for
SMALL: Final = 6  # the zlib level for pictures that are stored


def png_of(pixels: npt.NDArray[Any], level: int = FAST) -> bytes:
    """Encode ``uint8 (rows, columns)`` or ``(1 or 3 channels, rows, columns)`` as an 8-bit PNG."""
    channels_last = pixels.transpose(1, 2, 0) if pixels.ndim == 3 else pixels
    file = io.BytesIO()
    Image.fromarray(channels_last.squeeze(2) if channels_last.shape[2:] == (1,) else channels_last).save(
        file, "PNG", compress_level=level
    )
    return file.getvalue()


def as_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


IMAGE_FORMATS: Final = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")  # others raise :class:`UnsupportedImage`
_RUN_LENGTH_COST: Final = 50  # of a pixel of a run-length encoded BMP, in other pixels: Pillow decodes it in Python
_RUN_BYTES: Final = 4  # of such a BMP per pixel; two suffice, but some commands draw no pixel
_HEADER: Final = 1 << 16
# The first bytes of the formats, to tell a damaged image from a file of another type.
_SIGNATURES: Final = (b"\xff\xd8\xff", b"\x89PNG", b"BM", b"GIF8", b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_BLOCK: Final = 1 << 18  # maximum number of samples converted to float64 at a time
_SIXTEEN: Final = frozenset({"I;16", "I;16B", "I;16L", "I;16N"})
_WIDE_MODES: Final = _SIXTEEN | {"I", "F"}
_SCALED: Final = frozenset({"PNG", "PPM"})  # whose samples Pillow scales to 16 bits in the mode ``I``, which has 32
_OVERSHOOT: Final = 0.25  # of floats beyond 0 … 1 that is clipped: a sharp filter overshoots by less

# The tags of a TIFF that say what its samples mean.
_BITS, _COMPRESSION, _PHOTOMETRIC, _MAX_SAMPLE, _PLANAR, _COLOURS, _FORM, _SMIN, _SMAX, _SUBSAMPLING = (
    258, 259, 262, 281, 284, 320, 339, 340, 341, 530,
)  # fmt: skip

# Values of the tags PhotometricInterpretation, Compression, PlanarConfiguration and SampleFormat.
_WHITE_IS_ZERO, _YCBCR, _RAW, _SEPARATE = 0, 6, 1, 2
_UNSIGNED, _SIGNED, _FLOAT = 1, 2, 3
_PARTS_OF_16: Final = frozenset((1 << bits) - 1 for bits in range(9, 16))  # largest samples of cameras
_WHITES: Final = {"1": 1, "L;2": 3, "L;4": 15}  # of grey PNGs below 8 bits, by Pillow's name for the samples


# Measured, of a pixel while its image is decoded and resized: Pillow's four, as many again each to turn, blend and copy
# it, and two such canvases of WebP.
_PIXEL_BYTES: Final = {"JPEG": 14, "WEBP": 28}
_OTHER_PIXEL_BYTES: Final = 18  # of other formats
_PLAIN_PIXEL_BYTES: Final = 6  # where simplejpeg decodes


@dataclass(frozen=True)
class OpenImage:
    """An image file whose header has been checked and whose pixels are not decoded yet."""

    image: Image.Image  # the image as Pillow opened it
    data: bytes  # the content of the file
    cost: int  # the number of pixels; each pixel of a run-length encoded BMP counts as 50

    @property
    def is_wide(self) -> bool:
        """Whether integer samples have more than 8 bits."""
        tiles = getattr(self.image, "tile", ())
        return self.image.mode in _WIDE_MODES - {"F"} or any(";16" in str(tile.args) for tile in tiles)

    def samples(self, mode: str) -> npt.NDArray[np.uint8] | None:
        """Decode an upright JPEG to (height, width, 1, or 4 of RGB, the last to be ignored); None if Pillow has to."""
        if not self._is_plain(mode):
            return None
        try:
            return _decode(self.data, mode)
        except Exception:  # Pillow decides what is wrong with the file, if anything
            return None

    def memory_bytes(self, mode: str) -> int:
        """Return the memory that it takes at most while it is decoded, and resized for a network that sees ``mode``."""
        image = self.image
        of_format = _PIXEL_BYTES.get(image.format or "", _OTHER_PIXEL_BYTES)
        return image.width * image.height * (_PLAIN_PIXEL_BYTES if self._is_plain(mode) else of_format)

    def _is_plain(self, mode: str) -> bool:
        image = self.image
        if not HAS_SIMPLEJPEG or image.format != "JPEG" or image.mode != mode or not _agrees():
            return False
        try:
            return _is_upright(image)
        except Exception:  # of damaged EXIF, which Pillow decides about too
            return False

    def decode(self, background: str = BACKGROUNDS[0]) -> Image.Image:
        """Decode the first frame, upright; may be called once.  See :func:`decode_image`."""
        with self.image:
            return to_grey_or_rgb(self.image, background, self.data)


def open_image(data: bytes, *, max_pixels: int = DEFAULT_MAX_PIXELS) -> OpenImage:
    """Open an encoded image by reading its header; see :func:`decode_image` for the errors."""
    try:
        image = Image.open(check_file(data, max_pixels), formats=IMAGE_FORMATS)
    except ImageError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageTooLarge(f"image is larger than {max_pixels} pixels ({error}); shrink the image") from error
    except Exception as error:
        if kind := unread_kind(data):
            raise UnsupportedImage(f"{kind} is not read; {CONVERT}") from error
        if data.startswith(_SIGNATURES) or data[8:12] == b"WEBP":
            raise UndecodableImage("image header is damaged or truncated; use an intact copy") from error
        raise UnsupportedImage(f"expected one of {', '.join(IMAGE_FORMATS)}, got {other_format(data)}") from error
    _scale_transparent(image)
    width, height = image.size
    run_length = image.format == "BMP" and any(tile.codec_name == "bmp_rle" for tile in image.tile)
    cost = width * height * (_RUN_LENGTH_COST if run_length else 1)
    check_pixels(width, height, max_pixels // _RUN_LENGTH_COST if run_length else max_pixels)
    if run_length:
        check_limit("bytes of run-length code for these pixels", _RUN_BYTES * width * height + _HEADER, len(data))
    return OpenImage(image, data, cost)


def decode_image(data: bytes, *, max_pixels: int = DEFAULT_MAX_PIXELS, background: str = BACKGROUNDS[0]) -> Image.Image:
    """Decode the first frame of an encoded image of at most ``max_pixels``, upright."""
    return open_image(data, max_pixels=max_pixels).decode(background)


def to_grey_or_rgb(image: Image.Image, background: str = BACKGROUNDS[0], data: bytes = b"") -> Image.Image:
    """Convert any Pillow image to ``L`` or ``RGB`` with 8-bit samples, upright.

    The EXIF orientation is applied, palettes, CMYK and the like become RGB.  Alpha is blended onto ``background``;
    alpha that is 0 everywhere was never meant, as in the 32-bit BMPs of many programs, and counts as opaque.

    Grey samples of more than 8 bits are scaled by what the image says of them, never by its brightest pixel: a TIFF by
    its tags, other 16-bit samples from 0 … 65535, floating-point samples from 0 … 1.

    An error tells what the file is from its content ``data``; with the background ``"none"`` alpha is dropped.  An
    upright image of these modes without transparency is returned itself, not a copy, which would cost a pass over it.
    """
    width, height = image.size
    if not width * height:
        raise UndecodableImage(f"expected an image with pixels, got one of {width}×{height}; leave it out")
    try:
        samples_of = _Samples.of(image)
        image.load()
        return _grey_or_rgb(image, samples_of, background)
    except ImageError:
        raise
    except Exception as error:
        if kind := unread_kind(data, is_open=True):
            raise UnsupportedImage(f"{kind} is not read; {CONVERT}") from error
        raise UndecodableImage(
            f"data of this {width}×{height} {image.format or image.mode} image is damaged or truncated "
            f"({type(error).__name__}); use an intact copy"
        ) from error


def _scale_transparent(image: Image.Image) -> None:
    """Scale the transparent sample of an opened PNG to 8 bits: Pillow scales only the others."""
    transparent, tiles = image.info.get("transparency"), getattr(image, "tile", ())
    if image.format != "PNG" or transparent is None or not tiles:
        return
    raw = tiles[0].args
    if isinstance(transparent, int) and transparent <= (white := _WHITES.get(raw, -1)):
        image.info["transparency"] = transparent * 255 // white
    elif isinstance(transparent, tuple) and raw == "RGB;16B":
        image.info["transparency"] = tuple(each >> 8 for each in transparent)


def _grey_or_rgb(image: Image.Image, samples_of: _Samples | None, background: str) -> Image.Image:
    exif = max(len(image.info.get("exif") or b""), len(image.info.get("Raw profile type exif") or "") // 2)
    check_limit("bytes of EXIF", MAX_EXIF_BYTES, exif)
    _widen_palette(image)
    # Pillow leaves this entry behind where it converts or copies an image; then the pixels have no such colour.
    transparent = image.info.get("transparency")
    if image.format is None and not (image.mode == "P" and isinstance(transparent, int | bytes)):
        transparent = None
    if samples_of is None and image.mode in ("L", "RGB") and "transparency" not in image.info and _is_upright(image):
        return image
    image = ImageOps.exif_transpose(image)
    if samples_of is not None:
        samples = np.asarray(image)
        narrow = samples_of.narrowed(samples)
        if not isinstance(transparent, int):
            return narrow
        alpha = Image.fromarray(np.where(samples == transparent, np.uint8(0), np.uint8(255)))
        return _blended(narrow, alpha, background)
    if transparent is None:
        image.info.pop("transparency", None)  # of the copy that exif_transpose returns
    has_alpha = image.mode in ("LA", "La", "RGBA", "RGBa", "PA") or transparent is not None
    if has_alpha or (image.palette is not None and image.palette.mode == "RGBA"):
        image = image.convert("LA" if image.mode in ("LA", "La") else "RGBA")
        return _blended(image, image.getchannel("A"), background)
    if image.mode in ("L", "RGB"):
        return image
    try:
        return image.convert("L" if image.mode == "1" else "RGB")
    except ValueError as error:
        raise UnsupportedImage(f"a Pillow image of mode {image.mode} is not read; {CONVERT}") from error


def _is_upright(image: Image.Image) -> bool:
    return bool(image.getexif().get(ExifTags.Base.Orientation, 1) == 1)


def _widen_palette(image: Image.Image) -> None:
    """Take the colours of a TIFF for 8-bit ones if all are below 256, as libtiff does; as 16-bit ones all are black."""
    colours = getattr(image, "tag_v2", {}).get(_COLOURS, ()) if image.mode == "P" else ()
    if colours and max(colours) < 256:
        count = len(colours) // 3
        image.putpalette(bytes(colours[at + count * channel] for at in range(count) for channel in range(3)))


def _blended(image: Image.Image, alpha: Image.Image, background: str) -> Image.Image:
    """Blend an image onto the background; return its colours where there is none, or all of it is transparent."""
    mode = image.mode.removesuffix("A")
    if background == "none" or not alpha.getextrema()[1]:
        return image.convert(mode)
    blended = Image.new(mode, image.size, background)
    blended.paste(image, mask=alpha)
    return blended


@dataclass(frozen=True)
class _Samples:
    """What the samples of a grey image mean that Pillow has not scaled to 8 bits."""

    black: float
    white: float
    stored: str = ""  # the dtype of the samples where Pillow has another one
    is_usual: bool = False  # whether 0 … 1 is what floating-point samples usually are, and not what the file says

    @classmethod
    def of(cls, image: Image.Image) -> _Samples | None:
        """Return the meaning of the samples; None if Pillow has scaled them, as it does those of colours."""
        tags = getattr(image, "tag_v2", None)
        if tags is not None:
            return cls._of_tiff(image, tags)
        if image.mode in _SIXTEEN or (image.mode == "I" and image.format in _SCALED):
            return cls(0.0, 65535.0)
        if image.mode == "F":
            return cls(0.0, 1.0, is_usual=True)
        if image.mode == "I":
            raise UnsupportedImage(
                "a Pillow image of mode I does not say which samples are black and white; convert it to mode L, or to "
                "I;16 with samples from 0 to 65535"
            )
        return None

    @classmethod
    def _of_tiff(cls, image: Image.Image, tags: ImageFileDirectory_v2) -> _Samples | None:
        bits, form = _numbers(tags, _BITS, 1), _numbers(tags, _FORM, _UNSIGNED)[0]
        photometric, is_raw = _numbers(tags, _PHOTOMETRIC, 1)[0], _numbers(tags, _COMPRESSION, _RAW)[0] == _RAW
        full = (1 << bits[0]) - 1
        # The largest sample of one image is no scale for others, and the TIFF specification forbids to use this tag as
        # one; but it alone tells of a camera's 12 bits in 16, and 2ᵏ − 1 is no chance.
        told = max(_numbers(tags, _MAX_SAMPLE, full))
        top = told if told in _PARTS_OF_16 and told < full else full
        if image.mode not in _WIDE_MODES and form == _UNSIGNED:
            is_separate = _numbers(tags, _PLANAR, 1)[0] == _SEPARATE
            is_subsampled = max(_numbers(tags, _SUBSAMPLING, 1)) > 1
            # Pillow gives other colours than these, or noise.
            for what, is_so in (
                (f"{top.bit_length()} of {bits[0]} bits", bits[0] > 8 and top < full),
                ("16-bit samples in separate planes", bits[0] > 8 and is_separate),
                ("subsampled colours and no compression", photometric == _YCBCR and is_raw and is_subsampled),
            ):
                if is_so:
                    raise UnsupportedImage(f"a colour TIFF with {what} is not read; {CONVERT}")
            return None
        if not is_raw and tags.prefix == b"MM" and image.mode in ("I", "F"):  # Pillow swaps their bytes once too often.
            raise UnsupportedImage(f"a compressed big-endian TIFF with {bits[0]}-bit samples is not read; {CONVERT}")
        black, white = (_numbers(tags, tag, math.nan)[0] for tag in (_SMIN, _SMAX))
        is_usual = math.isnan(black) and math.isnan(white)
        if form == _FLOAT and is_usual:
            black, white = 0, 1
        elif form == _UNSIGNED:
            black, white = 0 if math.isnan(black) else black, top if math.isnan(white) else white
        if not (math.isfinite(black) and math.isfinite(white) and black != white):
            kind = {_SIGNED: "signed", _FLOAT: "floating-point"}.get(form, "unsigned")
            raise UnsupportedImage(
                f"a TIFF with {bits[0]}-bit {kind} samples whose tags SMinSampleValue and SMaxSampleValue do not say "
                f"which are black and white is not read; {CONVERT}"
            )
        if photometric == _WHITE_IS_ZERO:
            black, white = white, black
        stored = {(_UNSIGNED, 32): "u4", (_SIGNED, 8): "i1"}.get((form, bits[0]), "")
        return cls(float(black), float(white), stored, is_usual and form == _FLOAT)

    def narrowed(self, samples: npt.NDArray[Any]) -> Image.Image:
        samples = samples.view(self.stored) if self.stored else samples
        lowest, highest = samples.min(initial=0), samples.max(initial=0)
        if not np.isfinite([lowest, highest]).all():
            raise UndecodableImage("expected finite samples, got NaN or infinity; replace them")
        if self.is_usual and not -_OVERSHOOT <= lowest <= highest <= 1 + _OVERSHOOT:
            raise UnsupportedImage(
                f"expected floating-point samples from 0 (black) to 1 (white), got {lowest:g} to {highest:g}; {CONVERT}"
            )
        scale = 255.0 / (self.white - self.black)
        narrow = np.empty(samples.shape, np.uint8)
        rows = max(1, _BLOCK // max(1, samples.shape[1]))
        for start in range(0, len(samples), rows):
            part = slice(start, start + rows)
            narrow[part] = np.clip(np.rint((samples[part] - np.float64(self.black)) * np.float64(scale)), 0, 255)
        return Image.fromarray(narrow)


def _numbers(tags: ImageFileDirectory_v2, tag: int, otherwise: Any) -> tuple[Any, ...]:
    """Return the values of a tag, which Pillow gives as one number or several."""
    values = tags.get(tag, otherwise)
    return values if isinstance(values, tuple) and values else (values,)


def mute_codecs() -> None:
    """Keep libtiff and Pillow from writing about damaged files to standard error, and Python from storing each text."""
    warnings.filterwarnings("ignore", module=r"PIL\.")
    with contextlib.suppress(AttributeError):  # Pillow may be built without libtiff.
        ctypes.CDLL(Image.core.__file__).TIFFSetErrorHandler(None)  # type: ignore[attr-defined]
