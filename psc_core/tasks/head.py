"""The base of all heads (the paper's g′): from features to what a model predicts.

Shapes: B images, D = dim of z, K probabilities (0 for a task without them).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, NamedTuple

from jaxtyping import Float
from torch import Tensor

from psc_core.fitted import Fitted


class Scored(NamedTuple):
    """The results for a batch without calibration."""

    scores: Mapping[str, Float[Tensor, " batch"]]  # each in the unit that its task's answer declares
    probabilities: Float[Tensor, "batch classes"]

    def at(self, kept: Tensor) -> Scored:
        """Return the results for some images: their positions, or a mask."""
        return Scored({name: values[kept] for name, values in self.scores.items()}, self.probabilities[kept])


class Head(Fitted):
    """A fitted module that turns features, or the network's own output, into scores.

    Attributes:
        score_names: The scores of the task, in the order of their columns.
        reads_output: Whether it reads the network's own output, for base predictions, and no features.
        reads_layers: Whether it reads features of earlier layers, averaged over positions, besides z.
        epistemic_unit: Unit of the epistemic uncertainty, for display; empty where there is none.
    """

    score_names: ClassVar[tuple[str, ...]]
    reads_output: ClassVar[bool] = False
    reads_layers: ClassVar[bool] = False
    epistemic_unit: ClassVar[str] = ""

    center: Tensor
    inverse_scale: Tensor

    def standardise(self, z: Float[Tensor, "batch dim"]) -> Float[Tensor, "batch dim"]:
        """Return φ, the standardised features."""
        return (z - self.center) * self.inverse_scale

    def score(self, features: Float[Tensor, "batch dim"], output: Float[Tensor, "batch outputs"] | None) -> Scored:
        """Return the scores that need no density, and the probabilities.

        Args:
            features: z, followed by the other layers that the head reads.
            output: The network's output, where that is served.
        """
        raise NotImplementedError

    def explain(self, features: Float[Tensor, "batch dim"]) -> dict[str, Tensor]:
        """Return arrays that explain its predictions by name, images first; none by default."""
        return {}
