from __future__ import annotations

import inspect
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import ExifTags, Image
from pydantic import TypeAdapter, ValidationError

from psc_core import PSC, open_loader
from psc_core.data.loaders import LoaderDescription
from psc_core.errors import ImageError, UsageError
from psc_core.images import BACKGROUNDS, CROP_ROUNDINGS
from psc_core.images.preprocess import INTERPOLATIONS, PRESETS, RESIZERS, Preprocess, as_batch, read_image
from tests.conftest import SHIPPED_BUNDLE
from tests.encoded import encode


@pytest.mark.parametrize("name", sorted(PRESETS))
@given(width=st.integers(1, 400), height=st.integers(1, 400), grey=st.booleans())
def test_any_image_becomes_input_size(name: str, width: int, height: int, grey: bool) -> None:
    preprocess = PRESETS[name]
    array = preprocess.from_image(Image.new("L" if grey else "RGB", (width, height), 128 if grey else (128,) * 3))
    assert array.shape == preprocess.shape
    assert array.dtype == np.uint8
    assert (array == 128).all()


@pytest.mark.parametrize("rounding", CROP_ROUNDINGS)
@pytest.mark.parametrize("resizer", RESIZERS)
@given(width=st.integers(1, 400), height=st.integers(1, 400), seed=st.integers(0, 9))
def test_crop_equals_resizing_all_and_cropping_then(
    resizer: str, rounding: str, width: int, height: int, seed: int
) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype(np.uint8)
    preprocess = replace(PRESETS["imagenet"], resizer=resizer, crop_rounding=rounding)
    image = Image.fromarray(pixels)
    shorter = min(width, height)
    size = (256 * width // shorter, 256 * height // shorter)
    if resizer == "pillow":
        resized = np.asarray(image.resize(size, Image.Resampling.BILINEAR))
    else:  # Its own: Pillow's, which rounds elsewhere, is two levels apart for a few pixels of one image in 1,000.
        planes = torch.from_numpy(pixels).permute(2, 0, 1)[None]
        whole = torch.nn.functional.interpolate(planes, size[::-1], mode="bilinear", antialias=True)
        resized = whole[0].permute(1, 2, 0).numpy()
    left, top = (round((side - 224) / 2) if rounding == "even" else (side - 224) // 2 for side in size)
    found = preprocess.from_image(image).transpose(1, 2, 0).astype(int)
    assert abs(found - resized[top : top + 224, left : left + 224]).max() <= 1


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_pixels_come_back_from_inputs(name: str) -> None:
    preprocess = PRESETS[name]
    levels = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, preprocess.channels, 16, 16)
    inputs = preprocess.standardise(levels)
    assert torch.equal(preprocess.to_pixels(inputs), levels)
    assert torch.equal(preprocess.to_pixels(levels), levels)
    assert torch.equal(preprocess.standardise(inputs), inputs)
    assert preprocess.standardise(inputs) is not inputs
    assert preprocess.to_pixels(torch.full_like(inputs, 1e9)).unique().tolist() == [255]


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_normalise_equals_float64_formula(name: str) -> None:
    preprocess = PRESETS[name]
    images = torch.randint(0, 256, (3, preprocess.channels, 5, 4), dtype=torch.uint8)
    mean = torch.tensor(preprocess.mean, dtype=torch.float64)[:, None, None]
    std = torch.tensor(preprocess.std, dtype=torch.float64)[:, None, None]
    expected = (images.double() / 255 - mean) / std
    torch.testing.assert_close(preprocess.standardise(images).double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_json_round_trip(name: str) -> None:
    text = json.dumps(PRESETS[name].to_json())
    assert TypeAdapter(Preprocess).validate_json(text) == PRESETS[name]
    assert "resizer" not in replace(PRESETS[name], resizer="pillow").to_json()
    with pytest.raises(ValidationError):
        TypeAdapter(Preprocess).validate_json(text.replace('"mode"', '"modus"'))


@pytest.mark.parametrize("resizer", RESIZERS)
@pytest.mark.parametrize(("background", "level"), [("black", 0), ("white", 255), ("none", 90)])
def test_alpha_is_read_as_the_preprocess_says(resizer: str, background: str, level: int) -> None:
    image = Image.new("RGBA", (32, 32), (90, 90, 90, 255))
    image.paste((90, 90, 90, 0), (0, 0, 32, 16))
    preprocess = replace(PRESETS["cifar10"], resizer=resizer, background=background)
    for found in (preprocess.from_bytes(encode(image)), read_image(image, preprocess)):
        assert (found[:, :15] == level).all() and (found[:, 17:] == 90).all()


@pytest.mark.parametrize("background", BACKGROUNDS)
def test_background_of_a_manifest(background: str) -> None:
    """Absent means black, as in every bundle written before there was a choice."""
    preprocess = replace(PRESETS["mnist"], background=background)
    body = json.loads(json.dumps(preprocess.to_json()))
    assert body.get("background", "black") == background and ("background" in body) == (background != "black")
    assert TypeAdapter(Preprocess).validate_json(json.dumps(body)) == preprocess
    assert preprocess.differences(PRESETS["mnist"]) == (() if background == "black" else ("background",))


def test_without_a_crop_its_rounding_is_no_difference() -> None:
    whole = replace(PRESETS["imagenet"], resize=None)
    assert whole == replace(whole, crop_rounding="even") and "crop_rounding" not in whole.to_json()
    assert PRESETS["imagenet"].differences(replace(PRESETS["imagenet"], crop_rounding="down")) == ("crop_rounding",)


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_resizes_by_the_named_filter(interpolation: str) -> None:
    preprocess = replace(PRESETS["cifar10"], interpolation=interpolation, resizer="pillow")
    noise = np.random.default_rng(0).integers(0, 256, (50, 40, 3)).astype(np.uint8)
    image = Image.fromarray(noise)
    expected = np.asarray(image.resize((32, 32), Image.Resampling[interpolation.upper()])).transpose(2, 0, 1)
    np.testing.assert_array_equal(preprocess.from_image(image), expected)


@pytest.mark.parametrize(
    ("samples", "orientation"),
    [
        (np.full((9, 6, 4), 100, np.uint8), 1),
        (np.arange(162, dtype=np.uint8).reshape(9, 6, 3), 6),
        (np.arange(0, 54000, 1000, np.uint16).reshape(9, 6), 1),
    ],
    ids=["alpha", "turned", "16 bits"],
)
def test_an_open_image_becomes_what_its_bytes_do(samples: npt.NDArray[Any], orientation: int) -> None:
    file, exif = io.BytesIO(), Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    Image.fromarray(samples).save(file, "PNG", exif=exif)
    preprocess = replace(PRESETS["cifar10"], background="white")
    np.testing.assert_array_equal(preprocess.from_image(Image.open(file)), preprocess.from_bytes(file.getvalue()))


@given(
    shorter=st.integers(1, 400), ratio=st.floats(1, 2), is_tall=st.booleans(), grey=st.booleans(),
    resize=st.sampled_from([None, 96, 110]), interpolation=st.sampled_from(INTERPOLATIONS), seed=st.integers(0, 9),
)  # fmt: skip
def test_torch_differs_by_one_from_pillow_along_rows_then_along_columns(
    shorter: int, ratio: float, is_tall: bool, grey: bool, resize: int | None, interpolation: str, seed: int
) -> None:
    """Of tall images Pillow begins with the columns; samples beyond 0 … 255 are clipped in between."""
    longer = int(ratio * shorter)
    height, width = (longer, shorter) if is_tall else (shorter, longer)
    shape, statistics = ((height, width), (0.5,)) if grey else ((height, width, 3), (0.5,) * 3)
    image = Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8))
    preprocess = Preprocess(image.mode, 96, 96, resize, statistics, statistics, interpolation, "torch")
    size = (96, 96) if resize is None else (resize * width // shorter, resize * height // shorter)
    left, top = (size[0] - 96) // 2, (size[1] - 96) // 2
    by = Image.Resampling[interpolation.upper()]
    resized = image.resize((size[0], height), by).resize(size, by).crop((left, top, left + 96, top + 96))
    difference = preprocess.from_image(image).astype(int) - np.array(resized).reshape(96, 96, -1).transpose(2, 0, 1)
    assert np.abs(difference).max() <= 1


@pytest.mark.parametrize("size", [(1, 1 << 20), (1 << 20, 1)])
@pytest.mark.parametrize("resize", [None, 256])
def test_torch_never_resizes_to_much_more_than_the_image_or_the_input(
    size: tuple[int, int], resize: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole image with a shorter side of 256 pixels would take 69 GB, and rows before columns 700 MB."""
    image = Image.new("RGB", size, (10, 20, 30))
    preprocess = replace(PRESETS["imagenet"], resize=resize)
    made: list[int] = []
    whole = torch.nn.functional.interpolate

    def interpolate(pixels: torch.Tensor, size: tuple[int, int], **options: Any) -> torch.Tensor:
        made.append(max(size[0], pixels.shape[2]) * size[1])
        return whole(pixels, size, **options)

    monkeypatch.setattr(torch.nn.functional, "interpolate", interpolate)
    found = preprocess.from_image(image)
    assert (found == np.array([10, 20, 30])[:, None, None]).all()
    assert max(made, default=0) <= 1 << 20


@pytest.mark.parametrize(
    "fields",
    [
        {"mode": "CMYK"}, {"interpolation": "nearest"}, {"resizer": "magick"}, {"background": "grey"},
        {"crop_rounding": "up"}, {"mean": (0.5, 0.5)}, {"std": (0.0,)}, {"height": 0}, {"height": 1 << 18},
        {"resize": 10}, {"resize": 8193},
    ],
)  # fmt: skip
def test_rejects_invalid_settings(fields: dict[str, object]) -> None:
    good = {"mode": "L", "height": 28, "width": 28, "resize": None, "mean": (0.1,), "std": (0.3,)}
    with pytest.raises(UsageError, match="expected"):
        Preprocess(**{**good, **fields})


def test_all_forms_of_an_image_agree(psc: PSC, digits: torch.Tensor, tmp_path: Path) -> None:
    files = [encode(image[0]) for image in digits[:5]]
    paths = [tmp_path / f"{index}.png" for index in range(5)]
    for path, file in zip(paths, files, strict=True):
        path.write_bytes(file)
    grey = list(digits[:5, 0].numpy())
    expected = psc.predict(digits[:5])
    for images in (
        files,
        [Image.open(io.BytesIO(file)) for file in files],
        paths,
        [str(path) for path in paths],
        grey,
        [np.stack([array] * 3, axis=2) for array in grey],
        [files[0], paths[1], grey[2], Image.fromarray(grey[3]), grey[4]],
    ):
        got = psc.predict(images)
        assert torch.equal(got.probabilities, expected.probabilities)
        assert torch.equal(got.log_density, expected.log_density)


def test_an_image_that_cannot_be_read_is_named(psc: PSC, tmp_path: Path) -> None:
    good = (SHIPPED_BUNDLE / "examples" / "clean.png").read_bytes()
    (tmp_path / "bad.png").write_bytes(good[:80])
    for images, name in (([good, tmp_path / "bad.png"], f"^{tmp_path}/bad.png: "), ([good, good[:80]], "^image 1: ")):
        with pytest.raises(ImageError, match=name):
            psc.predict(images)
    pairs = [(tmp_path / "good.png", 0), (tmp_path / "bad.png", 1)]
    pairs[0][0].write_bytes(good)
    with pytest.raises(ImageError, match=f"^{tmp_path}/bad.png: "):
        open_loader([([file], [label]) for file, label in pairs], preprocess=psc.preprocess)
    with pytest.raises(ImageError, match="batch 1, image 0: "):
        open_loader([([good], [0]), ([good[:80]], [1])], preprocess=psc.preprocess)


def test_pixels_need_a_known_preprocess() -> None:
    observed = LoaderDescription().preprocess_of((1, 4, 4), [-1.0], [1.0])
    inputs = torch.rand(2, 1, 4, 4)
    assert torch.equal(as_batch(inputs.double(), observed), inputs)
    for pixels in (torch.zeros(2, 1, 4, 4, dtype=torch.uint8), [np.zeros((4, 4), np.uint8)], ["a.png"]):
        with pytest.raises(UsageError, match="does not know how pixels become inputs"):
            as_batch(pixels, observed)


def test_pillow_image_equals_its_file(psc: PSC) -> None:
    clear = Image.new("RGBA", (28, 28), (255, 255, 255, 0))
    turned = Image.new("L", (40, 28))
    turned.paste(255, (0, 0, 20, 28))
    turned.getexif()[0x0112] = 6
    wide = Image.fromarray(torch.arange(784, dtype=torch.int32).view(28, 28).numpy().astype("uint16") * 80)
    for image in (clear, turned, wide):
        one, other = psc.predict([image]), psc.predict([encode(image, exif=image.getexif())])
        assert torch.equal(one.log_density, other.log_density)


def test_one_mean_for_colours_names_the_way_to_grey() -> None:
    with pytest.raises(UsageError, match=r"3 means .* got 1 and 1; .* one channel take --preset mnist"):
        Preprocess("RGB", 8, 8, None, (0.5,), (0.5,))
    with pytest.raises(UsageError, match=r"got 3 and 1; give one of each for every channel$"):
        Preprocess("RGB", 8, 8, None, (0.5,) * 3, (0.5,))


@pytest.mark.parametrize(
    ("read", "given", "said"),
    [
        *((as_batch, each, "put it into a list") for each in (b"", "a.png", Image.new("L", (3, 3)), np.zeros((3, 3)))),
        *((as_batch, np.zeros((2, 1, 28, 28), kind), r"torch\.from_numpy\(images\)$") for kind in (np.uint8, float)),
        (as_batch, None, "expected a list of images or a tensor, got None$"),
        (as_batch, 3, "expected a list of images or a tensor, got a int$"),
        (read_image, 1, "got a int"),
        (read_image, torch.zeros(1, 28, 28), r"torch\.stack"),
        (read_image, np.zeros((28, 28, 4), np.uint8), r"got an array of uint8 \(28, 28, 4\); give image\[:, :, :3\]"),
        (read_image, np.zeros((3, 28, 28), np.uint8), r"; put its channels last, image\.transpose\(1, 2, 0\)"),
        (read_image, np.zeros((28, 28, 1), np.uint8), r"; leave out the axis .* image\.squeeze\(\)"),
    ],
)
def test_what_is_no_list_of_images_is_refused(read: Any, given: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        inspect.unwrap(read)(given, PRESETS["mnist"])  # Without the type checks of the tests.
