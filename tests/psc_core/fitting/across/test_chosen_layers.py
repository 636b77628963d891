"""Every kind of chosen: two layers at once, a fully connected layer, a pooled map; each ends in a working bundle."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from psc_core import PRESETS, PSC, FitSettings, fit_projection, fit_psc, load_network, open_dataset
from psc_core.collapse import ChosenLayer
from tests.conftest import TinyJob

FACTORY = "tests.tiny:network"


@pytest.mark.parametrize(
    ("layers", "budget", "positions", "reduced"),
    [
        (("2", "4"), 1 << 30, (49, 16), False),  # two maps of 16 channels, concatenated along positions
        (("4", "6"), 1 << 30, (16, 1), False),  # a map and its average, which is one more position
        (("7",), 1 << 30, (16,), False),  # a vector: one channel of 16 positions
        (("2",), 16 * 16**2 * 8, (9,), True),  # a map whose covariance does not fit its budget
    ],
    ids=["two layers", "map and vector", "vector", "pooled"],
)
def test_candidate(
    tiny_job: TinyJob,
    data_root: Path,
    tmp_path: Path,
    layers: tuple[str, ...],
    budget: int,
    positions: tuple[int, ...],
    reduced: bool,
) -> None:
    weights = tiny_job.args[tiny_job.args.index("--weights") + 1]
    net = load_network(FACTORY, weights=weights, num_classes=10)
    train, val, shirts = (
        open_dataset(f"{name}:{data_root}", split=split, preprocess=PRESETS["mnist"])
        for name, split in (("mnist", "train"), ("mnist", "val"), ("fashion-mnist", "test"))
    )
    settings = FitSettings(device="cpu", max_memory=budget)
    chosen = ChosenLayer(layers, "named by the test")
    projection = fit_projection(net, chosen, train, val, minimum_dim=8, settings=settings)
    assert tuple(projection.projection.positions) == positions
    assert bool(projection.report.note) == reduced
    psc = fit_psc(net, chosen, projection, train, val, settings=settings)
    psc.save(tmp_path / "bundle")
    again = PSC.load(tmp_path / "bundle", device="cpu", allow_factories=(FACTORY,))
    digits = next(iter(val.batches(100))).images
    fitted, loaded = psc.predict(digits), again.predict(digits)
    torch.testing.assert_close(loaded.probabilities, fitted.probabilities, atol=1e-5, rtol=0)
    torch.testing.assert_close(loaded.log_density, fitted.log_density, atol=1e-3, rtol=1e-5)
    doubted = again.predict(next(iter(shirts.batches(100))).images).is_ood.double().mean()
    assert float(doubted) > float(loaded.is_ood.double().mean())
    assert again.layers == layers
