"""``/predict`` over HTTP: three body forms, options, and every documented error."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from PIL import Image

from app.service import SWEEP_SECONDS, Host
from psc_core.answers import ClassificationResponse
from tests.app.fakes import (
    CLASSES,
    NOT_FINITE,
    POISON,
    FakeModel,
    FakePipeline,
    FakePipelineWithMap,
    FakePipelineWithStoredImages,
    FakeValueModel,
    pixels,
    png,
)
from tests.app.http.support import check_predictions, check_problem, hold
from tests.app.support import PNG, running, serve_next, until

pytestmark = pytest.mark.anyio


def b64(data: bytes) -> dict[str, str]:
    return {"b64": base64.b64encode(data).decode()}


async def test_the_three_forms_give_the_same_answer() -> None:
    async with running() as app:
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


async def test_concurrent_requests_get_their_own_answers() -> None:
    async with running() as app:
        values = [(7 * k) % 200 for k in range(60)]
        responses = await asyncio.gather(
            *(app.client.post("/predict", content=png(value), headers=PNG) for value in values)
        )
        for value, response in zip(values, responses, strict=True):
            check_predictions(response, [value])


async def test_decisions_follow_alpha_and_the_ambiguity_threshold() -> None:
    async with running() as app:

        async def decide(image: bytes, **query: Any) -> dict[str, Any]:
            response = await app.client.post("/predict", params=query, content=image, headers=PNG)
            assert response.status_code == 200, response.text
            prediction: dict[str, Any] = response.json()["predictions"][0]
            return prediction

        between = png(64)
        assert (await decide(png(0)))["decision"] == "accept"
        assert (await decide(between))["decision"] == "abstain_ambiguous"
        assert (await decide(between, ambiguity_threshold=5))["decision"] == "accept"
        checker = pixels(0)
        checker[:, ::2] = 255
        strange = _encode(checker)
        answer = await decide(strange)
        assert answer["is_ood"] is True
        assert answer["decision"] == "abstain_ood"
        answer = await decide(strange, alpha=0.05)
        assert answer["is_ood"] is False
        response = await app.client.post("/predict?alpha=0.05", content=strange, headers=PNG)
        assert response.json()["policy"]["alpha"] == 0.05


async def test_settings_override_the_bundles_policy() -> None:
    async with running(alpha=0.05, ambiguity_threshold=3.0, coverage=0.8) as app:
        response = await app.client.post("/predict", content=png(0), headers=PNG)
        bound = pytest.approx(0.3)  # of the largest entropy
        assert response.json()["policy"] == {"alpha": 0.05, "ambiguity_threshold": 3.0, "coverage": 0.8, "risk": bound}


@pytest.mark.parametrize(("threshold", "risk"), [(-1.0, None), (0.0, 0.05), (0.5, 0.05 + 0.25 * 49 / 98), (8.0, 0.3)])
async def test_an_answer_says_what_the_requests_own_threshold_keeps(threshold: float, risk: float | None) -> None:
    """The fake has entropies 0, 1/98, …, 1 with the bounds 0.05 … 0.3."""
    async with running() as app:
        answer = await app.client.post(f"/predict?ambiguity_threshold={threshold}", content=png(60), headers=PNG)
        assert answer.json()["policy"]["risk"] == (risk and pytest.approx(risk, abs=1e-6))
        accepted = [each["decision"] == "accept" for each in answer.json()["predictions"]]
        assert not any(accepted) or threshold >= 0


async def test_an_answer_begins_with_the_model_and_what_its_task_says_of_it() -> None:
    async with running({"classes": FakeModel(), "numbers": FakeValueModel()}) as app:
        answers = [(await app.client.post(f"/models/{name}/predict", content=png(60), headers=PNG)).json()
                   for name in ("classes", "numbers")]  # fmt: skip
        assert list(answers[0]) == ["model", "policy", "predictions"]
        assert list(answers[1]) == ["model", "target", "policy", "predictions"]
        assert answers[1]["target"] == {"name": "brightness", "unit": "%"}
        assert answers[1]["predictions"][0]["mean"] == pytest.approx(60 / 2.55)


@pytest.mark.parametrize(
    ("model", "query", "noun"),
    [
        (FakeValueModel, "top_k=2", "regression"),
        (FakeValueModel, "ambiguity_threshold=1", "regression"),
        (FakeModel, "max_width=3", "classifier"),
    ],
)
async def test_what_a_task_does_not_have_is_refused(model: type[FakeModel], query: str, noun: str) -> None:
    async with running({"m": model()}) as app:
        response = await app.client.post(f"/predict?alpha=0.1&{query}", content=png(60), headers=PNG)
        name = query.partition("=")[0]
        said = check_problem(response, 400, "malformed")["detail"]
        assert said == f"model 'm' is a {noun}, which has no {name}; leave it out"


@pytest.mark.parametrize(
    ("query", "status"), [("max_width=3", 400), ("alpha=0.001", 422), ("explain=true&map=true", 422), ("topk=2", 400)]
)
async def test_what_the_model_cannot_do_is_refused_before_the_body_is_read(query: str, status: int) -> None:
    read = False

    async def body() -> AsyncIterator[bytes]:
        nonlocal read
        read = True
        yield png(1)

    async with running() as app:
        assert (await app.client.post(f"/predict?{query}", content=body(), headers=PNG)).status_code == status
        assert not read


async def test_a_model_that_is_swapped_while_the_body_arrives_is_asked_again() -> None:
    async with running() as app:

        async def body() -> AsyncIterator[bytes]:
            serve_next(app, FakeValueModel())
            await app.service.reload(None)
            yield png(1)

        response = await app.client.post("/predict?top_k=2", content=body(), headers=PNG)
        assert "which has no top_k" in check_problem(response, 400, "malformed")["detail"]


async def test_top_k_replaces_the_full_list() -> None:
    async with running() as app:
        response = await app.client.post("/predict?top_k=2", content=png(60), headers=PNG)
        prediction = check_predictions(response, [60])[0]
        assert "probabilities" not in prediction
        assert len(prediction["top"]) == 2
        assert prediction["top"][0]["label"] == prediction["label"]
        assert prediction["top"][0]["probability"] >= prediction["top"][1]["probability"]
        response = await app.client.post("/predict?top_k=99", content=png(60), headers=PNG)
        assert len(response.json()["predictions"][0]["top"]) == len(CLASSES)


async def test_explain_adds_an_explanation() -> None:
    async with running() as app:
        response = await app.client.post("/predict?explain=true", content=png(10), headers=PNG)
        explanation = check_predictions(response, [10])[0]["explanation"]
        assert explanation["nearest_class"] == "dark"
        assert len(explanation["class_distances"]) == 3
        deviations = [abs(each["deviation"]) for each in explanation["unusual_components"]]
        assert deviations == sorted(deviations, reverse=True)
        assert explanation["aleatoric"] == pytest.approx(10 / 255)
        plain = await app.client.post("/predict?explain=false", content=png(10), headers=PNG)
        assert "explanation" not in plain.json()["predictions"][0]


async def test_explain_names_the_training_images_near_a_number() -> None:
    async with running({"m": FakeValueModel()}) as app:
        response = await app.client.post("/predict?explain=true", content=png(10), headers=PNG)
        explanation = response.json()["predictions"][0]["explanation"]
        values = [[near["value"] for near in layer["examples"]] for layer in explanation["nearest_examples"]]
        assert values == [[0.0, 10.0, 20.0]] * 2


async def test_a_map_shows_where_an_image_is_strange() -> None:
    pixels = np.zeros((8, 8), np.uint8)
    pixels[2:4, 5:8] = 200
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    async with running({"m": FakeModel(pipeline=FakePipelineWithMap())}) as app:
        response = await app.client.post("/predict?explain=true&map=true", content=file.getvalue(), headers=PNG)
        document = ClassificationResponse.model_validate(response.json()).predictions[0].explanation
        assert document is not None and document.map is not None
        assert document.map.layer == "layer1" and document.map.box == (5 / 8, 2 / 8, 1.0, 4 / 8)
        with Image.open(io.BytesIO(base64.b64decode(document.map.png))) as picture:
            assert picture.mode == "L" and np.array_equal(np.asarray(picture), pixels)
        plain = await app.client.post("/predict?explain=true", content=file.getvalue(), headers=PNG)
        assert "map" not in plain.json()["predictions"][0]["explanation"]


async def test_an_explanation_shows_the_nearest_training_images() -> None:
    async with running({"m": FakeModel(pipeline=FakePipelineWithStoredImages())}) as app:
        response = await app.client.post("/predict?explain=true", content=png(200), headers=PNG)
        document = ClassificationResponse.model_validate(response.json()).predictions[0].explanation
        assert document is not None and document.nearest is not None
        found = [(each.image, each.label, each.value) for each in document.nearest]
        assert found == [(30, "bright", None), (20, "middle", None), (10, "dark", None)]
        assert [each.distance for each in document.nearest] == pytest.approx([55 / 255, 72 / 255, 200 / 255])
        with Image.open(io.BytesIO(base64.b64decode(document.nearest[0].png))) as picture:
            assert (picture.format, picture.size) == ("PNG", (2, 1)) and np.asarray(picture).tolist() == [[255, 255]]
        plain = await app.client.post("/predict", content=png(200), headers=PNG)
        assert "explanation" not in plain.json()["predictions"][0]
    async with running() as app:
        response = await app.client.post("/predict?explain=true", content=png(200), headers=PNG)
        assert "nearest" not in response.json()["predictions"][0]["explanation"]


async def test_a_map_without_an_explanation_is_400() -> None:
    async with running() as app:
        response = await app.client.post("/predict?map=true", content=png(1), headers=PNG)
        assert "explain=true&map=true" in check_problem(response, 400, "malformed")["detail"]


async def test_a_map_of_a_model_without_one_is_422() -> None:
    async with running() as app:
        response = await app.client.post("/predict?explain=true&map=true", content=png(1), headers=PNG)
        assert "was fitted without a map" in check_problem(response, 422, "no-map")["detail"]


async def test_models_are_served_by_name() -> None:
    async with running({"first": FakeModel("v1"), "second": FakeModel("v2")}) as app:
        for path, version in (("/predict", "v1"), ("/models/first/predict", "v1"), ("/models/second/predict", "v2")):
            response = await app.client.post(path, content=png(1), headers=PNG)
            assert response.json()["model"]["version"] == version
        check_problem(await app.client.post("/models/third/predict"), 404, "unknown-model")


async def test_unattainable_alpha_is_422() -> None:
    async with running() as app:
        response = await app.client.post("/predict?alpha=0.001", content=png(1), headers=PNG)
        assert "1/(n + 1)" in check_problem(response, 422, "unattainable-alpha")["detail"]


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"{}", b'{"images": []}', b'{"images": {}}', b'{"images": [{}]}', b'{"images": ["x"]}',
        b'{"images": [{"b64": 3}]}', b'{"images": [{"b64": "?"}]}', b'{"images": [{"b64": "QQ"}]}',
        b'{"images": [{"b64": "QUFB", "x": 1}]}', b'{"images": [{"b64": "QUFB"}], "x": 1}', b"\xff",
        b'{"images": [{"b64": "\xc3\xa9"}]}',
    ],
)  # fmt: skip
async def test_malformed_json_is_400(body: bytes) -> None:
    async with running() as app:
        response = await app.client.post("/predict", content=body, headers={"content-type": "application/json"})
        check_problem(response, 400, "malformed")


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("multipart/form-data", b""),
        ("multipart/form-data; boundary=x", b""),
        ("multipart/form-data; boundary=x", b"nonsense"),
        ("multipart/form-data; boundary=x", b"--x\r\nContent-Disposition: form-data\r\n\r\nA\r\n--x--\r\n"),
        ("multipart/form-data; boundary=x", b'--x\r\nContent-Disposition: form-data; name="images"\r\n\r\nA'),
        ("multipart/form-data; boundary=x", b'--x\r\nContent-Disposition: form-data; name="f"\r\n\r\nA\r\n--x--\r\n'),
        ("multipart/form-data; boundary=" + "x" * 500, b"--x"),
        ("image/png", b""),
    ],
)
async def test_malformed_bodies_are_400(content_type: str, body: bytes) -> None:
    async with running() as app:
        response = await app.client.post("/predict", content=body, headers={"content-type": content_type})
        check_problem(response, 400, "malformed")


async def test_ignores_other_fields_up_to_max_fields() -> None:
    async with running(max_fields=3) as app:
        files = [("images", ("a.png", png(1)))]
        response = await app.client.post("/predict", files=files, data={"note": "x", "token": "y"})
        check_predictions(response, [1])
        response = await app.client.post("/predict", files=files, data={"a": "x", "b": "y", "c": "z"})
        check_problem(response, 400, "malformed")


@pytest.mark.parametrize("content_type", ["text/plain", "application/octet-stream", "", "application/xml"])
async def test_other_content_types_are_415(content_type: str) -> None:
    async with running() as app:
        response = await app.client.post("/predict", content=png(1), headers={"content-type": content_type})
        check_problem(response, 415, "unsupported-media")


async def test_names_what_is_not_an_image() -> None:
    async with running() as app:
        files = [("images", ("good.png", png(1))), ("images", ("bad.txt", b"hello"))]
        document = check_problem(await app.client.post("/predict", files=files), 415, "unsupported-image")
        assert (document["index"], document["filename"]) == (1, "bad.txt")
        document = check_problem(
            await app.client.post("/predict", json={"images": [b64(png(1)), b64(b"hello")]}), 415, "unsupported-image"
        )
        assert document["index"] == 1
        assert "filename" not in document


async def test_a_damaged_image_is_422() -> None:
    async with running() as app:
        cut = png(1, size=64)[:-30]
        document = check_problem(await app.client.post("/predict", content=cut, headers=PNG), 422, "undecodable-image")
        assert document["index"] == 0


async def test_too_many_pixels_are_413_from_the_header() -> None:
    async with running(max_pixels=1000) as app:
        response = await app.client.post("/predict", content=png(1, size=64), headers=PNG)
        check_problem(response, 413, "image-too-large")


@pytest.mark.parametrize("form", ["multipart", "json"])
async def test_too_many_images_are_413(form: str) -> None:
    async with running(max_images_per_request=3) as app:
        if form == "json":
            response = await app.client.post("/predict", json={"images": [b64(png(1))] * 4})
        else:
            response = await app.client.post("/predict", files=[("images", ("a.png", png(1)))] * 4)
        check_problem(response, 413, "too-many-images")
        assert app.pending == 0


async def test_a_slow_body_is_408() -> None:
    async with running(upload_seconds=0.05) as app:

        async def chunks() -> Any:
            yield b"x"
            await asyncio.sleep(0.3)
            yield b"y"

        check_problem(await app.client.post("/predict", content=chunks(), headers=PNG), 408, "slow-upload")


@pytest.mark.usefixtures("device_thread")
async def test_a_full_queue_is_429_with_retry_after() -> None:
    async with running(max_queue_images=10, max_images_per_request=10) as app:
        first = await hold(app)
        waiting = asyncio.create_task(app.client.post("/predict", files=[("images", ("a.png", png(5)))] * 10))
        await until(lambda: app.pending == 10)
        response = await app.client.post("/predict", content=png(1), headers=PNG)
        document = check_problem(response, 429, "queue-full")
        assert int(response.headers["retry-after"]) == document["retry_after_seconds"] >= 1
        app.model.pipeline.check.set()
        check_predictions(await first, [5])
        check_predictions(await waiting, [5] * 10)
        assert await app.metric('psc_rejected_total{reason="queue-full"}') == 1


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
        app.model.pipeline.check.set()
        check_predictions(await first, [5])
        check_predictions(await waiting, [5] * 10)


@pytest.mark.usefixtures("device_thread")
async def test_a_missed_deadline_is_504() -> None:
    async with running(deadline_seconds=0.1) as app:
        check_problem(await (await hold(app)), 504, "deadline")
        app.model.pipeline.check.set()
        await until(lambda: not app.pending)


@pytest.mark.parametrize("first", [POISON, NOT_FINITE])
async def test_failing_image_is_500_and_fails_alone(first: int) -> None:
    async with running(max_delay_ms=50) as app:
        good, bad = await asyncio.gather(
            app.client.post("/predict", content=png(1), headers=PNG),
            app.client.post("/predict", content=png(1, first=first), headers=PNG),
        )
        check_predictions(good, [1])
        check_problem(bad, 500, "inference-failed")
        assert (await app.client.get("/readyz")).status_code == 200


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


@pytest.mark.usefixtures("device_thread")
async def test_batches_follow_the_load() -> None:
    pipeline = FakePipeline()
    async with running({"m": FakeModel(pipeline=pipeline)}) as app:
        pipeline.seconds = 0.005
        pipeline.sizes.clear()
        await asyncio.gather(*(app.client.post("/predict", content=png(1), headers=PNG) for _ in range(80)))
        assert sum(pipeline.sizes) == 80
        assert max(pipeline.sizes) == 8


def _encode(array: Any) -> bytes:
    import io

    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, "PNG")
    return buffer.getvalue()
