"""Settings: precedence, refusal of what is unknown, the table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from pydantic import ValidationError

from app.cli import network_threads, parser, settings_from
from app.settings import Settings, load_settings, markdown_table
from psc_core.errors import UsageError


def test_flags_win_over_the_environment_which_wins_over_the_file(tmp_path: Path) -> None:
    config = tmp_path / "psc.toml"
    config.write_text("port = 1\nmax_batch_size = 2\nmax_fields = 3\n")
    environment = {"PSC_PORT": "4", "PSC_MAX_BATCH_SIZE": "5", "PSC_CONFIG": str(config), "HOME": "/"}
    settings = load_settings({"port": "6"}, environment=environment)
    assert (settings.port, settings.max_batch_size, settings.max_fields) == (6, 5, 3)


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError):
        load_settings(environment={}).port = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"PSC_PROT": "1"}, "unknown setting PSC_PROT"),
        ({"PSC_PORT": "x"}, "setting port"),
        ({"PSC_ALPHA": "2"}, "setting alpha"),
        ({"PSC_ALPHA": "0"}, "setting alpha"),
        ({"PSC_DRAIN_SECONDS": "inf"}, "setting drain_seconds"),
        ({"PSC_DEVICE": "tpu"}, "setting device"),
        ({"PSC_MAX_QUEUE_IMAGES": "5"}, "never be admitted"),
        ({"PSC_MAX_DELAY_MS": "60001"}, "setting max_delay_ms"),
        ({"PSC_MAX_DELAY_MS": "2000", "PSC_DEADLINE_SECONDS": "2"}, "2000 ms and 2 s"),
        ({"PSC_THREADS": "1025"}, "setting threads"),
        ({"PSC_TLS_KEY": "k.pem"}, "set both or neither"),
        ({"PSC_ALLOWED_HOSTS": "a.org,a*b"}, r"example.org or \*.example.org, got 'a\*b'"),
        ({"PSC_ALLOWED_HOSTS": "*a.org"}, r"got '\*a.org'"),
        ({"PSC_MAX_PIXELS": "178956971"}, "setting max_pixels"),
        ({"PSC_DRIFT_WINDOW": "1000001"}, "setting drift_window"),
        ({"PSC_BUNDLE": "a=x,a=y"}, "each bundle name once"),
        ({"PSC_BUNDLE": "a b=x"}, "bundle name"),
    ],
)
def test_what_cannot_be_used_is_refused(environment: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_settings(environment=environment)


def test_variables_that_kubernetes_makes_are_ignored() -> None:
    made = {
        "SERVICE_HOST": "10.0.0.1",
        "SERVICE_PORT": "8000",
        "SERVICE_PORT_HTTP": "8000",
        "PORT": "tcp://10.0.0.1:8000",
    }
    made |= {"PORT_8000_TCP": "tcp://10.0.0.1:8000", "PORT_8000_TCP_PROTO": "tcp", "PORT_8000_TCP_ADDR": "10.0.0.1"}
    environment = {
        f"{prefix}_{name}": value for prefix in ("PSC", "PSC_DIGITS_PREDICTOR") for name, value in made.items()
    }
    assert load_settings(environment=environment) == load_settings(environment={})


def test_hosts_that_starlette_takes_are_taken() -> None:
    hosts = ("*", "*.a.org", "a.org")
    assert load_settings({"allowed_hosts": ",".join(hosts)}).allowed_hosts == hosts


def test_pillow_reads_as_many_pixels_as_may_be_asked_for() -> None:
    most = 2 * (Image.MAX_IMAGE_PIXELS or 0)
    assert load_settings({"max_pixels": most}).max_pixels == most


def test_keys_are_never_shown() -> None:
    with pytest.raises(UsageError) as caught:
        load_settings({"api_keys": 5, "port": "x"})
    assert "5" not in str(caught.value)
    with pytest.raises(UsageError, match="PSC_API_KEY ") as caught:
        load_settings(environment={"PSC_API_KEY": "hunter2"})
    assert "hunter2" not in str(caught.value)
    settings = load_settings(environment={"PSC_API_KEYS": "hunter2"})
    assert "hunter2" not in repr(settings)


@pytest.mark.parametrize(
    ("text", "message"),
    [("prot = 1", "unknown setting 'prot'"), ("port = ", "expected TOML"), (None, "check --config")],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    config = tmp_path / "psc.toml"
    if text is not None:
        config.write_text(text)
    with pytest.raises(UsageError, match=message):
        load_settings(environment={}, config=config)


def test_foreign_variables_are_left_alone() -> None:
    load_settings(environment={"PSC_DATA": "/data", "PSC_CLIENT_URL": "http://x", "OTHER": "1", "PSC_PORT": ""})


def test_bundles_have_names() -> None:
    settings = load_settings({"bundle": "main=/b/one, /b/two/"})
    assert settings.named_bundles == (("main", Path("/b/one")), ("two", Path("/b/two/")))


def test_every_setting_is_a_flag_and_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PSC_DATA", raising=False)
    table, flags = markdown_table(), parser().format_help()
    for name, field in Settings.model_fields.items():
        assert f"`--{name.replace('_', '-')}`" in table
        assert f"`PSC_{name.upper()}`" in table
        assert "--" + name.replace("_", "-") in flags
        assert field.description


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--bundle", "a", "--bundle", "b=c"], {"bundle": ("a", "b=c")}),
        (["--access-log", "--no-page"], {"access_log": True, "page": False}),
        (["--max-delay-ms", "2.5", "--port", "0"], {"max_delay_ms": 2.5, "port": 0}),
        (["--api-keys", "a,b"], {}),
    ],
)
def test_flags(arguments: list[str], expected: dict[str, Any]) -> None:
    settings = settings_from(arguments)
    for name, value in expected.items():
        assert getattr(settings, name) == value


@pytest.mark.parametrize("arguments", [["--prot", "1"], ["--max-batch", "3"], ["extra"]])
def test_unknown_flags_are_bad_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        settings_from(arguments)
    assert caught.value.code == 2


def test_workers_share_the_threads_unless_told() -> None:
    chosen = {
        flags: network_threads(load_settings(dict(flags)), 8)
        for flags in ((), (("workers", 2),), (("workers", 3),), (("workers", 16),), (("workers", 2), ("threads", 8)))
    }
    assert list(chosen.values()) == [8, 4, 2, 1, 8]
