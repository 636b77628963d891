"""What ``psc-serve`` says in its ``/metrics``."""

from __future__ import annotations

import re
from collections.abc import Mapping


def scraped(text: str) -> dict[str, float]:
    """Metrics of a service with one model, by name and labels, the model's name left out."""
    text = re.sub(r',?model="[^"]*"', "", text).replace("{,", "{").replace("{} ", " ")
    return {name: float(value) for name, value in re.findall(r"^(psc_\S+) (\S+)$", text, re.MULTILINE)}


def mean_batch(before: Mapping[str, float], after: Mapping[str, float]) -> float | None:
    """Images of a device step between two scrapes; None without a step."""
    images, steps = (after[key] - before[key] for key in ("psc_batch_size_sum", "psc_batch_size_count"))
    return round(images / steps, 2) if steps else None
