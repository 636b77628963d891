"""The tasks: what a model predicts, a class in a file each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from psc_core.data.dataset import ImageDataset
from psc_core.errors import UsageError
from psc_core.tasks.base import Task
from psc_core.tasks.classification import Classification
from psc_core.tasks.regression import Regression

TASKS: Final[dict[str, type[Task]]] = {task.name: task for task in (Classification, Regression)}  # by name


def task_named(name: str) -> type[Task]:
    """Return a task by name; raises :class:`UsageError` for one that is not in :data:`TASKS`."""
    if name not in TASKS:
        raise UsageError(f"expected a task of {', '.join(TASKS)}, got {name!r}")
    return TASKS[name]


def task_of_images(data: ImageDataset) -> type[Task]:
    """Return the task of a model of these images, by what they are labelled with."""
    return next(task for task in TASKS.values() if task.takes(data))


def task_of_manifest(manifest: Mapping[str, Any]) -> type[Task] | None:
    """Return the task of the model that a manifest describes; None for one that this version does not know."""
    name = manifest.get("task")
    return TASKS.get(name) if isinstance(name, str) else None
