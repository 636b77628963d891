"""The record that a log keeps of each bundle, from which its rows can be read without the bundle."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from psc_core.errors import DataError
from psc_core.log.schema import model_path
from psc_core.log.store import Log
from psc_core.names import composed
from psc_core.tasks.task import Task, task_type_of


@dataclass(frozen=True)
class LoggedModel:
    """A bundle that wrote to a log."""

    version: str  # the digest of the bundle
    task: Task  # the task of the model
    classes: tuple[str, ...]  # the class names in the order of ``probabilities``; for a regression the bins

    def to_json(self) -> bytes:
        """Return the JSON document that :func:`read_model` reads."""
        fields = {"version": self.version, "classes": self.classes, **self.task.manifest_fields()}
        return json.dumps(fields, ensure_ascii=False).encode()

    def check_label(self, label: str, marks: str = ".") -> str:
        """Return a person's label in the form of the log; raise :class:`.DataError` if the model cannot predict it."""
        return self.task.parse_label(label, self.classes, marks)


def read_model(log: Log, version: str) -> LoggedModel:
    """Return the record of a bundle.

    Raises:
        DataError: If the log has no record of the bundle, or cannot be understood.
        OSError: If the log cannot be read.
    """
    name = model_path(version)
    try:
        fields: Any = json.loads(log.get(name))
        found = task_type_of(fields)
        if found is None:
            raise ValueError("a task that this version does not know")
        of_task = {field: fields[field] for field in found.model_fields}
        return LoggedModel(version, found.model_validate(of_task), tuple(map(composed, fields["classes"])))
    except FileNotFoundError as error:
        raise DataError(f"{log.where} has no {name}; restore it from a copy of the log") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{log.where}/{name} cannot be used ({error}); restore it from a copy of the log") from error
