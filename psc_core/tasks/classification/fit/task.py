"""The fit of a classifier."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from jaxtyping import Float
from torch import Tensor, nn

from psc_core.calibration.weighted import thinned
from psc_core.compute.passes import Compute
from psc_core.data.dataset import ImageDataset
from psc_core.errors import UsageError
from psc_core.metrics import classification
from psc_core.settings import FitSettings
from psc_core.tasks.classification.fit.calibrate import (
    CONFIDENCE,
    ambiguity_threshold,
    fewest_to_show,
    fit_calibration,
    nearest_risk,
)
from psc_core.tasks.classification.fit.head import fit_head
from psc_core.tasks.classification.fit.temperature import better_of, fit_temperature_head, retempered
from psc_core.tasks.classification.heads.base import ClassifierHead
from psc_core.tasks.classification.heads.temperature import TemperatureHead
from psc_core.tasks.classification.policy import ClassificationPolicy, unreachable_entropy
from psc_core.tasks.classification.task import Classification
from psc_core.tasks.fit.task import FIRST_LOOK_IMAGES, Calibrated, HeadJob, TaskFit, run_network
from psc_core.tasks.head import Head, Scored
from psc_core.tasks.policy import GUARANTEED_RISK, BasePolicy

ACCURACY_GAP: Final = 0.1
"""Loss of accuracy from training to validation images up to which no warning is given."""


class ClassificationFit(TaskFit):
    """The fit of a classifier."""

    task_type = Classification
    own_settings = ("risk", "head_input")
    compares_network_output = True

    def takes(self, data: ImageDataset) -> bool:
        return data.target is None

    def labelled(self, train: ImageDataset, val: ImageDataset) -> tuple[ImageDataset, ImageDataset]:
        return train, val.in_order(train.classes)

    def check(self, settings: FitSettings) -> None:
        super().check(settings)
        if settings.predictions == "base":
            for name, default in (("head", next(iter(self.task_type.heads))), ("head_input", FitSettings.head_input)):
                if getattr(settings, name) not in (None, default):
                    raise UsageError(
                        f"expected no {name} beside predictions 'base', which are the network's own; leave one out"
                    )

    def fit_head(self, job: HeadJob) -> ClassifierHead:
        """Return the head, the network's own logits with a temperature, or the better of both."""
        selection = job.selection
        tempered = logits = None
        if selection.network_output is not None:
            logits = selection.network_output[:]
            tempered = fit_temperature_head(logits, selection.labels).to(job.device)
            if job.predictions == "base":
                return tempered
        head = fit_head(job)
        if tempered is None or logits is None:
            return head
        z, logits, labels = (part.to(job.device) for part in (selection.head_input[:], logits, selection.labels))
        return better_of(head, tempered, z, logits, labels)

    def kept_policy(self, found: BasePolicy, before: BasePolicy, metrics: Mapping[str, Any]) -> tuple[BasePolicy, str]:
        """Keep the ambiguity threshold where the images show none: without one nothing would be ambiguous."""
        risk, threshold = metrics["risk"], before.model_dump()["ambiguity_threshold"]
        if risk["threshold"] is not None:
            return found, ""
        guaranteed = risk[GUARANTEED_RISK]
        nearest = "" if risk.get("nearest") is None else f"; with a risk of {risk['nearest']:g} one is shown"
        text = (
            f"the images show for no ambiguity threshold that at most {guaranteed:.3g} of the accepted ones are "
            f"wrong, which takes at least {fewest_to_show(guaranteed)} images and few errors{nearest}; the threshold "
            f"stays at {threshold:.4g} nats"
        )
        return found.model_copy(update={"ambiguity_threshold": threshold}), text

    def has_temperature(self, head: Head) -> bool:
        return isinstance(head, TemperatureHead)

    def temper(self, head: Head, scored: Scored, images: ImageDataset) -> Head:
        """Return the head of base predictions with a refitted temperature, or any other head as it is."""
        return (
            retempered(head, scored.probabilities, images.first_labels()) if isinstance(head, TemperatureHead) else head
        )

    def calibrate(
        self,
        scored: Scored,
        ood_score: Float[Tensor, " n"],
        images: ImageDataset,
        settings: FitSettings,
        weights: Float[Tensor, " n"] | None = None,
    ) -> Calibrated:
        """Return calibration scores, and the entropy below which the error rate ``settings.risk`` is kept.

        Where none keeps it, the nearest error rate that an entropy does keep takes its place, and the notes say so.
        An image with several labels counts once, with its first.  Metrics and that entropy need independent images, so
        weighted ones are thinned for them.
        """
        labels, entropies = images.first_labels(), scored.scores["predictive_entropy"]
        calibration = fit_calibration(ood_score, entropies, scored.probabilities, labels, weights)
        if weights is not None:
            kept = thinned(weights)
            scored, labels, entropies = scored.at(kept), labels[kept], entropies[kept]
        correct = scored.probabilities.argmax(1) == labels
        threshold = ambiguity_threshold(entropies, correct, risk=settings.risk)
        risk = {GUARANTEED_RISK: settings.risk, "confidence": CONFIDENCE, "threshold": threshold}
        metrics = {**calibration_metrics(scored, labels), "risk": risk}
        if threshold is None:
            nearest = nearest_risk(entropies, correct, risk=settings.risk)
            threshold = nearest.threshold if nearest else unreachable_entropy(calibration.num_classes)
            risk |= {"nearest": nearest.rate, "nearest_threshold": threshold} if nearest else {"nearest": None}
        policy = ClassificationPolicy(alpha=settings.alpha, ambiguity_threshold=threshold, coverage=settings.coverage)
        return Calibrated(calibration, policy, metrics)

    def first_look(self, net: nn.Module, train: ImageDataset, val: ImageDataset, compute: Compute) -> str:
        of_train, of_val = (network_accuracy(net, data, compute) for data in (train, val))
        text = (
            f"the network itself: accuracy {of_train:.3f} on training and {of_val:.3f} on validation images (at most "
            f"{FIRST_LOOK_IMAGES:,} of each); if it should be higher, check the preprocessing"
        )
        if of_val < of_train - ACCURACY_GAP:
            text += "\nwarning: validation images are much harder for it; are they prepared as the training images?"
        return text


FIT: Final = ClassificationFit()


def calibration_metrics(scored: Scored, labels: Tensor) -> dict[str, Any]:
    """Return metrics of the calibration split, which selected nothing that they measure."""
    probabilities = scored.probabilities.double()
    confidence, predicted = probabilities.max(1)
    return {
        "validation_images": len(labels),
        "accuracy": classification.accuracy(probabilities, labels),
        "nll_nats": classification.nll(probabilities, labels),
        "ece": classification.ece(confidence, predicted == labels),
        "mean_entropy_nats": float(scored.scores["predictive_entropy"].double().mean()),
    }


def network_accuracy(net: nn.Module, data: ImageDataset, compute: Compute) -> float:
    """Return the plain network's accuracy; of an image with several labels, the fraction that is predicted counts."""
    labels = data.offsets.diff()  # of each image
    hits = run_network(net, data, compute).argmax(1).repeat_interleave(labels) == data.labels
    return float((hits / labels.repeat_interleave(labels)).sum()) / len(data)
