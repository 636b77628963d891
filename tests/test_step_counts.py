"""A guard on the device step by counts that no machine changes: operations, memory, copies, waits.

A budget is what the step takes today.  If a change needs more, say in the change what it buys and raise it; if it
takes less, lower it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from app.inference.steps import EagerStep
from benchmarks.device.subjects import random_density, random_head
from psc_core import PSC
from psc_core.model.pipeline import Pipeline
from tests.counting import SYNCHRONISING, Counts

IMAGE = 28 * 28
BATCH = 8

BUDGET = (110, 25, 92, 2_897_068)
"""Of the shipped bundle: operations, products among them, fresh tensors, their bytes an image."""

TAIL = {"projection": (4, 2), "density": (12, 2), "texture": (9, 2), "head": (19, 3)}
"""Operations, and products among them."""


@pytest.fixture
def pipeline(shipped_bundle: Path) -> Pipeline:
    return PSC.load(shipped_bundle, device="cpu").pipeline


def images(count: int) -> Tensor:
    return torch.randint(0, 256, (count, 1, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def counts_of(run: object, *args: object) -> Counts:
    with torch.no_grad(), Counts() as counts:
        run(*args)  # type: ignore[operator]
    return counts


def within(got: int, budget: int, what: str) -> None:
    assert got <= budget, f"a step takes {got} {what}, its budget is {budget}: see the module on raising it"


def test_step_within_budget(pipeline: Pipeline) -> None:
    operations, products, fresh, bytes_ = BUDGET
    for count in (1, BATCH):
        counts = counts_of(pipeline, images(count))
        within(counts.kernels.total(), operations, f"operations {dict(counts.kernels)}")
        within(counts.products, products, "matrix products and convolutions")
        within(counts.fresh, fresh, "fresh tensors")
        # In proportion to the batch: nothing as large as the weights is made again in every step.
        within(counts.fresh_bytes, bytes_ * count, "bytes of fresh tensors")


def test_step_does_not_synchronise_or_copy(pipeline: Pipeline) -> None:
    counts = counts_of(pipeline, images(BATCH))
    assert not set(counts.kernels) & set(SYNCHRONISING)
    assert counts.copied_bytes == 0


def test_counts_synchronisation_and_copies() -> None:
    def careless(x: Tensor) -> Tensor:
        return x * float(x.sum()) if bool((x > 0).any()) else x.to("meta")

    counts = counts_of(careless, torch.ones(3))
    assert counts.kernels["_local_scalar_dense"] == 2
    assert counts_of(careless, torch.zeros(3)).copied_bytes == 12


def test_step_on_fake_cuda(pipeline: Pipeline) -> None:
    """With tensors that have a device and a shape but no values: reading one would be an error."""
    on_cuda = copy.deepcopy(pipeline)
    mode = FakeTensorMode()
    for module in on_cuda.modules():
        for store in (module._parameters, module._buffers):
            for name, tensor in store.items():
                if tensor is not None:
                    with mode:
                        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")
                    store[name] = nn.Parameter(fake, requires_grad=False) if isinstance(tensor, nn.Parameter) else fake
    with mode, torch.inference_mode():
        packed = on_cuda(torch.empty(BATCH, 1, 28, 28, dtype=torch.uint8, device="cuda"))
    assert (packed.device.type, tuple(packed.shape), packed.dtype) == ("cuda", (BATCH, 17), torch.float32)


def test_tail_within_budget(pipeline: Pipeline) -> None:
    with torch.no_grad():
        (candidate, *_), _ = pipeline.scorer.backbone(torch.randn(BATCH, 1, 28, 28))
        read = pipeline.scorer.embed(images(BATCH))
    inputs = {"projection": [candidate], "density": read.density_input, "texture": read.early, "head": read.head_input}
    for name, argument in inputs.items():
        counts = counts_of(getattr(pipeline.scorer, name), argument)
        within(counts.kernels.total(), TAIL[name][0], f"operations in the {name}: {dict(counts.kernels)}")
        within(counts.products, TAIL[name][1], f"products in the {name}")


@pytest.mark.parametrize("kind", ["gda", "tied"])
def test_no_operation_per_class(kind: str) -> None:
    z = torch.randn(4, 12)
    for few, many in (
        (random_density(12, 6, 3, kind=kind), random_density(12, 6, 300, kind=kind)),
        (random_head(12, 3), random_head(12, 300)),
    ):
        assert counts_of(few, z).kernels == counts_of(many, z).kernels


def test_service_step_adds_no_copy(pipeline: Pipeline) -> None:
    step = EagerStep(pipeline, (1, 28, 28), max_batch=BATCH, device=torch.device("cpu"))
    step.input(0)[:] = images(BATCH).numpy()
    step.warm_up()
    with Counts() as bare, torch.inference_mode():
        pipeline(images(BATCH))
    with Counts() as counts:
        step.launch(0, BATCH)
        packed = step.fetch(0, BATCH)
    assert counts.kernels - bare.kernels == {}
    assert counts.copied_bytes == 0
    assert packed.shape == (BATCH, 17)


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    yield
