"""Map how unusual each position of a layer is: the distances of one Gaussian over positions, as grey levels.

With the features ``x_p`` of an image at position p, a vector of C channels, and the mean ``μ`` and covariance ``Σ`` of
such vectors over images *and* positions,

    ``q_p = ‖ (x_p − μ) A ‖²``,    ``d_p`` = the mean of q over p and its neighbours in the grid, corners included

where ``A`` (C, P) whitens the P components of least variance (:mod:`psc_core.maps.fit.gaussian`).  All positions share
one Gaussian, which models surfaces, edges and seams, but not where in an image they belong.

A grey level says how rare a distance is among in-distribution images.  Level g is reached by a fraction
``10^(−4 g / 255)`` of their positions: 0 by all, 64 by one in ten, 128 by one in a hundred, 255 by one in 10,000.

Shapes: B images, C channels, S positions of the layer, of which rows × columns show the image.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, ClassVar, Final

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn
from torch.nn import functional

from psc_core.errors import BundleError
from psc_core.fitted import Fitted
from psc_core.maps.grid import Grid

LEVELS: Final = 255
"""The number of grey levels above black, the largest 8-bit number."""

DECADES: Final = 4
"""The number of powers of ten between the rarity of black and of white."""

SERVE_ELEMENTS: Final = 1 << 24
"""Maximum size B × C × S of a block of differences (64 MiB); larger batches are split."""


class PositionDensity(Fitted):
    """``mean`` (C,), ``whitener`` (C, P), and ascending squared distances ``thresholds`` (255,) of the grey levels."""

    kind = "gaussian"
    layout: ClassVar = {"mean": ("channels",), "whitener": ("channels", "kept"), "thresholds": ("levels",)}

    mean: Tensor
    whitener: Tensor
    thresholds: Tensor

    def forward(self, features: Float[Tensor, "batch channels positions"]) -> Float[Tensor, "batch positions"]:
        """Return the squared distances from the mean, in variances."""
        batch = max(1, SERVE_ELEMENTS // features[0].numel()) if len(features) else 1
        if len(features) > batch:
            return torch.cat([self(part) for part in torch.split(features, batch)])
        # Subtract the mean first: the components of least variance are small differences of large terms.
        whitened = self.whitener.T @ (features.float() - self.mean[:, None])
        return whitened.square().sum(dim=1)

    def grey(self, distances: Float[Tensor, "*shape"]) -> UInt8[Tensor, "*shape"]:
        """Return the grey levels of squared distances, 0 to 255."""
        return torch.bucketize(distances, self.thresholds, right=True).to(torch.uint8)


class LayerMap(nn.Module):
    """Turns the features of a layer into grey levels; brighter is more anomalous.

    Args:
        layer: The name of the layer.
        grid: The rows and columns of its positions.
        density: The density of one position.

    Raises:
        BundleError: If there is not one threshold for each grey level, or the thresholds are not ascending.
    """

    def __init__(self, layer: str, grid: Grid, density: PositionDensity) -> None:
        super().__init__()
        thresholds = density.thresholds
        if len(thresholds) != LEVELS or not bool((thresholds.diff() >= 0).all()):
            raise BundleError(f"expected {LEVELS} ascending thresholds of the map's grey levels; fit the bundle again")
        self.layer = layer
        self.grid = grid
        self.density = density

    def config(self) -> dict[str, Any]:
        """Return the section of a manifest as JSON types; with the density's tensors it restores the map."""
        return {"layer": self.layer, "grid": asdict(self.grid), "density": self.density.config()}

    def check(self, features: Float[Tensor, "batch channels positions"]) -> None:
        """Raise :class:`BundleError` if the features are those of another layer."""
        expected = (len(self.density.mean), self.grid.positions)
        if features.shape[1:] != expected:
            raise BundleError(
                f"expected {expected} channels and positions from {self.layer} for the map, got "
                f"{tuple(features.shape[1:])}; fit the bundle again"
            )

    def distances(self, features: Float[Tensor, "batch channels positions"]) -> Float[Tensor, "batch rows columns"]:
        """Return the squared distances at the positions of the image, each averaged over its 3 × 3 neighbours."""
        inside: Tensor = self.density(features[:, :, self.grid.first :])
        alone = inside.view(-1, 1, self.grid.rows, self.grid.columns)
        # Anomalous regions are seldom a single position wide, but noise is.
        return functional.avg_pool2d(alone, 3, stride=1, padding=1, count_include_pad=False)[:, 0]

    def forward(self, features: Float[Tensor, "batch channels positions"]) -> UInt8[Tensor, "batch rows columns"]:
        """Return the grey levels at the positions of the image."""
        grey: Tensor = self.density.grey(self.distances(features))
        return grey
