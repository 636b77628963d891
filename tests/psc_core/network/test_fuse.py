from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.utils import prune

from psc_core import PSC
from psc_core.network.cut import cut_graph, fuse, truncate
from tests.opened import opened


def unlike_new(net: nn.Module) -> nn.Module:
    """Statistics and scales that a trained network could have."""
    torch.manual_seed(0)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d) and module.running_mean is not None:
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)  # type: ignore[union-attr]
            if module.affine:
                nn.init.uniform_(module.weight, 0.5, 1.5)
                nn.init.normal_(module.bias, 0, 0.1)
    return net.eval()


def check(net: nn.Module, layer: str, x: Tensor, *, keep_output: bool = True, tolerance: float = 1e-5) -> nn.Module:
    """Compare, at this batch and at one image; returns the fused network."""
    body = cut_graph(net, [layer], keep_output=keep_output)
    state = {key: value.clone() for key, value in body.state_dict().items()}
    fused = fuse(body, precision="fp32")
    with torch.inference_mode():
        for images in (x, x[:1]):
            before = body(images)
            for expected, got in zip(before, fused(images.contiguous(memory_format=torch.channels_last)), strict=True):
                torch.testing.assert_close(got, expected, rtol=0, atol=tolerance * float(expected.abs().max()))
            for expected, again in zip(before, body(images), strict=True):
                assert torch.equal(again, expected)
    assert all(torch.equal(value, state[key]) for key, value in body.state_dict().items())
    return fused


def normalised(how: str) -> nn.Module:
    """A network whose weights are made by hooks in every call."""
    normalise: Callable[[nn.Module], nn.Module] = {
        "spectral": nn.utils.spectral_norm,
        "weight": nn.utils.weight_norm,
        "pruned": lambda module: prune.random_unstructured(module, "weight", 0.5),
    }[how]
    layers = [normalise(nn.Conv2d(3, 8, 3, padding=1)), nn.BatchNorm2d(8), nn.ReLU(), normalise(nn.Conv2d(8, 8, 3))]
    return nn.Sequential(*layers, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), normalise(nn.Linear(8, 4)))


@pytest.mark.parametrize("how", ["spectral", "weight", "pruned"])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_keeps_weights_computed_by_hooks(how: str) -> None:
    torch.manual_seed(0)
    trained = unlike_new(normalised(how))
    x = torch.randn(3, 3, 8, 8)
    trained(x)
    with torch.no_grad():
        fresh = normalised(how).eval()
    fresh.load_state_dict(trained.state_dict())  # "weight" itself still is what the constructor left
    fused = fuse(cut_graph(fresh, ["4"], keep_output=True), precision="fp32")
    with torch.inference_mode():
        torch.testing.assert_close(fused(x)[-1], trained(x))
    check(fresh, "4", x)


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("resnet18", "layer4.0.downsample.0"),
        ("vgg11_bn", "features.18"),
        ("mobilenet_v2", "features.15"),
        ("shufflenet_v2_x0_5", "stage3"),
        ("densenet121", "features.denseblock2"),
        ("googlenet", "inception4a"),
    ],
)
def test_torchvision_networks(name: str, layer: str) -> None:
    more = {"init_weights": False} if name == "googlenet" else {}
    net = unlike_new(torchvision.models.get_model(name, weights=None, num_classes=5, **more))
    check(net, layer, torch.randn(2, 3, 48, 48), keep_output=name != "vgg11_bn")


class Small(nn.Module):
    """Three convolutions, put together in a way that the test gives."""

    def __init__(self, wire: Callable[[Small, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.Conv2d(4, 4, 3, padding=1)
        self.third = nn.Conv2d(4, 4, 1)
        self.norm, self.free = nn.BatchNorm2d(4), nn.BatchNorm2d(4, track_running_stats=False)
        self.relu, self.pool = nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1)
        self.end = nn.Conv2d(4, 2, 1)
        self.wire = wire

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.end(self.wire(self, x)).flatten(2).mean(2)
        return y


def changed_between(net: Small, x: Tensor) -> Tensor:
    """The second convolution's input changes before its output is added to it."""
    a = net.first(x)
    b = net.second(a)
    a = net.relu(a)
    return a + b


def added_in_place(net: Small, x: Tensor) -> Tensor:
    a = net.first(x)
    b = net.second(a)
    a += 1.0
    return b + a


def written_over(net: Small, x: Tensor) -> Tensor:
    a = net.first(x)
    b = net.second(a)
    return torch.mul(a, 2.0, out=a) + b


def added_to_what_is_read(net: Small, x: Tensor) -> Tensor:
    """The result of the sum is not read, what it changed is."""
    a = net.first(x)
    a.add_(net.second(F.relu(a)))
    return net.third(a) + a


def added_to_a_view(net: Small, x: Tensor) -> Tensor:
    a = net.first(x)
    return a.view(a.shape).add_(net.second(F.relu(a))) * a


def added_to_the_convolution(net: Small, x: Tensor) -> Tensor:
    a = net.norm(net.first(x))
    return net.second(a).add_(a).relu_() + a


def broadcast(net: Small, x: Tensor) -> Tensor:
    a = net.first(x)
    return F.relu(net.second(net.pool(a)) + a)


def one_value_to_all(net: Small, x: Tensor) -> Tensor:
    a = net.first(x)
    return torch.relu(net.second(a) + net.pool(a))


def called_twice(net: Small, x: Tensor) -> Tensor:
    a = net.norm(net.second(net.norm(net.first(x))))
    return net.norm(net.second(a))


def with_itself(net: Small, x: Tensor) -> Tensor:
    a = net.second(net.first(x))
    return a + a


def scaled_sum(net: Small, x: Tensor) -> Tensor:
    a = net.first(x)
    return torch.add(net.second(a), net.third(a), alpha=2)


def two_summands(net: Small, x: Tensor) -> Tensor:
    a = net.norm(net.first(x))
    return F.relu(net.second(a).add(net.third(a)), inplace=True) + a


@pytest.mark.parametrize(
    "wire",
    [
        changed_between,
        added_in_place,
        written_over,
        added_to_what_is_read,
        added_to_a_view,
        added_to_the_convolution,
        broadcast,
        one_value_to_all,
        called_twice,
        with_itself,
        lambda net, x: (net.second(net.first(x)) + 1.0).relu(),
        lambda net, x: net.relu(net.free(net.first(x))),
        scaled_sum,
        two_summands,
    ],
)
def test_in_place_and_shared_operations(wire: Callable[[Small, Tensor], Tensor]) -> None:
    check(unlike_new(Small(wire)), "first", torch.randn(3, 3, 9, 7))


@given(
    groups=st.sampled_from([1, 2, 4]),
    bias=st.booleans(),
    affine=st.booleans(),
    variance=st.sampled_from([0.0, 1e-8, 1.0, 1e4]),
    eps=st.sampled_from([1e-5, 1e-3]),
    seed=st.integers(0, 1 << 30),
)
def test_folding_equals_float64(groups: int, bias: bool, affine: bool, variance: float, eps: float, seed: int) -> None:
    """Against w · γ / √(σ² + ε) and β + (b − μ) · γ / √(σ² + ε), and against the network that is not folded."""
    torch.manual_seed(seed)
    convolution, norm = nn.Conv2d(4, 8, 3, padding=1, groups=groups, bias=bias), nn.BatchNorm2d(8, eps, affine=affine)
    net = unlike_new(nn.Sequential(convolution, norm, nn.ReLU()))
    assert norm.running_mean is not None and norm.running_var is not None
    norm.running_var.mul_(variance)
    fused = fuse(cut_graph(net, ["2"], keep_output=False), precision="fp32")
    folded = fused.get_submodule("0")
    assert isinstance(folded, nn.Conv2d) and folded.bias is not None

    scale = np.ones(8) if norm.weight is None else norm.weight.detach().double().numpy()
    scale = scale / np.sqrt(norm.running_var.double().numpy() + eps)
    b = np.zeros(8) if convolution.bias is None else convolution.bias.detach().double().numpy()
    shift = np.zeros(8) if norm.bias is None else norm.bias.detach().double().numpy()
    weight = convolution.weight.detach().double().numpy() * scale[:, None, None, None]
    ulp = float(np.finfo(np.float32).eps)
    np.testing.assert_allclose(folded.weight.numpy(), weight, rtol=ulp)
    expected = shift + (b - norm.running_mean.double().numpy()) * scale
    np.testing.assert_allclose(folded.bias.numpy(), expected, rtol=ulp, atol=1e-12 * float(scale.max()))

    x = torch.randn(2, 4, 7, 5)
    with torch.inference_mode():
        exact = copy.deepcopy(net).double()(x.double())
        assert float((fused(x)[0].double() - exact).abs().max()) <= 1e-5 * float(exact.abs().max())


def test_normalisation_with_hook_is_not_folded() -> None:
    net = unlike_new(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)))
    net.get_submodule("1").register_forward_hook(lambda _module, _inputs, output: 2 * output + 1)
    check(net, "2", torch.randn(2, 3, 8, 8))


def test_hooked_network_is_unchanged() -> None:
    net = nn.Sequential(nn.Conv2d(1, 1, 1))
    assert fuse(net, precision="fp32") is net


def test_bf16_weights_agree_with_autocast() -> None:
    net = unlike_new(torchvision.models.resnet18(weights=None, num_classes=5))
    backbone = truncate(net, ["layer4.0.downsample.0"], keep_output=False)
    fused = backbone.fused("bf16")
    assert not [p for p in fused.parameters() if p.ndim == 4 and p.dtype != torch.bfloat16]
    x = torch.randn(2, 3, 64, 64)
    with torch.inference_mode():
        exact = backbone(x)[0][0]
        with torch.autocast("cpu", torch.bfloat16):
            cast, got = backbone(x)[0][0].float(), fused(x)[0][0].float()
    scale = float(exact.abs().max())
    assert float((got - exact).abs().max()) < 1.5 * float((cast - exact).abs().max()) < 0.03 * scale


@pytest.fixture(scope="module")
def psc(shipped_bundle: Path) -> PSC:
    return PSC.load(shipped_bundle, device="cpu")


def images(name: str) -> Tensor:
    return next(iter(opened(name).batches(100))).images


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize("onednn", [False, True])
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_bf16_decisions_match_fp32(psc: PSC, name: str, onednn: bool) -> None:
    half = psc.pipeline.with_backbone(psc.backbone.fused("bf16"))
    with torch.inference_mode(), torch.backends.mkldnn.flags(enabled=onednn):
        exact, got = (psc.outputs(p(images(name))) for p in (psc.pipeline, half))
    assert float((exact.probabilities - got.probabilities).abs().max()) < 0.05
    differ = exact.probabilities.argmax(1) != got.probabilities.argmax(1)
    first, second = exact.probabilities.topk(2).values.T
    assert not (differ & (first - second > 0.02)).any()
    if name == "mnist" or not onednn:  # How many guesses at shirts are ties, oneDNN's kernels decide by the processor.
        assert float(differ.double().mean()) <= 0.01
    flagged, got_flagged = (outputs["ood_p_value"] <= psc.policy.alpha for outputs in (exact, got))
    assert float((flagged != got_flagged).double().mean()) <= 0.01


LAST, FIRST = torch.channels_last, torch.contiguous_format
Wire = Callable[[Tensor], Tensor]


class Wired(nn.Module):
    """A convolution, and what a test makes of its output: (batch, 4, 6, 6) to (batch, 144)."""

    def __init__(self, wire: Wire | nn.Module) -> None:
        super().__init__()
        self.conv, self.wire, self.head = nn.Conv2d(3, 4, 3, padding=1), wire, nn.Linear(144, 5)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.wire(self.conv(x).relu()))
        return logits


def grouped(x: Tensor) -> Tensor:
    """Average each channel, as squeeze and excitation do, then mix the channels of two groups."""
    check = F.relu(x.mean((2, 3)).view(-1, 4), inplace=True).view(-1, 4, 1, 1)
    return (x * check).view(-1, 2, 2, 6, 6).transpose(1, 2).reshape(-1, 144)


def changed_copy(x: Tensor) -> Tensor:
    """The flattened map is a view of ``x`` only where ``x`` is contiguous."""
    return x.flatten(1).mul_(2) + x.permute(0, 1, 3, 2).flatten(1)


def written_into(x: Tensor) -> Tensor:
    flat = x.reshape(-1, 144)
    torch.mul(flat, 2, out=flat)
    return flat + x.permute(0, 1, 3, 2).flatten(1)


def wrapped(x: Tensor) -> Tensor:
    return x.view(len(x), -1)


fx.wrap("wrapped")


class Attending(nn.Module):
    """Attention over the positions of a map, without its own layout of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.attention, self.head = nn.Conv2d(3, 8, 3), nn.MultiheadAttention(8, 2), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.conv(x).flatten(2).permute(2, 0, 1)
        logits: Tensor = self.head(self.attention(tokens, tokens, tokens, need_weights=False)[0].mean(0))
        return logits


@torch.inference_mode()
def test_attention_over_a_map() -> None:
    torch.manual_seed(0)
    net, images = Attending().eval(), torch.randn(3, 3, 6, 6)
    fused = truncate(net, ["conv"], keep_output=True).fused("fp32")
    assert fused.memory_format == LAST
    torch.testing.assert_close(fused(images)[1], net(images))


CHANGED: dict[str, tuple[Wire | nn.Module, torch.memory_format]] = {
    "view by size": (lambda x: x.view(x.size(0), -1), LAST),
    "view as": (lambda x: x.view_as(x.new_zeros(x.shape).flatten(1)), LAST),
    "grouped": (grouped, LAST),
    "in place at the end": (lambda x: F.relu(x.view(-1, 144), inplace=True), LAST),
    "dropout": (nn.Sequential(nn.Flatten(), nn.Dropout(inplace=True)), LAST),
    "groups": (nn.Sequential(nn.Conv2d(4, 4, 3, padding="same", groups=2), nn.Flatten()), LAST),
    "reflected": (nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"), nn.Flatten()), LAST),
    "response norm": (nn.Sequential(nn.LocalResponseNorm(3), nn.Flatten()), LAST),
    "shuffles": (
        nn.Sequential(nn.PixelShuffle(2), nn.PixelUnshuffle(2), nn.ChannelShuffle(2), nn.Flatten()), LAST),
    "unflattened": (nn.Sequential(nn.Flatten(), nn.Unflatten(1, (12, 12)), nn.Flatten()), LAST),
    "changed copy": (changed_copy, FIRST),
    "written into": (written_into, FIRST),
    "by strides": (lambda x: torch.as_strided(x, (x.shape[0], 144), (144, 1)).clone(), FIRST),
    "by a keyword": (lambda x: x.view(size=(x.shape[0], 144)), FIRST),
    "bits": (lambda x: x.view(torch.int32).view(torch.float32).flatten(1), FIRST),
    "opaque": (lambda x: wrapped(x), FIRST),
}  # fmt: skip


@pytest.mark.parametrize("how", CHANGED)
@torch.inference_mode()
def test_the_values_stay(how: str) -> None:
    torch.manual_seed(0)
    wire, memory_format = CHANGED[how]
    net, images = Wired(wire).eval(), torch.randn(3, 3, 6, 6)
    expected = net(images)
    fused = truncate(net, ["conv"], keep_output=True).fused("fp32")
    assert fused.memory_format == memory_format
    for batch in (images, images[:1]):
        got = fused(batch)[1]
        assert got is not None
        torch.testing.assert_close(got, expected[: len(batch)], rtol=0, atol=1e-5)
