"""The shipped bundle under load through reloads, bad bundles and SIGTERM: no answer is lost."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from psc_core.bundle import manifest_digest
from tests.conftest import ROOT, SHIPPED_BUNDLE
from tests.served import GUARD_SECONDS, Server, serve

ADMIN = {"x-api-key": "root"}
PNG = {"content-type": "image/png"}
DIGIT = (ROOT / "artifacts" / "dirty-mnist-resnet18" / "examples" / "clean.png").read_bytes()
CLIENTS = 12


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A copy of the shipped bundle that a test may change."""
    return Path(shutil.copytree(SHIPPED_BUNDLE, tmp_path / "bundle"))


def serve_digits(bundle: Path, *flags: str) -> AbstractContextManager[Server]:
    """A bundle as the model ``digits``."""
    return serve(f"--bundle=digits={bundle}", "--threads=1", "--max-batch-size=8", "--admin-keys=root", *flags)


class Traffic:
    """What clients saw that send one image after another.

    Attributes:
        answered: Answers by bundle version.
        wrong: Everything else that happened.
        stopped: Set to have the clients end.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.answered: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.stopped = False

    async def client(self) -> None:
        """Send until stopped, or until the server says that it ends the connection."""
        async with httpx.AsyncClient(timeout=GUARD_SECONDS) as session:
            while not self.stopped:
                try:
                    response = await session.post(self.url + "/predict", content=DIGIT, headers=PNG)
                except httpx.HTTPError as error:
                    self.wrong.append(repr(error))
                    return
                if response.status_code == 200 and response.json()["predictions"][0]["label"] == "7":
                    self.answered[response.json()["model"]["version"]] += 1
                else:
                    self.wrong.append(response.text)
                if response.headers.get("connection") == "close":
                    return


def under_load(server: Server, action: Callable[[Traffic], Awaitable[Any]]) -> Traffic:
    """What the clients saw while ``action`` ran."""
    traffic = Traffic(server.url)

    async def scenario() -> None:
        clients = [asyncio.create_task(traffic.client()) for _ in range(CLIENTS)]
        await progress(traffic, CLIENTS)
        await action(traffic)
        await asyncio.gather(*clients)

    asyncio.run(scenario())
    return traffic


async def progress(traffic: Traffic, answers: int) -> None:
    """Wait for as many further answers."""
    goal = traffic.answered.total() + answers
    async with asyncio.timeout(GUARD_SECONDS):
        while traffic.answered.total() < goal and not traffic.wrong:
            await asyncio.sleep(0.02)


async def post_reload(server: Server) -> httpx.Response:
    async with httpx.AsyncClient(timeout=GUARD_SECONDS) as session:
        return await session.post(server.url + "/admin/reload", headers=ADMIN)


def another_version(bundle: Path) -> None:
    """Change the bundle's policy, and so its version; labels stay."""
    file = bundle / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["policy"]["coverage"] = 0.8
    file.write_text(json.dumps({**manifest, "version": manifest_digest(manifest)}))


def version(server: Server) -> str:
    """The version that is served now."""
    return str(httpx.get(server.url + "/model", timeout=GUARD_SECONDS).json()["version"])


def test_reloads_under_load_lose_nothing_and_every_answer_has_a_version_that_existed(bundle: Path) -> None:
    with serve_digits(bundle) as server:
        versions = [version(server)]

        async def reload_twice(traffic: Traffic) -> None:
            another_version(bundle)
            response = await post_reload(server)
            assert response.status_code == 200, response.text
            change = response.json()["reloaded"][0]
            assert change["previous_version"] == versions[0] != change["version"]
            versions.append(change["version"])
            await progress(traffic, 2 * CLIENTS)
            server.process.send_signal(signal.SIGHUP)
            reloaded = 'psc_reloads_total{model="digits",result="ok"} 2.0'
            await asyncio.to_thread(server.until, lambda: reloaded in server.metrics())
            await progress(traffic, 2 * CLIENTS)
            traffic.stopped = True

        traffic = under_load(server, reload_twice)
        assert not traffic.wrong
        assert set(traffic.answered) == set(versions)
        assert version(server) == versions[1]
        assert server.terminate() == 0


def test_a_bad_bundle_under_load_changes_nothing_and_says_why(bundle: Path) -> None:
    with serve_digits(bundle) as server:
        first = version(server)
        damaged = bundle / "backbone.safetensors"
        data = bytearray(damaged.read_bytes())
        data[-1] ^= 1
        damaged.write_bytes(bytes(data))

        async def reload(traffic: Traffic) -> None:
            response = await post_reload(server)
            assert response.status_code == 422
            assert damaged.name in response.json()["detail"]
            server.process.send_signal(signal.SIGHUP)
            await asyncio.to_thread(server.wait_for_log, "the old models stay")
            await progress(traffic, CLIENTS)
            traffic.stopped = True

        traffic = under_load(server, reload)
        assert not traffic.wrong
        assert set(traffic.answered) == {first}
        assert any("the old models stay" in line and damaged.name in line for line in server.log)
        assert httpx.get(server.url + "/readyz", timeout=GUARD_SECONDS).status_code == 200
        assert server.terminate() == 0


def test_sigterm_under_load_answers_every_request(shipped_bundle: Path) -> None:
    with serve_digits(shipped_bundle) as server:

        async def terminate(traffic: Traffic) -> None:
            server.process.send_signal(signal.SIGTERM)

        traffic = under_load(server, terminate)
        assert server.end() == 0
        assert not traffic.wrong
        assert traffic.answered.total() >= 2 * CLIENTS  # The first ones, and those under way at the signal.


def test_the_log_is_json_to_its_end(shipped_bundle: Path) -> None:
    with serve_digits(shipped_bundle) as server:
        answer = httpx.post(server.url + "/predict", content=DIGIT, headers=PNG, timeout=GUARD_SECONDS)
        assert answer.status_code == 200
        assert server.terminate() == 0
    lines = [json.loads(line) for line in server.log]
    assert lines[0]["message"] == f"listening on {server.url}"
    assert lines[-1]["logger"].startswith("uvicorn")


def test_a_reload_reaches_the_workers_of_a_real_bundle(bundle: Path) -> None:
    with serve_digits(bundle, "--workers=2") as server:
        before, workers = version(server), server.workers
        another_version(bundle)
        server.process.send_signal(signal.SIGHUP)
        server.until(lambda: len(server.workers) == 2 and not server.workers & workers)
        assert version(server) != before
        assert server.terminate() == 0
