"""The comparison with peers, without installing any: numbers, commands, the adapter, and a run against a fake."""

from __future__ import annotations

import io
import json
import sys
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from PIL import Image

from benchmarks.runs import Json, environment
from benchmarks.serving import ceilings, environments, measure, peers, running, servers
from benchmarks.serving.adapters.settings import COUNTS
from benchmarks.serving.ceilings import SIZES, BareSteps, best_images_per_s, images_per_s
from benchmarks.serving.client import Load, Response
from benchmarks.serving.drive import quantile, summary
from benchmarks.serving.gpu import GpuUse
from benchmarks.serving.images import photographs
from benchmarks.serving.overhead import make_bundle, network
from benchmarks.serving.peers_report import write_report
from benchmarks.serving.servers import BY_NAME, CASES, COMPUTE, OVERHEAD, PHOTOGRAPHS, SERVERS, answer_of
from benchmarks.serving.targets import Ratio, targets, times
from psc_core.images.preprocess import PRESETS
from tests.app.fakes import png

FAKE = """
import json, os, struct
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


def test_quantile_of_nothing_is_infinite() -> None:
    assert quantile([], 0.5) == float("inf")
    assert quantile([1.0, 2.0, 3.0, 4.0], 0.99) == 4.0


def test_summary_excludes_rejected_requests_from_latencies() -> None:
    answers = [Response(0.1 * k, 0.001 * (k + 1), 200, None) for k in range(10)] + [Response(0.5, 9.0, 503, None)]
    found = summary(Load(0.0, 1.0, answers), images=32)
    assert found["statuses"] == {"200": 10, "503": 1}
    assert found["seconds"] == 9.5  # The last answer came then.
    assert found["images_per_s"] == pytest.approx(32 * found["requests_per_s"], abs=2)
    assert (found["p50_ms"], found["p99_ms"]) == (6.0, 10.0)


def test_images_per_s_interpolates_between_sizes() -> None:
    steps = {"folded": {"1": 2.0, "2": 3.0, "64": 64.0}, "plain": {"1": 9.0, "64": 640.0}}
    assert images_per_s(steps, 2) == pytest.approx(1000 * 2 / 3)
    assert images_per_s(steps, 33) == pytest.approx(1000 * 33 / 33.5)
    assert images_per_s(steps, 0.2) == images_per_s(steps, 1) == 500
    assert images_per_s({**steps, "onnx": {"1": 1.0, "64": 640.0}}, 1) == 1000
    assert best_images_per_s(steps) == 1000


def test_environment_prefers_the_peers_packages(tmp_path: Path) -> None:
    made, installed = environments.commands(tmp_path / "x", "mosec==0.9.8")
    assert made[:3] == [sys.executable, "-m", "venv"]
    assert installed[0] == str(tmp_path / "x" / "bin" / "python")
    assert installed[-1] == "mosec==0.9.8"
    assert not {"torch", "--target"} & set(installed)
    site, root = environments.shared_paths().splitlines()
    assert (Path(site) / "torch").is_dir()
    assert (Path(root) / "psc_core").is_dir()


def test_environment_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []

    def fake(command: list[str], **_: Any) -> Any:
        ran.append(command)
        (tmp_path / "x" / "lib" / "python3" / "site-packages").mkdir(parents=True, exist_ok=True)
        return type("Done", (), {"returncode": 0, "stderr": ""})

    monkeypatch.setattr(environments.subprocess, "run", fake)
    for requirement in ("a==1", "a==1", "a==2"):
        environments.build("x", requirement, tmp_path)
    assert [command[-1] for command in ran if "pip" in command] == ["a==1", "a==2"]
    shared = tmp_path / "x" / "lib" / "python3" / "site-packages" / "psc-benchmark.pth"
    assert shared.read_text() == environments.shared_paths()


def test_failed_installation_shows_pip_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = type("Done", (), {"returncode": 1, "stderr": "no such version"})
    monkeypatch.setattr(environments.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(RuntimeError, match="no such version"):
        environments.build("x", "a==1", tmp_path)


@pytest.mark.parametrize("server", SERVERS, ids=lambda server: server.name)
def test_server_commands_and_variables(server: servers.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PSC_API_KEYS", "secret")
    variables = server.variables(OVERHEAD, port=5, bundle=tmp_path, counts=tmp_path, device="cuda")
    assert "PSC_API_KEYS" not in variables
    command = server.command(Path("python"), port=5, bundle=tmp_path, device="cuda")
    assert "{" not in " ".join(command)
    if server.ours:
        assert str(tmp_path) in command
        assert "--device=cuda" in command
    else:
        assert variables["BENCH_PORT"] == "5"
        assert variables["BENCH_DEVICE"] == "cuda"
        assert server.requirement is None or "==" in server.requirement
    assert not server.options or set(server.options) == set(CASES)


def test_requests_of_many_images() -> None:
    images = [png(5), png(200), png(7)]
    assert BY_NAME["mosec"].target(1, images).content_type == "image/png"
    assert BY_NAME["mosec"].target(1, photographs(1)).content_type == "image/jpeg"
    ours = BY_NAME["psc"].target_of_many(1, images, 2)
    theirs = BY_NAME["bentoml"].target_of_many(1, images, 2)
    assert ours is not None and theirs is not None
    assert [len(json.loads(body)["images"]) for body in ours.bodies] == [2, 2]
    assert set(json.loads(ours.bodies[0])["images"][0]) == {"b64"}
    assert isinstance(json.loads(theirs.bodies[0])["images"][0], str)
    assert BY_NAME["mosec"].target_of_many(1, images, 2) is None


def test_adapter_answers_like_the_library(tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_BUNDLE", str(tiny_bundle))
    monkeypatch.setenv("BENCH_COUNTS", str(tmp_path))
    monkeypatch.setattr("benchmarks.serving.adapters.model.FACTORY", "tests.tiny:network")
    monkeypatch.setattr(running, "FACTORY", "tests.tiny:network")
    from benchmarks.serving.adapters.model import Model

    model = Model()
    before = running.counted(tmp_path)
    images = [png(5, size=28), png(200, size=28)]
    answers = model.predict([model.decode(image) for image in images])
    after = running.counted(tmp_path)
    assert (after[0] - before[0], after[1] - before[1]) == (1, 2)
    for image, answer in zip(images, answers, strict=True):
        running.check_answer(BY_NAME["mosec"], answer_of(BY_NAME["mosec"], model.dump(answer)), tiny_bundle, image)
    wrong = {**answers[0], "log_density": answers[0]["log_density"] + 1}
    with pytest.raises(running.ServerFailed, match="the library"):
        running.check_answer(BY_NAME["mosec"], wrong, tiny_bundle, images[0])
    with pytest.raises(ValueError, match="expected an image of"):
        model.decode(png(5, size=8))


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> servers.Server:
    """A minimal server; its answers are not checked."""
    monkeypatch.setattr(running, "FIRST_WARM_UP_SECONDS", 0.1)
    monkeypatch.setattr(running, "WARM_UP_SECONDS", 0.1)
    monkeypatch.setattr(measure, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(running, "check_answer", lambda *_: None)
    (tmp_path / "answer.json").write_text('{"ood_p_value": 1.0}')
    monkeypatch.setattr(servers.Server, "command", lambda *_, **__: [sys.executable, "-c", FAKE])
    return servers.Server("fake", "fake", (), "", many="/predict")


def test_server_is_suspended_between_turns(
    fake: servers.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(running, "check_answer", lambda _server, answer, *_: asked.append(answer))
    server = running.RunningServer(fake, COMPUTE, tmp_path / "answer.json", [png(5)], "cpu")
    pids = server._processes.pids()

    def stopped() -> bool:
        """A signal takes a moment."""
        end = time.monotonic() + 20
        while time.monotonic() < end:
            if {Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in pids} == {"T"}:
                return True
            time.sleep(0.01)
        return False

    assert asked == [{"ood_p_value": 1.0}]
    assert server.about["backend"] == "folded"  # What the library runs a peer's model on.
    server.stop()
    with running.Client() as client:
        for _ in range(2):
            assert stopped()
            found = server.turn(client, 0.4)
        assert stopped()
        point = server.point(client, 50.0, 0.4)
    assert stopped()
    server.close()
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert set(found) == {"closed", "unloaded", "many"}
    assert found["closed"]["statuses"].keys() == {"200"}
    assert found["closed"]["mean_batch"] == 2.0
    assert found["many"]["images_per_s"] > found["many"]["requests_per_s"]
    assert found["closed"]["server_cpu_s"] >= 0
    assert point["per_s"] == 50.0
    assert point["statuses"].keys() == {"200"}


def test_servers_take_turns_and_failed_ones_are_left_out(
    fake: servers.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    class Scripted:
        about: ClassVar = {"versions": {}, "start_s": 0.1}

        def __init__(self, server: servers.Server, *_: Any) -> None:
            if server.name == "no":
                raise running.ServerFailed("no haproxy")
            self._name = server.name

        def stop(self) -> None:
            order.append(f"{self._name} stopped")

        def turn(self, *_: Any) -> dict[str, Any]:
            order.append(self._name)
            if order[-2:].count("ends") == 2:
                raise RuntimeError("gone")
            return {"closed": phase(9.0), "unloaded": phase(9.0)}

        def point(self, _: Any, per_s: float, __: float) -> Json:
            order.append(f"{self._name} at {per_s:g}")
            return {**phase(per_s), **point(per_s, 5.0, "behind" if per_s > 8 else None)}

        def close(self) -> None:
            order.append(f"{self._name} closed")

    class Bare:
        def __init__(self, *_: Any) -> None:
            """Without a process."""

        def measure(self, _: float) -> Json:
            return {"step_ms": {}}

        def close(self) -> None:
            order.append("bare closed")

    monkeypatch.setattr(measure, "RunningServer", Scripted)
    monkeypatch.setattr(measure, "BareSteps", Bare)
    args = peers.parser().parse_args(["--rounds", "3", "--sweeps", "1", "--cases", OVERHEAD])
    shown = [replace(fake, name=name, label=name) for name in ("psc", "no", "ends")]
    file = tmp_path / "record.json"
    with running.Client() as client:
        run = measure.Run(file, peers.new_record(args, shown), shown, "cpu", 1.0, 3, 1, client)
        measure.measure_table(run, run.record["tables"][0], tmp_path, [])
    assert order[:2] == ["psc stopped", "ends stopped"]
    assert order[2:7] == ["psc", "ends", "ends", "psc", "psc"]
    assert order[7:] == [
        *(f"psc at {rate}" for rate in ("2.25", "4.5", "6.75", "10.1", "8.26", "7.47")),
        "bare closed", "ends closed", "psc closed",
    ]  # fmt: skip
    (kept,) = json.loads(file.read_text())["tables"]
    assert kept["slowest_peak"] == 9.0  # No peer is left.
    assert len(kept["servers"]["psc"]["rounds"]) == len(kept["bare"]) == 3
    assert [one["per_s"] for one in kept["servers"]["psc"]["sweeps"][0]] == [2.25, 4.5, 6.75, 10.1, 8.26, 7.47]
    assert kept["servers"]["no"] == {"failed": "no haproxy"}
    assert kept["servers"]["ends"] == {"failed": "gone"}


def test_only_the_compute_bound_case_is_measured_on_older_instruction_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "available", lambda: ["AVX2", "AVX-512"])

    def planned(*words: str) -> list[tuple[str, str]]:
        return peers.planned(peers.parser().parse_args(list(words)))

    best = [(OVERHEAD, "AVX-512"), (PHOTOGRAPHS, "AVX-512")]
    assert planned() == [*best, (COMPUTE, "AVX2"), (COMPUTE, "AVX-512")]
    assert planned("--best-instructions") == planned("--device", "cuda") == [*best, (COMPUTE, "AVX-512")]
    assert planned("--cases", COMPUTE) == [(COMPUTE, "AVX2"), (COMPUTE, "AVX-512")]


def test_slowest_peak_is_a_peers() -> None:
    found = record({"psc": 5.0, "mosec": 30.0, "fastapi": 20.0})["tables"][0]["servers"]
    assert measure.slowest_peak(found) == 30.0  # 20 and 40 in two rounds
    assert measure.slowest_peak({"psc": found["psc"], "ray": {"failed": "no haproxy"}}) == 7.5
    assert measure.slowest_peak({}) == 0.0


def phase(images_per_s: float, **more: Any) -> dict[str, Any]:
    """A recorded phase."""
    return {
        "images_per_s": images_per_s, "requests_per_s": images_per_s, "requests": 100, "statuses": {"200": 100},
        "p50_ms": 2.0, "p99_ms": 5.0, "server_cpu_s": 0.1, "client_cpu_s": 0.1, **more,
    }  # fmt: skip


def point(per_s: float, p99_ms: float, end: str | None = None) -> Json:
    """A recorded point of a curve."""
    return {"per_s": per_s, "end": end, "p50_ms": p99_ms / 2, "p99_ms": p99_ms}


def record(rates: dict[str, float], faster: float = 2.0) -> dict[str, Any]:
    """A whole record: a server has the same rates in all tables; in the second round the machine is faster."""
    step = {str(size): float(size) for size in SIZES}
    found = {
        name: {
            "versions": {name: "1"},
            "backend": "onnx" if name == "psc" else "folded",
            "start_s": 3.0,
            "rounds": [
                {"closed": phase(k * rate, mean_batch=32.0), "unloaded": phase(9.0), "many": phase(k * rate)}
                for k in (1.0, faster)
            ],
            "sweeps": [
                [point(25.0, 3000 / rate), point(50.0, 6000 / rate), point(75.0, 9000 / rate),
                 point(112.0, 99999 / rate, "behind"), point(91.7, 12000 / rate)]
            ],
        }
        for name, rate in rates.items()
    }  # fmt: skip
    bare = [
        {
            "step_ms": {
                "onnx": {size: ms / k for size, ms in step.items()},
                "plain": {size: 9 * ms for size, ms in step.items()},
            }
        }
        for k in (1.0, faster)
    ]
    more = {"bare": bare, "slowest_peak": 100.0}
    tables = [{**peers.new_table(case, "AVX2"), "servers": found, **more} for case in CASES]
    tables[2]["servers"] = {**found, "ray": {"failed": "no haproxy"}}
    return {
        "seconds": 8.0, "sweeps": 1, "clients": 64, "many": {"images": 32, "clients": 4}, "note": "", "command": "c",
        "environment": environment(torch.device("cpu")), "device": "cpu", "tables": tables,
        "ceilings": {"decode": {PHOTOGRAPHS: 9.0}, "bare": phase(9.0), "instant": {"failed": "loading\nfailed"}},
        "settings": {server.name: server.settings for server in SERVERS},
    }  # fmt: skip


def test_targets() -> None:
    found = {one["target"]: one for one in targets(record({"psc": 960.0, "mosec": 961.0, "litserve": 240.0}))}
    words = ("LitServe", "mean batch", "photographs, AVX2, single images: psc-serve above", "of 32",
             "overhead-bound, AVX2, equal load: psc-serve, p99", "rate at")  # fmt: skip
    by_word = {word: next(one for what, one in found.items() if word in what) for word in words}
    met = {word: one["met"] for word, one in by_word.items()}
    assert list(met.values()) == [True, True, False, True, False, False]
    assert by_word["mean batch"]["measured"] == "0.960 (0.960 to 0.960)"
    tail = by_word["overhead-bound, AVX2, equal load: psc-serve, p99"]["measured"]
    assert tail.startswith("at 3 of 6 (peer, rate), worst mosec")
    assert by_word["rate at"]["measured"] == "92/s, the best peer 92/s (mosec)"
    assert not any("Ray" in what for what in found)  # It did not run.


def test_ratio_is_taken_within_rounds() -> None:
    """The machine's speed changes between rounds, alike for both."""
    one = record({"psc": 960.0, "litserve": 192.0}, faster=0.01)
    assert str(times(*(one["tables"][0]["servers"][name] for name in ("psc", "litserve")))) == "5.00 × (5.00 to 5.00)"
    assert str(Ratio([2.0, 1.0, 4.0], " ×")) == "2.00 × (1.00 to 4.00)"
    assert str(Ratio([20.0], " ×")) == "20.0 ×"


def test_section_shows_failures(tmp_path: Path) -> None:
    (tmp_path / "serving.md").write_text("# Results\n\n## Other\n\ntext\n")
    one = record({"psc": 960.0, "mosec": 961.0})
    one["tables"][0]["servers"]["mosec"]["rounds"][0]["closed"]["statuses"]["503"] = 4
    for _ in range(2):
        write_report(one, tmp_path)
    text = (tmp_path / "serving.md").read_text()
    assert text.count("## Serving against peers\n") == 1
    assert "### Compute-bound, AVX2\n" in text
    assert "## Other\n\ntext" in text
    assert "| mosec | folded | 1,442 (4 × 503) | 0.999 × (0.999 to 0.999) |" in text
    assert "| server | 25/s | 50/s | 75/s | 112/s | rate at a p99 of 100 ms |" in text
    assert "| psc-serve | 1.6/3.1 | 3.1/6.2 | 4.7/9.4 | *behind* | 92/s |" in text
    assert "| did not run: loading failed |" in text
    assert "Ray Serve | did not run" in text and "did not run: no haproxy" in text
    assert (tmp_path / "serving-peers.svg").stat().st_size > 1000
    for turn, busy in zip(one["tables"][2]["servers"]["psc"]["rounds"], (0.62, 0.72), strict=True):
        turn["closed"]["gpu_utilisation"] = busy
    write_report({**one, "device": "cuda"}, tmp_path)
    assert "GPU busy" not in text
    text = (tmp_path / "serving.md").read_text()
    assert "## Serving against peers, cuda\n" in text
    assert "| 67% |" in text
    assert (tmp_path / "serving-peers-cuda.svg").exists()


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (["40, 1000", "60, 3000", "50, 2"], {"gpu_utilisation": 0.5, "gpu_memory_mib": 3000}),
        (["[N/A], 1000"], {}),
        ([], {}),
    ],
)
def test_gpu_use_from_nvidia_smi(
    lines: list[str], found: Json, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "nvidia-smi"
    says = [f"echo '{line}'" for line in lines]
    script.write_text("\n".join(["#!/bin/sh", *says, f"touch {tmp_path}/told", "exec sleep 60"]))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with GpuUse() as gpu:
        while not (tmp_path / "told").exists():
            time.sleep(0.01)
    assert gpu.found == found


def test_gpu_use_without_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with GpuUse() as gpu:
        pass
    assert gpu.found == {}


@pytest.fixture(scope="module")
def overhead_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The overhead-bound bundle."""
    return make_bundle(tmp_path_factory.mktemp("overhead") / "bundle")


@pytest.mark.parametrize("module", ["bare", "instant"])
def test_http_ceilings(module: str, overhead_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "FIRST_WARM_UP_SECONDS", 0.1)
    answer = tmp_path / "answer.json"
    answer.write_bytes(b"{}")
    with running.Client() as client:
        found = measure.measure_http(module, overhead_bundle, answer, [png(5, size=28)], 0.3, client)
    assert found["statuses"].keys() == {"200"}
    assert found["requests_per_s"] > 0


@pytest.mark.parametrize(("channels", "stride", "side"), [(1, 4, 28), (3, 32, 224)])
def test_overhead_network_is_small(channels: int, stride: int, side: int) -> None:
    net = network(in_channels=channels, stride=stride)
    assert sum(parameter.numel() for parameter in net.parameters()) < 1100
    assert net(torch.zeros(2, channels, side, side)).shape == (2, 10)


def test_photographs_have_the_size_of_photographs() -> None:
    files = photographs(2)
    assert files == photographs(2)
    assert files[0] != files[1]
    assert all(90_000 < len(file) < 110_000 for file in files)
    assert Image.open(io.BytesIO(files[0])).size == (640, 480)


def test_peers_decode_photographs_like_the_service(photograph_model: Any) -> None:
    (file,) = photographs(1)
    exact = PRESETS["imagenet"].from_bytes(file)
    assert torch.equal(photograph_model.decode(file), torch.from_numpy(exact))


@pytest.fixture
def photograph_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An adapter's model that expects photographs, without a bundle."""
    from benchmarks.serving.adapters.model import Model

    model = object.__new__(Model)
    model._preprocess, model._shape = PRESETS["imagenet"], PRESETS["imagenet"].shape
    return model


def test_bare_steps_run_on_every_backend(overhead_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psc_core.model.backends.available_backends", lambda _: ("folded", "plain"))
    monkeypatch.setattr(ceilings, "fresh_process", lambda: ThreadPoolExecutor(1))
    monkeypatch.setattr(ceilings, "_steps", {})
    bare = BareSteps(overhead_bundle, "cpu")
    try:
        found = [bare.measure(0.0) for _ in range(2)]
    finally:
        bare.close()
    for one in found:
        assert one["step_ms"].keys() == {"folded", "plain"}
        assert all(list(ms) == [str(size) for size in SIZES] for ms in one["step_ms"].values())


def test_peers_are_not_dependencies() -> None:
    text = (environments.ROOT / "pyproject.toml").read_text()
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    named = " ".join([*extras.get("dev", []), *extras.get("bench", [])])
    assert not [name for name in ("mosec", "litserve", "bentoml") if name in named]
    assert COUNTS.size == 16
