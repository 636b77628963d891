"""Attacks by files: a cache that others may write to, a folder of images that never end, and names of classes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

from tests.conftest import ROOT, SHIPPED_BUNDLE
from tests.psc_core.scoring.support import rows_of, write_hostile
from tools.service import Seen, service

NAMES = (r"$\frac{1}{0$", "<script>alert(1)<b>", "# Heading\x1b[31m")
IMAGES = 30
"""Images of a class, for training and for validation."""


def cache(_url: str) -> Seen:
    """A pipe in the place of the exported network; then a folder that anybody may write to."""
    with tempfile.TemporaryDirectory() as place:
        folder, log = Path(place) / "psc", Path(place) / "log"
        shell = f"export XDG_CACHE_HOME={place} PSC_BACKEND=onnx"
        with service(shell=shell):
            kept = list(folder.glob("*.onnx"))
        for file in kept:
            file.unlink()
            os.mkfifo(file)
        with service(shell=shell):
            pass  # It is ready.
        folder.chmod(0o777)
        for file in kept:
            file.unlink(missing_ok=True)
            file.write_bytes(bytes(64))
        with service(shell=shell, stderr=str(log)):
            pass
        lines = sum(json.loads(line)["message"] == "cache not used" for line in log.read_text().splitlines())
    return Seen(f"starts twice, {lines} line of the shared folder", bool(kept) and lines >= 1)


def hostile_folder(_url: str) -> Seen:
    """Files that never end beside an image, for ``psc-score``."""
    with tempfile.TemporaryDirectory() as place:
        images, out = Path(place) / "images", Path(place) / "out"
        write_hostile(images)
        ended = _command("score", "--bundle", str(SHIPPED_BUNDLE), str(images), "--out", str(out))
        rows = rows_of(out)
    errors = sum(row["error"] is not None for row in rows)
    return Seen(f"{errors} of {len(rows)} rows with an error", ended == 0 and (errors, len(rows)) == (3, 4))


def class_names(_url: str) -> Seen:
    """A fit on folders whose names are mathematics, HTML and an escape code; its report and its card."""
    from psc_core import PRESETS, open_dataset

    with tempfile.TemporaryDirectory() as place:
        for split in ("train", "val"):
            data = open_dataset(f"mnist:{ROOT / 'tests' / 'data'}", split=split, preprocess=PRESETS["mnist"])
            for label, name in enumerate(NAMES):
                folder = Path(place) / split / name
                folder.mkdir(parents=True)
                few = data.subset((data.labels == label).nonzero()[:IMAGES, 0])
                for index, image in enumerate(next(few.batches(IMAGES)).images):
                    Image.fromarray(image[0].numpy()).save(folder / f"{index}.png")
        out = Path(place) / "bundle"
        ended = _command(
            *("fit", "--model", "tests.tiny:network", "--weights", _weights(place), "--preset", "mnist"),
            *("--train", f"{place}/train", "--val", f"{place}/val", "--out", str(out), "--device", "cpu"),
        )
        written = [(out / name).read_text() for name in ("report.html", "README.md") if (out / name).exists()]
    plain = sum("<script>" not in text and "\x1b" not in text and "\n# Heading" not in text for text in written)
    return Seen(f"ended with {ended}, {plain} of {len(written)} documents in plain text", (ended, plain) == (0, 2))


def _weights(place: str) -> str:
    from safetensors.torch import save_file

    from tests.tiny import network

    file = f"{place}/net.safetensors"
    save_file(network(len(NAMES)).state_dict(), file)
    return file


def _command(name: str, *words: str) -> int:
    command = [sys.executable, "-m", f"psc_core.cli.{name}", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, timeout=600, check=False).returncode
