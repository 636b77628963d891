"""What only a GPU shows: the same numbers as the CPU, captured graphs, a fit on the device.  ``make gpu``."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from psc_core import PSC
from psc_core.cli.fit import main
from tests.opened import opened

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ALLOW = ("tests.tiny:network",)


@pytest.fixture(scope="module")
def digits() -> torch.Tensor:
    test = opened("dirty-mnist")
    return next(iter(test.batches(512))).images


@pytest.mark.parametrize("name", ["tiny", "shipped"])
def test_gpu_equals_cpu(name: str, tiny_bundle: Path, shipped_bundle: Path, digits: torch.Tensor) -> None:
    path = tiny_bundle if name == "tiny" else shipped_bundle
    cpu = PSC.load(path, device="cpu", allow_factories=ALLOW).predict(digits)
    gpu = PSC.load(path, device="cuda", allow_factories=ALLOW).predict(digits)
    torch.testing.assert_close(gpu.probabilities, cpu.probabilities, atol=1e-4, rtol=0)
    torch.testing.assert_close(gpu.log_density, cpu.log_density, atol=0.05, rtol=1e-4)
    assert float((gpu.is_ood != cpu.is_ood).double().mean()) < 0.005


@pytest.mark.parametrize("size", [1, 3, 8, 33, 64])
def test_graph_equals_eager(shipped_bundle: Path, digits: torch.Tensor, size: int) -> None:
    from app.inference.steps import make_step

    psc = PSC.load(shipped_bundle, device="cuda")
    shape = psc.preprocess.shape
    step = make_step(psc.pipeline, shape, max_batch=64, device=psc.device, compiled=False)
    step.warm_up()
    step.input(0)[:size] = digits[:size].numpy()
    step.launch(0, size)
    packed = step.fetch(0, size)
    with torch.inference_mode():
        expected = psc.outputs(psc.pipeline(digits[:size].cuda()).cpu())
    got = psc.outputs(torch.from_numpy(np.array(packed)))
    torch.testing.assert_close(got.probabilities, expected.probabilities, atol=1e-5, rtol=0)
    torch.testing.assert_close(got["log_density"], expected["log_density"], atol=1e-2, rtol=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_fused_equals_original(shipped_bundle: Path, digits: torch.Tensor, precision: str) -> None:
    backbone = PSC.load(shipped_bundle, device="cuda").backbone
    images = digits[:33].cuda().float() / 255
    with torch.inference_mode():
        exact = backbone(images)[0][0]
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
            got = backbone.fused(precision)(images)[0][0]
    assert got.dtype == (torch.bfloat16 if precision == "bf16" else torch.float32)
    tolerance = 0.03 if precision == "bf16" else 1e-5
    torch.testing.assert_close(got.float(), exact, rtol=0, atol=tolerance * float(exact.abs().max()))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_replay_does_not_synchronise(shipped_bundle: Path, digits: torch.Tensor) -> None:
    from app.inference.steps import make_step

    psc = PSC.load(shipped_bundle, device="cuda")
    step = make_step(psc.pipeline, (1, 28, 28), max_batch=64, device=psc.device, compiled=False)
    step.warm_up()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    try:
        torch.cuda.set_sync_debug_mode("error")
        for slot, count in ((0, 64), (1, 5)):
            step.input(slot)[:count] = digits[:count].numpy()
            step.launch(slot, count)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    packed = [step.fetch(slot, count) for slot, count in ((0, 64), (1, 5))]
    np.testing.assert_allclose(packed[0][:5], packed[1], atol=0.05, rtol=1e-4)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_gpu_fit_chooses_like_the_cpu(tiny_job, tiny_bundle: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    args = [arg if arg != "cpu" else "cuda" for arg in tiny_job.args]
    assert main([*args, "--out", str(tmp_path / "b")]) == 0
    gpu, cpu = (json.loads((path / "manifest.json").read_text()) for path in (tmp_path / "b", tiny_bundle))
    assert gpu["layers"] == cpu["layers"]
    for on_gpu, on_cpu in zip(gpu["collapse"]["layers"], cpu["collapse"]["layers"], strict=True):
        assert on_gpu["nc1"] == pytest.approx(on_cpu["nc1"], rel=1e-4)


def test_bf16_fit(tiny_job, tmp_path: Path, digits: torch.Tensor) -> None:  # type: ignore[no-untyped-def]
    args = [arg if arg != "cpu" else "cuda" for arg in tiny_job.args]
    assert main([*args, "--precision", "bf16", "--out", str(tmp_path / "b")]) == 0
    half = PSC.load(tmp_path / "b", device="cuda", allow_factories=ALLOW).predict(digits)
    assert bool(half.probabilities.isfinite().all())
    assert float(half.is_ood.double().mean()) < 0.5
