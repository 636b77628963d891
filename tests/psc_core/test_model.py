import pickle
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from psc_core import PRESETS, PSC, ClassificationPrediction, PSCRegressor, RegressionPrediction, open_dataset
from psc_core.answers import REGRESSION_SCORES
from psc_core.data.dataset import ImageDataset
from psc_core.errors import BundleError, FitError, ImageError, LoaderWarning, UsageError
from psc_core.fitted import Fitted, restore
from psc_core.model import build_model, load_model
from psc_core.pipeline import Pipeline
from tests import tiny
from tests.opened import opened

ALLOW = ("tests.tiny:network",)


def test_a_model_is_built_without_an_image(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service looks between the two whether it can afford the model."""
    ran: list[int] = []
    forward = Pipeline.forward
    monkeypatch.setattr(Pipeline, "forward", lambda self, images: (ran.append(len(images)), forward(self, images))[1])
    model = build_model(tiny_bundle, device="cpu", allow_factories=ALLOW)
    assert type(model) is PSC and ran == []
    assert model.probed() is model and ran == [3]


def test_models_are_keys(tiny_bundle: Path) -> None:
    first, second = (PSC.load(tiny_bundle, device="cpu", allow_factories=ALLOW) for _ in range(2))
    assert first == first and len({first, first, second}) == 2


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), MemoryError("full")])
def test_out_of_memory_is_no_bundle_error(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(Pipeline, "forward", Mock(side_effect=error))
    with pytest.raises(type(error), match="full"):
        PSC.load(tiny_bundle, device="cpu", allow_factories=ALLOW)


def test_text_of_an_unexpected_failure_is_in_the_log_alone(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Pipeline, "forward", Mock(side_effect=RuntimeError("/home/somebody/secret")))
    with pytest.raises(BundleError, match=r"do not fit together: RuntimeError, see the log; fit it again$"):
        PSC.load(tiny_bundle, device="cpu", allow_factories=ALLOW)
    assert "RuntimeError('/home/somebody/secret')" in caplog.text


def test_rejects_other_features_after_fusion(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    psc = PSC.load(tiny_bundle, device="cpu", allow_factories=ALLOW)
    psc.probe()
    with torch.no_grad():
        for parameter in psc.pipeline.scorer.backbone.parameters():
            parameter.mul_(1.2)
    with pytest.raises(FitError, match=r"same features from .* in fewer operations"):
        psc.probe()
    monkeypatch.setattr("psc_core.model.FUSION_TOLERANCE", {"fp32": -1.0})
    with pytest.raises(BundleError, match="same features"):
        PSC.load(tiny_bundle, device="cpu", allow_factories=ALLOW)


def test_rejects_nan_hidden_by_a_relu(tiny_bundle: Path) -> None:
    psc = PSC.load(tiny_bundle, device="cpu", allow_factories=ALLOW)
    with torch.no_grad():  # The fused copy has weights of its own.
        next(psc.backbone.parameters()).fill_(torch.nan)
    with pytest.raises(FitError, match=r"finite features and outputs .* some that are not"):
        psc.probe()


def test_rejects_a_network_that_reads_the_whole_batch(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a factory that was changed after the fit builds one."""

    class WholeBatch(torch.nn.ReLU):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 0.01 * x.mean(0)

    network = tiny.network
    monkeypatch.setattr(tiny, "network", lambda **args: whole_batch(network(**args), WholeBatch()))
    with pytest.raises(BundleError, match="the other images of the batch"):
        PSC.load(tiny_bundle, device="cpu", allow_factories=ALLOW)


def whole_batch(net: torch.nn.Sequential, layer: nn.Module) -> torch.nn.Sequential:
    at = next(name for name, module in net.named_modules() if isinstance(module, torch.nn.ReLU))
    setattr(net, at, layer)
    return net


def test_garments_are_ood_more_often_than_digits(psc: PSC, digits: torch.Tensor) -> None:
    shirts = opened("fashion-mnist")
    doubted = psc.predict(next(iter(shirts.batches(100))).images).is_ood.double().mean()
    assert float(doubted) > 2 * float(psc.predict(digits).is_ood.double().mean())


def test_empty_batch(psc: PSC) -> None:
    assert len(psc.predict([])) == 0
    assert psc.predict(torch.empty(0, 1, 28, 28, dtype=torch.uint8)).probabilities.shape == (0, 10)


def test_a_model_is_pickled(psc: PSC, digits: torch.Tensor) -> None:
    again = pickle.loads(pickle.dumps(psc))
    assert torch.equal(again.predict(digits).outputs.packed, psc.predict(digits).outputs.packed)


def test_inputs_enter_behind_the_standardisation(psc: PSC, digits: torch.Tensor) -> None:
    inputs = psc.preprocess.standardise(digits)
    expected = psc.predict(digits)
    for floats in (inputs, inputs.double(), inputs.clone().requires_grad_()):
        assert torch.equal(psc(floats).outputs.packed, expected.outputs.packed)
    assert torch.equal(inputs, psc.preprocess.standardise(digits)), "the caller's tensor stays as it is"


@pytest.mark.parametrize(
    ("scale", "said"),
    [
        (1 / 255, "from 0 to 1 are pixels divided by 255 and not standardised"),
        (1.0, "from 0 to 255 would be pixels from 0.131 to 78"),
    ],
)
def test_inputs_of_another_transform_are_told_once(digits: torch.Tensor, scale: float, said: str) -> None:
    psc = PSC.load("artifacts/dirty-mnist-resnet18", device="cpu")
    right = psc.preprocess.standardise(digits[:2])
    psc(right), psc(torch.zeros_like(right)), psc(digits[:2])
    with pytest.warns(LoaderWarning, match=f"inputs of this tensor {said}"):
        psc.predict(digits[:2].float() * scale)
    psc.predict(digits[:2].float() * scale)


def test_original_predictions_equal_the_network(tiny_job, digits: torch.Tensor, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    from psc_core.cli.fit import main

    assert main([*tiny_job.args, "--predictions", "original", "--no-report", "--out", str(tmp_path / "original")]) == 0
    original = PSC.load(tmp_path / "original", device="cpu", allow_factories=ALLOW)
    with torch.inference_mode():
        expected = tiny_job.net(PRESETS["mnist"].standardise(digits)).softmax(1)
    prediction = original.predict(digits)
    torch.testing.assert_close(prediction.probabilities, expected, atol=1e-6, rtol=0)
    assert original.predictions == "original"
    assert bool(prediction.log_density.isfinite().all())


@pytest.fixture(scope="module")
def regressor(angle_bundle: Path) -> PSCRegressor:
    return PSCRegressor.load(angle_bundle, device="cpu", allow_factories=ALLOW)


@pytest.fixture(scope="module")
def angles(regressor: PSCRegressor, data_root: Path) -> ImageDataset:
    return open_dataset(f"rotated-mnist:{data_root}", split="test", preprocess=regressor.preprocess)


def test_predicts_numbers_with_intervals(regressor: PSCRegressor, angles: ImageDataset) -> None:
    batch = next(angles.batches(400))
    got = regressor.predict(batch.images)
    assert isinstance(got, RegressionPrediction) and not isinstance(got, ClassificationPrediction)
    assert batch.values is not None and len(got) == 400
    assert float((got.mean - batch.values).square().mean().sqrt()) < 0.8 * float(batch.values.std())
    q = regressor.calibration.quantile(regressor.policy.coverage)
    half = q * torch.hypot(got.aleatoric, got.epistemic)
    torch.testing.assert_close(got.interval, torch.stack([got.mean - half, got.mean + half], dim=1))
    inside = (batch.values >= got.interval[:, 0]) & (batch.values <= got.interval[:, 1])
    assert float(inside.double().mean()) > 0.7
    assert set(got.checks) == set(regressor.checks) and {*REGRESSION_SCORES} <= {*dir(got)}
    with pytest.raises(AttributeError, match="probabilities"):
        _ = got.probabilities


def test_unlike_images_are_flagged(regressor: PSCRegressor, data_root: Path) -> None:
    shirts = open_dataset(f"fashion-mnist:{data_root}", split="test", preprocess=regressor.preprocess)
    assert float(regressor.predict(next(shirts.batches(300)).images).is_ood.double().mean()) > 0.5


def test_saves_what_it_loads(regressor: PSCRegressor, angles: ImageDataset, tmp_path: Path) -> None:
    manifest = regressor.save(tmp_path / "again")
    assert (manifest.version, manifest.schema_version, manifest.target) == (regressor.version, 7, regressor.target)
    again = load_model(tmp_path / "again", device="cpu", allow_factories=ALLOW)
    images = next(angles.batches(8)).images
    assert isinstance(again, PSCRegressor)
    assert torch.equal(again.predict(images).outputs.packed, regressor.predict(images).outputs.packed)


def test_no_images_give_no_numbers(regressor: PSCRegressor) -> None:
    assert len(regressor.predict([])) == 0 and regressor.predict([]).interval.shape == (0, 2)


def test_the_other_kind_of_bundle_is_refused(angle_bundle: Path, shipped_bundle: Path) -> None:
    with pytest.raises(BundleError, match=r"expected the bundle of a classifier.*is of a regression"):
        PSC.load(angle_bundle, allow_factories=ALLOW)
    with pytest.raises(BundleError, match=r"expected the bundle of a regression.*is of a classifier"):
        PSCRegressor.load(shipped_bundle)


@pytest.mark.parametrize(
    ("images", "said"),
    [
        (torch.zeros(2, 1, 28, 28, dtype=torch.int64), "uint8 pixels or float inputs"),
        (torch.zeros(2, 3, 28, 28, dtype=torch.uint8), "uint8 pixels or float inputs"),
        (torch.zeros(1, 28, 28), r"images\[None\]"),
        (torch.full((2, 1, 28, 28), torch.nan), "finite inputs"),
        ([b"nonsense"], "JPEG"),
        (["missing.png"], r"missing\.png"),
        ([np.zeros((28, 28))], "an array of float64"),
        ([np.zeros((28, 28, 2), np.uint8)], r"an array of uint8 \(28, 28, 2\)"),
    ],
)
def test_rejects_wrong_input(psc: PSC, images: Any, said: str) -> None:
    with pytest.raises((UsageError, ImageError), match=said):
        psc.predict(images)


class Line(Fitted):
    """One axis shared by two tensors."""

    kind = "line"
    layout: ClassVar = {"slope": ("dim",), "offset": ("dim",)}
    offset: Tensor


GOOD = {"slope": torch.ones(3), "offset": torch.zeros(3)}


def test_round_trip() -> None:
    line = Line(GOOD, record={"tau": 2.0})
    again = restore({"line": Line}, line.config(), line.state_dict())
    assert again.config() == {"kind": "line", "sizes": {"dim": 3}, "record": {"tau": 2.0}}
    assert all(torch.equal(tensor, GOOD[name]) for name, tensor in again.state_dict().items())


def test_more_in_a_record_leaves_the_model_as_it_is() -> None:
    line = Line(GOOD, record={"tau": 2.0})
    more = line.recording({"loss": 1})
    assert (line.record, more.record) == ({"tau": 2.0}, {"tau": 2.0, "loss": 1})
    assert type(more) is Line and torch.equal(more.offset, line.offset)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"more": torch.ones(3)}, "expected tensors"),
        ({"slope": torch.ones(4)}, "with axes"),
        ({"slope": torch.ones(3, 1)}, "with axes"),
        ({"slope": torch.full((3,), torch.nan)}, "finite"),
    ],
)
def test_rejects_other_tensors(change: dict[str, Tensor], message: str) -> None:
    with pytest.raises(FitError, match=message):
        Line({**GOOD, **change}, record={})
    with pytest.raises(BundleError, match=message):
        restore({"line": Line}, Line(GOOD, record={}).config(), {**GOOD, **change})
