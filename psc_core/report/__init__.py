"""Present a fit or an evaluation as a page, a model card and a few lines for the terminal."""

from typing import Final

PAGE: Final = "report.html"  # the file name of the page
FIGURES: Final = "report"  # the name of the folder with the figures, beside the page
_DRAWN: Final = (
    *("collapse", "sizes", "ood-scores", "roc", "entropies", "reliability", "risk-coverage", "confusion"),
    *("deviations", "predictions", "coverage", "error-coverage"),
)
FIGURE_FILES: Final = frozenset(f"{name}.png" for name in _DRAWN)  # the figures of all tasks, in :data:`FIGURES`
