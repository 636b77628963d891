"""Query parameters are parsed once, and what is wrong with one is said."""

from __future__ import annotations

import pytest

from tests.app.fakes import png
from tests.app.http.support import check_problem
from tests.app.support import PNG, running

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    "query",
    [
        "top_k=0", "top_k=-1", "top_k=two", "top_k=1.5", "top_k=", "explain=maybe", "alpha=0",
        "alpha=1", "alpha=nan", "alpha=x", "alpha=1e-300", "ambiguity_threshold=-1", "ambiguity_threshold=inf",
        "aplha=0.1", "top_k=1&top_k=2",
    ],
)  # fmt: skip
async def test_bad_parameters_are_400(query: str) -> None:
    async with running() as app:
        check_problem(await app.client.post(f"/predict?{query}", content=png(1), headers=PNG), 400, "malformed")


async def test_an_unknown_parameter_is_told_the_nearest() -> None:
    async with running() as app:
        for query, said in (
            ("topk=2", "there is no parameter topk; did you mean top_k?"),
            ("x=1", "there is no parameter x; they are explain, map, monitor, alpha, "),
        ):
            found = await app.client.post(f"/predict?{query}", content=png(1), headers=PNG)
            assert said in found.json()["detail"]
