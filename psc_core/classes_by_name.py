"""Classes by name, each imported when it is asked for: a command line lists the names without importing torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TypeVar

AnyClass = TypeVar("AnyClass")


class ClassesByName(Mapping[str, type[AnyClass]]):
    """A mapping from names to classes, in the order in which they are listed.

    Args:
        places: ``"package.module:Class"`` of each class, by its name.
    """

    def __init__(self, places: Mapping[str, str]) -> None:
        self._places = dict(places)

    def __getitem__(self, name: str) -> type[AnyClass]:
        module, _, class_name = self._places[name].partition(":")
        found: type[AnyClass] = getattr(import_module(module), class_name)
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._places  # Mapping's asks for the class, and so imports it.

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
