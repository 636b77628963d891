"""simplejpeg and Pillow give the same pixels, or both the same kind of error."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from psc_core.errors import ImageError
from psc_core.images import decode as turbo
from psc_core.images.decode import open_image
from psc_core.images.preprocess import PRESETS
from tests.psc_core.images.support import encode

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
    monkeypatch.setattr(turbo, "HAS_SIMPLEJPEG", False)
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


def test_library_of_other_pixels_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    decode = simplejpeg.decode_jpeg
    monkeypatch.setattr(simplejpeg, "decode_jpeg", lambda *args, **options: decode(*args, **options) ^ 1)
    turbo._agrees.cache_clear()
    try:
        file = io.BytesIO()
        Image.new("RGB", (30, 20)).save(file, "JPEG")
        assert open_image(file.getvalue()).samples("RGB") is None
        assert "different pixels" in caplog.text
    finally:
        turbo._agrees.cache_clear()
