"""The networks that the device step is measured on, and their alternatives to PSC.

Weights, projection, density and head are random, in the shapes of a real fit, because time does not depend on their
values; only the ResNet-18 at 28 pixels is the shipped bundle.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.runs import BUNDLE
from psc_core.density import ClasswiseDensity, Density, TiedDensity, restore_density
from psc_core.heads.base import entropy
from psc_core.heads.laplace import LaplaceHead
from psc_core.images.preprocess import PRESETS, Preprocess
from psc_core.model import PSC
from psc_core.network.cut import cut_graph, fuse, truncate
from psc_core.network.layers import list_layers
from psc_core.network.load import load_network
from psc_core.pipeline import Pipeline, Scorer
from psc_core.projection import Projection
from psc_core.settings import Precision

MEMBERS = 5  # The number of networks in the ensemble.
SAMPLES = 10  # The number of passes of Monte-Carlo dropout.


@dataclass(frozen=True)
class Subject:
    name: str
    spec: str
    model_args: tuple[tuple[str, object], ...]
    classes: int
    size: int  # The width and height of the images, pixels.
    layer: str  # The chosen: the shipped bundle's, else the first operation of the last stage, the same place.
    sizes: tuple[int, int, int]  # (c_proj, d_proj, components of the density).
    stages: tuple[str, ...]  # The modules followed by Monte-Carlo dropout.
    buckets: tuple[int, ...] = (1, 8, 32)  # The batch sizes on a CPU.
    shipped: bool = False  # Whether to measure the bundle in ``artifacts``.

    @property
    def preprocess(self) -> Preprocess:
        return PRESETS["mnist" if self.shipped else "imagenet" if self.size == 224 else "cifar10"]

    def network(self) -> nn.Module:
        torch.manual_seed(0)
        return load_network(self.spec, num_classes=self.classes, model_args=dict(self.model_args))

    @property
    def many_classes(self) -> bool:
        """Return whether the covariances are so many that the tied density is measured too."""
        return self.classes >= 1000

    def pipeline(self, net: nn.Module, precision: Precision, device: torch.device, *, density: str = "gda") -> Pipeline:
        """Return the PSC of ``net``, or the shipped one, on the device."""
        if self.shipped:
            psc = PSC.load(BUNDLE, device=device)
            return psc.pipeline.with_backbone(psc.backbone.fused(precision))
        trial = self.preprocess.standardise(torch.zeros(1, 3, self.size, self.size, dtype=torch.uint8))
        channels, positions = next(
            layer.shape for layer in list_layers(net, trial, granularity="all") if layer.name == self.layer
        )
        c_proj, d_proj, kept = self.sizes
        dim = c_proj * d_proj
        scorer = Scorer(
            self.preprocess,
            truncate(copy.deepcopy(net), [self.layer], keep_output=False).to(device).fused(precision),
            random_projection(channels, positions, c_proj, d_proj).to(device),
            random_density(dim, kept, self.classes, kind=density).to(device),
            random_head(dim, self.classes).to(device),
        )
        return Pipeline(scorer, torch.randn(4000).sort().values)


_RESNET = ("layer1", "layer2", "layer3", "layer4")

SUBJECTS = (  # The subjects: the families that the paper uses, on small and on large images.
    Subject("ResNet-18, 28", "torchvision:resnet18", (("stem", "small"), ("in_channels", 1)), 10, 28,
            "layer4.0.downsample.0", (16, 11, 134), _RESNET, shipped=True),
    Subject("ResNet-50, 32", "torchvision:resnet50", (("stem", "small"),), 10, 32,
            "layer4.0.downsample.0", (16, 11, 134), _RESNET),
    Subject("VGG-16, 32", "torchvision:vgg16_bn", (("stem", "small"),), 10, 32,
            "features.34", (16, 4, 50), ("features.6", "features.13", "features.23", "features.33")),
    Subject("WRN-28-10, 32", "benchmarks.networks:wide_resnet28_10", (), 10, 32,
            "layer3.0.shortcut", (16, 11, 134), _RESNET[:3], buckets=(1, 8)),
    Subject("ResNet-18, 224", "torchvision:resnet18", (), 1000, 224,
            "layer4.0.downsample.0", (32, 8, 195), _RESNET),
    Subject("ResNet-50, 224", "torchvision:resnet50", (), 1000, 224,
            "layer4.0.downsample.0", (32, 8, 195), _RESNET, buckets=(1, 8)),
    Subject("VGG-16, 224", "torchvision:vgg16", (), 1000, 224,
            "features.24", (32, 8, 195), ("features.4", "features.9", "features.16", "features.23"), buckets=(1, 8)),
)  # fmt: skip


# -- peers of a step ------------------------------------------------------------------------------------------


class Plain(nn.Module):
    """Whole networks as a classifier without PSC, from uint8 images to class probabilities."""

    is_traced = True
    scale: Tensor
    shift: Tensor

    def __init__(self, networks: list[nn.Module], preprocess: Preprocess, precision: str, *, passes: int = 1) -> None:
        super().__init__()
        scale, shift = preprocess.scale_and_shift()
        self.register_buffer("scale", scale)
        self.register_buffer("shift", shift)
        self.networks = nn.ModuleList(networks)
        self.dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        self.passes = passes
        self.requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        """Return probabilities (B, K); for several runs (B, K + 1), the entropy of the mean first."""
        x = images.float().mul_(self.scale).add_(self.shift).to(self.dtype).contiguous(memory_format=_format(self))
        outputs = [_logits(net(x)).float().softmax(1) for net in self.networks for _ in range(self.passes)]
        if len(outputs) == 1:
            return outputs[0]
        mean = torch.stack(outputs).mean(0)
        return torch.cat([entropy(mean)[:, None], mean], dim=1)

    def explain(self, images: Tensor) -> dict[str, Tensor]:
        return {}


def _logits(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    return output if isinstance(output, Tensor) else output[-1]


def _format(plain: Plain) -> torch.memory_format:
    """Return the memory format of the PSC's backbone on that device."""
    use = plain.scale.device.type == "cpu" or plain.dtype == torch.bfloat16
    return torch.channels_last if use else torch.contiguous_format


def unfused(net: nn.Module, precision: str, device: torch.device) -> nn.Module:
    """Return a copy of the network in the precision and memory format of the PSC."""
    twin = copy.deepcopy(net).to(device)
    if precision == "bf16":
        twin = twin.to(torch.bfloat16)
    use = device.type == "cpu" or precision == "bf16"
    return twin.to(memory_format=torch.channels_last if use else torch.contiguous_format).eval()


def fused(net: nn.Module, layer: str, precision: Precision, device: torch.device) -> nn.Module:
    """Return a copy of the whole network, fused like the PSC's backbone."""
    root = copy.deepcopy(net).to(device)
    graph = cut_graph(root, [layer], keep_output=True)
    output = graph.graph.find_nodes(op="output")[0]
    output.args = ((output.args[0][-1],),)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    twin = fuse(graph, precision=precision)
    return twin.to(torch.bfloat16) if precision == "bf16" else twin


def with_dropout(net: nn.Module, stages: tuple[str, ...]) -> nn.Module:
    """Return a copy of ``net`` that drops a tenth of the activations after each stage."""
    twin = copy.deepcopy(net)
    for name in stages:
        parent, _, attribute = name.rpartition(".")
        module = twin.get_submodule(parent)
        setattr(module, attribute, nn.Sequential(module.get_submodule(attribute), nn.Dropout(0.1)))
    return twin


def enable_dropout(net: nn.Module) -> nn.Module:
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.train()
    return net


# -- parts of the right shapes --------------------------------------------------------------------------------


def random_projection(channels: int, positions: int, c_proj: int, d_proj: int) -> Projection:
    """Make orthonormal factors; a vector layer is read as one channel with ``channels`` positions."""
    if positions == 1:
        channels, positions = 1, channels
    d_proj = min(d_proj, positions)
    return Projection.from_moments(
        [positions],
        torch.randn(channels, positions),
        torch.ones(channels, positions),
        torch.linalg.qr(torch.randn(channels, c_proj)).Q,
        torch.linalg.qr(torch.randn(positions, d_proj)).Q,
        torch.zeros(c_proj * d_proj),
        torch.ones(c_proj * d_proj),
    )


def random_density(dim: int, kept: int, classes: int, *, kind: str = "gda") -> Density:
    """Make unit covariances around random means."""
    means = torch.randn(classes, kept)
    family: Callable[..., Density] = ClasswiseDensity if kind == "gda" else TiedDensity
    tensors = {
        "mean": torch.zeros(dim),
        "basis": torch.linalg.qr(torch.randn(dim, kept)).Q,
        "constants": torch.full((classes,), -float(kept)),
    }
    whiteners = {"whiteners": torch.eye(kept).repeat(classes, 1, 1)} if kind == "gda" else {}
    model = family({**tensors, "centres": means, **whiteners}, record={})
    return restore_density(model.config(), model.state_dict())


def random_head(dim: int, classes: int) -> LaplaceHead:
    """Make random weights, orthonormal eigenvectors and a prior precision of 1."""
    tensors = {
        "center": torch.zeros(dim),
        "inverse_scale": torch.ones(dim),
        "weight": torch.randn(classes, dim) / dim**0.5,
        "bias": torch.zeros(classes),
        "input_vectors": torch.linalg.qr(torch.randn(dim, dim)).Q,
        "output_vectors": torch.linalg.qr(torch.randn(classes, classes)).Q,
        "weight_spectrum": torch.rand(dim, classes),
        "bias_spectrum": torch.rand(classes),
    }
    return LaplaceHead(tensors, record={})
