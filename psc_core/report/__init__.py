"""Present a fit or an evaluation as a page, a model card and a few lines for the terminal.

:mod:`.collect` gathers the :mod:`.content`, :mod:`.page` writes it, with the :mod:`.facts`, :mod:`.figures` and
:mod:`.words` that all tasks share; :mod:`.classification` and :mod:`.regression` add a task's own.
"""

from __future__ import annotations

from typing import Final

PAGE: Final = "report.html"  # the file name of the page
FIGURES: Final = "report"  # the name of the folder with the figures, beside the page
