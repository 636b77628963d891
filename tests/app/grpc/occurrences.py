"""How often each field occurs in a parsed message."""

from collections import Counter
from typing import Any


def occurrences(message: Any) -> Counter[str]:
    """By the fields' full names, those of the messages inside included."""
    found = Counter[str]()
    for field, value in message.ListFields():
        values = value if field.is_repeated else [value]
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            found[field.full_name] += len(value)
            continue
        found[field.full_name] += len(values)
        if field.message_type is not None:
            for each in values:
                found.update(occurrences(each))
    return found
