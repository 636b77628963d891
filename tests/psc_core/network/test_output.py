"""A network's output that cannot be used is told by one image, with the lines that make it fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from psc_core.errors import NetworkError
from psc_core.network.output import check_output


class Gives(nn.Module):
    """Returns what it is told to of the mean of each channel."""

    def __init__(self, output: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.output = output

    def forward(self, x: Tensor) -> Any:
        return self.output(x.mean((2, 3)))


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (
            lambda x: x[0],
            r"expected my:net to return a tensor of shape \(1, 3\) for one image, got \(3,\); use the labels",
        ),
        (lambda x: x[:, :2], r"of shape \(1, 3\) for one image, got \(1, 2\)"),
        (lambda x: (x[:, :2], x), r"got a tuple of 2; wrap it in a module .*, as self\.net\(x\)\[1\]"),
        (lambda x: {"colour": x[:, :2], "kind": x}, r"got a dict of colour, kind; wrap it .* self\.net\(x\)\['kind'\]"),
        (lambda x: x.softmax(1), "expected my:net to return logits, got probabilities, .* leave out its softmax"),
        (lambda x: None, "got a NoneType; wrap it"),
        (lambda x: x / 0, "my:net gives NaN or infinity for an image of noise"),
        (lambda x: nn.functional.dropout(x), "my:net: expected the same output .* is dropout always on"),
        (lambda x: x @ x.new_zeros(9, 3), r"my:net cannot run an input of shape \(1, 3, 4, 4\): RuntimeError"),
    ],
)
def test_an_output_that_cannot_be_used_is_told_by_one_image(output: Callable[[Tensor], Any], message: str) -> None:
    torch.manual_seed(0)
    with pytest.raises(NetworkError, match=message):
        check_output(Gives(output), torch.randn(1, 3, 4, 4), 3, name="my:net")


@pytest.mark.parametrize("one", [lambda x: x[:, :1], lambda x: x[:, 0]])
def test_one_logit_for_two_classes_is_told_how_to_become_two(one: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(NetworkError, match=r"a logit for each of 2 classes, got one; .* torch\.cat"):
        check_output(Gives(one), torch.randn(1, 3, 4, 4), 2, name="my:net")


def test_an_error_of_the_network_itself_is_kept() -> None:
    def refuse(x: Tensor) -> Tensor:
        raise NetworkError("net.onnx takes batches of 3 images only")

    with pytest.raises(NetworkError, match=r"^net\.onnx takes batches of 3 images only$"):
        check_output(Gives(refuse), torch.randn(1, 3, 4, 4), 3, name="onnx:net.onnx")


def test_a_number_without_its_axis_is_told_how_to_get_one() -> None:
    with pytest.raises(
        NetworkError, match=r"shape \(1, 1\) for one image, got \(1,\); keep the axis .*reshape\(-1, 1\)"
    ):
        check_output(Gives(lambda x: x[:, 0]), torch.randn(1, 3, 4, 4), 1, name="my:net")


def test_an_output_of_the_right_form_is_accepted() -> None:
    check_output(Gives(lambda x: x.log_softmax(1)), torch.randn(1, 3, 4, 4), 3, name="my:net")
    check_output(Gives(lambda x: x), torch.randn(1, 3, 4, 4), 3, name="my:net")
