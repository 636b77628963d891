"""Print the tables of the documentation that come from the code: ``python -m tests.docs.tables settings``.

The others are ``metrics``, and ``problems`` of ``docs/service.md``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from app.cli import default_text
from app.errors import INTERNAL, ROUTING, TABLE, TYPE_PREFIX
from app.grpc import CODES
from app.metrics import METRICS
from app.settings import ENV_PREFIX, Settings


def settings_table() -> str:
    """Return the table of all settings."""
    rows = []
    for name, field in Settings.model_fields.items():
        default = default_text(name)
        shown = f"`{default}`" if default else ""
        rows.append(
            (f"`--{name.replace('_', '-')}`", f"`{ENV_PREFIX}{name.upper()}`, `{name}`", shown, field.description)
        )
    return _table(("flag", "environment and TOML", "default", "meaning"), rows)


def metrics_table() -> str:
    """Return the table of all metrics."""
    rows = [
        (f"`{row.name}`", row.type.__name__.lower(), ", ".join(f"`{label}`" for label in row.labels), row.help)
        for row in METRICS
    ]
    return _table(("metric", "type", "labels", "meaning"), rows)


def problems_table() -> str:
    """Return the table of all errors, as HTTP and gRPC answer them."""
    rows = sorted({*TABLE.values(), INTERNAL, *((status, *row) for status, row in ROUTING.items())})
    return _table(
        ("status", "gRPC", "type", "title"),
        [(status, f"`{CODES[status]}`", f"`{TYPE_PREFIX}{slug}`", title) for status, slug, title in rows],
    )


def _table(head: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> str:
    return "".join(f"| {' | '.join(map(str, row))} |\n" for row in (head, ("---",) * len(head), *rows))


# Maps a name on the command line to the function that returns its table in Markdown.
TABLES: Final[Mapping[str, Callable[[], str]]] = {
    "settings": settings_table,
    "metrics": metrics_table,
    "problems": problems_table,
}

if __name__ == "__main__":
    print(TABLES[sys.argv[1]](), end="")
