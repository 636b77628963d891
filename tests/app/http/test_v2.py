"""The Open Inference Protocol v2: its routes, bodies and repository, and a client that is not ours."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import struct
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from app.errors import MalformedRequest
from app.http import v2
from app.http.body import MAX_CONTAINERS
from app.http.model import QUERY
from app.http.v2 import (
    HEADER,
    ErrorDocument,
    InferRequest,
    InferResponse,
    ModelMetadata,
    OutputTensor,
    build_response,
    images_of,
    infer_tensors,
    parse_request,
    request_of,
)
from psc_core.answers import CLASSIFICATION_DECISIONS, CLASSIFICATION_SCORES
from psc_core.errors import PSCError
from psc_core.images.preprocess import Preprocess
from psc_core.tasks.base import CHECKS_OUTPUT, Outputs
from psc_core.tasks.classification import Classification
from tests.app.fakes import (
    CLASSES,
    POISON,
    FakeModel,
    FakePipelineWithChecks,
    FakePipelineWithMap,
    FakeValueModel,
    outputs_of,
    pixels,
    png,
)
from tests.app.http.support import check_predictions
from tests.app.live import live_server
from tests.app.support import PNG, Running, running, serve_next

pytestmark = pytest.mark.anyio


OUTPUTS = tuple(Classification.tensors)
WITHOUT_CHECKS = tuple(name for name in OUTPUTS if name != CHECKS_OUTPUT)
COLOUR = Preprocess("RGB", 4, 6, None, (0.5,) * 3, (0.5,) * 3)
Array = np.ndarray[Any, np.dtype[Any]]


@pytest.fixture
async def service() -> AsyncIterator[Running]:
    models = {"m": FakeModel(), "colour": FakeModel(preprocess=COLOUR)}
    async with running(models, max_images_per_request=4, max_body_bytes=100_000) as app:
        yield app


def raw_input(images: Array, **more: Any) -> dict[str, Any]:
    return {"name": "images", "shape": list(images.shape), "datatype": "UINT8", "data": images.tolist(), **more}


def grey(*values: int) -> Array:
    return np.stack([pixels(value) for value in values])[..., None]


def expected(images_nchw: Array) -> Outputs[Any]:
    return Outputs(outputs_of(torch.from_numpy(np.ascontiguousarray(images_nchw))).numpy(), CLASSIFICATION_SCORES, ())


def output(document: dict[str, Any], name: str) -> Any:
    found = next(tensor for tensor in document["outputs"] if tensor["name"] == name)
    return np.array(found["data"]).reshape(found["shape"])


async def infer(service: Running, document: Any, model: str = "m", **headers: str) -> dict[str, Any]:
    response = await service.client.post(f"/v2/models/{model}/infer", json=document, headers=headers)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    InferResponse.model_validate(answer)
    return answer


async def test_model_metadata(service: Running) -> None:
    response = await service.client.get("/v2/models/colour")
    metadata = ModelMetadata.model_validate(response.json())
    assert (metadata.name, metadata.versions) == ("colour", ["v1"])
    inputs = {tensor.name: (tensor.datatype, tensor.shape) for tensor in metadata.inputs}
    assert inputs == {"images": ("UINT8", [-1, 4, 6, 3]), "encoded_images": ("BYTES", [-1])}
    outputs = {tensor.name: (tensor.datatype, tensor.shape) for tensor in metadata.outputs}
    assert tuple(outputs) == WITHOUT_CHECKS
    assert outputs["probabilities"] == ("FP32", [-1, 3])
    assert (await service.client.get("/v2/models/colour/versions/v1")).json() == response.json()
    other = await service.client.get("/v2/models/colour/versions/v7")
    assert other.status_code == 404 and other.json()["error"].endswith("see /v2/models/colour")


async def test_too_many_values_are_refused_before_the_rest_arrives() -> None:
    sent = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(8):
            sent += 1
            yield b"[]," * (MAX_CONTAINERS // 2 + 1)

    async with running({"m": FakeModel()}) as app:
        answer = await app.client.post("/v2/models/m/infer", content=pieces())
    assert (answer.status_code, sent) == (400, 2)
    assert "262144 lists" in answer.json()["error"]


async def test_a_null_is_no_member(service: Running) -> None:
    image = raw_input(grey(7))
    given = {"id": None, "parameters": None, "inputs": [{**image, "parameters": None}], "outputs": None}
    assert await infer(service, given) == await infer(service, {"inputs": [image]})
    flags = {"alpha": None, "monitor": None, "binary_data_output": None}
    own = {"parameters": flags, "inputs": [{**image, "parameters": {"layout": None, "binary_data_size": None}}]}
    assert await infer(service, own) == await infer(service, {"inputs": [image]})
    refused = await service.client.post("/v2/models/m/infer", json={"inputs": None})
    assert refused.status_code == 400


async def test_raw_images_give_every_output(service: Running) -> None:
    images = grey(0, 120, 255)
    document = await infer(service, {"id": "42", "inputs": [raw_input(images)]})
    outputs = expected(images.transpose(0, 3, 1, 2))
    assert (document["id"], document["model_name"], document["model_version"]) == ("42", "m", "v1")
    assert document["parameters"] == {"alpha": 0.2}
    assert tuple(tensor["name"] for tensor in document["outputs"]) == WITHOUT_CHECKS
    np.testing.assert_allclose(output(document, "probabilities"), outputs.probabilities, rtol=1e-6)
    for name in CLASSIFICATION_SCORES:
        np.testing.assert_allclose(output(document, name), outputs[name], rtol=1e-6)
    assert output(document, "is_ood").tolist() == [False] * 3
    assert output(document, "decision").tolist() == [CLASSIFICATION_DECISIONS.index("accept")] * 3
    assert output(document, "label").tolist() == list(CLASSES)
    assert output(document, "class_index").tolist() == [0, 1, 2]


async def test_checks_are_one_tensor() -> None:
    model = FakeModel(pipeline=FakePipelineWithChecks(), checks=("content", "confidence"))
    async with running({"m": model, "plain": FakeModel()}) as app:
        metadata = ModelMetadata.model_validate((await app.client.get("/v2/models/m")).json())
        assert [tensor.shape for tensor in metadata.outputs if tensor.name == CHECKS_OUTPUT] == [[-1, 2]]
        document = await infer(app, {"inputs": [raw_input(grey(0, 51))]})
        assert tuple(tensor["name"] for tensor in document["outputs"]) == OUTPUTS
        np.testing.assert_allclose(output(document, CHECKS_OUTPUT), [[1, 0], [0.8, 0.2]], rtol=1e-6)
        assert output(document, "probabilities").shape == (2, 3)
        wanted = {"inputs": [raw_input(grey(0, 51))], "outputs": [{"name": CHECKS_OUTPUT}]}
        assert output(await infer(app, wanted, "plain"), CHECKS_OUTPUT).shape == (2, 0)


async def test_a_map_is_given_where_it_is_asked_for() -> None:
    async with running({"m": FakeModel(pipeline=FakePipelineWithMap()), "plain": FakeModel()}) as app:
        metadata = ModelMetadata.model_validate((await app.client.get("/v2/models/m")).json())
        assert [(tensor.datatype, tensor.shape) for tensor in metadata.outputs if tensor.name == "map"] == [
            ("UINT8", [-1, 8, 8])
        ]
        images = grey(0, 51)
        wanted = {"inputs": [raw_input(images)], "outputs": [{"name": "is_ood"}, {"name": "map"}]}
        np.testing.assert_array_equal(output(await infer(app, wanted), "map"), images[..., 0])
        everything = await infer(app, {"inputs": [raw_input(images)]})
        assert "map" not in [tensor["name"] for tensor in everything["outputs"]]
        response = await app.client.post("/v2/models/plain/infer", json=wanted)
        assert response.status_code == 422 and "was fitted without a map" in response.json()["error"]


async def test_an_output_of_another_task_is_refused_before_anything_is_computed() -> None:
    models = {"classes": FakeModel(), "numbers": FakeValueModel()}
    async with running(models) as app:
        for name, other in (("classes", "mean"), ("numbers", "label")):
            computed = list(models[name].pipeline.sizes)
            document = {"inputs": [raw_input(grey(1))], "outputs": [{"name": "is_ood"}, {"name": other}]}
            response = await app.client.post(f"/v2/models/{name}/infer", json=document)
            assert response.status_code == 400 and repr(other) in response.json()["error"]
            assert models[name].pipeline.sizes == computed
        everything = await infer(app, {"inputs": [raw_input(grey(51))]}, "numbers")
        assert {tensor["datatype"] for tensor in everything["outputs"]} == {"FP32", "BOOL", "INT64"}
        assert output(everything, "mean").tolist() == [pytest.approx(20)]


async def test_nhwc_and_nchw_are_the_same_images(service: Running) -> None:
    images = np.random.default_rng(0).integers(0, 256, (2, 3, 4, 6), dtype=np.uint8)
    nchw = await infer(service, {"inputs": [raw_input(images)]}, "colour")
    nhwc = await infer(service, {"inputs": [raw_input(images.transpose(0, 2, 3, 1))]}, "colour")
    assert nchw == nhwc
    np.testing.assert_allclose(output(nchw, "log_density"), expected(images)["log_density"], rtol=1e-6)


@pytest.mark.parametrize("shape", [[2], [2, 1]])
async def test_encoded_images_equal_predict(service: Running, shape: list[int]) -> None:
    files = [png(0, size=20), png(200, size=5)]
    texts = [base64.b64encode(data).decode() for data in files]
    data: list[Any] = texts if len(shape) == 1 else [[text] for text in texts]
    entry = {"name": "encoded_images", "shape": shape, "datatype": "BYTES", "data": data}
    document = await infer(service, {"inputs": [entry], "outputs": [{"name": "ood_p_value"}, {"name": "label"}]})
    parts = [("images", (f"{i}.png", data)) for i, data in enumerate(files)]
    predictions = (await service.client.post("/predict", files=parts)).json()["predictions"]
    assert [tensor["name"] for tensor in document["outputs"]] == ["ood_p_value", "label"]
    assert output(document, "label").tolist() == [prediction["label"] for prediction in predictions]
    p_values = [prediction["ood_p_value"] for prediction in predictions]
    np.testing.assert_allclose(output(document, "ood_p_value"), p_values, rtol=1e-6)


async def test_binary_input_and_output(service: Running) -> None:
    images = grey(0, 255)
    entry = raw_input(images, parameters={"binary_data_size": images.size})
    del entry["data"]
    wanted = [
        {"name": "label", "parameters": {"binary_data": True}},
        {"name": "class_index", "parameters": {"binary_data": False}},
        {"name": "is_ood"},
    ]
    document = {"inputs": [entry], "outputs": wanted, "parameters": {"binary_data_output": True}}
    head = json.dumps(document).encode()
    response = await service.client.post(
        "/v2/models/m/versions/v1/infer", content=head + images.tobytes(), headers={HEADER: str(len(head))}
    )
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/octet-stream"
    length = int(response.headers[HEADER])
    answer = json.loads(response.content[:length])
    InferResponse.model_validate(answer)
    label, index, is_ood = answer["outputs"]
    assert index["data"] == [0, 2]
    assert label["parameters"] == {"binary_data_size": 4 + 4 + 4 + 6}
    assert is_ood["parameters"] == {"binary_data_size": 2}
    texts = struct.pack("<I", 4) + b"dark" + struct.pack("<I", 6) + b"bright"
    assert response.content[length:] == texts + b"\0\0"


async def test_alpha_of_a_request(service: Running) -> None:
    image = pixels(10)
    image[:4] = 150
    request = {"inputs": [raw_input(image[None, None])], "outputs": [{"name": "is_ood"}]}
    (p_value,) = expected(image[None, None])["ood_p_value"]
    assert 0.2 < p_value < 0.6
    assert output(await infer(service, request), "is_ood").tolist() == [False]
    document = await infer(service, {**request, "parameters": {"alpha": 0.6, "priority": 3}})
    assert output(document, "is_ood").tolist() == [True]
    assert document["parameters"] == {"alpha": 0.6}


async def test_no_parameter_of_predict_is_ignored(service: Running) -> None:
    request = {"inputs": [raw_input(grey(1))]}
    for name in QUERY.model_fields:
        for value in (0.5, False):
            path, document = "/v2/models/m/infer", {**request, "parameters": {name: value}}
            answer = await service.client.post(path, json=document)
            is_known = (name, value) in {("alpha", 0.5), ("monitor", False), ("explain", False), ("map", False)}
            assert answer.status_code == (200 if is_known else 400), name
            assert is_known or f"parameters.{name}" in answer.text
    await infer(service, {**request, "parameters": dict.fromkeys(QUERY.model_fields) | {"alpa": 0.2, "timeout": 3}})


GOOD = raw_input(grey(1))
BODY = json.dumps({"inputs": [GOOD]}).encode()
NESTED: Any = json.loads("[" * 900 + "]" * 900)
DAMAGED = png(1, size=400)[:-60]
FILE = {"name": "encoded_images", "shape": [1], "datatype": "BYTES"}


def without_data(**parameters: Any) -> dict[str, Any]:
    return {**{name: value for name, value in GOOD.items() if name != "data"}, "parameters": parameters}


@pytest.mark.parametrize(
    ("document", "status", "message"),
    [
        ([], 400, "request: expected an object"),
        ({}, 400, "inputs: expected a value, got none"),
        ({"inputs": []}, 400, "give one of 'images' and 'encoded_images', got 0 inputs"),
        ({"inputs": [GOOD, FILE]}, 400, "inputs: give one of 'images' and 'encoded_images', got 2 inputs"),
        ({"inputs": [{**GOOD, "name": "pixels"}]}, 400, "inputs.0.name"),
        ({"inputs": [{**GOOD, "datatype": "BYTES"}]}, 400, "expected datatype UINT8"),
        ({"inputs": [{**GOOD, "shape": [1, 8, -8, 1]}]}, 400, "inputs.0.shape.2"),
        ({"inputs": [{**GOOD, "shape": [1, 8, 9, 1]}]}, 400, r"[n, 8, 8, 1] (NHWC) or [n, 1, 8, 8] (NCHW)"),
        ({"inputs": [{**GOOD, "shape": [2, 8, 8, 1]}]}, 400, "expected 128 values"),
        ({"inputs": [{**GOOD, "shape": [0, 8, 8, 1], "data": []}]}, 400, "no image"),
        ({"inputs": [{**GOOD, "shape": [5, 8, 8, 1]}]}, 413, "at most 4 images"),
        ({"inputs": [{**GOOD, "data": ["x" * 50_000, *[""] * 63]}]}, 400, "0 to 255"),
        ({"inputs": [{**GOOD, "data": [[1, 2], [3]]}]}, 400, "equal length"),
        ({"inputs": [{**GOOD, "parameters": {"layout": "HWCN"}}]}, 400, "layout"),
        ({"inputs": [{**GOOD, "parameters": {"layout": "NCHW"}}]}, 400, "NCHW"),
        ({"inputs": [{**GOOD, "parameters": {"shared_memory_region": "r"}}]}, 400, "not supported"),
        ({"inputs": [without_data()]}, 400, "either data or binary_data_size"),
        ({"inputs": [without_data(binary_data_size=64)]}, 400, "expected 64 bytes"),
        ({"inputs": [{**FILE, "shape": [2], "data": ["QQ==", "?"]}]}, 400, "element 1: expected base64"),
        ({"inputs": [{**FILE, "data": "text"}]}, 400, "inputs.0.data"),
        ({"inputs": [{**FILE, "shape": [], "data": []}]}, 400, "[n] or [n, 1]"),
        ({"inputs": [{**FILE, "data": [""]}]}, 415, "image 0"),
        ({"inputs": [{**FILE, "data": [base64.b64encode(DAMAGED).decode()]}]}, 422, "image 0"),
        ({"inputs": [GOOD], "outputs": [{"name": "nonsense"}]}, 400, "outputs.0.name"),
        ({"inputs": [GOOD], "outputs": [{"name": "label"}, {"name": "label"}]}, 400, "once"),
        (
            {"inputs": [GOOD], "outputs": [{"name": "label", "parameters": {"classification": 2}}]},
            400,
            "classification: not supported",
        ),
        ({"inputs": [GOOD], "parameters": {"binary_data_output": "yes"}}, 400, "binary_data_output"),
        ({"inputs": [GOOD], "parameters": {"alpha": 2}}, 400, "alpha"),
        ({"inputs": [GOOD], "parameters": {"alpha": 0.001}}, 422, "alpha"),
        ({"inputs": [GOOD], "parameters": {"alpha": 1e-300}}, 400, "alpha"),
        ({"inputs": [GOOD], "parameters": {"alpha": True}}, 400, "alpha"),
        ({"inputs": [GOOD], "outputs": [{"name": "x" * 50_000}]}, 400, "outputs.0.name"),
        ({"inputs": [GOOD], "parameters": {"alpha": NESTED}}, 400, "alpha"),
        ({"inputs": [{**GOOD, "name": "x" * 50_000, "parameters": {"classification": 1}}]}, 400, "inputs.0.name"),
        ({"inputs": [raw_input(grey(1, POISON))]}, 500, ""),
    ],
)
async def test_errors_follow_the_protocol(service: Running, document: Any, status: int, message: str) -> None:
    response = await service.client.post("/v2/models/m/infer", json=document)
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = ErrorDocument.model_validate(response.json()).error
    assert message in error
    assert len(error) < 500


@pytest.mark.parametrize(
    ("body", "headers", "status", "message"),
    [
        (b"{", {}, 400, "JSON"),
        (b"\xff\xfe", {}, 400, "JSON"),
        (b"[" * 5000, {}, 400, "JSON"),
        (b"{}", {HEADER: "3"}, 400, HEADER),
        (b"{}", {HEADER: "0"}, 400, HEADER),
        (b"{}", {HEADER: "two"}, 400, HEADER),
        (BODY + b"xx", {HEADER: "1"}, 400, "JSON"),
        (BODY + b"xx", {HEADER: str(len(BODY))}, 400, "0 bytes"),
        (b"{}", {"content-encoding": "gzip"}, 415, "compressed"),
    ],
)
async def test_broken_bodies(service: Running, body: bytes, headers: dict[str, str], status: int, message: str) -> None:
    response = await service.client.post("/v2/models/m/infer", content=body, headers=headers)
    assert response.status_code == status, response.text
    assert message in ErrorDocument.model_validate(response.json()).error


async def test_unknown_models_and_versions(service: Running) -> None:
    for path in ("x", "x/ready", "m/versions/v0", "m/versions/v0/ready", "x/versions/v1/ready"):
        response = await service.client.get(f"/v2/models/{path}")
        assert response.status_code == 404, path
        ErrorDocument.model_validate(response.json())
    for path in ("x/infer", "m/versions/v0/infer"):
        response = await service.client.post(f"/v2/models/{path}", content=b"not even JSON")
        assert response.status_code == 404, path


async def test_errors_before_a_route_follow_the_protocol_too() -> None:
    async with running(max_body_bytes=10, root_path="/uncertain") as app:
        for method, path, status in (
            ("POST", "/v2/models/m/infer", 413),
            ("GET", "/v2/nothing", 404),
            ("DELETE", "/v2", 405),
            ("POST", "/uncertain/v2/models/m/infer", 413),
        ):
            body = b"more than ten bytes" if status == 413 else b""
            response = await app.client.request(method, path, content=body)
            assert response.status_code == status, path
            ErrorDocument.model_validate(response.json())
        response = await app.client.post("/v2x", content=b"more than ten bytes")
        assert response.headers["content-type"] == "application/problem+json"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with live_server({"m": FakeModel(), "colour": FakeModel(preprocess=COLOUR)}, max_images_per_request=4) as url:
        yield url.removeprefix("http://")


@pytest.fixture(scope="module")
def http() -> Any:
    return pytest.importorskip("tritonclient.http", reason="needs tritonclient[http]")


class TestTritonClient:
    """``tritonclient[http]``, which knows nothing of this project."""

    def test_metadata_and_health(self, http: Any, url: str) -> None:
        with http.InferenceServerClient(url) as client:
            assert client.is_server_live()
            assert client.is_server_ready()
            assert client.is_model_ready("m")
            assert client.is_model_ready("m", "v1")
            assert not client.is_model_ready("absent")
            assert client.get_server_metadata()["extensions"] == ["binary_tensor_data", "model_repository"]
            assert client.get_model_metadata("m")["inputs"][0]["shape"] == [-1, 8, 8, 1]

    @pytest.mark.parametrize("binary_in", [True, False])
    @pytest.mark.parametrize("binary_out", [True, False, None])
    @pytest.mark.parametrize("nchw", [True, False])
    def test_raw_images(self, http: Any, url: str, binary_in: bool, binary_out: bool | None, nchw: bool) -> None:
        images = np.random.default_rng(0).integers(0, 256, (3, 3, 4, 6), dtype=np.uint8)
        sent = images if nchw else np.ascontiguousarray(images.transpose(0, 2, 3, 1))
        tensor = http.InferInput("images", list(sent.shape), "UINT8").set_data_from_numpy(sent, binary_in)
        outputs = None
        if binary_out is not None:
            outputs = [http.InferRequestedOutput(name, binary_data=binary_out) for name in WITHOUT_CHECKS]
        with http.InferenceServerClient(url) as client:
            result = client.infer("colour", [tensor], outputs=outputs, request_id="7")
        wanted = expected(images)
        best = wanted.probabilities.argmax(1)
        assert result.get_response()["id"] == "7"
        np.testing.assert_allclose(result.as_numpy("probabilities"), wanted.probabilities, rtol=1e-5)
        np.testing.assert_allclose(result.as_numpy("log_density"), wanted["log_density"], rtol=1e-5)
        assert result.as_numpy("probabilities").dtype == np.float32
        assert result.as_numpy("is_ood").dtype == np.bool_
        assert result.as_numpy("class_index").tolist() == best.tolist()
        names = [CLASSES[index] for index in best]
        labels = [v.decode() if isinstance(v, bytes) else v for v in result.as_numpy("label").tolist()]
        assert labels == names

    def test_encoded_images(self, http: Any, url: str) -> None:
        files = np.array([png(0), png(255, size=30)], dtype=np.object_)
        tensor = http.InferInput("encoded_images", [2], "BYTES").set_data_from_numpy(files)
        with http.InferenceServerClient(url) as client:
            result = client.infer("m", [tensor], outputs=[http.InferRequestedOutput("label")])
        assert result.as_numpy("label").tolist() == [b"dark", b"bright"]
        assert result.as_numpy("log_density") is None

    def test_errors_reach_the_client_as_messages(self, http: Any, url: str) -> None:
        utils = pytest.importorskip("tritonclient.utils")
        images = np.zeros((5, 8, 8, 1), np.uint8)
        tensor = http.InferInput("images", [5, 8, 8, 1], "UINT8").set_data_from_numpy(images)
        with http.InferenceServerClient(url) as client:
            with pytest.raises(utils.InferenceServerException, match="at most 4 images") as caught:
                client.infer("m", [tensor])
            assert caught.value.status() == "413"
            with pytest.raises(utils.InferenceServerException, match="absent"):
                client.get_model_metadata("absent")


async def never() -> Any:
    await asyncio.Event().wait()


def request(name: str, datatype: str, shape: list[int], size: int) -> Any:
    parameters = {"binary_data_size": size}
    return request_of(
        InferRequest, {"inputs": [{"name": name, "datatype": datatype, "shape": shape, "parameters": parameters}]}
    )


@pytest.mark.parametrize("kind", ["raw", "encoded"])
async def test_reload_while_the_images_are_read(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    colour = {"preprocess": Preprocess("RGB", 8, 8, None, (0.5,) * 3, (0.5,) * 3)} if kind == "encoded" else {}
    async with running() as app:
        serve_next(app, FakeModel("v2", **colour))
        parse = v2.parse

        async def reload_meanwhile(*arguments: Any) -> Any:
            found = await parse(*arguments)
            if app.service.registry.get().model.version == "v1":
                await app.service.registry.reload(None)
                await asyncio.sleep(0.05)  # The old engine admits nothing any more.
            return found

        monkeypatch.setattr(v2, "parse", reload_meanwhile)
        if kind == "encoded":
            data = len(png(200)).to_bytes(4, "little") + png(200)
            wanted = request("encoded_images", "BYTES", [1], len(data))
        else:
            data = pixels(200).tobytes()
            wanted = request("images", "UINT8", [1, 8, 8, 1], len(data))
        served, _, _ = await infer_tensors(app.service, "m", None, wanted, memoryview(data), body=data, receive=never)
    assert served.model.version == "v2"


ADMIN = {"x-api-key": "root"}


async def states(app: Running) -> dict[str, tuple[str, str, str]]:
    response = await app.client.post("/v2/repository/index", headers=ADMIN)
    return {row["name"]: (row["version"], row["state"], row["reason"]) for row in response.json()}


LIMIT = 'psc_queue_limit_images{model="n"}'


async def test_unload_and_load() -> None:
    async with running({"m": FakeModel(), "n": FakeModel("v2")}, admin_keys="root") as app:
        assert await states(app) == {"m": ("v1", "READY", ""), "n": ("v2", "READY", "")}
        limit = await app.metric(LIMIT)
        assert limit > 0
        assert (await app.client.post("/v2/repository/models/n/unload", headers=ADMIN)).json() == {}
        ready = await app.client.post("/v2/repository/index", headers=ADMIN, json={"ready": True})
        assert [row["name"] for row in ready.json()] == ["m"]
        assert (await app.client.post("/v2/repository/index", headers=ADMIN, content=b"?")).status_code == 400
        assert await states(app) == {"m": ("v1", "READY", ""), "n": ("", "UNAVAILABLE", "unloaded")}
        assert await app.metric(LIMIT) == 0
        assert (await app.client.post("/models/n/predict", content=png(1), headers=PNG)).status_code == 503
        for path in ("/v2/models/n/ready", "/v2/models/n/versions/v2/ready"):
            ready = await app.client.get(path)
            assert (ready.status_code, ready.json()) == (503, {"name": "n", "ready": False})
        assert (await app.client.get("/readyz")).status_code == 200
        check_predictions(await app.client.post("/models/m/predict", content=png(1), headers=PNG), [1])

        again = await app.client.post("/v2/repository/models/n/unload", headers=ADMIN)
        assert (again.status_code, again.json()) == (200, {})
        everything = await app.client.post("/admin/reload", headers=ADMIN)
        assert [row["name"] for row in everything.json()["reloaded"]] == ["m"]

        assert (await app.client.post("/v2/repository/models/n/load", headers=ADMIN)).json() == {}
        assert (await states(app))["n"] == ("v2", "READY", "")
        assert await app.metric(LIMIT) == limit
        check_predictions(await app.client.post("/models/n/predict", content=png(2), headers=PNG), [2])
        assert (
            await app.client.post("/v2/repository/models/n/load", headers=ADMIN)
        ).json() == {}  # Again, as a reload.


@pytest.mark.parametrize("names", [["m"], ["m", "n"]])
async def test_a_service_is_ready_until_all_models_are_unloaded(names: list[str]) -> None:
    async with running({name: FakeModel() for name in names}, admin_keys="root") as app:
        for name in names[::-1]:
            assert (await app.client.get("/readyz")).status_code == 200
            await app.client.post(f"/v2/repository/models/{name}/unload", headers=ADMIN)
        answers = [await app.client.get(path) for path in ("/readyz", "/v2/health/ready", "/v2/models/m/ready")]
        assert [answer.status_code for answer in answers] == [503] * 3
        assert answers[0].json() == {"status": "not ready", "reasons": dict.fromkeys(names, "unloaded")}
        assert await app.metric("psc_ready") == 0
        await app.client.post("/v2/repository/models/m/load", headers=ADMIN)
        assert (await app.client.get("/readyz")).status_code == 200


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"garbage", "JSON"),
        (b"[]", "expected an object"),
        (b'{"parameters": {"config": "{}"}}', "config is not supported"),
        (b'{"parameters": {"file:1/model.onnx": "AAAA"}}', "file:1/model.onnx is not supported"),
        (b"", ""),
        (b'{"parameters": {"priority": 1}}', ""),
    ],
)
async def test_a_load_takes_no_other_bundle(body: bytes, message: str) -> None:
    async with running(admin_keys="root") as app:
        answer = await app.client.post("/v2/repository/models/m/load", headers=ADMIN, content=body)
        assert answer.status_code == (400 if message else 200), answer.text
        assert message in answer.text
        assert await app.metric('psc_reloads_total{model="m",result="ok"}') == (not message)


async def test_refusals() -> None:
    async with running(api_keys="alice", admin_keys="root") as app:
        for what in ("load", "unload"):
            for headers, status in (({}, 401), ({"x-api-key": "alice"}, 401)):
                response = await app.client.post(f"/v2/repository/models/m/{what}", headers=headers)
                assert response.status_code == status
        assert (await app.client.post("/v2/repository/index")).status_code == 401
        assert (await app.client.post("/v2/repository/models/x/load", headers=ADMIN)).status_code == 404


def test_layout_parameter_decides_where_both_fit() -> None:
    cube = np.arange(27, dtype=np.uint8).reshape(1, 3, 3, 3)
    moved = cube.transpose(0, 3, 1, 2)
    for layout, nchw in (("NCHW", cube), ("NHWC", moved), (None, moved)):
        parameters = {} if layout is None else {"layout": layout}
        entry = {"name": "images", "shape": [1, 3, 3, 3], "datatype": "UINT8", "parameters": parameters}
        request, binary = parse_request(json.dumps({"inputs": [{**entry, "data": cube.tolist()}]}).encode(), None)
        np.testing.assert_array_equal(images_of(request.inputs[0], binary, (3, 3, 3), max_images=1), nchw)


@given(st.data(), st.permutations([2, 1, 3, 4]), st.integers(0, 3))
def test_nested_data_have_the_shape_that_the_request_says(data: st.DataObject, sizes: list[int], first: int) -> None:
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 1, 3, 4)
    axes = data.draw(st.sampled_from([tuple(sizes), (*sizes[:first], -1), (24,), (2, 12), (24, 1), (1, 24)]))
    nested = pixels.reshape(axes)
    entry = {"name": "images", "shape": [2, 1, 3, 4], "datatype": "UINT8", "data": nested.tolist()}
    tensor = request_of(InferRequest, {"inputs": [entry]}).inputs[0]
    if nested.ndim == 1 or nested.shape == pixels.shape:
        np.testing.assert_array_equal(images_of(tensor, None, (1, 3, 4), max_images=2), pixels)
    else:
        with pytest.raises(MalformedRequest, match="shape"):
            images_of(tensor, None, (1, 3, 4), max_images=2)


@pytest.mark.parametrize(
    ("shape", "values", "is_right"),
    [
        *(([2], ["QQ==", "Qg=="], True), ([2, 1], ["QQ==", "Qg=="], True), ([2, 1], [["QQ=="], ["Qg=="]], True)),
        *(([2], [["QQ=="], ["Qg=="]], False), ([2, 1], [["QQ=="], "Qg=="], False), ([2, 1], [["QQ==", "Qg=="]], False)),
        *(([2, 1], [["QQ=="], []], False), ([2, 1], [[["QQ=="]], [["Qg=="]]], False)),
    ],
)
def test_files_in_json_have_the_shape_of_the_request(shape: list[int], values: list[object], is_right: bool) -> None:
    tensor = request_of(InferRequest, {"inputs": [FILE | {"shape": shape, "data": values}]}).inputs[0]
    if is_right:
        assert images_of(tensor, None, (1, 8, 8), max_images=2) == [b"A", b"B"]
    else:
        with pytest.raises(MalformedRequest, match="encoded_images"):
            images_of(tensor, None, (1, 8, 8), max_images=2)


@pytest.mark.parametrize("value", [1.0, True, "1", None, -1, 256, {}, [1]])
def test_a_pixel_is_a_whole_number_of_a_byte(value: object) -> None:
    entry = {"name": "images", "shape": [1, 1, 1, 2], "datatype": "UINT8", "data": [7, value]}
    with pytest.raises(MalformedRequest, match="images"):
        images_of(request_of(InferRequest, {"inputs": [entry]}).inputs[0], None, (1, 1, 2), max_images=1)


@pytest.mark.parametrize("shape", [[1.0], [-1], ["1"], [True], [None], [], [2**70], [1, 2], [1, 1, 1]])
def test_a_shape_that_is_none_is_refused(shape: list[object]) -> None:
    with pytest.raises(PSCError):
        tensor = request_of(InferRequest, {"inputs": [FILE | {"shape": shape, "data": ["QQ=="]}]}).inputs[0]
        images_of(tensor, None, (1, 8, 8), max_images=2)


@pytest.mark.parametrize("length", ["9" * 5000, "²", "٣"])
def test_rejects_header_lengths_that_are_no_number(length: str) -> None:
    with pytest.raises(MalformedRequest, match=HEADER):
        parse_request(b'{"inputs": []}', length)


@pytest.mark.parametrize("part", ["shape", "outputs", "inputs"])
def test_a_list_is_refused_at_its_first_fault(part: str) -> None:
    many: list[object] = [""] * 100_000
    document = {"inputs": many if part == "inputs" else [FILE | ({"shape": many} if part == "shape" else {})]}
    document |= {"outputs": many} if part == "outputs" else {}
    with pytest.raises(MalformedRequest) as caught:
        request_of(InferRequest, document)
    assert isinstance(caught.value.__cause__, ValidationError)
    assert caught.value.__cause__.error_count() <= 2


@given(
    files=st.lists(st.binary(max_size=20), min_size=1, max_size=5), cut=st.integers(0, 30), extra=st.binary(max_size=6)
)
def test_binary_elements_come_back_or_are_rejected(files: list[bytes], cut: int, extra: bytes) -> None:
    data = b"".join(struct.pack("<I", len(file)) + file for file in files)
    damaged = data[: max(0, len(data) - cut)] + extra
    for content, whole in ((data, True), (damaged, damaged == data)):
        entry = {**FILE, "shape": [len(files)], "parameters": {"binary_data_size": len(content)}}
        head = json.dumps({"inputs": [entry]}).encode()
        request, binary = parse_request(head + content, str(len(head)))
        try:
            read = images_of(request.inputs[0], binary, (1, 8, 8), max_images=5)
        except PSCError:
            assert not whole
        else:
            assert isinstance(read, list)
            assert len(read) == len(files)
            assert not whole or read == files


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (png(1), "element 0 should have 1196314761 bytes behind its length, got"),
        (b"\1\0\0\0A\2\0\0\0B", "element 1 should have 2 bytes behind its length, got 1"),
        (b"\1\0\0\0A\2\0", "element 1 ends within its length"),
        (b"\0\0\0\0" * 3, "expected 2 elements behind 4-byte lengths for shape [2], got 3"),
        (b"\0\0\0\0", "expected 2 elements for shape [2], got 1"),
    ],
    ids=["no length", "short", "half a length", "too many", "too few"],
)
def test_a_binary_element_without_its_length_is_told_from_one_too_many(data: bytes, message: str) -> None:
    tensor = request("encoded_images", "BYTES", [2], len(data)).inputs[0]
    with pytest.raises(MalformedRequest, match=re.escape(message)):
        images_of(tensor, memoryview(data), (1, 8, 8), max_images=2)


@given(st.lists(st.text(alphabet=st.characters(codec="utf-8"), max_size=8), max_size=4), st.booleans())
def test_texts_come_back_from_a_response(texts: list[str], binary: bool) -> None:
    tritonclient = pytest.importorskip("tritonclient.http", reason="needs tritonclient[http]")
    tensor = OutputTensor("label", "BYTES", (len(texts),), texts, binary)
    body, length = build_response({"model_name": "m"}, [tensor])
    result = tritonclient.InferResult.from_response_body(body, header_length=length)
    values = result.as_numpy("label").tolist()
    assert [value.decode() if isinstance(value, bytes) else value for value in values] == texts
