"""Memory bombs, in a process of their own: rejected at once, and next to nothing is allocated.

The process may not take more than a few GiB, so that a bomb that goes off ends that process and nothing else.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from tools import forge

pytest.importorskip("resource")

MAX_MIB = 512
MAX_SECONDS = 20.0

_CHILD = """
import json, resource, sys, time
from psc_core import PSC
from psc_core.errors import PSCError

def rss():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

PSC.load(sys.argv[1], device="cpu", allow_factories=("tests.tiny:network",))
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (6 << 30),) * 2)
for path in sys.argv[2:]:
    before, start = rss(), time.process_time()
    try:
        PSC.load(path, device="cpu", allow_factories=("tests.tiny:network",))
        answer = "loaded"
    except PSCError as error:
        answer = f"rejected: {error}"
    except BaseException as error:
        answer = f"{type(error).__name__}: {error}"
    print(json.dumps([answer, rss() - before, time.process_time() - start]), flush=True)
"""


def _network(spec: str, **model_args: Any) -> Callable[[Path], None]:
    def change(bundle: Path) -> None:
        network = {"spec": spec, "num_classes": 10, "model_args": model_args}
        forge.edit(bundle, lambda body: body["backbone"].update(network=network))

    return change


def _behind_the_cut(bundle: Path) -> None:
    """All stored weights are right; what is too large lies behind the layer and is never stored."""
    network = {"spec": "torchvision:resnet50", "num_classes": 10, "model_args": {"width_per_group": 60_000}}
    forge.edit(bundle, lambda body: body["backbone"].update(network=network, layers=["conv1"]))
    forge.assign(bundle, "layers", ["conv1"])
    forge.replace_part(bundle, "backbone", save({"body.conv1.weight": torch.zeros(64, 3, 7, 7)}))


def _projection(bundle: Path) -> None:
    """Fits the density's promise of dim, and 40 GB of moments."""
    forge.edit(bundle, lambda body: body["projection"].update(channels=100_000, positions=[100_000]))


def _classes(bundle: Path) -> None:
    def change(body: dict[str, Any]) -> None:
        many = 300_000
        body["classes"] = [str(k) for k in range(many)]
        body["backbone"]["network"]["num_classes"] = many
        for part in ("density", "head"):
            body[part]["sizes"]["classes"] = many

    forge.edit(bundle, change)


def _nested(bundle: Path) -> None:
    """Six MiB of empty lists are twenty times that as objects."""
    body = forge.read(bundle)
    text = json.dumps({**body, "provenance": {"x": "HERE"}}).replace('"HERE"', "[" + "[]," * 2_000_000 + "[]]")
    (bundle / "manifest.json").write_text(text)


def _pixels(bundle: Path) -> None:
    forge.edit(bundle, lambda body: body["preprocess"].update(height=30_000, width=30_000))


BOMBS: dict[str, Callable[[Path], None]] = {
    "projection": _projection,
    "classes": _classes,
    "lists": _nested,
    "pixels": _pixels,
    "behind the cut": _behind_the_cut,
    "terabytes": _network("torchvision:resnet18", in_channels=1_000_000_000),
    "width": _network("torchvision:resnet50", width_per_group=20_000),
    "image size": _network("torchvision:vit_b_16", image_size=64_000),
    "embedding": _network("timm:vit_tiny_patch16_224", embed_dim=30_000),
    "blocks": _network("timm:vit_tiny_patch16_224", depth=60_000, embed_dim=3),
    "more blocks": _network("timm:vit_tiny_patch16_224", depth=1_000_000_000, embed_dim=3),
}


def test_memory_bombs(tiny_bundle: Path, tmp_path: Path) -> None:
    pytest.importorskip("timm")
    paths = []
    for name, arm in BOMBS.items():
        paths.append(Path(shutil.copytree(tiny_bundle, tmp_path / name)))
        arm(paths[-1])
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, str(tiny_bundle), *map(str, paths)], cwd=root, capture_output=True, text=True,
        timeout=MAX_SECONDS * len(BOMBS), check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)},
    )  # fmt: skip
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(BOMBS), done.stderr[-2000:]
    for name, (answer, mib, seconds) in zip(BOMBS, answers, strict=True):
        assert answer.startswith("rejected"), f"{name}: {answer}"
        assert mib < MAX_MIB, f"{name}: {mib:.0f} MiB, {answer}"
        assert seconds < MAX_SECONDS, f"{name}: {seconds:.1f} s, {answer}"
        assert "allocate" not in answer, f"{name}: rejected by the machine alone, {answer}"
        print(f"{name}: {mib:.0f} MiB, {seconds:.2f} s, {answer[-160:]}")
