"""The device benchmark: its networks, lower bounds, ratios by rounds, and the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.device import backends, floor, report, run
from benchmarks.device.subjects import SUBJECTS, Plain, Subject, enable_dropout, fused, unfused, with_dropout
from benchmarks.device.timing import ratio, take_turns
from benchmarks.runs import environment
from psc_core.images.preprocess import PRESETS
from psc_core.model.outputs import Outputs
from psc_core.model.predictor import PSC

CPU = torch.device("cpu")
TINY = Subject(
    "tiny",
    "benchmarks.networks:wide_resnet10_1",
    (),
    10,
    32,
    "layer3.0.shortcut",
    (4, 3, 5),
    ("layer1", "layer2"),
    (1,),
)


def images(count: int) -> torch.Tensor:
    return torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_variants_take_turns() -> None:
    order: list[str] = []
    times = take_turns({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, seconds=0, rounds=(3, 3))
    assert order == ["a", "b", "b", "a", "a", "b", "b", "a"]  # a warm-up, then every other round backwards
    assert {name: len(taken) for name, taken in times.items()} == {"a": 3, "b": 3}


def test_ratio_is_taken_within_rounds() -> None:
    assert ratio([2.0, 30.0, 4.0, 8.0, 6.0], [1.0, 10.0, 2.0, 4.0, 3.0]) == (2.0, 2.0, 2.0)
    assert ratio([3.0], [2.0]) == (1.5, 1.5, 1.5)


@torch.inference_mode()
def test_plain_gives_the_networks_softmax() -> None:
    net = TINY.network()
    x = images(4)
    expected = net(PRESETS["cifar10"].standardise(x)).softmax(1)
    for whole in (unfused(net, "fp32", CPU), fused(net, TINY.layer, "fp32", CPU)):
        torch.testing.assert_close(Plain([whole], TINY.preprocess, "fp32")(x), expected, atol=1e-5, rtol=0)
    for whole in (unfused(net, "bf16", CPU), fused(net, TINY.layer, "bf16", CPU)):
        torch.testing.assert_close(Plain([whole], TINY.preprocess, "bf16")(x), expected, atol=0.05, rtol=0)


@torch.inference_mode()
def test_ensemble_and_dropout_run_every_member_and_pass() -> None:
    net = TINY.network()
    calls: list[int] = []
    for member in (ensemble := [unfused(net, "fp32", CPU) for _ in range(3)]):
        member.register_forward_hook(lambda *_: calls.append(1))
    outputs = Plain(ensemble, TINY.preprocess, "fp32")(images(2))
    assert (len(calls), tuple(outputs.shape)) == (3, (2, 11))
    torch.testing.assert_close(outputs[:, 0], torch.special.entr(outputs[:, 1:]).sum(1))
    dropped = enable_dropout(fused(with_dropout(net, TINY.stages), "layer2", "fp32", CPU))
    answers = [Plain([dropped], TINY.preprocess, "fp32")(images(2)) for _ in range(2)]
    assert not torch.equal(*answers)  # each pass drops other activations
    assert Plain([dropped], TINY.preprocess, "fp32", passes=4)(images(2)).shape == (2, 11)


def test_counts_operations_and_bytes() -> None:
    net = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Flatten(), nn.Linear(5 * 30 * 30, 7))
    x = torch.randn(2, 3, 32, 32)
    assert floor.operations(net, x) == 2 * 2 * (5 * 30 * 30 * 27 + 5 * 30 * 30 * 7)
    a, b = torch.randn(4, 6), torch.randn(6, 8)
    assert floor.traffic(lambda _: a @ b, x) == 4 * (24 + 48 + 32)


@pytest.mark.parametrize("density", ["gda", "tied"])
@torch.inference_mode()
def test_random_parts_make_a_valid_psc(density: str) -> None:
    pipeline = TINY.pipeline(TINY.network(), "fp32", CPU, density=density)
    outputs = Outputs(pipeline(images(3)), ())
    assert bool(outputs.packed.isfinite().all())
    torch.testing.assert_close(outputs.probabilities.sum(1), torch.ones(3))
    assert floor.operations(pipeline, images(2)) == 2 * floor.operations(pipeline, images(1))
    named = run.parts(pipeline, images(2), CPU)
    assert tuple(named) == report.PARTS
    torch.testing.assert_close(named["pack"](), pipeline(images(2)))


@torch.inference_mode()
def test_the_shipped_bundle_is_measured_with_its_gates() -> None:
    shipped = next(subject for subject in SUBJECTS if subject.shipped)
    pipeline = shipped.pipeline(shipped.network(), "bf16", CPU)
    assert pipeline.scorer.precision == "bf16" and pipeline.gate_names
    pixels = torch.randint(0, 256, (2, 1, 28, 28), dtype=torch.uint8)
    named = run.parts(pipeline, pixels, CPU)
    torch.testing.assert_close(named["pack"](), pipeline(pixels))
    named["density"]()


def test_subjects_are_cut_in_the_last_stage() -> None:
    """Every layer exists and lies in or behind the last stage."""
    with torch.device("meta"):
        for subject in SUBJECTS:
            net = subject.network()
            names = [name for name, _ in net.named_modules()]
            assert {subject.layer, *subject.stages} <= set(names)
            assert names.index(subject.layer) > names.index(subject.stages[-1]) - 1


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of the tiny network."""
    limits = {"operations_per_s": {"fp32": 1e11, "bf16": 1e11}, "bytes_per_s": 1e10}
    measurement = run.Measurement(TINY, CPU, limits, full=False)
    measurement.seconds = 0.0
    subject = {
        "layer": TINY.layer,
        "limits": limits,
        "cells": measurement.cells(),
        "alternatives": measurement.alternatives(),
    }
    tail = [{"density": "gda", "components": 259, "batch": 64, "ms": 70.0}]
    return {"command": "run", "environment": environment(CPU), "subjects": {"tiny": subject}, "large_tail": tail}


def test_run_measures_every_cell(measured: dict[str, Any]) -> None:
    cells = measured["subjects"]["tiny"]["cells"]
    assert [(cell["precision"], cell["bucket"]) for cell in cells] == [("fp32", 1), ("bf16", 1)]
    for cell in cells:
        assert set(cell["ms"]) == {"psc", "plain", "plain_fused"}
        assert set(cell["parts_ms"]) == set(report.PARTS)
        assert 0 < cell["tail_fraction"] < 1
        assert 0.5 < cell["operations_over_plain"] < 1  # the network is cut before its end
    (alternatives,) = measured["subjects"]["tiny"]["alternatives"]
    assert set(alternatives["over_psc"]) == {"ensemble", "ensemble_fused", "mc_dropout_fused"}


@pytest.fixture
def psc(tiny_bundle: Path) -> PSC:
    """A small fitted model."""
    return PSC.load(tiny_bundle, device="cpu", allow_factories=["tests.tiny:network"])


def test_backends_are_compared_and_failures_recorded(psc: PSC) -> None:
    def fail() -> None:
        raise RuntimeError("no\ncompiler")

    networks = {backends.WHOLE: lambda: psc.pipeline, "folded": lambda: psc.pipeline, backends.AOT_INDUCTOR: fail}
    rows = backends.compare(psc, networks, 0.0)
    assert list(rows) == list(networks)
    for name in (backends.WHOLE, "folded"):
        assert list(rows[name]["ms"]) == list(rows[name]["over_whole"]) == [str(size) for size in backends.SIZES]
    text = "\n".join(report._backends({"AVX2": {"chosen": "folded", "variants": rows}}))
    assert "| AVX2 | **folded** |" in text
    assert "| failed: RuntimeError: no compiler |" in text


def test_every_backend_is_compared(psc: PSC) -> None:
    assert {"plain", "folded", backends.INDUCTOR, backends.AOT_INDUCTOR} < backends.variants(TINY, psc).keys()


@pytest.mark.slow
@torch.inference_mode()
def test_compiling_ahead_of_time_keeps_the_features(psc: PSC) -> None:
    compiled = backends.AotInductor(psc)
    for count in (1, 5):
        x = torch.randn(count, *psc.preprocess.shape)
        torch.testing.assert_close(compiled(x), psc.pipeline.scorer.backbone(x), atol=1e-4, rtol=1e-4)


def test_report_shows_met_targets(measured: dict[str, Any], tmp_path: Path) -> None:
    cell = measured["subjects"]["tiny"]["cells"][0]
    cell["ms"] = {"psc": 2.0, "plain": 3.0, "plain_fused": 1.0}
    measured["subjects"]["tiny"]["cells"][1]["ms"] = {"psc": 1.0, "plain": 2.0, "plain_fused": 1.5}
    assert report.best_batches(measured["subjects"]["tiny"]["cells"]) == [("fp32", 1.5, 0.5), ("bf16", 2.0, 1.5)]
    (tmp_path / "device-cpu.json").write_text(json.dumps(measured))
    old = "<!-- begin device -->\nold\n<!-- end device -->"
    (tmp_path / "device.md").write_text(f"# Results\n\n{old}\n\n## Other\n\nkept\n")
    report.write_report(tmp_path)
    text = (tmp_path / "device.md").read_text()
    assert "fp32 1.50×, fused 0.50×; bf16 2.00×, fused 1.50× | in part |" in text
    assert "| 70.00 ms | no GPU |" in text
    assert "old" not in text and "## Other\n\nkept" in text
    assert "Not measured on a GPU" in text
