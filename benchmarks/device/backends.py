"""The device step of the shipped bundle on each backend of the service, and compiled, under one instruction set.

All variants have the same projection, density and head; they differ in how the truncated network runs.  Beside them is
the whole network without PSC.  Start-up is everything from the loaded bundle to the last first batch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from app.inference.backend import choose_backend
from app.inference.steps import Step, make_step
from benchmarks.device.subjects import Plain, Subject, unfused
from benchmarks.device.timing import milliseconds, ratio, take_turns
from benchmarks.runs import BUNDLE, Json
from psc_core.compute.allocator import keep_freed_memory
from psc_core.images.preprocess import Inputs
from psc_core.model.backends import available_backends, pipeline_on
from psc_core.model.predictor import PSC
from psc_core.network.backbone import FeaturesAndLogits

SIZES = (1, 8, 32, 64)
WHOLE = "whole network"
INDUCTOR, AOT_INDUCTOR = "torch.compile", "AOTInductor"


class AotInductor(nn.Module):
    """A folded backbone compiled ahead of time, for any number of images up to the largest of :data:`SIZES`."""

    def __init__(self, psc: PSC) -> None:
        super().__init__()
        images = psc.preprocess.standardise(psc.preprocess.noise()).repeat(2, 1, 1, 1)
        shapes = ({0: torch.export.Dim("batch", max=SIZES[-1])},)
        features = _Features(psc.pipeline.scorer.backbone)
        program = torch.export.export(features, (images,), dynamic_shapes=shapes)
        with TemporaryDirectory(prefix="psc-aot-") as folder:
            package = torch._inductor.aoti_compile_and_package(program, package_path=f"{folder}/model.pt2")
            self._run = torch._inductor.aoti_load_package(package)

    def forward(self, x: Inputs) -> FeaturesAndLogits:
        """Features of each layer, and no logits."""
        return list(self._run(x)), None


class _Features(nn.Module):
    """The features of a backbone as a tuple."""

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.backbone(images)[0])


def measure(subject: Subject, seconds: float) -> Json:
    """Times of the shipped bundle, and what the service would choose; for a process of its own.

    Args:
        subject: The network of the bundle.
        seconds: Of each batch size; every variant runs three times at least.
    """
    keep_freed_memory()
    psc = PSC.load(BUNDLE, device="cpu")
    chosen, _ = choose_backend(psc, "auto", max_batch=SIZES[-1], threads=torch.get_num_threads())
    with TemporaryDirectory(prefix="psc-inductor-") as cache:  # Start-up includes compiling.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        rows = compare(psc, variants(subject, psc), seconds)
    return {
        "chosen": chosen,
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "variants": rows,
    }


def variants(subject: Subject, psc: PSC) -> dict[str, Callable[[], Any]]:
    """What builds each network from images to outputs."""
    return {
        WHOLE: lambda: Plain([unfused(subject.network(), "fp32", psc.device)], psc.preprocess, "fp32"),
        **{name: partial(pipeline_on, psc, name) for name in available_backends(psc)},
        INDUCTOR: lambda: psc.pipeline,
        AOT_INDUCTOR: lambda: psc.pipeline.with_backbone(AotInductor(psc)),  # type: ignore[arg-type]
    }


def compare(psc: PSC, networks: Mapping[str, Callable[[], Any]], seconds: float) -> Json:
    """Start-up seconds and milliseconds of a step by variant and batch size, or why a variant failed."""
    rows: Json = {}
    steps: dict[str, Step] = {}
    for name, build in networks.items():
        began = time.perf_counter()
        try:
            steps[name] = _warm_step(build(), psc, compiled=name == INDUCTOR)
        except Exception as error:  # A compiler's: the reason is the result.
            rows[name] = {"failed": f"{type(error).__name__}: {str(error).strip()[:300]}"}
        else:
            rows[name] = {"start_s": round(time.perf_counter() - began, 2), "ms": {}, "over_whole": {}}
        print(f"  {name}: {rows[name]}", flush=True)
    for size in SIZES:
        calls = {name: partial(_run, step, size) for name, step in steps.items()}
        times = take_turns(calls, seconds=seconds, rounds=(3, 200))
        for name, taken in times.items():
            rows[name]["ms"][str(size)] = milliseconds(taken)
            rows[name]["over_whole"][str(size)] = ratio(taken, times[WHOLE]).rounded()
    return rows


def _warm_step(network: Any, psc: PSC, *, compiled: bool) -> Step:
    """A step that has run every batch size once."""
    step = make_step(network, psc.preprocess.shape, max_batch=SIZES[-1], device=psc.device, compiled=compiled)
    step.input(0)[:] = np.random.default_rng(0).integers(0, 256, step.input(0).shape, np.uint8)
    for size in SIZES:
        _run(step, size)
    return step


def _run(step: Step, size: int) -> None:
    step.launch(0, size)
    step.fetch(0, size)
