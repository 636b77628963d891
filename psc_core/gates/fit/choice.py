"""Choose gates by least regret over the transforms that make out-of-distribution images.

Detectors that are good at near images are poor at far images and vice versa, so a mean over transforms would depend on
how many of each there are.  The regret of an option on a transform is the best option's AUROC minus its own; the option
whose largest regret is smallest is chosen, and of equal options the one with the highest mean AUROC.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from psc_core.tables import aligned

Auroc = Mapping[str, float]
"""The AUROC for each transform of made-up images."""

KINDS_KEY: Final = "kinds"
"""The key of a bundle that lists the transforms of made-up images, or the patches of a map, as their AUROCs follow."""


def best_of(aurocs: Mapping[str, Auroc]) -> dict[str, float]:
    """Return the highest AUROC for each transform; all options have the same transforms."""
    transforms = next(iter(aurocs.values()))
    return {transform: max(auroc[transform] for auroc in aurocs.values()) for transform in transforms}


def regret(aurocs: Mapping[str, Auroc], option: str) -> float:
    """Return the largest difference between the best option and this option over the transforms."""
    return max(best - aurocs[option][transform] for transform, best in best_of(aurocs).items())


@dataclass(frozen=True)
class GateChoice:
    """The options that were compared and the chosen one, each named by its gates with the early layer in brackets."""

    aurocs: Mapping[str, Auroc]  # by option, each with the same transforms
    selectable: tuple[str, ...]  # options that may be chosen; the others are shown for comparison
    reason: str  # a sentence on the options that may not be chosen

    @property
    def chosen(self) -> str:
        """The option with the least regret."""
        return min(
            self.selectable, key=lambda name: (regret(self.aurocs, name), -statistics.mean(self.aurocs[name].values()))
        )

    def table(self) -> str:
        """Return one line for each option, least regret first, with its AUROC for each transform."""
        rows = [["gates", "regret", *best_of(self.aurocs)]]
        for name in sorted(self.aurocs, key=partial(regret, self.aurocs)):
            numbers = (f"{value:.4f}" for value in (regret(self.aurocs, name), *self.aurocs[name].values()))
            rows.append([name, *numbers, "◀ chosen" * (name == self.chosen)])
        least = min(self.aurocs, key=partial(regret, self.aurocs))
        among = " of those that may be chosen" if least not in self.selectable else ""
        conclusion = f"gates: {self.chosen} has the least regret over made-up images{among}; {self.reason}"
        return "\n".join([*aligned(rows), conclusion])

    def to_json(self) -> dict[str, Any]:
        """Return the choice as a manifest records it, in JSON types."""
        return {
            "chosen": self.chosen,
            "regret": regret(self.aurocs, self.chosen),
            "reason": self.reason,
            KINDS_KEY: list(best_of(self.aurocs)),
            "options": [
                {"gates": name, "selectable": name in self.selectable, "auroc": list(auroc.values())}
                for name, auroc in self.aurocs.items()
            ],
        }
