"""A fit or an evaluation as a page, a model card and a few lines for the terminal.

The modules here hold what all tasks share; what differs lies in the folder that bears a task's name.  Each has

=============== ======================================================================================================
``sets``        what is kept of a set of images, and how it is collected
``facts``       the limits of decisions, the policy in words, warnings
``figures``     the figures of the task alone
``words``       titles and explanations of all figures, columns, a glossary
``*.jinja``     the page and the model card, from the templates of the same name here
=============== ======================================================================================================
"""

from __future__ import annotations

from typing import Final

PAGE: Final = "report.html"
"""The file of the page."""

FIGURES: Final = "report"
"""The folder of the figures beside it."""
