"""The fit of a classifier."""

from __future__ import annotations

from typing import Any, Final

from jaxtyping import Float, Int
from torch import Tensor, nn

from psc_core import metrics as classification
from psc_core.compute import Compute
from psc_core.conformal import thinned
from psc_core.data.dataset import ImageDataset
from psc_core.errors import UsageError
from psc_core.settings import FitSettings
from psc_core.tasks.classification.fit.calibrate import Errors, fewest_to_show, fit_calibration
from psc_core.tasks.classification.fit.head import fit_head
from psc_core.tasks.classification.fit.temperature import better_of, fit_temperature_head, retempered
from psc_core.tasks.classification.heads.base import ClassifierHead
from psc_core.tasks.classification.heads.temperature import TemperatureHead
from psc_core.tasks.classification.policy import ACCEPTS_NOTHING, RISKS, ClassificationPolicy
from psc_core.tasks.classification.task import Classification
from psc_core.tasks.fit.task import (
    FIRST_LOOK_IMAGES,
    WRONG_NETWORK,
    Calibrated,
    FirstLook,
    HeadJob,
    TaskFit,
    run_network,
)
from psc_core.tasks.head import Head, Scored
from psc_core.tasks.policy import BETTER_THAN_GUESSING

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

    def check(self, settings: FitSettings, images: int) -> None:
        super().check(settings, images)
        if settings.risk is not None and images < fewest_to_show(settings.risk):
            raise UsageError(
                f"a risk of {settings.risk:g} cannot be shown with {images} calibration images, even if all are right: "
                f"it takes {fewest_to_show(settings.risk)}; give more images, or ask for a higher risk or for none"
            )
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
        *,
        or_higher: bool = False,
    ) -> Calibrated:
        """Return calibration scores, and the entropy below which the error rate ``settings.risk`` is kept.

        Without a risk it is the lowest of :data:`.RISKS` that can be shown; where none can, nothing is accepted.
        An image with several labels counts once, with its first.  Metrics and that entropy need independent images, so
        weighted ones are thinned for them.
        """
        labels, entropies = images.first_labels(), scored.scores["predictive_entropy"]
        calibration = fit_calibration(ood_score, entropies, scored.probabilities, labels, weights)
        if weights is not None:
            kept = thinned(weights)
            scored, labels, entropies = scored.at(kept), labels[kept], entropies[kept]
        errors = Errors.of(entropies, scored.probabilities.argmax(1) == labels)
        risk, threshold = _shown(errors, settings.risk, or_higher=or_higher)
        policy = ClassificationPolicy(
            alpha=settings.alpha, ambiguity_threshold=threshold, coverage=settings.coverage, risk=risk
        )
        return Calibrated(calibration, policy, {**calibration_metrics(scored, labels), "risk_asked": settings.risk})

    def first_look(self, net: nn.Module, train: ImageDataset, val: ImageDataset, compute: Compute) -> FirstLook:
        of_train, (of_val, predicted) = network_accuracy(net, train, compute)[0], network_accuracy(net, val, compute)
        text = (
            f"the network itself: accuracy {of_train:.3f} on training and {of_val:.3f} on validation images (at most "
            f"{FIRST_LOOK_IMAGES:,} of each)"
        )
        if not classification.better_than_guessing(predicted, val.first_labels()):
            return FirstLook(text, f"THE NETWORK IS NO BETTER THAN GUESSING ON VALIDATION IMAGES, {WRONG_NETWORK}")
        if of_val < of_train - ACCURACY_GAP:
            warning = "validation images are much harder for it; are they prepared as the training images?"
            return FirstLook(text, warning)
        return FirstLook(f"{text}; if it should be higher, check the preprocessing")


FIT: Final = ClassificationFit()


def _shown(errors: Errors, asked: float | None, *, or_higher: bool) -> tuple[float | None, float]:
    """Return the risk that is promised and its entropy threshold; None and :data:`.ACCEPTS_NOTHING` if none is shown.

    Args:
        errors: Those of the calibration images.
        asked: The risk that was asked for; None: the lowest of :data:`.RISKS`.
        or_higher: Whether a higher one of :data:`.RISKS` will do.

    Raises:
        UsageError: If the risk that was asked for cannot be shown, and no other will do.
    """
    risks = RISKS if asked is None else (asked, *(risk for risk in RISKS if risk > asked and or_higher))
    found = errors.lowest(risks)
    if found is None and asked is not None and not or_higher:
        other = errors.lowest(RISKS)
        remedy = "with risk auto nothing is accepted" if other is None else f"risk auto takes {other[0]:g}"
        wrong, count = (int(part[-1]) if len(part) else 0 for part in (errors.wrong, errors.accepted))
        raise UsageError(
            f"a risk of {asked:g} cannot be shown with {count} images, of which {wrong} are wrong: no entropy "
            f"threshold keeps it (at least {fewest_to_show(asked)} images and few errors); {remedy} (--risk "
            "auto, in Python risk=None)"
        )
    return found or (None, ACCEPTS_NOTHING)


def calibration_metrics(scored: Scored, labels: Tensor) -> dict[str, Any]:
    """Return metrics of the calibration split, which selected nothing that they measure."""
    probabilities = scored.probabilities.double()
    confidence, predicted = probabilities.max(1)
    return {
        "validation_images": len(labels),
        "accuracy": classification.accuracy(probabilities, labels),
        BETTER_THAN_GUESSING: classification.better_than_guessing(predicted, labels),
        "nll_nats": classification.nll(probabilities, labels),
        "ece": classification.ece(confidence, predicted == labels),
        "mean_entropy_nats": float(scored.scores["predictive_entropy"].double().mean()),
    }


def network_accuracy(net: nn.Module, data: ImageDataset, compute: Compute) -> tuple[float, Int[Tensor, " n"]]:
    """Return the plain network's accuracy, and what it predicts.

    Of an image with several labels the fraction that is predicted counts.
    """
    labels, predicted = data.offsets.diff(), run_network(net, data, compute).argmax(1)
    hits = predicted.repeat_interleave(labels) == data.labels
    return float((hits / labels.repeat_interleave(labels)).sum()) / len(data), predicted
