"""The part of a network up to the candidate layers, as a module that can be rebuilt from a bundle.

:func:`truncate` cuts the network.  A bundle stores :meth:`Backbone.spec` and the state dict, but no code and no weights
after the cut; :func:`rebuild_backbone` builds the network again, cuts it at the same place and loads the state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from psc_core.errors import BundleError, NetworkError
from psc_core.images.preprocess import Inputs, Preprocess
from psc_core.network.cut import HookedNetwork, HookPlan, cut_graph, plan_stop
from psc_core.network.fuse import fuse, images_format
from psc_core.network.layout import INPUT, Layout, canonical, layout_of
from psc_core.network.load import BUILT_BY_HAND, Recipe, bounded_size, build, load_weights, recipe_of
from psc_core.precision import Precision

FeatureStep = Callable[[Tensor], list[Tensor]]

FeaturesAndLogits = tuple[list[Float[Tensor, "batch _ _"]], Float[Tensor, "batch classes"] | None]
"""Canonical features (batch, channels, spatial) of each layer; logits."""

_CUT_ERROR = 1e-5
"""Maximum difference between the traced and the original network, relative to the largest value."""

_REPEATABLE = 1e-3
"""Maximum difference between two passes of one image, relative to the largest value; GPU kernels may differ."""


@dataclass(frozen=True)
class Cut:
    """A cut through a network: many threads may run a graph, which also compiles, but one at a time hooks."""

    layers: tuple[str, ...]
    layouts: tuple[Layout, ...]  # where each has its channels
    keep_output: bool  # whether the logits are kept too
    hooks: HookPlan | None  # None for a graph
    recipe: Recipe | None  # of the whole network; None for one built by hand


class Backbone(nn.Module):
    """A cut network: canonical features of each layer, and the logits where they are kept.

    ``body`` gives one tensor per layer, then the logits; images are converted to ``memory_format`` for it.
    """

    def __init__(self, body: nn.Module, cut: Cut, memory_format: torch.memory_format = torch.contiguous_format) -> None:
        super().__init__()
        self.body = body
        self.cut = cut
        self.memory_format = memory_format
        self.eval()

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers it is cut behind."""
        return self.cut.layers

    @property
    def keep_output(self) -> bool:
        """True if it gives the logits too."""
        return self.cut.keep_output

    @property
    def is_traced(self) -> bool:
        """True if it runs as a graph, which several threads may call and which can be captured, and not by hooks."""
        return self.cut.hooks is None

    @property
    def recipe(self) -> Recipe:
        """The recipe by which the whole network is built.

        Raises:
            NetworkError: The network did not come from ``load_network``.
        """
        if self.cut.recipe is None:
            raise NetworkError(BUILT_BY_HAND)
        return self.cut.recipe

    def forward(self, x: Inputs) -> FeaturesAndLogits:
        """Features of each layer, and the logits if ``keep_output``."""
        outputs = self.body(x.contiguous(memory_format=self.memory_format))
        features = []
        for name, layout, output in zip(self.layers, self.cut.layouts, outputs, strict=False):
            kind = layout.kind(output.shape)
            if kind is None:
                raise NetworkError(
                    f"expected a map, tokens or a vector after {name}, got the shape {tuple(output.shape)}"
                )
            features.append(canonical(output, kind))
        return features, outputs[-1] if self.keep_output else None

    def fused(self, precision: Precision) -> Backbone:
        """A faster copy (:func:`psc_core.network.fuse.fuse`) with the same features up to rounding; not for storing."""
        return Backbone(fuse(self.body, precision=precision), self.cut, images_format(self.body, precision))

    def spec(self) -> dict[str, Any]:
        """Return what :func:`rebuild_backbone` needs besides the state dict, as JSON types.

        Raises:
            NetworkError: The network did not come from ``load_network``.
        """
        hooks = self.cut.hooks
        return {
            "network": asdict(self.recipe),
            "layers": list(self.layers),
            "keep_output": self.keep_output,
            "hooks": None if hooks is None else {"stop": hooks.stop, "dropped": list(hooks.dropped)},
        }


def example_input(preprocess: Preprocess) -> Inputs:
    """A standardised image of noise, the same on every call, for use without real images."""
    return preprocess.standardise(preprocess.noise())


def cut_network(net: nn.Module, layers: Sequence[str], *, keep_output: bool, hooks: HookPlan | None = None) -> Backbone:
    """``net`` cut by its graph, or by ``hooks``; raises :class:`NetworkError`."""
    if hooks is None:
        body: nn.Module = cut_graph(net, layers, keep_output=keep_output)
    else:
        body = HookedNetwork(net, layers, hooks, keep_output=keep_output)
    layouts = tuple(layout_of(net, name) for name in layers)
    return Backbone(body, Cut(tuple(layers), layouts, keep_output, hooks, recipe_of(net)))


def truncate(net: nn.Module, layers: Sequence[str], *, keep_output: bool, example: Inputs | None = None) -> Backbone:
    """Cut ``net`` after ``layers``; the result shares its weights.

    Args:
        net: A classifier.
        layers: Layer names, see :func:`psc_core.network.layers.list_layers`.
        keep_output: Also return the logits, from the same forward pass.
        example: One input.  With it the traced network is checked against the original, and a network that cannot be
            traced is cut by hooks.

    Raises:
        NetworkError: Unknown layer, a network that cannot be traced without an example, or one with random outputs.
    """
    modules = dict(net.named_modules())
    for name in layers:
        if name.removesuffix(INPUT) not in modules or not name:
            near = ", ".join(get_close_matches(name, list(modules), n=3)) or "see list_layers"
            raise NetworkError(f"{type(net).__name__} has no layer {name!r}; similar names: {near}")
    if len(set(layers)) != len(layers) or not layers:
        raise NetworkError(f"expected at least one layer, each once, got {list(layers)}")
    if example is not None:
        example = example.to(next(net.parameters(), example).device)
    try:
        backbone = cut_network(net, layers, keep_output=keep_output)
        if example is None or _agrees(backbone, net, example):
            return backbone
        reason = "the traced graph gives other values"
    except NetworkError as error:
        reason = str(error)
    if example is None:
        raise NetworkError(f"{reason}; pass an example input to cut the network by hooks")
    hooks = HookPlan() if keep_output else plan_stop(net, layers, example)
    backbone = cut_network(net, layers, keep_output=keep_output, hooks=hooks)
    _check_repeatable(backbone, example)
    return backbone


@torch.inference_mode()
def _agrees(backbone: Backbone, net: nn.Module, example: Tensor) -> bool:
    """Return whether the traced and the original network give the same values on batches of one and of three images."""
    reference = HookedNetwork(net, backbone.layers, HookPlan(), keep_output=backbone.keep_output)
    for batch in (example, torch.cat([example, example.flip(-1), 0.5 * example])):
        try:
            traced = backbone.body(batch)
        except Exception:
            return False
        for got, expected in zip(traced, reference(batch), strict=True):
            scale = float(expected.abs().max()) if expected.numel() else 0.0
            if got.shape != expected.shape or not torch.allclose(got, expected, rtol=0, atol=_CUT_ERROR * scale):
                return False
    return True


@torch.inference_mode()
def _check_repeatable(backbone: Backbone, example: Tensor) -> None:
    """Reject a network with random outputs; one that agrees with its trace has passed this test already."""
    for first, second in zip(backbone.body(example), backbone.body(example), strict=True):
        scale = float(first.abs().max()) if first.numel() else 0.0
        apart = float((first - second).abs().max()) if scale else 0.0
        if apart > _REPEATABLE * scale:
            raise NetworkError(
                "expected the same output for the same image, two passes differ by "
                f"{apart / scale:.1%}; is dropout always on? F.dropout needs training=self.training"
            )


def rebuild_backbone(
    spec: Mapping[str, Any], state: Mapping[str, Tensor], allow_factories: Collection[str] = ()
) -> Backbone:
    """Restore a backbone from :meth:`Backbone.spec` and its state dict; global random state is left alone.

    Raises:
        BundleError: The state has other dtypes than the network.
        NetworkError: The network comes from a factory that is not on the allow-list, cannot be built or cut, is too
            large, or the state does not fit it.
    """
    recipe = Recipe(**spec["network"])
    if recipe.is_factory and recipe.spec not in allow_factories:
        raise NetworkError(
            f"the factory {recipe.spec} is not on the allow-list {sorted(allow_factories)}; importing it runs its "
            f"code, so allow it only if you trust it: --allow-factories {recipe.spec}, or allow_factories in Python"
        )
    with torch.random.fork_rng(devices=[]), torch.no_grad(), bounded_size(recipe):
        net = build(recipe)
    hooks = spec["hooks"] and HookPlan(spec["hooks"]["stop"], tuple(spec["hooks"]["dropped"]))
    backbone = cut_network(net, spec["layers"], keep_output=spec["keep_output"], hooks=hooks)
    for key, tensor in backbone.state_dict().items():
        if key in state and state[key].dtype != tensor.dtype:
            raise BundleError(f"expected {key} of type {tensor.dtype}, got {state[key].dtype}; fit the bundle again")
    load_weights(backbone, state, num_classes=recipe.num_classes, origin="the bundle's backbone")
    return backbone


def feature_step(backbone: Backbone, precision: Precision | None = None) -> FeatureStep:
    """A function of images that returns the features of ``backbone`` without logits.

    With a ``precision`` the network is fused for it, as in serving; as it is, it is as fast if every layer is wanted.
    """
    running = backbone if precision is None else backbone.fused(precision)
    return lambda images: running(images)[0]
