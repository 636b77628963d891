"""Settings: precedence, refusal of what is unknown, the table."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from app.cli import parser, settings_from
from app.settings import Settings, load_settings
from psc_core.errors import UsageError
from tests.docs.tables import settings_table


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], None]:
    for name in [name for name in os.environ if name.startswith("PSC_")]:
        monkeypatch.delenv(name)
    return lambda variables: [monkeypatch.setenv(*each) for each in variables.items()]


Environment = Callable[[dict[str, str]], None]


def test_flags_win_over_the_environment_which_wins_over_the_file(tmp_path: Path, environment: Environment) -> None:
    config = tmp_path / "psc.toml"
    config.write_text("port = 1\nmax_batch_size = 2\nmax_requests = 3\n")
    environment({"PSC_PORT": "4", "PSC_MAX_BATCH_SIZE": "5", "PSC_CONFIG": str(config)})
    settings = load_settings({"port": "6"})
    assert (settings.port, settings.max_batch_size, settings.max_requests) == (6, 5, 3)


def test_the_file_of_a_flag_wins_over_that_of_the_environment(tmp_path: Path, environment: Environment) -> None:
    files = [tmp_path / "flag.toml", tmp_path / "variable.toml"]
    for port, file in enumerate(files, 1):
        file.write_text(f"port = {port}\nbundle = ['a', 'b={port}']\n")
    environment({"PSC_CONFIG": str(files[1])})
    settings = settings_from(["--config", str(files[0])])
    assert (settings.port, settings.bundle) == (1, ("a", "b=1"))


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"PSC_PROT": "1"}, "unknown setting PSC_PROT"),
        ({"PSC_GPRC_PORT": "https://a.org"}, "unknown setting PSC_GPRC_PORT"),
        ({"PSC_PORT": "x"}, "setting port"),
        ({"PSC_ALPHA": "2"}, "setting alpha"),
        ({"PSC_DRAIN_SECONDS": "inf"}, "setting drain_seconds"),
        ({"PSC_DEVICE": "tpu"}, "setting device"),
        ({"PSC_MAX_QUEUE_IMAGES": "5"}, "never be admitted"),
        ({"PSC_MAX_DELAY_MS": "2000", "PSC_DEADLINE_SECONDS": "2"}, "2000 ms and 2 s"),
        ({"PSC_TLS_KEY": "k.pem"}, "set both or neither"),
        ({"PSC_ALLOWED_HOSTS": "a.org,a*b"}, r"example.org or \*.example.org, got 'a\*b'"),
        ({"PSC_MAX_PIXELS": "178956971"}, "setting max_pixels"),
        ({"PSC_DRIFT_WINDOW": "1000001"}, "setting drift_window"),
        ({"PSC_BUNDLE": "a=x,a=y"}, "expected different bundle names"),
        ({"PSC_BUNDLE": "a b=x"}, "bundle name"),
        ({"PSC_BUNDLE": "service=x"}, "other than 'service'"),
    ],
)
def test_rejects_unusable_values(environment: Environment, variables: dict[str, str], message: str) -> None:
    environment(variables)
    with pytest.raises(UsageError, match=message):
        load_settings()


def test_ignores_variables_that_kubernetes_makes(environment: Environment) -> None:
    default = load_settings()
    port = "tcp://10.0.0.1:8000"
    made = {"SERVICE_HOST": "10.0.0.1", "SERVICE_PORT": "8000", "SERVICE_PORT_HTTP": "8000", "PORT": port}
    made |= {"PORT_8000_TCP": port, "PORT_8000_TCP_PROTO": "tcp", "PORT_8000_TCP_ADDR": "10.0.0.1"}
    services = ("PSC", "PSC_GRPC", "PSC_DIGITS_PREDICTOR")
    environment({f"{service}_{name}": value for service in services for name, value in made.items()})
    assert load_settings() == default


def test_accepts_the_hosts_that_starlette_accepts() -> None:
    hosts = ("*", "*.a.org", "a.org")
    assert load_settings({"allowed_hosts": ",".join(hosts)}).allowed_hosts == hosts


def test_keys_are_never_shown(environment: Environment) -> None:
    with pytest.raises(UsageError, match="got 'x'") as caught:
        load_settings({"api_keys": 5, "admin_keys": ["hunter2", 6], "port": "x"})
    assert not re.search("5|6|hunter2", str(caught.value))
    with pytest.raises(UsageError, match="got 7"):
        load_settings({"api_keys_file": 7})
    environment({"PSC_API_KEYS": "hunter2"})
    assert "hunter2" not in repr(load_settings())
    environment({"PSC_API_KEY": "hunter2"})
    with pytest.raises(UsageError, match="PSC_API_KEY ") as caught:
        load_settings()
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("name", ["api_keys", "admin_keys", "feedback_keys"])
def test_a_text_without_a_key_opens_nothing(environment: Environment, name: str) -> None:
    """As ``"$TEAM_A,$TEAM_B"`` is if neither variable was set."""
    for text in (",", " , ", " "):
        environment({f"PSC_{name.upper()}": text})
        with pytest.raises(UsageError, match=f"setting {name}: expected a key"):
            load_settings()
        with pytest.raises(UsageError, match=f"setting {name}: expected a key"):
            load_settings({name: text})
    environment({f"PSC_{name.upper()}": ""})
    assert getattr(load_settings(), name) == getattr(load_settings({name: ""}), name) == ()
    assert len(getattr(load_settings({name: "a,"}), name)) == 1


@pytest.mark.parametrize(
    ("text", "message"), [("prot = 1", "unknown setting 'prot'"), ("port = ", "is not TOML"), (None, "check --config")]
)
def test_rejects_a_bad_file(tmp_path: Path, text: str | None, message: str) -> None:
    config = tmp_path / "psc.toml"
    if text is not None:
        config.write_text(text)
    with pytest.raises(UsageError, match=message):
        load_settings({"config": config})


def test_ignores_empty_variables_and_those_of_others(environment: Environment) -> None:
    default = load_settings()
    environment({"PSC_DATA": "/data", "PSC_CLIENT_URL": "http://x", "OTHER": "1", "PSC_PORT": ""})
    assert load_settings() == default


def test_an_empty_list_of_images_to_log_counts(tmp_path: Path, environment: Environment) -> None:
    (tmp_path / "psc.toml").write_text("log_images = 'accept'\n")
    assert settings_from(["--log-images", ""]).log_images == ()
    environment({"PSC_LOG_IMAGES": "", "PSC_CONFIG": str(tmp_path / "psc.toml")})
    assert load_settings().log_images == ()
    assert load_settings({"log_images": "accept"}).log_images == ("accept",)


def test_bundles_have_names() -> None:
    settings = load_settings({"bundle": "main=/b/one, /b/two/"})
    assert settings.named_bundles == (("main", Path("/b/one")), ("two", Path("/b/two/")))


def test_a_link_gives_its_own_name_wherever_it_points(tmp_path: Path) -> None:
    link = tmp_path / "current"
    link.symlink_to(tmp_path / "one")
    settings = load_settings({"bundle": str(link)})
    link.unlink()
    link.symlink_to(tmp_path / "two")
    assert settings.named_bundles == (("current", link),)


def test_every_setting_is_a_flag_and_in_the_table() -> None:
    table, flags = settings_table(), parser(all_flags=True).format_help()
    for name, field in Settings.model_fields.items():
        assert table.count(f"\n| `{name}` |") == 1
        assert "--" + name.replace("_", "-") in flags
        assert field.description


def test_flags() -> None:
    words = ["--bundle", "a", "--bundle", "b=c", "--access-log", "--no-page", "--max-delay-ms", "2.5", "--port", "0"]
    settings = settings_from(words)
    assert settings.bundle == ("a", "b=c")
    assert (settings.access_log, settings.page, settings.max_delay_ms, settings.port) == (True, False, 2.5, 0)


@pytest.mark.parametrize(
    ("cpus", "limit", "fronts", "decoders"),
    [
        (1, None, 0, 1),
        (2, None, 2, 2),
        (3, None, 2, 3),
        (16, "max 100000", 8, 16),
        (64, "200000 100000", 2, 2),
        (8, "50000 100000", 0, 1),
    ],
)
def test_there_are_as_many_fronts_and_decoders_as_cpus_may_be_used(
    cpus: int, limit: str | None, fronts: int, decoders: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cpus)))
    monkeypatch.setattr("app.settings._CPU_LIMIT", tmp_path / "cpu.max")
    if limit is not None:
        (tmp_path / "cpu.max").write_text(limit)
    assert (load_settings().fronts, load_settings().decoders) == (fronts, decoders)
    assert load_settings({"workers": 5}).fronts == 5
    assert load_settings({"workers": 0}).fronts == 0
