"""What a classifier's report keeps of images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from psc_core import PSC, open_dataset
from psc_core.data.dataset import ArraySource, labelled
from psc_core.evaluation.classification import ClassificationEvaluator
from psc_core.images.preprocess import Preprocess
from psc_core.report import classification
from psc_core.report.content import Role


def test_pictures_are_the_extremes_of_each_class(shipped_bundle: Path, data_root: Path) -> None:
    psc = PSC.load(shipped_bundle, device="cpu")
    data = open_dataset(f"mnist:{data_root}", split="test", preprocess=psc.preprocess).subset(torch.arange(60))
    scored = ClassificationEvaluator().score_images(psc, data)
    pictures = classification.ClassificationTaskReport().pictures_of(data, scored)
    for label in range(10):
        mine = sorted(scored.ood["psc"][data.first_labels() == label].tolist())
        shown = {
            why: [each.ood_score for each in pictures if (each.label, each.why) == (label, why)]
            for why in ("most unusual", "most typical")
        }
        assert shown["most typical"] == pytest.approx(mine[: classification.EACH])
        assert shown["most unusual"] == pytest.approx(mine[::-1][: classification.EACH])
    assert all(torch.equal(each.pixels, torch.from_numpy(data.image(i))) for each in pictures[:1]
               for i in [scored.ood["psc"].tolist().index(each.ood_score)])  # fmt: skip


def test_large_images_are_shown_small() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (2, 300, 200), dtype=np.uint8)
    preprocess = Preprocess("L", 300, 200, None, (0.5,), (0.5,))
    data = labelled("large", ("a", "b"), ArraySource(pixels), torch.tensor([0, 1]), preprocess)
    small = classification.thumbnail(data, 1)
    assert small.shape == (1, 96, 64) and small.dtype == torch.uint8
    assert abs(float(small.float().mean()) - pixels[1].mean()) < 2


def test_images_of_other_classes_have_no_labels(shipped_bundle: Path, data_root: Path) -> None:
    psc = PSC.load(shipped_bundle, device="cpu")
    shirts = open_dataset(f"fashion-mnist:{data_root}", split="test", preprocess=psc.preprocess)
    shirts = shirts.subset(torch.arange(20))
    kept = classification.ClassificationTaskReport().scored_set(
        "shirts", Role.OOD, shirts, ClassificationEvaluator().score_images(psc, shirts)
    )
    assert len(kept.labels) == 0 and kept.quality == kept.confidence == kept.correct == {}
    prediction = psc.predict(next(shirts.batches(20)).images)
    assert torch.equal(kept.predicted, prediction.class_index)
    assert torch.allclose(kept.ood_score, prediction.ood_score, atol=1e-4)
    synthetic = classification.ClassificationTaskReport().synthetic_set("turned", psc, prediction.outputs.packed)
    assert synthetic.role is Role.SYNTHETIC and torch.equal(synthetic.predicted, prediction.class_index)
    assert torch.equal(synthetic.entropy, prediction.predictive_entropy)
