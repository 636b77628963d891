"""Match the classes of images to a network's outputs by name.

Folder names come in alphabetical order, a network's outputs in the order of its training.  Case, spaces,
underscores, hyphens and characters without a width are ignored, unless two classes on the same side differ in nothing
else.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from typing import NamedTuple

from psc_core.data.dataset import ImageDataset
from psc_core.errors import DataError, listed
from psc_core.names import composed

SHOWN_CLASSES = 10
"""Maximum number of class names in an error message."""


class Matched(NamedTuple):
    """Class names in the order of the network's outputs, and a note for the user, which may be empty."""

    classes: tuple[str, ...]
    note: str


def match(images: Sequence[str], outputs: Sequence[str], name: str) -> Matched:
    """Put the class names of images into the order of the network's outputs.

    If there are as many names as outputs but none of them matches, they keep their order: one side may use codes for
    the names of the other.

    Args:
        images: Class names of the images, each once.
        outputs: Names of the network's outputs.
        name: Name of the data set, for messages.

    Raises:
        DataError: If only some names are the network's, or their numbers differ; the message lists the differences.
    """
    found = _in_order(images, outputs, composed) or _in_order(images, outputs, _plain)
    if found is not None:
        moved = found != tuple(images)
        return Matched(found, "classes are in the order of the network's outputs, by their names" if moved else "")
    if len(images) == len(outputs) and {*map(_plain, images)}.isdisjoint(map(_plain, outputs)):
        return Matched(
            tuple(images),
            f"no class of {name} has a name of the network's ({listed(outputs, SHOWN_CLASSES)}); their order is taken "
            "to be that of its outputs",
        )
    raise _other_classes(images, outputs, name, "network's")


def in_network_order(data: ImageDataset, outputs: Sequence[str] | None) -> tuple[ImageDataset, str]:
    """Return the images with their labels in the order of the network's outputs, and a note for the user.

    Images without classes, and images for a network without class names, stay unchanged.

    Raises:
        DataError: If their classes are not the network's.
    """
    if not outputs or not data.classes:
        return data, ""
    matched = match(data.classes, outputs, data.name)
    return data.in_order(matched.classes), matched.note


def check_same(data: ImageDataset, classes: Sequence[str], whose: str) -> None:
    """Check that a data set has exactly these classes, in this order.

    Args:
        data: The images.
        classes: The expected class names.
        whose: The owner of the expected classes, for messages, such as ``"network's"``.

    Raises:
        DataError: If the classes differ; the message lists the differences.
    """
    if data.classes != tuple(map(composed, classes)):
        raise _other_classes(data.classes, classes, data.name, whose)


def _other_classes(images: Sequence[str], expected: Sequence[str], name: str, whose: str) -> DataError:
    """Return the error for images with other classes, which lists the names that only one side has."""
    for key in (_plain, composed):
        odd = {"unknown": _without(images, expected, key), "missing": _without(expected, images, key)}
        differences = [f"{what}: {listed(names, SHOWN_CLASSES)}" for what, names in odd.items() if names]
        if differences:
            break
    in_common = "in another order" if len(images) == len(expected) else "some share a name"
    return DataError(
        f"expected the {whose} {len(expected)} classes in {name}, got {len(images)} "
        f"({'; '.join(differences) or in_common}); use images of the same classes, in folders named alike (among "
        "validation and test images an empty one is enough)"
    )


def _without(names: Sequence[str], others: Sequence[str], key: Callable[[str], str]) -> list[str]:
    """Return the names whose key is not a key of ``others``."""
    known = {*map(key, others)}
    return [name for name in names if key(name) not in known]


def _in_order(images: Sequence[str], outputs: Sequence[str], key: Callable[[str], str]) -> tuple[str, ...] | None:
    """Return the images' names in the network's order; None if the sets of keys differ or two names share a key."""
    by_key = {key(name): name for name in images}
    wanted = [key(name) for name in outputs]
    if len(by_key) != len(images) or sorted(by_key) != sorted(wanted):
        return None
    return tuple(by_key[each] for each in wanted)


def _plain(name: str) -> str:
    shown = "".join(each for each in composed(name) if unicodedata.category(each) != "Cf")
    return composed(re.sub(r"[\s_-]+", " ", shown).casefold())
