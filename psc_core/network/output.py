"""What a whole network returns, checked on one image before any data is read."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from psc_core.errors import NetworkError, UsageError
from psc_core.images.preprocess import Inputs
from psc_core.network.backbone import Backbone, check_same

_PROBABILITIES = 1e-3
"""Maximum distance from 1 of the sum of an image's outputs that are taken for probabilities."""


@torch.inference_mode()
def check_output(net: nn.Module, trial: Inputs, outputs: int, *, name: str) -> None:
    """Run ``net`` on one image before any data is read, and check that its outputs are (1, ``outputs``) and finite.

    Raises:
        NetworkError: If they are not, differ between two passes, or the network cannot run; the message has its
            ``name``.
    """
    try:
        first, second = net(trial), net(trial)
    except NetworkError:
        raise  # It names the network's file and the way on.
    except Exception as error:
        raise NetworkError(
            f"{name} cannot run an input of shape {tuple(trial.shape)}: {type(error).__name__}: {error}; check the "
            "preset, the image size and the model arguments"
        ) from error
    if not isinstance(first, Tensor):
        raise NetworkError(
            f"expected {name} to return a tensor of shape (1, {outputs}) for one image, got {_described(first)}; wrap "
            f"it in a module whose forward returns the logits alone, as self.net(x){_member(first, outputs)}"
        )
    if outputs == 2 and first.numel() == 1:
        raise NetworkError(
            f"expected {name} to return a logit for each of 2 classes, got one; wrap it in a module whose forward "
            "returns torch.cat([torch.zeros_like(logit), logit], 1), with the logit that the sigmoid would get"
        )
    if outputs == 1 and first.ndim == 1:
        raise NetworkError(
            f"expected {name} to return a tensor of shape (1, 1) for one image, got {tuple(first.shape)}; keep the "
            "axis of the number, or wrap it in a module whose forward returns self.net(x).reshape(-1, 1)"
        )
    if tuple(first.shape) != (1, outputs):
        raise NetworkError(
            f"expected {name} to return a tensor of shape (1, {outputs}) for one image, got {tuple(first.shape)}; use "
            "the labels that it was trained with (classes=[…] in Python, num_classes of a factory), and return logits"
        )
    if not bool(first.isfinite().all()):
        raise NetworkError(
            f"expected finite outputs, {name} gives NaN or infinity for an image of noise; check its weights, and the "
            "mean and std of the preprocessing"
        )
    if outputs > 1 and bool((first >= 0).all()) and abs(float(first.sum()) - 1) < _PROBABILITIES:
        raise NetworkError(
            f"expected {name} to return logits, got probabilities, which sum to 1; leave out its softmax, or wrap it "
            "in a module whose forward returns their logarithm, self.net(x).clamp_min(1e-12).log()"
        )
    try:
        check_same(first, second)
    except NetworkError as error:
        raise NetworkError(f"{name}: {error}") from error


def check_network_output(backbone: Backbone, trial: Inputs, outputs: int, *, name: str) -> None:
    """Check that a backbone keeps as many logits as are to be predicted for the data set ``name``.

    Raises:
        UsageError: If it keeps another number of logits, or none.
    """
    if (width := output_width(backbone, trial)) != outputs:
        raise UsageError(
            f"expected a network of {outputs} output{'s' * (outputs > 1)} for {name}, got {width}; use the data it was "
            "trained for, and a factory that reads num_classes"
        )


@torch.inference_mode()
def output_width(backbone: Backbone, trial: Inputs) -> int | None:
    """Return the number of the network's own logits; None if the backbone does not keep them."""
    output = backbone(trial)[1]
    return None if output is None else output.shape[1]


def _described(output: object) -> str:
    """Describe what a network returned instead of a tensor."""
    if isinstance(output, Mapping):
        return f"a {type(output).__name__} of {', '.join(map(str, output))}"
    return f"a {type(output).__name__}" + (f" of {len(output)}" if isinstance(output, tuple | list) else "")


def _member(output: object, outputs: int) -> str:
    """Return the code that takes the logits from what a network returned instead: the first of their shape."""
    members = {**output} if isinstance(output, Mapping) else {}
    if isinstance(output, tuple | list):
        members = dict(enumerate(output))
    fitting = (key for key, each in members.items() if isinstance(each, Tensor) and tuple(each.shape) == (1, outputs))
    key = next(fitting, None)
    return ".logits" if key is None else f"[{key!r}]"
