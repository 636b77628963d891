"""Choose the layer that the map of a model reads, on images made from the selection split, and fit its grey levels.

Deep layers tell objects better, early ones surfaces, and a map is as fine as its layer.  So the early layers that the
gate ``texture`` is chosen from are compared by how well their distances tell what was pasted into an image
(:mod:`psc_core.maps.fit.pasted`) from the rest of it: by the AUROC over points of the images.  The layer with the
smallest largest distance from the best AUROC of each kind is taken, as the gates are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from psc_core.compute.passes import Compute, track_images
from psc_core.data.dataset import ImageDataset, drawn
from psc_core.errors import FitError
from psc_core.gates.fit.choice import regret
from psc_core.images.preprocess import Pixels
from psc_core.maps.fit.gaussian import fit_positions, with_levels
from psc_core.maps.fit.moments import PositionMoments
from psc_core.maps.fit.pasted import KINDS, paste
from psc_core.maps.layer_map import LayerMap
from psc_core.metrics.ranking import auroc

IMAGES: Final = 500
"""Maximum number of images that something is pasted into."""

POINTS: Final = 32
"""Points of an image in each direction at which maps are compared, whatever their layer's grid."""


@dataclass(frozen=True)
class MapChoice:
    """The AUROC of each layer on pasted patches, and the chosen layer."""

    aurocs: Mapping[str, Mapping[str, float]]  # by layer, then by kind

    @property
    def chosen(self) -> str:
        """The layer with the least regret, of equals the earliest."""
        return min(self.aurocs, key=partial(regret, self.aurocs))

    def to_json(self) -> dict[str, Any]:
        """Return the JSON types of the report in a manifest."""
        layers = [{"layer": layer, "auroc": list(of.values())} for layer, of in self.aurocs.items()]
        return {"chosen": self.chosen, "kinds": list(KINDS), "layers": layers}


@dataclass(frozen=True)
class ChosenMap:
    """The map of a model and what chose it."""

    map: LayerMap
    choice: MapChoice


@torch.inference_mode()
def choose_map(
    features_of: Callable[[Pixels], Mapping[str, Tensor]],
    moments: Mapping[str, PositionMoments],
    selection: ImageDataset,
    compute: Compute,
    seed: int,
) -> ChosenMap | None:
    """Choose one of a few early layers and fit its map; None where none of them has one.

    Args:
        features_of: Canonical features of images on the device, by layer.
        moments: Of the early layers that have a grid, over the training images.
        selection: In-distribution images that the moments have not seen.
        compute: Device, batch size, processes.
        seed: Draws images and what is pasted.
    """
    maps: dict[str, LayerMap] = {}
    for layer, sums in moments.items():
        found = sums.moments(compute.reducer.sum_)  # In every process, whether or not a density can be fitted.
        with suppress(FitError):  # All positions look the same there.
            maps[layer] = LayerMap(layer, sums.grid, fit_positions(found))
    if not maps:
        return None
    real: dict[str, list[Tensor]] = {layer: [] for layer in maps}
    pasted: dict[str, dict[str, list[Tensor]]] = {layer: {kind: [] for kind in KINDS} for layer in maps}
    masks: dict[str, list[Tensor]] = {kind: [] for kind in KINDS}
    generator = torch.Generator().manual_seed(seed)
    for batch in track_images(drawn(selection, IMAGES, seed), compute, "map: pasted images"):
        pixels = selection.preprocess.to_pixels(batch.images)
        for layer, distances in _distances(maps, features_of(pixels.to(compute.device))).items():
            real[layer].append(distances.flatten())
        for kind in KINDS:
            images, mask = paste(pixels, kind, generator)
            masks[kind].append(_points(mask.float(), "nearest") > 0)
            for layer, distances in _distances(maps, features_of(images.to(compute.device))).items():
                pasted[layer][kind].append(_points(distances, "bilinear"))
    aurocs = {
        layer: {kind: _auroc(torch.cat(of_layer[kind]), torch.cat(masks[kind])) for kind in KINDS}
        for layer, of_layer in pasted.items()
    }
    names, choice = list(maps), MapChoice(aurocs)
    chosen = maps[names[compute.reducer.first(names.index(choice.chosen))]]
    density = with_levels(chosen.density, torch.cat(real[chosen.layer]))
    return ChosenMap(LayerMap(chosen.layer, chosen.grid, density), choice)


def _distances(
    maps: Mapping[str, LayerMap], features: Mapping[str, Tensor]
) -> dict[str, Float[Tensor, "batch rows columns"]]:
    return {layer: of.distances(features[layer]).cpu() for layer, of in maps.items()}


def _points(maps: Float[Tensor, "batch _ _"], mode: str) -> Float[Tensor, "batch points"]:
    return functional.interpolate(maps[:, None], (POINTS, POINTS), mode=mode).flatten(1)


def _auroc(distances: Float[Tensor, "n points"], pasted: Bool[Tensor, "n points"]) -> float:
    return auroc(distances[~pasted], distances[pasted])
