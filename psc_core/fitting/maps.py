"""Choose the layer that the map of a model reads, and fit the map's grey levels.

The input is the moments of a few early layers over the training images, and the selection split; the output is
:class:`ChosenMap`, the map of one of these layers.

Deep layers detect objects better, early ones surfaces, and a map is as fine as its layer.  So each layer's map gives
distances (B, rows, columns) to the images of the selection split, once as they are and once with something pasted into
them (:mod:`psc_core.maps.fit.pasted`).  Layers are compared by AUROC, of pasted against other points of the same
images, at :data:`POINTS` × :data:`POINTS` points whatever a layer's grid.  The layer with the least regret over the
patches is taken, as in choosing the gates (:func:`psc_core.gates.fit.choice.regret`).
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
from psc_core.gates.fit.choice import KINDS_KEY, regret
from psc_core.images.preprocess import Pixels
from psc_core.maps.fit.gaussian import fit_positions, with_levels
from psc_core.maps.fit.moments import PositionMoments
from psc_core.maps.fit.pasted import PATCHES, paste
from psc_core.maps.layer_map import LayerMap
from psc_core.metrics.ranking import auroc

IMAGES: Final = 500
"""Maximum number of images of the selection split that are used."""

POINTS: Final = 32
"""Number of points in each direction at which maps are compared."""


@dataclass(frozen=True)
class MapChoice:
    """The comparison that chooses the layer of the map."""

    aurocs: Mapping[str, Mapping[str, float]]  # by layer, then by patch

    @property
    def chosen(self) -> str:
        """The layer with the least regret, on a tie the earliest."""
        return min(self.aurocs, key=partial(regret, self.aurocs))

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as a manifest records it, in JSON types."""
        layers = [{"layer": layer, "auroc": list(of.values())} for layer, of in self.aurocs.items()]
        return {"chosen": self.chosen, KINDS_KEY: list(PATCHES), "layers": layers}


@dataclass(frozen=True)
class ChosenMap:
    """The map of a model, and the comparison that chose it."""

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
    """Return the map of the early layer that tells patches apart best, or None where no layer can have a map.

    Args:
        features_of: A function from pixels on the device to the canonical features of each layer.
        moments: The moments of each early layer that has a grid, over the training images.
        selection: In-distribution images that the moments have not seen.
        compute: Device, batch size, processes.
        seed: Draws the images and what is pasted into them.
    """
    maps: dict[str, LayerMap] = {}
    for layer, sums in moments.items():
        found = sums.finish(compute.reducer.sum_)  # In every process, whether or not a density can be fitted.
        with suppress(FitError):  # All positions look the same there.
            maps[layer] = LayerMap(layer, sums.grid, fit_positions(found))
    if not maps:
        return None
    real: dict[str, list[Tensor]] = {layer: [] for layer in maps}
    pasted: dict[str, dict[str, list[Tensor]]] = {layer: {patch: [] for patch in PATCHES} for layer in maps}
    masks: dict[str, list[Tensor]] = {patch: [] for patch in PATCHES}
    generator = torch.Generator().manual_seed(seed)
    for batch in track_images(drawn(selection, IMAGES, seed), compute, "map: pasted images"):
        pixels = selection.preprocess.to_pixels(batch.images)
        for layer, distances in _distances(maps, features_of(pixels.to(compute.device))).items():
            real[layer].append(distances.flatten())
        for patch in PATCHES:
            images, mask = paste(pixels, patch, generator)
            masks[patch].append(_points(mask.float(), "nearest") > 0)
            for layer, distances in _distances(maps, features_of(images.to(compute.device))).items():
                pasted[layer][patch].append(_points(distances, "bilinear"))
    aurocs = {
        layer: {patch: _auroc(torch.cat(of_layer[patch]), torch.cat(masks[patch])) for patch in PATCHES}
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
