"""The log beside the answers: equal row for row, by every entry, from several workers, and after SIGKILL."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from psc_core.answers import CLASSIFICATION_SCORES
from psc_core.answers import REGRESSION_SCORES as VALUE_SCORES
from psc_core.log.store import open_log, read_rows
from tests.app.fakes import FakeModel, FakePipelineWithChecks, FakeValueModel, png
from tests.app.support import PNG, running
from tests.served import GUARD_SECONDS, Server, serve_fake

VALUES = (0, 40, 70, 128, 190, 255)
FILES = [png(value) for value in VALUES]


def rows_in(folder: Path, model: str = "m") -> dict[tuple[str, int], dict[str, Any]]:
    """The rows by request and position."""
    rows = [row for batch in read_rows(open_log(folder), model) for row in batch.to_pylist()]
    found = {(row["request_id"], row["image_index"]): row for row in rows}
    assert len(found) == len(rows)
    return found


def request_of(answer: httpx.Response) -> str:
    """The request id that the log knows an answer by."""
    return "-".join(answer.headers["traceresponse"].split("-")[1:3])


@pytest.mark.anyio
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
        rows = rows_in(tmp_path, name)
        assert len(rows) == 2 * len(VALUES)
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


@pytest.mark.anyio
async def test_rows_equal_the_answers_of_the_protocol(tmp_path: Path) -> None:
    tensor = {"name": "encoded_images", "datatype": "BYTES", "shape": [len(FILES)]}
    document = {"inputs": [{**tensor, "data": [base64.b64encode(file).decode() for file in FILES]}]}
    async with running(log=str(tmp_path)) as app:
        answer = await app.client.post("/v2/models/m/infer", json=document)
    outputs = {each["name"]: each["data"] for each in answer.json()["outputs"]}
    rows = rows_in(tmp_path)
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


@pytest.mark.anyio
async def test_rows_equal_the_answers_of_grpc(tmp_path: Path) -> None:
    pytest.importorskip("tritonclient.grpc")
    from tests.app.grpc.support import calling, encoded

    async with calling(log=str(tmp_path)) as (_, client):
        answer = await client.infer("m", [encoded(*FILES)])
    rows = sorted(rows_in(tmp_path).values(), key=lambda row: row["image_index"])
    assert [row["image_sha256"] for row in rows] == [hashlib.sha256(file).hexdigest() for file in FILES]
    for score in CLASSIFICATION_SCORES:
        assert np.array([row[score] for row in rows], np.float32).tobytes() == answer.as_numpy(score).tobytes()


@contextmanager
def predicting(server: Server, threads: int = 4) -> Iterator[list[httpx.Response]]:
    """The answers to predictions that are made meanwhile, each on a connection of its own."""
    answers: list[httpx.Response] = []
    ended = threading.Event()

    def send() -> None:
        while not ended.is_set():
            try:
                answers.append(httpx.post(server.url + "/predict", content=png(70), headers=PNG, timeout=60))
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


def written(server: Server, kind: str = "rows") -> int:
    return metric(server, f'psc_log_{kind}_total{{model="m",result="written"}}')


def test_two_workers_write_at_once(tmp_path: Path) -> None:
    with serve_fake("--workers=2", f"--log={tmp_path}", "--log-flush-seconds=0.2", "--log-sample=0.5") as server:
        server.wait_for_log('"model ready"', 2)
        with predicting(server) as answers:
            server.until(lambda: len(answers) >= 300 and written(server) > 0)
        server.until(lambda: written(server) == len(answers))
        images = written(server, "images")
        assert server.terminate() == 0
    rows = rows_in(tmp_path)
    assert set(rows) == {(request_of(answer), 0) for answer in answers}
    assert images == sum(row["image_path"] is not None for row in rows.values()) == len(answers)
    assert len(list((tmp_path / "images").rglob("*.png"))) == 1  # The same image each time.
    assert 0 < sum(row["sampled"] for row in rows.values()) < len(rows)


def test_sigterm_writes_what_is_held(tmp_path: Path) -> None:
    with serve_fake(f"--log={tmp_path}", "--log-flush-seconds=3600") as server:
        with predicting(server) as answers:
            server.until(lambda: len(answers) >= 20)
        assert server.terminate() == 0
    assert set(rows_in(tmp_path)) == {(request_of(answer), 0) for answer in answers}


def test_sigkill_loses_no_more_than_the_open_buffer(tmp_path: Path) -> None:
    with serve_fake(f"--log={tmp_path}", "--log-flush-seconds=0.3", "--log-sample=1") as server:
        with predicting(server) as answers:
            server.until(lambda: len(answers) >= 200)
            flushed = written(server)
            server.until(lambda: written(server) > flushed)
            before = written(server)
            os.killpg(server.process.pid, signal.SIGKILL)
        server.end()
    rows = rows_in(tmp_path)  # Every file can be read.
    answered = {request_of(answer) for answer in answers}
    assert before <= len(rows) and len(answered - {name for name, _ in rows}) <= len(answered) - before
    for row in rows.values():
        assert hashlib.sha256((tmp_path / row["image_path"]).read_bytes()).hexdigest() == row["image_sha256"]
