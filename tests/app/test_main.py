"""What only the wiring decides."""

from __future__ import annotations

import pytest

from tests.app.support import running

pytestmark = pytest.mark.anyio


async def test_a_slash_too_many_is_not_redirected() -> None:
    async with running(root_path="/u") as app:
        assert (await app.client.get("/model/")).status_code == 404
