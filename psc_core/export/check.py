"""Compare the runtimes of a machine with the answers that travel along with a graph."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from psc_core.bundle import read_inside, tensors_of
from psc_core.errors import BundleError, NetworkError, needs, shorten
from psc_core.export.folder import LARGER, VECTORS
from psc_core.export.graph import ANY_SIZE, GRAPH, PIXELS
from psc_core.network.onnx_check import MAX_FILE_BYTES, check_model, parse_model, sizes_of
from psc_core.text import align

_LOOSER: Final = 100  # times that, where levels of pixels may be rounded otherwise
_NUMBERS: Final = ("mean", "lower", "upper")
# What two runtimes may differ by; the numbers of a regression in standard deviations.
CLOSE: Final = {"probabilities": 1e-4, "ood_p_value": 1e-3, **dict.fromkeys(_NUMBERS, 1e-3)}
# The axes of what is compared.  A p-value may differ by a ``step``: rounding may move a score past another.
_COMMON: Final = {"alpha": "", "step": "", PIXELS: "nhwc", **dict.fromkeys(("decision", "is_ood", "ood_p_value"), "n")}
_OF_CLASSES: Final = {"quantile": "", "ambiguity_threshold": "", "predictive_entropy": "n", "class_index": "n",
                      "probabilities": "nk", "prediction_set": "nk"}  # fmt: skip
_OF_NUMBERS: Final = {"max_width": "", **dict.fromkeys((*_NUMBERS, "aleatoric", "epistemic"), "n")}
Run = Callable[[npt.NDArray[np.uint8]], Mapping[str, npt.NDArray[Any]]]


def _onnx_runtime(graph: Path) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # It warns of every input with a default.
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return lambda images: dict(zip(names, session.run(None, {PIXELS: images}), strict=True))


def _openvino(graph: Path) -> Run:
    import openvino

    compiled = openvino.Core().compile_model(graph, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return lambda images: {name: value for out, value in compiled({PIXELS: images}).items() for name in out.names}


RUNTIMES: Final[Mapping[str, Callable[[Path], Run]]] = {"onnxruntime": _onnx_runtime, "openvino": _openvino}


@dataclass(frozen=True)
class Compared:
    """What a runtime answers beside the bundle."""

    runtime: str
    graph: str
    others: int  # number of images with another class, decision or set that is not as near to a limit as :data:`CLOSE`
    apart: Mapping[str, float]  # largest difference by output
    images: int
    agrees: bool  # whether the differences are as small as they should be, and finite

    def row(self) -> list[str]:
        numbers = (f"{self.apart[name]:.1e}" for name in self.columns)
        return [
            self.runtime,
            self.graph,
            f"{self.others} of {self.images}",
            *numbers,
            "equal" if self.agrees else "◀ DIFFERS",
        ]

    @property
    def columns(self) -> list[str]:
        """The outputs that a table shows."""
        return [name for name in (*CLOSE, "log_density") if name in self.apart]


def check(folder: Path) -> list[Compared]:
    """Compare each installed runtime with the answers that travel along."""
    needs("--check", "onnx", "onnx", error=NetworkError)
    if not (installed := [name for name in RUNTIMES if importlib.util.find_spec(name)]):
        raise NetworkError(f"no runtime is installed of {', '.join(RUNTIMES)}; pip install onnxruntime")
    given: dict[str, dict[str, npt.NDArray[Any]]] = {GRAPH: {}, ANY_SIZE: {}}
    try:
        for name, each in tensors_of(folder / VECTORS, read_inside(folder, VECTORS, MAX_FILE_BYTES)).items():
            for file in [ANY_SIZE if name.startswith(LARGER) else GRAPH] if each.ndim else given:
                values = each.float() if each.is_floating_point() else each
                given[file][name.removeprefix(LARGER)] = values.numpy()
        for file, vectors in given.items():
            _check_file(folder, file, vectors)
    except (BundleError, NetworkError) as error:
        reason = str(error).partition(";")[0]
        raise BundleError(f"{folder} is no exported folder: {reason}; export the bundle for onnx again") from error
    return [_compare(name, folder / file, vectors) for name in installed for file, vectors in given.items()]


def _check_file(folder: Path, file: str, vectors: Mapping[str, npt.NDArray[Any]]) -> None:
    """Check a graph before a runtime runs whatever it holds, and that images and answers are those of such a graph."""
    graph, sizes = parse_model(read_inside(folder, file, MAX_FILE_BYTES), file), dict[str, int]()
    check_model(graph, file)
    odd = {
        name
        for name, axes in (_COMMON | (_OF_CLASSES if "prediction_set" in vectors else _OF_NUMBERS)).items()
        if (each := vectors.get(name)) is None
        or each.ndim != len(axes)
        or any(sizes.setdefault(axis, side) != side for axis, side in zip(axes, each.shape, strict=True))
    }
    odd |= {each.name for each in graph.graph.output} ^ {name for name, each in vectors.items() if each.ndim} - {PIXELS}
    odd |= {PIXELS} - {each.name for each in graph.graph.input[:1]}
    if odd or min(sizes["n"], sizes.get("k", 2)) < 2:
        names = shorten(", ".join(map(repr, sorted(odd or [PIXELS]))))
        raise BundleError(f"{names} of {VECTORS} and {file} do not fit together")
    for axis, side in zip(graph.graph.input[0].type.tensor_type.shape.dim[1:], vectors[PIXELS].shape[1:], strict=False):
        axis.dim_value = side
    sizes_of(graph, file)


def _compare(runtime: str, graph: Path, vectors: Mapping[str, npt.NDArray[Any]]) -> Compared:
    images = vectors[PIXELS]
    try:
        run = RUNTIMES[runtime](graph)
        one, others = run(images[:1]), run(images[1:])  # Some runtimes err for one image alone.
        answers = {name: np.concatenate([each, others[name]]) for name, each in one.items()}
    except Exception as error:  # a runtime's errors have no common base class
        raise NetworkError(f"{runtime} cannot run {graph.name}: {' '.join(str(error).split())[:300]}") from error
    expected = {name: each for name, each in vectors.items() if each.ndim and name != PIXELS}
    for name, each in expected.items():
        got = answers.get(name, images[:0])
        if got.shape != (len(images), *each.shape[1:]) or got.dtype.kind != each.dtype.kind:
            raise NetworkError(f"{runtime} gives other {shorten(repr(name))} than those in {VECTORS}; export again")
    deviation = np.hypot(expected["aleatoric"], expected["epistemic"]) if "lower" in expected else 1.0
    apart = {}
    with np.errstate(all="ignore"):  # NaN is no agreement.
        for name in (name for name, each in expected.items() if each.dtype.kind == "f"):
            gap = np.abs(answers[name].astype(float) - expected[name])
            apart[name] = float((gap / deviation if name in _NUMBERS else gap).max(initial=0.0))
    close = {name: limit * (_LOOSER if graph.name == ANY_SIZE else 1) for name, limit in CLOSE.items()}
    close["ood_p_value"] = max(close["ood_p_value"], 1.01 * float(vectors["step"]))
    differs = (answers["decision"] != expected["decision"]) | (answers["is_ood"] != expected["is_ood"])
    differs &= np.abs(expected["ood_p_value"] - vectors["alpha"]) > close["ood_p_value"]
    if "prediction_set" in expected:
        probabilities, within = expected["probabilities"], close["probabilities"]
        differs &= np.abs(expected["predictive_entropy"] - vectors["ambiguity_threshold"]) > within
        is_clear = np.abs(probabilities - vectors["quantile"]) > within
        differs |= ((answers["prediction_set"] != expected["prediction_set"]) & is_clear).any(axis=1)
        best = np.sort(probabilities, axis=1)[:, -2:]
        differs |= (answers["class_index"] != expected["class_index"]) & (best[:, -1] - best[:, 0] > 2 * within)
    else:
        width = expected["upper"] - expected["lower"]
        differs &= np.abs(width - vectors["max_width"]) > 2 * close["lower"] * deviation
    agrees = not differs.any() and all(each <= close.get(name, np.finfo(float).max) for name, each in apart.items())
    return Compared(runtime, graph.name, int(differs.sum()), apart, len(differs), agrees)


def check_equal(compared: Sequence[Compared]) -> None:
    """Raise :class:`NetworkError` if a runtime answers otherwise than the bundle."""
    if others := [f"{each.runtime} with {each.graph}" for each in compared if not each.agrees]:
        raise NetworkError(
            f"a runtime answers differently, {', '.join(others)}; do not use it for this graph, and please report it"
        )


def table(compared: Sequence[Compared]) -> str:
    """Return one line for each runtime."""
    head = ["runtime", "graph", "other answers", *(f"{name} apart" for name in compared[0].columns), ""]
    return "\n".join(align([head, *(each.row() for each in compared)]))
