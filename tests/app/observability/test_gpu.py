"""What the metrics show of a GPU, with a CUDA that answers by heart."""

from __future__ import annotations

import pytest
import torch

from app.metrics import gpu_usage


@pytest.mark.parametrize("error", [ModuleNotFoundError(), RuntimeError(), type("NVMLError", (Exception,), {})()])
def test_without_nvml_there_is_no_utilisation(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(_: torch.device) -> float:
        raise error

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (3, 10))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 5)
    monkeypatch.setattr(torch.cuda, "utilization", fail)
    usage = gpu_usage(torch.device("cuda"))
    assert (usage.memory_bytes, usage.utilisation) == ({"used": 7, "total": 10, "allocated": 5}, None)
