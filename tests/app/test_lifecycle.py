"""The shipped bundle under load through reloads, bad bundles, SIGTERM and a killed worker: no answer is lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from psc_core.bundle.manifest import manifest_digest
from tests.conftest import ROOT, SHIPPED_BUNDLE

ADMIN = {"x-api-key": "root"}
PNG = {"content-type": "image/png"}
DIGIT = (ROOT / "artifacts" / "examples" / "clean.png").read_bytes()
CLIENTS = 12


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A copy of the shipped bundle that a test may change."""
    return Path(shutil.copytree(SHIPPED_BUNDLE, tmp_path / "bundle"))


class Serving:
    """``psc-serve`` in a process of its own; its log is kept."""

    def __init__(self, bundle: Path, *flags: str) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PSC_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "app.cli", "--bundle", f"digits={bundle}", "--port=0", "--device=cpu", "--threads=1",
             "--max-batch-size=8", "--admin-keys=root", "--drain-seconds=15", *flags],
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=ROOT,
            start_new_session=True,
        )  # fmt: skip
        assert self.process.stderr is not None
        self.url = self.process.stderr.readline().split()[-1]
        self.log: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.log.extend(self.process.stderr)

    def wait_ready(self) -> None:
        """Until every model is warm."""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(self.url + "/readyz").status_code == 200:
                    return
            time.sleep(0.05)
        raise TimeoutError("".join(self.log))

    def end(self) -> int:
        """The exit code after SIGTERM."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)

    def close(self) -> None:
        """End whatever is left of it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join(10)
        assert self.process.stderr is not None
        self.process.stderr.close()

    @property
    def workers(self) -> set[int]:
        """Process ids of the live children."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return {int(child) for child in children if _alive(int(child))}


def _alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


@contextlib.contextmanager
def serving(bundle: Path, *flags: str) -> Iterator[Serving]:
    server = Serving(bundle, *flags)
    try:
        server.wait_ready()
        yield server
    finally:
        server.close()


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

    async def client(self, *, until_refused: bool) -> None:
        """Send until stopped, or until the server takes no more connections."""
        async with httpx.AsyncClient(timeout=30) as session:
            while not self.stopped:
                try:
                    response = await session.post(self.url + "/predict", content=DIGIT, headers=PNG)
                except httpx.ConnectError as error:
                    if not until_refused:
                        self.wrong.append(repr(error))
                    return
                except httpx.HTTPError as error:
                    self.wrong.append(repr(error))
                    return
                if response.status_code == 200 and response.json()["predictions"][0]["label"] == "7":
                    self.answered[response.json()["model"]["version"]] += 1
                else:
                    self.wrong.append(response.text)


def under_load(server: Serving, action: Callable[[Traffic], Awaitable[Any]], *, until_refused: bool = False) -> Traffic:
    """What the clients saw while ``action`` ran."""
    traffic = Traffic(server.url)

    async def scenario() -> None:
        clients = [asyncio.create_task(traffic.client(until_refused=until_refused)) for _ in range(CLIENTS)]
        await progress(traffic, CLIENTS)
        await action(traffic)
        traffic.stopped = not until_refused
        await asyncio.gather(*clients)

    asyncio.run(scenario())
    return traffic


async def progress(traffic: Traffic, answers: int) -> None:
    """Wait for as many further answers."""
    goal, end = traffic.answered.total() + answers, time.monotonic() + 30
    while traffic.answered.total() < goal and not traffic.wrong:
        assert time.monotonic() < end, "no answers"
        await asyncio.sleep(0.02)


async def reloads(server: Serving, count: int) -> None:
    """Wait until as many reloads have succeeded."""
    end = time.monotonic() + 30
    async with httpx.AsyncClient(timeout=30) as session:
        while (
            f'psc_reloads_total{{model="digits",result="ok"}} {count}.0'
            not in (await session.get(server.url + "/metrics")).text
        ):
            assert time.monotonic() < end, "".join(server.log)
            await asyncio.sleep(0.05)


def another_version(bundle: Path) -> None:
    """Change the bundle's policy, and so its version; labels stay."""
    file = bundle / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["policy"]["coverage"] = 0.8
    file.write_text(json.dumps({**manifest, "version": manifest_digest(manifest)}))


def version(server: Serving) -> str:
    """The version that is served now."""
    return str(httpx.get(server.url + "/model").json()["version"])


def test_reloads_under_load_lose_nothing_and_every_answer_has_a_version_that_existed(bundle: Path) -> None:
    with serving(bundle) as server:
        versions = [version(server)]

        async def reload_twice(traffic: Traffic) -> None:
            another_version(bundle)
            async with httpx.AsyncClient(timeout=60) as session:
                response = await session.post(server.url + "/admin/reload", headers=ADMIN)
            assert response.status_code == 200, response.text
            change = response.json()["reloaded"][0]
            assert change["previous_version"] == versions[0] != change["version"]
            versions.append(change["version"])
            await progress(traffic, 2 * CLIENTS)
            server.process.send_signal(signal.SIGHUP)
            await reloads(server, 2)
            await progress(traffic, 2 * CLIENTS)

        traffic = under_load(server, reload_twice)
        assert not traffic.wrong
        assert set(traffic.answered) == set(versions)
        assert version(server) == versions[1]
        assert server.end() == 0


def test_a_bad_bundle_under_load_changes_nothing_and_says_why(bundle: Path) -> None:
    with serving(bundle) as server:
        first = version(server)
        damaged = bundle / "backbone.safetensors"
        data = bytearray(damaged.read_bytes())
        data[-1] ^= 1
        damaged.write_bytes(bytes(data))

        async def reload(traffic: Traffic) -> None:
            async with httpx.AsyncClient(timeout=60) as session:
                response = await session.post(server.url + "/admin/reload", headers=ADMIN)
            assert response.status_code == 422
            assert damaged.name in response.json()["detail"]
            server.process.send_signal(signal.SIGHUP)
            end = time.monotonic() + 30
            while not any("the old models stay" in line and damaged.name in line for line in server.log):
                assert time.monotonic() < end
                await asyncio.sleep(0.05)
            await progress(traffic, CLIENTS)

        traffic = under_load(server, reload)
        assert not traffic.wrong
        assert set(traffic.answered) == {first}
        assert httpx.get(server.url + "/readyz").status_code == 200
        assert server.end() == 0


def test_sigterm_under_load_answers_every_accepted_request(shipped_bundle: Path) -> None:
    with serving(shipped_bundle) as server:

        async def terminate(traffic: Traffic) -> None:
            server.process.send_signal(signal.SIGTERM)

        traffic = under_load(server, terminate, until_refused=True)
        assert server.process.wait(30) == 0
        assert not traffic.wrong
        assert traffic.answered.total() >= 2 * CLIENTS  # The first ones, and those under way at the signal.


def test_the_log_is_json_to_its_end(shipped_bundle: Path) -> None:
    with serving(shipped_bundle) as server:
        assert httpx.post(server.url + "/predict", content=DIGIT, headers=PNG).status_code == 200
        assert server.end() == 0
    assert [json.loads(line)["logger"] for line in server.log][-1].startswith("uvicorn")


def test_the_service_goes_on_while_a_killed_worker_is_replaced(shipped_bundle: Path) -> None:
    def ready() -> int:
        return sum('"message":"model ready"' in line for line in server.log)

    with serving(shipped_bundle, "--workers=2") as server:
        end = time.monotonic() + 90
        while ready() < 2:
            assert time.monotonic() < end, "".join(server.log)
            time.sleep(0.05)
        before = server.workers
        assert len(before) == 2
        killed = min(before)
        os.kill(killed, signal.SIGKILL)
        seen: list[int] = []
        while ready() < 3:  # The other worker answers until the new one is warm.
            assert time.monotonic() < end, "".join(server.log)
            seen.append(httpx.post(server.url + "/predict", content=DIGIT, headers=PNG, timeout=30).status_code)
        assert set(seen) == {200}
        assert len(server.workers) == 2
        assert len(server.workers - before) == 1
        assert any("a worker died" in line for line in server.log)
        assert server.end() == 0
