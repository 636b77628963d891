"""Query parameters are parsed once, and what is wrong with one is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.app.fakes import png
from tests.app.http.support import check_problem
from tests.app.support import PNG, running

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    "query",
    [
        "top_k=0", "top_k=-1", "top_k=two", "top_k=1.5", "top_k=", "explain=maybe", "alpha=0",
        "alpha=1", "alpha=nan", "alpha=x", "alpha=1e-300", "ambiguity_threshold=-1.1", "ambiguity_threshold=inf",
        "top_k=1&top_k=2",
    ],
)  # fmt: skip
async def test_bad_parameters_are_400(query: str) -> None:
    async with running() as app:
        check_problem(await app.client.post(f"/predict?{query}", content=png(1), headers=PNG), 400, "malformed")


@pytest.mark.parametrize(
    ("request_line", "said"),
    [
        ("POST /predict?topk=2", "there is no parameter topk; did you mean top_k?"),
        ("POST /models/m/predict?aplha=0.1", "there is no parameter aplha; did you mean alpha?"),
        ("POST /admin/reload?modle=zz", "there is no parameter modle; did you mean model?"),
        ("GET /feedback/images?limt=3", "there is no parameter limt; did you mean limit?"),
        ("POST /admin/reload?x=1", "there is no parameter x; they are model"),
        ("POST /admin/reload?model=m&model=m", "give each parameter once, got model, model"),
        ("GET /feedback/images?limit=0", "parameter limit: expected at least 1"),
        ("GET /feedback/images?limit=few", "parameter limit: expected a whole number"),
        ("POST /predict?alpha=x", "parameter alpha: expected a number"),
        ("POST /predict?explain=maybe", "parameter explain: expected true or false"),
    ],
)
async def test_what_is_wrong_is_said_on_every_route(tmp_path: Path, request_line: str, said: str) -> None:
    method, path = request_line.split()
    async with running(admin_keys="root", feedback_keys="root", log=str(tmp_path)) as app:
        answer = await app.client.request(method, path, headers={"X-API-Key": "root"})
        assert answer.status_code == 400, answer.text
        document = answer.json()
        assert (document["error"] if path.startswith("/v2") else document["detail"]) == said
        assert await app.metric('psc_reloads_total{model="m",result="ok"}') == 0


async def test_a_route_refuses_other_parameters_if_it_takes_some(tmp_path: Path) -> None:
    """Probes, scrapes and v2 clients may send any, as always."""
    refused = set()
    async with running(admin_keys="root", feedback_keys="root", log=str(tmp_path)) as app:
        for path, operations in app.app.openapi()["paths"].items():
            url = path.replace("{name}", "m").replace("{version}", "v1").replace("{file}", "x.png")
            for method, operation in operations.items():
                takes = any(each["in"] == "query" for each in operation.get("parameters", ()))
                answer = await app.client.request(method, f"{url}?no_such=1", headers={"X-API-Key": "root"})
                assert takes == ("no parameter no_such" in answer.text), path
                if takes:
                    assert answer.status_code == 400 and "400" in operation["responses"]
                    refused.add(path)
    assert {"/predict", "/models/{name}/predict", "/admin/reload", "/feedback/images"} <= refused


async def test_a_page_may_have_any_query() -> None:
    """Its address is the reader's: mail programs and advertisers add parameters to links."""
    async with running() as app:
        assert (await app.client.get("/?utm_source=mail")).status_code == 200
