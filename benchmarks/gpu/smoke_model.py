"""Checks of the model on a device: the step in its forms, a fit, the profiler."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from app.inference.steps import EagerStep, GraphStep, Step, make_step
from app.runtime import allow_compiled_shapes
from benchmarks.device.run import large_tail
from benchmarks.gpu import bundles
from benchmarks.gpu.checks import needs_cuda
from benchmarks.networks import wide_resnet10_1
from benchmarks.runs import BUNDLE
from benchmarks.serving.gpu import GpuUse
from psc_core.cli.fit import main as psc_fit
from psc_core.compute.device import resolve_device
from psc_core.data.spec import open_dataset
from psc_core.images.preprocess import PRESETS
from psc_core.model.outputs import Outputs
from psc_core.model.pipeline import Pipeline
from psc_core.model.predictor import PSC

DATA = BUNDLE.parents[1] / "tests" / "data"
BATCH = 64
SIZES = (1, 3, BATCH)


def digits(count: int = BATCH) -> Tensor:
    """Real digits, ``uint8``."""
    data = open_dataset(f"dirty-mnist:{DATA}", split="test", preprocess=PRESETS["mnist"])
    return next(iter(data.batches(count))).images


def answers(device: torch.device) -> str:
    """A product on the device equals the CPU's."""
    a = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    there = a.to(resolve_device(device))
    torch.testing.assert_close((there @ there).cpu(), a @ a, rtol=1e-4, atol=1e-3)
    if device.type != "cuda":
        return "a CPU"
    free, total = torch.cuda.mem_get_info(device)
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)}, sm_{major}{minor}, {free >> 20} of {total >> 20} MiB free"


def equals_cpu(device: torch.device) -> str:
    """The shipped bundle gives what it gives on the CPU."""
    images = digits(512)
    got, expected = (PSC.load(BUNDLE, device=where).predict(images) for where in (device, "cpu"))
    torch.testing.assert_close(got.probabilities, expected.probabilities, atol=1e-4, rtol=0)
    torch.testing.assert_close(got.log_density, expected.log_density, atol=0.05, rtol=1e-4)
    return f"largest difference of a probability {float((got.probabilities - expected.probabilities).abs().max()):.1e}"


def graph(device: torch.device) -> str:
    """The captured step equals the eager pipeline, at every kind of batch size."""
    needs_cuda(device)
    psc = PSC.load(BUNDLE, device=device)
    step = warm(psc.pipeline, psc, BATCH)
    assert isinstance(step, GraphStep)
    return same_as_eager(step, psc.pipeline, digits(), 1e-2)


def replay(device: torch.device) -> str:
    """A replay neither waits for the host nor allocates, and both slots work."""
    needs_cuda(device)
    psc = PSC.load(BUNDLE, device=device)
    step, images = warm(psc.pipeline, psc, BATCH), digits().numpy()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    try:
        torch.cuda.set_sync_debug_mode("error")
        for slot, count in ((0, BATCH), (1, 5)):
            step.input(slot)[:count] = images[:count]
            step.launch(slot, count)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    first, second = (step.fetch(slot, count) for slot, count in ((0, BATCH), (1, 5)))
    np.testing.assert_allclose(first[:5], second, atol=0.05, rtol=1e-4)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before, "a replay allocated"
    return "no wait, no allocation"


def hooks(device: torch.device) -> str:
    """A network cut by hooks runs eagerly, also on a GPU."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = bundles.write(bundles.hooked(), Path(scratch) / "hooked")
        psc = PSC.load(folder, device=device, allow_factories=bundles.FACTORIES)
    assert not psc.pipeline.is_traced
    step = warm(psc.pipeline, psc, 8)
    assert isinstance(step, EagerStep)
    return same_as_eager(step, psc.pipeline, digits(8), 1e-3)


def bf16(device: torch.device) -> str:
    """The shipped bundle in bfloat16: finite, and near float32."""
    psc = PSC.load(BUNDLE, device=device)
    half = in_bf16(psc)
    step, images = warm(half, psc, 8), digits(8)
    same_as_eager(step, half, images, 1.0)
    with torch.inference_mode():
        exact, got = (Outputs(each(images.to(device)).float().cpu(), psc.gates) for each in (psc.pipeline, half))
    apart = float((exact.probabilities - got.probabilities).abs().max())
    assert apart < 0.2, f"probabilities differ by {apart:.2f} from float32"
    return f"largest difference of a probability from float32 {apart:.1e}"


def explain(device: torch.device) -> str:
    """Explanations through the step equal the CPU's."""
    images = digits(4)
    results = []
    for where in (device, torch.device("cpu")):
        psc = PSC.load(BUNDLE, device=where)
        results.append(warm(psc.pipeline, psc, 4).explain(images.numpy()))
    got, expected = results
    assert set(got.explanation) == set(expected.explanation) != set()
    for name, array in expected.explanation.items():
        np.testing.assert_allclose(got.explanation[name], array, rtol=1e-2, atol=0.05, err_msg=name)
    return ", ".join(got.explanation)


def large(device: torch.device) -> str:
    """ResNet-50 at 224 pixels, 1,000 classes, through the service's step."""
    psc = bundles.untrained("ResNet-50, 224")
    with tempfile.TemporaryDirectory() as scratch:
        there = PSC.load(bundles.write(psc, Path(scratch) / "large"), device=device)
    step = warm(there.pipeline, there, 4)
    images = torch.randint(0, 256, (4, *there.preprocess.shape), dtype=torch.uint8)
    return same_as_eager(step, there.pipeline, images, 0.05, sizes=(1, 3, 4))


def many_classes(device: torch.device) -> str:
    """Projection, density and head alone, 1,000 classes, 2,048 features, batch 64."""
    return "; ".join(f"{row['density']} {row['ms']:.2f} ms" for row in large_tail(device))


def fit(device: torch.device, precision: str = "fp32") -> str:
    """``psc-fit`` of a small untrained network on digits: every stage runs, and the bundle serves."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        save_file(wide_resnet10_1(10, 1).state_dict(), folder / "net.safetensors")
        data, spec = f"mnist:{DATA}", "benchmarks.networks:wide_resnet10_1"
        words = f"--model {spec} --model-arg in_channels=1 --preset mnist --device {device} --precision {precision}"
        words += f" --train {data} --val {data} --layer layer3.0.shortcut --max-images 600 --no-report"
        paths = ["--weights", str(folder / "net.safetensors"), "--out", str(folder / "bundle")]
        code = psc_fit([*words.split(), *paths])
        assert code == 0, f"psc-fit ended with {code}"
        psc = PSC.load(folder / "bundle", device=device, allow_factories=(spec,))
        found = psc.predict(digits())
    assert bool(found.probabilities.isfinite().all())
    return f"layer {psc.layer}, {float(found.is_ood.double().mean()):.0%} called out of distribution"


def fit_bf16(device: torch.device) -> str:
    """:func:`fit` in bfloat16."""
    return fit(device, "bf16")


def profiler(device: torch.device) -> str:
    """PyTorch's profiler sees kernels of the device."""
    psc, images = PSC.load(BUNDLE, device=device), digits().to(device)
    with torch.inference_mode(), torch.profiler.profile() as profile:
        psc.pipeline(images)
    found = profile.key_averages()
    if device.type == "cuda":
        assert any(event.device_time_total > 0 for event in found), "no kernel has a time"
    return f"{len(found)} operations"


def busy(device: torch.device) -> str:
    """``nvidia-smi`` tells how busy the GPU is."""
    needs_cuda(device)
    a = torch.randn(4096, 4096, device=device)
    with GpuUse() as use:
        until = time.perf_counter() + 2
        while time.perf_counter() < until:
            a @ a
            torch.cuda.synchronize()
    assert use.found, "nvidia-smi gave no sample"
    return str(use.found)


def compiled(device: torch.device) -> str:
    """``--compile``: the same outputs."""
    allow_compiled_shapes()
    psc = PSC.load(BUNDLE, device=device)
    step = make_step(psc.pipeline, psc.preprocess.shape, max_batch=2, device=psc.device, compiled=True)
    step.warm_up()
    return same_as_eager(step, psc.pipeline, digits(2), 0.05, sizes=(1, 2))


def warm(network: Pipeline, psc: PSC, max_batch: int) -> Step:
    """The service's step, warmed up."""
    step = make_step(network, psc.preprocess.shape, max_batch=max_batch, device=psc.device)
    step.warm_up()
    return step


def same_as_eager(step: Step, network: Pipeline, images: Tensor, atol: float, *, sizes: Any = SIZES) -> str:
    """The step's outputs equal the pipeline's, except p-values that rounding moves."""
    worst = 0.0
    for count in (size for size in sizes if size <= len(images)):
        step.input(0)[:count] = images[:count].numpy()
        step.launch(0, count)
        got = step.fetch(0, count)
        with torch.inference_mode():
            expected = network(images[:count].to(network.scorer.scale.device)).float().cpu().numpy()
        classes = slice(expected.shape[1] - 10, None)
        worst = max(worst, float(np.abs(got - expected)[:, classes].max()))
        np.testing.assert_allclose(got, expected, rtol=1e-3, atol=atol)
    return f"{type(step).__name__}, largest difference of the last ten columns {worst:.1e}"


def in_bf16(psc: PSC) -> Pipeline:
    """The model's pipeline with a network in bfloat16."""
    return psc.pipeline.with_backbone(psc.backbone.fused("bf16"), "bf16")
