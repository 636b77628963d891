"""What a page shows beside a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.http.model import MAX_FILE_BYTES, MAX_FILES
from tests.app.fakes import FakeModel, png
from tests.app.support import PNG, running
from tests.conftest import ROOT

pytestmark = pytest.mark.anyio


async def test_live_counts_the_last_images() -> None:
    async with running({"m": FakeModel()}, max_queue_images=900, alpha=0.2) as app:
        assert (await app.client.get("/models/m/live")).json() == {
            "images": 0, "ood_fraction": 0.0, "alpha": 0.2, "drift_active": False, "drift_alarms": 0,
            "queued_images": 0, "queue_limit": 900,
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
    async with running({"m": FakeModel()}, bundle=(f"m={tmp_path}",)) as app:
        assert (await app.client.get("/models/m/examples")).json() == {"files": ["a.PNG", "b.png"]}
        answer = await app.client.get("/models/m/examples/b.png")
        assert (answer.content, answer.headers["content-type"]) == (png(1), "image/png")
        for other in ("link.png", "huge.png", "notes.txt", "..%2Fmanifest.json", "c.png"):
            assert (await app.client.get(f"/models/m/examples/{other}")).status_code == 404, other
        for number in range(20):
            (folder / f"c{number}.png").write_bytes(png(4))
        assert len((await app.client.get("/models/m/examples")).json()["files"]) == MAX_FILES


async def test_documents_name_the_limits_of_examples() -> None:
    async with running() as app:
        operation = (await app.client.get("/openapi.json")).json()["paths"]["/models/{name}/examples"]["get"]
    assert operation["description"].endswith(f"at most {MAX_FILES} of at most {MAX_FILE_BYTES >> 20} MiB.")
    documented = (ROOT / "docs" / "service.md").read_text()
    assert f"`examples` of the bundle, at most {MAX_FILES} of at most {MAX_FILE_BYTES >> 20} MiB |" in documented


async def test_a_model_without_examples() -> None:
    async with running(api_keys=("key",)) as app:
        assert (await app.client.get("/models/m/examples")).status_code == 401
        headers = {"X-API-Key": "key"}
        assert (await app.client.get("/models/m/examples", headers=headers)).json() == {"files": []}
        assert (await app.client.get("/models/x/examples", headers=headers)).status_code == 404
