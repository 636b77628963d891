from __future__ import annotations

import io
import itertools
import re
import sys

import numpy as np
import pytest
import torch

from psc_core.compute import Compute, passes, track
from psc_core.data.dataset import ArraySource, labelled
from psc_core.images.preprocess import Preprocess

PREPROCESS = Preprocess("L", 2, 2, None, (0.5,), (0.25,))
CPU = Compute(torch.device("cpu"), batch_images=4)


def test_passes_standardised_images_in_order() -> None:
    pixels = np.arange(40, dtype=np.uint8).reshape(10, 2, 2)
    data = labelled("numbers", ["a", "b"], ArraySource(pixels), torch.arange(10) % 2, PREPROCESS)
    order = torch.arange(9, -1, -1)
    values, batches = zip(*passes(data, CPU, "test", lambda images: images, order=order), strict=True)
    assert [len(batch.images) for batch in batches] == [4, 4, 2]
    expected = (torch.from_numpy(pixels[::-1].copy())[:, None].double() / 255 - 0.5) / 0.25
    torch.testing.assert_close(torch.cat(values).double(), expected, rtol=0, atol=1e-6)
    assert all(value.is_inference() for value in values)
    assert torch.cat([batch.labels for batch in batches]).tolist() == (order % 2).tolist()


def test_bf16_runs_under_autocast() -> None:
    data = labelled("zero", ["a"], ArraySource(np.zeros((1, 2, 2), np.uint8)), torch.zeros(1), PREPROCESS)
    layer = torch.nn.Conv2d(1, 1, 1)
    ((value, _),) = passes(data, Compute(torch.device("cpu"), "bf16"), "test", layer)
    assert value.dtype == torch.bfloat16


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_log_gets_one_line_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(track("abc", total=3, description="pass 1")) == ["a", "b", "c"]
    assert re.fullmatch(r"pass 1 3/3 \([\d.]+/s, 0 s\)\n", capsys.readouterr().err)


def test_long_pass_logs_every_thirty_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(0.0, 10.0)
    monkeypatch.setattr("psc_core.compute.time.monotonic", lambda: next(clock))
    list(track(range(7), total=7, description="pass"))
    assert capsys.readouterr().err.splitlines() == [
        "pass 3/7 (0.1/s, 30 s, 40 s left)",
        "pass 6/7 (0.1/s, 60 s, 10 s left)",
        "pass 7/7 (0.1/s, 80 s)",
    ]


def test_empty_pass_logs_zero(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(track([], total=0, description="pass")) == []
    assert capsys.readouterr().err == "pass 0/0 (0.0/s, 0 s)\n"


def test_search_that_ends_early_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(track("ab", total=7, description="search")) == ["a", "b"]
    assert re.fullmatch(r"search 2/2 \([\d.]+/s, 0 s\)\n", capsys.readouterr().err)


def test_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert list(track(range(3), total=3, description="pass")) == [0, 1, 2]
    assert "\rpass: 100%" in terminal.getvalue() and "3/3" in terminal.getvalue()
