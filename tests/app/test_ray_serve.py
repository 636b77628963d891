"""``deploy/ray/serve.yaml`` on a Ray of this machine: answers, counts, failures, reloads, scaling."""

import os
import signal
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import yaml

from app.ray_serve import Replica, replicas_for_images
from tests.app.fakes import FakeModel, png
from tests.app.support import PNG, until
from tests.conftest import ROOT, SHIPPED_BUNDLE
from tests.served import GUARD_SECONDS, HTTP, command_line, is_alive, serve_shipped

EXAMPLES = sorted((ROOT / "artifacts/dirty-mnist-resnet18/examples").glob("*.png"))
CONFIG = ROOT / "deploy/ray/serve.yaml"


@pytest.mark.anyio
async def test_replica_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = iter("abcde")
    models: list[FakeModel] = []

    def load(*_: Any, **__: Any) -> FakeModel:
        models.append(FakeModel(version=next(versions)))
        return models[-1]

    monkeypatch.setattr("app.models.build_model", load)
    monkeypatch.setattr("app.models.check_affordable", lambda *_, **__: None)
    monkeypatch.setattr("app.ray_serve.prepare_process", lambda _settings: None)
    replica = Replica({"bundle": f"m={SHIPPED_BUNDLE}", "max_batch_size": 8, "device": "cpu"})
    app = replica.__serve_build_asgi_app__()
    transport = httpx.ASGITransport(app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://x") as client:

        async def version() -> str:
            response = await client.post("/predict", content=png(9), headers=PNG)
            return str(response.raise_for_status().json()["model"]["version"])

        assert await version() == "a"
        for revision, expected in (("1", "a"), ("1", "a"), ("2", "b")):
            await replica.reconfigure({"revision": revision})
            assert await version() == expected
        assert replica.record_autoscaling_stats() == {"psc_waiting_images": 0.0}
        replica.check_health()
        models[-1].pipeline.dead = True
        assert (await client.post("/predict", content=png(9), headers=PNG)).status_code == 503
        await until(lambda: app.state.service.exit_code)
        with pytest.raises(RuntimeError, match="device failed"):
            replica.check_health()


@pytest.mark.parametrize(("waiting", "requests", "replicas"), [(0, 0, 0), (65, 2, 2), (0, 200, 4), (64, 64, 1)])
def test_policy_counts_images_and_requests(waiting: float, requests: float, replicas: int) -> None:
    halves = {"one": waiting / 2, "two": waiting / 2}
    config = SimpleNamespace(target_ongoing_requests=64)
    context = SimpleNamespace(
        aggregated_metrics={"psc_waiting_images": halves}, total_num_requests=requests, config=config
    )
    assert replicas_for_images(context) == (replicas, {})


def test_manifest_for_kuberay_deploys_the_same() -> None:
    service, monitor = yaml.safe_load_all((ROOT / "deploy/ray/rayservice.yaml").read_text())
    deployed, config = yaml.safe_load(service["spec"]["serveConfigV2"]), yaml.safe_load(CONFIG.read_text())
    bundle = deployed["applications"][0]["args"].pop("bundle")
    assert bundle.endswith(Path(config["applications"][0]["args"].pop("bundle")).name)
    assert deployed == config
    (worker,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    (port,) = worker["template"]["spec"]["containers"][0]["ports"]
    assert port["containerPort"] == config["applications"][0]["args"]["metrics_port"]
    assert port["name"] == monitor["spec"]["podMetricsEndpoints"][0]["port"]
    assert monitor["spec"]["selector"]["matchLabels"] == worker["template"]["metadata"]["labels"]
    schema = pytest.importorskip("ray.serve.schema").ServeDeploySchema
    schema.model_validate(deployed)


def replica_processes() -> set[int]:
    """Process ids of the replicas, by the titles that Ray sets: what one is doing goes before and after."""
    numbers = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    titles = {pid: command_line(pid) for pid in numbers if is_alive(pid)}
    return {pid for pid, title in titles.items() if title.startswith("ray::") and "ServeReplica:psc:PSC" in title}


def wait(condition: Callable[[], Any]) -> Any:
    end = time.monotonic() + GUARD_SECONDS
    while not (result := condition()):
        assert time.monotonic() < end
        time.sleep(0.1)
    return result


class Cluster:
    """A Ray of two CPUs with the shipped Serve config, its replicas and what it listens on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
            self.port, self.metrics_port = one.getsockname()[1], two.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def deploy(self, *, replicas: int = 2, fake: bool = False, revision: str = "1", **settings: Any) -> None:
        """Deploy with some settings and wait until it runs, in new replicas unless it is another revision."""
        from ray import serve
        from ray.serve.context import _get_global_client
        from ray.serve.schema import ServeDeploySchema

        config = yaml.safe_load(CONFIG.read_text())
        config["http_options"] = {"host": "127.0.0.1", "port": self.port}
        (app,) = config["applications"]
        (deployment,) = app["deployments"]
        app["runtime_env"]["env_vars"]["PROMETHEUS_MULTIPROC_DIR"] = str(self.folder / ("fake" if fake else "shipped"))
        app["args"] |= {"bundle": f"m={SHIPPED_BUNDLE}", "metrics_port": self.metrics_port, "threads": 1}
        app["args"] |= {"device": "cpu", "backend": "folded", **settings}  # As serve_shipped.
        if fake:
            app["import_path"] = "tests.app.ray_fake:build"
            app["args"]["state"] = str(self.folder)
        deployment["user_config"]["revision"] = revision
        deployment["autoscaling_config"] |= {
            "min_replicas": replicas,
            "max_replicas": 2,
            "upscale_delay_s": 1,
            "look_back_period_s": 11,
        }
        deployment["health_check_period_s"] = 1
        serve.start(http_options=config["http_options"])
        client = _get_global_client()
        assert client is not None
        if revision == "1" and "psc" in serve.status().applications:
            serve.delete("psc")
            wait(lambda: not replica_processes())
        client.deploy_apps(ServeDeploySchema.model_validate(config))
        wait(lambda: serve.status().applications["psc"].status == "RUNNING" and len(replica_processes()) == replicas)

    def predict(self, image: bytes) -> httpx.Response:
        return HTTP.post(self.url + "/predict", content=image, headers=PNG)

    def answer(self, image: bytes) -> dict[str, Any]:
        document: dict[str, Any] = self.predict(image).raise_for_status().json()
        return document

    def counted(self, metric: str = "psc_predictions_total", by: str = "label") -> Counter[str]:
        text = HTTP.get(f"http://127.0.0.1:{self.metrics_port}/metrics").text
        rows = (line for line in text.splitlines() if line.startswith(f"{metric}{{"))
        counts = {row.split(f'{by}="')[1].split('"')[0]: int(float(row.rsplit(" ", 1)[1])) for row in rows}
        return Counter({label: count for label, count in counts.items() if count})


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    ray = pytest.importorskip("ray")
    pytest.importorskip("ray.serve")
    with (
        pytest.MonkeyPatch.context() as environment,
        tempfile.TemporaryDirectory(prefix="psc-ray-", ignore_cleanup_errors=True) as folder,  # A short path: sockets.
    ):
        environment.setenv("RAY_USAGE_STATS_ENABLED", "0")
        environment.setenv("PYTHONPATH", str(ROOT))
        ray.init(
            num_cpus=2, object_store_memory=100 * 2**20, include_dashboard=False, log_to_driver=False,
            _temp_dir=folder,
        )  # fmt: skip
        try:
            yield Cluster(tmp_path_factory.mktemp("ray"))
        finally:
            ray.serve.shutdown()
            ray.shutdown()
            wait(lambda: not replica_processes())


pytestmark = pytest.mark.filterwarnings("ignore:::ray.*", "ignore::ResourceWarning", "ignore::DeprecationWarning")


@pytest.mark.slow
def test_two_replicas_answer_and_count_as_one_service(cluster: Cluster) -> None:
    files = [path.read_bytes() for path in EXAMPLES]
    with serve_shipped("--threads=1") as url:
        expected = [HTTP.post(url + "/predict", content=f, headers=PNG).json()["predictions"] for f in files]
    cluster.deploy()
    sent: Counter[str] = Counter()
    pids = replica_processes()
    answered: set[int] = set()
    while answered != pids:
        for file, predictions in zip(files, expected, strict=True):
            got = cluster.answer(file)["predictions"]
            assert got == predictions
            sent.update(each["label"] for each in got)
        databases = {pid: cluster.folder / "shipped" / f"counter_{pid}.db" for pid in pids}
        answered = {pid for pid, db in databases.items() if b"psc_predictions_total" in db.read_bytes()}
        assert sent.total() < 3000
    wait(lambda: cluster.counted() == sent)


@pytest.mark.slow
def test_a_killed_replica_is_replaced_and_its_counts_stay(cluster: Cluster) -> None:
    cluster.deploy()
    before, counted = replica_processes(), cluster.counted()
    victim = min(before)
    os.kill(victim, signal.SIGKILL)
    file = EXAMPLES[0].read_bytes()
    wait(lambda: len(replica_processes() - {victim}) == 2)
    wait(lambda: cluster.predict(file).status_code == 200)
    assert before - {victim} < replica_processes()

    def counts_go_on() -> bool:
        try:
            return cluster.counted() > counted
        except httpx.TransportError:  # The port of the killed replica is taken over at the next health check.
            return False

    wait(counts_go_on)


@pytest.mark.slow
def test_a_failed_device_has_its_replica_replaced(cluster: Cluster) -> None:
    (cluster.folder / "version").write_text("v1")
    cluster.deploy(fake=True)
    before = replica_processes()
    (cluster.folder / "dead").touch()
    wait(lambda: cluster.predict(png(9)).status_code == 503)
    wait(lambda: len(replica_processes() - before) == 1 and len(replica_processes()) == 2)
    wait(lambda: all(cluster.predict(png(9)).status_code == 200 for _ in range(20)))


@pytest.mark.slow
def test_a_new_revision_reloads_every_replica_in_place(cluster: Cluster) -> None:
    (cluster.folder / "version").write_text("v1")
    cluster.deploy(fake=True)
    before = replica_processes()
    assert {cluster.answer(png(9))["model"]["version"] for _ in range(20)} == {"v1"}
    (cluster.folder / "version").write_text("v2")
    cluster.deploy(fake=True, revision="2")
    wait(lambda: {cluster.answer(png(9))["model"]["version"] for _ in range(40)} == {"v2"})
    assert replica_processes() == before


@pytest.mark.slow
def test_waiting_images_bring_a_second_replica(cluster: Cluster) -> None:
    cluster.deploy(replicas=1)
    images = [("images", (f"{k}.png", EXAMPLES[0].read_bytes())) for k in range(256)]
    done = threading.Event()

    def load() -> None:
        while not done.is_set():
            HTTP.post(cluster.url + "/predict", files=images)

    threads = [threading.Thread(target=load) for _ in range(4)]
    try:
        for thread in threads:
            thread.start()
        wait(lambda: len(replica_processes()) == 2)
    finally:
        done.set()
        for thread in threads:
            thread.join(GUARD_SECONDS)
