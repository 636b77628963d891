"""The numbers that a person wants to know of a bundle, computed once for the terminal, the page and the model card."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from psc_core.bundle.io import read_bundle
from psc_core.bundle.manifest import Manifest
from psc_core.calibration.conformal import Calibration
from psc_core.calibration.intervals import ValueCalibration
from psc_core.collapse.report import Candidate, CollapseReport
from psc_core.errors import BundleError
from psc_core.policy import Policy, ValuePolicy
from psc_core.report.content import Content, Role

WHO: Final = {"base": "the network itself", "psc": "with PSC"}
"""Titles of predictors; others, from ``psc-eval``, go by their own name."""

COLUMNS: Final = {"accuracy": "accuracy", "nll": "NLL, nats", "ece": "ECE"}
"""Metrics of a classifier and their titles."""

VALUE_COLUMNS: Final = {"rmse": "RMSE", "r2": "R²", "nll": "NLL, nats", "crps": "CRPS"}
"""Metrics of a regression and their titles; RMSE and CRPS are in the target's unit."""

LOSS: Final = 0.01
"""Accuracy lost beside the network's own, from which on a person is warned."""

RMSE_LOSS: Final = 0.05
"""The same of a regression: how much larger its RMSE is, relative to the network's own."""


@dataclass(frozen=True)
class Facts:
    """What is known of a bundle and the images of its report."""

    folder: Path
    manifest: Manifest
    content: Content
    calibration: Calibration | ValueCalibration
    ambiguity_threshold: float | None  # predictive entropy, nats; None where nothing is called ambiguous
    collapse: CollapseReport | None
    candidate: Candidate | None
    warnings: tuple[str, ...]

    @property
    def ood_threshold(self) -> float:
        """OOD score above which the alarm is raised, nats."""
        return self.calibration.ood_score_threshold(self.manifest.policy.alpha)

    @property
    def deviation_threshold(self) -> float | None:
        """Predicted deviation above which an interval is too wide, target's unit; None where none is."""
        policy, calibration = self.manifest.policy, self.calibration
        if not isinstance(policy, ValuePolicy) or not isinstance(calibration, ValueCalibration):
            return None
        return None if policy.max_width is None else policy.max_width / 2 / calibration.deviations(policy.coverage)

    @property
    def columns(self) -> Mapping[str, str]:
        """Metrics of this kind of model and their titles."""
        return COLUMNS if self.manifest.target is None else VALUE_COLUMNS

    @property
    def flagged(self) -> dict[str, float]:
        """Fraction of each set of images that raises the alarm."""
        return {
            images.name: float((images.ood_score > self.ood_threshold).double().mean()) for images in self.content.sets
        }

    @property
    def quality(self) -> dict[str, Mapping[str, float]]:
        """Metrics by predictor, the network itself first: on test images where there are some, else on validation
        images; without either those of the calibration split, which the bundle of a regression has."""
        known = [images for images in self.content.sets if images.role in (Role.VALIDATION, Role.TEST)]
        quality = known[-1].quality if known else self._recorded
        return {WHO.get(name, name): quality[name] for name in sorted(quality, key=lambda name: name != "base")}

    @property
    def _recorded(self) -> Mapping[str, Mapping[str, float]]:
        keys = {name: "nll_nats" if name == "nll" else name for name in VALUE_COLUMNS}
        found = {name: self.manifest.metrics[key] for name, key in keys.items() if key in self.manifest.metrics}
        return {"psc": found} if found and self.manifest.target is not None else {}

    @property
    def quality_images(self) -> int:
        """Number of images that :attr:`quality` is of."""
        return self.images_of(Role.VALIDATION, Role.TEST) or int(self.manifest.metrics.get("validation_images", 0))

    def cells(self, quality: Mapping[str, float]) -> list[str]:
        """The metrics of a predictor as text, in the order of :attr:`columns`; a dash for one that it lacks."""
        digits = ".4f" if self.manifest.target is None else ".4g"
        return [f"{quality[metric]:{digits}}" if metric in quality else "–" for metric in self.columns]

    @property
    def policy_lines(self) -> list[str]:
        """What the policy means for this bundle, a line each."""
        policy, target = self.manifest.policy, self.manifest.target
        said = [
            f"out of distribution: OOD score above {self.ood_threshold:.4g} nats (alpha {policy.alpha:g}: at most "
            f"{policy.alpha:.1%} of images like the validation images)"
        ]
        if self.ambiguity_threshold is not None:
            said.append(f"ambiguous: predictive entropy above {self.ambiguity_threshold:.4g} nats")
        if isinstance(policy, ValuePolicy) and target is not None:
            said.append(
                f"intervals hold the true number of at least {policy.coverage:.1%} of images like the validation images"
            )
            width = "" if policy.max_width is None else f"{policy.max_width:g} {target.unit}".rstrip()
            said.append(f"uncertain: an interval wider than {width}" if width else "no interval is too wide")
        return said

    def flagged_as(self, role: Role) -> dict[str, float]:
        """:attr:`flagged` of the sets of one role."""
        return {images.name: self.flagged[images.name] for images in self.content.sets if images.role is role}

    def images_of(self, *roles: Role) -> int:
        """Number of images in the last set of these roles, 0 without one."""
        return next((len(images.ood_score) for images in self.content.sets[::-1] if images.role in roles), 0)

    def to_text(self) -> str:
        """The last lines of a fit on the terminal."""
        lines = []
        if self.quality:
            width = max(map(len, self.quality))
            lines.append(f"{'':{width}}  " + "  ".join(f"{title:>9}" for title in self.columns.values()))
            for name, quality in self.quality.items():
                lines.append(f"{name:{width}}  " + "  ".join(f"{cell:>9}" for cell in self.cells(quality)))
            lines.append(f"on {self.quality_images} validation images that nothing was chosen on")
        lines += self.policy_lines
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
    kind = Calibration if manifest.target is None else ValueCalibration
    collapse, candidate = _collapse_of(manifest)
    metrics: Mapping[str, Any] = manifest.metrics
    is_reachable = metrics.get("risk", {"threshold": 0})["threshold"] is not None
    return Facts(
        folder,
        manifest,
        content,
        kind.from_tensors(bundle.parts["calibration"]),
        manifest.policy.ambiguity_threshold if isinstance(manifest.policy, Policy) and is_reachable else None,
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
            base, psc = images.quality["base"], images.quality["psc"]
            lost = base.get("accuracy", 0) - psc.get("accuracy", 0)
            grown = psc["rmse"] / base["rmse"] - 1 if base.get("rmse") else 0
            if lost > LOSS or grown > RMSE_LOSS:
                by = f"{lost:.3f}" if lost > LOSS else f"{grown:.0%} of its RMSE"
                found.append(
                    f"predictions with PSC are less accurate than the network's own by {by}; --predictions base keeps "
                    "those"
                )
    return found
