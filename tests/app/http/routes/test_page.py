"""The page's files and their headers; what it does in a browser is tested in ``tests/browser``."""

from __future__ import annotations

import re

import pytest

from app.http.model import SECURITY_HEADERS
from psc_core.answers import ClassificationResponse
from psc_core.conformal import RANK_ROUNDING
from tests.app.support import running

pytestmark = pytest.mark.anyio


async def test_headers_and_caching() -> None:
    types = {
        "/": "text/html; charset=utf-8",
        "/page/page.css": "text/css; charset=utf-8",
        "/page/page.js": "text/javascript; charset=utf-8",
        "/page/icon.svg": "image/svg+xml",
        "/docs": "text/html; charset=utf-8",
        "/docs-assets/swagger-ui.css": "text/css; charset=utf-8",
        "/docs-assets/swagger-ui-bundle.js": "text/javascript; charset=utf-8",
    }
    async with running() as app:
        for path, media_type in types.items():
            response = await app.client.get(path)
            assert response.status_code == 200
            assert response.headers["content-type"] == media_type
            assert all(response.headers[name] == value for name, value in SECURITY_HEADERS.items())
            again = await app.client.get(path, headers={"If-None-Match": response.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        assert (await app.client.get("/page/page.py")).status_code == 404
        redoc = await app.client.get("/redoc")
        assert (redoc.status_code, redoc.headers["location"]) == (307, "docs")
    assert "unsafe" not in SECURITY_HEADERS["Content-Security-Policy"]


async def test_the_page_rounds_ranks_as_the_service_does() -> None:
    async with running() as app:
        text = (await app.client.get("/page/decide.js")).text
    found = re.search(r"^const RANK_ROUNDING = (\S+);$", text, re.MULTILINE)
    assert found is not None and float(found[1]) == RANK_ROUNDING


async def test_the_example_is_an_answer_of_the_service() -> None:
    async with running() as app:
        page = (await app.client.get("/docs")).text
    found = re.search(r'id="answer">(.*?)</code>', page, re.DOTALL)
    assert found is not None
    answer = ClassificationResponse.model_validate_json(re.sub("<.*?>", "", found[1]))
    assert answer.predictions[0].decision == "abstain_ambiguous"


async def test_the_page_can_be_switched_off() -> None:
    async with running(page=False) as app:
        assert (await app.client.get("/")).status_code == 404
        assert (await app.client.get("/docs")).status_code == 200
