"""The gates of a model: their names, their p-values and Fisher's combination of them.

=============  ==================================================  ==========================================
gate           reading, higher is more unusual                     an alarm means
=============  ==================================================  ==========================================
``texture``    −log p of an early layer's features, averaged       anomalous texture: surface, contrast, colours
               over positions, nats
``kind``       minus the log density of the model, nats            unknown kind: parts that no class has
``confidence`` energy of the logits, −log Σ exp f, nats            no class has much evidence
=============  ==================================================  ==========================================

With ``p_g`` from :mod:`.tail` the OOD score is

    ``−Σ_g log min(1, p_g / τ_g)``     nats

with ``τ_g = 1`` except for ``texture`` (a soft form of the truncated product of Zaykin et al. 2002; with all τ = 1 it
is half of the statistic of Fisher 1932).  Near out-of-distribution images have typical textures, and how typical they
are would only add noise to the sum.

Because the readings of one image depend on each other, the score's p-value does not come from χ² but is conformal, on
images that were used neither to choose the gates nor to fit ``p_g`` (:mod:`psc_core.calibration.conformal`; Bates et
al. 2023).  The p-value of a single gate is conformal on the same images.

Shapes: B images, G gates, m images that ``p_g`` is fitted to, n calibration images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from psc_core.calibration.conformal import conformal_p_values
from psc_core.errors import BundleError
from psc_core.gates.tail import log_p_pieces, log_p_values

TEXTURE: Final = "texture"
DENSITY: Final = "kind"  # as bundles and answers call the gate that reads the model's density
CONFIDENCE: Final = "confidence"

GATES: Final = (TEXTURE, DENSITY, CONFIDENCE)
"""The names of all gates; a model has some of them, in this order."""


def readings_of(names: Sequence[str], scores: Mapping[str, Float[Tensor, " batch"]]) -> Float[Tensor, "batch gates"]:
    """Return the readings of the gates ``names``, from the scores of a :class:`psc_core.tasks.head.Scored`."""
    readings = {DENSITY: -scores["log_density"]}
    if CONFIDENCE in names:
        readings[CONFIDENCE] = scores["energy"]
    if TEXTURE in scores:
        readings[TEXTURE] = scores[TEXTURE]
    return torch.stack([readings[name] for name in names], dim=1)


class Gates(nn.Module):
    """Combines readings into one OOD score, and gives the p-value of each gate.

    Args:
        names: Some of :data:`GATES`, in that order.
        fitted: The buffers ``ascending``, ``scales`` and ``calibration``, which a bundle holds; see :meth:`of`.
        derived: The buffers ``log_below``, log τ_g, ``float64 (G, 1)``, and ``pieces``, from :func:`log_p_pieces`.
        texture_counts_below: τ of ``texture``, in (0, 1].
    """

    ascending: Tensor
    scales: Tensor
    calibration: Tensor
    log_below: Tensor
    pieces: Tensor

    def __init__(
        self,
        names: Sequence[str],
        fitted: Mapping[str, Tensor],
        derived: Mapping[str, Tensor],
        texture_counts_below: float,
    ) -> None:
        super().__init__()
        self.names = tuple(names)
        self.texture_counts_below = texture_counts_below
        for tensors in (fitted, derived):
            for name, tensor in tensors.items():
                self.register_buffer(name, tensor, persistent=tensors is fitted)

    @classmethod
    def of(
        cls,
        names: Sequence[str],
        ascending: Tensor,
        scales: Tensor,
        calibration: Tensor,
        texture_counts_below: float = 1.0,
    ) -> Gates:
        """Check the tensors of fitted gates, and derive what their score needs.

        Args:
            names: Some of :data:`GATES`, in that order.
            ascending: ``float32 (G, m)`` readings that ``p_g`` is fitted to, sorted.
            scales: ``float32 (G,)`` scales of the tails, positive.
            calibration: ``float32 (G, n)`` readings of the calibration images, sorted.
            texture_counts_below: τ of ``texture``, in (0, 1].

        Raises:
            BundleError: If names or shapes do not match, or readings are not sorted.
        """
        if tuple(names) != tuple(name for name in GATES if name in names) or not names:
            raise BundleError(f"expected gates of {', '.join(GATES)} in this order, got {list(names)}")
        fitted = {"ascending": ascending, "scales": scales, "calibration": calibration}
        for (name, tensor), axes in zip(fitted.items(), (2, 1, 2), strict=True):
            if tensor.dtype != torch.float32 or tensor.ndim != axes or len(tensor) != len(names):
                raise BundleError(
                    f"expected float32 gates.{name} of {len(names)} gates, got {tensor.dtype} "
                    f"{tuple(tensor.shape)}; fit the bundle again"
                )
            fitted[name] = tensor.contiguous()
        for part in (ascending, calibration):
            if part.shape[1] == 0 or not (part.diff(dim=1) >= 0).all():
                raise BundleError("expected ascending readings of the gates; fit the bundle again")
        if not (scales > 0).all():
            raise BundleError("expected positive scales of the gates; fit the bundle again")

        below = [texture_counts_below if name == TEXTURE else 1.0 for name in names]
        log_below = torch.tensor(below, dtype=torch.float64).log()[:, None].to(ascending.device)
        derived = {"log_below": log_below, "pieces": log_p_pieces(fitted["ascending"], scales)}
        return cls(names, fitted, derived, texture_counts_below)

    def calibrated_on(self, readings: Float[Tensor, "gates n"]) -> Gates:
        """Return these gates with other readings of calibration images, sorted, on their device."""
        device = readings.device
        return Gates.of(
            self.names, self.ascending.to(device), self.scales.to(device), readings, self.texture_counts_below
        )

    def score(self, readings: Float[Tensor, "batch gates"]) -> Float[Tensor, " batch"]:
        """Return ``−Σ_g log min(1, p_g / τ_g)``, in nats; higher is more unusual."""
        log_p = log_p_values(self.ascending, self.pieces, readings.T.contiguous())
        return -(log_p - self.log_below).clamp(max=0).sum(dim=0).float()

    def p_values(self, readings: Float[Tensor, "batch gates"]) -> Float[Tensor, "batch gates"]:
        """Return the conformal p-value of each gate, ``(1 + #{calibration ≥ this}) / (n + 1)``."""
        return conformal_p_values(self.calibration, readings.T.contiguous()).T
