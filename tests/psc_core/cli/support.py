"""What the tests of the command lines share."""

import re
from pathlib import Path


def undated(report: Path) -> str:
    """Return a report without its first date, that of its writing, which changes at midnight."""
    return re.sub(r"\b20\d\d-\d\d-\d\d\b", "date", report.read_text(), count=1)
