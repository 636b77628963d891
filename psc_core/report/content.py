"""What a report says: scores of some images, pictures, words that all tasks share, and the facts computed from them.

A fit collects it, from at most :data:`REPORTED_IMAGES` random images of a set, and stores it beside the bundle in one
safetensors file, so that the page can be drawn again without the images.  No reader of a bundle needs this file.
"""

from __future__ import annotations

import json
import statistics
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, TypeVar

import torch
from jaxtyping import Bool, Float, Int, UInt8
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from psc_core.bundle import CONTENT, HISTORY, Bundle, Manifest, write_file
from psc_core.checks import KINDS_KEY, REAL, synthetic_batches
from psc_core.collapse import ChosenLayer, CollapseReport
from psc_core.compute import Compute, begin, count_images
from psc_core.data.dataset import ImageDataset, balanced_positions, draw, draw_balanced
from psc_core.errors import BundleError
from psc_core.evaluation.evaluate import Evaluation
from psc_core.fit import Stages
from psc_core.fit_data import FitData
from psc_core.heads.base import Scored
from psc_core.metrics import describe_range, in_practice
from psc_core.model import FittedModel
from psc_core.tasks.base import BaseCalibration, Task

if TYPE_CHECKING:
    from matplotlib.figure import Figure


PREDICTORS: Final = {"original": "the original network", "psc": "with PSC"}  # others keep their names

NO_CLASS: Final = -1  # the label of an image of none of the classes
_METADATA: Final = "report"


class Role(StrEnum):
    """The role of a set of images in a report."""

    TRAINING = "training images"
    VALIDATION = "validation images"
    TEST = "test images"
    SYNTHETIC = "synthetic OOD images"
    OOD = "out-of-distribution images"

    @property
    def is_known(self) -> bool:
        """True if the images are in distribution."""
        return self in (Role.TRAINING, Role.VALIDATION, Role.TEST)


@dataclass(frozen=True)
class ScoredSet:
    """The scores of n images that belong together, on the CPU; each task adds fields."""

    name: str
    role: Role
    ood_score: Float[Tensor, " n"]  # nats
    quality: Mapping[str, Mapping[str, float]] = field(default_factory=dict, kw_only=True)  # by predictor and metric
    groups: Mapping[str, Int[Tensor, " _"]] = field(default_factory=dict, kw_only=True)  # positions of subsets, by name


@dataclass(frozen=True)
class Picture:
    why: str  # such as "most unusual"
    label: int  # class index, or NO_CLASS
    predicted: int
    ood_score: float
    entropy: float
    pixels: UInt8[Tensor, "channels height width"]


@dataclass(frozen=True)
class Content:
    """Everything that was collected for a report; empty parts are not shown."""

    version: str  # of the bundle
    sets: tuple[ScoredSet, ...] = ()
    pictures: tuple[Picture, ...] = ()
    sizes: Mapping[str, Float[Tensor, "c_max d_max"]] = field(default_factory=dict)  # "nc1" and "nc4" for every size

    def extended_by(self, later: Content) -> Content:
        """Return the sets of both contents, and the pictures of ``later`` if it has any."""
        return replace(self, sets=(*self.sets, *later.sets), pictures=later.pictures or self.pictures)

    def save(self, folder: Path) -> None:
        """Write :data:`CONTENT` into ``folder``."""
        tensors: dict[str, Tensor] = {f"sizes.{name}": values for name, values in self.sizes.items()}
        sets: list[dict[str, Any]] = []
        for number, images in enumerate(self.sets):
            about = {"name": images.name, "role": images.role.value, "quality": images.quality}
            parts: dict[str, Tensor] = {}
            for part, value in vars(images).items():
                if isinstance(value, Tensor):
                    parts[part] = value
                elif part not in about:
                    parts |= {f"{part}.{name}": values for name, values in value.items()}
            tensors |= {f"sets.{number}.{name}": values.contiguous() for name, values in parts.items()}
            sets.append(about)
        pictures: list[dict[str, Any]] = []
        for number, picture in enumerate(self.pictures):
            tensors[f"pictures.{number}"] = picture.pixels.contiguous().clone()  # an image may be shown twice
            pictures.append({name: value for name, value in vars(picture).items() if name != "pixels"})
        document = {"version": self.version, "sets": sets, "pictures": pictures}
        write_file(folder / CONTENT, save(tensors, metadata={_METADATA: json.dumps(document)}))

    @classmethod
    def load(cls, folder: Path, task: type[Task]) -> Content:
        """Read a saved content, for the bundle of a model of ``task``."""
        file = folder / CONTENT
        if not file.is_file():
            raise BundleError(f"{folder} has no {CONTENT}; psc-fit writes one unless it is told --no-report")
        set_type = task.report().set_type
        try:
            with safe_open(file, "pt") as opened:
                document = json.loads(opened.metadata()[_METADATA])
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a mapping)
            sets, pictures = enumerate(document["sets"]), enumerate(document["pictures"])
            return cls(
                document["version"],
                tuple(_scored_set(set_type, entry, _below(f"sets.{i}.", tensors)) for i, entry in sets),
                tuple(Picture(**entry, pixels=tensors[f"pictures.{i}"]) for i, entry in pictures),
                _below("sizes.", tensors),
            )
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise BundleError(f"{file} is damaged ({error}); fit the bundle again") from error


def _scored_set(set_type: type[ScoredSet], entry: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> ScoredSet:
    parts: dict[str, Any] = {part.name: tensors[part.name] for part in fields(set_type) if part.name in tensors}
    for part in fields(set_type):
        if by_name := _below(f"{part.name}.", tensors):
            parts[part.name] = by_name
    return set_type(**{**entry, "role": Role(entry["role"])}, **parts)


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose name starts with ``prefix``, by the rest of their name."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


AnyModel = TypeVar("AnyModel", bound=FittedModel)
AnyScored = TypeVar("AnyScored")


class TaskReport(ABC, Generic[AnyModel, AnyScored]):
    """What the report of a model of one task says and shows beyond that of all; :meth:`.Task.report` returns it."""

    set_type: ClassVar[type[ScoredSet]]
    templates: ClassVar[str]  # first part of their names
    texts: ClassVar[Mapping[str, tuple[str, str]]]  # the title and explanation of each figure, in the order of the page
    no_limit: ClassVar[Mapping[str, str]]  # what to say of a figure whose limit does not exist
    columns: ClassVar[Mapping[str, str]]  # titles of the metrics that are shown
    digits: ClassVar[str] = ".4g"  # of a metric
    recorded: ClassVar[Mapping[str, str]] = {}  # metrics shown without images, by their names in the manifest
    glossary: ClassVar[Mapping[str, str]]  # the words that the page explains
    hub_task: ClassVar[str | None] = None  # what the Hugging Face hub calls the task, if it has a word for it
    wrong: ClassVar[str]  # what a wrong answer is, as in "2 % of these are wrong"
    test_images: ClassVar[str] = "images/test"  # in example commands

    @abstractmethod
    def scored_set(self, name: str, role: Role, data: ImageDataset, scored: AnyScored) -> ScoredSet:
        """Return the data that reports keep of the scores of ``data``."""

    @abstractmethod
    def synthetic_set(self, name: str, model: AnyModel, packed: Float[Tensor, "n columns"]) -> ScoredSet:
        """Return the data that reports keep of the packed outputs for synthetic OOD images."""

    def pictures_of(self, data: ImageDataset, scored: AnyScored) -> tuple[Picture, ...]:
        """Return the images to show; none by default."""
        return ()

    def accepted_of(self, name: str, data: ImageDataset, scored: AnyScored) -> tuple[Picture, ...]:
        """Return out-of-distribution images to show that are accepted; none by default."""
        return ()

    @abstractmethod
    def limits_of(self, policy: Any, calibration: Any) -> dict[str, float | None]:
        """Return the limits of decisions by the figure that shows them; None if no image is beyond."""

    @abstractmethod
    def judge(self, images: Any, policy: Any, calibration: Any) -> tuple[Bool[Tensor, " n"], Bool[Tensor, " n"]]:
        """Return which images are unclear, if they are not unusual, and which answers are wrong."""

    @abstractmethod
    def policy_lines(self, task: Any, policy: Any, limits: Mapping[str, float | None]) -> list[str]:
        """Return the meaning of the policy besides the alarm, one line each."""

    def warnings_of(self, head: Mapping[str, float]) -> list[str]:
        """Return the warnings that follow from the head's record in the manifest."""
        return []

    def accuracy_lost(self, base: Mapping[str, float], psc: Mapping[str, float]) -> str:
        """Return how much less accurate predictions with PSC are than the network; empty if it hardly matters."""
        return ""

    @abstractmethod
    def draw(self, facts: Facts) -> Mapping[str, Figure | None]:
        """Draw the figures of the task by name; None where there is no data for one."""


@dataclass(frozen=True)
class Facts:
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

    @property
    def learnt(self) -> str:
        """A sentence on each class that was added, and on what the check reviewed has learnt; empty without them."""
        history = self.manifest.provenance.get(HISTORY, ())
        added = [
            f"The class {of['name']} was added from {of['images']} images that people named so: held back, "
            f"{of['recognised']:.1%} of them were answered with it; it takes {of['taken']:.1%} of other right answers."
            for of in (entry["added_class"] for entry in history if "added_class" in entry)
        ]
        learnt = (entry.get("reviewed", {}) for entry in reversed(history))
        found = next((each for each in learnt if each.get("helps")), None)
        if found is None or "reviewed" not in (self.manifest.checks.names if self.manifest.checks else ()):
            return " ".join(added)
        kinds = ", ".join(f"{kind['images']} {kind['name']}" for kind in found["kinds"])
        before, after = found["auroc_before"][0], found["auroc_after"][0]
        of_check = (
            f"The check reviewed has learnt from images that people reviewed as none of the classes ({kinds}); AUROC "
            f"of such images that were held back: {before:.3f} to {after:.3f}."
        )
        return " ".join([*added, of_check])

    @property
    def separation(self) -> str:
        """A phrase on how well the fit's checks told synthetic OOD images apart; empty without checks."""
        found = self.manifest.metrics.get("checks") or {"options": ()}
        chosen = (each["auroc"] for each in found["options"] if each["checks"] == found["chosen"])
        kinds = zip(found.get(KINDS_KEY, ()), next(chosen, ()), strict=False)
        return ", ".join(f"{kind} {auroc:.3f}" for kind, auroc in kinds)

    @cached_property
    def limits(self) -> Mapping[str, float | None]:
        """The limits of the other decisions, by the figure that shows them; None if no image is beyond."""
        return self.of_task.limits_of(self.manifest.policy, self.calibration)

    @cached_property
    def flagged(self) -> dict[tuple[Role, str], float]:
        """The fraction of each set of images that raises the alarm, by its role and its name, which users choose."""
        return {
            (images.role, images.name): float((images.ood_score > self.ood_threshold).double().mean())
            for images in self.content.sets
        }

    @cached_property
    def measured(self) -> ScoredSet | None:
        """The images on which nothing was selected: test images if there are any, else validation images."""
        known = [images for images in self.content.sets if images.role in (Role.VALIDATION, Role.TEST)]
        return known[-1] if known else None

    @cached_property
    def quality(self) -> dict[str, Mapping[str, float]]:
        """The metrics on :attr:`measured` by predictor, the original network first; the recorded ones if it is None."""
        metrics, keys = self.manifest.metrics, self.of_task.recorded
        recorded = {name: metrics[key] for name, key in keys.items() if key in metrics}
        quality = ({"psc": recorded} if recorded else {}) if self.measured is None else self.measured.quality
        ordered = sorted(quality, key=lambda name: name != "original")
        return {PREDICTORS.get(name, name): quality[name] for name in ordered}

    @property
    def quality_images(self) -> int:
        if self.measured is None:
            return int(self.manifest.metrics.get("validation_images", 0))
        return len(self.measured.ood_score)

    @cached_property
    def shares(self) -> dict[str, float]:
        """The shares of :attr:`measured` by decision, and of the accepted that are wrong; empty if it is None.

        ``found`` is the mean share of synthetic OOD images that are called unusual, where there are any.
        """
        if (images := self.measured) is None:
            return {}
        unusual = images.ood_score > self.ood_threshold
        unclear, wrong = self.of_task.judge(images, self.manifest.policy, self.calibration)
        accepted = ~unusual & ~unclear
        shares = {"accepted": accepted, "unclear": unclear & ~unusual, "unusual": unusual, "wrong": wrong[accepted]}
        found = {name: float(part.double().mean()) for name, part in shares.items() if len(part)}
        synthetic = self.flagged_as(Role.SYNTHETIC).values()
        return found | ({"found": statistics.mean(synthetic)} if synthetic else {})

    @property
    def verdict(self) -> list[str]:
        """What the model does with images, a sentence each: with ordinary ones, and with synthetic OOD images."""
        if (images := self.measured) is None:
            return []
        shares = self.shares
        texts = {name: f"{100 * share:.{0 if share >= 0.1 else 1}f} %" for name, share in shares.items()}
        alpha = f"{100 * self.manifest.policy.alpha:.3g} %"
        set_by = ", by which the thresholds are set" if images.role is Role.VALIDATION else ""
        usual = describe_range(self.manifest.policy.alpha, len(self.calibration))
        lines = [
            f"of {self.quality_images} {images.role.value}{set_by}: {texts['accepted']} accepted, {texts['unclear']} "
            f"unclear, {texts['unusual']} unusual (false alarms, target {alpha}; "
            f"{usual} % where {len(self.calibration)} images set the threshold)"
        ]
        if "wrong" in shares:
            lines.append(f"of the accepted ones {texts['wrong']} {self.of_task.wrong}")
        for name, found in self.flagged_as(Role.OOD).items():
            lines.append(f"of {name} {100 * found:.3g} % found unusual")
        if synthetic := self.flagged_as(Role.SYNTHETIC):
            least, most = (pick(synthetic, key=synthetic.__getitem__) for pick in (min, max))
            lines.append(
                f"of synthetic OOD images {texts['found']} found unusual: from "
                f"{100 * synthetic[least]:.0f} % ({least}) to "
                f"{100 * synthetic[most]:.0f} % ({most})"
            )
        return lines

    @property
    def blindness(self) -> list[str]:
        """A warning if synthetic OOD images are called unusual hardly more often than ordinary ones may be."""
        found, alpha = self.shares.get("found"), self.manifest.policy.alpha
        if found is None or found > 2 * alpha:
            return []
        return [
            f"of synthetic OOD images {100 * found:.2g} % are found unusual, of ordinary ones {100 * alpha:.3g} % may "
            "be: this model will miss unusual images; leave out --layer, --density and --ood-score if you gave them"
        ]

    @property
    def answered_by(self) -> str:
        """How good each predictor is on :attr:`measured`, and which answers; empty if nothing was measured."""
        metric, title = next(iter(self.of_task.columns.items()))
        found = [
            f"{name} {values[metric]:{self.of_task.digits}}"
            for name, values in self.quality.items()
            if metric in values
        ]
        by = "the head answers" if self.manifest.predictions == "psc" else "the original network's output answers"
        return f"{title} on {self.quality_images} images: {', '.join(found)}; {by}" if found else ""

    def cells(self, quality: Mapping[str, float]) -> list[str]:
        """Format the metrics of a predictor in the order of the task's columns, with a dash for a missing one."""
        columns, digits = self.of_task.columns, self.of_task.digits
        return [f"{quality[metric]:{digits}}" if metric in quality else "–" for metric in columns]

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
        return {name: flagged for (of, name), flagged in self.flagged.items() if of is role}

    def to_text(self, *, verbose: bool = True) -> str:
        """Return the last lines of a fit on the terminal; unless ``verbose``, without what the report has too."""
        lines = [self.headline, *self.verdict]
        if not verbose and self.verdict:
            lines += filter(None, [self.answered_by, self.kept_images])
            return "\n".join([*lines, *(f"warning: {text}" for text in self.warnings)])
        if self.quality:
            width = max(map(len, self.quality))
            lines.append(f"{'':{width}}  " + "  ".join(f"{title:>9}" for title in self.of_task.columns.values()))
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
        return self.manifest.task.report()


def facts_of(bundle: Bundle, content: Content) -> Facts:
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
    warnings = _warnings(manifest, chosen, content)
    facts = Facts(folder, manifest, content, calibration, collapse, chosen, tuple(warnings))
    return replace(facts, warnings=(*warnings, *facts.blindness))


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
    found += of_task.warnings_of(manifest.head.record)
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


REPORTED_IMAGES: Final = 2000  # maximum number of images of a set in the report of a fit


def collect_fit(found: Stages, net: nn.Module, data: FitData, compute: Compute, version: str) -> Content:
    """Collect training images, calibration images with the network's own output, and synthetic OOD images."""
    begin("report")
    model, parts, seed = found.model, found.parts, data.seed
    evaluation, sets = model.task.evaluator(), model.task.report()
    validation = shown = data.calibration
    if len(validation) > REPORTED_IMAGES:
        # The rates of a policy hold for images as they come; the pictures are to show every class.
        validation, shown = draw(shown, REPORTED_IMAGES, seed), draw_balanced(shown, REPORTED_IMAGES, seed)
    drawn = balanced_positions(data.train, REPORTED_IMAGES, seed)
    trained, known_scores = data.train.subset(drawn), model.pipeline.outputs(parts.of_training(drawn)).cpu()
    plain = evaluation.original_network(net, validation, compute)
    of_validation = evaluation.score_images(model, validation, plain, batch_images=compute.batch_images)
    of_training = evaluation.score_images(model, trained, batch_images=compute.batch_images, packed=known_scores)
    of_shown = of_validation
    if shown is not validation:
        of_shown = evaluation.score_images(model, shown, batch_images=compute.batch_images)
    known = (
        sets.scored_set("training", Role.TRAINING, trained, of_training),
        sets.scored_set("validation", Role.VALIDATION, validation, of_validation),
    )
    synthetic = synthetic_sets(model, parts.synthetic, data, compute)
    projection = found.projection.report
    sizes = {"nc1": projection.nc1.cpu(), "nc4": projection.nc4.cpu()}
    return Content(version, (*known, *synthetic), sets.pictures_of(shown, of_shown), sizes)


def collect_test(
    model: FittedModel, id_data: ImageDataset, ood: Mapping[str, ImageDataset], found: Evaluation
) -> Content:
    """Collect the results of an evaluation for the images of ``id_data`` and for each out-of-distribution set."""
    sets = model.task.report()
    outside = (sets.scored_set(name, Role.OOD, ood[name], scored) for name, scored in found.outside.items())
    inside = sets.scored_set("test", Role.TEST, id_data, found.inside)
    accepted = [each for name, scored in found.outside.items() for each in sets.accepted_of(name, ood[name], scored)]
    return Content(model.version, (inside, *outside), (*sets.pictures_of(id_data, found.inside), *accepted))


def synthetic_sets(
    model: FittedModel, known: Mapping[str, Scored] | None, data: FitData, compute: Compute
) -> list[ScoredSet]:
    """Return images made from the selection split, by transform; those whose scores are not known are scored here."""
    sets, mixed = model.task.report(), not data.is_ambiguous
    packed: dict[str, list[Tensor]] = {}
    with torch.inference_mode():
        for transform, scored in (known or {}).items():
            packed[transform] = [model.pipeline.outputs(scored.to(model.device)).cpu()]
        if known is None:
            label = "report: synthetic OOD images"
            for made in synthetic_batches(data.selection, compute, label, mixed=mixed, seed=data.seed):
                for transform in made.keys() - {REAL}:
                    count_images(len(made[transform]))
                    packed.setdefault(transform, []).append(model.pipeline(made[transform]).cpu())
    return [sets.synthetic_set(transform, model, torch.cat(parts)) for transform, parts in sorted(packed.items())]
