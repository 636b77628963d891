"""A fitted regression: predictions, decisions, saving and loading."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from psc_core import PSC, ClassificationPrediction, PSCRegressor, RegressionPrediction
from psc_core.answers import REGRESSION_SCORES
from psc_core.data.dataset import ImageDataset
from psc_core.data.open import open_dataset
from psc_core.errors import BundleError
from psc_core.model import load_model

ALLOW = ("tests.tiny:network",)


@pytest.fixture(scope="module")
def model(angle_bundle: Path) -> PSCRegressor:
    return PSCRegressor.load(angle_bundle, device="cpu", allow_factories=ALLOW)


@pytest.fixture(scope="module")
def test_images(model: PSCRegressor, data_root: Path) -> ImageDataset:
    return open_dataset(f"rotated-mnist:{data_root}", split="test", preprocess=model.preprocess)


def test_predicts_numbers_with_intervals(model: PSCRegressor, test_images: ImageDataset) -> None:
    batch = next(test_images.batches(400))
    got = model.predict(batch.images)
    assert isinstance(got, RegressionPrediction) and not isinstance(got, ClassificationPrediction)
    assert batch.values is not None and len(got) == 400
    assert float((got.mean - batch.values).square().mean().sqrt()) < 0.8 * float(batch.values.std())
    q = model.calibration.quantile(model.policy.coverage)
    half = q * torch.hypot(got.aleatoric, got.epistemic)
    torch.testing.assert_close(got.interval, torch.stack([got.mean - half, got.mean + half], dim=1))
    inside = (batch.values >= got.interval[:, 0]) & (batch.values <= got.interval[:, 1])
    assert float(inside.double().mean()) > 0.7
    assert set(got.checks) == set(model.checks) and {*REGRESSION_SCORES} <= {*dir(got)}
    with pytest.raises(AttributeError, match="probabilities"):
        _ = got.probabilities


def test_unlike_images_are_flagged(model: PSCRegressor, data_root: Path) -> None:
    shirts = open_dataset(f"fashion-mnist:{data_root}", split="test", preprocess=model.preprocess)
    assert float(model.predict(next(shirts.batches(300)).images).is_ood.double().mean()) > 0.5


def test_saves_what_it_loads(model: PSCRegressor, test_images: ImageDataset, tmp_path: Path) -> None:
    manifest = model.save(tmp_path / "again")
    assert (manifest.version, manifest.schema_version, manifest.target) == (model.version, 6, model.target)
    again = load_model(tmp_path / "again", device="cpu", allow_factories=ALLOW)
    images = next(test_images.batches(8)).images
    assert isinstance(again, PSCRegressor)
    assert torch.equal(again.predict(images).outputs.packed, model.predict(images).outputs.packed)


def test_no_images_give_no_numbers(model: PSCRegressor) -> None:
    assert len(model.predict([])) == 0 and model.predict([]).interval.shape == (0, 2)


def test_the_other_kind_of_bundle_is_refused(angle_bundle: Path, shipped_bundle: Path) -> None:
    with pytest.raises(BundleError, match=r"expected the bundle of a classifier.*is of a regression"):
        PSC.load(angle_bundle, allow_factories=ALLOW)
    with pytest.raises(BundleError, match=r"expected the bundle of a regression.*is of a classifier"):
        PSCRegressor.load(shipped_bundle)
