"""The report of a classifier: what it keeps of images, its figures, and what is known of its bundle."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from psc_core import PSC, open_dataset
from psc_core.answers import ACCEPTS_NOTHING
from psc_core.bundle import Bundle, read_bundle
from psc_core.data.dataset import ArraySource, label_images
from psc_core.evaluation.classification import ClassificationEvaluator
from psc_core.images.preprocess import Preprocess
from psc_core.report import tasks
from psc_core.report.content import Content, Role, facts_of
from tests.psc_core.report.support import image_set


def test_pictures_are_the_extremes_of_each_class(shipped_bundle: Path, data_root: Path) -> None:
    psc = PSC.load(shipped_bundle, device="cpu")
    data = open_dataset(f"mnist:{data_root}", split="test", preprocess=psc.preprocess).subset(torch.arange(60))
    scored = ClassificationEvaluator().score_images(psc, data)
    pictures = tasks.ClassificationTaskReport().pictures_of(data, scored)
    for label in range(10):
        mine = sorted(scored.ood["psc"][data.first_labels() == label].tolist())
        shown = {
            why: [each.ood_score for each in pictures if (each.label, each.why) == (label, why)]
            for why in ("most unusual", "most typical")
        }
        assert shown["most typical"] == pytest.approx(mine[: tasks.EACH])
        assert shown["most unusual"] == pytest.approx(mine[::-1][: tasks.EACH])
    assert all(torch.equal(each.pixels, torch.from_numpy(data.image(i))) for each in pictures[:1]
               for i in [scored.ood["psc"].tolist().index(each.ood_score)])  # fmt: skip


def test_large_images_are_shown_small() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (2, 300, 200), dtype=np.uint8)
    preprocess = Preprocess("L", 300, 200, None, (0.5,), (0.5,))
    data = label_images("large", ("a", "b"), ArraySource(pixels), torch.tensor([0, 1]), preprocess)
    small = tasks.thumbnail(data, 1)
    assert small.shape == (1, 96, 64) and small.dtype == torch.uint8
    assert abs(float(small.float().mean()) - pixels[1].mean()) < 2


def test_images_of_other_classes_have_no_labels(shipped_bundle: Path, data_root: Path) -> None:
    psc = PSC.load(shipped_bundle, device="cpu")
    shirts = open_dataset(f"fashion-mnist:{data_root}", split="test", preprocess=psc.preprocess)
    shirts = shirts.subset(torch.arange(20))
    prediction = psc.predict(next(shirts.batches(20)).images)
    scored = ClassificationEvaluator().score_images(psc, shirts, packed=prediction.outputs.packed)
    kept = tasks.ClassificationTaskReport().scored_set("shirts", Role.OOD, shirts, scored)
    assert len(kept.labels) == 0 and kept.quality == kept.confidence == kept.correct == {}
    assert torch.equal(kept.entropy, prediction.predictive_entropy)
    assert torch.equal(kept.predicted, prediction.class_index)
    assert torch.allclose(kept.ood_score, prediction.ood_score, atol=1e-4)
    synthetic = tasks.ClassificationTaskReport().synthetic_set("turned", psc, prediction.outputs.packed)
    assert synthetic.role is Role.SYNTHETIC and torch.equal(synthetic.predicted, prediction.class_index)
    assert torch.equal(synthetic.entropy, prediction.predictive_entropy)


def test_reliability_and_risk_of_known_confidences() -> None:
    images = image_set("test", Role.TEST, [0.0] * 4)
    drawn, risks = tasks.reliability(images), tasks.risk_coverage(images)
    assert drawn is not None and risks is not None
    x, y = drawn.axes[0].lines[1].get_data()
    assert x == pytest.approx([0.9]) and y == pytest.approx([float(images.correct["psc"].double().mean())])
    assert risks.axes[0].lines[0].get_ydata() == pytest.approx([1 - y[0]] * 4)  # The confidences are equal.


def test_confusion_of_very_many_classes_takes_the_memory_of_those_that_are_drawn() -> None:
    count = 12_000_000  # Times itself, in no memory.
    images = image_set("test", Role.TEST, [0.0] * 40, classes=40)
    drawn = tasks.confusion(images, "c" * count)
    assert drawn is not None and len(drawn.axes[0].get_yticklabels()) == tasks.MAX_CONFUSED


@given(st.integers(0, 10_000), st.integers(2, 40))
def test_confusion_is_that_of_all_classes(seed: int, count: int) -> None:
    labels, predicted = torch.randint(0, count, (2, 300), generator=torch.Generator().manual_seed(seed))
    whole = torch.bincount(labels * count + predicted, minlength=count**2).reshape(count, count)
    wrong = whole.sum(1) - whole.diagonal()
    kept = wrong.argsort(descending=True, stable=True)[: tasks.MAX_CONFUSED].sort().values
    expected = whole[kept][:, kept].float() / whole[kept].sum(1, keepdim=True).clamp_min(1)
    found, fractions = tasks.most_confused(labels, predicted, count)
    assert torch.equal(found, kept) and torch.equal(fractions, expected)


def test_images_without_labels_have_no_figure() -> None:
    unknown = image_set("clothes", Role.OOD, [1.0])
    assert tasks.reliability(unknown) is tasks.risk_coverage(unknown) is None
    assert tasks.confusion(unknown, ["a"]) is None


def test_warns_where_psc_loses_accuracy(shipped_bundle: Path) -> None:
    version = read_bundle(shipped_bundle).manifest.version
    images = image_set("validation", Role.VALIDATION, [0.0] * 3)
    images.quality["psc"]["accuracy"], images.quality["original"]["accuracy"] = 0.90, 0.93  # type: ignore[index]
    found = facts_of(read_bundle(shipped_bundle), Content(version, (images,)))
    assert "by 0.030; --predictions original" in found.to_text()


@pytest.mark.parametrize(("threshold", "limit"), [(0.5, 0.5), (5.0, None), (ACCEPTS_NOTHING, -1)])
def test_limit_of_ambiguous_images(shipped_bundle: Path, threshold: float, limit: float | None) -> None:
    bundle = read_bundle(shipped_bundle)
    policy = bundle.manifest.policy.model_copy(update={"ambiguity_threshold": threshold, "risk": None})
    manifest = bundle.manifest.model_copy(update={"policy": policy})
    found = facts_of(Bundle(bundle.path, manifest, bundle.parts), Content(manifest.version))
    assert found.limits == {"entropies": limit}
    assert ("NOTHING IS ACCEPTED" in found.to_text().splitlines()[0]) == (threshold < 0)
