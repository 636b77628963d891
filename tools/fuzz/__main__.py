"""``python -m tools.fuzz decode``: coverage-guided fuzzing of one target for ``--seconds``.

A target is a module of this folder with ``SEEDS`` and ``check(data)``, which raises when something is wrong with what
became of the data.  Inputs that reached something new are kept in ``out/fuzz`` for the next time, beside any that
failed.  Without atheris (``pip install 'psc[fuzz]'``) it says so and does nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from typing import Final

from tests.conftest import ROOT

TARGETS: Final = ("decode", "multipart", "v2", "grpc", "onnx")

INSTRUMENTED: Final = [
    "PIL", "app.grpc", "app.http", "app.inference.decoder", "psc_core.images", "psc_core.network.onnx",
    "python_multipart",
]  # fmt: skip
"""The modules whose coverage guides the search."""

HANG_SECONDS: Final = 60  # Longer than any input takes on a busy machine

MEMORY_MIB: Final = 4096


def main(arguments: Sequence[str] | None = None) -> int:
    """Fuzz; libFuzzer ends the process, with another code than 0 after a failure."""
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz", description=__doc__)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--seconds", type=int, default=600)
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("atheris") is None:
        print(f"fuzzing of {options.target} skipped: atheris is not installed (pip install 'psc[fuzz]')")
        return 0
    import atheris

    with atheris.instrument_imports(include=INSTRUMENTED):
        target = importlib.import_module(f"tools.fuzz.{options.target}")
    corpus = ROOT / "out" / "fuzz" / options.target
    corpus.mkdir(parents=True, exist_ok=True)
    for seed in target.SEEDS:
        (corpus / hashlib.sha1(seed).hexdigest()).write_bytes(seed)
    limits = [f"-max_total_time={options.seconds}", f"-timeout={HANG_SECONDS}", f"-rss_limit_mb={MEMORY_MIB}"]
    atheris.Setup([sys.argv[0], *limits, f"-artifact_prefix={corpus}-", str(corpus)], target.check)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
