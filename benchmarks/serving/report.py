"""Results and requirements of a load run, as Markdown."""

from __future__ import annotations

import math
import re
import statistics

from app.settings import Settings
from benchmarks.runs import Json, markdown_table, where
from benchmarks.serving.client import Load

DEADLINE = float(Settings.model_fields["deadline_seconds"].default)
QUEUE = int(Settings.model_fields["max_queue_images"].default)
RECOVER_SECONDS = 5.0
PHASES = ("closed loop", "unloaded", "steady", "overload", "recovery")
"""In the order in which they run."""

NORMAL = 2.0
"""Latency is normal while a second's median is at most this many times the unloaded median."""


def scraped(text: str) -> dict[str, float]:
    """Metrics of a service with one model, by name and labels, the model's name left out."""
    text = re.sub(r',?model="[^"]*"', "", text).replace("{,", "{").replace("{} ", " ")
    return {name: float(value) for name, value in re.findall(r"^(psc_\S+) (\S+)$", text, re.MULTILINE)}


def batches(before: dict[str, float], after: dict[str, float]) -> Json:
    """Device steps between two scrapes: how many, their mean size, and the fraction of each size."""
    grown = {key: after[key] - before.get(key, 0.0) for key in after if key.startswith("psc_batch_size")}
    steps = grown["psc_batch_size_count"]
    fractions, below = {}, 0.0
    for key, count in grown.items():
        if bound := re.fullmatch(r'psc_batch_size_bucket{le="(\d+)\.0"}', key):
            if count > below:
                fractions[bound[1]] = round((count - below) / steps, 3)
            below = count
    return {
        "steps": int(steps),
        "mean_size": round(grown["psc_batch_size_sum"] / max(1.0, steps), 1),
        "fraction_by_size_up_to": fractions,
    }


def back_to_normal(load: Load, normal_s: float) -> float:
    """Seconds from the start of ``load`` after which every second has a normal median and no rejection."""
    good_since = 0
    for second in range(int(load.ended - load.began)):
        window = [response for response in load.responses if second <= response.due - load.began < second + 1]
        fine = [response.seconds for response in window if response.status == 200]
        if len(fine) < len(window) or (fine and statistics.median(fine) > NORMAL * normal_s):
            good_since = second + 1
    return float(good_since)


def requirements(phases: dict[str, Json], found: Json) -> list[Json]:
    """Requirements, and whether they are met."""
    closed, steady, over = phases["closed loop"], phases["steady"], phases["overload"]
    queued = max(phase.get("max_queued_images", 0) for phase in phases.values())
    sizes = [phases[name]["batches"]["mean_size"] for name in ("unloaded", "steady", "closed loop", "overload")]
    checks = [
        (
            "closed loop and 70 % of the peak: every response is 200",
            set(closed["statuses"]) == set(steady["statuses"]) == {"200"},
            f"{_counts(closed)}; {_counts(steady)}",
        ),
        (
            "batch sizes follow the load",
            sizes[0] < sizes[1] < sizes[2] <= sizes[3] * 1.05,
            "mean " + " → ".join(map(str, sizes)),
        ),
        ("overload: only 200 and 429", set(over["statuses"]) == {"200", "429"}, _counts(over)),
        (
            "overload: every 429 has Retry-After",
            over["rejections_without_retry_after"] == 0,
            f"{over['rejections_without_retry_after']} without",
        ),
        (
            f"overload: p99 of the accepted within the deadline of {DEADLINE:g} s",
            over.get("p99_ms", math.inf) <= 1000 * DEADLINE,
            f"{over.get('p99_ms', math.inf) / 1000:.2f} s",
        ),
        (f"the queue never holds more than {QUEUE} images", queued <= QUEUE, f"at most {queued}"),
        (
            f"normal latency within {RECOVER_SECONDS:g} s of the overload's end",
            found["back_to_normal_s"] <= RECOVER_SECONDS,
            f"{found['back_to_normal_s']:g} s",
        ),
    ]
    return [{"requirement": what, "met": met, "found": value} for what, met, value in checks]


def _counts(phase: Json) -> str:
    return ", ".join(f"{count:,} × {status}" for status, count in phase["statuses"].items())


def section(report: Json) -> str:
    """The report as Markdown."""
    environment = report["environment"]
    header = ["phase", "sent/s", "answered/s", "200", "429", "p50", "p99", "mean batch", "maximum queued"]
    rows = []
    for name in PHASES:
        phase = report["phases"][name]
        numbers = [
            f"{phase['sent_per_s']:.0f}",
            f"{phase['requests_per_s']:.0f}",
            *(f"{phase['statuses'].get(status, 0):,}" for status in ("200", "429")),
            *(f"{phase[key]:,.1f} ms" if key in phase else "" for key in ("p50_ms", "p99_ms")),
            str(phase.get("batches", {}).get("mean_size", "")),
            str(phase.get("max_queued_images", "")),
        ]
        rows.append([name, *numbers])
    checks = [
        [check["requirement"], check["found"], "yes" if check["met"] else "**no**"] for check in report["requirements"]
    ]
    return "\n".join(
        [
            f"{where(environment)}; {report['bundle']}, default settings, one PNG digit a request.",
            f"Client and server share the {environment['cpus']} cores, so each slows the other.",
            "Latencies count from the moment a request was due.",
            *([report["note"]] if report["note"] else []),
            "",
            f"    {report['command']}",
            "",
            markdown_table(header, rows),
            "",
            f"Peak: {report['peak_images_per_s']:.0f} images/s with {report['clients']} clients.  After the overload "
            f"latency was normal again within {report['back_to_normal_s']:g} s.",
            "",
            markdown_table(["requirement", "found", "met"], checks),
        ]
    )
