"""Probabilities of PSC's head beside temperature scaling and softmax."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import runs
from benchmarks.probabilities import Examples, divide, ece_when_calibrated, qualities


@pytest.fixture
def run(tmp_path: Path) -> runs.Run:
    words = ["--scale", "smoke", "--data", "nowhere", "--out", str(tmp_path), "--device", "cpu"]
    return runs.start("test", runs.parser("").parse_args(words))


def examples(count: int, seed: int) -> Examples:
    """Three classes, and a network whose logits are too large by a factor of three."""
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, 3, generator=random, dtype=torch.float64)
    labels = torch.multinomial(logits.softmax(1), 1, generator=random)[:, 0]
    return Examples(logits.float(), labels, 3 * logits, torch.arange(count))


def test_head_and_temperature_mend_an_overconfident_network(run: runs.Run) -> None:
    train, val, test = (examples(count, seed) for seed, count in enumerate((3000, 2000, 4000)))
    found = qualities(run, train, val, test)
    picked = -test.logits.log_softmax(1).gather(1, test.labels[:, None])
    assert found["dnn"]["nll"] == pytest.approx(picked.mean().item(), rel=1e-9)
    for name in ("psc", "temperature"):
        assert found[name]["ece"] < found["dnn"]["ece"] / 4
        assert found[name]["nll"] < found["dnn"]["nll"]
    assert 0 < found["calibrated"]["ece"] < found["dnn"]["ece"]


def test_divisions_keep_sizes_and_examples(run: runs.Run) -> None:
    val, test = examples(20, 0), examples(50, 1)
    first, second = (divide(run, val, test, number) for number in (0, 1))
    for parts in (first, second):
        assert [len(part.labels) for part in parts] == [20, 50]
        rows = torch.cat([part.head_input for part in parts])
        assert torch.equal(rows.sort(0).values, torch.cat([val.head_input, test.head_input]).sort(0).values)
    assert not torch.equal(first[0].head_input, second[0].head_input)


def test_calibrated_ece_is_of_labels_drawn_from_the_probabilities() -> None:
    certain = torch.eye(3).double().repeat(10, 1)
    assert ece_when_calibrated(certain, seed=0) == 0.0
    assert 0.01 < ece_when_calibrated(examples(500, 0).logits.softmax(1), seed=0) < 0.2
