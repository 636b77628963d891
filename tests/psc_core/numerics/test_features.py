from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from psc_core import features
from psc_core.data.cache import Scratch
from psc_core.density import DENSITIES, Examples, fit_density
from psc_core.features import FeatureMatrix, as_matrix, blocks, side_by_side, usable
from psc_core.heads import sngp, softmax
from psc_core.tasks.classification import Classification
from tests.psc_core.heads.classifiers import fit_head

SEEDS = st.integers(0, 2**16)


def sample(n: int = 240, dim: int = 5, classes: int = 3) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    labels = torch.arange(n) % classes
    return torch.randn(n, dim, generator=random) + torch.randn(classes, dim, generator=random)[labels], labels


def in_file(values: Tensor, folder: Path) -> FeatureMatrix:
    stored = Scratch(folder).array(tuple(values.shape), np.float32)
    stored[:] = values.numpy()
    return as_matrix(stored)


def test_matrices_side_by_side(tmp_path: Path) -> None:
    values, _ = sample()
    joined = side_by_side([in_file(values, tmp_path), as_matrix(values[:, :2])], widest=7)
    expected = torch.cat([values, values[:, :2]], dim=1)
    assert joined.shape == expected.shape and joined.widest == 7
    for rows in (slice(3, 9), torch.tensor([5, 1, 200])):
        assert torch.equal(joined[rows], expected[rows])
    assert torch.equal(torch.cat([block for _, block in blocks(joined)]), expected)


@given(st.integers(1, 20), st.integers(1, 5), st.lists(st.sampled_from(["map", "take", "to"]), max_size=4), SEEDS)
def test_derived_matrices_match_numpy(n: int, dim: int, steps: list[str], seed: int) -> None:
    """Every chain of views, read in blocks and by position, of a matrix in memory and of one in a file."""
    random = np.random.default_rng(seed)
    dense = random.standard_normal((n, dim)).astype(np.float32).astype(np.float64)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(features, "CHUNK_ELEMENTS", 7)
        found = [as_matrix(torch.from_numpy(dense)), in_file(torch.from_numpy(dense), Path(folder))]
        for step in steps:
            positions, weights = random.integers(0, n, n), random.standard_normal((dense.shape[1], 2))
            if step == "map":
                dense = dense @ weights
                found = [part.map(times(torch.from_numpy(weights)), 2, torch.float64) for part in found]
            elif step == "take":
                dense = dense[positions]
                found = [part.take(torch.from_numpy(positions)) for part in found]
            else:
                found = [part.to("cpu") for part in found]
        some = random.integers(0, n, 3)
        for part in found:
            assert part.shape == dense.shape
            whole = torch.cat([block for _, block in blocks(part)]).numpy()
            np.testing.assert_allclose(whole, dense, rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(part[n // 3 :: 2].numpy(), dense[n // 3 :: 2], rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(part[torch.from_numpy(some)].numpy(), dense[some], rtol=1e-12, atol=1e-12)


def times(weights: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda part: part.double() @ weights


def test_file_without_rows(tmp_path: Path) -> None:
    assert as_matrix(Scratch(tmp_path).array((0, 4), np.float32))[:].shape == (0, 4)


def test_blocks_are_bounded_by_widest_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "CHUNK_ELEMENTS", 50)
    wide = as_matrix(torch.zeros(30, 10))
    narrow = wide.map(lambda part: part[:, :1], 1, torch.float32)
    assert [len(block) for _, block in blocks(narrow)] == [5] * 6


@pytest.mark.parametrize("kind", sorted(DENSITIES))
def test_density_fitted_from_file_equals_memory(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values, labels = sample()
    expected = fit_density(Examples(values, labels, 3), kind=kind)
    monkeypatch.setattr(features, "CHUNK_ELEMENTS", 100)
    got = fit_density(Examples(in_file(values, tmp_path), labels, 3), kind=kind)
    torch.testing.assert_close(got(values).log_density, expected(values).log_density, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", sorted(Classification.heads))
def test_head_fitted_from_file_equals_memory(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sngp, "FEATURES", 32)
    monkeypatch.setattr(softmax, "PRIOR_PRECISIONS", (1e2, 1.0))
    values, labels = sample()
    val = values[:60], labels[:60]
    expected = fit_head(values, labels, *val, num_classes=3, kind=kind)
    monkeypatch.setattr(features, "CHUNK_ELEMENTS", 2000)
    monkeypatch.setattr(sngp, "IN_MEMORY_BYTES", 0)
    got = fit_head(in_file(values, tmp_path), labels, *val, num_classes=3, kind=kind)
    torch.testing.assert_close(got(values).probabilities, expected(values).probabilities, rtol=0, atol=1e-5)


def test_classes_of_one_example_are_skipped() -> None:
    z, labels, classes = usable(torch.arange(10.0).view(5, 2), torch.tensor([0, 3, 3, 1, 1]))
    assert z[:, 0].tolist() == [2.0, 4.0, 6.0, 8.0] and labels.tolist() == [1, 1, 0, 0] and classes == 2
