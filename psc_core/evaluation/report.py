"""What an evaluation found, as values, sentences and tables (terminal, Markdown, JSON).

The values here know nothing of networks or data.  Verdicts follow one rule, the same for PSC and against
it: a score *wins* over another when their AUROC differs by more than two standard errors of the paired
difference, else they *tie*.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from psc_core.metrics.intervals import CountInterval, RateInterval
from psc_core.metrics.ranking import Difference

HEADLINE: Final = "psc"
"""The score that the service alarms on, and the classifier that it serves."""

STANDARD_ERRORS: Final = 2.0
"""Difference, in standard errors, from which on one score beats another."""

_PERCENT_OF_RISK: Final = (1, 5)


@dataclass(frozen=True)
class Classification:
    """Quality of one classifier's probabilities over (image, label) rows.

    Attributes:
        accuracy: Share of rows whose most probable class is the label.
        nll: Nats.
        brier: In [0, 2].
        ece: 15 equal-width bins.
        adaptive_ece: 15 bins of equal mass.
        aurc: Area under the risk–coverage curve of the confidence.
        augrc: Area under the generalised risk–coverage curve.
        coverage_at_risk_1_percent: Share accepted at 1 % errors among the accepted.
        coverage_at_risk_5_percent: The same at 5 %.
    """

    accuracy: float
    nll: float
    brier: float
    ece: float
    adaptive_ece: float
    aurc: float
    augrc: float
    coverage_at_risk_1_percent: float
    coverage_at_risk_5_percent: float


@dataclass(frozen=True)
class Separation:
    """How well one score tells OOD images from in-distribution ones; OOD is positive.

    Attributes:
        auroc: Area under the ROC curve.
        aupr_in: Average precision, in-distribution positive.
        aupr_out: Average precision, OOD positive.
        fpr95: In-distribution images rejected when 95 % of the OOD images are.
        lead: AUROC of the headline score minus this one's, with its standard error.
    """

    auroc: float
    aupr_in: float
    aupr_out: float
    fpr95: float
    lead: Difference


@dataclass(frozen=True)
class RealisedRate:
    """A promised rate against what the test images show.

    Attributes:
        promised: The rate that calibration promises.
        count: Images concerned.
        images: Images tested.
        level: Probability of the three intervals.
        interval: Rates that explain ``count`` (Clopper–Pearson).
        acceptance: Counts that exactly the promised rate explains (binomial).
        calibrated_acceptance: Counts that the promise explains for a calibration set of this size
            (beta-binomial).
    """

    promised: float
    count: int
    images: int
    level: float
    interval: RateInterval
    acceptance: CountInterval
    calibrated_acceptance: CountInterval

    @property
    def rate(self) -> float:
        """Realised rate."""
        return self.count / self.images

    @property
    def verdict(self) -> str:
        """``"as promised"``, ``"higher than promised"`` or ``"lower than promised"``, beta-binomially."""
        if self.count > self.calibrated_acceptance.high:
            return "higher than promised"
        return "as promised" if self.count in self.calibrated_acceptance else "lower than promised"


@dataclass(frozen=True)
class EvaluationReport:
    """Everything ``psc-eval`` measures.

    Attributes:
        model: Name, version and layer of the bundle.
        id_name: In-distribution test data.
        images: Its images.
        rows: Its (image, label) pairs.
        classification: By classifier.
        ood_images: Images by OOD set.
        separation: By OOD set and score.
        flagged: Share of each OOD set with p-value ≤ α.
        false_alarms: In-distribution images with p-value ≤ α.
        misses: In-distribution images whose (first) label is outside the prediction set.
        mean_set_size: Classes in a prediction set.
        ambiguity: AUROC of predictive entropy, ambiguous against clean images, by classifier; empty when
            the data marks none.
    """

    model: Mapping[str, str]
    id_name: str
    images: int
    rows: int
    classification: Mapping[str, Classification]
    ood_images: Mapping[str, int]
    separation: Mapping[str, Mapping[str, Separation]]
    flagged: Mapping[str, float]
    false_alarms: RealisedRate
    misses: RealisedRate
    mean_set_size: float
    ambiguity: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """JSON types; :meth:`verdicts` included.  A standard error that is not known is null."""
        data: dict[str, Any] = asdict(self)
        for scores in data["separation"].values():
            for score in scores.values():
                value, error = score["lead"]
                score["lead"] = {"value": value, "standard_error": error if error != float("inf") else None}
        for key in ("false_alarms", "misses"):
            rate: RealisedRate = getattr(self, key)
            data[key] |= {"rate": rate.rate, "verdict": rate.verdict}
            for interval in ("interval", "acceptance", "calibrated_acceptance"):
                data[key][interval] = list(data[key][interval])
        data["verdicts"] = self.verdicts()
        return data

    def verdicts(self) -> list[str]:
        """Plain sentences: who wins where, and whether promises hold."""
        sentences = [_separation_verdict(name, scores) for name, scores in self.separation.items()]
        sentences += [_classification_verdict(self.classification, metric) for metric in ("accuracy", "nll", "ece")]
        sentences.append(_rate_verdict("False alarms", self.false_alarms))
        sentences.append(_rate_verdict("Labels outside the prediction set", self.misses))
        return [sentence for sentence in sentences if sentence]


# Verdicts -------------------------------------------------------------------------------------------------


def _separation_verdict(ood: str, scores: Mapping[str, Separation]) -> str:
    own = scores[HEADLINE]
    rivals = [name for name in scores if not name.startswith(HEADLINE)]
    if not rivals:
        return f"{ood}: PSC reaches AUROC {own.auroc:.4f}; no other method was run."
    best = max(rivals, key=lambda name: scores[name].auroc)
    behind = [name for name in rivals if _beats(-scores[name].lead.value, scores[name].lead.standard_error)]
    against = scores[best]
    numbers = f"AUROC {own.auroc:.4f} against {against.auroc:.4f}, difference {_signed(against.lead)}"
    if behind:
        return f"{ood}: PSC loses to {', '.join(behind)}; the best is {best} ({numbers})."
    if _beats(against.lead.value, against.lead.standard_error):
        return f"{ood}: PSC wins; the next is {best} ({numbers})."
    return f"{ood}: PSC ties with {best} ({numbers})."


def _beats(difference: float, standard_error: float) -> bool:
    return difference > STANDARD_ERRORS * standard_error


def _signed(difference: Difference) -> str:
    return f"{difference.value:+.4f} ± {difference.standard_error:.4f}"


def _classification_verdict(classifiers: Mapping[str, Classification], metric: str) -> str:
    if len(classifiers) < 2:
        return ""
    values = {name: getattr(quality, metric) for name, quality in classifiers.items()}
    best = max(values.values()) if metric == "accuracy" else min(values.values())
    names = [name for name, value in values.items() if value == best]
    listed = ", ".join(f"{name} {value:.4f}" for name, value in values.items())
    return f"{_LABELS[metric]}: best is {' and '.join(names)} ({listed})."


def _rate_verdict(what: str, rate: RealisedRate) -> str:
    low, high = rate.calibrated_acceptance
    return (
        f"{what}: {rate.count} of {rate.images} ({rate.rate:.2%}), {rate.verdict} ({rate.promised:.2%}; "
        f"{low}…{high} expected at {rate.level:.0%})."
    )


# Tables ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """Rows of text under a title; the first column is left-aligned, others right-aligned."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def to_text(self) -> str:
        """For a terminal."""
        lines = [self.header, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.header))]
        body = []
        for line in lines:
            cells = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
            body.append("  ".join([line[0].ljust(widths[0]), *cells[1:]]).rstrip())
        rule = "─" * (sum(widths) + 2 * (len(widths) - 1))
        return "\n".join([self.title, body[0], rule, *body[1:]])

    def to_markdown(self) -> str:
        """A pipe table under a heading."""
        align = ["---", *["---:"] * (len(self.header) - 1)]
        lines = [" | ".join(cell.replace("|", "\\|") for cell in line) for line in (self.header, *self.rows)]
        return "\n".join(
            [
                f"## {self.title}",
                "",
                f"| {lines[0]} |",
                f"| {' | '.join(align)} |",
                *(f"| {line} |" for line in lines[1:]),
            ]
        )


def tables(report: EvaluationReport) -> list[Table]:
    """All tables of a report."""
    found = [_classification_table(report)]
    found += [_separation_table(report, name) for name in report.separation]
    found.append(_rates_table(report))
    if report.ambiguity:
        found.append(
            Table(
                "Ambiguous against clean images",
                ["entropy of", "AUROC"],
                [[name, f"{value:.4f}"] for name, value in report.ambiguity.items()],
            )
        )
    return found


def to_text(report: EvaluationReport) -> str:
    """The report for a terminal."""
    parts = [_heading(report), *(table.to_text() for table in tables(report)), "\n".join(report.verdicts())]
    return "\n\n".join(parts) + "\n"


def to_markdown(report: EvaluationReport) -> str:
    """The report as a Markdown page."""
    verdicts = "\n".join(f"- {sentence}" for sentence in report.verdicts())
    parts = [f"# {_heading(report)}", verdicts, *(table.to_markdown() for table in tables(report))]
    return "\n\n".join(parts) + "\n"


_LABELS: Final[Mapping[str, str]] = {
    "accuracy": "Accuracy",
    "nll": "NLL",
    "brier": "Brier",
    "ece": "ECE",
    "adaptive_ece": "aECE",
    "aurc": "AURC",
    "augrc": "AUGRC",
    **{f"coverage_at_risk_{p}_percent": f"cov@{p}%" for p in _PERCENT_OF_RISK},
}


def _heading(report: EvaluationReport) -> str:
    model = " ".join(value for value in (report.model["name"], report.model["version"]) if value)
    labels = "" if report.rows == report.images else f", {report.rows} labels"
    return f"{model} (layer {report.model['layer']}) on {report.id_name}: {report.images} images{labels}"


def _classification_table(report: EvaluationReport) -> Table:
    rows = [
        [name, *(f"{getattr(quality, key):.4f}" for key in _LABELS)] for name, quality in report.classification.items()
    ]
    return Table("Classification", ["classifier", *_LABELS.values()], rows)


def _separation_table(report: EvaluationReport, ood: str) -> Table:
    ranked = sorted(report.separation[ood].items(), key=lambda item: -item[1].auroc)
    rows = [
        [
            name,
            f"{s.auroc:.4f}",
            f"{s.aupr_in:.4f}",
            f"{s.aupr_out:.4f}",
            f"{s.fpr95:.4f}",
            "" if name == HEADLINE else _signed(s.lead),
        ]
        for name, s in ranked
    ]
    return Table(
        f"{ood}: {report.ood_images[ood]} OOD images",
        ["score", "AUROC", "AUPR in", "AUPR out", "FPR95", "PSC leads by"],
        rows,
    )


def _rates_table(report: EvaluationReport) -> Table:
    alarms, misses = report.false_alarms, report.misses
    header = ["rate", "promised", "realised", f"{alarms.level:.0%} interval", "count", "binomial", "beta-binomial"]
    rows = [
        _rate_row(f"false alarms (p ≤ {alarms.promised:g})", alarms),
        _rate_row(f"label outside {1 - misses.promised:.0%} set", misses),
    ]
    rows += [[f"flagged in {name}", "", f"{share:.4f}", "", "", "", ""] for name, share in report.flagged.items()]
    rows.append(["mean prediction set", "", f"{report.mean_set_size:.3f}", "", "", "", ""])
    return Table("Promises", header, rows)


def _rate_row(name: str, rate: RealisedRate) -> list[str]:
    return [
        name,
        f"{rate.promised:.4f}",
        f"{rate.rate:.4f}",
        f"{rate.interval.low:.4f}…{rate.interval.high:.4f}",
        str(rate.count),
        f"{rate.acceptance.low}…{rate.acceptance.high}",
        f"{rate.calibrated_acceptance.low}…{rate.calibrated_acceptance.high}",
    ]
