"""What a caller says of the images in a loader: how they became inputs, and how their labels are called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from psc_core.images.loader_preprocessing import LoaderPreprocessing
from psc_core.target import UNNAMED, Target


@dataclass(frozen=True)
class LoaderDescription:
    """The preprocessing of a loader's images, and the names of what their labels mean."""

    preprocessing: LoaderPreprocessing = field(default_factory=LoaderPreprocessing)
    classes: Sequence[str] | None = None  # class names; None: numbered by the labels
    target: Target | None = None  # of a regression, whose labels are numbers; None: classes

    def given(self) -> tuple[str, ...]:
        """Return the names of the arguments by which a caller said something.

        Example:
            >>> LoaderDescription(LoaderPreprocessing(mean=0.5, std=0.5), target=Target(name="age")).given()
            ('mean', 'std', 'target')
        """
        preprocessing, target = self.preprocessing, self.target
        named = UNNAMED if target is None else target
        said: dict[str, Any] = {
            "preprocess": preprocessing.preprocess,
            "mean": preprocessing.mean,
            "std": preprocessing.std,
            "classes": self.classes,
            "target": None if named.name == UNNAMED.name else named.name,
            "unit": named.unit or None,
        }
        return tuple(name for name, value in said.items() if value is not None)
