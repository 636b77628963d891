"""As many spatial components are kept as a density of z needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from psc_core import FitSettings, fit_projection, fit_psc, measure_collapse
from psc_core import checks as synthetic
from psc_core.collapse import ChosenLayer
from psc_core.data.dataset import ImageDataset, split_validation
from psc_core.errors import UsageError
from psc_core.fit import project
from psc_core.fit_data import Checkpoint, FitData, FitJob
from psc_core.fit_parts import fewest_positions
from psc_core.metrics import auroc
from psc_core.projection import ProjectionReport

SETTINGS = FitSettings(device="cpu")


def test_fewest_within_the_tolerance_of_the_best() -> None:
    assert fewest_positions({1: 0.90, 2: 0.948, 4: 0.95, 8: 0.93}) == 2
    assert fewest_positions({1: 0.90}) == 1


def test_more_positions_keep_what_the_choice_kept() -> None:
    nc1, nc4 = torch.full((2, 6), 0.5).double(), torch.full((2, 6), 0.9).double()
    nc1[1, 3] = 0.1
    nc4[1] = torch.tensor([0.90, 0.91, 0.80, 0.92, 0.90, 0.895], dtype=torch.float64)
    report = ProjectionReport(2, 1, "", 0.5, 0.9, nc1, nc4)
    even = torch.ones_like(nc1)
    assert report.more_positions(even, epsilon=0.2) == [1, 2, 6]
    uneven = even.clone()
    uneven[1, 2] = 0.005
    assert report.more_positions(uneven, epsilon=0.2) == [1, 2]
    uneven[1, 1] = 0.005
    assert report.more_positions(uneven, epsilon=0.2) == [1]


def test_compared_density_is_the_one_that_is_fitted(
    net: torch.nn.Module, train: ImageDataset, val: ImageDataset
) -> None:
    chosen = measure_collapse(net, train, val, settings=SETTINGS).choose("4")
    plain = fit_projection(net, chosen, train, val, c_proj=6, minimum_dim=1, settings=SETTINGS)
    kept = fit_projection(net, chosen, train, val, c_proj=6, minimum_dim=1, density="gda", settings=SETTINGS)
    assert plain.report.positions == () and len(kept.report.positions) > 1
    found = dict(kept.report.positions)
    assert next(iter(found)) == plain.projection.d_proj
    assert kept.projection.d_proj == kept.report.d_proj == fewest_positions(found)
    selection = split_validation(val, SETTINGS.seed)[0]
    made: dict[str, list[torch.Tensor]] = {}
    for batch in synthetic.synthetic_batches(selection, SETTINGS.compute(), "", mixed=True, seed=SETTINGS.seed):
        for kind, images in batch.items():
            made.setdefault(kind, []).append(images)
    for d_proj, expected in found.items():
        sized = fit_projection(net, chosen, train, val, c_proj=6, d_proj=d_proj, settings=SETTINGS)
        psc = fit_psc(net, chosen, sized, train, val, density="gda", head="duq", ood_score="density", settings=SETTINGS)
        scores = {kind: psc.predict(torch.cat(images)).ood_score for kind, images in made.items()}
        aurocs = [auroc(scores["real"], of_kind) for kind, of_kind in scores.items() if kind != "real"]
        assert sum(aurocs) / len(aurocs) == pytest.approx(expected, abs=1e-3)


def test_no_images_are_mixed_where_any_are_ambiguous(
    net: torch.nn.Module, train: ImageDataset, val: ImageDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Be they of the calibration split alone; as for the checks."""
    asked = []

    def recorded(*given: Any, mixed: bool, seed: int) -> Iterator[Mapping[str, torch.Tensor]]:
        asked.append(mixed)
        return synthetic.synthetic_batches(*given, mixed=mixed, seed=seed)

    monkeypatch.setattr("psc_core.fit_parts.synthetic_batches", recorded)
    settings = SETTINGS.changed({"c_proj": 6, "minimum_dim": 1, "density": "gda"})
    plain = FitData.of(train, val)
    two_labels = torch.stack([val.labels, (val.labels + 1) % 10], dim=1).flatten()
    for data in (plain, replace(plain, val=replace(val, labels=two_labels, offsets=2 * val.offsets))):
        project(net, ChosenLayer(("4",), "named by the test"), FitJob.of(data, settings))
    assert asked == [True, False]


@pytest.mark.parametrize("more", [{"density": "pooled++"}, {"density": "gda", "d_proj": 2}, {}])
def test_sizes_are_not_compared_where_nothing_depends_on_them(
    net: torch.nn.Module, train: ImageDataset, val: ImageDataset, more: dict[str, object]
) -> None:
    chosen = measure_collapse(net, train, val, settings=SETTINGS).choose("4")
    assert fit_projection(net, chosen, train, val, settings=SETTINGS, **more).report.positions == ()  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="expected density to be one of gda"):
        fit_projection(net, chosen, train, val, settings=SETTINGS, density="kde")


def test_checkpoint_keeps_what_was_compared(
    net: torch.nn.Module, train: ImageDataset, val: ImageDataset, tmp_path: Path
) -> None:
    chosen = measure_collapse(net, train, val, settings=SETTINGS).choose("4")
    fitted = fit_projection(net, chosen, train, val, c_proj=6, minimum_dim=1, density="gda", settings=SETTINGS)
    checkpoint = Checkpoint.of(tmp_path / "stages", {})
    checkpoint.save_projection(fitted)
    kept = checkpoint.load_projection()
    assert kept is not None and kept.report.positions == fitted.report.positions != ()
