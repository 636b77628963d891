"""Every format and colour mode."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from psc_core.errors import ImageError, UndecodableImage, UnsupportedImage
from psc_core.images import SUFFIXES, decode
from psc_core.images.decode import IMAGE_FORMATS, decode_image
from tests.psc_core.images.support import GRADIENT, encode


@pytest.mark.parametrize("kind", IMAGE_FORMATS)
def test_reads_every_format(kind: str) -> None:
    image = Image.fromarray(np.stack([GRADIENT, GRADIENT.copy(), GRADIENT[::-1]], axis=2))
    decoded = decode_image(encode(image, kind))
    assert decoded.size == (32, 24)
    if kind in ("PNG", "BMP", "TIFF"):
        assert np.array_equal(np.asarray(decoded.convert("RGB")), np.asarray(image))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_suffix_that_a_folder_is_searched_for_can_be_decoded(suffix: str) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (5, 4)).save(buffer, Image.registered_extensions()[suffix])
    assert decode_image(buffer.getvalue()).size == (5, 4)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("L", "L"), ("1", "L"), ("LA", "L"), ("P", "RGB"), ("RGBA", "RGB"), ("RGB", "RGB")],
)
def test_every_png_mode_becomes_grey_or_rgb(mode: str, expected: str) -> None:
    decoded = decode_image(encode(Image.fromarray(GRADIENT).convert(mode), "PNG"))
    assert decoded.mode == expected


def test_cmyk_jpeg_becomes_rgb() -> None:
    assert decode_image(encode(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG")).mode == "RGB"


def test_sixteen_bit_samples_are_scaled_not_clipped() -> None:
    wide = Image.fromarray(GRADIENT.astype(np.uint16) * 257)
    assert np.array_equal(np.asarray(decode_image(encode(wide, "PNG"))), GRADIENT)


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


def test_alpha_is_blended_onto_black() -> None:
    half = Image.new("RGBA", (4, 4), (200, 100, 50, 0))
    assert np.asarray(decode_image(encode(half, "PNG"))).max() == 0


def test_exif_orientation_is_applied() -> None:
    image = Image.fromarray(GRADIENT)
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate 270° counter-clockwise to stand upright
    assert decode_image(encode(image, "JPEG", exif=exif)).size == (24, 32)


def test_animation_gives_first_frame() -> None:
    frames = [Image.new("L", (8, 8), value) for value in (10, 200)]
    data = encode(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert abs(int(np.asarray(decode_image(data).convert("L"))[0, 0]) - 10) <= 1


def test_transparent_colour_of_rgb_png_is_blended() -> None:
    clear = Image.new("RGB", (4, 4), (255, 255, 255))
    assert np.asarray(decode_image(encode(clear, "PNG", transparency=(255, 255, 255)))).max() == 0


def test_wide_samples_are_converted_in_blocks() -> None:
    rows = 2 * decode._BLOCK // 8 + 3
    wide = Image.fromarray((np.arange(rows * 8) % 256).astype(np.uint16).reshape(rows, 8) * 257)
    found = np.asarray(decode.to_grey_or_rgb(wide))
    assert np.array_equal(found.ravel(), np.arange(rows * 8) % 256)


@pytest.mark.parametrize("data", [b"", b"hello", b"\x00" * 1000, b"<svg/>", b"%PDF-1.7", b"\xff\xd8"])
def test_other_bytes_are_unsupported(data: bytes) -> None:
    advice = "another format; convert the image to JPEG or PNG" if data else "no data; use an intact copy"
    with pytest.raises(UnsupportedImage, match=f"expected one of JPEG.*{advice}$"):
        decode_image(data)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_truncated_file_is_undecodable(kind: str) -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3)).astype(np.uint8))
    data = encode(noise, kind)
    for part in (0.5, 0.01):
        with pytest.raises(
            UndecodableImage, match=r"(damaged or truncated.*; use an intact copy|; save the image again)$"
        ):
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
