"""Choose gates by least regret over kinds of made-up images.

Detectors that are good at near images are poor at far ones and the reverse, so a mean over kinds would be decided by
how many of each were made.  The regret of an option on a kind is the best option's AUROC less its own; the option with
the smallest largest regret is chosen, of equals the one with the highest mean AUROC.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from psc_core.tables import aligned

Auroc = Mapping[str, float]
"""AUROC by kind of made-up image."""


@dataclass(frozen=True)
class GateChoice:
    """The options that were compared and the chosen one; names of gates, an early layer in brackets."""

    aurocs: Mapping[str, Auroc]  # by option, each with the same kinds
    selectable: tuple[str, ...]  # options that may be chosen; the others are there to compare with
    reason: str  # what was left out of the choice and why, a sentence

    @property
    def best(self) -> dict[str, float]:
        """The highest AUROC of each kind."""
        kinds = next(iter(self.aurocs.values()))
        return {kind: max(auroc[kind] for auroc in self.aurocs.values()) for kind in kinds}

    def regret(self, option: str) -> float:
        """Largest distance from the best option over the kinds."""
        return max(best - self.aurocs[option][kind] for kind, best in self.best.items())

    @property
    def chosen(self) -> str:
        """The option with the least regret."""
        return min(self.selectable, key=lambda name: (self.regret(name), -statistics.mean(self.aurocs[name].values())))

    def table(self) -> str:
        """A line for each option, least regret first, with the AUROC of each kind."""
        rows = [["gates", "regret", *self.best]]
        for name in sorted(self.aurocs, key=self.regret):
            numbers = (f"{value:.4f}" for value in (self.regret(name), *self.aurocs[name].values()))
            rows.append([name, *numbers, "◀ chosen" * (name == self.chosen)])
        conclusion = f"gates: {self.chosen} has the least regret over made-up images; {self.reason}"
        return "\n".join([*aligned(rows), conclusion])

    def to_json(self) -> dict[str, Any]:
        """Return the JSON types of the report in a manifest."""
        return {
            "chosen": self.chosen,
            "regret": self.regret(self.chosen),
            "reason": self.reason,
            "kinds": list(self.best),
            "options": [
                {"gates": name, "selectable": name in self.selectable, "auroc": list(auroc.values())}
                for name, auroc in self.aurocs.items()
            ],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> GateChoice:
        """Inverse of :meth:`to_json`."""
        options = data["options"]
        aurocs = {option["gates"]: dict(zip(data["kinds"], option["auroc"], strict=True)) for option in options}
        return cls(aurocs, tuple(option["gates"] for option in options if option["selectable"]), data["reason"])
