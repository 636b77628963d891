"""Draw the images that come into the log, by one number of each, so the same request always falls the same way.

That number u, uniform in [0, 1), is a hash of request id and position.  An image is of the audit slice where u is below
its probability, has a row where u is below the largest of all that apply, and is stored where u is below that of its
decision, or where it is of the slice.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

from app.settings import Settings
from psc_core.tasks.task import Task

_SCALE: Final = 2.0**-53


@dataclass(frozen=True)
class Sampling:
    """Probabilities with which the images of one model come into the log.

    Attributes:
        audit: Of the random slice.
        rows: Of a row, by the decision's code.
        images: Of a stored image, by the decision's code.
    """

    audit: float
    rows: tuple[float, ...]
    images: tuple[float, ...]

    @classmethod
    def of(cls, settings: Settings, task: Task) -> Sampling:
        """Return the sampling that the settings ask for of a model of this task."""
        asked, audit = settings.log_image_probabilities, settings.log_audit
        default = asked.get("abstained", 0.0)
        images = tuple(
            max(audit, asked.get(name, default if code in task.abstentions.values() else 0.0))
            for code, name in enumerate(task.decision_names())
        )
        return cls(audit, tuple(max(settings.log_rows, each) for each in images), images)


def number_of(request_id: str, image_index: int) -> float:
    """Return the number u of an image."""
    digest = hashlib.blake2b(f"{request_id}/{image_index}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest) >> 11) * _SCALE  # As many bits as a float64 holds, or it could round to 1.
