"""Measure the cost of reading a large prediction log with ``psc-log`` and on the page, by the number of rows.

    python -m benchmarks.log_size --rows 1000000

It writes rows to a temporary folder as a service does, 50,000 per file, stores the images of one in ten, and imports
10,000 labels.  Each command runs in a process of its own, whose memory is its largest resident size; the first row of
the table is the imports alone.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.runs import ROOT, markdown_table
from psc_core.log.store import Log, LoggedModel, arrow, image_path, model_path, open_log, row_schema, rows_path
from psc_core.tasks.classification.answer import SCORES
from psc_core.tasks.classification.task import Classification

CLASSES: Final = tuple(map(str, range(10)))
PER_FILE: Final = 50_000
DECISIONS: Final = {"accept": 0.9, "abstain_ood": 0.05, "abstain_ambiguous": 0.05}
POLICY: Final = json.dumps({"alpha": 0.05, "ambiguity_threshold": 0.5, "coverage": 0.95})

_IMPORTS: Final = "import psc_core.log.review, psc_core.log.review, psc_core.log.erase; "
_LIST: Final = (
    "from psc_core.log.store import open_log; from psc_core.log.review import UnreviewedImages; "
    "print(len(UnreviewedImages(open_log('{log}')).newest(limit=12, seconds=60)), 'images')"
)
_MEASURED: Final = """
import resource, sys, time
began = time.monotonic()
try:
    {work}
finally:
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(time.monotonic() - began, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024, sep="\\n")
"""


def write_rows(log: Log, first: int, day: str, rng: np.random.Generator) -> None:
    """Write one file of rows, their images' names, and the images."""
    pa, n = arrow(), PER_FILE
    numbers = range(first, first + n)
    digests = [hashlib.sha256(b"%d" % number).hexdigest() for number in numbers]
    probabilities = rng.dirichlet(np.ones(len(CLASSES)), n).astype(np.float32)
    decisions = rng.choice(list(DECISIONS), n, p=list(DECISIONS.values()))
    audit = rng.random(n) < 0.01
    stored = (decisions != "accept") | audit
    began = datetime.fromisoformat(f"{day}T00:00:00+00:00")
    cells: dict[str, Any] = {
        "time": [began + timedelta(milliseconds=number - first) for number in numbers],
        "request_id": [f"{number:032x}-{number:016x}" for number in numbers],
        "image_index": [0] * n,
        "bundle_version": ["v1"] * n,
        "policy": [POLICY] * n,
        **{score: rng.random(n).astype(np.float32) for score in SCORES},
        "probabilities": list(probabilities),
        "gates": [[("texture", 0.5), ("kind", 0.5)]] * n,
        "label": [CLASSES[index] for index in probabilities.argmax(1)],
        "decision": decisions.tolist(),
        "sampling_probability": [1.0] * n,
        "audit": audit,
        "audit_probability": [0.01] * n,
        "image_sha256": digests,
        "image_path": [image_path(each, "png") if kept else None for each, kept in zip(digests, stored, strict=True)],
    }
    schema = row_schema(SCORES)
    sink = pa.BufferOutputStream()
    columns = [pa.array(cells[field.name], field.type) for field in schema]
    pa.parquet.write_table(pa.Table.from_arrays(columns, schema=schema), sink, compression="zstd")
    log.put(rows_path("m", day), sink.getvalue())
    for number, path in zip(numbers, cells["image_path"], strict=True):
        if path is not None:
            log.put(path, b"%d" % number, synced=False)


def write_log(folder: Path, rows: int) -> None:
    """Write a log of ten days."""
    log, rng = open_log(folder), np.random.default_rng(0)
    log.put(model_path("v1"), LoggedModel("v1", Classification(), CLASSES).to_json())
    for first in range(0, rows, PER_FILE):
        day = datetime.now(UTC) - timedelta(days=9 - 10 * first // rows)
        write_rows(log, first, day.strftime("%Y-%m-%d"), rng)


def main(argv: list[str] | None = None) -> int:
    """Write a log, and print the cost of each command."""
    cli = argparse.ArgumentParser(description=__doc__)
    cli.add_argument("--rows", type=int, default=1_000_000, help=f"a multiple of {PER_FILE}")
    args = cli.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        log, answers = Path(folder, "log"), Path(folder, "answers.csv")
        write_log(log, args.rows)
        with answers.open("w", newline="") as file:
            lines = csv.writer(file)
            lines.writerow(("request_id", "image_index", "label"))
            lines.writerows((f"{n:032x}-{n:016x}", 0, n % 10) for n in range(0, args.rows, args.rows // 10_000))
        digest = next((log / "images").rglob("*.png")).stem
        command = "from psc_core.cli.log import main; main({!r})".format
        works = {
            "imports": _IMPORTS,
            "the page's list": _LIST.format(log=log),
            "`psc-log review`": command(["review", str(log), "--out", f"{folder}/tasks.json"]),
            "`psc-log review --audit`": command(["review", str(log), "--audit", "--csv", f"{folder}/audit.csv"]),
            "`psc-log import`, 10,000 labels": command(["import", str(log), str(answers)]),
            "`psc-log review`, with these": command(["review", str(log), "--out", f"{folder}/tasks.json"]),
            "`psc-log delete`": command(["delete", str(log), digest]),
            "`psc-log prune --days 5`": command(["prune", str(log), "--days", "5"]),
        }
        size = sum(file.stat().st_size for file in log.rglob("*.parquet"))
        print(f"{args.rows:,} rows, {size / 1e6:.0f} MB in {len(list(log.rglob('*.parquet')))} files\n")
        print(markdown_table(["", "s", "CPU s", "memory, MiB"], [[name, *_run(work)] for name, work in works.items()]))
    return 0


def _run(work: str) -> list[str]:
    source = _IMPORTS + _MEASURED.format(work=work)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", source], env=environment, capture_output=True, text=True, check=True)
    print(f"{time.monotonic() - began:.0f} s: {done.stdout.splitlines()[0]}", file=sys.stderr)
    seconds, cpu, memory = map(float, done.stdout.splitlines()[-3:])
    return [f"{seconds:.1f}", f"{cpu:.1f}", f"{memory:.0f}"]


if __name__ == "__main__":
    sys.exit(main())
