from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from psc_core.errors import NetworkError
from psc_core.network.cut import HookedNetwork, HookPlan, cut_graph


class Meanwhile(nn.Module):
    """Runs a function on another thread each time its forward pass is entered."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 2)
        self.run = function

    def __deepcopy__(self, memo: dict[int, Any]) -> Meanwhile:
        return self

    def forward(self, x: Tensor) -> Tensor:
        thread = threading.Thread(target=self.run)
        thread.start()
        thread.join(0.5)
        return self.second(self.first(x))


def test_network_runs_while_another_is_traced() -> None:
    served, x, answers = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.ones(1, 2), []
    cut_graph(Meanwhile(lambda: answers.append(served(x))), ["first"], keep_output=False)
    assert len(answers) == 1
    assert torch.equal(answers[0], served(x))


def test_concurrent_traces_restore_torch() -> None:
    call, outer_is_done, cut = nn.Module.__call__, threading.Event(), []
    inner = Meanwhile(lambda: outer_is_done.wait(60))
    outer = Meanwhile(lambda: cut.append(cut_graph(inner, ["first"], keep_output=False)))
    cut_graph(outer, ["first"], keep_output=False)
    outer_is_done.set()
    end = time.monotonic() + 60
    while not cut and time.monotonic() < end:
        time.sleep(0.01)
    assert len(cut) == 1
    assert nn.Module.__call__ is call


def test_hooks_reject_non_tensor_outputs() -> None:
    class Pair(nn.Module):
        def forward(self, x: Tensor) -> list[Tensor]:
            return [x, x]

    net = nn.Sequential(Pair())
    with pytest.raises(NetworkError, match="expected a tensor from layer 0, got list"):
        HookedNetwork(net, ["0"], HookPlan(), keep_output=False)(torch.zeros(1, 1, 1, 1))


def test_the_first_of_several_outputs_is_the_layers() -> None:
    class Attending(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return 2 * x, x.softmax(1)

    class First(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
            return pair[0] + 1

    net = nn.Sequential(Attending(), First()).eval()
    images = torch.randn(2, 3)
    hooked = HookedNetwork(net, ["0", "1"], HookPlan(), keep_output=False)(images)
    for twice, plus_one in (hooked, cut_graph(net, ["0", "1"], keep_output=False)(images)):
        assert torch.equal(twice, 2 * images) and torch.equal(plus_one, 2 * images + 1)
