"""Resizing in matrix products is what the preprocessing does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from psc_core.export.folder import RUNTIMES
from psc_core.export.graph import Resize
from psc_core.images import CROP_ROUNDINGS, INTERPOLATIONS
from psc_core.images.preprocess import Preprocess

SIDES = st.integers(1, 90)


def random(height: int, width: int, channels: int) -> npt.NDArray[np.uint8]:
    generator = np.random.default_rng(height + width)
    return generator.integers(0, 256, (height, width, channels), dtype=np.uint8)


def expected(preprocess: Preprocess, image: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    found = Image.fromarray(image.squeeze(-1) if image.shape[2] == 1 else image)
    return preprocess.from_image(found).astype(int)


def settings(mode: str, resize: int | None, interpolation: str, rounding: str = "down") -> Preprocess:
    zeros, ones = ((value,) * (1 if mode == "L" else 3) for value in (0.0, 1.0))
    return Preprocess(mode, 24, 18, resize, zeros, ones, interpolation, crop_rounding=rounding)


@given(
    SIDES, SIDES, st.sampled_from(["L", "RGB"]), st.sampled_from([None, 24, 27, 40]), st.sampled_from(INTERPOLATIONS),
    st.sampled_from(CROP_ROUNDINGS),
)  # fmt: skip
def test_levels_are_those_of_the_preprocessing(
    height: int, width: int, mode: str, resize: int | None, interpolation: str, rounding: str
) -> None:
    preprocess = settings(mode, resize, interpolation, rounding)
    image = random(height, width, preprocess.channels)
    found = Resize(preprocess)(torch.from_numpy(image)[None])[0].numpy()
    # Where Pillow resizes, which does the columns of tall images first, a bicubic filter that overshoots is cut later.
    limit = 40 if interpolation == "bicubic" and resize else 1
    assert np.abs(found - expected(preprocess, image)).max() <= limit
    assert np.array_equal(found, found.round()) and found.min() >= 0 and found.max() <= 255


def test_an_image_of_the_size_stays() -> None:
    image = random(24, 18, 3)
    for interpolation in INTERPOLATIONS:
        found = Resize(settings("RGB", None, interpolation))(torch.from_numpy(image)[None])[0]
        assert np.array_equal(found.permute(1, 2, 0).numpy(), image)


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
@pytest.mark.parametrize(("resize", "rounding"), [(None, "down"), (30, "down"), (27, "even")])
def test_every_runtime_resizes(tmp_path: Path, resize: int | None, rounding: str, interpolation: str) -> None:
    preprocess = settings("RGB", resize, interpolation, rounding)
    any_size = dict.fromkeys(range(3), torch.export.Dim.DYNAMIC)
    example = torch.zeros(2, 25, 20, 3, dtype=torch.uint8)
    with torch.no_grad():
        program = torch.onnx.export(
            Resize(preprocess).eval(), (example,), dynamo=True, dynamic_shapes=(any_size,), input_names=["images"],
            output_names=["found"], verbose=False,
        )  # fmt: skip
    assert program is not None
    program.save(tmp_path / "resize.onnx")
    for start in RUNTIMES.values():
        compute = start(tmp_path / "resize.onnx")
        for height, width in ((25, 20), (24, 18), (61, 47), (300, 200), (9, 11), (24, 90), (1, 1)):
            images = np.stack([random(height, width, 3), random(height, width, 3)[::-1]])
            wanted = np.stack([expected(preprocess, image) for image in images])
            assert np.abs(compute(images)["found"] - wanted).max() <= 1
