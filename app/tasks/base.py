"""The interface of a task's answers: JSON documents, tensors of the v2 protocol, labels of metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Generic, Literal

import numpy as np
import numpy.typing as npt

from app.tasks.query import PredictQuery
from psc_core.maps import map_document
from psc_core.model import FittedModel
from psc_core.pipeline import MAP
from psc_core.tasks import TASKS, module_of
from psc_core.tasks.decide import AnyDecisions
from psc_core.tasks.outputs import FloatArray, Outputs
from psc_core.tasks.task import Task

Datatype = Literal["FP32", "INT64", "UINT8", "BOOL", "BYTES"]
"""The data type of a tensor of the Open Inference Protocol."""

GATES_OUTPUT: Final = "gates"
"""The tensor of the gates' p-values, in the order of a model's gates."""

UNUSUAL_COMPONENTS: Final = 5
"""The number of components that an explanation names."""


@dataclass(frozen=True)
class ServedTask(Generic[AnyDecisions]):
    """The base of the tasks in service; each task's module names its own class ``SERVED``."""

    task: Task

    tensors: ClassVar[Mapping[str, Datatype]]  # the data types of the v2 protocol's output tensors by name, in order
    query: ClassVar[type[PredictQuery]] = PredictQuery  # the query parameters of a request to a model of the task

    def documents(
        self, outputs: Outputs[FloatArray], decisions: AnyDecisions, classes: Sequence[str], **options: int
    ) -> list[dict[str, Any]]:
        """Return one answer for each image, in a form that orjson can write, see :meth:`.BaseDecisions.columns`."""
        columns = decisions.columns(outputs, classes, **options)
        # Not strict: past the end of each array, numpy would raise an IndexError, which takes a microsecond.
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=False)]

    def explained(self, model: FittedModel, explanation: Mapping[str, npt.NDArray[Any]]) -> list[dict[str, Any]]:
        """Return the :meth:`explanations`, with thumbnails of the nearest training images and maps where there are any.

        Args:
            model: The model that answered.
            explanation: The arrays by name, whose first axis is the images.
        """
        documents = self.explanations(explanation, model.classes, model.head_layers)
        thumbnails, layer_map = model.pipeline.thumbnails, model.pipeline.map
        if thumbnails is not None:
            nearest = zip(explanation["nearest_kept"], explanation["nearest_distance"], strict=True)
            for document, (kept, distances) in zip(documents, nearest, strict=True):
                document["nearest"] = thumbnails.documents(kept, distances, model.classes)
        if layer_map is not None and MAP in explanation:
            for document, grey in zip(documents, explanation[MAP], strict=True):
                document["map"] = map_document(layer_map.layer, grey)
        return documents

    def explanations(
        self, explanation: Mapping[str, npt.NDArray[Any]], classes: Sequence[str], layers: Sequence[str]
    ) -> list[dict[str, Any]]:
        """Return one explanation for each image, from the arrays of ``Pipeline.explain``.

        Args:
            explanation: The arrays by name, whose first axis is the images.
            classes: The classes of the model.
            layers: The layers that the head tells apart: z, named by the candidate layer(s), and the other layers that
                it reads.
        """
        raise NotImplementedError

    def tensor_shape(self, name: str, classes: Sequence[str], gates: Sequence[str]) -> list[int]:
        """Return the shape of one of the :attr:`tensors` without its first axis, the images."""
        return [len(gates)] if name == GATES_OUTPUT else []

    def tensor(
        self, name: str, outputs: Outputs[FloatArray], decisions: AnyDecisions, classes: Sequence[str]
    ) -> npt.NDArray[Any] | list[str]:
        """Return the values of one of the :attr:`tensors`, which for ``BYTES`` are texts."""
        if name == GATES_OUTPUT:
            return outputs.gate_p_values
        values: npt.NDArray[Any] | None = getattr(decisions, name, None)
        return outputs[name] if values is None else values

    def metric_labels(self, classes: tuple[str, ...]) -> tuple[str, ...]:
        """Return the labels by which metrics count images."""
        return classes

    def label_index(self, decisions: AnyDecisions) -> npt.NDArray[np.int64]:
        """Return the index of each image's label among :meth:`metric_labels`."""
        raise NotImplementedError


def served_type(name: str) -> type[ServedTask[Any]]:
    """Return the class of a task in service by the task's name in :data:`psc_core.tasks.TASKS`."""
    found: type[ServedTask[Any]] = module_of(name, "app.tasks.{}").SERVED
    return found


def served_task(task: Task) -> ServedTask[Any]:
    """Return a model's task in service, which takes only decisions of that task."""
    return served_type(task.name)(task)


def tensor_names() -> tuple[str, ...]:
    """Return the names of the v2 tensors of all tasks."""
    return tuple(dict.fromkeys(name for task in reversed(TASKS) for name in served_type(task).tensors))


def unusual_components(deviation: FloatArray) -> list[dict[str, Any]]:
    """Return the components along which one image deviates most, for an explanation."""
    unusual = np.argsort(-np.abs(deviation), kind="stable")[:UNUSUAL_COMPONENTS].tolist()
    return [{"component": component, "deviation": float(deviation[component])} for component in unusual]
