"""How names of classes, columns and numbers are written, so that equal ones compare equal.

A Mac decomposes the names of files ("é" as "e" and an accent, Unicode's NFD) where most other programs compose them
(NFC), and people leave blanks at the end of a cell or folder name that nobody sees.  So names are composed, without
blanks at their ends, wherever they come from; upper and lower case, and blanks inside, remain as they are.
"""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

from psc_core.errors import UsageError, listed, shortened

SHOWN: Final = 5  # maximum number of names in a message
# Blanks at the ends, also those without a width, which a spreadsheet or a byte order mark leaves behind.
_BLANK_ENDS: Final = re.compile(r"^[\s\ufeff\u200b]+|[\s\ufeff\u200b]+$")


def composed(name: str) -> str:
    """Return a name in Unicode's NFC, without blanks at its ends.

    Example:
        >>> composed("cafe\\u0301 ") == "caf\\u00e9"
        True
    """
    return _BLANK_ENDS.sub("", unicodedata.normalize("NFC", name))


def class_names(classes: Any, noun: str = "classes") -> tuple[str, ...]:
    """Return class names in the order of their labels, :func:`composed`.

    Args:
        classes: A sequence of names, or a mapping between names and labels in either direction, as ``class_to_idx`` of
            torchvision and ``id2label`` of transformers are.
        noun: What messages call them.

    Example:
        >>> class_names({"zebra": 1, "ant": 0})
        ('ant', 'zebra')
    """
    given = _by_label(classes, noun) if isinstance(classes, Mapping) else _listed_names(classes, noun)
    odd = [name for name in given if not isinstance(name, str)]
    if odd:
        raise UsageError(
            f"expected {noun} to be names as text, got {shortened(repr(odd[0]))} among them; give the name of each "
            f'label, such as {noun}=["cat", "dog"]'
        )
    names = tuple(composed(str(name)) for name in given)  # str: NumPy has a type of its own.
    spelled = defaultdict[str, list[str]](list)
    for name, before in zip(names, given, strict=True):
        spelled[name].append(before)
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"expected {noun} in UTF-8, got {shortened(ascii(name))}; rename it") from error
    if "" in spelled:
        raise UsageError(f"expected {noun} with a name for each label, got an empty one; name it")
    if same := [each for each in spelled.values() if len(each) > 1]:
        # Escaped, because two forms of one name look alike.
        shown = listed([" and ".join(ascii(str(name)) for name in each[:SHOWN]) for each in same], SHOWN)
        raise UsageError(f"expected {noun} that differ from each other, {shown} are one name; name each class once")
    return names


def _listed_names(classes: Any, noun: str) -> list[Any]:
    """Return what is listed in a sequence, an array or a column of a data frame."""
    of_array = getattr(classes, "tolist", None)
    found = of_array() if callable(of_array) else classes
    if isinstance(found, str | bytes) or not isinstance(found, Sequence) or not len(found):
        kind = shortened(repr(classes)) if isinstance(classes, str | bytes) else type(classes).__name__
        raise UsageError(
            f"expected {noun} to be a list of names in the order of the labels, got {kind}; give a list such as "
            f'{noun}=["cat", "dog"], or the mapping from names to labels'
        )
    return list(found)


def _by_label(classes: Mapping[Any, Any], noun: str) -> list[Any]:
    """Return the names in a mapping from names to labels, or from labels to names, by their labels."""
    pairs = [*classes.items()]
    orders = [{_label(label): name for name, label in pairs}, {_label(label): name for label, name in pairs}]
    wanted = {*range(len(pairs))}
    found = [names for names in orders if {*names} == wanted and all(isinstance(each, str) for each in names.values())]
    if len(found) != 1 or not pairs:
        raise UsageError(
            f"expected {noun} to map each name to its label, or each label to its name, with the labels 0 to "
            f"{max(0, len(pairs) - 1)} once each, got {shortened(repr(dict(pairs)))}; give the names as a list in the "
            "order of the labels"
        )
    return [found[0][label] for label in range(len(pairs))]


def _label(value: Any) -> int | None:
    """Return the label that a value is: a whole number, or its digits, as keys of JSON are; None if it is none."""
    if isinstance(value, str):
        is_index = value.isascii() and value.isdigit() and len(value) < 10
        return int(value) if is_index and str(int(value)) == value else None
    index = getattr(value, "__index__", None)
    return None if index is None or isinstance(value, bool) else int(index())
