"""The comparison with peers, without installing any: commands, the adapter, turns of a fake server, and the tables."""

from __future__ import annotations

import io
import json
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from benchmarks.runs import RESULTS, Json
from benchmarks.serving import bundles, ceilings, peers, report, running, servers
from benchmarks.serving.ceilings import SIZES, BareSteps, best_images_per_s, images_per_s
from benchmarks.serving.gpu import GpuUse
from benchmarks.serving.images import photographs
from benchmarks.serving.servers import BY_NAME, CASES, COMPUTE, DECODED, OURS, OVERHEAD, PHOTOGRAPHS, SERVERS, answer_of
from psc_core.images.preprocess import PRESETS
from tests.app.fakes import png

FAKE = """
import os, struct
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

counts = Path(os.environ["BENCH_COUNTS"]) / "1"
answers = Path(os.environ["BENCH_BUNDLE"]).read_bytes()
steps = 0

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        global steps
        self.rfile.read(int(self.headers["Content-Length"]))
        steps += 1
        counts.write_bytes(struct.pack("<qq", steps, 2 * steps))
        self.send_response(200)
        self.send_header("Content-Length", str(len(answers)))
        self.end_headers()
        self.wfile.write(answers)
    def log_message(self, *_):
        pass

ThreadingHTTPServer.request_queue_size = 128
ThreadingHTTPServer(("127.0.0.1", int(os.environ["BENCH_PORT"])), Handler).serve_forever()
"""


def test_images_per_s_interpolates_between_sizes() -> None:
    folded, plain = {"1": 2.0, "8": 9.0, "32": 30.0, "64": 64.0}, dict.fromkeys(map(str, SIZES), 640.0)
    assert images_per_s({"folded": folded, "plain": plain}, 48) == pytest.approx(1000 * 48 / 47)
    assert images_per_s({"folded": folded}, 0.2) == images_per_s({"folded": folded}, 1) == 500
    assert best_images_per_s({"folded": folded}) == pytest.approx(1000 * 32 / 30)


@pytest.mark.parametrize("server", SERVERS, ids=lambda server: server.name)
def test_server_commands_and_variables(server: servers.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PSC_API_KEYS", "secret")
    variables = server.variables(OVERHEAD, port=5, bundle=tmp_path, counts=tmp_path, device="cuda")
    command = server.command(Path("python"), port=5, bundle=tmp_path, device="cuda")
    assert "PSC_API_KEYS" not in variables and "{" not in " ".join(command)
    if server.name in OURS:
        assert {str(tmp_path), "--device=cuda"} <= set(command)
    else:
        assert (variables["BENCH_PORT"], variables["BENCH_DEVICE"]) == ("5", "cuda")
        assert server.requirement is None or "==" in server.requirement
    assert not server.options or set(server.options) == set(CASES) - {DECODED}


def test_requests_of_many_images() -> None:
    images = [png(5), png(200), png(7)]
    assert BY_NAME["mosec"].target(1, images).content_type == "image/png"
    assert BY_NAME["mosec"].target(1, photographs(1)).content_type == "image/jpeg"
    assert BY_NAME["mosec"].target_of_many(1, images, 2) is None
    for name, kind in (("psc", dict), ("bentoml", str)):
        target = BY_NAME[name].target_of_many(1, images, 2)
        assert target is not None
        assert [[type(image) for image in json.loads(body)["images"]] for body in target.bodies] == [[kind, kind]] * 2


def test_adapter_answers_like_the_library(tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_BUNDLE", str(tiny_bundle))
    monkeypatch.setenv("BENCH_COUNTS", str(tmp_path))
    monkeypatch.setattr("benchmarks.serving.adapters.model.FACTORY", "tests.tiny:network")
    monkeypatch.setattr(running, "FACTORY", "tests.tiny:network")
    from benchmarks.serving.adapters.model import Model

    model, before = Model(), running.counted(tmp_path)
    images = [png(5, size=28), png(200, size=28)]
    answers = model.predict([model.decode(image) for image in images])
    assert [after - count for after, count in zip(running.counted(tmp_path), before, strict=True)] == [1, 2]
    for image, answer in zip(images, answers, strict=True):
        running.check_answer(BY_NAME["mosec"], answer_of(BY_NAME["mosec"], model.dump(answer)), tiny_bundle, image)
    wrong = {**answers[0], "log_density": answers[0]["log_density"] + 1}
    with pytest.raises(running.ServerFailed, match="the library"):
        running.check_answer(BY_NAME["mosec"], wrong, tiny_bundle, images[0])
    with pytest.raises(ValueError, match="expected an image of"):
        model.decode(png(5, size=8))
    model._preprocess, (file, other) = PRESETS["imagenet"], photographs(2)
    assert torch.equal(model.decode(file), torch.from_numpy(PRESETS["imagenet"].from_bytes(file)))
    model._preprocess = by_pillow = replace(PRESETS["imagenet"], resizer="pillow")
    assert torch.equal(model.decode(file), torch.from_numpy(by_pillow.from_bytes(file)))
    assert file != other and 90_000 < len(file) < 110_000 and Image.open(io.BytesIO(file)).size == (640, 480)


def test_servers_take_turns_and_failed_ones_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake servers that are suspended between their turns; one does not start, the other is checked and measured."""
    asked: list[Any] = []
    monkeypatch.setattr(running, "FIRST_WARM_UP_SECONDS", 0.1)
    monkeypatch.setattr(running, "WARM_UP_SECONDS", 0.1)
    monkeypatch.setattr(peers, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(running, "check_answer", lambda _server, answer, *_: asked.append(answer))
    monkeypatch.setattr(peers, "BareSteps", lambda *_: Bare())
    monkeypatch.setattr(
        servers.Server, "command", lambda self, *_, **__: [sys.executable, "-c", FAKE if self.name == "fake" else "1/0"]
    )

    class Bare:
        def measure(self, _: float) -> Json:
            (pid,) = [pid for pid in running_pids if pid]
            wait_until_stopped()
            states.append(state_of(pid))
            return {"step_ms": {"folded": {"1": 1.0, "64": 20.0}}}

        def close(self) -> None:
            """Without a process."""

    def state_of(pid: int) -> str:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]

    def wait_until_stopped() -> None:
        deadline = time.monotonic() + 20
        while any(state_of(pid) != "T" for pid in running_pids) and time.monotonic() < deadline:
            time.sleep(0.01)  # A signal takes a moment.

    states: list[str] = []
    running_pids: list[int] = []
    real = running.RunningServer.stop

    def stop(self: running.RunningServer) -> None:
        real(self)
        running_pids[:] = self._processes.pids()

    monkeypatch.setattr(running.RunningServer, "stop", stop)
    (tmp_path / "answer.json").write_text('{"ood_p_value": 1.0}')
    args = peers.parser().parse_args(["--rounds", "2", "--sweeps", "1", "--seconds", "0.4"])
    args.cases, args.best_instructions = [COMPUTE], True
    shown = [servers.Server(name, name, (), "", many="/predict") for name in ("fake", "no")]
    monkeypatch.setattr("benchmarks.serving.curve.MAX_RATES", 2)
    record, written = peers.new_record(args, shown), list[int]()
    (kept,) = record["tables"]
    with running.Client() as client:
        inputs = tmp_path / "answer.json", [png(5)]
        peers.measure_table(record, kept, shown, inputs, client, lambda: written.append(1))
    assert len(written) == 3
    assert asked == [{"ood_p_value": 1.0}] and states == ["T", "T"]
    assert not [pid for pid in running_pids if Path(f"/proc/{pid}").exists()]
    assert "ZeroDivisionError" in kept["servers"]["no"]["failed"]
    found = kept["servers"]["fake"]
    assert found["backend"] == "folded"  # What the library runs a peer's model on.
    assert len(found["rounds"]) == len(kept["bare"]) == 2 and set(found["rounds"][0]) == {"closed", "unloaded", "many"}
    turn = found["rounds"][0]
    assert turn["closed"]["statuses"].keys() == {"200"} and turn["closed"]["mean_batch"] == 2.0
    assert turn["many"]["images_per_s"] > turn["many"]["requests_per_s"]
    assert "server_cpu_s" in turn["closed"]
    assert kept["slowest_peak"] == peers.slowest_peak({"fake": found}) > 0
    assert 1 <= len(found["sweeps"][0]) <= 2  # A slow machine falls behind at the first rate.


def test_only_the_compute_bound_case_is_measured_on_older_instruction_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "available", lambda: ["AVX2", "AVX-512"])

    def planned(*words: str) -> list[tuple[str, str]]:
        return peers.planned(peers.parser().parse_args(list(words)))

    best = [(case, "AVX-512") for case in (OVERHEAD, PHOTOGRAPHS, DECODED)]
    assert planned() == [*best, (COMPUTE, "AVX2"), (COMPUTE, "AVX-512")]
    assert planned("--best-instructions") == planned("--device", "cuda") == [*best, (COMPUTE, "AVX-512")]


def test_tables_of_other_cases_are_kept() -> None:
    def record(**tables: str) -> Json:
        given = [{"case": case_of[case], "title": title} for case, title in tables.items()]
        return {"tables": given, "ceilings": {"decode": {}}}

    case_of = {"digits": OVERHEAD, "photographs": PHOTOGRAPHS, "resnet": COMPUTE}
    found, before = record(photographs="new"), record(resnet="kept", photographs="old", digits="kept too")
    before["ceilings"]["decode"] = {OVERHEAD: 1.0}
    peers.keep_others(found, before)
    assert [table["title"] for table in found["tables"]] == ["kept too", "new", "kept"]
    assert found["ceilings"]["decode"] == {OVERHEAD: 1.0}


def test_ratios_are_taken_within_rounds() -> None:
    """The machine's speed changes between rounds, alike for both."""
    ours, theirs = (
        {"rounds": [{"closed": {"images_per_s": k * rate, "requests_per_s": k * rate}} for k in (1.0, 0.01, 2.0)]}
        for rate in (960.0, 192.0)
    )
    assert report.spread(report.times(ours, theirs)) == "5.00 × (5.00 to 5.00)"
    assert report.spread([20.0]) == "20.0 ×"
    assert peers.slowest_peak({"psc": ours, "mosec": theirs, "ray": {"failed": "no haproxy"}}) == 192.0
    assert peers.slowest_peak({"psc": ours}) == 960.0


def test_tables_show_failures_and_how_busy_a_gpu_was(tmp_path: Path) -> None:
    record = json.loads((RESULTS / "serving-peers.json").read_text())
    assert "GPU busy" not in report.fragment(record)
    found = record["tables"][0]["servers"]
    found["ray"] = {"failed": "no\nhaproxy"}
    for turn in found["mosec"]["rounds"]:
        turn["closed"]["images_per_s"] = 8433.0
    found["mosec"]["rounds"][0]["closed"]["statuses"] = {"200": 96, "503": 4}
    for turn in found["psc"]["rounds"]:
        turn["closed"]["gpu_utilisation"] = 0.67
    text = report.fragment({**record, "device": "cuda"})
    assert "| Ray Serve | did not run |" in text and "; did not run: no haproxy |" in text
    assert re.search(r"\| mosec \| \w+ \| 8,433 \(4 × 503\) \|", text) and "| 67% |" in text
    report.draw(record, tmp_path)
    assert (tmp_path / "serving-peers.svg").stat().st_size > 1000


@pytest.mark.parametrize(
    ("lines", "found"),
    [(["40, 1000", "60, 3000", "50, 2"], {"gpu_utilisation": 0.5, "gpu_memory_mib": 3000}), (["[N/A], 1000"], {})],
)
def test_gpu_use_from_nvidia_smi(
    lines: list[str], found: Json, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, says = tmp_path / "nvidia-smi", [f"echo '{line}'" for line in lines]
    script.write_text("\n".join(["#!/bin/sh", *says, f"touch {tmp_path}/told", "exec sleep 60"]))
    script.chmod(0o755)
    with monkeypatch.context() as at:
        at.setenv("PATH", str(tmp_path), prepend=":")
        with GpuUse() as gpu:
            while not (tmp_path / "told").exists():
                time.sleep(0.01)
        assert gpu.found == found
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    with GpuUse() as gpu:
        pass
    assert gpu.found == {}


def test_bare_steps_run_on_every_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psc_core.pipeline.available_backends", lambda _: ("folded", "plain"))
    monkeypatch.setattr(ceilings, "fresh_process", lambda: ThreadPoolExecutor(1))
    monkeypatch.setattr(ceilings, "_steps", {})
    bare = BareSteps(bundles.small(tmp_path / "bundle"), "cpu")
    try:
        found = bare.measure(0.0)["step_ms"]
    finally:
        bare.close()
    assert found.keys() == {"folded", "plain"}
    assert all(list(ms) == [str(size) for size in SIZES] for ms in found.values())
