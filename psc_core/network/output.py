"""What a whole network returns, checked on trial images before any data is read.

A network's answer for an image must not depend on the other images of its batch.  :func:`first_dependent` computes one
image among others and again among different ones, in batches of one size, so that the same kernels run: the values of
all of 46 networks of torchvision and timm are equal to the last bit.  Alone, other kernels run, whose rounding moves
the logits of these networks by up to 2e-6 of the largest.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from psc_core.errors import NetworkError, UsageError
from psc_core.images.preprocess import GREY, Inputs, Preprocess
from psc_core.network.layers import INPUT_SUFFIX, batch_axis, value_of

if TYPE_CHECKING:
    from psc_core.network.cut import Backbone

TrialImages = Float[Tensor, "5 channels height width"]  # noise, black, white, grey, other noise
See = Callable[[str, Tensor], None]  # takes a value's layer, "" for the output, and the value
_PROBABILITIES = 1e-3  # maximum distance from 1 of the sum of an image's outputs that are taken for probabilities
_REPEATABLE = 1e-3  # maximum difference of two passes of one image, relative; GPU kernels may vary
_AMONG_OTHERS: Final = 1e-5  # the same of an image among some and among other images

# Maximum difference between an image's output alone and in a batch, relative to the largest, by the coarsest type of
# the network's values: deep networks accumulate tens of roundings, TF32's among them.
_ALONE: Final = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
_READ: Final = 4096  # maximum number of values of a layer that are compared, so that the largest networks fit
_CONSTANT: Final = ("black", "white", "uniformly grey")


def trial_images(preprocess: Preprocess) -> TrialImages:
    """Return the standardised trial images; the first has half the contrast, so that the others reach beyond it."""
    noise = preprocess.noise()
    uniform = [torch.full_like(noise, value) for value in (0, 255, 128)]
    return preprocess.standardise(torch.cat([noise // 2 + 64, *uniform, noise.flip(-1)]))


class OtherOutputs(NetworkError):
    """A network that returns what it should, for another number of classes."""


@torch.inference_mode()
def check_output(net: nn.Module, trial: Inputs, outputs: int, *, name: str) -> None:
    """Run ``net`` on one image before any data is read, and check that its outputs are (1, ``outputs``) and finite."""
    try:
        first, second = net(trial.clone()), net(trial.clone())  # A network may change its input in place.
    except NetworkError:
        raise  # It names the network's file and the way on.
    except Exception as error:
        conv = next((each for each in net.modules() if isinstance(each, nn.Conv2d)), None)
        is_grey = conv is not None and conv.in_channels == 1 < trial.shape[1]
        remedy = f"for grey images {GREY}" if is_grey else "check the preset, the image size and the model arguments"
        raise NetworkError(
            f"{name} cannot run an input of shape {tuple(trial.shape)}: {type(error).__name__}: {error}; {remedy}"
        ) from error
    if not isinstance(first, Tensor):
        raise NetworkError(
            f"expected {name} to return a tensor of shape (1, {outputs}) for one image, got {_described(first)}; wrap "
            f"it in a module whose forward returns the logits alone, as self.net(x){_member(first, outputs)}"
        )
    fault = _fault_of_shape(first, outputs, name)
    if fault and (first.ndim != 2 or len(first) != 1):
        raise NetworkError(fault)
    if not bool(first.isfinite().all()):
        raise NetworkError(
            f"expected finite outputs, {name} gives NaN or infinity for an image of noise; check its weights, and the "
            "mean and std of the preprocessing"
        )
    try:
        check_same(first, second)
    except NetworkError as error:
        raise NetworkError(f"{name}: {error}") from error
    if fault:
        raise OtherOutputs(fault)
    if outputs > 1 and bool((first >= 0).all()) and abs(float(first.sum()) - 1) < _PROBABILITIES:
        raise NetworkError(
            f"expected {name} to return logits, got probabilities, which sum to 1; leave out its softmax, or wrap it "
            "in a module whose forward returns their logarithm, self.net(x).clamp_min(1e-12).log()"
        )


def _fault_of_shape(output: Tensor, outputs: int, name: str) -> str:
    """Return what is wrong with the shape of the output for one image, and what to do; empty if nothing is."""
    if outputs == 2 and output.numel() == 1:
        return (
            f"expected {name} to return a logit for each of 2 classes, got one; wrap it (of an ONNX file, what it was "
            "exported from, and export it again) in a module whose forward returns "
            "torch.cat([torch.zeros_like(logit), logit], 1), with the logit that the sigmoid would get"
        )
    if tuple(output.shape) == (1, outputs):
        return ""
    if output.ndim < 2:
        instead = (
            "keep both axes, by .flatten(1) in place of .squeeze(), or wrap it in a module whose forward returns "
            "self.net(x).reshape(len(x), -1)"
        )
    elif output.numel() == outputs:
        instead = "wrap it in a module whose forward returns self.net(x).flatten(1)"
    elif outputs == 1:
        instead = "wrap it in a module whose forward returns the number alone, as self.net(x)[:, :1]"
    else:
        instead = (
            "use the labels that it was trained with (classes=[…] in Python, num_classes of a factory), and return "
            "logits"
        )
    shape = tuple(output.shape)
    return f"expected {name} to return a tensor of shape (1, {outputs}) for one image, got {shape}; {instead}"


def check_same(first: Tensor, second: Tensor) -> None:
    """Reject the outputs of two passes of one image if they differ by more than kernels may vary."""
    scale = float(first.abs().max()) if first.numel() else 0.0
    apart = float((first - second).abs().max()) if scale else 0.0
    if apart > _REPEATABLE * scale:
        raise NetworkError(
            "expected the same output for the same image, two passes differ by "
            f"{apart / scale:.1%}; is dropout always on? F.dropout needs training=self.training"
        )


@torch.inference_mode()
def check_images(net: nn.Module, images: TrialImages, *, name: str) -> None:
    """Check that an image's answer does not depend on others of its batch, and is finite for uniform images."""
    outputs: list[Any] = []
    try:
        place = first_dependent(partial(_run, net.eval(), outputs), images)
    except NetworkError:
        raise
    except Exception as error:
        tried = zip(("single", *_CONSTANT), torch.split(images[:4], 1), strict=True)
        kind = next((kind for kind, image in tried if not _runs(net, image.clone())), None)
        what = "several images at once" if kind is None else f"a {kind} image"
        raise NetworkError(
            f"{name} cannot run {what}: {type(error).__name__}: {error}; make it run any image, in batches of any size"
        ) from error
    if place is not None:
        raise NetworkError(f"{name}: {dependence(place)}")
    if not all(isinstance(output, Tensor) for output in outputs):
        return  # No logits; only a head will predict.
    finite = [bool(outputs[batch][row].isfinite().all()) for batch, row in ((1, 0), (2, 0), (2, 3))]
    if kinds := [kind for kind, each in zip(_CONSTANT, finite, strict=True) if not each]:
        raise NetworkError(
            f"{name} gives NaN or infinity for a {' or a '.join(kinds)} image; a network that divides by something of "
            "the image itself does so where that is 0: divide by x.std() + 1e-6, or clamp it"
        )


def dependence(place: str) -> str:
    """Return what is wrong with a network whose values from ``place`` on depend on the batch, and what to do."""
    where = f"the first layer that differs is {place!r}" if place else "only its output shows it"
    return (
        f"its answer for an image depends on the other images of the batch; {where}; use what reads one image alone: "
        "running statistics for batch normalisation, batch_first=True for attention and recurrence, a softmax over "
        "classes, dim=1, and a scale that is known beforehand for quantised activations"
    )


def first_dependent(run: Callable[[Inputs, See], None], images: TrialImages) -> str | None:
    """Return the name of the first value of an image that depends on the others of its batch; None if none does."""
    image, black, white, grey, noise = torch.split(images, 1)
    shapes: dict[tuple[str, int], torch.Size] = {}
    alone: dict[tuple[str, int], Tensor] = {}
    types: set[torch.dtype] = set()

    def keep_shape(key: tuple[str, int], value: Tensor) -> None:
        shapes[key] = value.shape
        types.add(value.dtype)
        if not key[0]:
            alone[key] = value[0].clone() if value.ndim else value

    def rows_of(batch: Inputs) -> dict[tuple[str, int], Tensor]:
        rows: dict[tuple[str, int], Tensor] = {}

        def keep_rows(key: tuple[str, int], value: Tensor) -> None:
            axis = batch_axis(shapes.get(key), value.shape, 4)
            if axis is not None:
                kept = value.movedim(axis, 0).flatten(1)
                rows[key] = kept[:, :: 1 if not key[0] else max(1, kept.shape[1] // _READ)].clone()

        run(batch, _numbered(keep_rows))
        return rows

    run(image.clone(), _numbered(keep_shape))
    among = torch.cat([black, image, noise, noise])
    first, second = rows_of(among), rows_of(torch.cat([white, image, image, grey]))
    again: dict[tuple[str, int], Tensor] | None = None
    for key, rows in second.items():
        apart = _apart(first[key][1], rows[1]) if key in first else 0.0
        if not apart <= _AMONG_OTHERS:
            again = again or rows_of(among)
            if not apart <= 4 * _apart(first[key][1], again[key][1]):  # Kernels that vary are told by another pass.
                return key[0]
    limit = max((_ALONE[each] for each in types if each in _ALONE), default=_ALONE[torch.float32])
    for key, value in alone.items():
        if key in second:
            # Relative to the outputs of all images: the only number of one image may lie close to zero.
            flat, scale = value.flatten(), torch.cat([first[key], second[key]])
            if not max(_apart(flat, second[key][row], scale) for row in (1, 2)) <= limit:
                return next((name for (name, _), rows in second.items() if not _apart(rows[1], rows[2]) <= limit), "")
    return None


def _run(net: nn.Module, outputs: list[Any], images: Inputs, see: See) -> None:
    """Run a network, show the input and the output of each module, and keep the network's output."""

    def enter(name: str, _module: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor):
            see(name + INPUT_SUFFIX, args[0])

    def leave(name: str, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        for value in output if isinstance(output, tuple) else (output,):
            if isinstance(value, Tensor):
                see(name, value)

    with ExitStack() as hooks:
        for name, module in net.named_modules():
            if name:
                hooks.enter_context(module.register_forward_pre_hook(partial(enter, name)))
                hooks.enter_context(module.register_forward_hook(partial(leave, name)))
        output = net(images)
    outputs.append(output)
    if isinstance(value := value_of(output), Tensor):
        see("", value)


def _runs(net: nn.Module, images: Inputs) -> bool:
    try:
        net(images)
    except Exception:
        return False
    return True


def _numbered(keep: Callable[[tuple[str, int], Tensor], None]) -> See:
    """Return a function that tells the calls of a module apart, and skips values that are no floating-point numbers."""
    calls: Counter[str] = Counter()

    def see(name: str, value: Tensor) -> None:
        calls[name] += 1
        if value.is_floating_point():
            keep((name, calls[name]), value)

    return see


def _apart(first: Tensor, second: Tensor, scale: Tensor | None = None) -> float:
    """Return the largest difference, relative to the largest of ``scale``; NaN and infinity equal themselves."""
    if first.shape != second.shape:
        return math.nan
    same = (first == second) | (first.isnan() & second.isnan())
    if bool(same.all()):
        return 0.0
    difference = torch.where(same, 0.0, (first.double() - second.double()).abs()).max()
    largest = (first if scale is None else scale).double().nan_to_num(0.0, 0.0, 0.0).abs().max()
    return float(difference / largest)


def check_network_output(backbone: Backbone, trial: Inputs, outputs: int, *, name: str) -> None:
    """Check that a backbone keeps as many logits as are to be predicted for the data set ``name``."""
    if (width := output_width(backbone, trial)) != outputs:
        raise UsageError(
            f"expected a network of {outputs} output{'s' * (outputs > 1)} for {name}, got {width}; use the data it was "
            "trained for, and a factory that reads num_classes"
        )


@torch.inference_mode()
def output_width(backbone: Backbone, trial: Inputs) -> int | None:
    output = backbone(trial)[1]
    return None if output is None or output.ndim != 2 else output.shape[1]


def _described(output: object) -> str:
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
