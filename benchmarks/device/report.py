"""Turn the record of :mod:`benchmarks.device.run` into tables."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.device.subjects import SUBJECTS
from benchmarks.runs import Json, markdown_table, measured

PARTS = ("standardise", "backbone", "projection", "density", "head", "pack")
TIMES = {
    "throughput_over_plain": "plain ÷ PSC",
    "throughput_over_plain_fused": "fused ÷ PSC",
    "tied_throughput_over_plain_fused": "fused ÷ PSC, tied",
}
ALTERNATIVES = {"ensemble": "ensemble ÷ PSC", "ensemble_fused": "fused", "mc_dropout_fused": "MC dropout, fused ÷ PSC"}


def fragment(record: Json) -> str:
    """Tabulate the best and worst of each network, then every batch size and part."""
    subjects = {each.name: record["subjects"][each.name] for each in SUBJECTS if each.name in record["subjects"]}
    tables = [measured(record)]
    if subjects:
        limits = next(iter(subjects.values()))["limits"]
        speeds = [f"{name} {value / 1e9:,.0f} GFLOP/s" for name, value in limits["operations_per_s"].items()]
        tables += [
            f"Plain matrix product: {', '.join(speeds)}; plain copy: {limits['bytes_per_s'] / 1e9:,.1f} GB/s.",
            _summary(subjects),
            _steps(subjects),
            _parts(subjects),
        ]
    if "large_tail" in record:
        rows = [[row["density"], str(row["components"]), f"{row['ms']:.2f}"] for row in record["large_tail"]]
        header = ["projection, density and head alone, 1,000 classes, 2,048 features, batch 64", "components", "ms"]
        tables.append(markdown_table(header, rows))
    return "\n\n".join(tables)


def best_batches(cells: list[Json]) -> dict[str, tuple[float, float]]:
    """Return by precision PSC's images/s over those of the plain and of the fused network, each at its best batch."""
    found = {}
    for precision, own in _by_precision(cells).items():
        speed = {name: max(cell["bucket"] / cell["ms"][name] for cell in own) for name in own[0]["ms"]}
        found[precision] = speed["psc"] / speed["plain"], speed["psc"] / speed["plain_fused"]
    return found


def _by_precision(cells: list[Json]) -> dict[str, list[Json]]:
    return {
        precision: [cell for cell in cells if cell["precision"] == precision]
        for precision in dict.fromkeys(cell["precision"] for cell in cells)
    }


def _summary(subjects: Json) -> str:
    rows = []
    for name, subject in subjects.items():
        best = best_batches(subject["cells"])
        others = {each["precision"]: each["over_psc"] for each in subject["alternatives"]}
        for precision, cells in _by_precision(subject["cells"]).items():
            tails = [cell["tail_fraction"] for cell in cells if "tail_fraction" in cell]
            over = others.get(precision, {})
            rows.append(
                [
                    name,
                    precision,
                    *(f"{ratio:.2f}×" for ratio in best[precision]),
                    f"{min(tails):.1%} to {max(tails):.1%}",
                    *(f"{over[key][0]:.1f}×" if key in over else "—" for key in ALTERNATIVES),
                ]
            )
    header = ["network", "precision", "PSC ÷ plain, images/s", "PSC ÷ fused", "tail ÷ step", *ALTERNATIVES.values()]
    return markdown_table(header, rows)


def _cells(subjects: Json) -> Iterator[tuple[str, Json, Json]]:
    for name, subject in subjects.items():
        for cell in subject["cells"]:
            yield name, subject, cell


def _steps(subjects: Json) -> str:
    rows = [
        [
            f"{name}, `{subject['layer']}`",
            cell["precision"],
            cell["mode"],
            str(cell["bucket"]),
            *(f"{cell['ms'][network]:.2f}" for network in ("psc", "plain", "plain_fused")),
            *(_spread(cell[key]) if key in cell else "—" for key in TIMES),
            f"{cell['step_over_floor']:.2f}" if "step_over_floor" in cell else "—",
        ]
        for name, subject, cell in _cells(subjects)
    ]
    header = ["network, layer", "precision", "mode", "batch", "PSC, ms", "plain, ms", "fused, ms"]
    return markdown_table([*header, *TIMES.values(), "step ÷ floor"], rows)


def _parts(subjects: Json) -> str:
    rows = [
        [
            name,
            cell["precision"],
            str(cell["bucket"]),
            *(f"{cell['parts_ms'][part]:.3f}" for part in PARTS),
            f"{cell['tail_fraction']:.1%}",
        ]
        for name, _, cell in _cells(subjects)
        if "parts_ms" in cell
    ]
    return markdown_table(["network", "precision", "batch", *(f"{part}, ms" for part in PARTS), "tail ÷ step"], rows)


def _spread(ratio: list[float]) -> str:
    return f"{ratio[0]:.2f}× ({ratio[1]:.2f}–{ratio[2]:.2f})"
