"""The log: what is drawn, rows beside the answers, the thread that writes them, and the removal of old ones."""

import asyncio
import base64
import gc
import hashlib
import io
import json
import os
import re
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from app.inference.decoder import EncodedImage
from app.log import ROW_BYTES, ModelLog, OpenRows, Sampling, Waiting, day_of, keep_pruned, number_of
from app.settings import load_settings
from psc_core.answers import CLASSIFICATION_SCORES, Target
from psc_core.answers import REGRESSION_SCORES as VALUE_SCORES
from psc_core.errors import UsageError
from psc_core.log.store import Log, LoggedModel, days_of, file_of, image_path, open_log, read_model, read_rows
from psc_core.tasks.classification import Classification
from psc_core.tasks.regression import Regression
from tests.app.fakes import FakeModel, FakePipelineWithChecks, FakeValueModel, pixels, png
from tests.app.support import PNG, Running, running, serve_next, until
from tests.served import GUARD_SECONDS, HTTP, Server, serve_fake

pytestmark = pytest.mark.anyio


ROWS = 'psc_log_rows_total{model="m",result="%s"}'
IMAGES = 'psc_log_images_total{model="m",result="%s"}'


def log_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "psc-log"}


async def counts(app: Running) -> tuple[float, ...]:
    return tuple([await app.metric(name % result) for name in (ROWS, IMAGES) for result in ("written", "dropped")])


async def until_counted(app: Running, wanted: tuple[int, ...]) -> None:
    async with asyncio.timeout(60):
        while await counts(app) != wanted:
            await asyncio.sleep(0.01)


async def send(app: Running, *values: int) -> None:
    for value in values:
        assert (await app.client.post("/predict", content=png(value), headers=PNG)).status_code == 200


def rows_in(folder: Path) -> list[dict[str, Any]]:
    return [row for batch in read_rows(open_log(folder), "m") for row in batch.to_pylist()]


async def test_one_file_of_the_rows_of_a_while(tmp_path: Path) -> None:
    async with running(log=str(tmp_path), log_sample=0) as app:
        await send(app, 0, 255, 70)
        assert rows_in(tmp_path) == [] and app.service.log is not None and app.service.log.held_bytes > 0
        assert await app.metric("psc_log_held_bytes") > 0
    assert [row["label"] for row in rows_in(tmp_path)] == ["dark", "bright", "middle"]
    assert [row["image_path"] is not None for row in rows_in(tmp_path)] == [False, False, True]
    assert len(list(tmp_path.rglob("*.parquet"))) == 1
    assert app.service.log.held_bytes == 0


async def test_replaced_models_are_forgotten(tmp_path: Path) -> None:
    async with running(log=str(tmp_path), log_flush_seconds=0.05, log_sample=0, admin_keys="root") as app:
        log = app.service.registry.get().log
        assert log is not None
        source = weakref.ref(log)
        del log
        await send(app, 0)
        await until_counted(app, (1, 0, 0, 0))
        serve_next(app, FakeModel("v2"))
        assert (await app.client.post("/admin/reload", headers={"x-api-key": "root"})).status_code == 200

        def is_forgotten() -> bool:
            gc.collect()
            return source() is None

        await until(is_forgotten, 60)


async def test_only_what_is_drawn_is_written(tmp_path: Path) -> None:
    async with running(log=str(tmp_path), log_rows=0.3, log_sample=0.1, log_images="accept:0.2") as app:
        await send(app, *[0] * 100)
    rows = rows_in(tmp_path)
    assert 0 < len(rows) < 100
    assert {(row["sampling_probability"], row["sample_probability"]) for row in rows} == {(0.3, 0.1)}
    assert all(row["image_path"] for row in rows if row["sampled"])
    assert 0 < sum(row["sampled"] for row in rows) <= sum(row["image_path"] is not None for row in rows) < len(rows)


async def test_images_that_are_not_monitored_are_never_in_the_random_sample(tmp_path: Path) -> None:
    async with running(log=str(tmp_path), log_sample=1.0) as app:
        for query in ("", "?monitor=false"):
            await app.client.post(f"/predict{query}", content=png(0), headers=PNG)
    assert [(row["sampled"], row["sample_probability"]) for row in rows_in(tmp_path)] == [(True, 1.0), (False, 0.0)]


async def test_full_disk_drops_and_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put, is_full = Log.put, True

    def full(log: Log, name: str, data: Any, **options: Any) -> None:
        if is_full:
            raise OSError(28, "No space left on device")
        put(log, name, data, **options)

    async with running(log=str(tmp_path), log_flush_seconds=0.05, log_sample=1.0) as app:
        monkeypatch.setattr(Log, "put", full)
        await send(app, 0, 255)
        await until_counted(app, (0, 2, 0, 2))
        is_full = False  # Room again: the log goes on.
        await send(app, 70)
        await until(lambda: len(rows_in(tmp_path)) == 1)
    assert rows_in(tmp_path)[0]["image_path"] is not None


async def test_bucket_that_hangs_delays_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check, hangs, before = threading.Event(), threading.Event(), log_threads()

    def hang(*_: Any, **__: Any) -> None:
        hangs.set()
        check.wait(60)
        raise OSError("timed out")

    settings = {"log_buffer_bytes": 1 << 16, "log_sample": 1.0, "drain_seconds": 0.2}
    async with running(log=str(tmp_path), **settings) as app:
        monkeypatch.setattr(Log, "put", hang)
        await send(app, 0)
        await until(hangs.is_set)
        await send(app, *[0] * 200)  # All answered, though nothing is written.
        assert app.service.log is not None and app.service.log.held_bytes <= 1 << 16
        rows, images = (await counts(app))[1::2]
        assert 0 < rows < 201 and images == 0
    # At the end the rest is lost, within drain_seconds.
    assert f"{ROWS % 'dropped'} 201.0" in app.service.metrics.exposition()[0].decode()
    check.set()
    await until(lambda: not log_threads() - before)


async def test_rows_that_were_given_up_are_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check, hangs, before = threading.Event(), threading.Event(), log_threads()
    async with running(log=str(tmp_path), log_flush_seconds=3600, log_sample=0, drain_seconds=0.2) as app:
        await send(app, 0, 255)
        log = app.service.log
        assert log is not None
        monkeypatch.setattr(Log, "put", lambda *_, **__: (hangs.set(), check.wait(60)))
        assert not log.flush(0)
        await until(hangs.is_set)  # Both rows are open, and are being written.
    dropped = f"{ROWS % 'dropped'} 2.0"
    assert dropped in app.service.metrics.exposition()[0].decode()
    check.set()
    await until(lambda: not log_threads() - before)
    assert dropped in app.service.metrics.exposition()[0].decode()


async def test_flush_is_not_done_when_the_one_before_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put, check, hangs = Log.put, threading.Event(), threading.Event()

    def hang(log: Log, name: str, data: Any, **options: Any) -> None:
        hangs.set()
        check.wait(60)
        put(log, name, data, **options)

    async with running(log=str(tmp_path), log_flush_seconds=3600, log_sample=0) as app:
        log = app.service.log
        assert log is not None
        monkeypatch.setattr(Log, "put", hang)
        await send(app, 0)
        assert not log.flush(0)
        await until(hangs.is_set)
        await send(app, 255)
        second = asyncio.create_task(asyncio.to_thread(log.flush, 60))
        await asyncio.sleep(0.1)  # So that it asks before the first is done; the other way round shows nothing.
        check.set()
        assert await second
        assert {row["label"] for row in rows_in(tmp_path)} == {"dark", "bright"}


async def test_rows_are_written_though_predictions_come_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put = Log.put

    def put_slowly(log: Log, name: str, data: Any, **options: Any) -> None:
        time.sleep(0.02)
        put(log, name, data, **options)

    async with running(log=str(tmp_path), log_flush_seconds=0.05, log_sample=1.0) as app:
        log = app.service.log
        assert log is not None

        async def stream() -> None:
            while True:
                await send(app, 0)

        with monkeypatch.context() as patch:
            patch.setattr(Log, "put", put_slowly)
            streaming = asyncio.create_task(stream())
            try:
                await until(lambda: list(tmp_path.rglob("*.parquet")))
                assert await asyncio.to_thread(log.flush, 60)
            finally:
                streaming.cancel()


async def test_bug_in_the_thread_ends_neither_log_nor_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(log=str(tmp_path), log_flush_seconds=0.05, log_sample=0) as app:
        monkeypatch.setattr("app.log.OpenRows.to_parquet", lambda _: 1 / 0)
        await send(app, 0)
        await until_counted(app, (0, 1, 0, 0))
        monkeypatch.undo()
        await send(app, 0)
        await until(lambda: len(rows_in(tmp_path)) == 1)
        assert app.service.log is not None and app.service.log.held_bytes == 0


async def test_pixels_are_stored_as_a_file(tmp_path: Path) -> None:
    images = {"name": "images", "datatype": "UINT8", "shape": [2, 8, 8, 1]}
    data = [*pixels(10).ravel().tolist(), *pixels(200).ravel().tolist()]
    async with running(log=str(tmp_path), log_sample=1.0) as app:
        answer = await app.client.post("/v2/models/m/infer", json={"inputs": [{**images, "data": data}]})
        assert answer.status_code == 200
    rows = rows_in(tmp_path)
    assert [row["image_index"] for row in rows] == [0, 1]
    assert {Path(row["image_path"]).suffix for row in rows} == {".dib"}
    async with running() as app:
        for row in rows:
            file = (tmp_path / row["image_path"]).read_bytes()
            again = (await app.client.post("/predict", content=file, headers={"content-type": "image/bmp"})).json()
            assert again["predictions"][0]["label"] == row["label"]


async def test_old_days_are_removed(tmp_path: Path) -> None:
    old = tmp_path / "model=m" / "day=2020-01-01"
    old.mkdir(parents=True)
    (old / "part-1.parquet").touch()
    async with running(log=str(tmp_path), log_days=30) as app:
        await until(lambda: not old.exists())
        await send(app, 0)
    days = (datetime.now(UTC) - timedelta(days=back) for back in (0, 1))
    assert days_of(open_log(tmp_path), "m")[0] in {day_of(int(day.timestamp() * 1e6)) for day in days}


async def test_reloaded_model_logs_its_own_version(tmp_path: Path) -> None:
    async with running(log=str(tmp_path)) as app:
        await send(app, 0)
        app.models.upcoming = [FakeModel(version="v2")]  # type: ignore[list-item]
        await app.service.registry.reload(None)
        await send(app, 0)
    assert sorted(row["bundle_version"] for row in rows_in(tmp_path)) == ["v1", "v2"]
    assert sorted(file.name for file in (tmp_path / "models").iterdir()) == ["v1.json", "v2.json"]
    assert all(len(set(batch["bundle_version"].to_pylist())) == 1 for batch in read_rows(open_log(tmp_path), "m"))


async def test_a_log_that_is_moved_away_begins_anew(tmp_path: Path) -> None:
    async with running(log=str(tmp_path / "log")) as app:
        assert app.service.log is not None
        for name in ("old", "older"):
            await send(app, 0)
            assert await asyncio.to_thread(app.service.log.flush, 10.0)
            (tmp_path / "log").rename(tmp_path / name)
            assert read_model(open_log(tmp_path / name), "v1").classes == FakeModel().classes


async def test_log_that_cannot_be_written_to_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError):
        async with running(log=str(tmp_path / "file")):
            pass


VALUES = (0, 64, 255, 128)  # brightness of the images of a request, of which the second is ambiguous
NOON = 1_700_049_600_000_000  # 15 November 2023, 12:00 UTC, microseconds


def request(sampling: Sampling, model: FakeModel | None = None, *, is_monitored: bool = True) -> Waiting:
    model = model or FakeModel()
    images = torch.stack([torch.from_numpy(pixels(value))[None] for value in VALUES])
    outputs = model.outputs(model.pipeline(images).numpy())
    decisions = model.calibration.decide(outputs, model.policy)
    source = ModelLog(None, "m", LoggedModel(model.version, model.task, model.classes), sampling)
    files = [EncodedImage(png(value)) for value in VALUES]
    return Waiting(source, NOON, "r", files, outputs, decisions, model.policy, is_monitored, 100)


def written(rows: OpenRows) -> list[dict[str, Any]]:
    table: list[dict[str, Any]] = pq.read_table(io.BytesIO(rows.to_parquet())).to_pylist()
    return table


def test_an_image_is_drawn_by_its_number_and_decision() -> None:
    least = number_of("r", 0)
    made = request(Sampling(0.0, (least, 1.0, 1.0), (0.0, 0.0, 0.0)))
    accepted = [index for index in (0, 2, 3) if number_of("r", index) < least]
    assert [index for index, _ in made.drawn()] == sorted([1, *accepted]) and 0 not in accepted
    assert all(u == number_of("r", index) for index, u in made.drawn())


def test_rows_say_what_was_answered_and_which_images_are_stored() -> None:
    made = request(Sampling(0.0, (1.0, 1.0, 1.0), (0.0, 1.0, 1.0)))
    rows = OpenRows(made.source, day_of(NOON))
    (image,) = rows.add(made, made.drawn())
    digest = hashlib.sha256(png(64)).hexdigest()
    assert (image.path, image.data, image.row) == (image_path(digest, "png"), png(64), 1)
    assert len(rows) == 4 and rows.size == made.outputs.packed.nbytes + 4 * ROW_BYTES
    assert [row["image_path"] for row in written(rows)] == [None] * 4
    rows.stored(image)
    found = written(rows)
    assert [row["image_path"] for row in found] == [None, image.path, None, None]
    assert [row["label"] for row in found] == ["dark", "middle", "bright", "middle"]
    assert [row["decision"] for row in found] == ["accept", "abstain_ambiguous", "accept", "accept"]
    assert {(row["request_id"], row["bundle_version"], row["sampling_probability"]) for row in found} == {
        ("r", "v1", 1)
    }
    assert [row["image_index"] for row in found] == [0, 1, 2, 3] and rows.day == "2023-11-15"
    assert [row["predictive_entropy"] for row in found] == made.outputs["predictive_entropy"].tolist()


def test_only_images_that_came_as_pixels_are_stored_as_network_inputs() -> None:
    made = request(Sampling(0.0, (1.0, 1.0, 1.0), (1.0, 1.0, 1.0)))
    inputs = np.stack([pixels(value)[None] for value in VALUES])
    files = [EncodedImage(file_of(each)) for each in inputs]
    for images, suffix in ((inputs, ".dib"), (files, ".bmp")):
        stored = OpenRows(made.source, day_of(NOON)).add(made._replace(images=images), made.drawn())
        assert [Path(each.path).suffix for each in stored] == [suffix] * 4
        assert [each.data for each in stored] == [file.data for file in files]


def test_a_regression_has_neither_labels_nor_probabilities() -> None:
    made = request(Sampling(0.0, (1.0, 1.0, 1.0), (0.0, 0.0, 0.0)), FakeValueModel())
    rows = OpenRows(made.source, day_of(NOON))
    assert rows.add(made, made.drawn()) == []
    found = written(rows)
    assert {(row["label"], row["probabilities"]) for row in found} == {(None, None)}
    assert [row["mean"] for row in found] == made.outputs["mean"].tolist()


def sampling(task: object = None, **settings: object) -> Sampling:
    return Sampling.of(load_settings(settings), task or Classification())  # type: ignore[arg-type]


def test_probabilities_by_decision() -> None:
    assert sampling() == Sampling(0.01, (1.0, 1.0, 1.0), (0.01, 1.0, 1.0))
    drawn = sampling(log_rows=0.1, log_sample=0.02, log_images="abstain_ood,abstain_ambiguous:0.5,accept:0.01")
    assert drawn == Sampling(0.02, (0.1, 0.5, 1.0), (0.02, 0.5, 1.0))
    of_value = sampling(Regression(target=Target(name="x")), log_rows=0, log_images="abstained:0.3,accept:0.2")
    assert of_value == Sampling(0.01, (0.2, 0.3, 0.3), (0.2, 0.3, 0.3))
    assert sampling(log_images="", log_sample=0, log_rows=0) == Sampling(0.0, (0.0, 0.0, 0.0), (0.0, 0.0, 0.0))


def test_numbers_are_fixed_and_uniform() -> None:
    assert number_of("0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331", 3) == 0.0861575455817638
    numbers = [number_of(f"request {n // 4}", n % 4) for n in range(20_000)]
    assert len(set(numbers)) == len(numbers) and min(numbers) >= 0 and max(numbers) < 1
    for threshold in (0.01, 0.1, 0.5):  # Six standard deviations.
        share = sum(each < threshold for each in numbers) / len(numbers)
        assert abs(share - threshold) < 6 * (threshold * (1 - threshold) / len(numbers)) ** 0.5


@pytest.mark.parametrize("text", ["reject", "accept:2", "accept:x", "accept:-1", "accept:nan", "accept:"])
def test_what_is_no_decision_or_fraction_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="log_images"):
        load_settings({"log_images": text})


class HeldRemoval:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_reached, self.is_open, delete = threading.Event(), threading.Event(), Log.delete

        def slow(log: Log, name: str) -> None:
            if name.startswith("images/"):
                self.is_reached.set()
                self.is_open.wait(60)
            delete(log, name)

        monkeypatch.setattr(Log, "delete", slow)


def old_images(folder: Path, count: int) -> list[Path]:
    files = [folder / "images" / "ab" / f"ab{number:062x}.png" for number in range(count)]
    files[0].parent.mkdir(parents=True)
    for file in files:
        file.touch()
        os.utime(file, (0, 0))
    return files


async def test_log_is_written_while_old_images_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check, files = HeldRemoval(monkeypatch), old_images(tmp_path, 3)
    settings: dict[str, Any] = {"log_days": 1, "log_flush_seconds": 0.05, "log_sample": 0, "drain_seconds": 0.2}
    async with running(log=str(tmp_path), **settings) as app:
        await until(check.is_reached.is_set)
        await send(app, 0, 255)
        await until(lambda: len(rows_in(tmp_path)) == 2)
        assert all(file.exists() for file in files)
    check.is_open.set()  # The service ended without it.


async def test_removal_ends_after_the_file_it_is_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check, files = HeldRemoval(monkeypatch), old_images(tmp_path, 3)
    ended = threading.Event()
    pruner = asyncio.create_task(asyncio.to_thread(keep_pruned, open_log(tmp_path), 1, ended))
    await until(check.is_reached.is_set)
    ended.set()
    check.is_open.set()
    await until(pruner.done)
    await pruner
    assert [file.exists() for file in files] == [False, True, True]


async def test_error_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    times = 0

    def fail(*_: Any, **__: Any) -> None:
        nonlocal times
        times += 1
        raise OSError("gone")

    monkeypatch.setattr("app.log.prune", fail)
    monkeypatch.setattr("app.log.PRUNE_SECONDS", 0.01)
    ended = threading.Event()
    pruner = asyncio.create_task(asyncio.to_thread(keep_pruned, open_log(tmp_path), 1, ended))
    await until(lambda: times > 1)
    ended.set()
    await until(pruner.done)
    await pruner
    assert "cannot be removed: gone" in caplog.text


GREYS = (0, 40, 70, 128, 190, 255)
FILES = [png(value) for value in GREYS]


def rows_by_request(folder: Path, model: str = "m") -> dict[tuple[str, int], dict[str, Any]]:
    rows = [row for batch in read_rows(open_log(folder), model) for row in batch.to_pylist()]
    found = {(row["request_id"], row["image_index"]): row for row in rows}
    assert len(found) == len(rows)
    return found


def request_of(answer: httpx.Response) -> str:
    return "-".join(answer.headers["traceresponse"].split("-")[1:3])


async def test_rows_equal_the_answers_of_predict(tmp_path: Path) -> None:
    with_checks = FakeModel(pipeline=FakePipelineWithChecks(), checks=("texture", "content"))
    models = {"m": with_checks, "v": FakeValueModel(version="w1")}
    answers: dict[str, list[httpx.Response]] = {"m": [], "v": []}
    async with running(models, log=str(tmp_path), log_images="abstained,accept:0.5") as app:
        for name in models:
            url = f"/models/{name}/predict"
            answers[name].append(await app.client.post(url, files=[("images", ("x.png", file)) for file in FILES]))
            for file in FILES:
                answers[name].append(await app.client.post(f"{url}?alpha=0.5", content=file, headers=PNG))
    for name, scores in (("m", CLASSIFICATION_SCORES), ("v", VALUE_SCORES)):
        rows = rows_by_request(tmp_path, name)
        assert len(rows) == 2 * len(GREYS)
        for number, answer in enumerate(answers[name]):
            policy = answer.json()["policy"]
            for index, prediction in enumerate(answer.json()["predictions"]):
                row, file = rows[request_of(answer), index], FILES[index if number == 0 else number - 1]
                for score in scores:
                    assert row[score] == np.float32(prediction[score]), score
                assert row["decision"] == prediction["decision"]
                assert row["label"] == prediction.get("label")
                assert (row["probabilities"] is None) == (name == "v")
                if name == "m":
                    assert row["probabilities"] == [np.float32(p) for p in prediction["probabilities"]]
                    assert {check: np.float32(p) for check, p in prediction["checks"].items()} == dict(row["checks"])
                assert json.loads(row["policy"]) == policy
                assert row["bundle_version"] == answer.json()["model"]["version"]
                assert row["image_sha256"] == hashlib.sha256(file).hexdigest()
                if row["image_path"] is not None:
                    assert (tmp_path / row["image_path"]).read_bytes() == file
                is_abstention = row["decision"] != "accept"
                assert row["sampling_probability"] == 1.0 and (row["image_path"] is not None or not is_abstention)


async def test_rows_equal_the_answers_of_the_protocol(tmp_path: Path) -> None:
    tensor = {"name": "encoded_images", "datatype": "BYTES", "shape": [len(FILES)]}
    document = {"inputs": [{**tensor, "data": [base64.b64encode(file).decode() for file in FILES]}]}
    async with running(log=str(tmp_path)) as app:
        answer = await app.client.post("/v2/models/m/infer", json=document)
    outputs = {each["name"]: each["data"] for each in answer.json()["outputs"]}
    rows = rows_by_request(tmp_path)
    assert len(rows) == len(FILES)
    probabilities = np.array(outputs["probabilities"], np.float32).reshape(len(FILES), -1)
    for index, file in enumerate(FILES):
        row = rows[request_of(answer), index]
        assert [row[score] for score in CLASSIFICATION_SCORES] == [
            np.float32(outputs[score][index]) for score in CLASSIFICATION_SCORES
        ]
        assert row["probabilities"] == probabilities[index].tolist()
        assert (row["label"], row["decision"] == "abstain_ood") == (outputs["label"][index], outputs["is_ood"][index])
        assert row["image_sha256"] == hashlib.sha256(file).hexdigest()


@contextmanager
def predicting(server: Server, threads: int = 4) -> Iterator[list[httpx.Response]]:
    """The answers to predictions that are made meanwhile, each on a connection of its own."""
    answers: list[httpx.Response] = []
    ended = threading.Event()

    def send() -> None:
        while not ended.is_set():
            try:
                answers.append(HTTP.post(server.url + "/predict", content=png(70), headers=PNG))
            except httpx.HTTPError:
                return

    senders = [threading.Thread(target=send) for _ in range(threads)]
    for each in senders:
        each.start()
    try:
        yield answers
    finally:
        ended.set()
        for each in senders:
            each.join(GUARD_SECONDS)


def metric(server: Server, name: str) -> int:
    return int(sum(map(float, re.findall(rf"^{re.escape(name)} (\S+)$", server.metrics(), re.MULTILINE))))


def count_written(server: Server, kind: str = "rows") -> int:
    return metric(server, f'psc_log_{kind}_total{{model="m",result="written"}}')


@pytest.mark.thorough
def test_predictions_of_two_fronts_are_logged(tmp_path: Path) -> None:
    with serve_fake("--workers=2", f"--log={tmp_path}", "--log-flush-seconds=0.2", "--log-sample=0.5") as server:
        with predicting(server) as answers:
            server.until(lambda: len(answers) >= 300 and count_written(server) > 0)
        server.until(lambda: count_written(server) == len(answers))
        images = count_written(server, "images")
        assert server.terminate() == 0
    rows = rows_by_request(tmp_path)
    assert set(rows) == {(request_of(answer), 0) for answer in answers}
    assert images == sum(row["image_path"] is not None for row in rows.values()) == len(answers)
    assert len(list((tmp_path / "images").rglob("*.png"))) == 1  # The same image each time.
    assert 0 < sum(row["sampled"] for row in rows.values()) < len(rows)


@pytest.mark.thorough
def test_sigterm_writes_what_is_held(tmp_path: Path) -> None:
    with serve_fake(f"--log={tmp_path}", "--log-flush-seconds=3600") as server:
        with predicting(server) as answers:
            server.until(lambda: len(answers) >= 20)
        assert server.terminate() == 0
    assert set(rows_by_request(tmp_path)) == {(request_of(answer), 0) for answer in answers}


@pytest.mark.thorough
def test_sigkill_loses_no_more_than_the_open_buffer(tmp_path: Path) -> None:
    with serve_fake(f"--log={tmp_path}", "--log-flush-seconds=0.3", "--log-sample=1") as server:
        with predicting(server) as answers:
            server.until(lambda: len(answers) >= 200)
            flushed = count_written(server)
            server.until(lambda: count_written(server) > flushed)
            before = count_written(server)
            os.killpg(server.process.pid, signal.SIGKILL)
        server.end()
    rows = rows_by_request(tmp_path)  # Every file can be read.
    answered = {request_of(answer) for answer in answers}
    assert before <= len(rows) and len(answered - {name for name, _ in rows}) <= len(answered) - before
    for row in rows.values():
        assert hashlib.sha256((tmp_path / row["image_path"]).read_bytes()).hexdigest() == row["image_sha256"]
