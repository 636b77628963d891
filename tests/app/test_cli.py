"""``psc-serve``: bad usage is one line and code 2."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from app.cli import settings_from
from psc_core import __version__
from psc_core.errors import UsageError
from tests import warm
from tests.conftest import ROOT, SHIPPED_BUNDLE
from tests.served import GUARD_SECONDS


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PSC_")}
    return warm.run(
        [sys.executable, "-m", "app.cli", *arguments],
        capture_output=True,
        text=True,
        env={**kept, **environment},
        cwd=ROOT,
        timeout=GUARD_SECONDS,
        check=False,
    )


def test_an_exported_folder_is_sent_to_its_bundle(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").touch()
    result = command("--bundle", str(tmp_path), "--port=0")
    assert result.returncode == 2
    assert "was written by psc-export" in result.stderr and "psc-serve --bundle BUNDLE" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        ([], {}, "no bundle to serve"),
        (["--bundle", "/nowhere"], {}, "manifest.json"),
        (["--bundle", f"m=/{'x' * 256}"], {}, f"user {os.geteuid()} cannot read /"),
        (["--alpha", "7"], {}, "alpha"),
        (["--config", "/nowhere.toml"], {}, "--config"),
        (["--prot", "1"], {}, "--prot"),
        (["--bundle", "/nowhere"], {"PSC_PROT": "1"}, "PSC_PROT"),
        (["--bundle", str(SHIPPED_BUNDLE), "--port=0", "--api-keys-file=/nowhere"], {}, "/nowhere"),
        (["--bundle", str(SHIPPED_BUNDLE), "--port=0", "--workers=2", "--api-keys-file=/nowhere"], {}, "/nowhere"),
    ],
)
def test_bad_usage_is_code_2_and_says_why(arguments: list[str], environment: dict[str, str], message: str) -> None:
    result = command(*arguments, **environment)
    assert result.returncode == 2
    assert message in result.stderr and "Traceback" not in result.stderr


def test_a_network_that_may_not_be_imported_is_named_with_the_remedy(tiny_bundle: Path) -> None:
    result = command("--bundle", str(tiny_bundle))
    assert (result.returncode, len(result.stderr.splitlines())) == (2, 1)
    assert "--allow-factories tests.tiny:network or set PSC_ALLOW_FACTORIES" in result.stderr


def test_the_version_and_the_help() -> None:
    assert command("--version").stdout == f"psc {__version__}\n"
    for flag, says_all in (("--help", False), ("--help-all", True)):
        result = command(flag)
        assert (result.returncode, result.stderr) == (0, "")
        assert "--alpha" in result.stdout and ("--drain-seconds" in result.stdout) == says_all


def test_a_taken_port_is_code_2() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for words in (["--port", port], ["--port=0", "--grpc-port", port]):
            result = command("--bundle", str(SHIPPED_BUNDLE), *words)
            assert result.returncode == 2, words
            assert port in result.stderr


def test_a_bad_bundle_is_code_2_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    result = command("--bundle", str(tmp_path), "--port", "0")
    assert result.returncode == 2, result.stderr
    last = json.loads(result.stderr.splitlines()[-1])
    assert last["level"] == "critical" and "manifest" in last["message"]
    assert "Traceback" not in result.stderr


def test_demo_is_the_bundle_of_the_checkout_or_of_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings_from(["--demo"]).named_bundles == (("dirty-mnist-resnet18", SHIPPED_BUNDLE),)
    assert settings_from(["--bundle", "own=x", "--demo"]).named_bundles[0] == ("own", Path("x"))
    monkeypatch.setattr("app.cli.__file__", str(tmp_path / "site-packages" / "app" / "cli.py"))
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    with pytest.raises(UsageError):
        settings_from(["--demo"])
    wheel = tmp_path / "share" / "psc" / "dirty-mnist-resnet18"
    wheel.mkdir(parents=True)
    (wheel / "manifest.json").write_text("{}")
    assert settings_from(["--demo"]).named_bundles[0][1] == wheel


def test_a_standard_error_that_is_full_ends_nothing(tmp_path: Path) -> None:
    """multiprocessing flushes it before it starts a worker, and Python at exit."""
    script = tmp_path / "full.py"
    script.write_text(
        "import multiprocessing, os, sys\n"
        "from app import cli\n"
        "def work():\n"
        "    assert os.environ['PYTHONUNBUFFERED'] == '1'\n"
        "if __name__ == '__main__':\n"
        "    cli.unbuffer_stderr()\n"
        "    try:\n"
        "        print('a line', file=sys.stderr)\n"
        "        sys.exit('expected the line to be refused')\n"
        "    except OSError:\n"
        "        pass\n"
        "    worker = multiprocessing.get_context('spawn').Process(target=work)\n"
        "    worker.start()\n"
        "    worker.join()\n"
        "    sys.exit(worker.exitcode)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    environment["PYTHONPATH"] = str(ROOT)
    with Path("/dev/full").open("w") as full:
        run = subprocess.run([sys.executable, str(script)], stderr=full, env=environment, cwd=ROOT, check=False)
    assert run.returncode == 0
