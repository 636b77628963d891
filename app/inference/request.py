"""The contents of the queue: the images of one request, batches that hold slices of them, and their results."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Images = npt.NDArray[np.uint8]
"""(n, channels, height, width)."""


class RequestKind(enum.Enum):
    """The kinds of requests: outputs alone, with maps, with explanations, or with both."""

    PREDICT = enum.auto()
    MAP = enum.auto()
    EXPLAIN = enum.auto()
    EXPLAIN_WITH_MAP = enum.auto()

    @property
    def has_map(self) -> bool:
        """Whether only a model with a map can compute it."""
        return self in (RequestKind.MAP, RequestKind.EXPLAIN_WITH_MAP)


class State(enum.Enum):
    """The states of a request's life."""

    RESERVED = enum.auto()
    QUEUED = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(frozen=True)
class Result:
    """The outputs that the device computed for some images.

    Attributes:
        packed: ``float32 (n, S + K + G)`` outputs (:mod:`psc_core.tasks.outputs`).
        explanation: By name, arrays of ``Pipeline.explain``, images first; empty unless asked for.
    """

    packed: npt.NDArray[np.float32]
    explanation: dict[str, npt.NDArray[Any]] = field(default_factory=dict)

    def __getitem__(self, images: slice) -> Result:
        """A view of some of the images."""
        return Result(self.packed[images], {name: array[images] for name, array in self.explanation.items()})


@dataclass(eq=False, slots=True)
class QueuedRequest:
    """One request's images on their way through the device."""

    count: int
    admitted_at: float
    """The time at which it was reserved, seconds of the batcher's clock."""
    deadline: float
    """The time at which the result must be there."""
    urgent_at: float
    """The time from which it keeps its turn until all of its images are taken."""
    kind: RequestKind
    """Requests of one kind may share a batch."""
    waiter: Any
    """Whoever waits for the result; never looked at here."""
    state: State = State.RESERVED
    images: Images = field(default_factory=lambda: np.empty((0, 0, 0, 0), np.uint8))
    """Empty while it is reserved."""
    n_taken: int = 0
    """Images handed out in batches so far."""
    n_done: int = 0
    queued_at: float = 0.0
    """The time at which its images were there."""
    results: dict[int, Result] = field(default_factory=dict)
    """The results of the images completed so far, by the first image of each slice."""
    error: Exception | None = None
    """The reason why it failed; ``None`` after FINISHED means success."""

    def result(self) -> Result:
        """Return the result of all images, once they are completed."""
        slices = [self.results[start] for start in sorted(self.results)]
        if len(slices) == 1:
            return slices[0]
        names = slices[0].explanation
        return Result(
            np.concatenate([each.packed for each in slices]),
            {name: np.concatenate([each.explanation[name] for each in slices]) for name in names},
        )


class RequestSlice(NamedTuple):
    """Images ``start … stop - 1`` of a request."""

    request: QueuedRequest
    start: int
    stop: int


class DeviceBatch(NamedTuple):
    """Slices of requests of one kind, in the order of their outputs; ``size`` images in all."""

    kind: RequestKind
    slices: list[RequestSlice]
    size: int
    taken_at: float

    def copy_images(self, buffer: Images) -> None:
        """Copy the images of the slices, in order, to the front of ``buffer``."""
        offset = 0
        for request, start, stop in self.slices:
            buffer[offset : offset + stop - start] = request.images[start:stop]
            offset += stop - start

    def alive(self) -> DeviceBatch:
        """The slices whose requests are not finished."""
        alive = [each for each in self.slices if each.request.state is not State.FINISHED]
        return self._replace(slices=alive, size=sum(each.stop - each.start for each in alive))

    def halves(self) -> tuple[DeviceBatch, DeviceBatch]:
        """The batch cut after half of its images, through a slice where need be."""
        half = room = self.size // 2
        left: list[RequestSlice] = []
        right: list[RequestSlice] = []
        for request, start, stop in self.slices:
            cut = min(stop, start + room)
            if cut > start:
                left.append(RequestSlice(request, start, cut))
            if cut < stop:
                right.append(RequestSlice(request, cut, stop))
            room -= cut - start
        return self._replace(slices=left, size=half), self._replace(slices=right, size=self.size - half)
