"""What pydantic found wrong with a value, as the sentence that an error says."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def fault(item: Any, kind: str = "") -> str:
    """``"kind where: message"``, of one item of ``ValidationError.errors()``.

    Args:
        item: Its ``loc`` is where, its ``msg`` the message; without a place there is only the message.
        kind: What the values are called: setting, parameter, field.
    """
    where, message = ".".join(map(str, item["loc"])), item["msg"].removeprefix("Value error, ")
    return f"{kind} {where}: {message}".lstrip() if where else message


def all_faults(items: Iterable[Any], kind: str = "") -> str:
    """Each :func:`fault`, in one line."""
    return "; ".join(fault(item, kind) for item in items)
