"""``POST /feedback``: a label comes into the log, checked against the row that it is on."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from app.http.feedback import Feedback
from psc_core.log.erase import erase
from psc_core.log.labels import read_labels
from psc_core.log.store import Log, open_log
from tests.app.fakes import FakeModel, FakeValueModel, png
from tests.app.support import PNG, Running, running

pytestmark = pytest.mark.anyio

KEY = {"x-api-key": "reviewer"}
KEYS = {"feedback_keys": "reviewer", "api_keys": "client", "admin_keys": "admin"}


async def predict(app: Running, value: int, path: str = "/predict") -> str:
    """Predict an image; the header that names the request."""
    answer = await app.client.post(path, content=png(value), headers={**PNG, "x-api-key": "client"})
    assert answer.status_code == 200
    return answer.headers["traceresponse"]


async def give(app: Running, **members: Any) -> tuple[int, dict[str, Any]]:
    answer = await app.client.post("/feedback", json=members, headers=KEY)
    return answer.status_code, answer.json()


async def test_labels_are_written(tmp_path: Path) -> None:
    models = {"m": FakeModel(), "v": FakeValueModel(version="w1")}
    async with running(models, log=str(tmp_path), **KEYS) as app:
        dark, number = await predict(app, 0), await predict(app, 0, "/models/v/predict")
        digest = hashlib.sha256(png(0)).hexdigest()
        expected = {"request_id": dark[3:52], "image_index": 0, "image_sha256": digest, "kind": "label"}
        assert await give(app, request_id=dark, label="bright") == (200, {**expected, "label": "bright"})
        assert (await give(app, request_id=dark[3:52], image_sha256=digest, kind="cannot_tell"))[0] == 200
        assert (await give(app, request_id=number, label=12.5, source="a person"))[1]["label"] == "12.5"
    labels = read_labels(open_log(tmp_path))
    last = labels.of("m", dark[3:52], 0, digest)
    assert last is not None and (last.kind, last.label, last.source) == ("cannot_tell", None, "feedback")
    assert labels.of("m", "another", 0, digest) == last and labels.of("v", "another", 0, digest) != last
    value = labels.of("v", number[3:52], 0, None)
    assert value is not None and (value.label, value.source) == ("12.5", "a person")


def test_a_whole_number_is_the_class_of_that_name() -> None:
    assert Feedback(request_id="r", label=7).to_label().label == "7"
    assert Feedback(request_id="r", label=7.5).to_label().label == "7.5"


async def test_what_cannot_be_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(log=str(tmp_path), **KEYS) as app:
        name = await predict(app, 0)
        kinds: list[tuple[dict[str, Any], int, str]] = [
            ({"request_id": "unknown", "label": "dark"}, 404, "unknown-image"),
            ({"request_id": name, "image_index": 1, "label": "dark"}, 404, "unknown-image"),
            ({"request_id": name, "image_sha256": "0" * 64, "label": "dark"}, 409, "image-conflict"),
            ({"request_id": name, "label": "drak"}, 422, "unusable-label"),
            ({"request_id": name, "label": 3}, 422, "unusable-label"),
            ({"request_id": name}, 400, "malformed"),
            ({"request_id": name, "kind": "cannot_tell", "label": "dark"}, 400, "malformed"),
            ({"request_id": name, "kind": "perhaps"}, 400, "malformed"),
            ({"request_id": name, "image_index": True, "label": "dark"}, 400, "malformed"),
            ({"request_id": name, "image_index": 1 << 31, "label": "dark"}, 400, "malformed"),
            ({"request_id": name, "image_sha256": "x", "label": "dark"}, 400, "malformed"),
            ({"request_id": name, "label": "dark", "more": 1}, 400, "malformed"),
        ]
        for members, status, slug in kinds:
            got, problem = await give(app, **members)
            assert (got, problem["type"]) == (status, f"urn:psc:problem:{slug}"), members
        digest = hashlib.sha256(png(0)).hexdigest()
        erase(open_log(tmp_path), digest)
        status, problem = await give(app, request_id=name, image_sha256=digest, label="dark")
        assert status == 409 and "was erased" in problem["detail"]

        def fail(*_: Any, **__: Any) -> None:
            raise OSError("gone")

        monkeypatch.setattr(Log, "put", fail)
        assert (await give(app, request_id=name, label="dark"))[1]["type"] == "urn:psc:problem:log-unavailable"


@pytest.mark.parametrize("damaged", ["day=*/*.parquet", "*.json"])
async def test_a_damaged_log_is_no_fault_of_the_client(tmp_path: Path, damaged: str) -> None:
    async with running(log=str(tmp_path), **KEYS) as app:
        name = await predict(app, 0)
        assert (await give(app, request_id=name, label="dark"))[0] == 200
        files = [path for path in tmp_path.rglob(damaged) if path.is_file()]
        assert files
        for path in files:
            path.write_bytes(b"PAR1 torn")
        status, problem = await give(app, request_id=name, label="dark")
        assert (status, problem["type"]) == (503, "urn:psc:problem:log-unavailable")
        assert str(tmp_path) not in problem["detail"]


async def test_keys_of_its_own(tmp_path: Path) -> None:
    body = {"request_id": "x", "label": "dark"}
    async with running(log=str(tmp_path), **KEYS) as app:
        for key, status in (("client", 401), ("reviewer", 404), ("admin", 404), (None, 401)):
            headers = {} if key is None else {"x-api-key": key}
            assert (await app.client.post("/feedback", json=body, headers=headers)).status_code == status
        assert (await app.client.post("/predict", content=png(0), headers={**PNG, **KEY})).status_code == 401
    async with running(log=str(tmp_path)) as app:
        assert (await app.client.post("/feedback", json=body)).status_code == 403
    async with running(feedback_keys="reviewer") as app:
        answer = await app.client.post("/feedback", json=body, headers=KEY)
        assert answer.json()["type"] == "urn:psc:problem:not-found"
