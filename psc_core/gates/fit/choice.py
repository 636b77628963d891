"""Choose gates by least regret over kinds of made-up images.

Detectors that are good at near images are poor at far ones and the reverse, so a mean over kinds would be decided by
how many of each were made.  The regret of an option on a kind is the best option's AUROC less its own; the option with
the smallest largest regret is chosen, of equals the one with the highest mean AUROC.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from psc_core.tables import aligned

Auroc = Mapping[str, float]
"""AUROC by kind of made-up image."""


def best_of(aurocs: Mapping[str, Auroc]) -> dict[str, float]:
    """Return the highest AUROC of each kind; ``aurocs`` of each option are of the same kinds."""
    kinds = next(iter(aurocs.values()))
    return {kind: max(auroc[kind] for auroc in aurocs.values()) for kind in kinds}


def regret(aurocs: Mapping[str, Auroc], option: str) -> float:
    """Return the largest distance of an option from the best one over the kinds."""
    return max(best - aurocs[option][kind] for kind, best in best_of(aurocs).items())


@dataclass(frozen=True)
class GateChoice:
    """The options that were compared and the chosen one; names of gates, an early layer in brackets."""

    aurocs: Mapping[str, Auroc]  # by option, each with the same kinds
    selectable: tuple[str, ...]  # options that may be chosen; the others are there to compare with
    reason: str  # what was left out of the choice and why, a sentence

    @property
    def chosen(self) -> str:
        """The option with the least regret."""
        return min(
            self.selectable, key=lambda name: (regret(self.aurocs, name), -statistics.mean(self.aurocs[name].values()))
        )

    def table(self) -> str:
        """A line for each option, least regret first, with the AUROC of each kind."""
        rows = [["gates", "regret", *best_of(self.aurocs)]]
        for name in sorted(self.aurocs, key=partial(regret, self.aurocs)):
            numbers = (f"{value:.4f}" for value in (regret(self.aurocs, name), *self.aurocs[name].values()))
            rows.append([name, *numbers, "◀ chosen" * (name == self.chosen)])
        conclusion = f"gates: {self.chosen} has the least regret over made-up images; {self.reason}"
        return "\n".join([*aligned(rows), conclusion])

    def to_json(self) -> dict[str, Any]:
        """Return the JSON types of the report in a manifest."""
        return {
            "chosen": self.chosen,
            "regret": regret(self.aurocs, self.chosen),
            "reason": self.reason,
            "kinds": list(best_of(self.aurocs)),
            "options": [
                {"gates": name, "selectable": name in self.selectable, "auroc": list(auroc.values())}
                for name, auroc in self.aurocs.items()
            ],
        }
