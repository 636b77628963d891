"""Metrics: what is exposed, and counts are exact."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import Counter, Gauge

from app.metrics import METRICS, PROCESS_FILES, Metrics, forget_dead_processes


def test_every_metric_says_its_unit_and_meaning() -> None:
    for metric in METRICS:
        assert metric.help
        assert (metric.type is Counter) == metric.name.endswith("_total")
        assert "_seconds" in metric.name or "time" not in metric.help.lower() or metric.type is Gauge


def test_of_this_process() -> None:
    text = Metrics().exposition()[0].decode()
    assert re.search(r"^process_resident_memory_bytes [1-9]", text, re.MULTILINE)
    assert re.search(r"^process_cpu_seconds_total [1-9]", text, re.MULTILINE)


def in_process(folder: Path, code: str) -> str:
    """What a process with the shared folder prints; ``metrics`` are its metrics."""
    code = "from app.metrics import Metrics\nmetrics = Metrics()\n" + code
    environment = {**os.environ, PROCESS_FILES: str(folder)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    return done.stdout


def test_processes_share_their_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 'metrics.psc_ood_total.labels(model="m").inc(2)\nmetrics.psc_inflight_requests.set(3)\n'
    in_process(tmp_path, count)
    text = in_process(tmp_path, count + "print(metrics.exposition()[0].decode())")
    assert 'psc_ood_total{model="m"} 4.0' in text
    assert "psc_inflight_requests 6.0" in text
    assert (
        len(re.findall(r'^process_resident_memory_bytes{pid="\d+"} [1-9]', text, re.MULTILINE)) == 1
    )  # One has ended.
    monkeypatch.setenv(PROCESS_FILES, str(tmp_path))
    forget_dead_processes()
    text = Metrics().exposition()[0].decode()
    assert 'psc_ood_total{model="m"} 4.0' in text
    assert "psc_inflight_requests" not in text
