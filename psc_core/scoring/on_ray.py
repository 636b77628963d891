"""Score on a Ray cluster: Ray Data runs shards of the parts on actors, each of which loads the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from psc_core.errors import needs
from psc_core.scoring.inputs import NamedImage
from psc_core.scoring.parts import PartCount, PartWriter, write_parts

SHARDS_PER_ACTOR = 4
"""Several, so that a fast actor can take work from a slow one, and a lost actor loses little."""


class ShardWriter:
    """Writes the parts of a shard; runs on an actor.

    Args:
        make_writer: A function that loads the model.
        make_parts: A function that opens the input.
        shards: The number of shards.
    """

    def __init__(
        self, make_writer: Callable[[], PartWriter], make_parts: Callable[[], Iterator[list[NamedImage]]], shards: int
    ) -> None:
        self._writer, self._make_parts, self._shards = make_writer(), make_parts, shards

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        counts = list(write_parts(self._writer, self._make_parts(), rank=int(row["id"]), world=self._shards))
        return {name: [getattr(each, name) for each in counts] for name in PartCount.__annotations__}


def write_on_ray(
    make_writer: Callable[[], PartWriter], make_parts: Callable[[], Iterator[list[NamedImage]]], actors: int
) -> Iterator[PartCount]:
    """Write all parts and yield a count for each, like :func:`psc_core.scoring.parts.write_parts`.

    Raises:
        UsageError: If Ray Data is not installed.
    """
    ray_data = needs("--ray", "ray", "ray.data")
    shards = SHARDS_PER_ACTOR * actors
    rows = ray_data.range(shards, override_num_blocks=shards).map(
        ShardWriter,
        fn_constructor_args=(make_writer, make_parts, shards),
        concurrency=actors,
        num_gpus=1 if torch.cuda.is_available() else None,
    )
    for row in rows.iter_rows():
        yield from map(PartCount, row["images"], row["errors"], row["written"])
