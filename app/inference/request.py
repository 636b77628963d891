"""The contents of the queue: requests with their images, batches of slices of requests, and results."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Images = npt.NDArray[np.uint8]
"""Decoded images, of shape (n, channels, height, width)."""


class RequestMode(enum.Enum):
    """Which outputs a request asks for: the packed ones alone, with maps, with explanations, or with both."""

    PREDICT = enum.auto()
    MAP = enum.auto()
    EXPLAIN = enum.auto()
    EXPLAIN_WITH_MAP = enum.auto()

    __hash__ = object.__hash__  # Members are singletons; Enum's own is a Python function, called for each look-up.

    @property
    def has_map(self) -> bool:
        """Whether the request needs a model with a map."""
        return self in (RequestMode.MAP, RequestMode.EXPLAIN_WITH_MAP)


class State(enum.Enum):
    """The state of a request's life."""

    RESERVED = enum.auto()
    QUEUED = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(frozen=True)
class Result:
    """The outputs that the device computed for some images.

    Attributes:
        packed: ``float32 (n, S + K + G)`` outputs (:mod:`psc_core.tasks.outputs`).
        explanation: The arrays of ``Pipeline.explain`` by name, whose first axis is the images; empty unless asked for.
    """

    packed: npt.NDArray[np.float32]
    explanation: dict[str, npt.NDArray[Any]] = field(default_factory=dict)

    def __getitem__(self, images: slice) -> Result:
        """Return a view of some of the images."""
        return Result(self.packed[images], {name: array[images] for name, array in self.explanation.items()})


@dataclass(eq=False, slots=True)
class QueuedRequest:
    """One request's images on their way through the device; times are seconds of the batcher's clock.

    Attributes:
        count: The number of images.
        admitted_at: The time at which the request was reserved.
        deadline: The time by which the result is due.
        urgent_at: The time from which the request keeps its turn until all of its images are taken.
        mode: Only requests of one mode share a batch.
        waiter: The caller's object that waits for the result; the queue only stores it.
        state: How far the request is.
        images: The decoded images; empty while the request is reserved.
        n_taken: The number of images handed out in batches so far.
        n_done: The number of images computed so far.
        queued_at: The time at which the request was queued.
        results: The results so far, by the index of the first image of each slice.
        error: The reason why the request failed; ``None`` after FINISHED means success.
    """

    count: int
    admitted_at: float
    deadline: float
    urgent_at: float
    mode: RequestMode
    waiter: Any
    state: State = State.RESERVED
    images: Images = field(default_factory=lambda: np.empty((0, 0, 0, 0), np.uint8))
    n_taken: int = 0
    n_done: int = 0
    queued_at: float = 0.0
    results: dict[int, Result] = field(default_factory=dict)
    error: Exception | None = None

    def result(self) -> Result:
        """Return the result of all images, once all are computed."""
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
    """Slices of requests of one mode, in the order of their outputs; ``size`` images in all."""

    mode: RequestMode
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
        """Return the batch without the slices of finished requests."""
        alive = [each for each in self.slices if each.request.state is not State.FINISHED]
        return self._replace(slices=alive, size=sum(each.stop - each.start for each in alive))

    def halves(self) -> tuple[DeviceBatch, DeviceBatch]:
        """Return the batch in two halves, cutting a slice if necessary."""
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
