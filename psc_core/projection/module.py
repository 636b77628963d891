"""Project features of the candidate layer(s) to the feature vector z (paper, Algorithm 1, appendix A.2).

    X  (B, C, d)      channels × positions of all candidate layers, concatenated along positions
    X ← (X − μ) / σ    channelwise moments, the standard deviation in both of the paper's formulas
    Z  = Aᵀ X B        (B, c_proj, d_proj)
    z ← (vec Z − μ_Z) / σ_Z      second scaling, optional

The paper divides by the *variance* in ``scale`` but normalises the covariance by the standard deviation.  Here it is
the standard deviation in both: else Z would not have the correlation tensor that was decomposed.
A fully connected layer has d = 1 and no spatial mode to reduce, so it is read as one channel with C positions: the
decomposition is then the eigendecomposition of its correlation matrix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from psc_core.errors import FitError
from psc_core.fitted import Fitted, restore


class Projection(Fitted):
    """The projection: reshape, scale, project, scale again.

    Args:
        tensors: μ, 1/σ, A, B, μ_Z and 1/σ_Z, as in ``layout``; without the second scaling the last two are 0 and 1.
        positions: Number of positions that each candidate layer is reduced to, by average pooling where it has more.
    """

    kind = "tucker"
    layout: ClassVar = {
        "mean": ("channels", "positions"),
        "inverse_std": ("channels", "positions"),
        "channel_factor": ("channels", "c_proj"),
        "spatial_factor": ("positions", "d_proj"),
        "z_mean": ("dim",),
        "z_inverse_std": ("dim",),
    }
    mean: Tensor
    inverse_std: Tensor
    channel_factor: Tensor
    spatial_factor: Tensor
    z_mean: Tensor
    z_inverse_std: Tensor
    shift: Tensor
    z_shift: Tensor

    def __init__(self, tensors: Mapping[str, Tensor], *, positions: Sequence[int]) -> None:
        super().__init__(tensors, record={})
        self.positions = tuple(positions)
        # −μ / σ of both scalings, with which each is one operation.
        for name, mean, scale in (("shift", self.mean, self.inverse_std), ("z_shift", self.z_mean, self.z_inverse_std)):
            self.register_buffer(name, (-mean.double() * scale.double()).float(), persistent=False)

    @classmethod
    def from_moments(
        cls,
        positions: Sequence[int],
        mean: Float[Tensor, "channels positions"],
        std: Float[Tensor, "channels positions"],
        channel_factor: Float[Tensor, "channels c_proj"],
        spatial_factor: Float[Tensor, "positions d_proj"],
        z_mean: Float[Tensor, " dim"],
        z_std: Float[Tensor, " dim"],
    ) -> Projection:
        """Return the projection of μ, σ, A, B, μ_Z and σ_Z; both σ are positive."""
        scales = {"mean": mean, "inverse_std": 1.0 / std, "z_mean": z_mean, "z_inverse_std": 1.0 / z_std}
        factors = {"channel_factor": channel_factor, "spatial_factor": spatial_factor}
        return cls({**scales, **factors}, positions=positions)

    @property
    def c_proj(self) -> int:
        """Number of channel components."""
        return self.channel_factor.shape[1]

    @property
    def d_proj(self) -> int:
        """Number of spatial components."""
        return self.spatial_factor.shape[1]

    def scaled(self, features: Sequence[Tensor]) -> Float[Tensor, "batch channels positions"]:
        """Return X after the first scaling, from the canonical features (B, C, d_l) of each layer l."""
        return torch.addcmul(self.shift, reshape_features(features, self.positions).float(), self.inverse_std)

    def project(self, x: Float[Tensor, "batch channels positions"]) -> Float[Tensor, "batch c_proj d_proj"]:
        """Return Z before the second scaling, from scaled X."""
        return (self.channel_factor.T @ x) @ self.spatial_factor

    def forward(self, features: Sequence[Tensor]) -> Float[Tensor, "batch dim"]:
        """Return z (B, c_proj · d_proj), row-major over (channel, spatial) components."""
        return torch.addcmul(self.z_shift, self.project(self.scaled(features)).flatten(1), self.z_inverse_std)

    def leading(self, c_proj: int, d_proj: int) -> Projection:
        """Return this projection with only its leading components."""
        means, scales = (
            part.view(self.c_proj, self.d_proj)[:c_proj, :d_proj].flatten()
            for part in (self.z_mean, self.z_inverse_std)
        )
        return Projection.from_moments(
            self.positions,
            self.mean,
            1.0 / self.inverse_std,
            self.channel_factor[:, :c_proj],
            self.spatial_factor[:, :d_proj],
            means,
            1.0 / scales,
        )

    def with_second_scaling(self, z_mean: Tensor, z_std: Tensor) -> Projection:
        """Return this projection with (vec Z − z_mean) / z_std as its last step."""
        return Projection.from_moments(
            self.positions, self.mean, 1.0 / self.inverse_std, self.channel_factor, self.spatial_factor, z_mean, z_std
        )

    def config(self) -> dict[str, Any]:
        """Return method and sizes, JSON types; the tensors are in ``state_dict()``."""
        sizes = {name: self.sizes[name] for name in ("channels", "c_proj", "d_proj")}
        return {"method": self.kind, "positions": list(self.positions), **sizes}

    @classmethod
    def restore(cls, config: Mapping[str, Any], state: Mapping[str, Tensor]) -> Projection:
        """Return the projection with this :meth:`config` and ``state_dict()``; raises :class:`BundleError`."""
        positions = config["positions"]
        sizes = {name: config[name] for name in ("channels", "c_proj", "d_proj")}
        sizes |= {"positions": sum(positions), "dim": sizes["c_proj"] * sizes["d_proj"]}
        return restore({cls.kind: cls}, {"kind": config["method"], "sizes": sizes, "positions": positions}, state)


def reshape_features(features: Sequence[Tensor], positions: Sequence[int]) -> Float[Tensor, "batch channels positions"]:
    """Return X (B, C, d): the features (B, C, d_l) of each layer reduced to its number of positions, and concatenated.

    Raises:
        FitError: If the layers have different numbers of channels.
    """
    if len({f.shape[1] for f in features}) > 1 and any(f.shape[2] > 1 for f in features):
        raise FitError(
            f"expected layers with equal numbers of channels, got {[f.shape[1] for f in features]}; choose one layer"
        )
    if all(f.shape[2] == 1 for f in features):
        features = [f.transpose(1, 2) for f in features]
    parts = [reduce_positions(f, n) for f, n in zip(features, positions, strict=True)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def reduce_positions(
    features: Float[Tensor, "batch channels _"], positions: int
) -> Float[Tensor, "batch channels {positions}"]:
    """Return features averaged to this many positions: in squares if both numbers are squares, else along one axis."""
    batch, channels, have = features.shape
    if have == positions:
        return features
    side, kept = round(have**0.5), round(positions**0.5)
    if side * side == have and kept * kept == positions:
        maps = features.reshape(batch, channels, side, side)
        return F.adaptive_avg_pool2d(maps, kept).flatten(2)
    return F.adaptive_avg_pool1d(features, positions)
