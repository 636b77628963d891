"""Calibrate a bundle again, on the reviewed audit slice of a service's log.

The input is the model of a bundle and an :class:`.Audit`; the output is the same model, calibrated anew.  Network,
projection, density, head and gates stay.  p-values, prediction sets or intervals and the ambiguity threshold come from
the audit images alone: calibration images have to be like the images to come, and those of the fit no longer are once
the images have changed; the rates of a mixture would hold for neither.  Each audit image weighs as much as the inverse
of the probability that it was drawn with (:mod:`psc_core.calibration.weighted`).

Base predictions also have a temperature, and images outside the slice can extend the density
(:mod:`psc_core.fitting.extend`).  A quarter of the audit images chooses both and calibrates nothing, so that the rates
hold whatever is chosen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from psc_core.calibration.weighted import effective_count, thinned
from psc_core.data.dataset import ImageDataset
from psc_core.errors import UsageError
from psc_core.fitting.audit import Audit
from psc_core.fitting.calibrate import calibrate_pipeline, settings_of, temper, with_calibration
from psc_core.fitting.extend import Extension, extend
from psc_core.metrics.intervals import in_practice
from psc_core.model.base import FittedModel
from psc_core.scoring.dataset import dataset_outputs
from psc_core.tasks.fit.task import task_fit

CHOOSES: Final = 0.25
"""Fraction of the audit images that chooses the temperature of base predictions and how a density is extended."""

FEWEST_TO_CHOOSE: Final = 25
"""Fewest images of equal weight that may choose; with fewer the temperature stays and no density is extended."""


@dataclass(frozen=True)
class Recalibrated:
    """A model that was calibrated again, and what the command prints about it."""

    model: FittedModel
    lines: tuple[str, ...]
    warnings: tuple[str, ...]


def recalibrate_from_audit(
    model: FittedModel, audit: Audit, changes: Mapping[str, Any], more: ImageDataset | None = None
) -> Recalibrated:
    """Return the model of a bundle, calibrated on an audit slice.

    Args:
        model: The model; its :attr:`.FittedModel.version` names the bundle.
        audit: The reviewed images.
        changes: Settings of :meth:`.FittedModel.calibrate` that change, by name.
        more: Images outside the slice that extend the density; None to leave it as it is.

    Raises:
        UsageError: If so few images cannot keep the rates, calibration does not read a setting, or the density cannot
            be extended.
        DataError: If an image cannot be read.
        FitError: If scores are not finite.
    """
    fit, settings = task_fit(model.task.name), settings_of(model, changes)
    lines, pipeline, calibrates, extension = [], model.pipeline, audit, None
    if more is not None or fit.has_temperature(pipeline.scorer.head):
        chooses, rest = _split(audit)
        real = chooses.of_class.subset(thinned(chooses.weights).nonzero()[:, 0])
        if more is not None:
            _check_enough(real, audit)
            extension = extend(model, more, real, settings.compute())
            pipeline, calibrates = extension.pipeline, rest
            lines.append(extension.table())
        if fit.has_temperature(pipeline.scorer.head) and len(real) >= FEWEST_TO_CHOOSE:
            pipeline, calibrates = temper(pipeline, fit, real, settings), rest
            before, now = (each.scorer.head.record["temperature"] for each in (model.pipeline, pipeline))
            lines.append(f"temperature {now:.3g}, before {before:.3g}, by {len(real)} images, which do not calibrate")
    pipeline, calibrated = calibrate_pipeline(
        pipeline, fit, calibrates.of_class, settings, calibrates.weights, or_higher="risk" not in changes
    )
    entry = _entry(audit, calibrates, extension)
    found = with_calibration(model, pipeline, calibrated, calibrates.of_class, entry)
    policy = calibrated.policy
    lines = [policy.headline(calibrated.metrics), *lines]
    lines += [
        f"alarms at alpha {policy.alpha:g} on audit images of a class: {_alarms(model, audit.of_class):.1%} "
        f"before, at most {policy.alpha:.1%} of such images now on average; "
        f"{in_practice(policy.alpha, len(found.calibration))}%"
    ]
    for verdict, images in audit.others.items():
        before, after = (_alarms(each, images) for each in (model, found))
        lines.append(f"alarms on the {len(images)} images with verdict {verdict}: {before:.1%} before, {after:.1%} now")
    return Recalibrated(found, tuple(lines), tuple(filter(None, ["" if extension is None else extension.warning()])))


def _split(audit: Audit) -> tuple[Audit, Audit]:
    """Return the images that choose, and those that calibrate; they are in the order of digests, which is random."""
    count = round(CHOOSES * len(audit.of_class))
    return audit.at(torch.arange(count)), audit.at(torch.arange(count, len(audit.of_class)))


def _check_enough(real: ImageDataset, audit: Audit) -> None:
    if len(real) < FEWEST_TO_CHOOSE:
        raise UsageError(
            f"a quarter of the audit images of a class compares the densities and calibrates nothing: at least "
            f"{FEWEST_TO_CHOOSE}, and of {len(audit.of_class)} labelled that are {len(real)} that count equally; "
            f"review at least {round(FEWEST_TO_CHOOSE / CHOOSES)} drawn equally, or leave out --extend-density"
        )


def _entry(audit: Audit, calibrates: Audit, extension: Extension | None) -> dict[str, Any]:
    """Return what the provenance records of the images."""
    return {
        "days": list(audit.days),
        "labels": len(audit.of_class),
        "calibrated_on": len(calibrates.of_class),
        "worth": effective_count(calibrates.weights),
        **{verdict: len(images) for verdict, images in audit.others.items()},
        "sha256": audit.of_class.digest(),
        **({} if extension is None else {"extension": extension.to_json()}),
    }


def _alarms(model: FittedModel, images: ImageDataset) -> float:
    """Return the fraction of the images that the model calls out of distribution."""
    packed = dataset_outputs(model, images, "alarms").packed
    return float(model.decide(model.outputs(packed.numpy())).is_ood.mean())
