"""Models, their examples and live counts, health, metrics, keys, the page, and the OpenAPI document."""

import json
import re
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.channel import Board, Place
from app.front import Front
from app.http.model import MAX_FILE_BYTES, MAX_FILES, SECURITY_HEADERS, ModelDocument
from app.http.v2 import ErrorDocument
from app.metrics import METRICS
from psc_core.answers import ClassificationResponse
from psc_core.conformal import RANK_ROUNDING
from tests.app.fakes import CLASSES, POISON, FakeModel, FakeValueModel, png
from tests.app.http.support import check_predictions, check_problem
from tests.app.support import PNG, Running, running, until

pytestmark = pytest.mark.anyio


async def test_the_model_document() -> None:
    async with running({"m": FakeModel(), "n": FakeModel("v9")}) as app:
        document = ModelDocument.model_validate_json((await app.client.get("/model")).content)
        assert not document.feedback  # There is no log.
        assert (document.name, document.version, document.models) == ("m", "v1", ["m", "n"])
        assert sum(document.calibration.ood_score.counts) == document.calibration.images == 99
        assert len(document.calibration.ood_score.edges) == len(document.calibration.ood_score.counts) + 1
        quantiles = document.calibration.entropy_quantiles
        assert quantiles is not None and quantiles == pytest.approx([percent / 100 for percent in range(101)], abs=1e-6)
        assert document.checks == []
        assert document.report == {"metrics": {"accuracy": 0.99}}
        assert len(document.notes) == 1
        assert (await app.client.get("/models/n")).json()["version"] == "v9"
        assert (await app.client.get("/models/x")).status_code == 404


async def test_notes_and_quantiles_of_the_model_document() -> None:
    async with running({"m": FakeModel(), "v": FakeValueModel()}, ambiguity_threshold=9.0) as app:
        _, note = (await app.client.get("/model")).json()["notes"]
        assert note.startswith("no image is called ambiguous")
        document = ModelDocument.model_validate_json((await app.client.get("/models/v")).content)
        assert document.calibration.entropy_quantiles is None


async def test_live_counts_the_last_images() -> None:
    async with running({"m": FakeModel()}, max_queue_images=900, alpha=0.2) as app:
        assert (await app.client.get("/models/m/live")).json() == {
            "images": 0, "ood_fraction": 0.0, "alpha": 0.2, "drift_active": False, "drift_alarms": 0,
            "queued_images": 0, "queue_limit": 900, "tail_probability": 1.0,
            "hour": dict.fromkeys(("accept", "abstain_ambiguous", "abstain_ood"), [0] * 12),
        }  # fmt: skip
        answers = [(await app.client.post("/predict", content=png(value), headers=PNG)).json() for value in (3, 255)]
        flagged = sum(answer["predictions"][0]["is_ood"] for answer in answers)
        document = (await app.client.get("/models/m/live")).json()
        assert (document["images"], document["ood_fraction"]) == (2, flagged / 2)
        assert (await app.client.get("/models/x/live")).status_code == 404


async def test_examples_are_the_images_in_the_bundle(tmp_path: Path) -> None:
    folder = tmp_path / "examples"
    folder.mkdir()
    (folder / "b.png").write_bytes(png(1))
    (folder / "a.PNG").write_bytes(png(2))
    (folder / "notes.txt").write_text("no image")
    (folder / "huge.png").write_bytes(bytes(MAX_FILE_BYTES + 1))
    (tmp_path.parent / "outside.png").write_bytes(png(3))
    (folder / "link.png").symlink_to(tmp_path.parent / "outside.png")
    (tmp_path / "manifest.json").write_text("{}")
    (folder / "manifest.png").symlink_to(tmp_path / "manifest.json")
    async with running({"m": FakeModel()}, bundle=(f"m={tmp_path}",)) as app:
        assert (await app.client.get("/models/m/examples")).json() == {"files": ["a.PNG", "b.png"]}
        answer = await app.client.get("/models/m/examples/b.png")
        assert (answer.content, answer.headers["content-type"]) == (png(1), "image/png")
        for other in ("link.png", "manifest.png", "huge.png", "notes.txt", "..%2Fmanifest.json", "c.png"):
            assert (await app.client.get(f"/models/m/examples/{other}")).status_code == 404, other
        for number in range(20):
            (folder / f"c{number}.png").write_bytes(png(4))
        assert len((await app.client.get("/models/m/examples")).json()["files"]) == MAX_FILES


@pytest.mark.parametrize("linked", ["files", "folder", "nothing", "elsewhere"])
async def test_examples_of_a_mounted_volume(tmp_path: Path, linked: str) -> None:
    """Kubernetes puts the files of a volume into a folder ``..data``, and links to them, or to their first folder."""
    bundle, volume = tmp_path / "bundle", tmp_path / "volume"
    folder = bundle / "examples"
    bundle.mkdir()
    homes = {"files": folder / "..data", "folder": bundle / "..data" / "examples", "elsewhere": volume}
    home = homes.get(linked, folder)
    home.mkdir(parents=True)
    (home / "a.png").write_bytes(png(1))
    if linked == "files":
        (folder / "a.png").symlink_to(Path("..data") / "a.png")
    elif home != folder:
        folder.symlink_to(home)
    async with running({"m": FakeModel()}, bundle=(f"m={bundle}",)) as app:
        files = [] if linked == "elsewhere" else ["a.png"]
        assert (await app.client.get("/models/m/examples")).json() == {"files": files}


async def test_a_model_without_examples() -> None:
    async with running(api_keys=("key",)) as app:
        assert (await app.client.get("/models/m/examples")).status_code == 401
        headers = {"X-API-Key": "key"}
        assert (await app.client.get("/models/m/examples", headers=headers)).json() == {"files": []}
        assert (await app.client.get("/models/x/examples", headers=headers)).status_code == 404


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


async def test_what_the_page_says_of_the_service_is_so() -> None:
    async with running() as app:
        script, page = [(await app.client.get(path)).text for path in ("/page/decide.js", "/docs")]
        assert (await app.client.get("/?utm_source=mail")).status_code == 200  # Its address is the reader's.
    rounding = re.search(r"^const RANK_ROUNDING = (\S+);$", script, re.MULTILINE)
    assert rounding is not None and float(rounding[1]) == RANK_ROUNDING
    found = re.search(r'id="answer">(.*?)</code>', page, re.DOTALL)
    assert found is not None
    answer = ClassificationResponse.model_validate_json(re.sub("<.*?>", "", found[1]))
    assert answer.predictions[0].decision == "abstain_ambiguous"


async def test_the_page_can_be_switched_off() -> None:
    async with running(page=False) as app:
        assert (await app.client.get("/")).status_code == 404
        assert (await app.client.get("/docs")).status_code == 200


@pytest.mark.usefixtures("device_thread")
async def test_not_ready_is_503_until_warm() -> None:
    model = FakeModel()
    model.pipeline.check.clear()
    async with running({"m": model}, ready=False) as app:
        response = await app.client.get("/readyz")
        assert response.status_code == 503
        assert response.json() == {"status": "not ready", "reasons": {"m": "loading"}}
        refused = await app.client.post("/predict", content=png(1), headers=PNG)
        assert check_problem(refused, 503, "not-ready")["retry_after_seconds"] == int(refused.headers["retry-after"])
        assert (await app.client.get("/healthz")).json() == {"status": "ok"}
        assert (await app.client.head("/readyz")).status_code == 503
        for path in ("/v2/health/ready", "/v2/models/m/ready", "/v2/models/m/versions/v1/ready"):
            response = await app.client.get(path)
            assert (response.status_code, response.json()["ready"]) == (503, False)
        assert (await app.client.get("/v2/health/live")).status_code == 200
        model.pipeline.check.set()
        await until(lambda: not app.service.reasons())
        assert (await app.client.get("/readyz")).status_code == 200
        check_predictions(await app.client.post("/predict", content=png(1), headers=PNG), [1])


async def test_exactly_the_table_is_exposed(app: Running) -> None:
    text = (await app.client.get("/metrics")).text
    exposed = {family.name for family in text_string_to_metric_families(text)}
    table = {metric.name.removesuffix("_total") for metric in METRICS}
    assert {name for name in exposed if name.startswith("psc_") and not name.endswith("_created")} == table
    assert "process_cpu_seconds" in exposed


async def test_counts_are_what_the_client_saw(app: Running) -> None:
    for value in (0, 1, 128, 250):
        await app.client.post("/predict", content=png(value), headers=PNG)
    await app.client.post("/predict?alpha=0.99", content=png(64, first=255), headers=PNG)
    await app.client.post("/predict", content=png(1, first=POISON), headers=PNG)
    await app.client.post("/predict", content=b"x", headers=PNG)
    counts = [await app.metric(f'psc_predictions_total{{label="{name}",model="m"}}') for name in CLASSES]
    assert sum(counts) == 5
    assert await app.metric('psc_ood_total{model="m"}') == 0  # By the policy's alpha, not by the request's.
    assert await app.metric('psc_abstained_total{model="m",reason="ood"}') == 1
    assert await app.metric('psc_ood_p_value_count{model="m"}') == 5
    assert await app.metric('psc_decode_seconds_count{model="m"}') >= 6
    assert await app.metric('psc_batch_size_sum{model="m"}') >= 5
    assert await app.metric('psc_request_seconds_count{route="/predict",status="200"}') == 5
    assert await app.metric('psc_rejected_total{reason="unsupported-image"}') == 1
    assert await app.metric('psc_queue_depth{model="m"}') == 0
    assert await app.metric("psc_inflight_requests") == 1
    assert await app.metric("psc_ready") == 1
    assert await app.metric('psc_model_info{device="cpu",layer="layer3",model="m",version="v1"}') == 1


async def test_a_client_may_leave_its_images_out_of_what_is_monitored() -> None:
    """With any key that may predict: what a client hides are its own images, and how many they are is shown."""
    async with running(api_keys="alice") as app:
        headers = {**PNG, "X-API-Key": "alice"}
        for path in ("/predict?monitor=false", "/models/m/predict?monitor=0"):
            answer = await app.client.post(path, content=png(255), headers=headers)
            assert answer.json()["predictions"][0]["is_ood"] is not None
        tensor = {"name": "images", "datatype": "UINT8", "shape": [1, 1, 8, 8], "data": [255] * 64}
        v2 = {"inputs": [tensor], "parameters": {"monitor": False}}
        assert (await app.client.post("/v2/models/m/infer", json=v2, headers=headers)).status_code == 200
        assert await app.metric('psc_unmonitored_images_total{model="m",reason="asked"}') == 3
        assert await app.metric('psc_ood_p_value_count{model="m"}') == 0
        assert (await app.client.get("/models/m/live", headers=headers)).json()["images"] == 0
        assert (await app.client.post("/predict?monitor=maybe", content=png(1), headers=headers)).status_code == 400
        assert (await app.client.post("/predict?monitor=false", content=png(1), headers=PNG)).status_code == 401


async def test_keys_guard_predictions_and_administration() -> None:
    async with running(api_keys="alice,bob", admin_keys="root") as app:
        check_problem(await app.client.post("/predict", content=png(1), headers=PNG), 401, "unauthorized")
        response = await app.client.post("/predict", content=png(1), headers={**PNG, "x-api-key": "mallory"})
        assert check_problem(response, 401, "unauthorized")
        assert response.headers["www-authenticate"].startswith("Bearer")
        for key in ("alice", "bob", "root"):
            headers = {**PNG, "authorization": f"Bearer {key}"}
            check_predictions(await app.client.post("/predict", content=png(1), headers=headers), [1])
        check_problem(await app.client.get("/model"), 401, "unauthorized")
        for method, path in (("GET", "/v2/models/m"), ("POST", "/v2/models/m/infer")):
            response = await app.client.request(method, path)
            assert response.status_code == 401 and ErrorDocument.model_validate(response.json())
        assert (await app.client.post("/admin/reload", headers={"x-api-key": "alice"})).status_code in (401, 403)
        assert (await app.client.post("/admin/reload", headers={"x-api-key": "root"})).status_code == 200


@pytest.mark.parametrize(
    "request_line",
    [
        "POST /admin/reload?model=m&model=m",
        *(f"GET /feedback/images?{query}" for query in ("limit=0", "limit=51", "limit=few", "decision=accepted")),
    ],
)
async def test_unusable_parameters_are_400_and_change_nothing(tmp_path: Path, request_line: str) -> None:
    method, path = request_line.split()
    async with running(admin_keys="root", feedback_keys="root", log=str(tmp_path)) as app:
        answer = await app.client.request(method, path, headers={"X-API-Key": "root"})
        check_problem(answer, 400, "malformed")
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


async def test_openapi_declares_the_three_bodies_and_every_problem(tmp_path: Path) -> None:
    async with running(log=str(tmp_path)) as app:
        text = (await app.client.get("/openapi.json")).text
    document = json.loads(text)
    for path in ("/predict", "/models/{name}/predict"):
        operation = document["paths"][path]["post"]
        assert set(operation["requestBody"]["content"]) == {"multipart/form-data", "application/json", "image/*"}
        assert set(operation["responses"]) >= {"200", "400", "401", "413", "415", "422", "429", "503", "504"}
        assert {each["name"] for each in operation["parameters"]} >= {"top_k", "explain", "alpha"}
    assert set(re.findall(r'"#/components/schemas/(\w+)"', text)) <= set(document["components"]["schemas"])
    assert "HTTPValidationError" not in json.dumps(document["paths"])
    with_body = [path["post"] for path in document["paths"].values() if "requestBody" in path.get("post", {})]
    assert len(with_body) >= 5 and all("429" in operation["responses"] for operation in with_body)


async def test_openapi_declares_what_refuses_any_route(tmp_path: Path) -> None:
    """Too many requests, too large a body, and a front without an engine."""
    place, admin = Place.make(0, 1 << 16), {"X-API-Key": "root"}
    seen = set()
    async with running(admin_keys="root", log=str(tmp_path), max_body_bytes=10) as app:
        front = Front(app.service.settings, app.service.keys, Board(1), place, on_start=lambda: None)
        document = app.app.openapi()
        async with httpx.AsyncClient(transport=httpx.ASGITransport(front), base_url="http://test") as alone:
            for path, operations in document["paths"].items():
                url = path.replace("{name}", "m").replace("{version}", "v1").replace("{file}", "x.png")
                for method, operation in operations.items():
                    body = {"content": bytes(11)} if method == "post" else {}
                    answers = [await app.client.request(method, url, headers=admin, **body)]
                    app.service.inflight = 1 << 20
                    answers.append(await app.client.request(method, url, headers=admin))
                    app.service.inflight = 0
                    answers.append(await alone.request(method, url))
                    for answer in answers:
                        seen.add(answer.status_code)
                        content = operation["responses"][str(answer.status_code)].get("content", {})
                        if answer.status_code >= 400:
                            (kind,) = content
                            assert answer.headers["content-type"] == kind, answer.url
                            form = document["components"]["schemas"][content[kind]["schema"]["$ref"].split("/")[-1]]
                            assert {*form["required"]} <= {*answer.json()} <= {*form["properties"]}, answer.url
    place.close()
    assert seen >= {200, 413, 429, 503}


@pytest.mark.parametrize("keys", [{}, {"api_keys": "one"}])
async def test_openapi_names_the_operations_that_need_a_key(tmp_path: Path, keys: dict[str, str]) -> None:
    async with running(admin_keys="root", log=str(tmp_path), **keys) as app:
        document = (await app.client.get("/openapi.json")).json()
        needed = set()
        for path, operations in document["paths"].items():
            url = path.replace("{name}", "m").replace("{version}", "v1").replace("{file}", "x.png")
            for method, operation in operations.items():
                needs = (await app.client.request(method, url)).status_code == 401
                assert needs == ("security" in operation), (method, path)
                needed |= {path} if needs else set()
    assert ("/predict" in needed) == bool(keys) and {"/admin/reload", "/feedback"} <= needed
    assert {*document["components"]["securitySchemes"]} == {"X-API-Key", "Bearer"}


HEAD = [
    *("/healthz", "/readyz", "/v2/health/live", "/v2/health/ready", "/v2/models/m/ready"),
    *("/v2/models/m/versions/v1/ready", "/metrics", "/model", "/models/m", "/", "/docs", "/openapi.json"),
]


async def test_head_is_answered_as_get_and_is_in_no_document() -> None:
    async with running() as app:
        for path in HEAD:
            got, head = await app.client.get(path), await app.client.head(path)
            assert (head.status_code, head.headers["content-type"]) == (200, got.headers["content-type"]), path
            refused = await app.client.options(path)
            assert (refused.status_code, {*refused.headers["allow"].split(", ")}) == (405, {"GET", "HEAD"}), path
        document = (await app.client.get("/openapi.json")).json()
        assert (await app.client.head("/v2/models/n/ready")).status_code == 404
    assert not any("head" in path for path in document["paths"].values())
    assert all("get" in path for name, path in document["paths"].items() if name in HEAD)
