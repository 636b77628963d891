"""Calibrate a model on images that nothing was chosen on, through the path that serves.

A fit calibrates a :class:`.Scorer` (:func:`calibrate_scorer`); later, a fitted :class:`.Pipeline` is calibrated again
on other images (:func:`calibrate_again`).  Both run n images through the network; from scores (n,) by name and
probabilities (n, K) come the task's calibration, the thresholds of its policy, and metrics of the n images, on the CPU.
Where images stand for several others, ``weights`` (n,) says for how many.

Later a bundle is calibrated again, on the random sample of a prediction log (:mod:`psc_core.log.sample`).  Network,
projection, density, head and checks stay.  p-values, prediction sets or intervals and the ambiguity threshold come from
the n sampled images alone, each weighted (n,) by the inverse of the probability that it was drawn with.  Those of the
fit no longer are like the images to come, and the rates of a mixture would hold for neither.

:func:`extend`: images outside the random sample, labelled as people liked, can extend the densities
(:mod:`psc_core.density`).  Each counts as one more training image or as several equal ones, because of a new camera
there are few images and of the old one perhaps a million.  Of :data:`TIMES` the one with the least regret on synthetic
images is taken, among those that lose at most :data:`LARGEST_LOSS` of AUROC on every transform; 0 changes nothing.
Extended densities give other values, so the p-values of their checks come from the same real images; those of 0 do
too while they are compared, or the checks would win and not the density.

:func:`learn`: images reviewed as none of the classes become the check ``reviewed`` (:mod:`psc_core.learnt`), which
replaces an earlier one; otherwise that stays.  It is taken where it ranks reviewed images that it has not learnt from
higher among images of the classes, by more than the standard error of that gain over images of both kinds, and on no
transform loses more than :data:`LARGEST_LOSS` of AUROC by more than the standard error of that loss, or as much again.

:func:`add_class`: images that people named become one more class (:mod:`psc_core.learnt`).  What was learnt from
reviewed images is forgotten, because these may be among them.

:func:`recalibrate_from_sample` does it all.  A quarter of the sampled images chooses the times, whether a check is
taken, and the temperature of the original network's predictions, and calibrates nothing, so that the rates hold
whatever is chosen.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int
from torch import Tensor

from psc_core import __version__
from psc_core.answers import WITHOUT_IMAGE, BasePolicy
from psc_core.bundle import HISTORY
from psc_core.checks import (
    CONFIDENCE,
    CONTENT,
    KINDS_KEY,
    MIXED,
    REAL,
    REVIEWED,
    Auroc,
    Checks,
    by_transform,
    check_values,
    fit_checks,
    regret,
    synthetic_batches,
)
from psc_core.compute import Compute, begin, count_images, track_images
from psc_core.conformal import check_rates, effective_count, equal_scores, thin
from psc_core.data.dataset import ImageDataset
from psc_core.density import EXAMPLES, Density, can_extend, class_values, draw_images, extend_density, widen_density
from psc_core.errors import UsageError, warn
from psc_core.fit_data import FitJob
from psc_core.fit_parts import round_floats
from psc_core.heads.base import Scored
from psc_core.images.preprocess import Pixels
from psc_core.learnt import (
    DRAWN,
    FEWEST,
    PARTS,
    AddedClass,
    Kind,
    Reviewed,
    cluster,
    fit_added,
    fit_reviewed,
    is_answer,
    moments_of,
    not_told_apart,
    store_images,
    with_enough,
)
from psc_core.log.labels import LABEL_KINDS, MAX_NAME, NONE_OF_THE_CLASSES, OF
from psc_core.log.sample import Sample
from psc_core.maps import LayerMap
from psc_core.metrics import auroc, auroc_difference, in_practice, placements
from psc_core.model import TRIAL_IMAGES, FittedModel
from psc_core.pipeline import Pipeline, Scorer, ood_score_of
from psc_core.scoring import dataset_outputs
from psc_core.settings import FitSettings, settings_where
from psc_core.stored_images import StoredImages
from psc_core.tasks.base import BaseDecisions, Calibrated
from psc_core.text import align, compose


def calibrate_scorer(
    scorer: Scorer,
    job: FitJob,
    checks: Sequence[str] = (),
    layer_map: LayerMap | None = None,
    stored_images: StoredImages | None = None,
) -> tuple[Pipeline, Calibrated]:
    """Return a pipeline whose checks are fitted to the selection split, calibrated on the calibration split."""
    begin("calibration")
    data, compute, fitted_checks = job.data, job.compute, None
    scored = score_dataset(scorer, data.calibration, compute, "calibration")
    if checks:
        selected = score_dataset(scorer, data.selection, compute, "selection").scores
        fitted_checks = fit_checks(checks, check_values(checks, selected), check_values(checks, scored.scores))
    ood_score, _ = ood_score_of(scored.scores, fitted_checks)
    found = data.task_type.calibrate(scored, ood_score, data.calibration, job.settings)
    return Pipeline(scorer, found.calibration.ood_scores, fitted_checks, layer_map, stored_images), found


def calibrate_again(
    model: FittedModel,
    pipeline: Pipeline,
    data: ImageDataset,
    changes: Mapping[str, Any],
    entry: Mapping[str, Any],
    weights: Tensor | None = None,  # how many images each one stands for; None: itself alone
) -> tuple[FittedModel, Mapping[str, Any]]:
    """Return ``model`` with a pipeline that is calibrated on ``data`` alone; everything that was chosen stays.

    It has no version, as no bundle holds it yet, and ``entry`` in its history.  The metrics beside it are not rounded.
    """
    task, settings = type(model.task), settings_of(model, changes)
    or_higher = "risk" not in changes  # whether a higher risk may replace one that cannot be shown
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
    found = task.calibrate(scored, ood_score, data, settings, weights, or_higher=or_higher)
    before = {name: value for name, value in model.report.get("metrics", {}).items() if name != WITHOUT_IMAGE}
    metrics = {**before, **found.metrics}  # A width that is asked for is not the calibration's.
    provenance = model.report.get("provenance", {})
    entry = {"from": model.version, "psc_version": __version__, **entry}
    calibrated = replace(
        model,
        pipeline=pipeline.with_scorer(pipeline.scorer, scores=found.calibration.ood_scores, checks=checks),
        calibration=found.calibration,
        policy=found.policy,
        report={
            **model.report,
            "metrics": round_floats(metrics),
            "provenance": {**provenance, HISTORY: [*provenance.get(HISTORY, []), entry]},
        },
        version="",
        trial=trial_of(data),
    )
    return calibrated, found.metrics


def warn_of_policy(policy: BasePolicy, metrics: Mapping[str, Any]) -> None:
    """Warn where what a policy promises of accepted images is less than a user expects."""
    if policy.surprises(metrics):
        warn(policy.headline(metrics))


def refit_temperature(pipeline: Pipeline, data: ImageDataset, settings: FitSettings) -> Pipeline:
    """Return a pipeline with a new temperature of the original network, chosen on images that do not calibrate.

    It has to be calibrated.  The check ``confidence`` reads logits divided by the temperature; where that changes, its
    p_g is fitted to the same images again.
    """
    compute = settings.compute()
    before = pipeline.scorer.replace(added=())
    known = (data.first_labels() < len(pipeline.scorer.density.constants) - len(pipeline.scorer.added)).nonzero()[:, 0]
    of_network = data.subset(known)
    scored = score_dataset(before, of_network, compute, "temperature")
    head = pipeline.scorer.head.refit_temperature(scored.probabilities, of_network.first_labels())
    if head is pipeline.scorer.head:
        return pipeline
    scorer, checks = pipeline.scorer.replace(head=head.to(pipeline.scorer.scale.device)), pipeline.checks
    if checks is not None and CONFIDENCE in checks.names:
        checks = checks.refitted(CONFIDENCE, score_dataset(scorer, of_network, compute, "checks").scores[CONFIDENCE])
    return pipeline.with_scorer(scorer, checks=checks)


def settings_of(model: FittedModel, changes: Mapping[str, Any]) -> FitSettings:
    """Return the settings that a fitted model was calibrated with, after ``changes``."""
    known = [*filter(model.task.reads, settings_where(calibrates=True))]
    if unread := changes.keys() - {*known}:
        raise UsageError(
            f"calibration of a {model.task.noun} does not read {', '.join(sorted(unread))}; it takes {', '.join(known)}"
        )
    asked = model.policy.asked(model.report.get("metrics", {}))
    return FitSettings(device=model.device, **{name: asked[name] for name in known if name in asked}).changed(changes)


@torch.inference_mode()
def score_dataset(scorer: Scorer, dataset: ImageDataset, compute: Compute, description: str) -> Scored:
    """Run every image through the path that serves; scores (n,) by name and probabilities (n, K), on the CPU."""
    parts = []
    for batch in track_images(dataset, compute, description):
        scored = scorer(batch.images.to(compute.device))
        count_images(len(batch.images))
        parts.append(scored.to("cpu"))
    return Scored.joined(parts)


def trial_of(calibration: ImageDataset) -> Tensor:
    """Return the first calibration images, which the model keeps for checking a copy of it."""
    first = calibration.subset(torch.arange(min(TRIAL_IMAGES, len(calibration))))
    return torch.cat([batch.images for batch in first.batches(TRIAL_IMAGES)])


TIMES: Final = (0, 1, 10, 100)  # numbers of training images that one image may stand for
LARGEST_LOSS: Final = 0.02  # AUROC that an extended density may lose on a transform of synthetic OOD images


@dataclass(frozen=True)
class Extension:
    """A pipeline with extended densities, and the comparison that chose how far."""

    pipeline: Pipeline  # has to be calibrated again
    images: int  # number that were given to extend the densities
    times: int  # training images that each stands for, one of :data:`TIMES`
    aurocs: Mapping[int, Auroc]  # by times, then by transform

    def table(self) -> str:
        """Return a line for each number of times, with the AUROC of each transform."""
        rows = [["times", *self.aurocs[0]]]
        for times, of_transform in self.aurocs.items():
            numbers = (f"{value:.4f}" for value in of_transform.values())
            rows.append([str(times), *numbers, "◀ chosen" * (times == self.times)])
        head = f"AUROC on synthetic OOD images; each of {self.images} images outside the sample counts this many times:"
        return "\n".join([head, *align(rows)])

    def warning(self) -> str:
        """Return the reason why the densities stay as they are; empty where they change."""
        if self.times:
            return ""
        return (
            f"the density stays as it is: with these {self.images} images it is no better on synthetic OOD images, or "
            f"loses more than {LARGEST_LOSS:g} of AUROC on a transform of them; check their labels, or give more"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the extension as a bundle records it, in JSON types."""
        before, after = self.aurocs[0], self.aurocs[self.times]
        return {
            "images": self.images,
            "times": self.times,
            KINDS_KEY: list(before),
            "auroc_before": [*before.values()],
            "auroc_after": [*after.values()],
        }


def seen_examples(model: FittedModel) -> int:
    """Return the number of labelled examples that the densities of a model were fitted to."""
    instead = "fit the bundle again with these images among the training images"
    if why_not := model.task.why_not_extended:
        raise UsageError(f"{why_not}; {instead}")
    density = model.pipeline.scorer.density
    if not can_extend(type(density)):
        raise UsageError(f"a density {density.kind!r} has tensors that more images cannot extend; {instead}")
    in_manifest = model.report.get("provenance", {}).get("train", {}).get("rows")  # Where the density does not say.
    found = density.record.get(EXAMPLES, in_manifest)
    if not isinstance(found, int):
        raise UsageError(f"the bundle of {model.name} does not say how many examples its density has seen; {instead}")
    return found


def makes_mixed(model: FittedModel) -> bool:
    """Return whether the fit mixed images of two classes, which are out of distribution unless images are ambiguous."""
    return MIXED in model.report.get("metrics", {}).get("checks", {}).get(KINDS_KEY, ())


def extend(model: FittedModel, more: ImageDataset, real: ImageDataset, compute: Compute) -> Extension:
    """Extend the densities where that is better on images made from ``real``, which neither extend nor calibrate."""
    if model.pipeline.scorer.added:  # Their log odds are calibrated in the coordinates and to the means of before.
        raise UsageError(
            "with another density the model would answer its added classes less often; extend the bundle "
            "from before the first of them, then add each again"
        )
    examples = seen_examples(model)
    read = _read(model.pipeline.scorer, more, compute)
    pipelines = {
        times: extend_pipeline(model.pipeline, read, examples, times) if times else model.pipeline for times in TIMES
    }
    scorers = {times: pipeline.scorer for times, pipeline in pipelines.items()}
    names = model.checks or (CONTENT,)
    values = _synthetic_values(scorers, names, real, compute, mixed=makes_mixed(model))
    inside = {times: of_transform[REAL] for times, of_transform in values.items()}
    checks = {times: fit_checks(names, inside[times], inside[times]) if model.checks else None for times in TIMES}
    aurocs = {times: _aurocs(checks[times], values[times]) for times in TIMES}
    chosen = _choose(aurocs)
    pipeline, fitted = pipelines[chosen], checks[chosen]
    if chosen and fitted is not None and (reviewed := pipeline.scorer.reviewed) is not None:
        density, largest = copy.deepcopy(pipeline.scorer.density).cpu(), copy.deepcopy(reviewed).cpu().largest
        fitted = fitted.with_reviewed(class_values(draw_images(density, DRAWN), largest, inside[chosen][:, -1]))
    if chosen:
        pipeline = pipeline.with_scorer(pipeline.scorer, checks=fitted)
    return Extension(pipeline, len(more), chosen, aurocs)


def extend_pipeline(pipeline: Pipeline, read: Mapping[str, Tensor], examples: int, times: int) -> Pipeline:
    """Return a pipeline whose densities have seen more images, as :func:`_read` reads them, each ``times`` times."""
    scorer, labels, texture = pipeline.scorer, read["labels"], None
    found = extend_density(scorer.density, read["inputs"], labels, examples=examples, times=times)
    if scorer.texture is not None:
        texture = extend_density(scorer.texture, read["early"], labels, examples=examples, times=times).density
    stored_images = None if pipeline.stored_images is None else pipeline.stored_images.moved(found.moved)
    reviewed = None if scorer.reviewed is None else scorer.reviewed.moved(found)
    scorer = scorer.replace(density=found.density, texture=texture, reviewed=reviewed).to(scorer.scale.device)
    return pipeline.with_scorer(scorer, stored_images=stored_images)


def _choose(aurocs: Mapping[int, Auroc]) -> int:
    """Return the times with the least regret, on a tie the smallest, among those that lose little everywhere."""
    named = {str(times): of_transform for times, of_transform in aurocs.items()}
    allowed = [
        times
        for times, found in aurocs.items()
        if all(value >= aurocs[0][name] - LARGEST_LOSS for name, value in found.items())
    ]
    return min(allowed, key=lambda times: (regret(named, str(times)), times))


def _aurocs(checks: Checks | None, values: Mapping[str, Float[Tensor, "n checks"]]) -> dict[str, float]:
    scores = {
        name: each[:, 0] if checks is None else checks.score(each.to(checks.ascending.device)).cpu()
        for name, each in values.items()
    }
    return {name: auroc(scores[REAL], altered) for name, altered in scores.items() if name != REAL}


def _read(scorer: Scorer, data: ImageDataset, compute: Compute, what: str = "images more") -> dict[str, Tensor]:
    """Return what density and texture read of images, their probabilities and labels by name, on the CPU."""

    def read(images: Tensor) -> dict[str, Tensor]:
        embedding = scorer.embed(images.to(compute.device))
        early = {} if embedding.early is None else {"early": embedding.early}
        return {"inputs": embedding.density_input, "p": scorer.score(embedding).probabilities, **early}

    batches = ({REAL: batch.images} for batch in track_images(data, compute, what))
    return {**by_transform(batches, read)[REAL], "labels": data.first_labels()}


def _synthetic_values(
    scorers: Mapping[int, Scorer], names: tuple[str, ...], real: ImageDataset, compute: Compute, *, mixed: bool
) -> dict[int, dict[str, Float[Tensor, "n checks"]]]:
    """Return values (n, checks) by times, then by transform; the scorers differ in their densities alone."""

    def read(images: Pixels) -> dict[int, Tensor]:
        embedding = scorers[0].embed(images)
        return {times: check_values(names, scorer.score(embedding).scores) for times, scorer in scorers.items()}

    found = by_transform(synthetic_batches(real, compute, "synthetic OOD images", mixed=mixed, seed=0), read)
    return {times: {name: of_transform[times] for name, of_transform in found.items()} for times in scorers}


@dataclass(frozen=True)
class Learnt:
    """A pipeline that has learnt from reviewed images, and the comparison with one without such a check."""

    pipeline: Pipeline  # has to be calibrated again; as it was if the check does not help
    kinds: tuple[Kind, ...]
    before: Auroc  # of reviewed images that were held back, then by transform
    after: Auroc
    ranks: Float[Tensor, "2 n"]  # of images held back among those of the classes, from 0 to 1: before and after
    why_not: str  # the reason why the check is not taken; empty where it is
    earlier: tuple[Kind, ...] = ()  # of the check that was learnt before, which stays where this one is not taken

    @property
    def helps(self) -> bool:
        return not self.why_not

    def found(self, alpha: float) -> str:
        """Return a sentence on the alarms at ``alpha`` on reviewed images that were held back."""
        before, after = ((self.ranks >= 1 - alpha).double().mean(1)).tolist()
        return (
            f"alarms at alpha {alpha:g} on reviewed images that were held back: {before:.1%} without the check, "
            f"{after:.1%} with it"
        )

    def table(self) -> str:
        """Return a line before and after, with the AUROC of each kind of images."""
        rows = [["check reviewed", *self.before]]
        rows += [
            [name, *(f"{value:.4f}" for value in found.values())]
            for name, found in (("without", self.before), ("with", self.after))
        ]
        kinds = ", ".join(f"{kind.images} {kind.name}" for kind in self.kinds)
        return "\n".join([f"AUROC against images of the classes, with what {kinds} teach:", *align(rows)])

    def warning(self) -> str:
        """Return the reason why the check is not taken, and what to do; empty where it is."""
        if self.helps:
            return ""
        kinds = ", ".join(f"{kind.images} {kind.name}" for kind in self.earlier)
        stays = f"; the check learnt before, from {kinds}, stays: to forget it, start from the bundle before it"
        return (
            f"the check reviewed is not taken: {self.why_not}; look at the labels, or review more; the quarter that "
            "compared calibrates nothing: without --learn all images do"
        ) + stays * bool(self.earlier)

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as a bundle records it, in JSON types."""
        return {
            "kinds": [kind._asdict() for kind in self.kinds],
            "helps": self.helps,
            "images": list(self.before),
            "auroc_before": [*self.before.values()],
            "auroc_after": [*self.after.values()],
        }


@torch.inference_mode()
def clusters_of(model: FittedModel, images: ImageDataset) -> list[int]:
    """Return the cluster of each reviewed image, see :func:`psc_core.learnt.cluster`."""
    scorer = model.pipeline.scorer
    density, read = copy.deepcopy(scorer.density).cpu(), _read(scorer, images, Compute(model.device))
    found: list[int] = cluster(density, density.coordinates(read["inputs"])).tolist()
    return found


def learn(
    pipeline: Pipeline,
    unknown: ImageDataset,  # labelled with kinds
    days: Sequence[str],  # of each, or none
    real: ImageDataset,  # of the classes, which calibrate nothing
    compute: Compute,
    *,
    mixed: bool,
) -> Learnt:
    """Fit the check ``reviewed`` where that is better on images that it has not learnt from."""
    if pipeline.checks is None:
        raise UsageError("the model has no checks, to which another could be added; fit it again with ood_score checks")
    unknown, scorer = with_enough(unknown), pipeline.scorer
    density, checks = copy.deepcopy(scorer.density).cpu(), copy.deepcopy(pipeline.checks).cpu().without_reviewed()
    kinds, names = unknown.first_labels(), unknown.classes

    @torch.inference_mode()
    def read(images: Tensor) -> dict[str, Tensor]:
        embedding = scorer.embed(images.to(compute.device))
        values = check_values(checks.names, scorer.score(embedding).scores)
        return {"w": scorer.density.coordinates(embedding.density_input), "values": values}

    def without(of: Mapping[str, Tensor]) -> Tensor:
        return checks.score(of["values"])

    def checks_with(reviewed: Reviewed) -> Checks:
        return checks.with_reviewed(class_values(drawn, reviewed.largest, reviewed.largest(inside["w"])))

    def score_with(reviewed: Reviewed, new: Checks) -> Callable[[Mapping[str, Tensor]], Tensor]:
        return lambda of: new.score(torch.cat([of["values"], reviewed.largest(of["w"])[:, None]], dim=1))

    batches = ({REVIEWED: batch.images} for batch in track_images(unknown, compute, "reviewed images"))
    seen = by_transform(batches, read)[REVIEWED]
    made = by_transform(synthetic_batches(real, compute, "synthetic OOD images", mixed=mixed, seed=0), read)
    inside, moments = made.pop(REAL), moments_of(density)
    drawn = draw_images(density, max(DRAWN, checks.ascending.shape[1]))
    ranks = torch.zeros(2, len(kinds), dtype=torch.float64)  # of reviewed images among those of the classes
    of_real = torch.zeros(2, len(inside["w"]), dtype=torch.float64)  # fraction of reviewed images above each of these
    for part in range(PARTS):
        held = torch.arange(len(kinds)) % PARTS == part
        of_held = {name: values[held] for name, values in seen.items()}
        fitted = fit_reviewed(moments, seen["w"][~held], kinds[~held], names)
        for row, score in enumerate((without, score_with(fitted, checks_with(fitted)))):
            known, found = score(inside), score(of_held)
            ranks[row, held] = placements(found, known)
            of_real[row] += float(held.double().mean()) * (1 - placements(known, found))
    reviewed, gains = fit_reviewed(moments, seen["w"], kinds, names, days), ranks[1] - ranks[0]
    new = checks_with(reviewed)
    scores = without, score_with(reviewed, new)
    before, after = (
        {"reviewed, held back": mean, **{name: auroc(score(inside), score(of)) for name, of in made.items()}}
        for mean, score in zip(ranks.mean(1).tolist(), scores, strict=True)
    )
    # The standard error of the difference of two AUROCs on the same images, of both kinds (DeLong et al. 1988).
    errors = [each.std(correction=0) / math.sqrt(len(each)) for each in (gains, of_real[1] - of_real[0])]
    gain, error, why_not = float(gains.mean()), math.hypot(*map(float, errors)), ""
    if gain <= error:
        why_not = f"on reviewed images that were held back it gains {gain:.4f} of AUROC, ± {error:.4f} by chance"
    for name, of in made.items():
        loss, error = auroc_difference(*(score(each) for score in scores for each in (inside, of)))
        if loss > LARGEST_LOSS + min(error, LARGEST_LOSS):  # Of few images nearly any loss is within chance.
            lost = f"{loss:.4f} of AUROC, ± {error:.4f} by chance, more than {LARGEST_LOSS:g}"
            why_not = why_not or f"on {len(of['w'])} synthetic OOD images ({name}) it loses {lost}"
    if not why_not:
        if pipeline.stored_images is not None:
            reviewed = store_images(reviewed, unknown, seen["w"])
        pipeline = pipeline.with_scorer(scorer.replace(reviewed=reviewed).to(scorer.scale.device), checks=new)
    earlier = () if scorer.reviewed is None else scorer.reviewed.kinds
    return Learnt(pipeline, reviewed.kinds, before, after, ranks, why_not, earlier)


def with_class(model: FittedModel, name: str) -> FittedModel:
    """Return a model with one more class name, which has to be added; to read images that are labelled with it."""
    name = compose(name).strip()
    if not model.num_probabilities:
        raise UsageError(f"a {model.task.noun} has no classes that another could be added to")
    if name in model.network_classes:
        raise UsageError(
            f"{name} is one of the classes of the network; what people name so is labelled with it, and extends the "
            "density (--extend-density), but adds no class"
        )
    if name in model.classes:
        raise UsageError(
            f"{name} was added already; to add it from more images, add it again to the bundle from before it, from all"
        )
    if not 0 < len(name) <= MAX_NAME or name in LABEL_KINDS or OF in name:
        raise UsageError(f"expected the name of a class, of 1 to {MAX_NAME} characters without {OF!r}, got {name!r}")
    return replace(model, classes=(*model.classes, name))


@dataclass(frozen=True)
class Added:
    """A pipeline with one more class, and what is known of it."""

    pipeline: Pipeline  # has to be calibrated again
    name: str
    of_class: AddedClass
    recognised: float  # fraction of its images, held back, that are answered with it
    taken: float  # fraction of right answers with other classes that are now with it
    compared: int  # number of these answers
    forgets: bool  # whether there was a check ``reviewed``

    def text(self, *, learns: bool) -> str:
        """Return a sentence on what to expect."""
        taken = round(self.taken * self.compared)
        return (
            f"class {self.name} from {self.of_class.images} images: held back, {self.recognised:.1%} of them are "
            f"answered with it; it takes {taken} of {self.compared} right answers of other classes"
        ) + "; the check reviewed is gone, learn it again" * (self.forgets and not learns)

    def explained(self, headline: str) -> str:
        """Return the headline of a policy that promises less than before, with its likely cause and what to do."""
        return (
            f"{headline.partition('; check ')[0]}; of the class {self.name}, held back, {self.recognised:.1%} are "
            "recognised: give more images of it, teach it by --learn instead, or train with it"
        )

    def to_json(self) -> dict[str, Any]:
        """Return it as a bundle records it, in JSON types."""
        return {"name": self.name, **self.of_class._asdict(), "recognised": self.recognised, "taken": self.taken}


@torch.inference_mode()
def add_class(model: FittedModel, name: str, new: ImageDataset, real: ImageDataset, compute: Compute) -> Added:
    """Add a class of at least :data:`FEWEST` ``new`` images; ``real`` ones are of the classes before it."""
    examples, pipeline = seen_examples(model), model.pipeline
    scorer, count = pipeline.scorer, len(new)
    if count < FEWEST:
        raise UsageError(f"there are {count} images of {name}, and a class needs {FEWEST}; label {FEWEST - count} more")
    density = copy.deepcopy(scorer.density).cpu()
    of_new, of_real = (_read(scorer, data, compute, f"{of} images") for of, data in (("new", new), ("real", real)))
    right = of_real["p"].argmax(1) == of_real["labels"]
    w, old, of_right = density.coordinates(of_new["inputs"]), of_real["inputs"][right], of_real["p"][right]
    found, held, others = fit_added(name, density, w, density.coordinates(old), of_right)
    if not is_answer(held, of_new["p"]).any():  # The sign of a slope that is chance says nothing.
        raise not_told_apart(name, count)

    def wider(of: Density, features: Tensor) -> Density:
        return widen_density(copy.deepcopy(of).cpu(), features, examples=examples)

    texture = None if scorer.texture is None else wider(scorer.texture, of_new["early"])
    densities = {"density": wider(density, of_new["inputs"]), "texture": texture}
    parts = {**densities, "added": (*scorer.added, found), "reviewed": None}
    checks = None if pipeline.checks is None else pipeline.checks.without_reviewed()
    added = pipeline.with_scorer(scorer.replace(**parts).to(scorer.scale.device), checks=checks)
    shares = [
        float(is_answer(s, p).double().mean()) if len(s) else 0.0  # Of no right answer it takes none.
        for s, p in ((held, of_new["p"]), (others, of_right))
    ]
    return Added(added, name, found, shares[0], shares[1], int(right.sum()), scorer.reviewed is not None)


CHOOSES: Final = 0.25  # fraction of the sampled images that chooses temperature and extension
FEWEST_TO_CHOOSE: Final = 25  # images of equal weight; with fewer, temperature and density stay


def draw_quarter(count: int, seed: int) -> tuple[Int[Tensor, " m"], Int[Tensor, " others"]]:
    """Return the positions of a random quarter of ``count`` images, which chooses, and of the others, which calibrate.

    The first quarter by digest would not do: of a day that is reviewed in part the first digests alone are labelled.
    """
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    quarter, others = order.tensor_split([round(CHOOSES * count)])
    return quarter, others


@dataclass(frozen=True)
class Recalibrated:
    """A model that was calibrated again, and what the command prints about it."""

    model: FittedModel
    lines: tuple[str, ...]
    warnings: tuple[str, ...]


def recalibrate_from_sample(
    model: FittedModel,
    sample: Sample,
    changes: Mapping[str, Any],
    more: ImageDataset | None = None,
    unknown: tuple[ImageDataset, Sequence[str]] | None = None,
    named: tuple[FittedModel, ImageDataset] | None = None,
) -> Recalibrated:
    """Return the model of a bundle, calibrated on a random sample.

    Images outside it, ``more``, extend the density; the check ``reviewed`` learns from ``unknown`` ones, with days.  Of
    images that people ``named``, a class is added: the last of the model's that comes with them.
    """
    settings = settings_of(model, changes)
    lines, pipeline, calibrates, extension, learnt, added = [], model.pipeline, sample, None, None, None
    teaches = any(given is not None for given in (more, unknown, named))
    of_before = sample.of_class.first_labels() < len(model.classes)  # not of the added class
    if teaches or pipeline.scorer.head.has_temperature:
        quarter, others = draw_quarter(len(sample.of_class), seed=4)  # thin draws with seed 0
        chooses, rest = sample.at(quarter), sample.at(others)
        real = chooses.of_class.subset((thin(sample.weights) & of_before)[quarter].nonzero()[:, 0])
        if teaches and len(real) < FEWEST_TO_CHOOSE:
            raise UsageError(
                "a quarter of the sampled images of a class compares what changes with what was, and calibrates "
                f"nothing: at least {FEWEST_TO_CHOOSE}, and of {int(of_before.sum())} labelled images of the bundle's "
                f"classes that are {len(real)} that count equally; review at least "
                f"{round(FEWEST_TO_CHOOSE / CHOOSES)} of these drawn equally, or leave out --extend-density, --learn "
                "and --add-class"
            )
        if more is not None:
            extension = extend(model, more, real, settings.compute())
            pipeline, calibrates = extension.pipeline, rest
            lines.append(extension.table())
        if pipeline.scorer.head.has_temperature and len(real) >= FEWEST_TO_CHOOSE:
            pipeline, calibrates = refit_temperature(pipeline, real, settings), rest
            before, now = (each.scorer.head.record["temperature"] for each in (model.pipeline, pipeline))
            lines.append(f"temperature {now:.3g}, before {before:.3g}, by {len(real)} images, which do not calibrate")
        if named is not None:
            of = named[0].classes[-1]
            added = add_class(replace(model, pipeline=pipeline), of, named[1], real, settings.compute())
            pipeline, calibrates = added.pipeline, rest
            lines.append(added.text(learns=unknown is not None))
        if unknown is not None:
            learnt = learn(pipeline, *unknown, real, settings.compute(), mixed=makes_mixed(model))
            pipeline, calibrates = learnt.pipeline, rest
            lines += [learnt.table(), learnt.found(settings.alpha)]
    entry = {
        "days": list(sample.days),
        "labels": len(sample.of_class),
        "calibrated_on": len(calibrates.of_class),
        "effective_sample_size": effective_count(calibrates.weights),
        **{kind: len(images) for kind, images in sample.others.items()},
        "sha256": sample.of_class.digest(),
        **({} if extension is None else {"extension": extension.to_json()}),
        **({} if added is None else {"added_class": added.to_json()}),
        **({} if learnt is None else {REVIEWED: learnt.to_json()}),
    }
    wide = model if named is None else named[0]
    found, metrics = calibrate_again(wide, pipeline, calibrates.of_class, changes, entry, calibrates.weights)
    policy = found.policy
    lines = [policy.headline(metrics), *lines]
    promised, shown = (each.largest_error_rate() for each in (model.policy, policy))
    if promised is not None and shown is not None and promised < shown:
        lines[0] = lines[0] if added is None else added.explained(lines[0])
        lines[0] += f"; the bundle before promised at most {promised:.3g}"
    known, values = sample.of_class.subset(of_before.nonzero()[:, 0]), sample.of_class.values
    weights = sample.weights[of_before].numpy()
    if values is not None:
        ends = vars(_decisions(model, known))
        inside = (values.numpy() >= ends["lower"]) & (values.numpy() <= ends["upper"])
        held = float(np.average(inside, weights=weights))
        before, after = (each.calibration.quantile(each.policy.coverage) for each in (model, found))
        lines.append(f"{held:.0%} of the intervals held; half-width {before:.3g} → {after:.3g} standard deviations")
    was, of = _alarms(model, known, weights), "of a class" if values is None else "with a number"
    lines += [
        f"alarms at alpha {policy.alpha:g} on sampled images {of}: {was:.1%} before, at most {policy.alpha:.1%} "
        f"of such images now on average; {in_practice(policy.alpha, len(found.calibration))}%"
    ]
    for kind, images in sample.others.items():
        before, after = (_alarms(each, images) for each in (model, found))
        if learnt is None or not learnt.helps or kind != NONE_OF_THE_CLASSES:  # It knows these.
            lines.append(f"alarms on the {len(images)} images labelled {kind}: {before:.1%} before, {after:.1%} now")
    warnings = [each.warning() for each in (extension, learnt) if each is not None]
    return Recalibrated(found, tuple(lines), tuple(filter(None, warnings)))


def _alarms(model: FittedModel, images: ImageDataset, weights: npt.NDArray[np.float64] | None = None) -> float:
    """Return the fraction of the images that the model calls out of distribution, of those that they stand for."""
    return float(np.average(_decisions(model, images).is_ood, weights=weights))


def _decisions(model: FittedModel, images: ImageDataset) -> BaseDecisions:
    return model.decide(model.outputs(dataset_outputs(model, images, "alarms").packed.numpy()))
