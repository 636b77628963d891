import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchvision import models

from psc_core import PSC, FitSettings, fit_projection, fit_psc, measure_collapse
from psc_core import checks as synthetic
from psc_core.calibrate import score_dataset
from psc_core.checks import CROP, PATCHES, TEXTURE, check_values, least_regret, paste
from psc_core.collapse import ChosenLayer
from psc_core.data.dataset import ImageDataset, split_validation
from psc_core.density import Examples, fit_density
from psc_core.errors import UsageError
from psc_core.fit import fit_stages, project
from psc_core.fit_data import Checkpoint, FitData, FitJob
from psc_core.fit_parts import Layers, cut, early_layers, fewest_positions, read, round_floats, warn_of_unread
from psc_core.heads import sngp, softmax
from psc_core.maps import Grid, PositionMoments, choose_map
from psc_core.metrics import auroc
from psc_core.projection import FittedProjection, ProjectionReport
from tests.opened import opened

SETTINGS = FitSettings(device="cpu")


def test_seed_reaches_the_head(
    net: nn.Module,
    train: ImageDataset,
    val: ImageDataset,
    projection: FittedProjection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sngp, "FEATURES", 8)
    monkeypatch.setattr(softmax, "PRIOR_PRECISIONS", (1.0,))
    chosen = ChosenLayer(("4",), "")
    one, two = (
        fit_psc(
            net, chosen, projection, train, val, head="sngp", settings=SETTINGS.changed({"seed": seed})
        ).pipeline.state_dict()
        for seed in (0, 1)
    )
    # The length-scale moves the frequencies alone.
    assert not torch.equal(one["scorer.head.phases"], two["scorer.head.phases"])


def test_features_are_ordered_by_class(net: nn.Module, val: ImageDataset, projection: FittedProjection) -> None:
    job, layers = FitJob(FitData.of(val, val), SETTINGS, SETTINGS.compute()), Layers(("4",), ("2",), (), ("0", "2"))
    assert layers.names == ("4", "2", "0")
    backbone = cut(net, layers.names, val, job.compute, keep_output=True)
    layers = layers._replace(output=True)
    found, _ = read(backbone, layers, projection.projection, val, job)
    order = val.labels.argsort(stable=True)
    assert torch.equal(found.labels, val.labels[order])
    assert torch.equal(found.images, order)
    with torch.inference_mode():
        (chosen, second, first), own = backbone(val.preprocess.standardise(next(val.batches(len(val))).images))
        z = projection.projection([chosen])
    read_by_head = torch.cat([z, second.mean(2)], dim=1)[order]
    assert found.widths == (z.shape[1], second.shape[1])
    for got, expected in (
        (found.head_input, read_by_head),
        (found.density_input, chosen.mean(2)[order]),
        (found.texture["0"], first.mean(2)[order]),
        (found.texture["2"], second.mean(2)[order]),
        (found.network_output, own[order]),
    ):
        torch.testing.assert_close(got[:], expected, rtol=1e-4, atol=1e-4)


def test_a_density_may_read_z(net: nn.Module, val: ImageDataset, projection: FittedProjection) -> None:
    settings, layers = SETTINGS.changed({"density": "gda"}), Layers(("4",), (), (), ())
    job = FitJob(FitData.of(val, val), settings, settings.compute())
    backbone = cut(net, layers.names, val, job.compute, keep_output=False)
    found, _ = read(backbone, layers, projection.projection, val, job)
    assert torch.equal(found.density_input[:], found.head_input[:])
    assert found.texture == {} and found.network_output is None


@pytest.mark.parametrize(
    ("beside", "remedy"),
    [
        ((), "--density gda++ reads z, which holds the chosen layers alone, in one scale"),
        (("last",), "--layer last reads it alone"),
    ],
)
@pytest.mark.parametrize("scale", [1.0, 1e-2, 1e-5])
def test_a_layer_that_the_density_does_not_see_is_named(scale: float, beside: tuple[str, ...], remedy: str) -> None:
    features = torch.randn(300, 12, generator=torch.Generator().manual_seed(0))
    features[:, 8:] *= scale
    density = fit_density(Examples(features, torch.arange(300) % 3, 3), kind="pooled++")
    axes = torch.linalg.svd(density.get_buffer("basis"), full_matrices=False).U
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_unread(density, {"chosen": 8, "last": 4}, beside=beside)
    assert (float(axes[8:].square().sum()) < 0.1) == (scale == 1e-5) == (len(caught) == 1)
    assert all(
        f"next to nothing of layer last, whose features hardly vary beside those of chosen; {remedy}"
        in str(each.message)
        for each in caught
    )


FACTORY = "tests.tiny:network"


@pytest.fixture(scope="module")
def psc(net: nn.Module, train: ImageDataset, val: ImageDataset, projection: FittedProjection) -> PSC:
    return fit_psc(net, ChosenLayer(("4",), ""), projection, train, val, head="duq", settings=SETTINGS)


def test_what_is_served_was_fitted(psc: PSC, val: ImageDataset, tmp_path: Path) -> None:
    assert psc.checks == ("texture", "content", "confidence")
    assert psc.layers == ("4",) and psc.backbone.layers[1:] == (psc.report["metrics"]["checks"]["chosen"][8],)
    psc.save(tmp_path / "bundle")
    served = PSC.load(tmp_path / "bundle", device="cpu", allow_factories=[FACTORY])
    calibrates = split_validation(val, SETTINGS.seed)[1]
    images = next(calibrates.batches(len(calibrates))).images
    fitted, told = psc.predict(images), served.predict(images)
    assert torch.equal(told.outputs.packed, fitted.outputs.packed)
    torch.testing.assert_close(told.ood_score.sort().values, psc.calibration.ood_scores)
    assert set(told.checks) == set(psc.checks)
    n = len(images)  # of n calibration images themselves, the k-th most unusual has the p-value (k + 1) / (n + 1)
    for p_value in (told.ood_p_value, *told.checks.values()):
        assert (p_value >= 2 / (n + 1) - 1e-6).all() and p_value.max() == pytest.approx(1)


def test_score_is_that_of_the_checks(psc: PSC, val: ImageDataset) -> None:
    selection, calibrates = split_validation(val, SETTINGS.seed)
    checks = psc.pipeline.checks
    assert checks is not None
    values = [
        check_values(checks.names, score_dataset(psc.pipeline.scorer, half, SETTINGS.compute(), "").scores)
        for half in (selection, calibrates)
    ]
    torch.testing.assert_close(checks.ascending, values[0].sort(dim=0).values.T)
    torch.testing.assert_close(checks.calibration, values[1].sort(dim=0).values.T)
    torch.testing.assert_close(psc.calibration.ood_scores, checks.score(values[1]).sort().values)


def test_unlike_images_alarm_and_name_a_check(psc: PSC) -> None:
    garments = next(opened("fashion-mnist").batches(64))
    prediction = psc.predict(garments.images)
    assert prediction.is_ood.float().mean() > 0.5
    smallest = torch.stack(list(prediction.checks.values())).amin(dim=0)
    assert (smallest[prediction.is_ood] <= psc.policy.alpha).float().mean() > 0.9


def test_ambiguous_images(net: nn.Module, train: ImageDataset, val: ImageDataset, projection: FittedProjection) -> None:
    both = torch.stack([train.labels, (train.labels + 1) % 10], dim=1).flatten()
    doubtful = replace(train, labels=both, offsets=2 * train.offsets)
    assert doubtful.is_ambiguous and not train.is_ambiguous
    psc = fit_psc(net, ChosenLayer(("4",), ""), projection, doubtful, val, head="duq", settings=SETTINGS)
    assert psc.checks == ("texture", "content")
    report = psc.report["metrics"]["checks"]
    assert "mixed" not in report["kinds"] and "several labels" in report["reason"]


def test_first_layer_leaves_no_texture(net: nn.Module, train: ImageDataset, val: ImageDataset, tmp_path: Path) -> None:
    chosen = ChosenLayer(("0",), "")
    fitted = fit_projection(net, chosen, train, val, settings=SETTINGS)
    psc = fit_psc(net, chosen, fitted, train, val, head="duq", settings=SETTINGS)
    assert psc.checks == ("content", "confidence") and psc.backbone.layers == ("0",)
    psc.save(tmp_path / "bundle")
    assert PSC.load(tmp_path / "bundle", device="cpu", allow_factories=[FACTORY]).checks == psc.checks


def test_a_layer_of_constant_averages_is_no_texture(train: ImageDataset, val: ImageDataset) -> None:
    """As behind instance normalisation; a 1 × 1 convolution keeps its averages constant."""
    torch.manual_seed(0)
    first = [nn.InstanceNorm2d(1, affine=True), nn.Conv2d(1, 4, 1)]
    others = [nn.Conv2d(4, 4, 3, 2), nn.Conv2d(4, 4, 3, 2), nn.Conv2d(4, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
    net = nn.Sequential(*first, *others, nn.Flatten(), nn.Linear(6, 10)).eval()
    nn.init.constant_(net[0].bias, 100.0)
    assert early_layers(net, ["4"], torch.zeros(1, 1, 28, 28)) == ["1", "2"]
    chosen = ChosenLayer(("4",), "")
    fitted = fit_projection(net, chosen, train, val, settings=SETTINGS)
    psc = fit_psc(net, chosen, fitted, train, val, head="duq", settings=SETTINGS)
    assert psc.checks[0] == "texture" and psc.backbone.layers[-1] == "2"


def test_early_layers_lie_before_the_chosen_one() -> None:
    resnet = models.resnet18(num_classes=3).eval()
    image = torch.zeros(1, 3, 32, 32)
    assert early_layers(resnet, ["avgpool"], image) == ["layer2.0", "layer2.1", "layer3.0"]
    assert early_layers(resnet, ["layer2.1.conv2", "layer3.0.conv1"], image) == ["layer1.0", "layer1.1"]
    assert early_layers(resnet, ["conv1"], image) == []
    plain = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3136, 3)
    )
    assert early_layers(plain, ["5:input"], image) == ["0", "2"]
    assert early_layers(plain, ["2"], image) == ["0"]


def test_what_is_patched_is_found(psc: PSC, val: ImageDataset) -> None:
    images = next(split_validation(val, SETTINGS.seed)[1].batches(200)).images
    patched, mask = paste(images, TEXTURE, torch.Generator().manual_seed(1))
    maps = psc.predict(patched, maps=True).maps
    assert maps is not None and maps.dtype == torch.uint8
    rows, columns = maps.shape[1:]
    there = nn.functional.interpolate(mask[:, None].float(), (rows, columns), mode="area")[:, 0] > 0.5
    assert auroc(maps[~there].double(), maps[there].double()) > 0.7
    usual = psc.predict(images, maps=True).maps
    assert usual is not None and float((usual >= 128).float().mean()) < 0.03


def test_maps_that_are_served_were_fitted(psc: PSC, val: ImageDataset, tmp_path: Path) -> None:
    layer_map, report = psc.pipeline.map, psc.report["metrics"]["map"]
    assert layer_map is not None and layer_map.layer == report["chosen"] and report["kinds"] == list(PATCHES)
    assert layer_map.layer in psc.backbone.layers
    psc.save(tmp_path / "bundle")
    served = PSC.load(tmp_path / "bundle", device="cpu", allow_factories=[FACTORY])
    images = next(val.batches(8)).images
    fitted, told = psc.predict(images, maps=True), served(images, maps=True)
    assert fitted.maps is not None and told.maps is not None and torch.equal(fitted.maps, told.maps)
    assert torch.equal(told.outputs.packed, served.predict(images).outputs.packed)
    some = told[torch.tensor([3, 1])]
    assert some.maps is not None and torch.equal(some.maps, told.maps[[3, 1]])
    assert served.predict(images).maps is None
    none = served.predict(images[:0], maps=True).maps
    assert none is not None and none.shape == (0, *told.maps.shape[1:])
    again = served.calibrate(val).pipeline.map
    assert again is not None and torch.equal(again.density.thresholds, layer_map.density.thresholds)


def test_no_checks_no_map(net: nn.Module, train: ImageDataset, val: ImageDataset, projection: FittedProjection) -> None:
    settings = SETTINGS.changed({"ood_score": "density"})
    psc = fit_psc(net, ChosenLayer(("4",), ""), projection, train, val, head="duq", settings=settings)
    assert psc.pipeline.map is None and "map" not in psc.report["metrics"]
    with pytest.raises(UsageError, match="has no map; fit it again with checks"):
        psc.predict(next(val.batches(2)).images, maps=True)


def test_the_least_regret_is_chosen() -> None:
    aurocs = {"a": {CROP: 0.9, TEXTURE: 0.5}, "b": {CROP: 0.8, TEXTURE: 0.8}, "c": {CROP: 0.5, TEXTURE: 0.9}}
    assert least_regret(aurocs) == "b"


def test_layers_whose_positions_are_alike_have_no_map(val: ImageDataset) -> None:
    sums = PositionMoments(1, Grid(4, 4))
    sums.add(torch.ones(3, 1, 16))
    compute = SETTINGS.compute()
    assert choose_map(lambda images: {"a": torch.ones(len(images), 1, 16)}, {"a": sums}, val, val, compute, 0) is None
    assert choose_map(lambda images: {}, {}, val, val, compute, 0) is None


def test_numbers_of_a_report_have_nine_digits() -> None:
    assert round_floats({"a": [1 / 3, (2, "x")]}) == {"a": [0.333333333, [2, "x"]]}


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


def test_compared_density_is_the_one_that_is_fitted(net: nn.Module, train: ImageDataset, val: ImageDataset) -> None:
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
    net: nn.Module, train: ImageDataset, val: ImageDataset, monkeypatch: pytest.MonkeyPatch
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
        project(net, ChosenLayer(("4",), "named by the test"), FitJob(data, settings, settings.compute()))
    assert asked == [True, False]


@pytest.mark.parametrize("more", [{"density": "pooled++"}, {"density": "gda", "d_proj": 2}])
def test_sizes_are_not_compared_where_nothing_depends_on_them(
    net: nn.Module, train: ImageDataset, val: ImageDataset, more: dict[str, object]
) -> None:
    chosen = measure_collapse(net, train, val, settings=SETTINGS).choose("4")
    assert fit_projection(net, chosen, train, val, settings=SETTINGS, **more).report.positions == ()  # type: ignore[arg-type]


def test_checkpoint_keeps_sizes(net: nn.Module, train: ImageDataset, val: ImageDataset, tmp_path: Path) -> None:
    chosen = measure_collapse(net, train, val, settings=SETTINGS).choose("4")
    fitted = fit_projection(net, chosen, train, val, c_proj=6, minimum_dim=1, density="gda", settings=SETTINGS)
    checkpoint = Checkpoint(tmp_path / "stages", {})
    checkpoint.save_projection(fitted)
    kept = checkpoint.load_projection()
    assert kept is not None and kept.report.positions == fitted.report.positions != ()


@pytest.mark.parametrize("predictions", ["psc", "original"])
def test_what_a_fit_read_gives_what_its_model_serves(
    net: nn.Module, train: ImageDataset, val: ImageDataset, predictions: str
) -> None:
    """A report shows training and synthetic images without another run of the network."""
    settings = SETTINGS.changed({"layer": "4", "predictions": predictions})
    job = FitJob.of(train, val, settings)
    found = fit_stages(net, job)
    pipeline, at = found.model.pipeline, torch.tensor([7, 0, 130])
    with torch.inference_mode():
        images = next(train.subset(at).batches(3)).images
        torch.testing.assert_close(
            pipeline.outputs(found.parts.of_training(at)), pipeline(images), rtol=1e-4, atol=1e-5
        )
        assert found.parts.synthetic is not None
        batches = synthetic.synthetic_batches(job.data.selection, job.compute, "", mixed=True, seed=settings.seed)
        served = synthetic.by_transform(batches, lambda images: {"": pipeline(images)})
        assert served.keys() - {"real"} == found.parts.synthetic.keys()
        for transform, scored in found.parts.synthetic.items():
            torch.testing.assert_close(pipeline.outputs(scored), served[transform][""], rtol=1e-4, atol=1e-5)
