"""Choose the gates of a model, and the early layer that the gate ``texture`` reads.

The input is a scorer, the densities of a few early layers, and the images; the output is :class:`ChosenGates`.

Which gates a model has follows from a rule: always ``kind``; ``texture`` wherever a layer lies before the candidate;
and ``confidence`` unless images are ambiguous by nature, that is, unless some training or validation image has labels
of several classes.  For such images low confidence is no reason to call them out of distribution.  A task without
energies has no such gate (:meth:`.TaskFit.confidence_gate`).  Choosing the gates by made-up images as well was tried,
and dropped gates that real images need, because made-up images far from the data have more anomalous textures.

Which early layer ``texture`` reads is chosen by AUROC: readings (n,) of the n real images of the selection split
against readings of the images made from them (:mod:`psc_core.gates.fit.made_up`), for each of the early layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from psc_core.compute.passes import Compute
from psc_core.density.base import Density
from psc_core.errors import NetworkError
from psc_core.fitting.data import FitData
from psc_core.fitting.features import Layers
from psc_core.gates.combined import CONFIDENCE, DENSITY, TEXTURE, readings_of
from psc_core.gates.fit.choice import GateChoice
from psc_core.gates.fit.combined import fit_gates, vary
from psc_core.gates.fit.made_up import REAL, by_transform, made_up_batches
from psc_core.images.preprocess import Pixels
from psc_core.metrics.ranking import auroc
from psc_core.model.pipeline import Scorer, average_positions
from psc_core.network.layers import LayerInfo, list_layers

DEPTHS: Final = (1 / 3, 1 / 2, 2 / 3)
"""The fractions of the way to the candidate at which early layers are compared."""

TEXTURE_DENSITY: Final = "gda"
"""The density of an early layer; not one of unit length, for the length of features tells textures apart."""


class Texture(NamedTuple):
    """An early layer, and the density of its features averaged over positions."""

    layer: str
    density: Density


class ChosenGates(NamedTuple):
    """The gates of a model."""

    names: tuple[str, ...]  # some of :data:`psc_core.gates.combined.GATES`
    texture: Texture | None  # None where no layer lies before the candidate
    choice: GateChoice  # the comparison that chose it


def choose_gates(
    scorer: Scorer, layers: Layers, textures: Mapping[str, Density], data: FitData, compute: Compute
) -> ChosenGates:
    """Return the gates by the rule, and the early layer that tells made-up images apart best.

    Args:
        scorer: The scorer of the model, still without a texture.
        layers: The layers that its network is cut behind.
        textures: The density of each early layer.
        data: The images.
        compute: Device, precision, batch size.

    Raises:
        FitError: If gates cannot be fitted to the readings.
    """
    reads_confidence, reason = data.task_fit.confidence_gate(ambiguous=data.is_ambiguous)
    names: tuple[str, ...] = (DENSITY, CONFIDENCE) if reads_confidence else (DENSITY,)
    readings = made_up_readings(scorer, layers, textures, names, data, compute)
    energies = readings[REAL].get(CONFIDENCE)
    if energies is not None and not vary(energies):
        names = (DENSITY,)
    choice = compare(readings, names, tuple(textures), reason=reason)
    if not textures:
        return ChosenGates(names, None, choice)
    layer = {option_name(layer, names): layer for layer in textures}[choice.chosen]
    return ChosenGates((TEXTURE, *names), Texture(layer, textures[layer]), choice)


def early_layers(net: nn.Module, layers: Sequence[str], trial: Tensor) -> list[str]:
    """Return a few layers before the first of ``layers``, at :data:`DEPTHS` of the way to it.

    They are blocks, or operations of a network that has no blocks before it.
    """
    order = {layer.name: layer.index for layer in list_layers(net, trial, granularity="all")}
    end = min(order.get(name, len(order)) for name in layers)
    for granularity in ("blocks", "operations"):
        try:
            listed: list[LayerInfo] = list_layers(net, trial, granularity=granularity)
        except NetworkError:  # The network has no blocks there.
            continue
        before = [layer.name for layer in listed if order.get(layer.name, end) < end]
        if before:
            return list(dict.fromkeys(before[max(0, round(depth * len(before)) - 1)] for depth in DEPTHS))
    return []


Readings = Mapping[str, Tensor]
"""The readings of n images, (n,) by gate; those of early layers by layer."""


def made_up_readings(
    scorer: Scorer,
    layers: Layers,
    textures: Mapping[str, Density],
    names: Sequence[str],
    data: FitData,
    compute: Compute,
) -> dict[str, dict[str, Tensor]]:
    """Return readings by transform, those of real images under :data:`.REAL`, then by gate or early layer."""

    def read(images: Pixels) -> dict[str, Tensor]:
        features, output = scorer.features(scorer.standardise(images))
        scores = scorer.score(scorer.embedding(features, output)).scores
        readings = dict(zip(names, readings_of(names, scores).unbind(1), strict=True))
        for (layer, density), early in zip(textures.items(), layers.of(features, layers.texture), strict=True):
            readings[layer] = -density(average_positions(early)).log_density
        return readings

    mixed = not data.is_ambiguous
    return by_transform(made_up_batches(data.selection, compute, "made-up images", mixed=mixed, seed=data.seed), read)


def compare(
    readings: Mapping[str, Readings], names: Sequence[str], layers: Sequence[str], *, reason: str
) -> GateChoice:
    """Compare all gates with each early layer, and fewer gates for the record, by AUROC on each transform.

    Args:
        readings: The readings, as :func:`made_up_readings` returns them.
        names: The gates besides ``texture``.
        layers: The early layers.
        reason: Why the gate ``confidence`` is one of them or not, a sentence.
    """
    real, transforms = readings[REAL], [name for name in readings if name != REAL]
    full = {option_name(layer, names): [layer, *names] for layer in layers} or {option_name(None, names): list(names)}
    fewer = {option_name(None, names): list(names), **{name: [name] for name in names}}
    fewer |= {option_name(layer, ()): [layer] for layer in layers}
    aurocs = {}
    for option, columns in (fewer | full).items():
        inside = torch.stack([real[column] for column in columns], dim=1)
        gates = fit_gates(_as_gates(columns, layers), inside, inside)
        made_up = {each: torch.stack([readings[each][name] for name in columns], dim=1) for each in transforms}
        aurocs[option] = {each: auroc(gates.score(inside), gates.score(values)) for each, values in made_up.items()}
    return GateChoice(aurocs, tuple(full), reason)


def option_name(layer: str | None, names: Sequence[str]) -> str:
    """Return the name of an option in tables, such as ``texture[layer1] + kind``."""
    return " + ".join([*([] if layer is None else [f"{TEXTURE}[{layer}]"]), *names])


def _as_gates(columns: Sequence[str], layers: Sequence[str]) -> list[str]:
    return [TEXTURE if column in layers else column for column in columns]
