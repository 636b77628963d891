"""A real Prometheus scrapes the real service, and PromQL answers what the client counted."""

import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.deploy.test_files import expressions, rules
from tests.deploy.tools import DEPLOY, ROOT, program
from tests.encoded import encode
from tests.opened import opened
from tests.served import GUARD_SECONDS, serve

DIGITS, SHIRTS = 30, 20
SHIRT = "Shirt"


@dataclass(frozen=True)
class Watched:
    """A service under a Prometheus, and what the client that used it counted."""

    service: httpx.Client
    prometheus: httpx.Client
    predictions: list[dict[str, Any]]

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        answer = self.prometheus.get("/api/v1/query", params={"query": expression}).raise_for_status().json()
        return [(row["metric"], float(row["value"][1])) for row in answer["data"]["result"]]

    def value(self, expression: str) -> float:
        """The value of a query that has one, else not a number."""
        rows = self.query(expression)
        return rows[0][1] if len(rows) == 1 else float("nan")


def until(condition: Callable[[], bool], what: str, seconds: float = GUARD_SECONDS) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s for {what}"
        time.sleep(0.05)


def answers(client: httpx.Client, path: str) -> bool:
    try:
        return client.get(path).status_code == 200
    except httpx.TransportError:
        return False


@contextmanager
def process(*command: str | Path, log: Path) -> Iterator[None]:
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT) as running:
        try:
            yield
        finally:
            running.terminate()
            try:
                running.wait(20)
            except subprocess.TimeoutExpired:
                running.kill()


def configuration(folder: Path, targets: list[str]) -> Path:
    """The shipped configuration, aimed at ``targets`` and scraping five times a second."""
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text(encoding="utf-8"))
    config["global"] = {"scrape_interval": "200ms", "evaluation_interval": "200ms"}
    config["rule_files"] = [str(DEPLOY / name) for name in config["rule_files"]]
    (job,) = config["scrape_configs"]
    job["static_configs"][0]["targets"] = targets
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def images(name: str, count: int, only: str | None = None) -> list[bytes]:
    dataset = opened(name)
    labels = dataset.first_labels()
    wanted = [i for i in range(len(dataset)) if only is None or dataset.classes[int(labels[i])] == only][:count]
    files = [encode(dataset.image(index)[0]) for index in wanted]
    assert len(files) == count
    return files


@contextmanager
def serving(*bundles: str | Path) -> Iterator[httpx.Client]:
    with (
        serve("--threads=1", "--max-batch-size=8", *(f"--bundle={bundle}" for bundle in bundles)) as server,
        httpx.Client(base_url=server.url, timeout=30) as client,
    ):
        yield client


@contextmanager
def watching(folder: Path, *services: httpx.Client) -> Iterator[Watched]:
    prometheus = program("prometheus", "Debian package prometheus")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    config = configuration(folder, [service.base_url.netloc.decode() for service in services])
    words = [f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={address}"]
    with (
        process(prometheus, *words, log=folder / "prometheus.log"),
        httpx.Client(base_url=f"http://{address}", timeout=10) as client,
    ):
        until(lambda: answers(client, "/-/ready"), "Prometheus")
        yield Watched(services[0], client, [])


@pytest.fixture(scope="module")
def watched(shipped_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """The shipped bundle after digits and shirts, when the last of them is scraped."""
    folder = tmp_path_factory.mktemp("prometheus")
    with serving(shipped_bundle) as service, watching(folder, service) as seen:
        for batch in (images("mnist", DIGITS), images("fashion-mnist", SHIRTS, SHIRT)):
            files = [("images", (f"{index}.png", image, "image/png")) for index, image in enumerate(batch)]
            answer = seen.service.post("/predict", files=files).raise_for_status().json()
            seen.predictions.extend(answer["predictions"])
        until(lambda: seen.value("sum(psc_predictions_total)") == DIGITS + SHIRTS, "a scrape of every prediction")
        yield seen


def test_counts_are_what_the_client_counted(watched: Watched) -> None:
    ood = sum(prediction["is_ood"] for prediction in watched.predictions)
    assert watched.value("psc_ood_total") == ood > 0
    rate = "psc_ood_total / on (instance) sum by (instance) (psc_predictions_total)"
    assert watched.value(rate) == pytest.approx(ood / (DIGITS + SHIRTS), rel=1e-12)
    rows = watched.query("sum by (label) (psc_predictions_total) > 0")
    labels = Counter(prediction["label"] for prediction in watched.predictions)
    assert {labels["label"]: value for labels, value in rows} == labels
    rows = watched.query("sum by (reason) (psc_abstained_total) > 0")
    decisions = Counter(prediction["decision"].removeprefix("abstain_") for prediction in watched.predictions)
    assert {"accept": decisions["accept"], **{labels["reason"]: value for labels, value in rows}} == decisions
    assert watched.value('up{job="psc"}') == watched.value("psc_ready") == 1
    assert watched.value('sum(psc_request_seconds_count{route="/predict", status="200"})') == 2


def test_histograms_hold_the_answers(watched: Watched) -> None:
    for series, field in (
        ("psc_ood_p_value", "ood_p_value"),
        ("psc_predictive_entropy_nats", "predictive_entropy"),
        ("psc_log_density_nats", "log_density"),
    ):
        values = [prediction[field] for prediction in watched.predictions]
        assert watched.value(f"{series}_count") == len(values)
        # Prometheus clients leave out the sum of a histogram with negative buckets: it could fall.
        total = pytest.approx(sum(values), rel=1e-4, abs=1e-4)
        assert watched.query(f"{series}_sum") == [] or watched.value(f"{series}_sum") == total
    at_most = watched.value('psc_ood_p_value_bucket{le="0.05"}')
    assert at_most == sum(prediction["ood_p_value"] <= 0.05 for prediction in watched.predictions)


def test_alert_rules_are_loaded_and_healthy(watched: Watched) -> None:
    def loaded() -> dict[str, Any]:
        groups = watched.prometheus.get("/api/v1/rules").raise_for_status().json()["data"]["groups"]
        return {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}

    assert set(loaded()) == {rule.get("alert") or rule["record"] for rule in [*rules("alert"), *rules("record")]}
    until(lambda: set(loaded().values()) == {"ok"}, "an evaluation of every rule")

    def is_critical() -> bool:
        alerts = watched.prometheus.get("/api/v1/alerts").raise_for_status().json()["data"]["alerts"]
        return any(alert["labels"]["severity"] == "critical" for alert in alerts)

    until(lambda: not is_critical(), "the end of alerts that were pending before the first scrape")


def test_every_expression_evaluates(watched: Watched) -> None:
    for expression in expressions():
        watched.query(filled_in(expression))


def filled_in(expression: str) -> str:
    """An expression of the dashboard with Grafana's variables replaced."""
    return expression.replace("$instance", ".*").replace("$model", ".*").replace("$__rate_interval", "1m")


def test_queries_rise_under_load_and_fall_after(shipped_bundle: Path, tmp_path: Path) -> None:
    scaled = yaml.safe_load((DEPLOY / "kustomize/components/keda/scaled-object.yaml").read_text(encoding="utf-8"))
    busy, waiting = (trigger["metadata"]["query"].replace("default/", "") for trigger in scaled["spec"]["triggers"])
    assert "[1m]" in busy
    busy = busy.replace("[1m]", "[2s]")
    files = [("images", (f"{n}.png", image, "image/png")) for n, image in enumerate(images("mnist", 64))]
    ended = threading.Event()

    with serving(shipped_bundle) as service, watching(tmp_path, service) as watched:

        def load() -> None:
            while not ended.is_set():
                answer = watched.service.post("/predict", files=files)
                assert answer.status_code in (200, 429)  # A slow machine could not answer in time.

        with ThreadPoolExecutor(3) as clients:
            loads = [clients.submit(load) for _ in range(3)]
            try:
                until(lambda: watched.value(busy) > 0.5, "the device to be seen busy")
                until(lambda: watched.value(waiting) > 0, "waiting images to be seen")
            finally:
                ended.set()
            for each in loads:
                each.result()
        until(lambda: watched.value(busy) == 0, "the device to be seen idle")
        until(lambda: watched.value(waiting) == 0, "the empty queue to be seen")
