"""Write the report of the out-of-distribution comparison."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from benchmarks import runs
from benchmarks.ood.detectors import DEFAULT, DENSITY, PAPER
from benchmarks.ood.settings import SETTINGS
from benchmarks.runs import Json

Column = tuple[str, str]  # A setting and the name of its OOD data.

CLASSIFIERS = {"psc": "PSC", "temperature": "temperature", "dnn": "the network"}

# One density with the chosen layer and at the penultimate layer alone: the paper's, of z, and the default, which was
# like `gda++` until it was relative to all images.
SKIPS = ((PAPER, ("penultimate gda",)), (DENSITY, ("penultimate pooled++", "penultimate gda++")))


def fragment(record: Json) -> str:
    """Return all detectors in all settings, the default beside the best of each, covariate shift, and the networks."""
    parts = list(runs.results(record).values())
    tables = {
        "Every detector in every setting": detector_table(parts),
        "The default beside the best detector of each setting": default_table(parts),
        "What the skip gives": skip_table(parts),
        "Probabilities": calibration_table(parts),
        "Covariate shift": shift_table(parts),
        "Networks and layers": network_table(parts),
    }
    shown = [f"## {title}\n\n{table}" for title, table in tables.items()]
    return "\n\n".join([*shown, *failures(parts), runs.provenance(record)])


def aurocs(parts: Sequence[Json], metric: str = "auroc") -> dict[Column, dict[str, list[float]]]:
    """Map column and detector to the values of the seeds; only detectors of every part are kept."""
    common = sorted(set.intersection(*(set(part["families"]) for part in parts)))
    found: dict[Column, dict[str, list[float]]] = {}
    for name in SETTINGS:
        for part in (part for part in parts if part["setting"] == name):
            for ood, of_detectors in part["outside"].items():
                column = found.setdefault((name, ood), {})
                for detector in common:
                    column.setdefault(detector, []).append(of_detectors[detector][metric])
    return found


def means(parts: Sequence[Json], metric: str = "auroc") -> dict[str, dict[Column, float]]:
    columns = aurocs(parts, metric)
    detectors = next(iter(columns.values()))
    return {
        name: {column: statistics.mean(values[name]) for column, values in columns.items()}
        for name in sorted(detectors)
    }


def worst_gaps(of_detectors: Mapping[str, Mapping[Column, float]]) -> dict[str, float]:
    """Return for each detector the largest distance to the best one of a column."""
    columns = next(iter(of_detectors.values()))
    best = {column: max(values[column] for values in of_detectors.values()) for column in columns}
    return {
        name: max(best[column] - value for column, value in values.items()) for name, values in of_detectors.items()
    }


def detector_table(parts: Sequence[Json]) -> str:
    auroc, fpr95 = means(parts), means(parts, "fpr95")
    gaps = worst_gaps(auroc)
    families = parts[0]["families"]
    header = ["detector", "mean", "worst gap", "mean FPR95", *(_title(column) for column in next(iter(auroc.values())))]
    lines = []
    for name in sorted(auroc, key=lambda name: -statistics.mean(auroc[name].values())):
        title = f"**{name}**" if families[name] == "psc" else name
        average, rate = (statistics.mean(values[name].values()) for values in (auroc, fpr95))
        cells = [f"{value:.4f}" for value in (average, gaps[name], rate, *auroc[name].values())]
        lines.append([title, *cells])
    return runs.markdown_table(header, lines)


def default_table(parts: Sequence[Json]) -> str:
    """Return the default's mean ± standard error over seeds, the best detector's, and whether they tie within one."""
    lines = []
    for column, values in aurocs(parts).items():
        own = values[DEFAULT]
        best = max(values, key=lambda name: statistics.mean(values[name]))
        differences = [theirs - ours for theirs, ours in zip(values[best], own, strict=True)]
        gap, error = statistics.mean(differences), runs.standard_error(differences)
        verdict = "first" if best == DEFAULT else "tie" if not math.isnan(error) and gap <= error else "behind"
        lines.append([_title(column), runs.plus_minus(own), best, runs.plus_minus(values[best]), f"{gap:.4f}", verdict])
    return runs.markdown_table(["setting", DEFAULT, "best", "its AUROC", "gap", "PSC is"], lines)


def skip_table(parts: Sequence[Json]) -> str:
    """Return AUROCs of a density at chosen and penultimate layers, and paired differences, collapsed first."""
    lines = []
    for name in dict.fromkeys(part["setting"] for part in parts):
        of_setting = [part for part in parts if part["setting"] == name]
        collapse = [statistics.mean(part[at]["nc1"][0] for part in of_setting) for at in ("penultimate", "chosen")]
        for column, values in aurocs(of_setting).items():
            cells = [f"{value:.3f}" for value in collapse]
            for chosen, alone in SKIPS:
                pair = values[chosen], next(values[other] for other in alone if other in values)
                differences = [there - here for there, here in zip(*pair, strict=True)]
                cells += [f"{statistics.mean(each):.4f}" for each in pair] + [runs.plus_minus(differences)]
            lines.append((collapse[0], [_title(column), *cells]))
    header = ["setting", "penultimate NC1", "chosen's NC1"]
    header += ["z", "penultimate", "difference", "default density", "penultimate", "difference"]
    return runs.markdown_table(header, [line for _, line in sorted(lines)])


def calibration_table(parts: Sequence[Json]) -> str:
    """Return the quality of each classifier by setting, and PSC's ECE less that of temperature scaling."""
    columns = [("accuracy", "psc"), ("accuracy", "dnn"), *(("nll", name) for name in CLASSIFIERS)]
    columns += [("ece", name) for name in (*CLASSIFIERS, "calibrated")]
    lines = []
    for setting in SETTINGS:
        found = [part["calibration"] for part in parts if part["setting"] == setting]
        if found:
            cells = [runs.plus_minus([each["rows"][name][metric] for each in found]) for metric, name in columns]
            differences = [
                statistics.mean(rows["psc"]["ece"] - rows["temperature"]["ece"] for rows in each["divided"])
                for each in found
                if each["divided"]
            ]
            lines.append([setting, *cells, runs.plus_minus(differences) if differences else "—"])
    measures = {"accuracy": "accuracy", "nll": "NLL", "ece": "ECE"}
    titles = [f"{measures[metric]}, {CLASSIFIERS.get(name, 'perfectly calibrated')}" for metric, name in columns]
    return runs.markdown_table(["setting", *titles, "ECE, PSC less temperature, divided at random"], lines)


def shift_table(parts: Sequence[Json]) -> str:
    """Return accuracy and the fraction flagged, mean over seeds, for each kind of shift."""
    kinds = list(parts[0]["shifts"])
    lines = []
    for name in SETTINGS:
        of_setting = [part["shifts"] for part in parts if part["setting"] == name]
        if of_setting:
            cells = [
                " / ".join(
                    f"{statistics.mean(shifts[kind][what] for shifts in of_setting):.3f}"
                    for what in ("accuracy", "flagged")
                )
                for kind in kinds
            ]
            lines.append([name, *cells])
    return runs.markdown_table(["setting", *kinds], lines)


def network_table(parts: Sequence[Json]) -> str:
    lines = []
    for part in sorted(parts, key=lambda part: (list(SETTINGS).index(part["setting"]), part["seed"])):
        chosen, end = part["chosen"], part["penultimate"]
        lines.append(
            [
                part["setting"],
                part["trained"],
                f"{part['accuracy']:.4f}",
                f"{part['fit_images'] or 'all'}; {' + '.join(f'{n:,}' for n in part['images'].values())}",
                f"{'+'.join(chosen['layers'])} (NC1 {chosen['nc1'][0]:.3f}), {part['size'][0]} × {part['size'][1]}",
                f"{end['nc1'][0]:.3f}",
                part["texture"],
            ]
        )
    header = ["setting", "network", "accuracy", "images: fitted; tested", "chosen, z", "penultimate NC1", "checks"]
    return runs.markdown_table(header, lines)


def failures(parts: Sequence[Json]) -> list[str]:
    return [
        f"{part['setting']}, seed {part['seed']}: {name} failed ({reason})."
        for part in parts
        for name, reason in part["failed"].items()
    ]


def _title(column: Column) -> str:
    return f"{column[0]} → {column[1]}"
