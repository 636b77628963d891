"""Images in every form that users have them."""

from __future__ import annotations

import inspect
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from psc_core import PSC
from psc_core.data.loaders import LoaderPreprocessing
from psc_core.errors import UsageError
from psc_core.images.preprocess import as_batch, read_image


def png(image: torch.Tensor) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image[0].numpy()).save(buffer, "PNG")
    return buffer.getvalue()


def test_all_forms_of_an_image_agree(psc: PSC, digits: torch.Tensor, tmp_path: Path) -> None:
    files = [png(image) for image in digits[:5]]
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


@pytest.mark.parametrize("image", [b"", "a.png", Path("a.png"), Image.new("L", (3, 3)), np.zeros((3, 3), np.uint8)])
def test_rejects_a_single_image(psc: PSC, image: Any) -> None:
    with pytest.raises(UsageError, match="put it into a list"):
        inspect.unwrap(as_batch)(image, psc.preprocess)  # Without the type checks of the tests.
    with pytest.raises(UsageError, match=r"expected paths, encoded .* got a int"):
        inspect.unwrap(read_image)(1, psc.preprocess)


@pytest.mark.parametrize(("given", "named"), [(None, "None"), (3, "a int")])
def test_rejects_what_holds_no_images(psc: PSC, given: Any, named: str) -> None:
    with pytest.raises(UsageError, match=f"expected a list of images or a tensor, got {named}$"):
        inspect.unwrap(as_batch)(given, psc.preprocess)


def test_pixels_need_a_known_preprocess() -> None:
    observed = LoaderPreprocessing().preprocess_of((1, 4, 4), [-1.0], [1.0])
    inputs = torch.rand(2, 1, 4, 4)
    assert torch.equal(as_batch(inputs.double(), observed), inputs)
    for pixels in (torch.zeros(2, 1, 4, 4, dtype=torch.uint8), [np.zeros((4, 4), np.uint8)], ["a.png"]):
        with pytest.raises(UsageError, match="does not know how pixels become inputs"):
            as_batch(pixels, observed)


def test_a_list_of_tensors_is_told_to_be_stacked(psc: PSC) -> None:
    with pytest.raises(UsageError, match=r"got a Tensor; make one batch of tensors, torch\.stack"):
        inspect.unwrap(read_image)(torch.zeros(1, 28, 28), psc.preprocess)


def test_pillow_image_equals_its_file(psc: PSC) -> None:
    clear = Image.new("RGBA", (28, 28), (255, 255, 255, 0))
    turned = Image.new("L", (40, 28))
    turned.paste(255, (0, 0, 20, 28))
    turned.getexif()[0x0112] = 6
    wide = Image.fromarray(torch.arange(784, dtype=torch.int32).view(28, 28).numpy().astype("uint16") * 80)
    for image in (clear, turned, wide):
        file = io.BytesIO()
        image.save(file, "PNG", exif=image.getexif())
        one, other = psc.predict([image]), psc.predict([file.getvalue()])
        assert torch.equal(one.log_density, other.log_density)
