"""One pass keeps the features of every layer that a fit reads."""

from __future__ import annotations

import pytest
import torch

from psc_core import FitSettings, fit_psc
from psc_core.collapse import ChosenLayer
from psc_core.data.dataset import ImageDataset
from psc_core.fit_parts import Layers, cut, read
from psc_core.heads import sngp, softmax
from psc_core.projection import FittedProjection

SETTINGS = FitSettings(device="cpu")


def test_seed_reaches_the_head(
    net: torch.nn.Module,
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


def test_features_are_ordered_by_class_and_each_is_of_its_image(
    net: torch.nn.Module, val: ImageDataset, projection: FittedProjection
) -> None:
    compute, layers = SETTINGS.compute(), Layers(("4",), ("2",), ("0", "2"))
    assert layers.names == ("4", "2", "0")
    backbone = cut(net, layers.names, val, compute, keep_output=True)
    layers = layers._replace(output=True)
    found = read(backbone, layers, projection.projection, val, compute, pooled=True)
    order = val.labels.argsort(stable=True)
    assert torch.equal(found.features.labels, val.labels[order])
    assert torch.equal(found.features.images, order)
    with torch.inference_mode():
        (chosen, second, first), own = backbone(val.preprocess.standardise(next(val.batches(len(val))).images))
        z = projection.projection([chosen])
    read_by_head = torch.cat([z, second.mean(2)], dim=1)[order]
    assert found.features.widths == (z.shape[1], second.shape[1])
    for got, expected in (
        (found.features.head_input, read_by_head),
        (found.density_input, chosen.mean(2)[order]),
        (found.texture["0"], first.mean(2)[order]),
        (found.texture["2"], second.mean(2)[order]),
        (found.features.network_output, own[order]),
    ):
        torch.testing.assert_close(got[:], expected, rtol=1e-4, atol=1e-4)


def test_each_layer_is_kept_once(net: torch.nn.Module, val: ImageDataset, projection: FittedProjection) -> None:
    compute, layers = SETTINGS.compute(), Layers(("4",), ("4", "2"), ("2", "0"))
    backbone = cut(net, layers.names, val, compute, keep_output=False)
    found = read(backbone, layers, projection.projection, val, compute, pooled=True)
    z, chosen, second = found.features.widths
    first = found.texture["0"].shape[1]
    columns = found.file_bytes / (4 * len(val))
    assert columns == z + chosen + second + first
    _, *of_layers = found.features.head_input[:].split(found.features.widths, dim=1)
    assert torch.equal(found.density_input[:], of_layers[0]) and torch.equal(found.texture["2"][:], of_layers[1])
    # Blocks, and so sums, stay those of fits that kept a layer for each of its readers.
    assert found.features.head_input.widest == found.density_input.widest == z + chosen + second + chosen
    assert found.texture["0"].widest == found.texture["2"].widest == second + first


def test_a_density_may_read_z(net: torch.nn.Module, val: ImageDataset, projection: FittedProjection) -> None:
    compute, layers = SETTINGS.compute(), Layers(("4",), (), ())
    backbone = cut(net, layers.names, val, compute, keep_output=False)
    found = read(backbone, layers, projection.projection, val, compute, pooled=False)
    assert torch.equal(found.density_input[:], found.features.head_input[:])
    assert found.texture == {} and found.features.network_output is None
