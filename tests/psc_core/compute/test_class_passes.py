"""Both passes in ranges of columns are a nearest-class-mean classifier of whole features."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from psc_core.compute import add_statistics, distances_to_means
from psc_core.numerics.scatter import ClassScatter, nc1_of, scatter_sums
from psc_core.settings import FitSettings
from tests.psc_core.collapse.test_measure import images
from tests.reference import collapse as reference


def test_ranges_add_up_to_a_nearest_mean_classifier() -> None:
    compute = FitSettings(device="cpu", batch_images=16).compute()
    train, val = images(0, 40), images(1, 21)
    ranges = (slice(0, 7), slice(7, 36))

    def step(inputs: Tensor) -> list[Tensor]:
        return [inputs.flatten(1)]

    def of(features: list[Tensor]) -> list[Tensor]:
        return [features[0][:, columns] for columns in ranges]

    statistics = [ClassScatter(3, columns.stop - columns.start) for columns in ranges]
    add_statistics(statistics, train, compute, "", step, of)
    nc1 = nc1_of(torch.stack([*map(scatter_sums, statistics)]).sum(0))
    means = [scatter.means for scatter in statistics]
    nearest = torch.cat(
        [sum(found).argmin(1) for _, _, found in distances_to_means(means, val, compute, "", step, of)]  # type: ignore[union-attr, arg-type]
    )
    x, x_val = (
        np.stack([data.image(i).astype(float).flatten() / 255 for i in range(len(data))]) for data in (train, val)
    )
    labels, val_labels = train.labels.tolist(), val.labels.tolist()
    assert abs(nc1 - reference.nc1(x, labels, 3)) < 1e-6
    assert float((nearest == val.labels).double().mean()) == reference.nc4(x, labels, x_val, val_labels, 3)
