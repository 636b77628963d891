"""Processes held to an instruction set."""

from __future__ import annotations

import os

import pytest
import torch

from benchmarks.instruction_sets import available, held_to, in_fresh_process


def test_available_sets_end_with_the_best() -> None:
    assert available(["amx_tile", "avx2", "avx512f"]) == ["AVX2", "AVX-512", "AMX"]
    assert available(["asimd"]) == ["native"]


@pytest.mark.skipif("AVX2" not in available(), reason="the CPU has no AVX2")
def test_a_process_uses_the_set_and_the_environment_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    with held_to("AVX2"):
        assert in_fresh_process(torch.backends.cpu.get_cpu_capability) == "AVX2"
    assert os.environ["ATEN_CPU_CAPABILITY"] == "default" and "ONEDNN_MAX_CPU_ISA" not in os.environ
