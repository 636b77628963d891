"""Hostile images: decoded or rejected with an ImageError, quickly, whatever their headers claim."""

import struct
import time
import zlib
from collections.abc import Iterator

import pytest
from PIL import Image

from psc_core.errors import ImageError, ImageTooLarge, UndecodableImage, UnsupportedImage
from psc_core.images import decode
from psc_core.images.decode import decode_image
from psc_core.images.preprocess import PRESETS
from tests.encoded import encode
from tests.psc_core.images.support import chunk

MAX_PIXELS = 1 << 20


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    start = time.process_time()
    yield
    assert time.process_time() - start < 5.0


def png(width: int, height: int, *middle: bytes, data: bytes = b"") -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"".join([b"\x89PNG\r\n\x1a\n", chunk(b"IHDR", header), *middle, chunk(b"IDAT", data), chunk(b"IEND", b"")])


PIXELS = zlib.compress(b"\0" * 29 * 28)
ZEROS = zlib.compress(b"\0" * (64 << 20), 9)  # 64 MiB of zeros in 64 KiB

BOMBS = {
    "pixels": png(28, 28, data=ZEROS),
    "compressed text": png(28, 28, *[chunk(b"zTXt", b"k\0\0" + ZEROS)] * 4, data=PIXELS),
    "international text": png(28, 28, chunk(b"iTXt", b"k\0\1\0\0\0" + ZEROS), data=PIXELS),
    "colour profile": png(28, 28, chunk(b"iCCP", b"k\0\0" + ZEROS), data=PIXELS),
    "a thousand chunks": png(28, 28, *[chunk(b"tEXt", b"k\0v")] * 1000, data=PIXELS),
    "chunk of 2 GiB": png(28, 28, struct.pack(">I", 2**31 - 1) + b"tEXt", data=PIXELS),
    "EXIF": png(28, 28, chunk(b"eXIf", b"II*\0\x08\0\0\0\xff\xff" + b"\xff" * 600), data=PIXELS),
    "no pixels": png(28, 28),
    "wide": png(2**31 - 1, 1, data=PIXELS),
    "no width": png(0, 28, data=PIXELS),
}


@pytest.mark.parametrize("name", BOMBS)
def test_png_bombs(name: str) -> None:
    try:
        array = PRESETS["mnist"].from_bytes(BOMBS[name], max_pixels=MAX_PIXELS)
    except ImageError as error:
        assert len(str(error)) < 500
    else:
        assert array.shape == (1, 28, 28)


@pytest.mark.parametrize("side", [65_535, 60_000])
def test_large_headers(side: int) -> None:
    size = struct.pack("<HH", side, side)
    gif = b"GIF89a" + size + b"\0\0\0,\0\0\0\0" + size + b"\0\x02\0;"
    bmp = b"BM" + struct.pack("<IHHIIiiHHIIiiII", 54, 0, 0, 54, 40, side, side, 1, 24, 0, 0, 0, 0, 0, 0)
    jpeg = encode(Image.new("L", (8, 8)), "JPEG")
    at = jpeg.index(b"\xff\xc0") + 5
    jpeg = jpeg[:at] + struct.pack(">HH", side, side) + jpeg[at + 4 :]
    for data in (gif, bmp, jpeg):
        with pytest.raises(ImageTooLarge):
            decode_image(data, max_pixels=MAX_PIXELS)


def test_tiff_that_points_at_itself() -> None:
    tags = [(256, 4, 1, 28), (257, 4, 1, 28), (258, 3, 1, 8), (262, 3, 1, 1), (273, 4, 2**31, 8), (279, 4, 2**31, 8)]
    body = struct.pack("<H", len(tags)) + b"".join(struct.pack("<HHII", *tag) for tag in tags) + struct.pack("<I", 8)
    with pytest.raises((UndecodableImage, UnsupportedImage)):
        decode_image(b"II*\0\x08\0\0\0" + body)


@pytest.mark.parametrize(
    "head",
    [
        *(b"%!PS-Adobe-3.0 EPSF-3.0\n", b"%PDF-1.7\n", b"<svg xmlns='x'>", b"P6 9 9 255\n"),
        *(b"\0\0\0\x0cjP  \r\n\x87\n", b"\x80\x04\x95", b"PK\x03\x04", b"8BPS", b"#!/bin/sh\n"),
    ],
)
def test_rejects_other_files_with_an_image_appended(head: bytes) -> None:
    with pytest.raises(UnsupportedImage):
        decode_image(head + encode(Image.new("L", (8, 8))))


@pytest.mark.parametrize("size", [(1, 1), (2, 1), (1, 500), (500, 1), (1, MAX_PIXELS), (MAX_PIXELS, 1)])
@pytest.mark.parametrize("preset", PRESETS)
def test_thin_images(preset: str, size: tuple[int, int]) -> None:
    shape = PRESETS[preset].from_bytes(encode(Image.new("RGB", size)), max_pixels=MAX_PIXELS).shape
    assert shape == (PRESETS[preset].channels, PRESETS[preset].height, PRESETS[preset].width)


def jpeg_of(scans: int, *, between: bytes = b"") -> bytes:
    """A JPEG whose last scan is repeated until it has so many, with something before each that is added."""
    data = encode(Image.linear_gradient("L").resize((64, 64)), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:-2] + (between + data[last:-2]) * (scans - data.count(b"\xff\xda")) + data[-2:]


def test_rejects_jpeg_of_many_scans(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 bytes of an empty scan cost as much as a pass over all pixels."""
    assert decode_image(jpeg_of(decode.MAX_SCANS)).size == (64, 64)
    monkeypatch.setattr(Image, "open", lambda *_, **__: pytest.fail("opened"))
    with pytest.raises(UndecodableImage):
        decode_image(jpeg_of(decode.MAX_SCANS + 1))


def test_counts_scans_as_libjpeg(monkeypatch: pytest.MonkeyPatch) -> None:
    fill, stray, comment = b"\xff" * 9, b"\0\1\2", b"\xff\xfe\0\4\xff\xd9"
    monkeypatch.setattr(Image, "open", lambda *_, **__: pytest.fail("opened"))
    for between in (fill, stray, comment, b"\xff\0", b"\xff\xd0"):
        with pytest.raises(UndecodableImage):
            decode_image(jpeg_of(decode.MAX_SCANS + 1, between=between))


def test_ignores_scan_markers_in_other_data() -> None:
    """StoredImages, colour profiles, and the film that a telephone puts behind a photograph."""
    data, many = jpeg_of(9), b"\xff\xda" * 2000
    comment = b"\xff\xfe" + struct.pack(">H", 2 + len(many)) + many
    for other in (data[:2] + comment + data[2:], data + many, data + jpeg_of(90)):
        assert decode_image(other).size == (64, 64)


def test_rejects_headers_of_many_pieces() -> None:
    """Pillow takes a microsecond for each of these, and sixteen times their memory."""
    jpeg, gif, bare = (encode(Image.new("L", (8, 8)), kind) for kind in ("JPEG", "GIF", "PNG"))
    for middle in (b"\xff" * 20_000, b"\xff\xfe\0\2" * 20_000, b"\xff\xd8" * 20_000, b"\xff\xf0\xff\xff" * 20_000):
        with pytest.raises(UndecodableImage):
            decode_image(jpeg[:2] + middle + jpeg[2:])
    for middle in (b"!\xfe\1a\0" * 9_000, b"\1" * 20_000):
        with pytest.raises(UndecodableImage):
            decode_image(gif[: gif.index(b",")] + middle + gif[gif.index(b",") :])
    for at in (33, -12):
        with pytest.raises(UndecodableImage):
            decode_image(bare[:at] + chunk(b"abCd", b"") * 12_000 + bare[at:])


def test_rejects_many_colour_profiles() -> None:
    one = chunk(b"iCCP", b"k\0\0" + zlib.compress(bytes(1000)))
    assert decode_image(png(28, 28, one, data=PIXELS)).size == (28, 28)
    for count in (3, 1000):
        with pytest.raises(UndecodableImage):
            decode_image(png(28, 28, *[one] * count, data=PIXELS))


PACKED = zlib.compress(bytes(1000))
TEXTS = {"zTXt": b"k\0\0" + PACKED, "iTXt": b"k\0\1\0en\0k\0" + PACKED, "of an odd flag": b"k\0\7\0\0\0" + PACKED}


@pytest.mark.parametrize("kind", TEXTS)
def test_rejects_many_compressed_texts(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Each is 1 kB that unpacks to 1 MB, in 4 to 8 ms."""
    one = chunk(b"zTXt" if kind == "zTXt" else b"iTXt", TEXTS[kind])
    plain = [chunk(b"tEXt", b"k\0v"), chunk(b"iTXt", b"k\0\0\0\0\0v"), chunk(b"iTXt", b"k\0"), chunk(b"iTXt", b"k")] * 9
    image = png(28, 28, *plain, *[one] * 10, data=PIXELS)  # of an honest program
    assert decode_image(image).size == (28, 28)
    monkeypatch.setattr(Image, "open", lambda *_, **__: pytest.fail("opened"))
    for middle in ([one] * 17, [one] * 9 + [chunk(b"IDAT", b"")] + [one] * 8):
        with pytest.raises(UndecodableImage, match="at most 16 compressed texts"):
            decode_image(png(28, 28, *middle, data=PIXELS))


def tiff(data: bytes, **tags: int | list[int]) -> bytes:
    """A TIFF of 16 × 16 grey pixels with the data at its end; tags by number (``t256=…``), all as LONG."""
    body = {256: [16], 257: [16], 258: [8], 259: [8], 262: [1], 277: [1]}
    for name, value in tags.items():
        body[int(name[1:])] = value if isinstance(value, list) else [value]
    at = 8 + 2 + 12 * len(body) + 4
    entries, behind = b"", b""
    for tag, values in sorted(body.items()):
        packed = struct.pack(f"<{len(values)}I", *values)
        where = struct.pack("<I", at + len(behind)) if len(values) > 1 else packed
        entries += struct.pack("<HHI", tag, 4, len(values)) + where
        behind += packed if len(values) > 1 else b""
    return b"II*\0\x08\0\0\0" + struct.pack("<H", len(body)) + entries + bytes(4) + behind + data


def tiled(width: int, height: int, **tags: int | list[int]) -> bytes:
    data = zlib.compress(bytes(min(width * height, 1 << 16)), 9)
    where = len(tiff(b"", t322=0, t323=0, t324=0, t325=0, **tags))
    return tiff(data, t322=width, t323=height, t324=where, t325=len(data), **tags)


def test_tile_pixels_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A 16 × 16 image in one tile of 30000² took 860 MB."""
    assert decode_image(tiled(16, 16)).size == (16, 16)
    assert decode_image(tiled(256, 256), max_pixels=1 << 16).size == (16, 16)
    monkeypatch.setattr(Image, "open", lambda *_, **__: pytest.fail("opened"))
    with pytest.raises(ImageTooLarge):
        decode_image(tiled(256, 256), max_pixels=(1 << 16) - 1)
    for width, height in ((30_000, 30_000), (16, 1 << 31), (1 << 31, 16)):
        with pytest.raises(ImageTooLarge):
            decode_image(tiled(width, height))


def test_overlapping_tiles_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of a thousand columns in a tile of its own, a thousand times as long as the image."""
    monkeypatch.setattr(Image, "open", lambda *_, **__: pytest.fail("opened"))
    with pytest.raises(ImageTooLarge):
        decode_image(tiled(1, MAX_PIXELS, t256=1000), max_pixels=MAX_PIXELS)


@pytest.mark.parametrize("kind", [5, 17])
def test_rejects_tile_sizes_pillow_does_not_read(kind: int) -> None:
    """libtiff takes other types of number than Pillow does."""
    data = tiled(30_000, 30_000).replace(struct.pack("<HH", 322, 4), struct.pack("<HH", 322, kind))
    with pytest.raises(UndecodableImage):
        decode_image(data)


def test_rejects_tiff_of_many_strips() -> None:
    """Pillow makes an object of each."""
    many = decode._MAX_VALUES + 1
    for compression in (1, 8):
        with pytest.raises(UndecodableImage):
            decode_image(tiff(bytes(64), t256=1, t257=many, t259=compression, t273=[8] * many, t278=1))


def test_rejects_strips_that_share_bytes() -> None:
    """libtiff goes through them once for each strip."""
    data = b"\x80" * 5_000
    with pytest.raises(UndecodableImage):
        decode_image(tiff(data, t257=500, t259=32773, t273=[8] * 500, t278=1, t279=[len(data)] * 500))


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("big", [True, False])
def test_tiff_byte_orders_and_sizes(order: str, big: bool) -> None:
    tags = [(256, 3, 16), (257, 3, 16), (258, 3, 8), (259, 3, 1), (262, 3, 1), (273, 3, 0), (278, 3, 16), (279, 3, 256)]
    tags += [(322, 4, 30_000), (323, 3, 30_000)]
    form, value = ("HHQ", 8) if big else ("HHL", 4)
    body = b"".join(
        struct.pack(order + form, tag, kind, 1)
        + struct.pack(order + ("H" if kind == 3 else "I"), n).ljust(value, b"\0")
        for tag, kind, n in tags
    )
    head = (b"II" if order == "<" else b"MM") + struct.pack(order + "H", 43 if big else 42)
    head += struct.pack(order + ("HHQQ" if big else "LH"), *((8, 0, 16, len(tags)) if big else (8, len(tags))))
    with pytest.raises(ImageTooLarge if order == "<" or not big else UnsupportedImage):  # Pillow reads no big MM.
        decode_image(head + body + bytes(512))


def test_rejects_large_exif() -> None:
    """A fraction of eight bytes is an object of two hundred."""
    many = (1 << 20) // 8
    fractions = struct.pack("<HHHIII", 1, 0x112, 5, many, 26, 0) + struct.pack("<II", 1, 1) * many
    exif = b"Exif\0\0II*\0\x08\0\0\0" + fractions
    parts = [exif[:60_000], *[b"Exif\0\0" + exif[at : at + 60_000] for at in range(60_000, len(exif), 60_000)]]
    jpeg = encode(Image.new("L", (8, 8)), "JPEG")
    middle = b"".join(b"\xff\xe1" + struct.pack(">H", 2 + len(part)) + part for part in parts)
    text = chunk(b"tEXt", b"Raw profile type exif\0\nexif\n 9\n" + exif[6:].hex().encode())
    for data in (
        jpeg[:2] + middle + jpeg[2:],
        encode(Image.new("L", (8, 8)), exif=exif),
        encode(Image.new("RGB", (8, 8)), "WEBP", exif=exif),
        png(28, 28, text, data=PIXELS),
    ):
        with pytest.raises(UndecodableImage):
            decode_image(data)


def test_run_length_bitmaps_are_limited() -> None:
    def bmp(width: int, height: int) -> bytes:
        runs, start = b"\1\1\0\0" * height + b"\0\1", 54 + 1024
        head = struct.pack("<IHHI", start + len(runs), 0, 0, start)
        head += struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, 1, len(runs), 0, 0, 256, 0)
        return b"BM" + head + bytes(1024) + runs

    assert decode_image(bmp(100, 100), max_pixels=500_000).size == (100, 100)
    with pytest.raises(ImageTooLarge):
        decode_image(bmp(101, 100), max_pixels=500_000)
