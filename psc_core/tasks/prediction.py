"""The base of every task's predictions: outputs and decisions for n images, on the CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from psc_core.errors import needs
from psc_core.tables import aligned
from psc_core.tasks.answer import BaseAnswer
from psc_core.tasks.decide import BaseDecisions
from psc_core.tasks.outputs import Outputs

if TYPE_CHECKING:
    from pandas import DataFrame

SHOWN: Final = 10
"""Maximum number of images that the text of predictions shows."""

Positions = int | np.integer[Any] | slice | Sequence[int] | npt.NDArray[Any] | Tensor
"""One image of several, or some of them: a slice, their positions, or a mask."""

AnyPrediction = TypeVar("AnyPrediction", bound="BasePrediction")


@dataclass(frozen=True, repr=False, eq=False)
class BasePrediction:
    """Predictions for n images; every score of the task's answer is an attribute, ``float32 (n,)``.

    Example:
        >>> from psc_core import PSC
        >>> bundle = "artifacts/dirty-mnist-resnet18"
        >>> prediction = PSC.load(bundle).predict([f"{bundle}/examples/{name}.png" for name in ("clean", "shirt")])
        >>> isinstance(prediction, BasePrediction), prediction[prediction.ood_p_value.argsort()].decision
        (True, ('abstain_ood', 'accept'))

    Attributes:
        outputs: The outputs of the network step.
        decisions: The decisions under the bundle's policy.
        classes: The names of the classes; of a regression, of the bins of its target.
        maps: ``uint8 (n, rows, columns)``: how anomalous each part of the images is, at most 255; None unless asked
            for.  One in ``10^(4g/255)`` positions of in-distribution images has the grey level g or more.
    """

    answer: ClassVar[type[BaseAnswer]]

    outputs: Outputs[Tensor]
    decisions: BaseDecisions
    classes: tuple[str, ...]
    maps: Tensor | None = field(default=None, kw_only=True)

    def __len__(self) -> int:
        return len(self.outputs)

    def __getitem__(self: AnyPrediction, images: Positions) -> AnyPrediction:
        """Return the predictions for some of the images."""
        # Positions by numpy's rules, once for all parts: torch takes bytes for a mask, and no negative step.
        index = images.cpu().numpy() if isinstance(images, Tensor) else images
        if not isinstance(index, slice) and not np.size(index):
            index = np.empty(0, np.int64)  # [] would be of floats.
        at = np.ascontiguousarray(np.arange(len(self))[index]).reshape(-1)
        decisions = self.decisions.at(at)
        rows = torch.from_numpy(at)
        maps = None if self.maps is None else self.maps[rows]
        outputs = replace(self.outputs, packed=self.outputs.packed[rows])
        return replace(self, outputs=outputs, decisions=decisions, maps=maps)

    def __getattr__(self, name: str) -> Tensor:
        outputs = self.__dict__.get("outputs")  # Absent while it is unpickled.
        if outputs is None or name not in outputs.scores:
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
        column: Tensor = outputs[name]
        return column

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.outputs.scores]

    @property
    def gates(self) -> dict[str, Tensor]:
        """The p-value of each gate, ``float32 (n,)``, by name; empty for a model without gates."""
        return dict(zip(self.outputs.gates, self.outputs.gate_p_values.T, strict=True))

    @property
    def is_ood(self) -> Tensor:
        """``bool (n,)``: whether the p-value is at most the bundle's α."""
        return torch.from_numpy(self.decisions.is_ood)

    @property
    def decision(self) -> tuple[str, ...]:
        """The name of each image's decision."""
        return tuple(self.decisions.decision_names[code] for code in self.decisions.decision.tolist())

    def columns(self) -> dict[str, list[Any]]:
        """Return the fields of the task's answer by name, each with a value of JSON types for every image."""
        return {name: _listed(column) for name, column in self._columns().items()}

    def to_dict(self) -> list[dict[str, Any]]:
        """Return a dictionary for each image, of JSON types: the answer of ``POST /predict`` for it."""
        columns = self.columns()
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def to_pandas(self) -> DataFrame:
        """Return a table with a row for each image and a column for each field, ``gates.NAME`` for each gate.

        Raises:
            UsageError: If pandas is not installed.
        """
        pandas = needs("to_pandas", "pandas", "pandas")
        cells: dict[str, Any] = {}
        for name, column in self._columns().items():
            if name == "gates":
                cells |= {f"gates.{gate}": p_values.numpy() for gate, p_values in self.gates.items()}
            else:
                cells[name] = column if getattr(column, "ndim", 1) == 1 else column.tolist()
        table: DataFrame = pandas.DataFrame(cells)
        return table

    def _columns(self) -> dict[str, Any]:
        """Return the fields of the task's answer by name, in the order of their declaration."""
        outputs = Outputs(self.outputs.packed.numpy(), self.outputs.scores, self.outputs.gates)
        columns = self.decisions.columns(outputs, self.classes)
        return {name: columns[name] for name in self.answer.model_fields if name in columns}

    def __repr__(self) -> str:
        """Return a line for all images and a table of the first ones."""
        counts = Counter(self.decision)
        counted = ", ".join(f"{counts[name]} {name}" for name in self.decisions.decision_names if counts[name])
        title = f"{type(self).__name__} for {len(self)} image{'s' * (len(self) != 1)}{': ' * bool(counted)}{counted}"
        rows = [self.answer.model_validate(row).cells() for row in self[:SHOWN].to_dict()]
        if not rows:
            return title
        table = [["", *rows[0]], *([str(index), *row.values()] for index, row in enumerate(rows))]
        more = [f"… {len(self) - SHOWN} more"] if len(self) > SHOWN else []
        return "\n".join([title, *aligned(table, left=()), *more])


def _listed(column: Any) -> list[Any]:
    """Return the cells of a column as JSON types."""
    if isinstance(column, np.ndarray):
        listed: list[Any] = column.tolist()
        return listed
    return [_plain(cell) for cell in column]


def _plain(cell: Any) -> Any:
    if isinstance(cell, dict):
        return {name: float(number) for name, number in cell.items()}
    return list(cell) if isinstance(cell, tuple) else cell
