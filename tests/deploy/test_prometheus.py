"""A real Prometheus scrapes the real service, and PromQL answers what the client counted."""

from __future__ import annotations

import io
import os
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import yaml
from PIL import Image

from psc_core.data.open import open_dataset
from psc_core.images.preprocess import PRESETS
from tests.deploy.test_files import dashboard_expressions, expressions, rules
from tests.deploy.tools import DEPLOY, ROOT, program
from tests.served import GUARD_SECONDS

DIGITS, SHIRTS = 30, 20
SHIRT = "Shirt"


@dataclass(frozen=True)
class Watched:
    """A service under a Prometheus, and what the client that used it counted."""

    service: httpx.Client
    prometheus: httpx.Client
    predictions: list[dict[str, Any]]

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Labels and values of an instant query."""
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
def process(*command: str | Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A running program, without the settings of whoever runs the tests; ended at the end."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PSC_")}
    with log.open("wb") as out:
        running = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, env=environment)
        try:
            yield running
        finally:
            running.terminate()
            try:
                running.wait(20)
            except subprocess.TimeoutExpired:
                running.kill()
                running.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def addresses(log: Path) -> list[str]:
    """Where the service says it listens: nothing yet, or host and port."""
    return re.findall(r'listening on http://([^"]+)"', log.read_text(encoding="utf-8"))


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


def images(data_root: Path, name: str, count: int, only: str | None = None) -> list[bytes]:
    """PNG files of a test split, of one class where it is named."""
    dataset = open_dataset(f"{name}:{data_root}", split="test", preprocess=PRESETS["mnist"])
    labels = dataset.first_labels()
    wanted = [i for i in range(len(dataset)) if only is None or dataset.classes[int(labels[i])] == only][:count]
    files = []
    for index in wanted:
        file = io.BytesIO()
        Image.fromarray(np.asarray(dataset.image(index))[0]).save(file, "PNG")
        files.append(file.getvalue())
    assert len(files) == count
    return files


@contextmanager
def serving(folder: Path, *bundles: str | Path) -> Iterator[httpx.Client]:
    """Serve bundles; a client of the service once it is ready."""
    log = folder / "serve.log"
    serve = [sys.executable, "-m", "app.cli", "--port=0", "--device=cpu", "--backend=folded", "--threads=1"]
    served = [word for bundle in bundles for word in ("--bundle", bundle)]
    with process(*serve, "--max-batch-size=8", *served, log=log) as service:
        until(lambda: bool(addresses(log)) or service.poll() is not None, "the service's address")
        assert service.poll() is None, log.read_text(encoding="utf-8")
        (address,) = addresses(log)
        with httpx.Client(base_url=f"http://{address}", timeout=30) as client:
            until(lambda: answers(client, "/readyz") or service.poll() is not None, f"the service, see {log}")
            assert service.poll() is None, log.read_text(encoding="utf-8")
            yield client


@contextmanager
def watching(folder: Path, *services: httpx.Client) -> Iterator[Watched]:
    """Watch services by a Prometheus."""
    prometheus, port = program("prometheus", "Debian package prometheus"), free_port()
    config = configuration(folder, [service.base_url.netloc.decode() for service in services])
    with ExitStack() as running:
        running.enter_context(
            process(
                prometheus,
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                log=folder / "prometheus.log",
            )
        )
        prometheus_client = running.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10))
        until(lambda: answers(prometheus_client, "/-/ready"), "Prometheus")
        yield Watched(services[0], prometheus_client, [])


@pytest.fixture(scope="module")
def watched(shipped_bundle: Path, data_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """The shipped bundle after digits and shirts, when the last of them is scraped."""
    folder = tmp_path_factory.mktemp("prometheus")
    with serving(folder, shipped_bundle) as service, watching(folder, service) as seen:
        for batch in (images(data_root, "mnist", DIGITS), images(data_root, "fashion-mnist", SHIRTS, SHIRT)):
            files = [("images", (f"{index}.png", image, "image/png")) for index, image in enumerate(batch)]
            answer = seen.service.post("/predict", files=files).raise_for_status().json()
            seen.predictions.extend(answer["predictions"])
        until(lambda: seen.value("sum(psc_predictions_total)") == DIGITS + SHIRTS, "a scrape of every prediction")
        yield seen


def test_ood_rate_is_what_the_client_counted(watched: Watched) -> None:
    counted = sum(prediction["is_ood"] for prediction in watched.predictions)
    assert counted > 0
    assert watched.value("psc_ood_total") == counted
    assert watched.value("psc_ood_total / on (instance) sum by (instance) (psc_predictions_total)") == pytest.approx(
        counted / (DIGITS + SHIRTS), rel=1e-12
    )


def test_predictions_per_label_are_what_the_client_counted(watched: Watched) -> None:
    rows = watched.query("sum by (label) (psc_predictions_total) > 0")
    assert {labels["label"]: value for labels, value in rows} == Counter(
        prediction["label"] for prediction in watched.predictions
    )


def test_abstentions_are_what_the_client_counted(watched: Watched) -> None:
    rows = watched.query("sum by (reason) (psc_abstained_total) > 0")
    counted = Counter(prediction["decision"].removeprefix("abstain_") for prediction in watched.predictions)
    assert {labels["reason"]: value for labels, value in rows} == {
        reason: count for reason, count in counted.items() if reason != "accept"
    }


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


def test_the_job_is_up_and_ready(watched: Watched) -> None:
    assert watched.value('up{job="psc"}') == 1
    assert watched.value("psc_ready") == 1
    assert watched.value('sum(psc_request_seconds_count{route="/predict", status="200"})') == 2


def test_alert_rules_are_loaded_and_healthy(watched: Watched) -> None:
    groups = watched.prometheus.get("/api/v1/rules").raise_for_status().json()["data"]["groups"]
    loaded = {rule["name"]: rule for group in groups for rule in group["rules"]}
    assert set(loaded) == {rule.get("alert") or rule["record"] for rule in [*rules("alert"), *rules("record")]}
    until(
        lambda: all(
            rule["health"] == "ok"
            for group in watched.prometheus.get("/api/v1/rules").json()["data"]["groups"]
            for rule in group["rules"]
        ),
        "an evaluation of every rule",
    )

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


def test_dashboard_tells_two_models_on_two_instances_apart(
    shipped_bundle: Path, data_root: Path, tmp_path: Path
) -> None:
    names = ("first", "second")
    bundles = [f"{name}={shipped_bundle}" for name in names]
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    image, *_ = images(data_root, "mnist", 1)
    with ExitStack() as running:
        services = [running.enter_context(serving(folder, *bundles)) for folder in folders]
        fleet = running.enter_context(watching(tmp_path, *services))

        def predict() -> None:
            for service in services:
                for name in names:
                    service.post(f"/models/{name}/predict", files={"images": image}).raise_for_status()

        def shows_all(expression: str) -> bool:
            rows = fleet.query(filled_in(expression))
            of_models = {labels.get("model") for labels, _value in rows} - {None}
            of_instances = {labels.get("instance") for labels, _value in rows} - {None}
            return bool(rows) and of_models in (set(), set(names)) and len(of_instances) in (0, len(services))

        for expression in dashboard_expressions():
            if "psc_gpu" not in expression and "psc_abstained" not in expression:  # No GPU; digits are accepted.

                def found(expression: str = expression) -> bool:
                    predict()
                    return shows_all(expression)

                until(found, f"both models of both instances in {expression}")
        sent = sum(
            float(line.rpartition(" ")[2])
            for service in services
            for line in service.get("/metrics").text.splitlines()
            if line.startswith("psc_predictions_total{")
        )
        until(lambda: fleet.value("sum(psc_predictions_total)") == sent, "a scrape of every prediction")
