"""Images with something pasted into them."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from psc_core.made_up import CROP, PATCHES, paste

SIDES = st.integers(1, 20)


@given(st.sampled_from(PATCHES), st.integers(1, 4), st.sampled_from((1, 3)), SIDES, SIDES, st.integers(0, 99))
def test_only_the_mask_changes(kind: str, count: int, channels: int, height: int, width: int, seed: int) -> None:
    images = torch.randint(0, 256, (count, channels, height, width), dtype=torch.uint8)
    before = images.clone()
    pasted, mask = paste(images, kind, torch.Generator().manual_seed(seed))
    again, _ = paste(images, kind, torch.Generator().manual_seed(seed))
    assert torch.equal(images, before) and torch.equal(pasted, again)
    assert pasted.dtype == torch.uint8 and mask.shape == (count, height, width)
    outside = ~mask[:, None].expand_as(images)
    assert torch.equal(pasted[outside], images[outside])
    for one in mask:
        rows, columns = one.any(1).nonzero(), one.any(0).nonzero()
        assert 1 <= len(rows) <= max(1, height // 2) and 1 <= len(columns) <= max(1, width // 2)
        assert int(one.sum()) == len(rows) * len(columns)


def test_crops_are_of_other_images() -> None:
    images = torch.arange(6, dtype=torch.uint8)[:, None, None, None].expand(6, 3, 16, 16).clone()
    pasted, mask = paste(images, CROP, torch.Generator().manual_seed(0))
    for image, (one, where) in enumerate(zip(pasted, mask, strict=True)):
        assert (one[:, where] != image).all()
