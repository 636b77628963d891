"""The tasks of networks: a folder for each task, with everything that tells it from the others.

Every folder has the same files, in the order in which an image meets them:

=================== ===============================================================================================
``answer``          the fields of an answer, each declared once, with unit and meaning
``policy``          the thresholds that a user sets
``decide``          thresholds, the decisions that they make of outputs, and the fields' values
``calibration``     the scores of calibration images, and the thresholds that a policy implies on them
``prediction``      what ``predict`` returns in Python
``task``            the :class:`.task.Task`: its names, its types, and how it does what every task does
``heads``           the heads (the paper's g′) of its models
``fit``             how heads, calibration and thresholds are fitted; nothing above imports it
=================== ===============================================================================================

Code outside these folders asks the :class:`.task.Task` of a model, or the module that bears the task's name on its
floor (:func:`module_of`), and knows of no task by name.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

TASKS: Final = (
    "regression",
    "classification",
)
"""Names of all tasks, in the order in which manifests, answers and data are matched with them: classification comes
last, because it also takes a manifest that names no task."""


def module_of(task: str, module: str) -> Any:
    """Return the module of one task, imported when it is asked for: clients need no torch, services no fitting code.

    Args:
        task: One of :data:`TASKS`.
        module: ``"{}"`` stands for the task, as in ``"psc_core.tasks.{}.answer"``.
    """
    return import_module(module.format(task))
