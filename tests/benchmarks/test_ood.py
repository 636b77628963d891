"""Sums of two scores, and densities with every component."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.ood import variants
from benchmarks.ood.detector import Detector, Score, Spaces
from psc_core.evaluation.baselines import full_density

SPACE = "psc-operations"


def _column(number: int) -> Score:
    def score(images: Spaces) -> Tensor:
        return images.features[:, number]

    return score


def _images(values: Tensor) -> Spaces:
    rows = len(values)
    return Spaces(values, torch.zeros(rows, 2), torch.zeros(rows, dtype=torch.int64), {SPACE: values})


def test_sum_of_scaled_scores() -> None:
    names = [f"{SPACE} gda 99%", f"{SPACE} gda++ all", f"{SPACE} laplace entropy", f"{SPACE} laplace epistemic"]
    names += ["penultimate gda 99%", "penultimate gda++ all", "pooled-operations gda++ all"]
    alone = [Detector(name, "psc", _column(i), name.partition(" ")[0], 100 + i) for i, name in enumerate(names)]
    generator = torch.Generator().manual_seed(0)
    known = _images(torch.randn(50, 7, generator=generator) * torch.tensor([1.0, 5.0, 0.01, 2.0, 30.0, 7.0, 1.0]))
    new = _images(torch.randn(9, 7, generator=generator))

    found = {detector.name: detector for detector in variants.sums(alone, known)}

    assert len(found) == 8
    summed = found[f"{SPACE} gda++ all + laplace entropy"]
    middle, high = np.quantile(known.features.double().numpy(), [0.5, 0.95], axis=0)
    scaled = new.features.double().numpy() / (high - middle)
    np.testing.assert_allclose(summed.score(new).numpy(), scaled[:, 1] + scaled[:, 2], rtol=1e-6)
    assert (summed.space, summed.memory_bytes) == (SPACE, 203)
    assert found[f"{SPACE} gda 99% + penultimate gda 99%"].space == "penultimate"
    assert found[f"pooled-operations gda++ all + {SPACE} laplace epistemic"].memory_bytes == 209


@pytest.mark.parametrize("kind", ["gda", "gda++", "tied", "mahalanobis++", "rmd"])
def test_full_density_keeps_the_rank_of_the_features(kind: str) -> None:
    generator = torch.Generator().manual_seed(1)
    z = torch.randn(400, 5, generator=generator) @ torch.randn(5, 12, generator=generator)
    density = full_density(z, torch.arange(400) % 3, num_classes=3, kind=kind)
    assert density.record["components"] == 5
    assert bool(density(z).log_density.isfinite().all())
