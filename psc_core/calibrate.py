"""Calibrate a model on images that nothing was chosen on, through the path that serves.

A fit calibrates a :class:`.Scorer` (:func:`calibrate_scorer`); later, a fitted :class:`.Pipeline` is calibrated again
on other images (:func:`calibrate_pipeline`).  Both run n images through the network and get, by name, scores of shape
(n,) and probabilities (n, K); from them come

    s        (n,)           the OOD score of each image, higher is more unusual: the checks combined, or −log p
    sorted   (n,)           s in ascending order, to which the served p-value of a new image is compared
    ``Calibrated``          the task's calibration, the thresholds of its policy, and metrics of the n images

All results are on the CPU.  Where images stand for several others, ``weights`` (n,) says for how many.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from psc_core.answers import BasePolicy
from psc_core.bundle import HISTORY
from psc_core.checks import check_values, fit_checks
from psc_core.compute import Compute, track_images
from psc_core.conformal import check_rates, effective_count, equal_scores
from psc_core.data.dataset import ImageDataset
from psc_core.errors import UsageError, warn
from psc_core.fit_data import FitJob
from psc_core.fit_parts import rounded
from psc_core.heads.base import Scored
from psc_core.maps import LayerMap
from psc_core.model import TRIAL_IMAGES, FittedModel
from psc_core.pipeline import Pipeline, Scorer, ood_score_of
from psc_core.settings import FitSettings, settings_where
from psc_core.stored_images import StoredImages
from psc_core.tasks.base import Calibrated, Task
from psc_core.version import __version__


def calibrate_scorer(
    scorer: Scorer,
    job: FitJob,
    checks: Sequence[str] = (),
    layer_map: LayerMap | None = None,
    stored_images: StoredImages | None = None,
) -> tuple[Pipeline, Calibrated]:
    """Return a pipeline whose checks are fitted to the selection split, calibrated on the calibration split."""
    data, compute, fitted_checks = job.data, job.compute, None
    scored = score_dataset(scorer, data.calibration, compute, "calibration")
    if checks:
        selected = score_dataset(scorer, data.selection, compute, "selection").scores
        fitted_checks = fit_checks(checks, check_values(checks, selected), check_values(checks, scored.scores))
    ood_score, _ = ood_score_of(scored.scores, fitted_checks)
    calibrated = data.task_type.calibrate(scored, ood_score, data.calibration, job.settings)
    pipeline = Pipeline(scorer, calibrated.calibration.ood_scores, fitted_checks, layer_map, stored_images)
    return pipeline, calibrated


def calibrate_pipeline(
    pipeline: Pipeline,
    task: type[Task],
    data: ImageDataset,
    settings: FitSettings,
    weights: Tensor | None = None,  # how many images each one stands for; None: itself alone
    *,
    or_higher: bool = False,  # whether a higher risk may replace one that cannot be shown
) -> tuple[Pipeline, Calibrated]:
    """Return a pipeline calibrated again, on ``data`` alone.

    Everything that was chosen stays, and so do the values of the selection split that the checks are fitted to.
    """
    images = len(data) if weights is None else effective_count(weights)
    task.check(settings.changed({"risk": None}) if or_higher else settings, images)
    check_rates(images, alpha=settings.alpha, coverage=settings.coverage)
    scored = score_dataset(pipeline.scorer, data, settings.compute(), "calibration")
    checks = pipeline.checks
    if checks is not None:
        each = check_values(checks.names, scored.scores).float().T
        values = torch.stack([value[equal_scores(value, weights)] for value in each])
        checks = checks.calibrated_on(values)
    ood_score, _ = ood_score_of(scored.scores, checks)
    calibrated = task.calibrate(scored, ood_score, data, settings, weights, or_higher=or_higher)
    scores = calibrated.calibration.ood_scores
    return pipeline.with_scorer(pipeline.scorer, scores=scores, checks=checks), calibrated


def with_calibration(
    model: FittedModel,
    pipeline: Pipeline,
    found: Calibrated,
    data: ImageDataset,
    entry: Mapping[str, Any],
) -> FittedModel:
    """Return ``model`` with a pipeline that was calibrated again, and no version: no bundle holds it yet."""
    metrics = {**model.report.get("metrics", {}), **found.metrics}
    provenance = model.report.get("provenance", {})
    entry = {"from": model.version, "psc_version": __version__, **entry}
    return replace(
        model,
        pipeline=pipeline,
        calibration=found.calibration,
        policy=found.policy,
        report={
            **model.report,
            "metrics": rounded(metrics),
            "provenance": {**provenance, HISTORY: [*provenance.get(HISTORY, []), entry]},
        },
        version="",
        trial=trial_of(data),
    )


def warn_of_policy(policy: BasePolicy, metrics: Mapping[str, Any]) -> None:
    """Warn where what a policy promises of accepted images is less than a user expects."""
    if policy.surprises(metrics):
        warn(policy.headline(metrics))


def refit_temperature(pipeline: Pipeline, data: ImageDataset, settings: FitSettings) -> Pipeline:
    """Return a pipeline with a new temperature of the original network, chosen on images that do not calibrate.

    The check ``confidence`` reads logits divided by the temperature; where that changes, the checks are fitted to the
    same images again.  The result has to be calibrated.  A pipeline whose head predicts is returned as it is.
    """
    compute = settings.compute()
    scored = score_dataset(pipeline.scorer, data, compute, "temperature")
    head = pipeline.scorer.head.refit_temperature(scored.probabilities, data.first_labels())
    if head is pipeline.scorer.head:
        return pipeline
    scorer, checks = pipeline.scorer.with_head(head), pipeline.checks
    if checks is not None:
        scores = score_dataset(scorer, data, compute, "checks").scores
        checks = fit_checks(checks.names, *[check_values(checks.names, scores)] * 2)
    return pipeline.with_scorer(scorer, checks=checks)


def settings_of(model: FittedModel, changes: Mapping[str, Any]) -> FitSettings:
    """Return the settings that a fitted model was calibrated with, after ``changes``."""
    known = [*filter(model.task.reads, settings_where(calibrates=True))]
    if unread := changes.keys() - {*known}:
        raise UsageError(
            f"calibration of a {model.task.noun} does not read {', '.join(sorted(unread))}; it takes {', '.join(known)}"
        )
    rates = {name: value for name, value in model.policy.model_dump().items() if name in known and name != "risk"}
    return FitSettings(device=model.device, **rates, risk=risk_asked(model)).changed(changes)


def risk_asked(model: FittedModel) -> float | None:
    """Return the risk that the user of a fit asked for; None where it was left to the fit."""
    asked = model.report.get("metrics", {}).get("risk_asked")
    return asked if isinstance(asked, float) and 0 < asked < 1 else None


@torch.inference_mode()
def score_dataset(scorer: Scorer, dataset: ImageDataset, compute: Compute, description: str) -> Scored:
    """Run every image through the path that serves; scores (n,) by name and probabilities (n, K), on the CPU."""
    parts = []
    for batch in track_images(dataset, compute, description):
        scored = scorer(batch.images.to(compute.device))
        parts.append(Scored({name: values.cpu() for name, values in scored.scores.items()}, scored.probabilities.cpu()))
    scores = {name: torch.cat([part.scores[name] for part in parts]) for name in parts[0].scores}
    return Scored(scores, torch.cat([part.probabilities for part in parts]))


def trial_of(calibration: ImageDataset) -> Tensor:
    """Return the first calibration images, which the model keeps for checking a copy of it."""
    first = calibration.subset(torch.arange(min(TRIAL_IMAGES, len(calibration))))
    return torch.cat([batch.images for batch in first.batches(TRIAL_IMAGES)])
