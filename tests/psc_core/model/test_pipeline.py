"""The pipeline on batches."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from psc_core import PSC, PSCRegressor


@pytest.mark.parametrize("size", [1, 2, 3, 7, 16, 33, 64])
def test_outputs_do_not_depend_on_the_batch(psc: PSC, digits: torch.Tensor, size: int) -> None:
    whole = psc.predict(digits[:64])
    parts = [psc.predict(part) for part in digits[:64].split(size)]
    joined = torch.cat([part.probabilities for part in parts])
    torch.testing.assert_close(joined, whole.probabilities, atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.cat([p.log_density for p in parts]), whole.log_density, atol=1e-3, rtol=1e-5)


def test_explanation_takes_one_pass(psc: PSC, monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.randint(0, 256, (5, 1, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = psc.pipeline(images)
        passes, features = [], psc.pipeline.scorer.features
        monkeypatch.setattr(psc.pipeline.scorer, "features", lambda batch: passes.append(len(batch)) or features(batch))
        packed, explanation = psc.pipeline.explain(images)
    assert torch.equal(packed, expected)
    assert passes == [5]
    assert explanation["class_distances"].shape == (5, 10)


def test_a_head_reads_earlier_layers_one_of_which_is_the_textures(neighbours_bundle: Path) -> None:
    model = PSCRegressor.load(neighbours_bundle, device="cpu", allow_factories=("tests.tiny:network",))
    scorer, layers = model.pipeline.scorer, model.backbone.layers
    images = torch.randint(0, 256, (5, 1, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        features, _ = scorer.backbone(scorer.standardise(images))
        embedding = scorer.embed(images)
        packed, explanation = model.pipeline.explain(images)
    read = dict(zip(layers, features, strict=True))
    names = scorer.head_layers
    expected = torch.cat([embedding.z, *(read[name].mean(2) for name in names)], dim=1)
    torch.testing.assert_close(embedding.head_input, expected)
    assert embedding.early is not None and layers[-1] in names
    torch.testing.assert_close(embedding.early, read[layers[-1]].mean(2))
    assert explanation["neighbour_image"].shape == (5, 1 + len(names), 3)
    torch.testing.assert_close(packed, model.predict(images).outputs.packed)


def test_a_copy_shares_all_parts_but_the_new_ones(psc: PSC) -> None:
    scorer = psc.pipeline.scorer
    head, density = copy.deepcopy(scorer.head), copy.deepcopy(scorer.density)
    assert scorer.with_head(head).parts == replace(scorer.parts, head=head)
    assert scorer.with_densities(density, scorer.texture).parts == replace(scorer.parts, density=density)
    assert scorer.with_backbone(psc.backbone, None).parts == replace(scorer.parts, backbone=psc.backbone, texture=None)


def test_a_deep_copy_keeps_its_parts_and_attributes_one(psc: PSC) -> None:
    scorer = copy.deepcopy(psc.pipeline.scorer)
    assert {name: getattr(scorer, name) for name in vars(scorer.parts)} == vars(scorer.parts)
    assert scorer.density is not psc.pipeline.scorer.density
