"""What the routes share: API keys, how the process ends, and the threads of a service."""

import asyncio
import logging
import threading
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import SecretStr
from starlette.datastructures import Headers

from app.errors import Forbidden, Unauthorized, problem_of
from app.service import ApiKeys, Host, Service
from app.settings import load_settings
from psc_core.errors import UsageError
from tests.app.fakes import FakeModel
from tests.app.support import running, serve_next, until

pytestmark = pytest.mark.anyio


def test_a_service_that_was_not_started_has_written_nothing(tmp_path: Path) -> None:
    service = Service(load_settings({"log": str(tmp_path / "log")}), {}, Host())
    assert service.log is not None and not list(tmp_path.rglob("*.parquet"))


def test_compiling_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _name: None)
    with pytest.raises(UsageError, match="compiler"):
        Service(load_settings({"compile": True}), {}, Host())


async def test_host_is_told_when_models_are_ready_and_when_replaced_ones_have_ended() -> None:
    class Told(Host):
        times = 0

        def models_changed(self) -> None:
            self.times += 1

    host = Told()
    async with running(host=host, admin_keys="root") as app:
        await until(lambda: host.times == 1)
        serve_next(app, FakeModel("v2"))
        assert (await app.client.post("/admin/reload", headers={"x-api-key": "root"})).status_code == 200
        await until(lambda: host.times == 2)


@pytest.mark.parametrize(("log", "is_told"), [(False, False), (True, True)])
async def test_deadline_beyond_the_drain_is_told_at_the_start(
    log: bool, is_told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(log=str(tmp_path) if log else None, deadline_seconds=9, drain_seconds=10):
        pass
    assert ("raise PSC_DRAIN_SECONDS" in caplog.text) == is_told


async def test_threads_are_a_service_s_own_and_end_with_it(tmp_path: Path) -> None:
    async with running(log=str(tmp_path)) as app, running(log=str(tmp_path)) as other:
        pools = [app.service.parser, app.service.searcher, other.service.parser, other.service.searcher]
        threads = {await asyncio.wrap_future(pool.submit(threading.current_thread)) for pool in pools}
        assert len(threads) == 4
    await until(lambda: not any(thread.is_alive() for thread in threads))


async def test_a_slash_too_many_is_not_redirected() -> None:
    async with running(root_path="/u") as app:
        assert (await app.client.get("/model/")).status_code == 404


def keys_of(**settings: object) -> ApiKeys:
    names = [f"{role}_keys{suffix}" for role in ("api", "admin", "feedback") for suffix in ("", "_file")]
    return ApiKeys.of(SimpleNamespace(**{name: None if name.endswith("file") else () for name in names} | settings))


def keys(*, predict: Iterable[str] = (), admin: Iterable[str] = ()) -> ApiKeys:
    return keys_of(api_keys=[SecretStr(key) for key in predict], admin_keys=[SecretStr(key) for key in admin])


KEYS = keys(predict=["predict-one", "predict-two"], admin=["admin-one"])


def sent(**headers: str) -> Headers:
    raw = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
    return Headers(raw=raw)


@pytest.mark.parametrize("key", ["predict-one", "predict-two", "admin-one"])
def test_each_key_predicts_in_either_header(key: str) -> None:
    KEYS.check("predict", sent(x_api_key=key))
    KEYS.check("predict", sent(authorization=f"Bearer {key}"))
    KEYS.check("predict", sent(authorization=f"bearer  {key} "))


def test_only_admin_keys_administer() -> None:
    KEYS.check("admin", sent(x_api_key="admin-one"))
    with pytest.raises(Unauthorized):
        KEYS.check("admin", sent(x_api_key="predict-one"))


@pytest.mark.parametrize("role", ["predict", "admin"])
@pytest.mark.parametrize(
    "headers",
    [
        {},
        *({"x_api_key": key} for key in ("", "predict-on", "predict-one ", "prédict-one")),
        *({"authorization": value} for value in ("Bearer", "Basic predict-one", "predict-one")),
    ],
)
def test_everything_else_is_unauthorized(role: str, headers: dict[str, str]) -> None:
    with pytest.raises(Unauthorized) as caught:
        KEYS.check(role, sent(**headers))
    problem, headers = problem_of(caught.value)
    assert problem.status == 401
    assert headers["www-authenticate"].startswith("Bearer")
    assert "predict-one" not in problem.detail


def test_without_keys_prediction_is_open_whatever_is_sent() -> None:
    for none in (keys(), keys(admin=["admin-one"])):
        assert not none.predict
        none.check("predict", sent())
        none.check("predict", sent(x_api_key="anything"))


def test_without_admin_keys_nobody_administers() -> None:
    with pytest.raises(Forbidden, match="PSC_ADMIN_KEYS"):
        keys(predict=["predict-one"]).check("admin", sent(x_api_key="predict-one"))


def test_keys_come_from_settings_and_files(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# our keys\n\n from-file \nsecond\n", encoding="utf-8")
    found = keys_of(api_keys=(SecretStr("from-environment"),), api_keys_file=file)
    assert len(found.predict) == 3 and not found.admin
    for key in ("from-file", "second", "from-environment"):
        found.check("predict", sent(x_api_key=key))
    with pytest.raises(Unauthorized):
        found.check("predict", sent(x_api_key="# our keys"))


@pytest.mark.parametrize("content", ["", "# only a comment\n\n", "two words\n", "schlüssel\n", None])
def test_unusable_key_files_are_refused_without_showing_keys(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        keys_of(admin_keys_file=file)
    assert not content or not content.strip() or content.strip() not in str(caught.value)


def test_keys_are_never_shown(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with pytest.raises(Unauthorized):
        KEYS.check("predict", sent(x_api_key="guess-that-must-not-be-logged"))
    assert "guess" not in caplog.text
    assert "predict-one" not in f"{KEYS} {vars(KEYS)}"
