"""``/predict`` over HTTP: three body forms, options, and every documented error."""

import asyncio
import base64
import io
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from PIL import Image

from app.service import SWEEP_SECONDS, Host
from psc_core.answers import ClassificationExplanation, ClassificationResponse
from tests.app.fakes import (
    CLASSES,
    FakeModel,
    FakePipelineWithMap,
    FakePipelineWithStoredImages,
    FakeValueModel,
    pixels,
    png,
)
from tests.app.http.support import check_predictions, check_problem, hold
from tests.app.support import PNG, Running, running, serve_next, until
from tests.encoded import encode

pytestmark = pytest.mark.anyio


def b64(data: bytes) -> dict[str, str]:
    return {"b64": base64.b64encode(data).decode()}


async def predict(app: Running, image: bytes, **query: Any) -> dict[str, Any]:
    response = await app.client.post("/predict", params=query, content=image, headers=PNG)
    assert response.status_code == 200, response.text
    document: dict[str, Any] = response.json()
    return document


async def explanation(app: Running, image: bytes, **query: Any) -> ClassificationExplanation:
    document = ClassificationResponse.model_validate(await predict(app, image, explain=True, **query))
    found = document.predictions[0].explanation
    assert found is not None
    return found


async def test_the_three_forms_give_the_same_answer(app: Running) -> None:
    raw = await app.client.post("/predict", content=png(60), headers=PNG)
    multipart = await app.client.post("/predict", files=[("images", ("a.png", png(60), "image/png"))])
    json = await app.client.post("/predict", json={"images": [b64(png(60))]})
    check_predictions(raw, [60])
    assert raw.json() == multipart.json() == json.json()
    assert raw.json()["model"] == {"name": "m", "version": "v1", "layer": "layer3"}
    assert raw.json()["policy"] == {"alpha": 0.2, "ambiguity_threshold": 0.5, "coverage": 0.9, "risk": None}


async def test_many_images_keep_their_order() -> None:
    values = [(37 * k) % 200 for k in range(50)]
    async with running() as app:
        files = [("images", (f"{k}.png", png(value))) for k, value in enumerate(values)]
        check_predictions(await app.client.post("/predict", files=files), values)
        body = {"images": [b64(png(value)) for value in values]}
        check_predictions(await app.client.post("/predict", json=body), values)


async def test_decisions_follow_alpha_and_the_ambiguity_threshold(app: Running) -> None:
    async def decide(image: bytes, **query: Any) -> tuple[str, bool]:
        (prediction,) = (await predict(app, image, **query))["predictions"]
        return prediction["decision"], prediction["is_ood"]

    between, stripes = png(64), pixels(0)
    stripes[:, ::2] = 255
    assert await decide(png(0)) == ("accept", False)
    assert await decide(between) == ("abstain_ambiguous", False)
    assert await decide(between, ambiguity_threshold=5) == ("accept", False)
    assert await decide(encode(stripes)) == ("abstain_ood", True)
    assert not (await decide(encode(stripes), alpha=0.05))[1]


async def test_settings_override_the_bundles_policy() -> None:
    async with running(alpha=0.05, ambiguity_threshold=3.0, coverage=0.8) as app:
        bound = pytest.approx(0.3)  # of the largest entropy
        policy = (await predict(app, png(0)))["policy"]
        assert policy == {"alpha": 0.05, "ambiguity_threshold": 3.0, "coverage": 0.8, "risk": bound}


@pytest.mark.parametrize(("threshold", "risk"), [(-1.0, None), (0.0, 0.05), (0.5, 0.05 + 0.25 * 49 / 98), (8.0, 0.3)])
async def test_an_answer_says_what_the_requests_own_threshold_keeps(
    threshold: float, risk: float | None, app: Running
) -> None:
    """The fake has entropies 0, 1/98, …, 1 with the bounds 0.05 … 0.3."""
    answer = await predict(app, png(60), ambiguity_threshold=threshold)
    assert answer["policy"]["risk"] == (risk and pytest.approx(risk, abs=1e-6))
    assert answer["predictions"][0]["decision"] != "accept" or threshold >= 0


@pytest.mark.parametrize(
    ("query", "status", "slug"),
    [
        *((f"top_k={value}", 400, "malformed") for value in ("0", "-1", "two", "1.5", "", "1&top_k=2")),
        *((f"alpha={value}", 400, "malformed") for value in ("0", "1", "nan", "x", "1e-300")),
        *((f"ambiguity_threshold={value}", 400, "malformed") for value in ("-1.1", "inf")),
        ("explain=maybe", 400, "malformed"),
        ("topk=2", 400, "malformed"),
        ("max_width=3", 400, "malformed"),
        ("map=true", 400, "malformed"),
        ("map=true&explain=true", 422, "no-map"),
        ("alpha=0.001", 422, "unattainable-alpha"),
    ],
)
async def test_what_cannot_be_asked_is_refused_before_the_body_is_read(query: str, status: int, slug: str) -> None:
    async def body() -> AsyncIterator[bytes]:
        pytest.fail("was read")
        yield b""

    async with running() as app:
        problem = check_problem(await app.client.post(f"/predict?{query}", content=body(), headers=PNG), status, slug)
        assert query.partition("=")[0] in problem["detail"]


@pytest.mark.parametrize("query", ["top_k=2", "ambiguity_threshold=1"])
async def test_a_regression_refuses_what_it_does_not_have(query: str) -> None:
    async with running({"m": FakeValueModel()}) as app:
        response = await app.client.post(f"/predict?alpha=0.1&{query}", content=png(60), headers=PNG)
        assert query.partition("=")[0] in check_problem(response, 400, "malformed")["detail"]


async def test_a_model_that_is_swapped_while_the_body_arrives_is_asked_again(app: Running) -> None:
    async def body() -> AsyncIterator[bytes]:
        serve_next(app, FakeValueModel())
        await app.service.registry.reload(None)
        yield png(1)

    response = await app.client.post("/predict?top_k=2", content=body(), headers=PNG)
    assert "top_k" in check_problem(response, 400, "malformed")["detail"]


async def test_top_k_replaces_the_full_list(app: Running) -> None:
    response = await app.client.post("/predict?top_k=2", content=png(60), headers=PNG)
    prediction = check_predictions(response, [60])[0]
    assert "probabilities" not in prediction and len(prediction["top"]) == 2
    assert prediction["top"][0]["label"] == prediction["label"]
    assert prediction["top"][0]["probability"] >= prediction["top"][1]["probability"]
    assert len((await predict(app, png(60), top_k=99))["predictions"][0]["top"]) == len(CLASSES)


async def test_explain_adds_an_explanation(app: Running) -> None:
    found = await explanation(app, png(10))
    assert found.nearest_class == "dark" and len(found.class_distances) == 3
    deviations = [abs(each.deviation) for each in found.unusual_components]
    assert deviations == sorted(deviations, reverse=True)
    assert found.aleatoric == pytest.approx(10 / 255)
    assert found.map is None and found.nearest is None
    assert "explanation" not in (await predict(app, png(10), explain=False))["predictions"][0]


async def test_a_map_shows_where_an_image_is_unusual() -> None:
    image = pixels(0)
    image[2:4, 5:8] = 200
    async with running({"m": FakeModel(pipeline=FakePipelineWithMap())}) as app:
        found = (await explanation(app, encode(image), map=True)).map
        assert found is not None and found.layer == "layer1" and found.box == (5 / 8, 2 / 8, 1.0, 4 / 8)
        with Image.open(io.BytesIO(base64.b64decode(found.png))) as picture:
            assert picture.mode == "L" and np.array_equal(np.asarray(picture), image)
        assert (await explanation(app, encode(image))).map is None


async def test_an_explanation_shows_the_nearest_training_images() -> None:
    async with running({"m": FakeModel(pipeline=FakePipelineWithStoredImages())}) as app:
        nearest = (await explanation(app, png(200))).nearest
        assert nearest is not None
        found = [(each.image, each.label, each.value) for each in nearest]
        assert found == [(30, "bright", None)]  # The one of the likely class, and no other is nearer.
        assert (nearest[0].distance, nearest[0].relative_distance) == pytest.approx((55 / 255, 55 / 127))
        with Image.open(io.BytesIO(base64.b64decode(nearest[0].png))) as picture:
            assert (picture.format, picture.size) == ("PNG", (2, 1)) and np.asarray(picture).tolist() == [[255, 255]]


async def test_models_are_served_by_name() -> None:
    async with running({"first": FakeModel("v1"), "second": FakeModel("v2")}) as app:
        for path, version in (("/predict", "v1"), ("/models/first/predict", "v1"), ("/models/second/predict", "v2")):
            response = await app.client.post(path, content=png(1), headers=PNG)
            assert response.json()["model"]["version"] == version
        check_problem(await app.client.post("/models/third/predict"), 404, "unknown-model")


MULTIPART = "multipart/form-data; boundary=x"


@pytest.mark.parametrize(
    ("content_type", "body", "status", "slug"),
    [
        *(("application/json", body, 400, "malformed") for body in (
            b"", b"{", b"[]", b"{}", b'{"images": []}', b'{"images": {}}', b'{"images": [{}]}', b'{"images": ["x"]}',
            b'{"images": [{"b64": 3}]}', b'{"images": [{"b64": "?"}]}', b'{"images": [{"b64": "QQ"}]}',
            b'{"images": [{"b64": "QUFB", "x": 1}]}', b'{"images": [{"b64": "QUFB"}], "x": 1}', b"\xff",
            b'{"images": [{"b64": "\xc3\xa9"}]}', b'{"images": [{"b64": "data:image/png;base64,QQ=="}]}',
        )),
        *((MULTIPART, body, 400, "malformed") for body in (
            b"nonsense",
            b"--x\r\nContent-Disposition: form-data\r\n\r\nA\r\n--x--\r\n",
            b'--x\r\nContent-Disposition: form-data; name="images"\r\n\r\nA',
            b'--x\r\nContent-Disposition: form-data; name="f"\r\n\r\nA\r\n--x--\r\n',
        )),
        ("multipart/form-data", b"", 400, "malformed"),
        (MULTIPART + "x" * 500, b"--x", 400, "malformed"),
        ("image/png", b"", 400, "malformed"),
        ("image/png", png(1, size=64)[:-30], 422, "undecodable-image"),
        ("image/png", png(1, size=64), 413, "image-too-large"),
        ("application/octet-stream", png(1), 415, "unsupported-media"),
        ("", png(1), 415, "unsupported-media"),
    ],
)  # fmt: skip
async def test_bodies_that_cannot_be_used(content_type: str, body: bytes, status: int, slug: str) -> None:
    async with running(max_pixels=64 * 64 if status == 422 else 1000) as app:
        response = await app.client.post("/predict", content=body, headers={"content-type": content_type})
        check_problem(response, status, slug)


async def test_no_field_of_a_form_is_dropped_in_silence(app: Running) -> None:
    files = [("images", ("a.png", png(1)))]
    for more in ({"data": {"alpha": "0.2"}}, {"files": [*files, ("image", ("b.png", png(2)))]}):
        answer = await app.client.post("/predict", **{"files": files, **more})
        check_problem(answer, 400, "malformed")


async def test_names_what_is_not_an_image(app: Running) -> None:
    files = [("images", ("good.png", png(1))), ("images", ("bad.txt", b"hello"))]
    document = check_problem(await app.client.post("/predict", files=files), 415, "unsupported-image")
    assert (document["index"], document["filename"]) == (1, "bad.txt")
    document = check_problem(
        await app.client.post("/predict", json={"images": [b64(png(1)), b64(b"hello")]}), 415, "unsupported-image"
    )
    assert document["index"] == 1
    assert "filename" not in document


@pytest.mark.usefixtures("device_thread")
async def test_a_full_queue_refuses_before_the_body_is_read() -> None:
    async with running(max_queue_images=10, max_images_per_request=10) as app:
        first = await hold(app)
        waiting = asyncio.create_task(app.client.post("/predict", files=[("images", ("a.png", png(5)))] * 10))
        await until(lambda: app.pending == 10)
        for path in ("/predict", "/v2/models/m/infer"):
            messages = [{"type": "http.request", "body": b"the beginning", "more_body": True}]
            sent: list[Any] = []

            async def receive(messages: Any = messages) -> Any:
                return messages.pop() if messages else await asyncio.get_running_loop().create_future()

            async def send(message: Any, sent: Any = sent) -> None:
                sent.append(message)

            scope = {"type": "http", "method": "POST", "path": path, "root_path": "", "query_string": b""}
            async with asyncio.timeout(5):
                await app.app({**scope, "headers": [(b"content-type", b"image/png")]}, receive, send)
            assert sent[0]["status"] == 429
            assert int(dict(sent[0]["headers"])[b"retry-after"]) >= 1
        response = await app.client.post("/predict", content=png(1), headers=PNG)
        document = check_problem(response, 429, "queue-full")
        assert int(response.headers["retry-after"]) == document["retry_after_seconds"] >= 1
        app.model.pipeline.check.set()
        check_predictions(await first, [5])
        check_predictions(await waiting, [5] * 10)
        assert await app.metric('psc_rejected_total{reason="queue-full"}') == 3


async def test_a_dead_device_is_503_and_ends_the_process() -> None:
    ended: list[bool] = []

    class Watching(Host):
        def failed(self) -> None:
            ended.append(True)

    async with running(host=Watching()) as app:
        app.model.pipeline.dead = True
        check_problem(await app.client.post("/predict", content=png(1), headers=PNG), 503, "device-failed")
        response = await app.client.get("/readyz")
        assert response.status_code == 503
        assert response.json()["reasons"] == {"m": "device failed"}
        await until(lambda: ended)
        await asyncio.sleep(4 * SWEEP_SECONDS)
        assert ended == [True]  # Once, though the device stays dead.
        assert app.service.exit_code == 1
        assert await app.metric("psc_ready") == 0
