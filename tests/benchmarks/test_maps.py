"""The peers of the map, and the tables."""

from __future__ import annotations

import pytest
import torch

from benchmarks import maps
from benchmarks.maps import SUBJECTS, Maps, greedy, padim, pasted, patchcore, told

DIGITS = SUBJECTS[1]


def features(count: int, seed: int) -> dict[str, torch.Tensor]:
    """Two layers of noise, the second of half the size."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randn(count, 3, 8, 8, generator=generator),
        "b": torch.randn(count, 4, 4, 4, generator=generator),
    }


@pytest.mark.parametrize("fit", [padim, patchcore])
def test_peers_find_what_is_far(fit: maps.Callable[..., Maps]) -> None:
    method, strange = fit(features(60, 0), 0), features(5, 1)
    mask = torch.zeros(5, 8, 8, dtype=torch.bool)
    mask[:, 2:6, 4:8] = True
    strange["a"].movedim(1, 3)[mask] += 9
    distances = method(strange)
    assert distances.shape == (5, 8, 8) and told(distances, mask) > 0.9


def test_greedy_points_cover_all() -> None:
    points = torch.tensor([[0.0, 0.0], [0.1, 0.0], [9.0, 0.0], [9.1, 0.0], [0.0, 9.0]])
    chosen = greedy(points, 3, torch.Generator().manual_seed(0))
    assert {tuple((points[each] > 5).tolist()) for each in chosen} == {(False, False), (True, False), (False, True)}


@pytest.mark.parametrize("kind", DIGITS.kinds)
def test_only_what_is_pasted_changes(kind: str) -> None:
    images = torch.randint(0, 256, (6, 1, 28, 28), dtype=torch.uint8)
    sources = {name: torch.randint(0, 256, (4, 1, 28, 28), dtype=torch.uint8) for name in ("object", "known")}
    made = pasted(DIGITS, kind, images, sources, 0)
    assert made.mask.any(2).any(1).all() and not made.mask.all()
    assert torch.equal(made.images[:, 0][~made.mask], images[:, 0][~made.mask])
    assert (made.images[:, 0][made.mask] != images[:, 0][made.mask]).any()
