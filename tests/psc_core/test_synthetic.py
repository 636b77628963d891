from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from psc_core.checks import (
    CONTRAST,
    CROP,
    MIXED,
    PATCHES,
    REAL,
    TRANSFORMS,
    by_transform,
    mix,
    paste,
    synthetic_batches,
    turn,
)
from psc_core.compute import Compute
from psc_core.data.dataset import TensorSource, label_images
from psc_core.images.preprocess import Preprocess


def random_images(seed: int, count: int, channels: int, height: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, channels, height, width), dtype=torch.uint8, generator=generator)


def naive(kind: str, image: np.ndarray) -> np.ndarray:
    """One image (C, H, W), pixel by pixel."""
    channels, height, width = image.shape
    made = np.zeros_like(image)
    for c, y, x in np.ndindex(channels, height, width):
        if kind == "turned":
            made[c, y, x] = image[c, x, width - 1 - y]
        elif kind == "upside_down":
            made[c, y, x] = image[c, height - 1 - y, width - 1 - x]
        elif kind == "binary":
            middle = sorted(image[c].flatten().tolist())[(height * width - 1) // 2]
            made[c, y, x] = 255 if image[c, y, x] > middle else 0
        elif kind == "contrast":
            mean = image.astype(np.float64).mean()
            made[c, y, x] = round(min(255.0, max(0.0, mean + CONTRAST * (float(image[c, y, x]) - mean))))
        else:
            inside = height // 4 <= y < height - height // 4 and width // 4 <= x < width - width // 4
            made[c, y, x] = image[c, y, x] if inside else 0
    return made


@given(st.sampled_from(list(TRANSFORMS)), st.integers(0, 1000), st.integers(1, 3), st.integers(1, 3), st.integers(2, 9))
def test_transforms_match_the_twin(kind: str, seed: int, count: int, channels: int, side: int) -> None:
    images = random_images(seed, count, channels, side, side)
    made = TRANSFORMS[kind](images)
    assert made.dtype == torch.uint8 and made.shape == images.shape
    expected = np.stack([naive(kind, image) for image in images.numpy()])
    assert np.abs(made.numpy().astype(int) - expected.astype(int)).max() <= (kind == "contrast")


@pytest.mark.parametrize("kind", TRANSFORMS)
def test_other_shapes_stay(kind: str) -> None:
    images = random_images(0, 2, 3, 8, 12)
    assert TRANSFORMS[kind](images).shape == images.shape


def test_inputs_of_a_loader_are_altered_as_pixels() -> None:
    pixels = random_images(0, 6, 1, 4, 4)
    labels, preprocess = torch.arange(6) % 2, Preprocess("L", 4, 4, None, (0.2,), (0.3,))
    inputs = preprocess.standardise(pixels)
    made = [
        next(synthetic_batches(label_images("noise", "ab", TensorSource(images.numpy()), labels, preprocess),
                             Compute(torch.device("cpu")), "made up", mixed=True, seed=0))
        for images in (pixels, inputs)
    ]  # fmt: skip
    assert made[0].keys() == made[1].keys() > {REAL, MIXED}
    assert all(torch.equal(made[0][kind], made[1][kind]) for kind in made[0])


def test_a_batch_without_pairs_of_two_classes_has_no_mixes() -> None:
    images, labels = random_images(0, 9, 1, 4, 4), torch.arange(9) % 2
    data = label_images(
        "noise", "ab", TensorSource(images.numpy()), labels, Preprocess("L", 4, 4, None, (0.2,), (0.3,))
    )
    compute = Compute(torch.device("cpu"), batch_images=8)
    found = list(synthetic_batches(data, compute, "made up", mixed=True, seed=0))
    assert [MIXED in made for made in found] == [True, False]  # an image alone is its own partner
    assert all(len(images) for made in found for images in made.values())
    assert len(by_transform(found, lambda images: {"mean": images.float().mean((1, 2, 3))})[REAL]["mean"]) == 9


def test_what_a_step_gives_is_joined_by_transform_and_name() -> None:
    first, second = random_images(0, 3, 1, 4, 4), random_images(1, 2, 1, 4, 4)
    batches = [{REAL: first, "turned": turn(first)}, {REAL: second, "turned": turn(second)}]
    found = by_transform(batches, lambda images: {"mean": images.float().mean((1, 2, 3)), "corner": images[:, 0, 0, 0]})
    whole = torch.cat([first, second])
    assert found.keys() == {REAL, "turned"} and found[REAL].keys() == {"mean", "corner"}
    assert torch.equal(found["turned"]["corner"], turn(whole)[:, 0, 0, 0])
    torch.testing.assert_close(found[REAL]["mean"], whole.float().mean((1, 2, 3)))


@given(st.integers(0, 1000), st.integers(1, 12), st.integers(1, 4))
def test_mixes_are_of_two_classes(seed: int, count: int, classes: int) -> None:
    # An image's class is its grey value, so that a mix tells what was mixed.
    labels = torch.randint(0, classes, (count,), generator=torch.Generator().manual_seed(seed))
    images = (labels * 10).to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 4, 4)
    mixed = mix(images, labels, torch.Generator().manual_seed(seed + 1))
    means = {(a + b) * 5 for a in range(classes) for b in range(classes) if a != b}
    assert mixed.shape[1:] == images.shape[1:] and len(mixed) <= count
    assert set(mixed.flatten().tolist()) <= means
    assert len(mixed) == 0 or (mixed.flatten(1) == mixed[:, :1, 0, 0]).all()


SIDES = st.integers(1, 20)


@given(st.sampled_from(PATCHES), st.integers(1, 4), st.sampled_from((1, 3)), SIDES, SIDES, st.integers(0, 99))
def test_only_the_mask_changes(kind: str, count: int, channels: int, height: int, width: int, seed: int) -> None:
    images = torch.randint(0, 256, (count, channels, height, width), dtype=torch.uint8)
    before = images.clone()
    patched, mask = paste(images, kind, torch.Generator().manual_seed(seed))
    again, _ = paste(images, kind, torch.Generator().manual_seed(seed))
    assert torch.equal(images, before) and torch.equal(patched, again)
    assert patched.dtype == torch.uint8 and mask.shape == (count, height, width)
    outside = ~mask[:, None].expand_as(images)
    assert torch.equal(patched[outside], images[outside])
    for one in mask:
        rows, columns = one.any(1).nonzero(), one.any(0).nonzero()
        assert 1 <= len(rows) <= max(1, height // 2) and 1 <= len(columns) <= max(1, width // 2)
        assert int(one.sum()) == len(rows) * len(columns)


def test_crops_are_of_other_images() -> None:
    images = torch.arange(6, dtype=torch.uint8)[:, None, None, None].expand(6, 3, 16, 16).clone()
    patched, mask = paste(images, CROP, torch.Generator().manual_seed(0))
    for image, (one, where) in enumerate(zip(patched, mask, strict=True)):
        assert (one[:, where] != image).all()
