from __future__ import annotations

import inspect

import pytest
import torch

from psc_core.compute.device import resolve_device
from psc_core.errors import UsageError


def test_auto_is_cuda_if_available() -> None:
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_resolves_names_and_devices() -> None:
    assert resolve_device("cpu") == resolve_device(torch.device("cpu")) == torch.device("cpu")


@pytest.mark.parametrize("name", ["gpu", "cpu:x", "meta", "cuda:99"])
def test_rejects_unknown_devices(name: str) -> None:
    with pytest.raises(UsageError, match="device"):
        resolve_device(name)


def test_rejects_what_names_no_device() -> None:
    with pytest.raises(UsageError, match="expected a device auto, cpu, cuda or cuda:N, got None"):
        inspect.unwrap(resolve_device)(None)  # type: ignore[arg-type]  # Without the type checks of the tests.
