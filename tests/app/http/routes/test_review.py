"""``GET /feedback/images``: what was not accepted is shown to reviewers, until it is reviewed or erased."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from app.http.feedback import MAX_IMAGES
from app.log import LogWriter
from psc_core.calibrate import images_of, reviewed_of
from psc_core.log.erase import erase
from psc_core.log.labels import joined, read_labels
from psc_core.log.review import UnreviewedImages
from psc_core.log.store import open_log, read_rows
from psc_core.model import FittedModel
from tests.app.fakes import FakeModel, FakePipelineWithChecks, FakeValueModel, png
from tests.app.http.routes.test_feedback import KEY, KEYS, predict
from tests.app.support import Running, running

pytestmark = pytest.mark.anyio

BETWEEN = 64  # Between two classes: ambiguous.


async def shown(app: Running, **query: Any) -> dict[str, Any]:
    answer = await app.client.get("/feedback/images", params=query, headers=KEY)
    assert answer.status_code == 200
    document: dict[str, Any] = answer.json()
    return document


def settings(folder: Path) -> dict[str, Any]:
    return {**KEYS, "log": str(folder), "log_images": "abstained", "log_sample": 0.0}


async def test_images_are_shown_until_they_are_reviewed(tmp_path: Path) -> None:
    gated: FittedModel = FakeModel(pipeline=FakePipelineWithChecks(), checks=("texture", "content"))
    models = {"m": gated, "v": FakeValueModel(version="w1")}
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
        assert await shown(app) == {"images": [], "models": {}}
        for file in (value["file"], "x.png", f"{'0' * 64}.png", "..%2F..%2Flabels"):
            answer = await app.client.get(f"/feedback/images/{file}", headers=KEY)
            assert answer.status_code == 404, file


async def test_a_verdict_on_a_shown_image_calibrates_only_within_the_slice(tmp_path: Path) -> None:
    async with running(**settings(tmp_path)) as app:
        for value in (BETWEEN, BETWEEN + 1, BETWEEN - 1):
            await predict(app, value)
        for image in (await shown(app))["images"]:
            body = {"request_id": image["request_id"], "image_index": image["image_index"], "label": "dark"}
            assert (await app.client.post("/feedback", json=body, headers=KEY)).status_code == 200
    log = open_log(tmp_path)
    labels = read_labels(log)
    labels = [each for batch in joined(read_rows(log, "m"), labels, "m") for each in batch["kind"].to_pylist()]
    assert labels == ["label"] * 3
    assert reviewed_of(images_of(joined(read_rows(log, "m", sampled=True), labels, "m"))) == []


async def test_a_slow_log_gives_what_was_found_before_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The waits of a search are parts of the deadline, so that it ends with time to read the models."""
    waits: list[float] = []
    newest = UnreviewedImages.newest
    monkeypatch.setattr(LogWriter, "flush", lambda _, within_s: waits.append(within_s))
    monkeypatch.setattr(
        UnreviewedImages,
        "newest",
        lambda self, *, limit, seconds: waits.append(seconds) or newest(self, limit=limit, seconds=seconds),
    )
    for deadline, expected in ((3.0, 1.0), (60.0, 5.0)):
        waits.clear()
        async with running(deadline_seconds=deadline, **settings(tmp_path)) as app:
            await shown(app)
            body = {"request_id": "0-0", "label": "dark"}
            assert (await app.client.post("/feedback", json=body, headers=KEY)).status_code == 404
        assert waits == [expected] * 3


async def test_only_for_holders_of_a_key_and_within_limits(tmp_path: Path) -> None:
    async with running(**settings(tmp_path)) as app:
        for path in ("/feedback/images", f"/feedback/images/{'0' * 64}.png"):
            for key in ("client", None):
                headers = {} if key is None else {"x-api-key": key}
                assert (await app.client.get(path, headers=headers)).status_code == 401
        for limit in (0, MAX_IMAGES + 1, "many"):
            answer = await app.client.get("/feedback/images", params={"limit": limit}, headers=KEY)
            assert answer.status_code == 400
        (tmp_path / "labels").mkdir()
        (tmp_path / "labels" / "part-1.parquet").write_bytes(b"PAR1 torn")
        await predict(app, BETWEEN)
        answer = await app.client.get("/feedback/images", headers=KEY)
        assert answer.json()["type"] == "urn:psc:problem:log-unavailable" and str(tmp_path) not in answer.text
    async with running(log=str(tmp_path)) as app:
        assert (await app.client.get("/feedback/images")).status_code == 403
    async with running(**KEYS) as app:
        assert (await app.client.get("/feedback/images", headers=KEY)).status_code == 404
