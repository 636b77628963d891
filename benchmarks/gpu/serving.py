"""Single JPEG files of 224 pixels and digits through ``psc-serve`` and the peers that are there.

    python -m benchmarks.gpu.serving photographs --device cuda
    python -m benchmarks.gpu.serving digits --device cuda

Closed loops, then Poisson arrivals (:mod:`benchmarks.serving.peers`); photographs go through ResNet-50 with random
weights and 1,000 classes, digits through the shipped bundle.  Nothing is installed; peers that are missing are left
out.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from unittest.mock import patch

from benchmarks.gpu import bundles
from benchmarks.serving import peers
from benchmarks.serving.servers import COMPUTE, PHOTOGRAPHS

CASES = {"photographs": PHOTOGRAPHS, "digits": COMPUTE}
NETWORKS = {"cuda": "ResNet-50, 224", "cpu": "ResNet-18, 224"}


def main(argv: list[str] | None = None) -> int:
    """Run one case."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("case", choices=list(CASES))
    cli.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    cli.add_argument("--seconds", type=float, default=2.0)
    cli.add_argument("--rounds", type=int, default=3)
    cli.add_argument("--sweeps", type=int, default=1)
    cli.add_argument("--out", type=Path, default=Path("out/gpu"))
    args = cli.parse_args(argv)
    out = args.out / f"serving-{args.case}"
    words = [
        "--installed",
        "--best-instructions",
        f"--device={args.device}",
        f"--out={out}",
        "--cases",
        CASES[args.case],
    ]
    words += [f"--seconds={args.seconds:g}", f"--rounds={args.rounds}", f"--sweeps={args.sweeps}"]
    if args.case == "photographs":
        name = NETWORKS[args.device]
        folder = args.out / name.replace(", ", "-").lower()
        if not (folder / "manifest.json").exists():
            bundles.untrained(name).save(folder)
        words += [f"--photographs={folder}", "--side=224"]
    with patch.object(sys, "argv", ["peers", *words]):
        return peers.main()


if __name__ == "__main__":
    sys.exit(main())
