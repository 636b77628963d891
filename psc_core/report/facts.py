"""The numbers that a person wants to know about a bundle, computed once for terminal, page and model card."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from psc_core.bundle import HISTORY, Bundle, Manifest
from psc_core.checks import KINDS_KEY
from psc_core.collapse import ChosenLayer, CollapseReport
from psc_core.errors import BundleError
from psc_core.metrics import in_practice
from psc_core.report import words
from psc_core.report.content import Content, Role, ScoredSet, TaskReport
from psc_core.tasks.base import BaseCalibration


@dataclass(frozen=True)
class Facts:
    """The facts about a bundle and the images of its report."""

    folder: Path
    manifest: Manifest
    content: Content
    calibration: BaseCalibration
    collapse: CollapseReport | None
    chosen: ChosenLayer | None
    warnings: tuple[str, ...]

    @cached_property
    def ood_threshold(self) -> float:
        """The OOD score above which the alarm is raised, in nats."""
        return self.calibration.ood_score_threshold(self.manifest.policy.alpha)

    @property
    def headline(self) -> str:
        """The sentence on what is promised of accepted images."""
        return self.manifest.policy.headline(self.manifest.metrics)

    @cached_property
    def in_practice(self) -> str:
        """A phrase for the rates of false alarms that so many calibration images give."""
        return in_practice(self.manifest.policy.alpha, len(self.calibration))

    @cached_property
    def calibrated_on(self) -> str:
        """A phrase for the images to which the stated rates apply."""
        history = self.manifest.provenance.get(HISTORY)
        if not history:
            return "validation images of the fit"
        count, days = history[-1]["calibrated_on"], history[-1].get("days")
        if not days:
            return f"{count} labelled images that Python code gave to calibrate"
        first, last = days
        return f"{count} labelled images of a service's random sample, {first} to {last}"

    @property
    def extension(self) -> str:
        """A sentence on how the last recalibration extended the density; empty if it did not."""
        found = self.manifest.provenance.get(HISTORY, [{}])[-1].get("extension")
        if not found or not found["times"]:
            return ""
        rows = zip(found[KINDS_KEY], found["auroc_before"], found["auroc_after"], strict=True)
        compared = ", ".join(f"{transform} {before:.3f} to {after:.3f}" for transform, before, after in rows)
        return (
            f"{found['images']} labelled images outside the random sample extend the density, each as {found['times']} "
            f"training images; AUROC on synthetic OOD images: {compared}."
        )

    @cached_property
    def limits(self) -> Mapping[str, float | None]:
        """The limits of the other decisions, by the figure that shows them; None if no image is beyond."""
        return self.of_task.limits_of(self.manifest.policy, self.calibration, self.manifest.metrics)

    @property
    def columns(self) -> Mapping[str, str]:
        """The metrics of this task and their titles."""
        return self.of_task.columns

    @cached_property
    def flagged(self) -> dict[str, float]:
        """The fraction of each set of images that raises the alarm."""
        return {
            images.name: float((images.ood_score > self.ood_threshold).double().mean()) for images in self.content.sets
        }

    @cached_property
    def measured(self) -> ScoredSet | None:
        """The images on which nothing was selected: test images if there are any, else validation images."""
        known = [images for images in self.content.sets if images.role in (Role.VALIDATION, Role.TEST)]
        return known[-1] if known else None

    @cached_property
    def quality(self) -> dict[str, Mapping[str, float]]:
        """The metrics on :attr:`measured` by predictor, the original network first; the recorded ones if it is None."""
        quality = self._recorded if self.measured is None else self.measured.quality
        ordered = sorted(quality, key=lambda name: name != "original")
        return {words.PREDICTORS.get(name, name): quality[name] for name in ordered}

    @property
    def _recorded(self) -> Mapping[str, Mapping[str, float]]:
        metrics, keys = self.manifest.metrics, self.of_task.recorded
        found = {name: metrics[key] for name, key in keys.items() if key in metrics}
        return {"psc": found} if found else {}

    @property
    def quality_images(self) -> int:
        """The number of images behind :attr:`quality`."""
        if self.measured is None:
            return int(self.manifest.metrics.get("validation_images", 0))
        return len(self.measured.ood_score)

    def cells(self, quality: Mapping[str, float]) -> list[str]:
        """Format the metrics of a predictor in the order of :attr:`columns`, with a dash for a missing one."""
        digits = self.of_task.digits
        return [f"{quality[metric]:{digits}}" if metric in quality else "–" for metric in self.columns]

    @property
    def policy_lines(self) -> list[str]:
        """The meaning of the policy for this bundle, one line each."""
        policy = self.manifest.policy
        return [
            f"out of distribution: OOD score above {self.ood_threshold:.4g} nats (alpha {policy.alpha:g}: at most "
            f"{policy.alpha:.1%} of images like the calibration images on average; {self.in_practice}%)",
            *self.of_task.policy_lines(self.manifest.task, policy, self.limits),
        ]

    @property
    def kept_images(self) -> str:
        """A sentence on the training images that a bundle shows to anyone who has it; empty if it keeps none."""
        kept = self.manifest.stored_images
        return "" if kept is None else f"stores {kept.count} training images, which are as private as these"

    def flagged_as(self, role: Role) -> dict[str, float]:
        """Return :attr:`flagged` for the sets of one role."""
        return {images.name: self.flagged[images.name] for images in self.content.sets if images.role is role}

    def to_text(self) -> str:
        """Return the last lines of a fit on the terminal."""
        lines = [self.headline]
        if self.quality:
            width = max(map(len, self.quality))
            lines.append(f"{'':{width}}  " + "  ".join(f"{title:>9}" for title in self.columns.values()))
            for name, quality in self.quality.items():
                lines.append(f"{name:{width}}  " + "  ".join(f"{cell:>9}" for cell in self.cells(quality)))
            lines.append(f"on {self.quality_images} validation images that nothing was chosen on")
        lines += [*self.policy_lines, *filter(None, [self.kept_images])]
        if synthetic := self.flagged_as(Role.SYNTHETIC):
            found = ", ".join(f"{name} {fraction:.0%}" for name, fraction in synthetic.items())
            lines.append(f"synthetic OOD images found out of distribution: {found}")
        return "\n".join([*lines, *(f"warning: {text}" for text in self.warnings)])

    @cached_property
    def of_task(self) -> TaskReport[Any, Any]:
        """What the report says and shows of a model of this task."""
        return self.manifest.task.report()


def facts_of(bundle: Bundle, content: Content) -> Facts:
    """Return the facts about a bundle."""
    calibration = bundle.manifest.task.calibration_type.from_tensors(bundle.parts["calibration"])
    return facts_about(bundle.path, bundle.manifest, calibration, content)


def facts_about(folder: Path, manifest: Manifest, calibration: BaseCalibration, content: Content) -> Facts:
    """Return the facts about a bundle that is not on disk; raises the errors of :func:`facts_of`."""
    if content.version != manifest.version:
        raise BundleError(
            f"{folder} is version {manifest.version}, its report is for {content.version}; fit again, or write a "
            "report of test images with psc-eval --out"
        )
    collapse, chosen = _collapse_of(manifest)
    return Facts(
        folder,
        manifest,
        content,
        calibration,
        collapse,
        chosen,
        tuple(_warnings(manifest, chosen, content)),
    )


def _collapse_of(manifest: Manifest) -> tuple[CollapseReport | None, ChosenLayer | None]:
    if manifest.collapse is None:
        return None, None
    data = dict(manifest.collapse)
    notes = tuple(data.pop("notes", ()))
    report = CollapseReport.from_json(data)
    by_rule = report.choose()
    if by_rule.layers == manifest.layers:
        return report, by_rule  # its notes have today's wording
    named = ", ".join(report.named(report.layer(layer)) for layer in manifest.layers)
    return report, ChosenLayer(manifest.layers, f"{named}, named by the caller", notes, report)


def _warnings(manifest: Manifest, chosen: ChosenLayer | None, content: Content) -> list[str]:
    of_task, metrics = manifest.task.report(), manifest.metrics
    projection = metrics.get("projection", {})
    found = manifest.policy.notes(manifest.classes)
    found += chosen.notes if chosen else ()
    found += [text for text in (projection.get("warning"), projection.get("pooled")) if text]
    found += of_task.warnings_of(metrics, manifest.head.record)
    both = [
        images.quality
        for images in content.sets
        if images.role is Role.VALIDATION and {"original", "psc"} <= images.quality.keys()
    ]
    return found + [
        f"predictions with PSC are less accurate than the network's own by {lost}; --predictions original avoids this"
        for quality in both
        if (lost := of_task.accuracy_lost(quality["original"], quality["psc"]))
    ]
