from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from psc_core.errors import NetworkError
from psc_core.network.hooks import HookedNetwork


def test_hooks_reject_non_tensor_outputs() -> None:
    class Pair(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x

    net = nn.Sequential(Pair())
    with pytest.raises(NetworkError, match="expected a tensor from layer 0, got tuple"):
        HookedNetwork(net, ["0"], keep_output=False, stop=None, dropped=())(torch.zeros(1, 1, 1, 1))
