"""Networks in memory as programs hold them: compiled, distributed, in half precision, of transformers, or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from psc_core.errors import NetworkError, UsageError
from psc_core.network.cut import device_of, readable_copy
from tests import tiny

IMAGES = torch.zeros(2, 1, 28, 28)


@pytest.mark.parametrize(
    "wrapped", [torch.compile, nn.DataParallel, lambda net: torch.compile(nn.DataParallel(torch.compile(net)))]
)
def test_what_only_runs_a_network_is_left_out(wrapped: Callable[[Any], nn.Module]) -> None:
    net = tiny.network().eval()
    copied = readable_copy(wrapped(net))
    assert [name for name, _ in copied.named_modules()] == [name for name, _ in net.named_modules()]
    assert torch.equal(copied(IMAGES), net(IMAGES))


@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16, torch.double])
def test_other_precisions_become_single(dtype: torch.dtype) -> None:
    net = tiny.network().to(dtype)
    copied = readable_copy(net)
    assert copied(IMAGES).dtype == torch.float32
    assert {parameter.dtype for parameter in net.parameters()} == {dtype}, "the network itself stays as it is"


def test_a_double_buffer_of_a_network_in_single_precision_stays() -> None:
    net = tiny.network()
    net.register_buffer("mean", torch.zeros(1, dtype=torch.double))
    assert readable_copy(net).get_buffer("mean").dtype == torch.double


class OfTransformers(nn.Module):
    """The interface of a classifier of transformers."""

    main_input_name = "pixel_values"

    def __init__(self) -> None:
        super().__init__()
        self.net = tiny.network()

    def forward(self, pixel_values: Tensor, *, return_dict: bool = True) -> Any:
        class Output:
            logits = self.net(pixel_values)

        return Output()


def test_a_classifier_of_transformers_gives_its_logits() -> None:
    net = OfTransformers().eval()
    assert torch.equal(readable_copy(net)(IMAGES), net.net(IMAGES))


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")
def test_torchscript_is_refused_with_what_to_give_instead() -> None:
    with pytest.raises(NetworkError, match=r'TorchScript, .* give the nn\.Module .* load_network\("onnx:net\.onnx"\)'):
        readable_copy(torch.jit.trace(tiny.network().eval(), IMAGES))


@pytest.mark.parametrize("other", ["net.pth", {"weight": torch.zeros(1)}, lambda x: x])
def test_what_is_no_module_is_refused(other: object) -> None:
    with pytest.raises(UsageError, match=r"an nn\.Module, got a (str|dict|function); build one .* load_network"):
        readable_copy(other)


def test_a_network_without_tensors_is_on_the_cpu() -> None:
    assert device_of(nn.Identity()) == torch.device("cpu")
