"""Score on a Ray cluster: Ray Data runs shards of the parts on actors, each with the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from psc_core.errors import UsageError
from psc_core.scoring.inputs import Item
from psc_core.scoring.score import Count, PartScorer, score_parts

SHARDS_PER_ACTOR = 4
"""So that a fast actor takes work from a slow one, and a lost one loses little."""


class ShardScorer:
    """What runs on an actor.

    Args:
        make_scorer: Loads the model.
        make_parts: Opens the input.
        shards: Number of shards.
    """

    def __init__(
        self, make_scorer: Callable[[], PartScorer], make_parts: Callable[[], Iterator[list[Item]]], shards: int
    ) -> None:
        self._scorer, self._make_parts, self._shards = make_scorer(), make_parts, shards

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        counts = list(score_parts(self._scorer, self._make_parts(), rank=int(row["id"]), world=self._shards))
        return {name: [getattr(each, name) for each in counts] for name in Count.__annotations__}


def score_on_ray(
    make_scorer: Callable[[], PartScorer], make_parts: Callable[[], Iterator[list[Item]]], actors: int
) -> Iterator[Count]:
    """Counts of all parts, as :func:`psc_core.scoring.score.score_parts` gives them.

    Raises:
        UsageError: Ray Data is not installed.
    """
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise UsageError("--ray needs Ray Data; pip install 'psc[ray]'") from error
    shards = SHARDS_PER_ACTOR * actors
    rows = ray.data.range(shards, override_num_blocks=shards).map(
        ShardScorer,  # type: ignore[arg-type]  # Ray's annotation lacks callable classes.
        fn_constructor_args=(make_scorer, make_parts, shards),
        concurrency=actors,
        num_gpus=1 if torch.cuda.is_available() else None,
    )
    for row in rows.iter_rows():
        yield from map(Count, row["images"], row["errors"], row["written"])
