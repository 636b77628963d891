"""What all steps share: compilation, and what counts as out of memory."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.compiler.config
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from app.inference.steps import is_out_of_memory, make_step
from app.main import allow_compiled_shapes

SHAPE = (1, 2, 2)


class Plain(nn.Module):
    """A network that a compiler can follow."""

    is_traced = True

    def forward(self, images: Tensor, /) -> Tensor:
        return images.flatten(1).float()

    def explain(self, images: Tensor, /, *, with_map: bool) -> tuple[Tensor, dict[str, Tensor]]:
        raise NotImplementedError

    def forward_with_map(self, images: Tensor, /) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


def test_every_shape_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=compiled))
    for name in ("recompile_limit", "accumulated_recompile_limit"):
        monkeypatch.setattr(torch.compiler.config, name, getattr(torch.compiler.config, name))  # As it was, afterwards.
    allow_compiled_shapes()
    make_step(Plain(), SHAPE, max_batch=1024, device=torch.device("cpu"), compiled=True).warm_up()
    assert compiled.frame_count == 11


def test_a_host_without_room_is_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("another"))
