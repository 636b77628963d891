"""Present a fit or an evaluation as a page, a model card and a few lines for the terminal.

These modules hold the parts that all tasks share; the others lie in a folder named after the task, which has

=============== ======================================================================================================
``sets``        the data kept of a set of images, and how it is collected
``facts``       the limits of decisions, the policy in words, warnings
``figures``     the figures of this task only
``words``       titles and explanations of all figures, columns, a glossary
``*.jinja``     the page and the model card, which extend the templates of the same name here
=============== ======================================================================================================
"""

from __future__ import annotations

from typing import Final

PAGE: Final = "report.html"
"""The file name of the page."""

FIGURES: Final = "report"
"""The name of the folder with the figures, beside the page."""
