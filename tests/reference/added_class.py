"""Naive twin of :mod:`psc_core.learnt`, one image at a time, with Python's own numbers."""

import math
from collections.abc import Sequence


def log_odds(w: Sequence[float], means: Sequence[Sequence[float]], added: Sequence[tuple[float, float]]) -> list[float]:
    """The log odds of each added class, whose means are the last; ``added`` holds slope and bias of each."""
    nearness = [-0.5 * math.dist(w, mean) ** 2 for mean in means]  # g without ½‖w‖², which all have in common
    found = []
    for j, (slope, bias) in enumerate(added):
        at = len(means) - len(added) + j
        highest = max(nearness[:at])
        before = highest + math.log(sum(math.exp(each - highest) for each in nearness[:at]))
        found.append(slope * (nearness[at] - before) + bias)
    return found


def widen(probabilities: Sequence[float], epistemic: float, odds: Sequence[float]) -> tuple[list[float], float, float]:
    """Probabilities with the added classes, their entropy and the epistemic uncertainty."""
    wide = [*probabilities]
    for s in odds:
        q = 1 / (1 + math.exp(-s))
        wide = [*(p * (1 - q) for p in wide), q]
        epistemic *= 1 - q
    return wide, -sum(p * math.log(p) for p in wide if p > 0), epistemic
