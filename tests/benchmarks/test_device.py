"""The device benchmark: its networks, lower bounds, ratios by rounds, and the report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.device import report, run
from benchmarks.device.subjects import SUBJECTS, Plain, Subject, enable_dropout, fused, unfused, with_dropout
from benchmarks.device.timing import operations, ratio, take_turns, traffic
from psc_core.images.preprocess import PRESETS
from psc_core.tasks.outputs import Outputs

CPU = torch.device("cpu")
NETWORK = "benchmarks.networks:wide_resnet10_1"
TINY = Subject("tiny", NETWORK, (), 10, 32, "layer3.0.shortcut", (4, 3, 5), ("layer1", "layer2"), (1,))


def images(count: int, channels: int = 3, side: int = 32) -> torch.Tensor:
    shape, generator = (count, channels, side, side), torch.Generator().manual_seed(0)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def test_variants_take_turns_and_ratios_are_taken_within_rounds() -> None:
    order: list[str] = []
    times = take_turns({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, seconds=0, rounds=(3, 3))
    assert order == ["a", "b", "b", "a", "a", "b", "b", "a"]  # a warm-up, then every other round backwards
    assert {name: len(taken) for name, taken in times.items()} == {"a": 3, "b": 3}
    assert ratio([2.0, 30.0, 4.0, 8.0, 6.0], [1.0, 10.0, 2.0, 4.0, 3.0]) == [2.0, 2.0, 2.0]


@torch.inference_mode()
def test_plain_gives_the_networks_softmax() -> None:
    net, x = TINY.network(), images(4)
    expected = net(PRESETS["cifar10"].standardise(x)).softmax(1)
    for precision, tolerance in (("fp32", 1e-5), ("bf16", 0.05)):
        for whole in (unfused(net, precision, CPU), fused(net, TINY.layer, precision, CPU)):
            got = Plain([whole], TINY.preprocess, precision)(x)
            torch.testing.assert_close(got, expected, atol=tolerance, rtol=0)


@torch.inference_mode()
def test_ensemble_and_dropout_run_every_member_and_pass() -> None:
    net, calls = TINY.network(), list[int]()
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
    net, x = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Flatten(), nn.Linear(5 * 30 * 30, 7)), torch.randn(2, 3, 32, 32)
    assert operations(net, x) == 2 * 2 * (5 * 30 * 30 * 27 + 5 * 30 * 30 * 7)
    a, b = torch.randn(4, 6), torch.randn(6, 8)
    assert traffic(lambda _: a @ b, x) == 4 * (24 + 48 + 32)


@pytest.mark.parametrize(
    ("name", "density", "precision"),
    [
        ("tiny", "gda", "fp32"),
        ("tiny", "tied", "fp32"),
        ("ResNet-18, 28", "gda", "fp32"),
        ("ResNet-18, 28", "gda", "bf16"),
    ],
)
@torch.inference_mode()
def test_parts_end_with_the_outputs(name: str, density: str, precision: str) -> None:
    subject = next(each for each in (TINY, *SUBJECTS) if each.name == name)
    pipeline = subject.pipeline(subject.network(), precision, CPU, density=density)
    assert pipeline.scorer.precision == precision
    pixels = images(3, subject.preprocess.channels, subject.size)
    named = run.parts(pipeline, pixels, CPU)
    outputs = Outputs(pipeline(pixels), pipeline.scorer.head.score_names, pipeline.gate_names)
    assert tuple(named) == report.PARTS and bool(pipeline.gate_names) == subject.shipped
    torch.testing.assert_close(named["pack"](), outputs.packed)
    assert bool(outputs.packed.isfinite().all())
    torch.testing.assert_close(outputs.probabilities.sum(1), torch.ones(3))
    assert operations(pipeline, pixels) == 3 * operations(pipeline, pixels[:1])
    named["density"]()


def test_subjects_are_cut_in_the_last_stage() -> None:
    with torch.device("meta"):
        for subject in SUBJECTS:
            names = [name for name, _ in subject.network().named_modules()]
            assert {subject.layer, *subject.stages} <= set(names)
            assert names.index(subject.layer) >= names.index(subject.stages[-1])


def test_a_quick_run_measures_every_cell_and_adds_to_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "SUBJECTS", (TINY,))
    monkeypatch.setattr(report, "SUBJECTS", (TINY,))
    monkeypatch.setattr(
        run, "limits_of", lambda _: {"operations_per_s": {"fp32": 1e11, "bf16": 1e11}, "bytes_per_s": 1e10}
    )
    file = tmp_path / "device-cpu.json"
    file.write_text('{"subjects": {}, "large_tail": [{"density": "gda", "components": 259, "batch": 64, "ms": 70.0}]}')
    words = ["--device", "cpu", "--quick", "--missing", "--out", str(tmp_path)]
    run.main(words)
    record = json.loads(file.read_text())
    cells, (alternatives,) = (record["subjects"]["tiny"][part] for part in ("cells", "alternatives"))
    assert set(alternatives["over_psc"]) == {"ensemble", "ensemble_fused", "mc_dropout_fused"}
    assert [(cell["precision"], cell["bucket"]) for cell in cells] == [("fp32", 1), ("bf16", 1)]
    for cell in cells:
        assert set(cell["ms"]) == {"psc", "plain", "plain_fused"}
        assert set(cell["parts_ms"]) == set(report.PARTS)
        assert 0 < cell["tail_fraction"] < 1
        assert 0.5 < cell["operations_over_plain"] < 1  # the network is cut before its end
    run.main(words)
    assert json.loads(file.read_text())["subjects"] == record["subjects"]
    cells[0]["ms"] = {"psc": 2.0, "plain": 3.0, "plain_fused": 1.0}
    assert report.best_batches(cells)["fp32"] == (1.5, 0.5)
    text = report.fragment(record)
    assert "| tiny | fp32 | 1.50× | 0.50× |" in text and "| gda | 259 | 70.00 |" in text
