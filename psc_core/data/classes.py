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

SHOWN = 10
"""Names that a message lists."""


class Matched(NamedTuple):
    """Class names of images in the order of the network's outputs, and what to tell of that; empty for nothing."""

    classes: tuple[str, ...]
    note: str


def match(of_images: Sequence[str], of_network: Sequence[str], name: str) -> Matched:
    """Put the class names of images into the order of the network's.

    Names that are all unlike the network's, and as many, keep their order: one side may have codes for the other's
    names.

    Args:
        of_images: Names of the images' classes, each once.
        of_network: Names of the network's outputs.
        name: Of the images, for messages.

    Raises:
        DataError: Only some of the names are the network's, or there are more or fewer; the message names them.
    """
    found = _in_order(of_images, of_network, str) or _in_order(of_images, of_network, _plain)
    if found is not None:
        moved = found != tuple(of_images)
        return Matched(found, "classes are in the order of the network's outputs, by their names" if moved else "")
    ours, theirs = ({_plain(each): each for each in names} for names in (of_images, of_network))
    if len(of_images) == len(of_network) and not ours.keys() & theirs.keys():
        return Matched(
            tuple(of_images),
            f"no class of {name} has a name of the network's ({listed(of_network, SHOWN)}); their order is taken to be "
            "that of its outputs",
        )
    unknown = [each for plain, each in ours.items() if plain not in theirs]
    missing = [each for plain, each in theirs.items() if plain not in ours]
    told = [f"{what}: {listed(names, SHOWN)}" for what, names in (("unknown", unknown), ("missing", missing)) if names]
    raise DataError(
        f"expected the network's {len(of_network)} classes in {name}, got {len(of_images)} "
        f"({'; '.join(told) or 'some share a name'}); use the images that the network was trained on, in folders named "
        "as its classes"
    )


def in_network_order(data: ImageDataset, of_network: Sequence[str] | None) -> tuple[ImageDataset, str]:
    """Return images with their labels in the order of the network's outputs, and what to tell of that.

    Images without classes, and those for a network without names, stay as they are.

    Raises:
        DataError: Their classes are not the network's.
    """
    if not of_network or not data.classes:
        return data, ""
    matched = match(data.classes, of_network, data.name)
    return data.in_order(matched.classes), matched.note


def _in_order(of_images: Sequence[str], of_network: Sequence[str], key: Callable[[str], str]) -> tuple[str, ...] | None:
    """The names of images in the network's order, if both have the same keys and no key is of two names."""
    by_key = {key(name): name for name in of_images}
    wanted = [key(name) for name in of_network]
    if len(by_key) != len(of_images) or sorted(by_key) != sorted(wanted):
        return None
    return tuple(by_key[each] for each in wanted)


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]+", " ", name.strip()).casefold()
