"""Served = fitted: the loaded pipeline gives the same numbers, whatever an image is batched with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from psc_core import PRESETS, PSC, open_dataset
from psc_core.errors import ImageError, UsageError

ALLOW = ("tests.tiny:network",)


def test_garments_are_ood_more_often_than_digits(psc: PSC, data_root: Path, digits: torch.Tensor) -> None:
    shirts = open_dataset(f"fashion-mnist:{data_root}", split="test", preprocess=PRESETS["mnist"])
    doubted = psc.predict(next(iter(shirts.batches(100))).images).is_ood.double().mean()
    assert float(doubted) > 2 * float(psc.predict(digits).is_ood.double().mean())


def test_repr_is_short(psc: PSC) -> None:
    assert len(repr(psc)) < 700
    assert "tests.tiny" not in repr(psc)


def test_empty_batch(psc: PSC) -> None:
    assert len(psc.predict([])) == 0
    assert psc.predict(torch.empty(0, 1, 28, 28, dtype=torch.uint8)).probabilities.shape == (0, 10)


def test_rejects_wrong_input(psc: PSC) -> None:
    for wrong in (torch.zeros(2, 1, 28, 28, dtype=torch.int64), torch.zeros(2, 3, 28, 28, dtype=torch.uint8)):
        with pytest.raises(UsageError, match="expected uint8 pixels or float inputs of shape"):
            psc.predict(wrong)
    with pytest.raises(UsageError, match=r"one image \(1, 28, 28\); add an axis, images\[None\]"):
        psc.predict(torch.zeros(1, 28, 28))
    with pytest.raises(UsageError, match="expected finite inputs"):
        psc.predict(torch.full((2, 1, 28, 28), torch.nan))
    with pytest.raises(ImageError):
        psc.predict([b"nonsense"])
    with pytest.raises(UsageError, match=r"missing\.png"):
        psc.predict(["missing.png"])
    with pytest.raises(UsageError, match="got an array of float64"):
        psc.predict([np.zeros((28, 28))])
    with pytest.raises(UsageError, match=r"got an array of uint8 \(28, 28, 2\)"):
        psc.predict([np.zeros((28, 28, 2), np.uint8)])


def test_inputs_enter_behind_the_standardisation(psc: PSC, digits: torch.Tensor) -> None:
    inputs = psc.preprocess.standardise(digits)
    expected = psc.predict(digits)
    for floats in (inputs, inputs.double(), inputs.clone().requires_grad_()):
        assert torch.equal(psc(floats).outputs.packed, expected.outputs.packed)
    assert torch.equal(inputs, psc.preprocess.standardise(digits)), "the caller's tensor stays as it is"


def test_base_predictions_equal_the_network(tiny_job, digits: torch.Tensor, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    from psc_core.cli.fit import main

    assert main([*tiny_job.args, "--predictions", "original", "--no-report", "--out", str(tmp_path / "original")]) == 0
    base = PSC.load(tmp_path / "original", device="cpu", allow_factories=ALLOW)
    with torch.inference_mode():
        expected = tiny_job.net(PRESETS["mnist"].standardise(digits)).softmax(1)
    prediction = base.predict(digits)
    torch.testing.assert_close(prediction.probabilities, expected, atol=1e-6, rtol=0)
    assert base.predictions == "original"
    assert bool(prediction.log_density.isfinite().all())
