import os
import tempfile
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from psc_core import PSC, PSCRegressor, pipeline, storage
from psc_core.errors import BundleError, NetworkError
from psc_core.pipeline import available_backends, check_agreement, pipeline_on
from psc_core.settings import BACKENDS
from tests.opened import opened
from tools.forge import ALLOW, assign


@pytest.mark.parametrize("size", [1, 7, 33])
def test_outputs_do_not_depend_on_the_batch(psc: PSC, digits: torch.Tensor, size: int) -> None:
    whole = psc.predict(digits[:64])
    parts = [psc.predict(part) for part in digits[:64].split(size)]
    joined = torch.cat([part.probabilities for part in parts])
    torch.testing.assert_close(joined, whole.probabilities, atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.cat([p.log_density for p in parts]), whole.log_density, atol=1e-3, rtol=1e-5)


def test_a_head_reads_earlier_layers_one_of_which_is_the_textures(neighbours_bundle: Path) -> None:
    model = PSCRegressor.load(neighbours_bundle, device="cpu", allow_factories=("tests.tiny:network",))
    scorer, layers = model.pipeline.scorer, model.backbone.layers
    images = torch.randint(0, 256, (5, 1, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        features, _ = scorer.backbone(scorer.standardise(images))
        embedding = scorer.embed(images)
        packed, explanation = model.pipeline.explain(images)
    read = dict(zip(layers, features, strict=True))
    names = scorer.head_layers
    expected = torch.cat([embedding.z, *(read[name].mean(2) for name in names)], dim=1)
    torch.testing.assert_close(embedding.head_input, expected)
    assert embedding.early is not None and layers[-1] in names
    torch.testing.assert_close(embedding.early, read[layers[-1]].mean(2))
    assert explanation["neighbour_image"].shape == (5, 1 + len(names), 3)
    torch.testing.assert_close(packed, model.predict(images).outputs.packed)


@pytest.mark.thorough
def test_real_digits_and_garments_get_the_same_decisions(shipped_bundle: Path) -> None:
    psc = PSC.load(shipped_bundle, device="cpu")
    assert available_backends(psc) == BACKENDS
    sources = (opened(name) for name in ("dirty-mnist", "fashion-mnist"))
    images = torch.cat([next(source.batches(40)).images for source in sources])
    expected = psc.predict(images)
    for backend in BACKENDS:
        got = replace(psc, pipeline=pipeline_on(psc, backend)).predict(images)
        check_agreement(psc, expected.outputs, got.outputs)
        assert got.decision == expected.decision
    assert len(set(expected.decision)) > 1


def test_only_a_traced_float32_network_on_a_cpu_has_several(psc: PSC, monkeypatch: pytest.MonkeyPatch) -> None:
    assert available_backends(psc) == BACKENDS
    monkeypatch.setattr(pipeline, "INSTALLED", False)
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


def test_a_log_density_near_zero_may_be_rounded_like_the_others(psc: PSC, digits: torch.Tensor) -> None:
    calibrated = psc.outputs(psc.pipeline(digits))
    calibrated["log_density"].copy_(torch.linspace(150.0, 350.0, len(digits)))
    calibrated["log_density"][7] = 0.4
    other = psc.outputs(calibrated.packed.clone())
    other["log_density"][7] += 0.002
    check_agreement(psc, calibrated, other)
    other["log_density"][7] += 0.1
    with pytest.raises(NetworkError, match="other log densities"):
        check_agreement(psc, calibrated, other)


def test_factories_need_permission(tiny_bundle: Path) -> None:
    with pytest.raises(BundleError, match=r"tests\.tiny:network"):
        PSC.load(tiny_bundle, device="cpu")


def test_a_texture_may_count_at_every_p_value(bundle: Path, tmp_path: Path) -> None:
    assign(bundle, "checks.texture.counts_below", 1.0)
    psc = PSC.load(bundle, device="cpu", allow_factories=ALLOW)
    assert psc.pipeline.checks is not None and psc.pipeline.checks.counts_below == {"texture": 1}
    assert psc.save(tmp_path / "again").version == psc.version


@pytest.mark.parametrize("error", [FileNotFoundError(2, "No usable temporary directory"), OSError(28, "No space left")])
def test_what_the_machine_lacks(bundle: Path, monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    monkeypatch.setattr(storage, "rebuild_backbone", Mock(side_effect=error))
    with pytest.raises(BundleError) as raised:
        PSC.load(bundle, device="cpu", allow_factories=ALLOW)
    said = str(raised.value)
    assert str(error.strerror) in said and "TMPDIR" in said and "fit the bundle again" not in said


def test_a_bundle_is_loaded_where_no_folder_may_be_written_to(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As PyTorch's import of its compiler sees it, which makes the folder of its cache if it has none."""
    monkeypatch.setattr(tempfile, "gettempdir", Mock(side_effect=FileNotFoundError(2, "No usable temporary directory")))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    assert PSC.load(bundle, device="cpu", allow_factories=ALLOW).classes
    assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).is_dir()


def test_an_explanation_leaves_the_outputs(psc: PSC, digits: torch.Tensor) -> None:
    with torch.inference_mode():
        packed, explanation = psc.pipeline.explain(digits[:5])
        assert torch.equal(packed, psc.pipeline(digits[:5]))
    assert explanation["class_distances"].shape == (5, 10)
