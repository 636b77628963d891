"""An evaluation as text for the terminal, as a Markdown page and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from psc_core.evaluation.losses import METRICS
from psc_core.evaluation.report import PRIMARY, EvaluationReport, ObservedRate
from psc_core.evaluation.summary import signed, summarise


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
        lines = [" | ".join(cell.replace("|", "\\|") for cell in line) for line in (self.header, align, *self.rows)]
        return "\n".join([f"## {self.title}", "", *(f"| {line} |" for line in lines)])


def tables(report: EvaluationReport) -> list[Table]:
    """All tables of a report, in printed order."""
    found = [classification_table(report)]
    for name in report.separation:
        found += [separation_table(report, name), acceptance_table(report, name)]
    found.append(rates_table(report))
    if report.ambiguity:
        rows = [[name, f"{value:.4f}"] for name, value in report.ambiguity.items()]
        found.append(Table("Ambiguous against clean images", ["entropy of", "AUROC"], rows))
    return found


def to_text(report: EvaluationReport) -> str:
    """The report for a terminal."""
    parts = [heading(report), *(table.to_text() for table in tables(report)), "\n".join(summarise(report))]
    return "\n\n".join(parts) + "\n"


def to_markdown(report: EvaluationReport) -> str:
    """The report as a Markdown page."""
    summary = "\n".join(f"- {sentence}" for sentence in summarise(report))
    parts = [f"# {heading(report)}", summary, *(table.to_markdown() for table in tables(report))]
    return "\n\n".join(parts) + "\n"


def to_json(report: EvaluationReport) -> dict[str, Any]:
    """JSON types, with the summary; a standard error that is not known is null."""
    data: dict[str, Any] = asdict(report)
    for scores in data["separation"].values():
        for score in scores.values():
            value, error = score["auroc_difference"]
            score["auroc_difference"] = {"value": value, "standard_error": error if error != float("inf") else None}
    for key in ("false_alarms", "misses"):
        rate: ObservedRate = getattr(report, key)
        data[key] |= {"rate": rate.rate, "assessment": rate.assessment}
    return {**data, "summary": summarise(report)}


def heading(report: EvaluationReport) -> str:
    """Model, layer and test images in one line."""
    model = " ".join(value for value in (report.model["name"], report.model["version"]) if value)
    labels = "" if report.examples == report.images else f", {report.examples} labels"
    return f"{model} (layer {report.model['layer']}) on {report.id_name}: {report.images} images{labels}"


def classification_table(report: EvaluationReport) -> Table:
    """Every metric of every classifier."""
    rows = [
        [name, *(f"{quality[metric]:.4f}" for metric in METRICS)] for name, quality in report.classification.items()
    ]
    return Table("Classification", ["classifier", *(title for title, _ in METRICS.values())], rows)


def separation_table(report: EvaluationReport, ood: str) -> Table:
    """Every score on one OOD set, best first."""
    ranked = sorted(report.separation[ood].items(), key=lambda item: -item[1].auroc)
    rows = [
        [
            name,
            *(f"{value:.4f}" for value in (s.auroc, s.aupr_in, s.aupr_out, s.fpr95)),
            "" if name == PRIMARY else signed(s.auroc_difference),
        ]
        for name, s in ranked
    ]
    header = ["score", "AUROC", "AUPR in", "AUPR out", "FPR95", "PSC ahead by"]
    return Table(f"{ood}: {report.ood_images[ood]} OOD images", header, rows)


def acceptance_table(report: EvaluationReport, ood: str) -> Table:
    """What thresholds on every score accept of one OOD set, least first."""
    ranked = sorted(report.acceptance[ood].items(), key=lambda item: item[1].ood_accepted)
    rows = [[name, f"{found.ood_accepted:.4f}", f"{found.aurc:.4f}"] for name, found in ranked]
    return Table(f"{ood}: accepted beside 95 % of {report.id_name}", ["score", "OOD accepted", "AURC"], rows)


def rates_table(report: EvaluationReport) -> Table:
    """Nominal and observed rates."""
    alarms, misses = report.false_alarms, report.misses
    header = ["rate", "nominal", "observed", f"{alarms.level:.0%} interval", "count", "binomial", "beta-binomial"]
    rows = [
        rate_row(f"false alarms (p ≤ {alarms.promised:g})", alarms),
        rate_row(f"label outside {1 - misses.promised:.0%} set", misses),
    ]
    rows += [[f"flagged in {name}", "", f"{fraction:.4f}", "", "", "", ""] for name, fraction in report.flagged.items()]
    rows.append(["mean prediction set", "", f"{report.mean_set_size:.3f}", "", "", "", ""])
    return Table("Rates", header, rows)


def rate_row(name: str, rate: ObservedRate) -> list[str]:
    """The cells of one rate."""
    return [
        name,
        f"{rate.promised:.4f}",
        f"{rate.rate:.4f}",
        f"{rate.interval.low:.4f}…{rate.interval.high:.4f}",
        str(rate.count),
        f"{rate.acceptance.low}…{rate.acceptance.high}",
        f"{rate.calibrated_acceptance.low}…{rate.calibrated_acceptance.high}",
    ]
