from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from psc_core import PSC, FitSettings, fit_projection, fit_psc, measure_collapse
from psc_core.collapse import ChosenLayer
from psc_core.data.dataset import ArraySource, ImageDataset, split_validation
from psc_core.errors import UsageError
from psc_core.heads.base import Head
from psc_core.projection import FittedProjection
from psc_core.tasks.classification import Errors

SETTINGS = FitSettings(device="cpu")


def test_density_alone(net: nn.Module, train: ImageDataset, val: ImageDataset, projection: FittedProjection) -> None:
    chosen = measure_collapse(net, train, val, layers="^4$", settings=SETTINGS).choose("4")
    psc = fit_psc(net, chosen, projection, train, val, head="duq", ood_score="density", settings=SETTINGS)
    calibrates = split_validation(val, SETTINGS.seed)[1]
    found = psc.predict(next(calibrates.batches(len(calibrates))).images)
    assert torch.equal(found.ood_score, -found.log_density)
    torch.testing.assert_close(psc.calibration.ood_scores, found.ood_score.sort().values)
    n = len(found)  # of n calibration images themselves, the k-th most unusual has the p-value (k + 1) / (n + 1)
    assert sorted((found.ood_p_value * (n + 1)).round().int().tolist()) == list(range(2, n + 2))


def test_calibration_split_selects_nothing(
    net: nn.Module, train: ImageDataset, val: ImageDataset, projection: FittedProjection
) -> None:
    calibrates = torch.isin(val.indices, split_validation(val, SETTINGS.seed)[1].indices)
    other = replace(val, labels=torch.where(calibrates, (val.labels + 1) % 10, val.labels))
    collapse, other_collapse = (
        measure_collapse(net, train, data, layers="^4$", settings=SETTINGS) for data in (val, other)
    )
    assert collapse == other_collapse
    chosen = collapse.choose("4")
    assert fit_projection(net, chosen, train, other, settings=SETTINGS).report.c_proj == projection.report.c_proj
    one, two = (
        fit_psc(net, chosen, projection, train, data, head="duq", settings=SETTINGS).pipeline for data in (val, other)
    )
    assert isinstance(one.scorer.head, Head) and isinstance(two.scorer.head, Head)
    assert one.scorer.head.record == two.scorer.head.record
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, two.state_dict()[name]), name


@pytest.mark.filterwarnings("ignore:validation images are much harder")
def test_other_calibration_images_change_nothing_else(net: nn.Module, train: ImageDataset, val: ImageDataset) -> None:
    """So its scores and a new image's are exchangeable, however many checks are combined, and alpha is kept."""
    assert isinstance(val.source, ArraySource)
    images, calibrates = val.source.images.copy(), split_validation(val, SETTINGS.seed)[1].indices.numpy()
    images[calibrates] = 255 - images[calibrates]
    one, two = (
        PSC.fit(net, train, data, head="duq", device="cpu", max_images=600).pipeline
        for data in (val, replace(val, source=ArraySource(images)))
    )
    assert one.checks is not None and two.checks is not None and len(one.checks.names) > 1
    assert one.checks.names == two.checks.names and one.scorer.backbone.layers == two.scorer.backbone.layers
    fitted, other = one.state_dict(), two.state_dict()
    changed = {name for name, tensor in fitted.items() if not torch.equal(tensor, other[name])}
    assert fitted.keys() == other.keys() and changed == {"checks.calibration"}
    assert not torch.equal(one.calibration_scores, two.calibration_scores)


def fitted_with_accuracy(
    accuracy: float, fit: Callable[..., PSC], monkeypatch: pytest.MonkeyPatch, **settings: float
) -> PSC:
    """Fit a classifier, of whose calibration images this fraction counts as right, whatever their entropy."""
    generator = torch.Generator().manual_seed(0)

    def of(cls: type[Errors], entropy: torch.Tensor, correct: torch.Tensor) -> Errors:
        return count(entropy, torch.rand(len(correct), generator=generator) < accuracy)

    count = Errors.of
    with monkeypatch.context() as patch:
        patch.setattr(Errors, "of", classmethod(of))
        return fit(**settings)


def test_the_lowest_risk_that_can_be_shown_is_promised(
    net: nn.Module,
    train: ImageDataset,
    val: ImageDataset,
    projection: FittedProjection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fit = partial(fit_psc, net, ChosenLayer(("4",), ""), projection, train, val, head="duq", settings=SETTINGS)
    with pytest.warns(UserWarning, match="at most 10 % are wrong"):  # 75 images show no 5 %, even if all are right.
        sure = fitted_with_accuracy(1.0, fit, monkeypatch)
    assert sure.policy.risk == 0.1 and sure.policy.ambiguity_threshold >= 0
    with pytest.warns(UserWarning, match="NOTHING IS ACCEPTED"):
        none = fitted_with_accuracy(0.5, fit, monkeypatch)
    assert none.policy.risk is None
    assert {*none.predict(next(val.batches(64)).images).decision} <= {"abstain_ambiguous", "abstain_ood"}
    with pytest.raises(UsageError, match=r"risk of 0\.3 cannot be shown .* with risk auto nothing is accepted"):
        fitted_with_accuracy(0.5, fit, monkeypatch, risk=0.3)
    with pytest.raises(UsageError, match=r"risk of 0\.0001 cannot be shown .* even if all are right"):
        fit(risk=0.0001)
    asked = fitted_with_accuracy(1.0, fit, monkeypatch, risk=0.3)
    assert asked.policy.risk == 0.3 and asked.policy.ambiguity_threshold >= sure.policy.ambiguity_threshold
