"""Served = fitted: the loaded pipeline gives the same numbers, whatever an image is batched with."""

from __future__ import annotations

import dataclasses
import inspect
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import psc_core
from psc_core import PRESETS, PSC, open_dataset
from psc_core.errors import BundleError, ImageError, UsageError
from psc_core.heads import entropy
from psc_core.model.inputs import as_batch, read_image
from psc_core.model.outputs import Outputs, pack
from psc_core.model.pipeline import Pipeline
from psc_core.policy import Policy
from psc_core.prediction import SCORES

ALLOW = ("tests.tiny:network",)


@pytest.fixture(scope="module")
def psc(tiny_bundle: Path) -> PSC:
    return PSC.load(tiny_bundle, device="cpu", allow_factories=ALLOW)


@pytest.fixture(scope="module")
def digits(data_root: Path) -> torch.Tensor:
    test = open_dataset(f"mnist:{data_root}", split="test", preprocess=PRESETS["mnist"])
    return next(iter(test.batches(100))).images


def png(image: torch.Tensor) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image[0].numpy()).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 16, 33, 64])
def test_an_answer_does_not_depend_on_its_batch(psc: PSC, digits: torch.Tensor, size: int) -> None:
    whole = psc.predict(digits[:64])
    parts = [psc.predict(part) for part in digits[:64].split(size)]
    joined = torch.cat([part.probabilities for part in parts])
    torch.testing.assert_close(joined, whole.probabilities, atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.cat([p.log_density for p in parts]), whole.log_density, atol=1e-3, rtol=1e-5)


def test_every_form_of_an_image_gives_the_same(psc: PSC, digits: torch.Tensor, tmp_path: Path) -> None:
    files = [png(image) for image in digits[:5]]
    paths = [tmp_path / f"{index}.png" for index in range(5)]
    for path, file in zip(paths, files, strict=True):
        path.write_bytes(file)
    grey = list(digits[:5, 0].numpy())
    expected = psc.predict(digits[:5])
    for images in (
        files,
        [Image.open(io.BytesIO(file)) for file in files],
        paths,
        [str(path) for path in paths],
        grey,
        [np.stack([array] * 3, axis=2) for array in grey],
        [files[0], paths[1], grey[2], Image.fromarray(grey[3]), grey[4]],
    ):
        got = psc.predict(images)
        assert torch.equal(got.probabilities, expected.probabilities)
        assert torch.equal(got.log_density, expected.log_density)


def test_the_fields_of_a_prediction_agree_with_each_other(psc: PSC, digits: torch.Tensor) -> None:
    prediction = psc.predict(digits)
    torch.testing.assert_close(prediction.probabilities.sum(1), torch.ones(len(digits)))
    torch.testing.assert_close(prediction.predictive_entropy, entropy(prediction.probabilities))
    assert torch.equal(prediction.ood_score, -prediction.log_density)
    assert torch.equal(prediction.is_ood, prediction.ood_p_value <= psc.alpha)
    assert prediction.labels == tuple(psc.classes[i] for i in prediction.class_index.tolist())
    best = prediction.probabilities.max(1)
    assert torch.equal(prediction.confidence, best.values)
    threshold = float(psc.calibration.set_thresholds(psc.policy.coverage)[0])
    assert prediction.prediction_set == tuple(
        tuple(name for k, name in enumerate(psc.classes) if row[k] >= threshold or k == top)
        for row, top in zip(prediction.probabilities.tolist(), best.indices.tolist(), strict=True)
    )
    scores = psc.calibration.scores.double()
    expected = [(1 + int((scores >= float(s)).sum())) / (1 + len(scores)) for s in prediction.ood_score]
    torch.testing.assert_close(prediction.ood_p_value.double(), torch.tensor(expected).double(), atol=1e-6, rtol=0)


def test_a_network_of_a_second_sees_digits_and_doubts_shirts(psc: PSC, data_root: Path, digits: torch.Tensor) -> None:
    shirts = open_dataset(f"fashion-mnist:{data_root}", split="test", preprocess=PRESETS["mnist"])
    doubted = psc.predict(next(iter(shirts.batches(100))).images).is_ood.double().mean()
    assert float(doubted) > 2 * float(psc.predict(digits).is_ood.double().mean())


def test_decisions_are_the_policys(psc: PSC, digits: torch.Tensor) -> None:
    middle = float(psc.predict(digits).predictive_entropy.median())
    prediction = dataclasses.replace(
        psc, policy=Policy(alpha=0.5, ambiguity_threshold=middle, coverage=psc.policy.coverage)
    ).predict(digits)
    assert prediction.decision == tuple(
        "abstain_ood" if p <= 0.5 else "abstain_ambiguous" if h > middle else "accept"
        for p, h in zip(prediction.ood_p_value.tolist(), prediction.predictive_entropy.tolist(), strict=True)
    )
    assert len(set(prediction.decision)) == 3


def test_a_p_value_of_exactly_alpha_is_out_of_distribution(psc: PSC, digits: torch.Tensor) -> None:
    p_value = float(psc.predict(digits[:1]).ood_p_value)
    at, below = (
        dataclasses.replace(psc, policy=psc.policy.model_copy(update={"alpha": alpha}))
        for alpha in (p_value, p_value * (1 - 1e-6))
    )
    assert at.predict(digits[:1]).decision == ("abstain_ood",)
    assert at.predict(digits[:1]).is_ood.tolist() == [True]
    assert below.predict(digits[:1]).is_ood.tolist() == [False]


def test_a_model_shows_itself_in_one_line(psc: PSC) -> None:
    assert len(repr(psc)) < 700
    assert "tests.tiny" not in repr(psc)


def test_nothing_to_predict(psc: PSC) -> None:
    assert len(psc.predict([])) == 0
    assert psc.predict(torch.empty(0, 1, 28, 28, dtype=torch.uint8)).probabilities.shape == (0, 10)


def test_wrong_input_is_refused(psc: PSC) -> None:
    with pytest.raises(UsageError, match="expected uint8 images"):
        psc.predict(torch.zeros(2, 1, 28, 28))
    with pytest.raises(UsageError, match="expected uint8 images"):
        psc.predict(torch.zeros(2, 3, 28, 28, dtype=torch.uint8))
    with pytest.raises(ImageError):
        psc.predict([b"nonsense"])
    with pytest.raises(UsageError, match=r"missing\.png"):
        psc.predict(["missing.png"])
    with pytest.raises(UsageError, match="got an array of float64"):
        psc.predict([np.zeros((28, 28))])
    with pytest.raises(UsageError, match=r"got an array of uint8 \(28, 28, 2\)"):
        psc.predict([np.zeros((28, 28, 2), np.uint8)])


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), MemoryError("full")])
def test_a_device_without_room_is_no_fault_of_the_bundle(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(Pipeline, "forward", fail)
    with pytest.raises(type(error), match="full"):
        PSC.load(tiny_bundle, device="cpu", allow_factories=ALLOW)


@pytest.mark.parametrize("image", [b"", "a.png", Path("a.png"), Image.new("L", (3, 3)), np.zeros((3, 3), np.uint8)])
def test_a_single_image_is_asked_into_a_list(psc: PSC, image: Any) -> None:
    with pytest.raises(UsageError, match="put it into a list"):
        inspect.unwrap(as_batch)(image, psc.preprocess)  # Without the type checks of the tests.
    with pytest.raises(UsageError, match=r"expected paths, encoded .* got a int"):
        inspect.unwrap(read_image)(1, psc.preprocess)


def test_packing_is_a_round_trip() -> None:
    scores, probabilities = {name: torch.rand(3) for name in SCORES}, torch.rand(3, 4)
    outputs = Outputs(pack(scores, probabilities))
    assert torch.equal(outputs.probabilities, probabilities)
    for name, values in scores.items():
        assert torch.equal(outputs[name], values)


def test_base_predictions_are_the_networks_own(tiny_job, digits: torch.Tensor, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    from psc_core.cli.fit import main

    assert main([*tiny_job.args, "--predictions", "base", "--out", str(tmp_path / "base")]) == 0
    base = PSC.load(tmp_path / "base", device="cpu", allow_factories=ALLOW)
    with torch.inference_mode():
        expected = tiny_job.net(PRESETS["mnist"].normalise(digits)).softmax(1)
    prediction = base.predict(digits)
    torch.testing.assert_close(prediction.probabilities, expected, atol=1e-6, rtol=0)
    assert base.predictions == "base"
    assert bool(prediction.log_density.isfinite().all())


def test_the_package_lists_its_names() -> None:
    assert set(psc_core.__all__) == set(dir(psc_core)) == set(psc_core._MODULES)
    assert all(getattr(psc_core, name) is not None for name in psc_core.__all__)
    with pytest.raises(AttributeError, match="it has PRESETS, PSC"):
        psc_core.nonsense  # noqa: B018


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = (
        "import sys, psc_core; heavy = {'torch', 'torchvision', 'tensorly', 'laplace', 'fastapi', "
        "'prometheus_client', 'numpy'} & set(sys.modules); assert not heavy, heavy; "
        "import psc_core.model.predictor, psc_core.fitting.stages, psc_core.cli.fit, psc_core.cli.evaluate; "
        "web = {'fastapi', 'starlette', 'uvicorn', 'prometheus_client', 'app'} & set(sys.modules); "
        "assert not web, web"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])


def test_a_network_that_gives_other_features_when_it_is_fused_is_refused(tiny_bundle: Path) -> None:
    psc = PSC.load(tiny_bundle, device="cpu", allow_factories=ALLOW)
    psc.probe()
    with torch.no_grad():
        for parameter in psc.pipeline.scorer.backbone.parameters():
            parameter.mul_(1.2)
    with pytest.raises(BundleError, match=r"same features from .* in fewer operations"):
        psc.probe()


def test_features_that_are_not_finite_are_seen_behind_a_relu_that_hides_them(tiny_bundle: Path) -> None:
    psc = PSC.load(tiny_bundle, device="cpu", allow_factories=ALLOW)
    with torch.no_grad():  # The fused copy has weights of its own.
        next(psc.backbone.parameters()).fill_(torch.nan)
    with pytest.raises(BundleError, match="not finite"):
        psc.probe()


def test_an_image_of_pillow_is_read_as_its_file_is(psc: PSC) -> None:
    clear = Image.new("RGBA", (28, 28), (255, 255, 255, 0))
    turned = Image.new("L", (40, 28))
    turned.paste(255, (0, 0, 20, 28))
    turned.getexif()[0x0112] = 6
    wide = Image.fromarray(torch.arange(784, dtype=torch.int32).view(28, 28).numpy().astype("uint16") * 80)
    for image in (clear, turned, wide):
        file = io.BytesIO()
        image.save(file, "PNG", exif=image.getexif())
        one, other = psc.predict([image]), psc.predict([file.getvalue()])
        assert torch.equal(one.log_density, other.log_density)


def test_an_explanation_comes_with_the_same_rows_from_one_pass(psc: PSC, monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.randint(0, 256, (5, 1, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = psc.pipeline(images)
        passes, embed = [], psc.pipeline.scorer.embed
        monkeypatch.setattr(psc.pipeline.scorer, "embed", lambda batch: passes.append(len(batch)) or embed(batch))
        rows, explanation = psc.pipeline.explain(images)
    assert torch.equal(rows, expected)
    assert passes == [5]
    assert explanation["class_distances"].shape == (5, 10)
