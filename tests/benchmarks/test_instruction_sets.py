"""Processes held to an instruction set."""

from __future__ import annotations

import os

import pytest
import torch

from benchmarks.instruction_sets import AVX2, SETS, available, held_to, in_fresh_process


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (["avx2", "fma"], ["AVX2"]),
        (["avx2", "avx512f"], ["AVX2", "AVX-512"]),
        (["amx_tile", "avx2", "avx512f"], ["AVX2", "AVX-512", "AMX"]),
        (["asimd"], ["native"]),
    ],
)
def test_available_sets_end_with_the_best(flags: list[str], names: list[str]) -> None:
    assert available(flags) == names


@pytest.mark.parametrize("name", SETS)
def test_the_environment_is_restored(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    with held_to(name):
        assert {key: os.environ[key] for key in AVX2 if key in os.environ} == SETS[name][1]
    assert os.environ["ATEN_CPU_CAPABILITY"] == "default" and "ONEDNN_MAX_CPU_ISA" not in os.environ


@pytest.mark.skipif("AVX2" not in available(), reason="the CPU has no AVX2")
def test_a_process_uses_the_set() -> None:
    with held_to("AVX2"):
        assert in_fresh_process(torch.backends.cpu.get_cpu_capability) == "AVX2"
