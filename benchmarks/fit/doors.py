"""Fit one network from PyTorch and from an ONNX file, through the same commands.

    python -m benchmarks.fit.doors --data DATA

The networks are a ResNet-50 and a ViT (small, patches of 16) with random weights, on the small CIFAR-10 subset as
files.  Both ways are fitted in turn, ``--rounds`` times; seconds are those of ``psc-fit`` from start to end on all
cores.  Then both bundles answer the same images: the largest difference of a probability, and differing decisions.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from benchmarks import runs
from benchmarks.runs import RESULTS, Json
from psc_core import load_model, load_network

NAME = "fit-doors"
SIDE = 224
CLASSES = ("airplane", "automobile", "bird", "cat")
NETWORKS = {"ResNet-50": "torchvision:resnet50", "ViT-S/16": "timm:vit_small_patch16_224"}


def as_files(root: Path, data: Path) -> None:
    """Write the archive's images as class folders of JPEG files."""

    with tarfile.open(data / "cifar10-jpeg.tar.gz") as tar:
        for member in tar:
            parts = Path(member.name).parts
            if member.isfile() and parts[-2] in CLASSES and (handle := tar.extractfile(member)):
                number = int(Path(parts[-1]).stem)
                split = "train" if parts[-3] == "train" and number % 2 else "val"
                file = root / split / parts[-2] / f"{parts[-3]}-{parts[-1]}"
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(handle.read())


def fit(folder: Path, words: list[str], out: str) -> float:
    """Return the seconds that one fit takes."""
    flags = "--train train --val val --device cpu --no-report --alpha 0.1 --coverage 0.9 --overwrite --fresh"
    command = [sys.executable, "-m", "psc_core.cli.fit", *flags.split(), "--out", out, *words]
    began = time.perf_counter()
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return round(time.perf_counter() - began, 1)


def doors(folder: Path, spec: str, rounds: int) -> Json:
    """Return the times of both fits, and the differences between their bundles."""
    torch.manual_seed(0)
    net = load_network(spec, num_classes=len(CLASSES))
    torch.save(net.state_dict(), folder / "net.pth")
    images = torch.zeros(2, 3, SIDE, SIDE)
    program = torch.onnx.export(
        net, (images,), dynamo=True, dynamic_shapes=({0: torch.export.Dim.DYNAMIC},), verbose=False
    )
    assert program is not None
    (folder / "net.onnx").write_bytes(program.model_proto.SerializeToString())
    words = {"PyTorch": ["--model", spec, "--weights", "net.pth"], "ONNX Runtime": ["--model", "onnx:net.onnx"]}
    seconds: dict[str, list[float]] = {door: [] for door in words}
    for _ in range(rounds):
        for door, flags in words.items():
            seconds[door].append(fit(folder, flags, door.split()[0].lower()))
    files = sorted((folder / "val").rglob("*.jpg"))[::3]
    one, two = (load_model(folder / name, device="cpu").predict(files) for name in ("pytorch", "onnx"))
    apart = float((one.probabilities - two.probabilities).abs().max())
    others = sum(a != b for a, b in zip(one.decision, two.decision, strict=True))
    return {"seconds": seconds, "apart": apart, "other_decisions": [others, len(files)]}


def fragment(record: Json) -> str:
    """Return a table with a row for each network."""
    rows = []
    for name, found in record["networks"].items():
        times = [f"{median(each):.0f} s ({min(each):.0f} to {max(each):.0f})" for each in found["seconds"].values()]
        others, of = found["other_decisions"]
        rows.append([name, *times, f"{found['apart']:.1e}", f"{others} of {of}"])
    header = ["network", "PyTorch", "ONNX Runtime", "largest difference of a probability", "other decisions"]
    return runs.measured(record) + "\n\n" + runs.markdown_table(header, rows)


def main(argv: list[str] | None = None) -> None:
    cli = runs.plain_parser(__doc__)
    cli.add_argument("--data", type=Path, default=Path("tests/data"), metavar="DIR")
    cli.add_argument("--rounds", type=int, default=3)
    cli.add_argument("--out", type=Path, default=RESULTS, metavar="DIR")
    args = cli.parse_args(argv)
    record = {**runs.origin(args, torch.device("cpu")), "networks": {}}
    with TemporaryDirectory() as name:
        folder = Path(name)
        as_files(folder, args.data)
        for label, spec in NETWORKS.items():
            record["networks"][label] = doors(folder, spec, args.rounds)
            print(record["networks"][label], flush=True)
    runs.write_json(args.out / f"{NAME}.json", record)
    print(fragment(record))


if __name__ == "__main__":
    main()
