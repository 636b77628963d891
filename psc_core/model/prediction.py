"""Plain values that several modules hand to each other."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Prediction:
    """What :meth:`psc_core.PSC.predict` says of n images, on the CPU.

    Attributes:
        class_index: ``int64 (n,)`` most probable class.
        labels: Its name, for each image.
        confidence: ``float32 (n,)`` its probability.
        probabilities: ``float32 (n, K)``.
        predictive_entropy: ``float32 (n,)`` nats; high where the input is ambiguous.
        log_density: ``float32 (n,)`` log p(z), nats.
        ood_score: ``float32 (n,)`` −log p(z), plus the weighted entropy where the bundle says so; higher is
            more out-of-distribution.
        ood_p_value: ``float32 (n,)`` share of calibration images at least as unusual.
        is_ood: ``bool (n,)`` p-value at most the bundle's α.
        decision: ``"abstain_ood"`` if ``is_ood``, else ``"abstain_ambiguous"`` if the entropy is above the bundle's
            threshold, else ``"accept"``, for each image.
        prediction_set: Classes that hold the true one with the bundle's coverage, for each image.
        epistemic: ``float32 (n,)`` the head's own epistemic uncertainty.
    """

    class_index: Tensor
    labels: tuple[str, ...]
    confidence: Tensor
    probabilities: Tensor
    predictive_entropy: Tensor
    log_density: Tensor
    ood_score: Tensor
    ood_p_value: Tensor
    is_ood: Tensor
    decision: tuple[str, ...]
    prediction_set: tuple[tuple[str, ...], ...]
    epistemic: Tensor

    def __len__(self) -> int:
        return len(self.class_index)
