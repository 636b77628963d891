from __future__ import annotations

import base64
import io
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from app.memory import resident_bytes
from psc_core.allocator import release_freed_memory
from psc_core.errors import ImageError, ImageTooLarge, UndecodableImage, UnsupportedImage
from psc_core.images import BACKGROUNDS, SUFFIXES, decode
from psc_core.images.decode import FAST, IMAGE_FORMATS, SMALL, as_base64, decode_image, open_image, to_grey_or_rgb
from psc_core.images.preprocess import PRESETS
from tests.encoded import encode
from tests.psc_core.images.support import GRADIENT, png_of, tiff_of


@pytest.mark.parametrize("kind", IMAGE_FORMATS)
def test_reads_every_format(kind: str) -> None:
    image = Image.fromarray(np.stack([GRADIENT, GRADIENT.copy(), GRADIENT[::-1]], axis=2))
    decoded = decode_image(encode(image, kind))
    assert decoded.size == (32, 24)
    if kind in ("PNG", "BMP", "TIFF"):
        assert np.array_equal(np.asarray(decoded.convert("RGB")), np.asarray(image))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_suffix_that_a_folder_is_searched_for_can_be_decoded(suffix: str) -> None:
    assert decode_image(encode(Image.new("RGB", (5, 4)), Image.registered_extensions()[suffix])).size == (5, 4)


@pytest.mark.parametrize(
    ("mode", "expected"), [("L", "L"), ("1", "L"), ("LA", "L"), ("P", "RGB"), ("RGBA", "RGB"), ("RGB", "RGB")]
)
def test_every_png_mode_becomes_grey_or_rgb(mode: str, expected: str) -> None:
    decoded = decode_image(encode(Image.fromarray(GRADIENT).convert(mode), "PNG"))
    assert decoded.mode == expected


LEVELS = np.tile(np.arange(0, 256, 5, dtype=np.uint8), (3, 1))  # of grey, which the files below hold in other forms
WIDE = {
    "16 bits": tiff_of(LEVELS.astype("<u2") * 257),
    "16 bits, big-endian": tiff_of((LEVELS.astype("u2") * 257).astype(">u2")),
    "16 bits, white is zero": tiff_of(65535 - LEVELS.astype("<u2") * 257, t262=0),
    "32 bits": tiff_of((LEVELS.astype("u8") * 16843009).astype("<u4")),
    "12 bits in 16, by their maximum": tiff_of((LEVELS.astype(float) / 255 * 4095).round().astype("<u2"), t281=4095),
    "12 bits in 16, white is zero": tiff_of((4095 - LEVELS / 255 * 4095).round().astype("<u2"), t281=4095, t262=0),
    "the maximum of one image": tiff_of(LEVELS.astype("<u2") * 257, t281=3000, t280=17),
    "16 bits with a range": tiff_of(LEVELS.astype("<u2") * 100 + 300, t340=300, t341=25800),
    "16 bits with a maximum": tiff_of(LEVELS.astype("<u2") * 100, t341=25500),
    "signed 8 bits with a range": tiff_of((LEVELS.astype(int) - 128).astype("i1"), t340=-128, t341=127),
    "signed 16 bits with a range": tiff_of(LEVELS.astype("<i2") * 128, t340=0, t341=32640),
    "signed 32 bits with a range": tiff_of(LEVELS.astype("<i4") - 100, t340=-100, t341=155),
    "floats": tiff_of((LEVELS / 255).astype("<f4")),
    "floats, big-endian": tiff_of((LEVELS / 255).astype(">f4")),
    "floats, white is zero": tiff_of((1 - LEVELS / 255).astype("<f4"), t262=0),
    "floats that overshoot": tiff_of(np.where(LEVELS == 255, 1.0001, LEVELS / 255).astype("<f4")),
    "floats with a range": tiff_of(LEVELS.astype("<f4"), t340=0.0, t341=255.0),
    "floats whose range is reversed": tiff_of(255 - LEVELS.astype("<f4"), t340=255.0, t341=0.0),
    "a dark image": tiff_of((LEVELS // 255).astype("<u2")),
}
"""Grey TIFFs with samples that Pillow does not scale to 8 bits."""


@pytest.mark.parametrize("name", WIDE)
def test_grey_samples_mean_what_the_tags_say(name: str) -> None:
    expected = np.zeros_like(LEVELS) if name == "a dark image" else LEVELS
    assert abs(np.asarray(decode_image(WIDE[name])).astype(int) - expected).max() == 0
    assert np.array_equal(np.asarray(to_grey_or_rgb(Image.open(io.BytesIO(WIDE[name])))), expected)


@given(
    low=st.integers(-(1 << 31), (1 << 31) - 2),
    span=st.integers(1, 1 << 31),
    is_reversed=st.booleans(),
    samples=st.lists(st.integers(-(1 << 31), (1 << 31) - 1), min_size=1, max_size=9),
)
def test_a_range_scales_every_sample(low: int, span: int, is_reversed: bool, samples: list[int]) -> None:
    high = min(low + span, (1 << 31) - 1)
    black, white = (high, low) if is_reversed else (low, high)
    found = decode_image(tiff_of(np.array([samples], "<i4"), t340=black, t341=white))
    expected = [255 * min(max((each - black) / (white - black), 0), 1) for each in samples]
    assert abs(np.asarray(found)[0] - expected).max() <= 0.5 + 1e-6


@pytest.mark.parametrize(
    "data",
    [
        tiff_of(LEVELS.astype("<f4")),
        tiff_of(LEVELS.astype("<f4") / 255 - 0.5),
        tiff_of(LEVELS.astype("<f4"), t341=255.0),
        tiff_of(LEVELS.astype("<f4"), t340=3.0, t341=3.0),
        tiff_of(LEVELS.astype("<i4")),
        tiff_of(LEVELS.astype("<i2") * 128),
        tiff_of(LEVELS.astype("i1")),
        tiff_of((np.dstack([LEVELS] * 3) / 255 * 4095).astype("<u2"), t281=(4095,) * 3),
    ],
)
def test_samples_of_unknown_range_are_refused(data: bytes) -> None:
    with pytest.raises(UnsupportedImage, match="convert"):
        decode_image(data)
    with pytest.raises(UnsupportedImage, match="convert"):
        to_grey_or_rgb(Image.open(io.BytesIO(data)))


def test_images_in_memory_with_wide_samples() -> None:
    """16 bits are 0 … 65535 and floats 0 … 1, as in a file; the mode ``I`` holds anything."""
    for form in ("<u2", ">u2"):
        assert np.array_equal(np.asarray(to_grey_or_rgb(Image.fromarray((LEVELS * 257.0).astype(form)))), LEVELS)
    floats = Image.fromarray((LEVELS / 255).astype(np.float32))
    assert np.array_equal(np.asarray(to_grey_or_rgb(floats)), LEVELS)
    for image in (Image.fromarray(LEVELS.astype(np.float32)), Image.fromarray(LEVELS.astype(np.int32))):
        with pytest.raises(UnsupportedImage, match="convert"):
            to_grey_or_rgb(image)
    with pytest.raises(UndecodableImage):
        to_grey_or_rgb(Image.new("L", (0, 4)))


def test_formats_that_pillow_scales_itself() -> None:
    """A greymap may have any maximum, and the significant bits of a PNG change nothing: its samples use all bits."""
    graymap = b"P5 2 1 4095\n" + struct.pack(">HH", 4095, 2048)
    assert np.asarray(to_grey_or_rgb(Image.open(io.BytesIO(graymap)))).tolist() == [[255, 128]]
    data = png_of(b"\0" + struct.pack(">HH", 65520, 32768), 2, 1, 16, 0, sBIT=b"\x0c")
    assert np.asarray(decode_image(data)).tolist() == [[255, 128]]


@pytest.mark.parametrize("frames", ["TIFF", "PNG"])
def test_first_frame_of_wide_samples(frames: str) -> None:
    images = [Image.fromarray(LEVELS.astype(np.uint16) * scale) for scale in (257, 0)]
    data = encode(images[0], frames, save_all=True, append_images=images[1:])
    assert np.array_equal(np.asarray(decode_image(data)), LEVELS)


def test_sixteen_bit_colours_use_all_bits() -> None:
    colours = np.dstack([LEVELS, LEVELS[:, ::-1], 255 - LEVELS])
    assert np.array_equal(np.asarray(decode_image(tiff_of(colours.astype("<u2") * 257))), colours)
    rows = b"".join(b"\0" + row.tobytes() for row in (colours.astype("u2") * 257).astype(">u2"))
    assert np.array_equal(np.asarray(decode_image(png_of(rows, *LEVELS.shape[::-1], 16, 2))), colours)


@pytest.mark.parametrize("scale", [1, 257])
def test_palette_of_a_tiff_has_eight_or_sixteen_bits(scale: int) -> None:
    colours = tuple(value * scale for value in (*range(256), *range(255, -1, -1), *(7,) * 256))
    found = np.asarray(decode_image(tiff_of(LEVELS, t262=3, t320=colours)))
    assert np.array_equal(found, np.dstack([LEVELS, 255 - LEVELS, np.full_like(LEVELS, 7)]))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_rejects_non_finite_samples(value: float) -> None:
    """One NaN would make the scale that of 16-bit samples, and the image black."""
    samples = np.linspace(0.0, 1.0, 64, dtype=np.float32).reshape(8, 8)
    assert np.asarray(decode_image(encode(Image.fromarray(samples), "TIFF"))).max() == 255
    samples[3, 4] = value
    with pytest.raises(UndecodableImage, match="finite samples"):
        decode_image(encode(Image.fromarray(samples), "TIFF"))


@pytest.mark.parametrize("compression", ["raw", "tiff_lzw", "tiff_adobe_deflate", "packbits", "jpeg", "group4"])
@pytest.mark.parametrize("big", [True, False])
def test_reads_every_tiff_of_pillow(compression: str, big: bool) -> None:
    image = Image.fromarray(np.tile(GRADIENT, (9, 9))).convert("1" if compression == "group4" else "RGB")
    assert decode_image(encode(image, "TIFF", compression=compression, big_tiff=big)).size == (288, 216)


@pytest.mark.parametrize("background", BACKGROUNDS)
@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_alpha_is_blended_onto_the_background(background: str, mode: str) -> None:
    levels = np.random.default_rng(0).integers(0, 256, (9, 11, 4)).astype(np.uint8)
    image = Image.fromarray(levels if mode == "RGBA" else levels[..., :2])
    colours, alpha = levels[..., : len(mode) - 1].astype(float), levels[..., len(mode) - 1, None] / 255
    ground = {"black": 0, "white": 255}.get(background)
    expected = colours if ground is None else alpha * colours + (1 - alpha) * ground
    for found in (decode_image(encode(image, "PNG"), background=background), to_grey_or_rgb(image, background)):
        assert abs(np.atleast_3d(np.asarray(found)) - expected).max() <= 1
    assert found.mode == mode[:-1]


@pytest.mark.parametrize("background", BACKGROUNDS)
@pytest.mark.parametrize("kind", ["PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_alpha_that_is_zero_everywhere_counts_as_opaque(background: str, kind: str, mode: str) -> None:
    image = Image.new(mode, (8, 8), (200, 100, 50, 0) if mode == "RGBA" else (200, 0))
    data = encode(image, kind, **({"lossless": True, "exact": True} if kind == "WEBP" else {}))
    for found in (decode_image(data, background=background), to_grey_or_rgb(image, background)):
        assert found.convert("RGB").getpixel((3, 3)) == ((200, 100, 50) if mode == "RGBA" else (200,) * 3)
    image.putpixel((0, 0), (9, 9, 9, 1) if mode == "RGBA" else (9, 1))
    assert to_grey_or_rgb(image).convert("RGB").getpixel((3, 3)) == (0, 0, 0)


def test_bitmap_whose_fourth_byte_is_unused_is_opaque() -> None:
    """A V4 header names a mask for alpha, and many programs leave its bits 0."""
    masks = struct.pack("<IIII", 0xFF0000, 0xFF00, 0xFF, 0xFF000000)
    head = struct.pack("<IiiHHIIiiII", 108, 4, 4, 1, 32, 3, 64, 2835, 2835, 0, 0) + masks + bytes(52)
    data = b"BM" + struct.pack("<IHHI", 14 + len(head) + 64, 0, 0, 14 + len(head)) + head + bytes([30, 20, 10, 0]) * 16
    assert np.unique(np.asarray(decode_image(data)).reshape(-1, 3), axis=0).tolist() == [[10, 20, 30]]


def test_image_in_memory_is_what_its_pixels_say() -> None:
    """Pillow keeps the transparent colour of a file in ``info`` when it converts the image, whose pixels have none."""
    grey = Image.fromarray(np.indices((6, 6)).sum(0).astype(np.uint8) % 2 * 255)
    palette = Image.open(io.BytesIO(encode(grey.convert("P"), "PNG", transparency=255)))
    coloured = Image.open(io.BytesIO(encode(grey.convert("RGB"), "PNG", transparency=(255, 255, 255))))
    assert np.asarray(to_grey_or_rgb(palette)).max() == np.asarray(to_grey_or_rgb(coloured)).max() == 0
    for image in (palette.convert("RGB"), coloured.convert("RGB"), coloured.copy(), coloured.resize((6, 6), 0)):
        assert np.array_equal(np.asarray(to_grey_or_rgb(image).convert("L")), np.asarray(grey)), image.info
    assert np.array_equal(np.asarray(to_grey_or_rgb(coloured.copy().quantize(4)).convert("L")), np.asarray(grey))
    wide = Image.fromarray(np.array([[0, 65535]], np.uint16))
    wide.info["transparency"] = 65535
    assert np.asarray(to_grey_or_rgb(wide)).tolist() == [[0, 255]]


def test_quantised_image_keeps_its_alpha() -> None:
    image = Image.new("RGBA", (8, 8), (200, 100, 50, 255))
    image.paste((90, 90, 90, 0), (0, 0, 4, 8))
    found = np.asarray(to_grey_or_rgb(image.quantize(4, Image.Quantize.FASTOCTREE), "white"))
    assert (found[:, :4] == 255).all() and abs(found[0, 7].astype(int) - (200, 100, 50)).max() <= 8


@pytest.mark.parametrize(
    ("depth", "row", "key", "expected"),
    [
        (1, b"\xaa", 1, [0, 0, 0, 0]),
        (1, b"\xaa", 0, [255, 255, 255, 255]),
        (2, b"\xe4", 3, [0, 170, 85, 0]),
        (4, b"\xf0\x5f", 5, [255, 0, 0, 255]),
        (8, b"\xff\x00\x05\xff", 255, [0, 0, 5, 0]),
        (16, b"\xff\xff\xff\x00\x01\x01\xff\xff", 65535, [0, 254, 1, 0]),
    ],
)
def test_transparent_sample_of_a_grey_png(depth: int, row: bytes, key: int, expected: list[int]) -> None:
    data = png_of(b"\0" + row, 4, 1, depth, 0, tRNS=key.to_bytes(2, "big"))
    found = decode_image(data, background="white" if key == 0 else "black")
    assert np.asarray(found.convert("L"))[0].tolist() == expected


def test_transparent_colour_of_rgb_png_is_blended() -> None:
    clear = Image.new("RGB", (4, 4), (255, 255, 255))
    clear.putpixel((0, 0), (9, 9, 9))
    found = decode_image(encode(clear, "PNG", transparency=(255, 255, 255)))
    assert found.getpixel((0, 0)) == (9, 9, 9) and found.getpixel((1, 1)) == (0, 0, 0)
    data = png_of(b"\0" + b"\x12\x34" * 3 + b"\xff\x34" * 3, 2, 1, 16, 2, tRNS=b"\x12\x34" * 3)
    assert np.asarray(decode_image(data))[0].tolist() == [[0, 0, 0], [255, 255, 255]]


def test_exif_orientation_is_applied() -> None:
    image = Image.fromarray(GRADIENT)
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate 270° counter-clockwise to stand upright
    assert decode_image(encode(image, "JPEG", exif=exif)).size == (24, 32)


def test_wide_samples_are_converted_in_blocks() -> None:
    rows = 2 * decode._BLOCK // 8 + 3
    wide = Image.fromarray((np.arange(rows * 8) % 256).astype(np.uint16).reshape(rows, 8) * 257)
    found = np.asarray(decode.to_grey_or_rgb(wide))
    assert np.array_equal(found.ravel(), np.arange(rows * 8) % 256)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_truncated_file_is_undecodable(kind: str) -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3)).astype(np.uint8))
    data = encode(noise, kind)
    for part in (0.5, 0.01):
        with pytest.raises(UndecodableImage):
            decode_image(data[: max(12, int(len(data) * part))])


@given(st.binary(max_size=300), st.sampled_from(IMAGE_FORMATS), st.integers(0, 200))
def test_damaged_bytes_give_image_or_image_error(noise: bytes, kind: str, at: int) -> None:
    data = bytearray(encode(Image.fromarray(GRADIENT), kind))
    data[at : at + len(noise)] = noise
    try:
        image = decode_image(bytes(data), max_pixels=1 << 16)
    except ImageError:
        return
    assert image.mode in ("L", "RGB")


@pytest.mark.parametrize("lossless", [True, False])
@pytest.mark.parametrize("alpha", [True, False])
def test_rejects_large_webp_unopened(lossless: bool, alpha: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    image = Image.new("RGBA" if alpha else "RGB", (37, 21), (1, 2, 3, 4)[: 4 if alpha else 3])
    data = encode(image, "WEBP", lossless=lossless)
    assert decode_image(data).size == (37, 21)
    monkeypatch.setattr(Image, "open", lambda *_, **__: pytest.fail("opened"))
    with pytest.raises(ImageTooLarge, match="37×21"):
        decode_image(data, max_pixels=36 * 21)


def test_pixel_limit_is_inclusive() -> None:
    data = encode(Image.fromarray(GRADIENT), "PNG")
    assert decode_image(data, max_pixels=24 * 32).size == (32, 24)
    with pytest.raises(ImageTooLarge):
        decode_image(data, max_pixels=24 * 32 - 1)


def test_scans_of_a_large_jpeg_count_with_its_pixels() -> None:
    image = Image.new("L", (400, 400), 9)
    progressive = encode(image, "JPEG", progressive=True)
    scans = progressive.count(b"\xff\xda")
    assert scans > 1 and decode_image(progressive).size == (400, 400)
    body, first = progressive.removesuffix(b"\xff\xd9"), progressive.index(b"\xff\xda")
    many = body + body[first:] * 4
    with pytest.raises(UndecodableImage, match="pixels in all scans together"):
        decode_image(many + b"\xff\xd9", max_pixels=400 * 400)


def run_length_bmp(side: int, commands: bytes) -> bytes:
    palette = bytes(1024)
    head = struct.pack("<IiiHHIIiiII", 40, side, side, 1, 8, 1, len(commands), 0, 0, 256, 0)
    offset = 14 + len(head) + len(palette)
    return struct.pack("<2sIHHI", b"BM", offset + len(commands), 0, 0, offset) + head + palette + commands


def test_commands_of_a_run_length_bmp_count_with_its_pixels() -> None:
    row = bytes([8, 5, 0, 0])
    assert decode_image(run_length_bmp(8, row * 8 + b"\0\1")).size == (8, 8)
    still = b"\0\2\0\0" * 40_000  # Moves by nothing, so the image never ends.
    with pytest.raises(UndecodableImage, match="bytes of run-length code"):
        decode_image(run_length_bmp(8, still))


simplejpeg: Any = pytest.importorskip("simplejpeg", reason="needs the extra psc[fast]")


@st.composite
def pictures(draw: st.DrawFn) -> npt.NDArray[np.uint8]:
    """Noise, or noise made smooth, of at most 70 × 70 pixels."""
    width, height, seed = draw(st.integers(1, 70)), draw(st.integers(1, 70)), draw(st.integers(0, 99))
    cell = draw(st.sampled_from([1, 8]))
    noise = np.random.default_rng(seed).integers(0, 256, (-(-height // cell), -(-width // cell), 3)).astype(np.uint8)
    return np.asarray(Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC))


@st.composite
def jpegs(draw: st.DrawFn) -> bytes:
    """Files of both encoders."""
    picture, quality = draw(pictures()), draw(st.integers(1, 100))
    if draw(st.booleans()):
        subsampling = draw(st.sampled_from(["444", "422", "420", "440", "411", "Gray"]))
        encoded: bytes = simplejpeg.encode_jpeg(np.ascontiguousarray(picture), quality, "RGB", subsampling)
        return encoded
    image = Image.fromarray(picture).convert(draw(st.sampled_from(["RGB", "L", "CMYK"])))
    options: dict[str, Any] = {"progressive": draw(st.booleans()), "optimize": draw(st.booleans())}
    if image.mode == "RGB" and draw(st.booleans()):
        options["keep_rgb"] = True
    elif image.mode == "RGB":
        options["subsampling"] = draw(st.sampled_from(["4:4:4", "4:2:2", "4:2:0"]))
    return encode(image, "JPEG", quality=quality, restart_marker_blocks=draw(st.integers(0, 5)), **options)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """Files that are cut, changed, or followed by something."""
    data = bytearray(draw(jpegs()))
    for _ in range(draw(st.integers(0, 4))):
        data[draw(st.integers(2, len(data) - 1))] = draw(st.integers(0, 255))
    end = draw(st.one_of(st.just(len(data)), st.integers(3, len(data))))
    return bytes(data[:end]) + draw(st.binary(max_size=20))


def by_pillow(data: bytes) -> npt.NDArray[np.uint8] | type[ImageError]:
    """Samples (height, width, 3 or 1), or the class of the error."""
    try:
        return np.atleast_3d(np.asarray(open_image(data).decode()))
    except ImageError as error:
        return type(error)


@given(jpegs() | damaged())
def test_pixels_are_those_of_pillow_and_what_pillow_refuses_is_left_to_it(data: bytes) -> None:
    expected = by_pillow(data)
    try:
        file = open_image(data)
    except ImageError as error:
        assert type(error) is expected
        return
    samples = file.samples(file.image.mode)
    if isinstance(expected, type):
        assert samples is None
    elif samples is not None:
        assert np.array_equal(samples[..., : expected.shape[2]], expected)


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_plain_file_takes_the_quick_way_to_the_same_input(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (300, 400, 3)).astype(np.uint8)
    data = encode(Image.fromarray(noise).convert(mode), "JPEG", progressive=True)
    preprocess = PRESETS["imagenet" if mode == "RGB" else "mnist"]
    assert open_image(data).samples(mode) is not None
    quick = preprocess.from_bytes(data)
    monkeypatch.setattr(decode, "HAS_SIMPLEJPEG", False)
    assert open_image(data).samples(mode) is None
    assert np.array_equal(preprocess.from_bytes(data), quick)


def test_what_is_not_plain_is_left_to_pillow() -> None:
    image = Image.new("RGB", (30, 20), (9, 80, 200))
    assert open_image(encode(image, "PNG")).samples("RGB") is None
    assert open_image(encode(image.convert("CMYK"), "JPEG")).samples("RGB") is None
    assert open_image(encode(image, "JPEG")).samples("L") is None
    exif = Image.Exif()
    for orientation, is_plain in ((1, True), (6, False)):
        exif[0x0112] = orientation
        assert (open_image(encode(image, "JPEG", exif=exif)).samples("RGB") is not None) is is_plain


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("mode", "kind"), [("RGB", "JPEG"), ("CMYK", "JPEG"), ("RGBA", "PNG"), ("RGBA", "WEBP"), ("F", "TIFF")]
)
def test_an_image_takes_no_more_memory_than_it_says(mode: str, kind: str, turned: bool) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    image = (
        Image.frombytes("RGBA", (2000, 1500), bytes(range(256)) * 46_875).convert(mode.replace("F", "L")).convert(mode)
    )
    image = image.point(lambda value: value / 255) if mode == "F" else image
    data = encode(image, kind, **({"exif": exif} if turned else {}))
    del image
    preprocess, status = replace(PRESETS["imagenet"], resizer="torch"), Path("/proc/self/status")
    for _ in range(2):  # The first time more is imported.
        release_freed_memory()
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            pytest.skip("the peak of the memory cannot be measured here")
        before = resident_bytes()
        file = open_image(data)
        preprocess.from_file(file)
        peak = 1024 * int(status.read_text().partition("VmHWM:")[2].split()[0])
    assert peak - before <= file.memory_bytes("RGB") + (2 << 20)
    assert (file.memory_bytes("RGB") == 6 * 3_000_000) == (mode == "RGB" and not turned)


def test_library_of_other_pixels_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    real = simplejpeg.decode_jpeg
    monkeypatch.setattr(simplejpeg, "decode_jpeg", lambda *args, **options: real(*args, **options) ^ 1)
    decode._agrees.cache_clear()
    try:
        assert open_image(encode(Image.new("RGB", (30, 20)), "JPEG")).samples("RGB") is None
        assert "different pixels" in caplog.text
    finally:
        decode._agrees.cache_clear()


@pytest.mark.parametrize("shape", [(5, 7), (1, 5, 7), (3, 5, 7)])
@pytest.mark.parametrize("level", [FAST, SMALL])
def test_a_png_holds_the_pixels(shape: tuple[int, ...], level: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    with Image.open(io.BytesIO(base64.b64decode(as_base64(decode.png_of(pixels, level))))) as picture:
        assert picture.format == "PNG" and picture.mode == ("RGB" if shape[0] == 3 else "L")
        expected = pixels.transpose(1, 2, 0) if shape[0] == 3 else pixels.reshape(5, 7)
        assert np.array_equal(np.asarray(picture), expected)


COLOURS = np.dstack([GRADIENT, GRADIENT[::-1], 255 - GRADIENT])


def jpeg_of(frame: int, bits: int = 8) -> bytes:
    """A JPEG whose frame says that it is of another kind."""
    data = bytearray(encode(Image.fromarray(COLOURS), "JPEG"))
    at = data.index(b"\xff\xc0")
    data[at + 1], data[at + 4] = frame, bits
    return bytes(data)


def bmp_of(bits: int, compression: int, data: bytes) -> bytes:
    head = struct.pack("<IiiHHIIiiII", 40, 32, 24, 1, bits, compression, len(data), 0, 0, 0, 0)
    return struct.pack("<2sIHHI", b"BM", 54 + len(data), 0, 0, 54) + head + data


UNREAD = {
    "64-bit floating-point": tiff_of(GRADIENT.astype("<f8")),
    "16-bit floating-point": tiff_of(GRADIENT.astype("<f2")),
    "64-bit unsigned": tiff_of(GRADIENT.astype("<u8")),
    "64-bit complex": tiff_of(GRADIENT.astype("<c8"), t339=6),
    "32-bit floating-point samples, RGB": tiff_of(COLOURS.astype("<f4") / 255),
    "white is zero, big-endian": tiff_of(GRADIENT.astype(">u2"), t262=0),
    "5 channels": tiff_of(np.dstack([GRADIENT] * 5), t262=1),
    "10-bit": tiff_of(GRADIENT, t258=10, t256=16),
    "camera raw": tiff_of(GRADIENT, t262=32803),
    "LERC": tiff_of(GRADIENT, t259=34887),
    "JPEG 2000": tiff_of(GRADIENT, t259=34712),
    "(12345)|12345": tiff_of(GRADIENT, t259=12345),
    "separate planes": tiff_of(
        COLOURS.transpose(2, 0, 1).reshape(24, 32, 3), t262=6, t284=2, t273=(8, 776, 1544), t279=(768,) * 3, t530=(1, 1)
    ),
    "planes": tiff_of(COLOURS.astype("<u2"), t284=2, t273=(8, 1544, 3080), t279=(1536,) * 3),
    "subsampled": tiff_of(COLOURS, t262=6, t530=(2, 2)),
    "BigTIFF": b"MM\0+\0\x08\0\0" + struct.pack(">Q", 16) + bytes(64),
    "12-bit": jpeg_of(0xC1, 12),
    "lossless JPEG with 16-bit": jpeg_of(0xC3, 16),
    "hierarchical": jpeg_of(0xC5),
    "JPEG-LS": jpeg_of(0xF7),
    "BMP with 0-bit samples and compression 4": bmp_of(0, 4, encode(Image.fromarray(COLOURS), "JPEG")),
    "BMP with 64-bit": bmp_of(64, 0, bytes(32 * 24 * 8)),
    "CgBI": png_of(b"", 1, 1, 8, 6).replace(b"\0\0\0\rIHDR", b"\0\0\0\4CgBIP\0 \2\x2b\xd5\xb3\x7f\0\0\0\rIHDR"),
}
"""Intact files that Pillow does not read, or not right, by what the message has to name."""


@pytest.mark.parametrize("named", UNREAD)
def test_intact_file_of_an_unread_kind(named: str) -> None:
    with pytest.raises(UnsupportedImage) as caught:
        decode_image(UNREAD[named])
    assert any(each in str(caught.value) for each in named.split("|")) and "convert" in str(caught.value)
    assert "damaged" not in str(caught.value)


@pytest.mark.parametrize("named", ["64-bit floating-point", "LERC", "12-bit", "BMP with 64-bit"])
def test_a_part_of_such_a_file_is_damaged(named: str) -> None:
    data = UNREAD[named]
    with pytest.raises(UndecodableImage):
        decode_image(
            data[: 60 if named.startswith("BMP") else len(data) // 2].replace(b"\x36\0\0\0\x28", b"\xff\0\0\0\x28")
        )


@pytest.mark.parametrize("frame", [0xC0, 0xC1, 0xC2])
def test_damaged_data_of_a_kind_that_is_read(frame: int) -> None:
    data = jpeg_of(frame)
    with pytest.raises(UndecodableImage):
        decode_image(data[: len(data) // 2])
    with pytest.raises(UndecodableImage):
        decode_image(tiff_of(GRADIENT, t259=8))


@pytest.mark.parametrize(
    ("start", "named"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (b"/annex/objects/SHA256E-s1--0.jpg\n", "git annex get"),
        (b"\n<!DOCTYPE html>", "HTML"),
        (b"\xef\xbb\xbf <HTML>", "HTML"),
        (b'{"error": "not found"}', "JSON"),
        (b'<?xml version="1.0"?><Error/>', "XML"),
        (b"data:image/png;base64,iVBORw0KGgo", "base64"),
        (b"iVBORw0KGgoAAAANSUhEUg", "base64"), (b"\0\0\0\x1cftypavif", "AVIF"), (b"\0\0\0\x1cftypheic", "HEIC"),
        (b"\0\0\0\x0cjP  \r\n\x87\n", "JPEG 2000"), (b"\xff\x0a", "JPEG XL"), (b"%PDF-1.7", "PDF"),
        (b"PK\x03\x04", "ZIP"), (b"", "no data"),
    ],
)  # fmt: skip
def test_other_files_are_named(start: bytes, named: str) -> None:
    with pytest.raises(UnsupportedImage, match=named):
        decode_image(start + bytes(100) if start else start)


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF", "TIFF"])
def test_first_frame_of_an_animation_is_read(kind: str) -> None:
    frames = [Image.fromarray(COLOURS), Image.fromarray(255 - COLOURS)]
    options = {"lossless": True} if kind == "WEBP" else {}
    found = decode_image(encode(frames[0], kind, save_all=True, append_images=frames[1:], **options)).convert("RGB")
    assert abs(np.asarray(found).astype(int) - COLOURS).mean() < (8 if kind == "GIF" else 1)


def test_cmyk_of_a_tiff_is_read() -> None:
    data = encode(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "TIFF")
    assert decode_image(data).getpixel((1, 1)) == (255, 0, 0)
