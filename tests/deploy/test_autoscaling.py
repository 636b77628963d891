"""The queries that instances are scaled by, on a real Prometheus that watches the real service."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml

from tests.deploy.test_prometheus import images, serving, until, watching
from tests.deploy.tools import DEPLOY


def test_queries_rise_under_load_and_fall_after(shipped_bundle: Path, data_root: Path, tmp_path: Path) -> None:
    scaled = yaml.safe_load((DEPLOY / "kustomize/overlays/keda/scaled-object.yaml").read_text(encoding="utf-8"))
    busy, waiting = (trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"])
    assert "[1m]" in busy
    busy = busy.replace("[1m]", "[2s]")
    files = [("images", (f"{n}.png", image, "image/png")) for n, image in enumerate(images(data_root, "mnist", 64))]
    ended = threading.Event()

    with serving(tmp_path, shipped_bundle) as service, watching(tmp_path, service) as watched:

        def load() -> None:
            while not ended.is_set():
                watched.service.post("/predict", files=files).raise_for_status()

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
