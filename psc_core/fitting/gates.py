"""Choose the gates of a model: which early layer tells strange texture, on images made from the validation images.

Which gates there are is a rule, not a choice: ``kind`` always, ``texture`` wherever a layer lies before the candidate,
and ``confidence`` unless images are ambiguous by nature, that is, some training or validation image has labels of
several classes.  There a high entropy is no reason to call an image out of distribution.  A regression has no entropy
and no such gate.  Choosing the gates on made-up
images too was tried: it dropped gates that real images need, because made-up far images have stranger textures.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from psc_core.compute.distributed import Reducer
from psc_core.compute.passes import Compute
from psc_core.data.dataset import ImageDataset
from psc_core.density import Density
from psc_core.density.fit.density import fit_density
from psc_core.errors import NetworkError
from psc_core.fitting.options import FitOptions
from psc_core.fitting.scorer import cut, store_features
from psc_core.gates.fit.choice import GateChoice
from psc_core.gates.fit.gates import fit_gates
from psc_core.gates.fit.made_up import REAL, is_ambiguous, made_up_batches
from psc_core.gates.gates import CONFIDENCE, KIND, TEXTURE
from psc_core.metrics.ranking import auroc
from psc_core.model.pipeline import Scorer, average_positions
from psc_core.network.backbone import example_input, feature_step
from psc_core.network.layers import LayerInfo, list_layers

DEPTHS: Final = (1 / 3, 1 / 2, 2 / 3)
"""Of the way to the candidate, where the early layers lie that are compared."""

TEXTURE_DENSITY: Final = "gda"
"""Kind of the density of an early layer: the length of features tells textures apart."""


class Texture(NamedTuple):
    """An early layer and the density of its features, averaged over positions."""

    layer: str
    density: Density


class ChosenGates(NamedTuple):
    """The gates of a model."""

    names: tuple[str, ...]  # some of :data:`psc_core.gates.gates.GATES`
    texture: Texture | None
    choice: GateChoice


def choose_gates(
    net: nn.Module,
    layers: Sequence[str],
    scorer: Scorer,
    train: ImageDataset,
    val: ImageDataset,
    selection: ImageDataset,
    options: FitOptions,
) -> ChosenGates:
    """Fit a density to each of a few early layers on ``train`` and choose one on made-up images.

    Args:
        net: The whole network, on the device.
        layers: The candidate layer(s).
        scorer: Fitted at the candidate.
        train: Training images.
        val: Validation images, which are looked through for images of several labels.
        selection: Half of them, which the choice is made on.
        options: Shared options.

    Raises:
        FitError: Features or readings that cannot be fitted.
    """
    compute = options.compute()
    ambiguous = is_ambiguous(train) or is_ambiguous(val)
    early = early_layers(net, layers, example_input(train.preprocess).to(compute.device))
    textures = fit_textures(net, early, train, compute, options.reducer) if early else {}
    readings = made_up_readings(net, scorer, textures, selection, compute, mixed=not ambiguous, seed=options.seed)
    entropies = readings[REAL].get(CONFIDENCE)
    informative = entropies is not None and not ambiguous and bool(entropies.min() < entropies.max())
    names: tuple[str, ...] = (KIND, CONFIDENCE) if informative else (KIND,)
    choice = compare(readings, names, tuple(textures), reason=_reason(train, ambiguous))
    if not textures:
        return ChosenGates(names, None, choice)
    layer = {option_name(layer, names): layer for layer in textures}[choice.chosen]
    return ChosenGates((TEXTURE, *names), Texture(layer, textures[layer]), choice)


def early_layers(net: nn.Module, layers: Sequence[str], example: Tensor) -> list[str]:
    """Blocks, or operations of a network without blocks, at :data:`DEPTHS` of the way to the first of ``layers``."""
    order = {layer.name: layer.index for layer in list_layers(net, example, granularity="all")}
    end = min(order.get(name, len(order)) for name in layers)
    for granularity in ("blocks", "operations"):
        try:
            listed: list[LayerInfo] = list_layers(net, example, granularity=granularity)
        except NetworkError:  # It has none of them.
            continue
        before = [layer.name for layer in listed if order.get(layer.name, end) < end]
        if before:
            return list(dict.fromkeys(before[max(0, round(depth * len(before)) - 1)] for depth in DEPTHS))
    return []


def fit_textures(
    net: nn.Module, layers: Sequence[str], train: ImageDataset, compute: Compute, reducer: Reducer
) -> dict[str, Density]:
    """A density of the pooled features of each layer, from one pass over ``train``."""
    backbone = cut(net, layers, train, compute, keep_output=False)
    with torch.inference_mode():
        features = backbone(example_input(train.preprocess).to(compute.device))[0]
    widths = [layer.shape[1] for layer in features]
    features_of = feature_step(backbone, compute.precision)
    fitted: dict[str, Density] = {}
    with tempfile.TemporaryDirectory(prefix="psc-fit-") as scratch:
        kept, labels, shown = store_features(
            lambda images: average_positions(features_of(images)),
            sum(widths),
            train,
            compute,
            Path(scratch) / "early",
            reducer,
        )
        for layer, width, end in zip(layers, widths, accumulate(widths), strict=True):
            fitted[layer] = fit_density(
                kept.map(partial(_columns, slice(end - width, end)), width, kept.dtype),
                labels,
                num_classes=len(train.classes),
                kind=TEXTURE_DENSITY,
                class_names=train.classes,
                images=shown,
            ).to(compute.device)
    return fitted


Readings = Mapping[str, Tensor]
"""Of n images, (n,) by gate; those of early layers by layer."""


@torch.inference_mode()
def made_up_readings(
    net: nn.Module,
    scorer: Scorer,
    textures: Mapping[str, Density],
    selection: ImageDataset,
    compute: Compute,
    *,
    mixed: bool,
    seed: int,
) -> dict[str, Readings]:
    """Readings of real images of ``selection``, and of each kind of image made from them."""
    early = None
    if textures:
        early = feature_step(cut(net, tuple(textures), selection, compute, keep_output=False), compute.precision)
    autocast = torch.autocast(compute.device.type, torch.bfloat16, enabled=compute.precision == "bf16")
    parts: dict[str, list[Readings]] = {}
    for made in made_up_batches(selection, compute, "made-up images", mixed=mixed, seed=seed):
        for kind, images in made.items():
            scores = scorer(images).scores
            read = {KIND: -scores["log_density"]}
            if "predictive_entropy" in scores:
                read[CONFIDENCE] = scores["predictive_entropy"]
            if early is not None:
                with autocast:
                    features = early(scorer.standardise(images))
                for (layer, density), of_layer in zip(textures.items(), features, strict=True):
                    read[layer] = -density(average_positions([of_layer])).log_density
            parts.setdefault(kind, []).append({name: values.cpu() for name, values in read.items()})
    return {kind: {name: torch.cat([part[name] for part in of_kind]) for name in of_kind[0]}
            for kind, of_kind in parts.items()}  # fmt: skip


def compare(
    readings: Mapping[str, Readings], names: Sequence[str], layers: Sequence[str], *, reason: str
) -> GateChoice:
    """AUROC of all gates with each early layer, and of less than that for comparison, on each kind of made-up image."""
    real, kinds = readings[REAL], [kind for kind in readings if kind != REAL]
    full = {option_name(layer, names): [layer, *names] for layer in layers} or {option_name(None, names): list(names)}
    fewer = {option_name(None, names): list(names), **{name: [name] for name in names}}
    fewer |= {option_name(layer, ()): [layer] for layer in layers}
    aurocs = {}
    for option, columns in (fewer | full).items():
        inside = torch.stack([real[column] for column in columns], dim=1)
        gates = fit_gates(_as_gates(columns, layers), inside, inside)
        scores = {kind: gates.score(torch.stack([readings[kind][name] for name in columns], dim=1)) for kind in kinds}
        aurocs[option] = {kind: auroc(gates.score(inside), of_kind) for kind, of_kind in scores.items()}
    return GateChoice(aurocs, tuple(full), reason)


def _reason(train: ImageDataset, ambiguous: bool) -> str:
    if train.target is not None:
        return "a regression has no class probabilities, so confidence is no gate"
    if ambiguous:
        return "some images have several labels, so confidence is no gate and mixed images are none of the kinds"
    return "no image has several labels, so confidence is a gate"


def option_name(layer: str | None, names: Sequence[str]) -> str:
    """What an option is called in tables, ``texture[layer1] + kind``."""
    return " + ".join([*([] if layer is None else [f"{TEXTURE}[{layer}]"]), *names])


def _columns(columns: slice, part: Tensor) -> Tensor:
    return part[:, columns]


def _as_gates(columns: Sequence[str], layers: Sequence[str]) -> list[str]:
    return [TEXTURE if column in layers else column for column in columns]
