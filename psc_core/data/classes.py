"""Bring the classes of images into the order of a network's outputs, by their names.

The names of folders are in name order, a network's outputs in the order of its training.  Upper and lower case, spaces,
underscores and hyphens make no difference, unless they tell two classes of one side apart.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from psc_core.data.dataset import ImageDataset
from psc_core.errors import DataError, listed

SHOWN_CLASSES = 10
"""Names that a message lists."""


class Matched(NamedTuple):
    """Class names of images in the order of the network's outputs, and what to tell of that; empty for nothing."""

    classes: tuple[str, ...]
    note: str


def match(images: Sequence[str], outputs: Sequence[str], name: str) -> Matched:
    """Put the class names of images into the order of the network's.

    Names that are all unlike the network's, and as many, keep their order: one side may have codes for the other's
    names.

    Args:
        images: Names of the images' classes, each once.
        outputs: Names of the network's outputs.
        name: Of the images, for messages.

    Raises:
        DataError: Only some of the names are the network's, or there are more or fewer; the message names them.
    """
    found = _in_order(images, outputs, str) or _in_order(images, outputs, _plain)
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
    """Return images with their labels in the order of the network's outputs, and what to tell of that.

    Images without classes, and those for a network without names, stay as they are.

    Raises:
        DataError: Their classes are not the network's.
    """
    if not outputs or not data.classes:
        return data, ""
    matched = match(data.classes, outputs, data.name)
    return data.in_order(matched.classes), matched.note


def check_same(data: ImageDataset, classes: Sequence[str], whose: str) -> None:
    """Require these classes in this order.

    Args:
        data: The images.
        classes: The names that their classes should have.
        whose: Classes they are, for messages.

    Raises:
        DataError: They differ; the message says how.
    """
    if data.classes != tuple(classes):
        raise _other_classes(data.classes, classes, data.name, whose)


def _other_classes(images: Sequence[str], expected: Sequence[str], name: str, whose: str) -> DataError:
    """Return the error of images with other classes, which names those of one side alone, by spelling if need be."""
    for key in (_plain, str):
        odd = {"unknown": _without(images, expected, key), "missing": _without(expected, images, key)}
        differences = [f"{what}: {listed(names, SHOWN_CLASSES)}" for what, names in odd.items() if names]
        if differences:
            break
    in_common = "in another order" if len(images) == len(expected) else "some share a name"
    return DataError(
        f"expected the {whose} {len(expected)} classes in {name}, got {len(images)} "
        f"({'; '.join(differences) or in_common}); use images of the same classes, in folders named alike (an "
        "empty one is enough for a class without images)"
    )


def _without(names: Sequence[str], others: Sequence[str], key: Callable[[str], str]) -> list[str]:
    """Return the names that are none of the others."""
    known = {*map(key, others)}
    return [name for name in names if key(name) not in known]


def _in_order(images: Sequence[str], outputs: Sequence[str], key: Callable[[str], str]) -> tuple[str, ...] | None:
    """The names of images in the network's order, if both have the same keys and no key is of two names."""
    by_key = {key(name): name for name in images}
    wanted = [key(name) for name in outputs]
    if len(by_key) != len(images) or sorted(by_key) != sorted(wanted):
        return None
    return tuple(by_key[each] for each in wanted)


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]+", " ", name.strip()).casefold()
