"""Every backend gives the outputs that were calibrated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from psc_core import PRESETS, PSC, open_dataset
from psc_core import pipeline as backends
from psc_core.errors import NetworkError
from psc_core.pipeline import available_backends, check_agreement, pipeline_on
from psc_core.settings import BACKENDS


def test_real_digits_and_garments_get_the_same_decisions(shipped_bundle: Path, data_root: Path) -> None:
    psc = PSC.load(shipped_bundle, device="cpu")
    assert available_backends(psc) == BACKENDS
    sources = (
        open_dataset(f"{name}:{data_root}", split="test", preprocess=PRESETS["mnist"])
        for name in ("dirty-mnist", "fashion-mnist")
    )
    images = torch.cat([next(iter(source.batches(100))).images for source in sources])
    expected = psc.predict(images)
    for backend in BACKENDS:
        pipeline = pipeline_on(psc, backend)
        got = replace(psc, pipeline=pipeline).predict(images)
        check_agreement(psc, expected.outputs, got.outputs)
        assert got.decision == expected.decision
    assert len(set(expected.decision)) > 1


def test_only_a_traced_float32_network_on_a_cpu_has_several(psc: PSC, monkeypatch: pytest.MonkeyPatch) -> None:
    assert available_backends(psc) == BACKENDS
    monkeypatch.setattr(backends, "INSTALLED", False)
    assert available_backends(psc) == ("folded", "plain")
    with pytest.raises(NetworkError, match=r"pip install 'psc\[onnx\]'"):
        pipeline_on(psc, "onnx")
    monkeypatch.setattr(psc.pipeline.scorer.backbone, "precision", "bf16")
    assert available_backends(psc) == ("folded",)


@pytest.mark.parametrize("name", ["probabilities", "log densities", "p-values"])
def test_rejects_other_outputs(psc: PSC, digits: torch.Tensor, name: str) -> None:
    calibrated = psc.outputs(psc.pipeline(digits))
    other = psc.outputs(calibrated.packed.clone())
    column = {"probabilities": other.probabilities[:, 0], "log densities": other["log_density"]}.get(
        name, other["ood_p_value"]
    )
    check_agreement(psc, calibrated, other)
    column[7] += 1e-6
    check_agreement(psc, calibrated, other)
    column[7] += 1.0
    with pytest.raises(NetworkError, match=f"gives other {name} on another backend, by up to "):
        check_agreement(psc, calibrated, other)
    column[7] = torch.nan
    with pytest.raises(NetworkError, match="by up to nan"):
        check_agreement(psc, calibrated, other)
