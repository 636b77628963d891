"""The results of a classifier's evaluation, also as text for a terminal, as a Markdown page and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from psc_core.evaluation import summary
from psc_core.evaluation.base import PRIMARY, ObservedRate, Report
from psc_core.evaluation.losses import QUALITIES
from psc_core.evaluation.selective import Acceptance
from psc_core.evaluation.separation import Separation
from psc_core.tables import aligned


@dataclass(frozen=True)
class Table:
    """Lines of text under a title; the first column is aligned to the left, the others to the right."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def to_text(self) -> str:
        """Return the table as text for a terminal."""
        head, *lines = aligned([self.header, *self.rows])
        rule = "─" * max(map(len, (head, *lines)))
        return "\n".join([self.title, head, rule, *lines])

    def to_markdown(self) -> str:
        """Return the table as a Markdown table under a heading."""
        align = ["---", *["---:"] * (len(self.header) - 1)]
        lines = [" | ".join(cell.replace("|", "\\|") for cell in line) for line in (self.header, align, *self.rows)]
        return "\n".join([f"## {self.title}", "", *(f"| {line} |" for line in lines)])


@dataclass(frozen=True)
class ClassificationReport(Report):
    """Everything that ``psc-eval`` measures of a classifier."""

    examples: int  # labelled examples in the in-distribution data
    classification: Mapping[str, Mapping[str, float]]  # by classifier and metric, see :mod:`.losses`
    ood_images: Mapping[str, int]  # number of images in each OOD set
    separation: Mapping[str, Mapping[str, Separation]]  # by OOD set and score
    acceptance: Mapping[str, Mapping[str, Acceptance]]  # by OOD set and score
    flagged: Mapping[str, float]  # fraction of each OOD set with p-value ≤ α
    false_alarms: ObservedRate  # in-distribution images with p-value ≤ α
    misses: ObservedRate  # in-distribution images whose (first) label is outside the prediction set
    accepted: int  # number of in-distribution images that are neither out of distribution nor ambiguous
    accepted_wrong: int  # number of these whose (first) label is not predicted
    mean_set_size: float  # mean number of classes in a prediction set
    ambiguity: Mapping[str, float] = field(default_factory=dict)  # AUROC of entropy by classifier; empty if none

    def to_text(self) -> str:
        parts = [self.heading(), *(table.to_text() for table in self.tables()), "\n".join(self.summary())]
        return "\n\n".join(parts) + "\n"

    def to_markdown(self) -> str:
        listed = "\n".join(f"- {sentence}" for sentence in self.summary())
        parts = [f"# {self.heading()}", listed, *(table.to_markdown() for table in self.tables())]
        return "\n\n".join(parts) + "\n"

    def to_json(self) -> dict[str, Any]:
        """Return the report with its summary as JSON types; an unknown standard error is null."""
        data: dict[str, Any] = asdict(self)
        for scores in data["separation"].values():
            for score in scores.values():
                value, error = score["auroc_difference"]
                score["auroc_difference"] = {"value": value, "standard_error": error if error != float("inf") else None}
        for key in ("false_alarms", "misses"):
            rate: ObservedRate = getattr(self, key)
            data[key] |= {"rate": rate.rate, "assessment": rate.assessment}
        return {**data, "summary": self.summary()}

    def heading(self) -> str:
        """Return the model, its layer and the test images in one line."""
        model = " ".join(value for value in (self.model["name"], self.model["version"]) if value)
        labels = "" if self.examples == self.images else f", {self.examples} labels"
        return f"{model} (layer {self.model['layer']}) on {self.id_name}: {self.images} images{labels}"

    def summary(self) -> list[str]:
        """Say in sentences which score wins, which classifier is best, and whether nominal rates hold."""
        alpha, known = self.false_alarms.nominal, self.id_name
        sentences = [summary.compare_scores(ood, scores) for ood, scores in self.separation.items()]
        for ood, scores in self.separation.items():
            sentences += summary.better_fields(ood, scores, known, alpha)
        sentences += [summary.describe_acceptance(ood, found, known) for ood, found in self.acceptance.items()]
        if len(self.classification) > 1:
            sentences += [summary.compare_classifiers(self.classification, metric) for metric in summary.COMPARED]
        return [
            *sentences,
            summary.describe_rate("False alarms", self.false_alarms),
            summary.describe_rate("Labels outside the prediction set", self.misses),
            summary.describe_accepted(self.accepted, self.accepted_wrong, self.images),
        ]

    def tables(self) -> list[Table]:
        """Return all tables in printed order."""
        found = [self._classifiers()]
        for ood in self.separation:
            found += [self._separation_of(ood), self._acceptance_of(ood)]
        found.append(self._rates())
        if self.ambiguity:
            rows = [[name, f"{value:.4f}"] for name, value in self.ambiguity.items()]
            found.append(Table("Ambiguous against clean images", ["entropy of", "AUROC"], rows))
        return found

    def _classifiers(self) -> Table:
        rows = [
            [name, *(f"{quality[metric]:.4f}" for metric in QUALITIES)] for name, quality in self.classification.items()
        ]
        return Table("Classification", ["classifier", *(title for title, _ in QUALITIES.values())], rows)

    def _separation_of(self, ood: str) -> Table:
        """Return the table of every score on one OOD set, the best first."""
        ranked = sorted(self.separation[ood].items(), key=lambda item: -item[1].auroc)
        rows = [
            [
                name,
                *(f"{value:.4f}" for value in (s.auroc, s.aupr_in, s.aupr_out, s.fpr95)),
                "" if name == PRIMARY else summary.signed(s.auroc_difference),
            ]
            for name, s in ranked
        ]
        header = ["score", "AUROC", "AUPR in", "AUPR out", "FPR95", "PSC ahead by"]
        return Table(f"{ood}: {self.ood_images[ood]} OOD images", header, rows)

    def _acceptance_of(self, ood: str) -> Table:
        """Return the table of the fraction of one OOD set that a threshold on each score accepts, the lowest first."""
        ranked = sorted(self.acceptance[ood].items(), key=lambda item: item[1].ood_accepted)
        rows = [[name, f"{found.ood_accepted:.4f}", f"{found.aurc:.4f}"] for name, found in ranked]
        return Table(f"{ood}: accepted beside 95 % of {self.id_name}", ["score", "OOD accepted", "AURC"], rows)

    def _rates(self) -> Table:
        alarms, misses = self.false_alarms, self.misses
        header = ["rate", "nominal", "observed", f"{alarms.level:.0%} interval", "count", "binomial", "beta-binomial"]
        rows = [
            _cells(f"false alarms (p ≤ {alarms.nominal:g})", alarms),
            _cells(f"label outside {1 - misses.nominal:.0%} set", misses),
        ]
        rows += [
            [f"flagged in {name}", "", f"{fraction:.4f}", "", "", "", ""] for name, fraction in self.flagged.items()
        ]
        rows.append(["mean prediction set", "", f"{self.mean_set_size:.3f}", "", "", "", ""])
        return Table("Rates", header, rows)


def _cells(name: str, rate: ObservedRate) -> list[str]:
    return [
        name,
        f"{rate.nominal:.4f}",
        f"{rate.rate:.4f}",
        f"{rate.interval.low:.4f}…{rate.interval.high:.4f}",
        str(rate.count),
        f"{rate.acceptance.low}…{rate.acceptance.high}",
        f"{rate.calibrated_acceptance.low}…{rate.calibrated_acceptance.high}",
    ]
