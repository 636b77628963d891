"""The figures of a classifier draw the numbers that they are given."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from psc_core.report import classification
from psc_core.report.classification import ClassificationSet
from psc_core.report.content import Role
from tests.psc_core.report.support import image_set


def test_reliability_and_risk_of_known_confidences() -> None:
    images = image_set("test", Role.TEST, [0.0] * 4)
    drawn, risks = classification.reliability(images), classification.risk_coverage(images)
    assert drawn is not None and risks is not None
    x, y = drawn.axes[0].lines[1].get_data()
    assert x == pytest.approx([0.9]) and y == pytest.approx([float(images.correct["psc"].double().mean())])
    assert risks.axes[0].lines[0].get_ydata()[-1] == pytest.approx(1 - y[0])  # type: ignore[index]


def test_many_classes_show_those_with_errors() -> None:
    count = 50
    labels = torch.arange(count).repeat(2)
    predicted = labels.clone()
    predicted[30:33] += 1
    whole = image_set("test", Role.TEST, [0.0] * len(labels))
    images = ClassificationSet(**{**vars(whole), "labels": labels, "predicted": predicted})
    drawn = classification.confusion(images, [f"c{i}" for i in range(count)])
    assert drawn is not None
    names = [label.get_text() for label in drawn.axes[0].get_yticklabels()]
    assert len(names) == classification.MAX_CONFUSED and "c30" in names
    assert {text.get_text() for text in drawn.axes[0].texts} >= {"50%"}


def test_confusion_of_very_many_classes_takes_the_memory_of_those_that_are_drawn() -> None:
    count = 12_000_000  # Times itself, in no memory.
    images = image_set("test", Role.TEST, [0.0] * 40, classes=40)
    drawn = classification.confusion(images, "c" * count)
    assert drawn is not None and len(drawn.axes[0].get_yticklabels()) == classification.MAX_CONFUSED


@given(st.integers(0, 10_000), st.integers(2, 40))
def test_confusion_is_that_of_all_classes(seed: int, count: int) -> None:
    labels, predicted = torch.randint(0, count, (2, 300), generator=torch.Generator().manual_seed(seed))
    whole = torch.bincount(labels * count + predicted, minlength=count**2).reshape(count, count)
    wrong = whole.sum(1) - whole.diagonal()
    kept = wrong.argsort(descending=True, stable=True)[: classification.MAX_CONFUSED].sort().values
    expected = whole[kept][:, kept].float() / whole[kept].sum(1, keepdim=True).clamp_min(1)
    found, fractions = classification.most_confused(labels, predicted, count)
    assert torch.equal(found, kept) and torch.equal(fractions, expected)


def test_images_without_labels_have_no_figure() -> None:
    unknown = image_set("clothes", Role.OOD, [1.0])
    assert (
        classification.reliability(unknown)
        is classification.risk_coverage(unknown)
        is classification.confusion(unknown, ["a"])
        is None
    )
