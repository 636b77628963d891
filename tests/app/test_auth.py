"""API keys: who passes, who does not, and that keys stay secret."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import SecretStr
from starlette.datastructures import Headers

from app.errors import Forbidden, Unauthorized, problem_of
from app.service import ApiKeys
from psc_core.errors import UsageError

KEYS = ApiKeys.of(predict=["predict-one", "predict-two"], admin=["admin-one"])


def sent(**headers: str) -> Headers:
    """Headers as a request has them."""
    raw = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
    return Headers(raw=raw)


@pytest.mark.parametrize("key", ["predict-one", "predict-two", "admin-one"])
def test_each_key_predicts_in_either_header(key: str) -> None:
    KEYS.check_predict(sent(x_api_key=key))
    KEYS.check_predict(sent(authorization=f"Bearer {key}"))
    KEYS.check_predict(sent(authorization=f"bearer  {key} "))


def test_only_admin_keys_administer() -> None:
    KEYS.check_admin(sent(x_api_key="admin-one"))
    with pytest.raises(Unauthorized, match="not accepted here"):
        KEYS.check_admin(sent(x_api_key="predict-one"))


@pytest.mark.parametrize("role", ["predict", "admin"])
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"x_api_key": ""},
        {"x_api_key": "predict-on"},
        {"x_api_key": "predict-one "},
        {"x_api_key": "prédict-one"},
        {"authorization": "Bearer"},
        {"authorization": "Basic predict-one"},
        {"authorization": "predict-one"},
    ],
)
def test_everything_else_is_unauthorized(role: str, headers: dict[str, str]) -> None:
    with pytest.raises(Unauthorized) as caught:
        getattr(KEYS, f"check_{role}")(sent(**headers))
    problem = problem_of(caught.value)
    assert problem.document.status == 401
    assert problem.headers["www-authenticate"].startswith("Bearer")
    assert "predict-one" not in problem.document.detail


def test_without_keys_prediction_is_open_whatever_is_sent() -> None:
    for keys in (ApiKeys.of(), ApiKeys.of(admin=["admin-one"])):
        assert not keys.predict
        keys.check_predict(sent())
        keys.check_predict(sent(x_api_key="anything"))


def test_without_admin_keys_nobody_administers() -> None:
    with pytest.raises(Forbidden, match="PSC_ADMIN_KEYS"):
        ApiKeys.of(predict=["predict-one"]).check_admin(sent(x_api_key="predict-one"))


def test_keys_come_from_settings_and_files(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# our keys\n\n from-file \nsecond\n", encoding="utf-8")
    settings = SimpleNamespace(
        api_keys=(SecretStr("from-environment"),),
        api_keys_file=file,
        admin_keys=(),
        admin_keys_file=None,
        feedback_keys=(),
        feedback_keys_file=None,
    )
    keys = ApiKeys.from_settings(settings)
    assert len(keys.predict) == 3
    for key in ("from-file", "second", "from-environment"):
        keys.check_predict(sent(x_api_key=key))
    with pytest.raises(Unauthorized):
        keys.check_predict(sent(x_api_key="# our keys"))
    assert not keys.admin


@pytest.mark.parametrize("content", ["", "# only a comment\n\n", "two words\n", "schlüssel\n"])
def test_unusable_key_files_are_refused_without_showing_keys(tmp_path: Path, content: str) -> None:
    file = tmp_path / "keys"
    file.write_text(content, encoding="utf-8")
    settings = SimpleNamespace(
        api_keys=(), api_keys_file=None, admin_keys=(), admin_keys_file=file, feedback_keys=(), feedback_keys_file=None
    )
    with pytest.raises(UsageError) as caught:
        ApiKeys.from_settings(settings)
    assert not content.strip() or content.strip() not in str(caught.value)
    with pytest.raises(UsageError, match="check the path and its permissions"):
        ApiKeys.from_settings(SimpleNamespace(**{**vars(settings), "admin_keys_file": tmp_path / "absent"}))


def test_keys_are_never_shown(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    assert repr(KEYS) == "ApiKeys(predict=3 keys, admin=1 keys, feedback=1 keys)"
    with pytest.raises(Unauthorized):
        KEYS.check_predict(sent(x_api_key="guess-that-must-not-be-logged"))
    assert "guess" not in caplog.text
    assert "predict-one" not in str(vars(KEYS))
