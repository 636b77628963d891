"""Verified files that do not make a model."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from psc_core import PSC, pipeline
from psc_core.bundle import PARTS
from psc_core.errors import BundleError
from tools.forge import ALLOW, assign, edit_part


@pytest.fixture
def bundle(tiny_bundle: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))


MISSING = {
    "backbone": r"backbone does not fit the network: 1 missing \(body\.0\.bias\)",
    "projection": "expected tensors .*'channel_factor'.* for 'tucker', got ",
    "density": r"expected tensors .*'basis'.* for 'pooled\+\+', got ",
    "head": "expected tensors .*'bias'.* for 'laplace', got ",
    "calibration": "expected calibration tensors .*'entropies'.* got ",
    "checks": "expected checks tensors .*'ascending'.* got ",
    "map": "expected tensors .*'mean'.* for 'gaussian', got ",
    "stored_images": "expected stored image tensors .*'embedding'.* got ",
}


@pytest.mark.parametrize("part", PARTS)
def test_rejects_missing_tensors(bundle: Path, part: str) -> None:
    def drop(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[min(tensors)]

    edit_part(bundle, part, drop)
    with pytest.raises(BundleError, match=MISSING[part]):
        PSC.load(bundle, device="cpu", allow_factories=ALLOW)


GROWN = {
    "backbone": r"backbone: expected body\.4\.weight of shape \(16, 16, 3, 3\), got \(32, 16, 3, 3\)",
    "projection": r"expected tucker\.\w+ with axes .* got shape ",
    "density": r"expected pooled\+\+\.\w+ with axes .* got shape ",
    "head": r"expected laplace\.\w+ with axes .* got shape ",
    "calibration": r"calibration scores of one length, got .*\(300,\)",
    "checks": r"expected float32 checks\.ascending of 2 checks, got torch\.float32 \(4, 150\)",
    "map": r"expected tensors of 'gaussian' with sizes .*'levels': 255}, got .*'levels': 510}",
    "stored_images": r"expected torch\.uint8 stored_images\.pixels with axes .* got torch\.uint8 \(40, 1, 28, 28\)",
}


@pytest.mark.parametrize("part", PARTS)
def test_rejects_wrong_shapes(bundle: Path, part: str) -> None:
    def grow(tensors: dict[str, torch.Tensor]) -> None:
        name = max(sorted(tensors), key=lambda key: tensors[key].numel())
        tensors[name] = torch.cat([tensors[name], tensors[name]])

    edit_part(bundle, part, grow)
    with pytest.raises(BundleError, match=GROWN[part]):
        PSC.load(bundle, device="cpu", allow_factories=ALLOW)


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        ("checks.images", 7, r"expected \(7, 150\) values of the checks, got \(150, 150\)"),
        ("checks.names", ["texture", "colour"], "expected checks of texture"),
        ("checks.names", ["content"], r"checks.names \(texture\) to be True, got False"),
        ("checks.texture.counts_below", 0.0, "field checks.texture.counts_below: .*expected more than 0"),
        ("checks.texture.counts_below", 1.5, "field checks.texture.counts_below: .*expected at most 1"),
    ],
)
def test_rejects_other_checks(bundle: Path, where: str, value: Any, message: str) -> None:
    assign(bundle, where, value)
    with pytest.raises(BundleError, match=message):
        PSC.load(bundle, device="cpu", allow_factories=ALLOW)


def test_rejects_tensors_of_no_texture(bundle: Path) -> None:
    assign(bundle, "checks", {"names": ["content", "confidence"], "images": 150, "texture": None})
    with pytest.raises(BundleError, match=r"expected checks tensors .* got .*texture\."):
        PSC.load(bundle, device="cpu", allow_factories=ALLOW)


def test_rejects_other_number_of_classes(bundle: Path) -> None:
    assign(bundle, "classes", ["a", "b", "c"])
    with pytest.raises(BundleError, match=r"head\.sizes\.classes to be 3, got 10"):
        PSC.load(bundle, device="cpu", allow_factories=ALLOW)


def test_factories_need_permission(tiny_bundle: Path) -> None:
    with pytest.raises(BundleError, match=r"tests\.tiny:network"):
        PSC.load(tiny_bundle, device="cpu")


def test_a_texture_may_count_at_every_p_value(bundle: Path, tmp_path: Path) -> None:
    assign(bundle, "checks.texture.counts_below", 1.0)
    psc = PSC.load(bundle, device="cpu", allow_factories=ALLOW)
    assert psc.pipeline.checks is not None and psc.pipeline.checks.texture_counts_below == 1
    assert psc.save(tmp_path / "again").version == psc.version


def test_text_of_a_strange_failure_is_in_the_log_alone(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A service tells the message to whoever loads a bundle."""

    def broken(*_: object) -> None:
        raise ValueError("/home/somebody/secret")

    monkeypatch.setattr(pipeline, "restore_density", broken)
    with pytest.raises(BundleError, match=r"do not fit together: ValueError, see the log; fit the bundle again$"):
        PSC.load(tiny_bundle, device="cpu", allow_factories=ALLOW)
    assert "ValueError('/home/somebody/secret')" in caplog.text


@pytest.mark.parametrize("error", [FileNotFoundError(2, "No usable temporary directory"), OSError(28, "No space left")])
def test_what_the_machine_lacks_is_not_the_fault_of_the_bundle(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(pipeline, "rebuild_backbone", fail)
    with pytest.raises(BundleError) as raised:
        PSC.load(bundle, device="cpu", allow_factories=ALLOW)
    said = str(raised.value)
    assert str(error.strerror) in said and "TMPDIR" in said and "fit the bundle again" not in said


def test_a_bundle_is_loaded_where_no_folder_may_be_written_to(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As PyTorch's import of its compiler sees it, which makes the folder of its cache if it has none."""

    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    assert PSC.load(bundle, device="cpu", allow_factories=ALLOW).classes
    assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).is_dir()
