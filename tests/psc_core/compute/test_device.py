from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch

from psc_core.compute import own_state, resolve_device
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


@contextmanager
def float64_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


AMBIENT: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "float64": float64_default,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "device": lambda: torch.device("meta"),
    "inference": torch.inference_mode,
    "no gradients": torch.no_grad,
}


def state() -> tuple[object, ...]:
    return (
        torch.get_default_dtype(),
        torch.is_autocast_enabled("cpu"),
        torch.get_default_device(),
        torch.is_inference_mode_enabled(),
        torch.is_grad_enabled(),
    )


@pytest.mark.parametrize("ambient", AMBIENT)
def test_what_a_program_has_set_is_left_outside(ambient: str) -> None:
    own = state()
    with AMBIENT[ambient]():
        before = state()
        assert before != own
        with own_state(), own_state():
            assert state() == own
        assert state() == before
        with pytest.raises(ValueError, match="inside"), own_state():
            raise ValueError("inside")
        assert state() == before
    assert state() == own


def test_a_type_that_an_import_sets_inside_does_not_stay() -> None:
    with own_state():
        with own_state():
            torch.set_default_dtype(torch.float64)
        assert torch.get_default_dtype() == torch.float32
        torch.set_default_dtype(torch.float64)
    assert torch.get_default_dtype() == torch.float32


def test_a_thread_that_leaves_does_not_change_the_type_of_others() -> None:
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with own_state():
            entered.set()
            leave.wait(60)

    with float64_default():
        thread = threading.Thread(target=other)
        thread.start()
        assert entered.wait(60)
        with own_state():
            pass
        assert torch.get_default_dtype() == torch.float32
        leave.set()
        thread.join(60)
        assert torch.get_default_dtype() == torch.float64
