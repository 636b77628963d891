"""What mkdocs does not know of the docstrings: Sphinx's roles become plain code in the Python reference."""

from __future__ import annotations

import re
from typing import Any

_ROLE = re.compile(r":[a-z]+:<code>~?\.?([^<]*)</code>")


def on_page_content(html: str, **_: Any) -> str:
    """Return the page with ``:class:`.PSC``` as ``PSC``."""
    return _ROLE.sub(lambda found: f"<code>{found[1].rpartition('.')[2]}</code>", html)
