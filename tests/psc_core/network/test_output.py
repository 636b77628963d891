from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from psc_core.errors import NetworkError
from psc_core.images.preprocess import PRESETS, Preprocess
from psc_core.network.output import check_images, check_output, trial_images


class Gives(nn.Module):
    """Returns what it is told to of the mean of each channel."""

    def __init__(self, output: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.output = output

    def forward(self, x: Tensor) -> Any:
        return self.output(x.mean((2, 3)))


def test_an_output_of_the_right_form_is_accepted() -> None:
    check_output(Gives(lambda x: x.log_softmax(1)), torch.randn(1, 3, 4, 4), 3, name="my:net")
    check_output(Gives(lambda x: x), torch.randn(1, 3, 4, 4), 3, name="my:net")


def test_a_network_of_one_channel_is_told_the_way_to_grey() -> None:
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(16, 2))
    with pytest.raises(NetworkError, match=r"1 channels, but got 3 .* for grey images take --preset mnist"):
        check_output(net, torch.randn(1, 3, 4, 4), 2, name="my:net")
    with pytest.raises(NetworkError, match="check the preset, the image size and the model arguments"):
        check_output(net, torch.randn(1, 1, 9, 9), 2, name="my:net")


IMAGES = trial_images(PRESETS["cifar10"])


class Between(nn.Module):
    """A network with a function between its parts."""

    def __init__(self, function: Callable[[Tensor], Tensor] | nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU())
        self.second = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.function(self.first(x)))


class Sequences(nn.Module):
    """Patches as a sequence (images, patches, channels), read by a layer whose first argument is one."""

    def __init__(self, layer: Callable[..., nn.Module], patches: int = 2, *, turned: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patches = nn.Conv2d(3, 16, (32 // patches, 32), (32 // patches, 32))
        self.layer, self.head, self.turned = layer(), nn.Linear(16, 4), turned

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).permute((2, 0, 1) if self.turned else (0, 2, 1))
        out = self.layer(tokens) if not isinstance(self.layer, nn.MultiheadAttention) else self.layer(*[tokens] * 3)
        out = out[0] if isinstance(out, tuple) else out
        return self.head(out.mean(0 if self.turned else 1))


class Autocast(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.net(x)


def encoder(*, batch_first: bool) -> nn.Module:
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=batch_first)


def batch_statistics(x: Tensor) -> Tensor:
    return nn.functional.batch_norm(x, None, None, training=True)


DEPENDENT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "batch statistics": (lambda: Between(nn.BatchNorm2d(8, track_running_stats=False)), "function"),
    "batch statistics by a function": (lambda: Between(batch_statistics), "second:input"),
    "weakly": (lambda: Between(lambda x: x + 1e-3 * x.mean(0)), "second:input"),
    "weakly in bfloat16": (lambda: Autocast(Between(lambda x: x + 1e-2 * x.mean(0))), "net.second:input"),
    "largest value": (lambda: Between(lambda x: x / x.amax()), "second:input"),
    "attention": (lambda: Sequences(partial(encoder, batch_first=False)), "layer.self_attn"),
    "attention alone": (lambda: Sequences(partial(nn.MultiheadAttention, 16, 2)), "layer"),
    "recurrence": (lambda: Sequences(partial(nn.GRU, 16, 16)), "layer"),
    "position in the batch": (lambda: Between(lambda x: x + torch.arange(len(x)).view(-1, 1, 1, 1)), "second:input"),
    "softmax over images": (lambda: nn.Sequential(Between(nn.Identity()), nn.Softmax(0)), "1"),
}


@pytest.mark.parametrize("kind", DEPENDENT)
def test_a_network_whose_answer_depends_on_the_batch_is_refused(kind: str) -> None:
    build, layer = DEPENDENT[kind]
    with pytest.raises(NetworkError, match=rf"my:net: .*'{layer}'"):
        check_images(build(), IMAGES, name="my:net")


@pytest.mark.parametrize("size_matters", [lambda x: x / len(x), lambda x: x.flip(0), lambda x: x - 0.1 * x.mean(0)])
def test_an_output_that_depends_on_the_batch_is_refused(size_matters: Callable[[Tensor], Tensor]) -> None:
    class Net(Between):
        def forward(self, x: Tensor) -> Tensor:
            return size_matters(super().forward(x))

    with pytest.raises(NetworkError, match="the other images of the batch"):
        check_images(Net(nn.Identity()), IMAGES, name="my:net")


class Experts(nn.Module):
    """Sends the tokens of all images to one of several layers, so that their number depends on the images."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.check, self.experts = nn.Linear(16, 3), nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        flat = tokens.flatten(0, 1)
        out, chosen = torch.zeros_like(flat), self.check(flat).argmax(1)
        for number, expert in enumerate(self.experts):
            out[chosen == number] = expert(flat[chosen == number])
        return out.view_as(tokens)


INDEPENDENT: dict[str, Callable[[], nn.Module]] = {
    "running statistics": lambda: Between(nn.BatchNorm2d(8)),
    "running statistics in training mode": lambda: Between(nn.BatchNorm2d(8)).train(),
    "statistics of each image": lambda: Between(nn.InstanceNorm2d(8)),
    "attention": lambda: Sequences(partial(encoder, batch_first=True)),
    "tokens first, as many as images": lambda: Sequences(partial(encoder, batch_first=False), 4, turned=True),
    "one token, first": lambda: Sequences(partial(encoder, batch_first=False), 1, turned=True),
    "recurrence": lambda: Sequences(partial(nn.LSTM, 16, 16, batch_first=True)),
    "experts": lambda: Sequences(Experts),
    "bfloat16": lambda: Autocast(Between(nn.Identity())),
    "image by image": lambda: Between(lambda x: torch.cat([each.relu() for each in x.split(1)])),
    "constant": lambda: nn.Sequential(Between(nn.Identity()), nn.Linear(4, 4).apply(zeroed)),
    "almost 0": lambda: nn.Sequential(Between(nn.Identity()), nn.Linear(4, 1)),
    "changes its input": lambda: nn.Sequential(nn.ReLU(inplace=True), Between(nn.Identity())),
    "gives no tensor": lambda: Gives(lambda x: {"logits": x}),
}


def zeroed(layer: nn.Module) -> None:
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)


@pytest.mark.parametrize("kind", INDEPENDENT)
def test_a_network_that_reads_one_image_alone_is_accepted(kind: str) -> None:
    images = IMAGES.clone()
    check_images(INDEPENDENT[kind](), images, name="my:net")
    assert torch.equal(images, IMAGES)


class Scaled(nn.Module):
    """Scales each image by something of its own."""

    def __init__(self, by: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.by, self.net = by, Between(nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x / self.by(x))


@pytest.mark.parametrize(
    ("by", "kinds"),
    [
        (lambda x: x.std((1, 2, 3), keepdim=True), "a black or a white or a uniformly grey image"),
        (lambda x: x.amax((1, 2, 3), keepdim=True), "a black image"),
        (lambda x: x.amax((1, 2, 3), keepdim=True) - 1, "a white image"),
    ],
)
def test_an_image_without_a_finite_answer_is_named(by: Callable[[Tensor], Tensor], kinds: str) -> None:
    grey = trial_images(Preprocess("RGB", 8, 8, None, (0.0,) * 3, (1.0,) * 3))
    with pytest.raises(NetworkError, match=f"for {kinds};"):
        check_images(Scaled(by), grey, name="my:net")
    check_images(Scaled(lambda x: by(x).abs() + 1e-6), grey, name="my:net")


def test_an_image_that_cannot_be_run_is_named() -> None:
    def fail(x: Tensor) -> Tensor:
        if bool((x.flatten(1).amax(1) == x.flatten(1).amin(1)).any()):
            raise ValueError("no edges")
        return torch.ones_like(x)

    grey = trial_images(Preprocess("RGB", 8, 8, None, (0.5,) * 3, (1.0,) * 3))
    with pytest.raises(NetworkError, match="cannot run a black image: ValueError: no edges"):
        check_images(Scaled(fail), grey, name="my:net")


def refuse(x: Tensor) -> Tensor:
    raise NetworkError("net.onnx takes batches of 3 images only")


@pytest.mark.parametrize(
    ("output", "classes", "message"),
    [
        (lambda x: x[0], 3, r"shape \(1, 3\) for one image, got \(3,\); keep .* \.flatten\(1\)"),
        (lambda x: x[:, :2], 3, r"shape \(1, 3\) for one image, got \(1, 2\)"),
        (lambda x: (x[:, :2], x), 3, r"a tuple of 2; .*self\.net\(x\)\[1\]"),
        (lambda x: {"colour": x[:, :2], "kind": x}, 3, r"a dict of colour, kind; .* self\.net\(x\)\['kind'\]"),
        (lambda x: x.softmax(1), 3, "got probabilities"),
        (lambda x: None, 3, "got a NoneType"),
        (lambda x: x / 0, 3, "NaN or infinity"),
        (lambda x: nn.functional.dropout(x), 3, "dropout"),
        (lambda x: x @ x.new_zeros(9, 3), 3, r"an input of shape \(1, 3, 4, 4\): RuntimeError"),
        (lambda x: x[:, :1], 2, r"torch\.cat"),
        (lambda x: x[:, 0], 2, r"torch\.cat"),
        (lambda x: x[:, 0], 1, r"reshape\(len\(x\), -1\)"),
        (lambda x: x[:, :2], 1, r"got \(1, 2\); wrap .* the number alone, as self\.net\(x\)\[:, :1\]$"),
        (lambda x: x[:, :1, None, None], 1, r"got \(1, 1, 1, 1\); wrap .* self\.net\(x\)\.flatten\(1\)$"),
        (lambda x: x[:, :, None, None], 3, r"got \(1, 3, 1, 1\); wrap .* self\.net\(x\)\.flatten\(1\)$"),
        (refuse, 3, r"^net\.onnx takes batches of 3 images only$"),
    ],
)
def test_an_output_that_cannot_be_used_is_told(output: Callable[[Tensor], Any], classes: int, message: str) -> None:
    torch.manual_seed(0)
    with pytest.raises(NetworkError, match=message):
        check_output(Gives(output), torch.randn(1, 3, 4, 4), classes, name="my:net")


def test_one_logit_of_two_classes_is_refused_with_a_remedy_for_files_too() -> None:
    with pytest.raises(NetworkError, match=r"export it again\) in a module .*zeros_like\(logit\)"):
        check_output(nn.Sequential(nn.Flatten(), nn.Linear(4, 1)), torch.zeros(1, 1, 2, 2), 2, name="onnx:net.onnx")
