"""Draw the images that are logged, by one number for each, so that the same request is always drawn alike.

That number u, uniform in [0, 1), is a hash of the request's id and the image's position.  An image is in the audit
slice if u is below the slice's probability, is stored if it is in the slice or u is below its decision's probability,
and gets a row if it is stored or u is below ``log_rows``.
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
    """The probabilities with which the images of one model are logged."""

    audit: float  # the probability of the audit slice
    rows: tuple[float, ...]  # the probability of a row, by the decision's code
    images: tuple[float, ...]  # the probability that the image is stored, by the decision's code

    @classmethod
    def of(cls, settings: Settings, task: Task) -> Sampling:
        """Return the sampling that the settings ask for, for a model of this task."""
        asked, audit = settings.log_image_probabilities, settings.log_audit
        default = asked.get("abstained", 0.0)
        images = tuple(
            max(audit, asked.get(name, default if code in task.abstentions.values() else 0.0))
            for code, name in enumerate(task.decision_names())
        )
        return cls(audit, tuple(max(settings.log_rows, each) for each in images), images)


def number_of(request_id: str, image_index: int) -> float:
    """Return an image's number u."""
    digest = hashlib.blake2b(f"{request_id}/{image_index}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest) >> 11) * _SCALE  # The 53 bits of a float64: with all 64, u could round up to 1.
