"""A stand-in for the npm package onnxruntime-web: the files that an exported page needs, and one that it does not."""

from pathlib import Path


def write_runtime(folder: Path) -> Path:
    (folder / "dist").mkdir(parents=True)
    for name in ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm", "ort.all.mjs"):
        (folder / "dist" / name).write_text(name)
    return folder
