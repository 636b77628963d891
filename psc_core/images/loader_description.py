"""What a caller says of the images in a loader: how they became inputs, and how their labels are called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from psc_core.images.loader_preprocessing import LoaderPreprocessing, Statistic
from psc_core.names import class_names
from psc_core.target import UNNAMED, Target


@dataclass(frozen=True)
class LoaderDescription:
    """The preprocessing of a loader's images, and the names of what their labels mean."""

    preprocessing: LoaderPreprocessing = field(default_factory=LoaderPreprocessing)
    classes: Sequence[str] | None = None  # class names; None: numbered by the labels
    target: Target | None = None  # of a regression, whose labels are numbers; None: classes

    @classmethod
    def of(
        cls,
        preprocess: Any,
        mean: Statistic | None,
        std: Statistic | None,
        *,
        classes: Any = None,
        target: str | None = None,
        unit: str = "",
    ) -> LoaderDescription:
        """Return what the arguments of a public function say, before any image is read.

        Raises:
            UsageError: If they contradict each other, or cannot be the names of classes or of a number.
        """
        names = None if classes is None else class_names(classes)
        number = None if target is None else Target.of(target, unit)
        return cls(LoaderPreprocessing.of(preprocess, mean, std), names, number)

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
