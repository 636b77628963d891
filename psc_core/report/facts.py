"""The numbers that a person wants to know of a bundle, computed once for the terminal, the page and the model card."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from psc_core.bundle.io import read_bundle
from psc_core.bundle.manifest import Manifest
from psc_core.calibration.conformal import Calibration
from psc_core.collapse.report import Candidate, CollapseReport
from psc_core.errors import BundleError
from psc_core.policy import Policy
from psc_core.report.content import Content, Role

WHO: Final = {"base": "the network itself", "psc": "with PSC"}
"""Titles of classifiers; others, from ``psc-eval``, go by their own name."""

COLUMNS: Final = {"accuracy": "accuracy", "nll": "NLL, nats", "ece": "ECE"}
"""Metrics of a classifier and their titles."""

LOSS: Final = 0.01
"""Accuracy lost beside the network's own, from which on a person is warned."""


@dataclass(frozen=True)
class Facts:
    """What is known of a bundle and the images of its report."""

    folder: Path
    manifest: Manifest
    content: Content
    ood_threshold: float  # OOD score above which the alarm is raised, nats
    ambiguity_threshold: float | None  # predictive entropy, nats; None where nothing is called ambiguous
    collapse: CollapseReport | None
    candidate: Candidate | None
    warnings: tuple[str, ...]

    @property
    def flagged(self) -> dict[str, float]:
        """Fraction of each set of images that raises the alarm."""
        return {
            images.name: float((images.ood_score > self.ood_threshold).double().mean()) for images in self.content.sets
        }

    @property
    def classifiers(self) -> dict[str, Mapping[str, float]]:
        """Quality on the test images where there are some, else on validation images, the network itself first."""
        known = [images for images in self.content.sets if images.role in (Role.VALIDATION, Role.TEST)]
        quality = known[-1].quality if known else {}
        return {WHO.get(name, name): quality[name] for name in sorted(quality, key=lambda name: name != "base")}

    def flagged_as(self, role: Role) -> dict[str, float]:
        """:attr:`flagged` of the sets of one role."""
        return {images.name: self.flagged[images.name] for images in self.content.sets if images.role is role}

    def images_of(self, *roles: Role) -> int:
        """Number of images in the last set of these roles, 0 without one."""
        return next((len(images.ood_score) for images in self.content.sets[::-1] if images.role in roles), 0)

    def to_text(self) -> str:
        """The last lines of a fit on the terminal."""
        policy = self.manifest.policy
        lines = []
        if self.classifiers:
            width = max(map(len, self.classifiers))
            lines.append(f"{'':{width}}  " + "  ".join(f"{title:>9}" for title in COLUMNS.values()))
            for name, quality in self.classifiers.items():
                lines.append(f"{name:{width}}  " + "  ".join(f"{quality[metric]:9.4f}" for metric in COLUMNS))
            lines.append(f"on {self.images_of(Role.VALIDATION)} validation images that nothing was chosen on")
        lines.append(
            f"out of distribution: OOD score above {self.ood_threshold:.4g} nats (alpha {policy.alpha:g}: at most "
            f"{policy.alpha:.1%} of images like the validation images)"
        )
        if self.ambiguity_threshold is not None:
            lines.append(f"ambiguous: predictive entropy above {self.ambiguity_threshold:.4g} nats")
        if made_up := self.flagged_as(Role.MADE_UP):
            found = ", ".join(f"{name} {fraction:.0%}" for name, fraction in made_up.items())
            lines.append(f"made-up images found out of distribution: {found}")
        return "\n".join([*lines, *(f"warning: {text}" for text in self.warnings)])


def facts_of(folder: Path, content: Content) -> Facts:
    """The facts of the bundle in ``folder``.

    Raises:
        BundleError: The bundle is damaged, or the content belongs to another one.
    """
    bundle = read_bundle(folder)
    manifest = bundle.manifest
    if content.version != manifest.version:
        raise BundleError(
            f"{folder} is version {manifest.version}, its report is of {content.version}; fit again, or write a report "
            "of test images with psc-eval --out"
        )
    if not isinstance(manifest.policy, Policy):
        raise BundleError(f"{folder} is of a regression, which has no report yet; psc-eval measures it")
    calibration = Calibration.from_tensors(bundle.parts["calibration"])
    collapse, candidate = _collapse_of(manifest)
    metrics: Mapping[str, Any] = manifest.metrics
    is_reachable = metrics.get("risk", {"threshold": 0})["threshold"] is not None
    return Facts(
        folder,
        manifest,
        content,
        calibration.ood_score_threshold(manifest.policy.alpha),
        manifest.policy.ambiguity_threshold if is_reachable else None,
        collapse,
        candidate,
        tuple(_warnings(metrics, candidate, content)),
    )


def _collapse_of(manifest: Manifest) -> tuple[CollapseReport | None, Candidate | None]:
    if manifest.collapse is None:
        return None, None
    data = dict(manifest.collapse)
    notes = tuple(data.pop("notes", ()))
    report = CollapseReport.from_json(data)
    by_rule = report.candidate()
    named = ", ".join(report.named(report.layer(layer)) for layer in manifest.layers)
    reason = by_rule.reason if by_rule.layers == manifest.layers else f"{named}, named by the caller"
    return report, Candidate(manifest.layers, reason, notes, report)


def _warnings(metrics: Mapping[str, Any], candidate: Candidate | None, content: Content) -> list[str]:
    found = list(candidate.notes) if candidate else []
    projection, risk = metrics.get("projection", {}), metrics.get("risk", {})
    found += [text for text in (projection.get("warning"), projection.get("pooled")) if text]
    if risk and risk["threshold"] is None:
        found.append(
            f"no entropy threshold keeps the error rate at {risk['promised']:g} with {risk['confidence']:.0%} "
            "confidence, so no image is called ambiguous; raise --risk or validate on more images"
        )
    for images in content.sets:
        if images.role is Role.VALIDATION and {"base", "psc"} <= images.quality.keys():
            lost = images.quality["base"]["accuracy"] - images.quality["psc"]["accuracy"]
            if lost > LOSS:
                found.append(
                    f"predictions with PSC are less accurate than the network's own by {lost:.3f}; "
                    "--predictions base keeps those"
                )
    return found
