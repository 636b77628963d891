"""``POST /feedback``: a label comes into the log, checked against the row that it is on."""

import hashlib
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from app.http.feedback import Feedback
from psc_core.log.erase import erase
from psc_core.log.labels import Label, join_labels, read_labels, write_labels
from psc_core.log.sample import images_of, reviewed_of
from psc_core.log.store import Log, open_log, read_rows
from psc_core.model import FittedModel
from tests.app.fakes import FakeModel, FakePipelineWithChecks, FakeValueModel, png
from tests.app.support import PNG, Running, running
from tests.psc_core.log.support import put_rows, row

pytestmark = pytest.mark.anyio


KEY = {"x-api-key": "reviewer"}
KEYS = {"feedback_keys": "reviewer", "api_keys": "client", "admin_keys": "admin"}


async def predict(app: Running, value: int, path: str = "/predict") -> str:
    answer = await app.client.post(path, content=png(value), headers={**PNG, "x-api-key": "client"})
    assert answer.status_code == 200
    return answer.headers["traceresponse"]


async def give(app: Running, **members: Any) -> tuple[int, dict[str, Any]]:
    answer = await app.client.post("/feedback", json=members, headers=KEY)
    return answer.status_code, answer.json()


async def test_labels_are_written(tmp_path: Path) -> None:
    models = {"m": FakeModel(), "v": FakeValueModel(version="w1")}
    async with running(models, log=str(tmp_path), log_sample=0, **KEYS) as app:
        dark, number = await predict(app, 0), await predict(app, 0, "/models/v/predict")
        digest = hashlib.sha256(png(0)).hexdigest()
        expected = {"request_id": dark[3:52], "image_index": 0, "image_sha256": digest, "kind": "label"}
        expected["is_stored"] = False
        assert await give(app, request_id=dark, label="bright") == (200, {**expected, "label": "bright"})
        unclear = await predict(app, BETWEEN)
        assert (await give(app, request_id=unclear, label="bright"))[1]["is_stored"]
        assert (await give(app, request_id=dark[3:52], image_sha256=digest, kind="cannot_tell"))[0] == 200
        assert (await give(app, request_id=number, label=12.5, source="a person"))[1]["label"] == "12.5"
    labels = read_labels(open_log(tmp_path))
    last = labels.of("m", dark[3:52], 0, digest)
    assert last is not None and (last.kind, last.label, last.source) == ("cannot_tell", None, "feedback")
    assert labels.of("m", "another", 0, digest) == last and labels.of("v", "another", 0, digest) != last
    value = labels.of("v", number[3:52], 0, None)
    assert value is not None and (value.label, value.source) == ("12.5", "a person")


async def test_a_class_that_was_added_may_be_said_of_images_from_before(tmp_path: Path) -> None:
    async with running(log=str(tmp_path), **KEYS) as app:
        name = await predict(app, 0)
        assert (await give(app, request_id=name, label="hedgehog"))[0] == 422
        assert app.service.log is not None
        app.service.log.log_of("m", FakeModel("v2", classes=("dark", "middle", "bright", "hedgehog")))
        assert (await give(app, request_id=name, label="hedgehog"))[0] == 200
        assert (await give(app, request_id=name, label="hedgehogs"))[0] == 422


async def test_what_is_none_of_the_classes_may_be_named(tmp_path: Path) -> None:
    async with running(log=str(tmp_path), **KEYS) as app:
        name = await predict(app, 0)
        status, written = await give(app, request_id=name, kind="none_of_the_classes", label=" a hedgehog ")
        assert (status, written["kind"], written["label"]) == (200, "none_of_the_classes", "a hedgehog")
        assert (await give(app, request_id=name, kind="none_of_the_classes", label="  "))[1]["label"] is None
        assert (await give(app, request_id=name, kind="cannot_tell", label="a hedgehog"))[0] == 400
        status, problem = await give(app, request_id=name, kind="none_of_the_classes", label=" dark")
        assert status == 422 and "send kind=label" in problem["detail"]
        app.service.log.log_of("m", FakeModel("v2", classes=("dark", "middle", "bright", "hedgehog")))
        assert (await give(app, request_id=name, kind="none_of_the_classes", label="hedgehog"))[0] == 200


def test_a_whole_number_is_the_class_of_that_name() -> None:
    assert Feedback(request_id="r", label=7).to_label().label == "7"
    assert Feedback(request_id="r", label=7.5).to_label().label == "7.5"


async def test_what_cannot_be_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(log=str(tmp_path), **KEYS) as app:
        name, other = await predict(app, 0), await predict(app, 1)
        kinds: list[tuple[dict[str, Any], int, str]] = [
            ({"request_id": "unknown", "label": "dark"}, 404, "unknown-image"),
            ({"request_id": name, "image_index": 1, "label": "dark"}, 404, "unknown-image"),
            ({"request_id": name, "image_sha256": "0" * 64, "label": "dark"}, 409, "image-conflict"),
            ({"request_id": name, "label": "drak"}, 422, "unusable-label"),
            ({"request_id": name, "label": 3}, 422, "unusable-label"),
            ({"request_id": name, "label": "cannot_tell"}, 422, "unusable-label"),
            ({"request_id": name, "kind": "none_of_the_classes", "label": "cannot_tell"}, 422, "unusable-label"),
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
        _, problem = await give(app, request_id=name, label="none_of_the_classes:hedgehog")
        assert "say kind=none_of_the_classes" in problem["detail"]
        digest = hashlib.sha256(png(0)).hexdigest()
        erase(open_log(tmp_path), digest)
        status, problem = await give(app, request_id=name, image_sha256=digest, label="dark")
        assert status == 409 and "was erased" in problem["detail"]
        for kind in ({"label": "dark"}, {"kind": "none_of_the_classes", "label": "somebody's name"}):
            status, problem = await give(app, request_id=name, **kind)  # Nothing would find it to erase it.
            assert status == 409 and "was erased" in problem["detail"]
        assert not [*open_log(tmp_path).names("labels")]
        monkeypatch.setattr(Log, "put", Mock(side_effect=OSError("gone")))
        assert (await give(app, request_id=other, label="dark"))[1]["type"] == "urn:psc:problem:log-unavailable"


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


REQUESTS = [
    ("POST", "/feedback", {"json": {"request_id": "x", "label": "dark"}}),
    *(("GET", path, {}) for path in ("/feedback/images", f"/feedback/images/{'0' * 64}.png", "/models/m/checked")),
]


@pytest.mark.parametrize(("method", "path", "body"), REQUESTS)
async def test_keys_of_its_own(tmp_path: Path, method: str, path: str, body: dict[str, Any]) -> None:
    async with running(log=str(tmp_path), **KEYS) as app:
        for key, is_let_in in (("client", False), ("reviewer", True), ("admin", True), ("", False)):
            answer = await app.client.request(method, path, headers={"x-api-key": key}, **body)
            assert (answer.status_code != 401) == is_let_in, key
        assert (await app.client.post("/predict", content=png(0), headers={**PNG, **KEY})).status_code == 401
    async with running(log=str(tmp_path)) as app:
        assert (await app.client.request(method, path, **body)).status_code == 403
    async with running(feedback_keys="reviewer") as app:
        assert (await app.client.request(method, path, headers=KEY, **body)).status_code == 404


async def test_a_label_of_an_old_image_does_not_hold_up_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row may be there, so this is another answer than that of an image without a row."""
    async with running(log=str(tmp_path), **KEYS) as app:
        old = await predict(app, 0)
        assert (await give(app, request_id=old, label="dark"))[0] == 200
        for number in range(20):
            put_rows(open_log(tmp_path), [row(number, image_path=None)], day="2100-01-01")
        read = Log.names

        def slowly(log: Log, folder: str = "", *, suffix: str = "") -> Iterator[tuple[str, datetime]]:
            for each in read(log, folder, suffix=suffix):
                time.sleep(0.05)
                yield each

        monkeypatch.setattr(Log, "names", slowly)
        assert app.service.log is not None
        app.service.log.search_seconds = 0.3
        status, problem = await give(app, request_id=old, label="dark")
        assert status == 504 and "2100-01-01" in problem["detail"] and "psc-log import" in problem["detail"]


BETWEEN = 64  # Between two classes: ambiguous.


async def shown(app: Running, **query: Any) -> dict[str, Any]:
    answer = await app.client.get("/feedback/images", params=query, headers=KEY)
    assert answer.status_code == 200
    document: dict[str, Any] = answer.json()
    return document


def settings(folder: Path) -> dict[str, Any]:
    return {**KEYS, "log": str(folder), "log_images": "abstained", "log_sample": 0.0}


async def test_images_are_shown_until_they_are_reviewed(tmp_path: Path) -> None:
    checked: FittedModel = FakeModel(pipeline=FakePipelineWithChecks(), checks=("texture", "content"))
    models = {"m": checked, "v": FakeValueModel(version="w1")}
    async with running(models, **settings(tmp_path)) as app:
        first = await predict(app, BETWEEN)
        await predict(app, 0)  # Accepted, so it is neither stored nor shown.
        number = await predict(app, 255, "/models/v/predict")
        document = await shown(app)
        assert [each["request_id"] for each in document["images"]] == [number[3:52], first[3:52]]
        value, image = document["images"]
        digest = hashlib.sha256(png(BETWEEN)).hexdigest()
        assert (image["image_index"], image["image_sha256"], image["file"]) == (0, digest, f"{digest}.png")
        assert (image["decision"], image["label"], image["model"]) == ("abstain_ambiguous", "middle", "m")
        assert set(image["checks"]) == {"texture", "content"} and image["scores"]["ood_p_value"] > 0
        assert image["policy"]["ambiguity_threshold"] == 0.5
        classifier = {"task": "classification", "classes": ["dark", "middle", "bright"], "target": None}
        assert document["models"][image["bundle_version"]] == classifier
        assert value["label"] is None and document["models"]["w1"]["target"]["unit"] == "%"
        assert [each["model"] for each in (await shown(app, limit=1))["images"]] == ["v"]
        answer = await app.client.get(f"/feedback/images/{image['file']}", headers=KEY)
        assert (answer.content, answer.headers["content-type"]) == (png(BETWEEN), "image/png")
        assert answer.headers["cache-control"] == "no-store" and answer.headers["x-content-type-options"] == "nosniff"
        body = {"request_id": image["request_id"], "kind": "none_of_the_classes"}
        assert (await app.client.post("/feedback", json=body, headers=KEY)).status_code == 200
        assert [each["model"] for each in (await shown(app))["images"]] == ["v"]
        assert await app.metric('psc_feedback_total{kind="none_of_the_classes"}') == 1
        erase(open_log(tmp_path), value["image_sha256"])
        assert await shown(app) == {"images": [], "models": {}, "back_to": None}
        for file in (value["file"], "x.png", f"{'0' * 64}.png", "..%2F..%2Flabels"):
            answer = await app.client.get(f"/feedback/images/{file}", headers=KEY)
            assert answer.status_code == 404, file


async def test_a_label_of_a_shown_image_calibrates_only_within_the_random_sample(tmp_path: Path) -> None:
    async with running(**settings(tmp_path)) as app:
        for value in (BETWEEN, BETWEEN + 1, BETWEEN - 1):
            await predict(app, value)
        for image in (await shown(app))["images"]:
            body = {"request_id": image["request_id"], "image_index": image["image_index"], "label": "dark"}
            assert (await app.client.post("/feedback", json=body, headers=KEY)).status_code == 200
    log = open_log(tmp_path)
    labels = read_labels(log)
    kinds = [each for batch in join_labels(read_rows(log, "m"), labels, "m") for each in batch["kind"].to_pylist()]
    assert kinds == ["label"] * 3
    assert reviewed_of(images_of(join_labels(read_rows(log, "m", sampled=True), labels, "m"))) == []


async def test_the_sample_of_accepted_images_is_listed_if_asked_for_and_counted_once_checked(tmp_path: Path) -> None:
    models = {"m": FakeModel(), "v": FakeValueModel(version="w1")}
    async with running(models, **{**settings(tmp_path), "log_sample": 1.0}) as app:
        dark = [await predict(app, value) for value in range(4)]
        await predict(app, BETWEEN)
        number = await predict(app, BETWEEN, "/models/v/predict")
        (image,) = (await shown(app))["images"]
        first, second, *_ = sorted(image["likely"].items(), key=lambda each: -each[1])
        assert {first[0], second[0]} == {"dark", "middle"} and first[1] + second[1] == pytest.approx(1.0, abs=0.01)
        listed = (await shown(app, decision="accept,abstain_ambiguous", model="m"))["images"]
        assert [each["decision"] for each in listed] == ["abstain_ambiguous", *["accept"] * 4]

        async def counts(model: str) -> tuple[int, int]:
            answer = await app.client.get(f"/models/{model}/checked", headers=KEY)
            assert answer.json()["back_to"] is None
            return answer.json()["checked"], answer.json()["right"]

        assert await counts("m") == await counts("v") == (0, 0)
        for name, said in zip(dark, ({"label": "dark"}, {"label": "bright"}, {}, {}), strict=True):
            kind = "label" if said else "cannot_tell"
            assert (await give(app, request_id=name, kind=kind, **said))[0] == 200
        await give(app, request_id=image["request_id"], label="bright")  # It was not accepted.
        assert await counts("m") == (2, 1)
        await give(app, request_id=dark[1], label="dark")  # The last label counts.
        await give(app, request_id=dark[2], kind="none_of_the_classes", label="hedgehog")
        assert await counts("m") == (3, 2)
        digest, now = hashlib.sha256(png(2)).hexdigest(), datetime.now(UTC)
        said = Label(None, None, digest, "none_of_the_classes", "dark", "x", now, "m")
        write_labels(open_log(tmp_path), [said])  # A class that was added since, said of another row of the image.
        assert await counts("m") == (3, 3)
        own = {"request_id": dark[2][3:52], "image_index": 0, "time": now + timedelta(seconds=1)}
        write_labels(open_log(tmp_path), [replace(said, **own)])  # Of this answer, as long as it was not refused.
        assert await counts("m") == (3, 2)
        await give(app, request_id=number, label=30)
        assert await counts("v") == (0, 0)  # Of a number, nothing is simply right.


async def test_what_only_a_cluster_has_named_is_listed_for_a_name(tmp_path: Path) -> None:
    async with running(**{**settings(tmp_path), "log_sample": 1.0}) as app:
        sent = [await predict(app, value) for value in (*range(5), BETWEEN)]
        for name, of in zip(("cluster 1", "cluster 2", None), (sent[:2], sent[2:5], sent[5:]), strict=True):
            for each in of:
                assert (await give(app, request_id=each, kind="none_of_the_classes", label=name))[0] == 200
        listed = (await shown(app, to_name=True))["images"]
        expected = [*[("cluster 2", each[3:52]) for each in sent[4:1:-1]], ("cluster 1", sent[1][3:52])]
        assert [(each["name"], each["request_id"]) for each in listed] == [*expected, ("cluster 1", sent[0][3:52])]
        assert {each["decision"] for each in listed} == {"accept"} and listed[0]["likely"]
        limited = (await shown(app, to_name=True, model="m", limit=4, decision="abstain_ood"))["images"]
        assert [(each["name"], each["request_id"]) for each in limited] == expected
        assert (await shown(app, to_name=True, model="v"))["images"] == []
        new = await predict(app, BETWEEN + 1)
        assert [(each["name"], each["request_id"]) for each in (await shown(app))["images"]] == [(None, new[3:52])]
        answer = await app.client.get("/feedback/images", params={"to_name": "perhaps"}, headers=KEY)
        assert (answer.status_code, answer.json()["type"]) == (400, "urn:psc:problem:malformed")


async def test_a_search_that_had_no_time_for_all_says_so(tmp_path: Path) -> None:
    async with running(**settings(tmp_path)) as app:
        put_rows(open_log(tmp_path), [row(1, decision="abstain_ood")])
        assert app.service.log is not None
        app.service.log.search_seconds = 0.0
        assert await shown(app) == {"images": [], "models": {}, "back_to": "2026-03-01"}

        async def checked() -> dict[str, Any]:
            answer = await app.client.get("/models/m/checked", headers=KEY)
            found: dict[str, Any] = answer.json()
            return found

        assert await checked() == {"checked": 0, "right": 0, "back_to": None}  # Of the last seven days there is none.
        put_rows(open_log(tmp_path), [row(2)], day="2100-01-01")
        assert await checked() == {"checked": 0, "right": 0, "back_to": "2100-01-01"}


async def test_a_damaged_log_shows_no_images(tmp_path: Path) -> None:
    async with running(**settings(tmp_path)) as app:
        (tmp_path / "labels").mkdir()
        (tmp_path / "labels" / "part-1.parquet").write_bytes(b"PAR1 torn")
        await predict(app, BETWEEN)
        answer = await app.client.get("/feedback/images", headers=KEY)
        assert answer.json()["type"] == "urn:psc:problem:log-unavailable" and str(tmp_path) not in answer.text
