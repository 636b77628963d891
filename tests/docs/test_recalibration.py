"""The circle of docs/recalibration.md, run as it stands: serve, send, label, recalibrate, reload, replay."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT

ENTRIES = {
    "psc-serve": "app.cli:main",
    "psc-predict": "app.client_cli:main",
    "psc-log": "psc_core.cli.log:main",
    "psc-recalibrate": "psc_core.cli.log:recalibrate_main",
    "psc-replay": "psc_core.cli.log:replay_main",
}
GUARD_SECONDS = 1200
READY = "wait-for readyz ''"
LOGGED = """wait-for metrics 'psc_log_rows_total{model="digits",result="written"} %d.0'"""
SWAPPED = """wait-for model "$(sed -n 's/.*"version": *"\\([0-9a-f]*\\)".*/\\1/p' digits-2/manifest.json | head -1)\""""
WAIT_FOR = """
import contextlib, os, sys, time, urllib.request
found = None
while found is None or sys.argv[2] not in found:
    time.sleep(0.1)
    with contextlib.suppress(OSError):
        found = urllib.request.urlopen(f"{os.environ['URL']}/{sys.argv[1]}").read().decode()
"""


def test_the_circle_runs_as_it_stands(tmp_path: Path) -> None:
    script, rows = ["set -e", 'trap "kill -9 %1" ERR'], iter((800, 860))
    text = (ROOT / "docs" / "recalibration.md").read_text()
    for language, block in re.findall(r"```(sh|python)\n(.*?)```", text, re.DOTALL):
        script.append(block if language == "sh" else f"python - <<'END'\n{block}END\n{READY}")
        script += [LOGGED % next(rows)] if "psc-predict" in block else [SWAPPED] if "kill -HUP" in block else []
    script += ["kill %1", "wait %1"]
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    for name, entry in ENTRIES.items():
        module, function = entry.split(":")
        program = f"import sys\nfrom {module} import {function}\nsys.exit({function}())"
        (commands / name).write_text(f"#!{sys.executable}\n{program}\n")
    (commands / "wait-for").write_text(f"#!{sys.executable} -S{WAIT_FOR}")
    for file in commands.iterdir():
        file.chmod(0o755)
    work = tmp_path / "work"
    work.mkdir()
    for name in ("artifacts", "tests"):
        (work / name).symlink_to(ROOT / name)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PSC_")},
        "PATH": f"{commands}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "PSC_PORT": str(port),
        "PSC_DEVICE": "cpu", "PSC_BACKEND": "folded", "URL": (url := f"http://127.0.0.1:{port}"),
        "PSC_CLIENT_URL": url,
    }  # fmt: skip
    run = subprocess.run(
        ["bash", "-c", "\n".join(script)], cwd=work, env=environment, capture_output=True, text=True,
        timeout=GUARD_SECONDS, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    reviewed, of_class = map(int, re.findall(r"(\d+) reviewed: (\d+) of a class", run.stdout)[0])
    assert 300 < reviewed == of_class < 500 and "next: psc-serve" in run.stdout
    assert f"Of all answered images, by the {reviewed} of the random sample" in run.stdout
    assert f"each of {800 - reviewed} images outside the sample counts this many times" in run.stdout
    before, after = map(float, re.findall(r"of a class: ([\d.]+)% before, at most ([\d.]+)% ", run.stdout)[0])
    assert before > 2 * after
    assert (work / "replay.html").stat().st_size > 10_000
    manifests = ((work / f"digits-{n}" / "manifest.json").read_text() for n in range(2, 6))
    second, third, fourth, fifth = map(json.loads, manifests)
    added = fifth["provenance"]["recalibrations"][-1]["added_class"]
    assert fifth["classes"][-1] == added["name"] == "upside down" and 10 <= added["images"] < 60
    assert added["recognised"] > 0.5 and added["taken"] <= 0.01
    assert second["provenance"]["recalibrations"][0]["labels"] == reviewed
    learnt = fourth["provenance"]["recalibrations"][-1]["reviewed"]
    (kind,) = learnt["kinds"]
    assert learnt["helps"] and (kind["name"], kind["images"]) == ("upside down", 60)
    assert third["provenance"]["recalibrations"][0]["extension"]["images"] == 800 - reviewed
