"""The ``psc-fit`` line that makes a bundle of this version like one that is refused.

What people paste into a shell must not be the bundle's to choose: only plain words of it are repeated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from psc_core.errors import shortened
from psc_core.network import LIBRARIES

_REPEATED: Final = (
    "task", "layer", "layers", "granularity", "epsilon", "c_proj", "d_proj", "minimum_dim", "no_second_scaling",
    "density", "pca", "head", "head_input", "predictions", "alpha", "coverage", "risk", "max_width", "ood_score",
    "precision", "max_images", "keep_examples", "seed",
)  # fmt: skip
"""Settings of a fit that :func:`fit_command` repeats: all but how much of a machine it may take."""

_REMOVED: Final = {"ood_score": "density+entropy"}
"""Values of settings that older bundles record and ``psc-fit`` no longer takes."""

_MAX_REPEATED: Final = 1000
"""Maximum length of what :func:`fit_command` repeats, characters."""

_LIBRARY_NETWORK: Final = re.compile(rf"({'|'.join(LIBRARIES)}):[A-Za-z0-9_.-]+")
_OWN_WEIGHTS: Final = {"hf": "hf:DIR", "onnx": "onnx:FILE"}
"""Specs of networks that come with their weights, by family."""

_FILES: Final = {"hf:DIR": "", "onnx:FILE": "--preprocess FILE "}
"""Files that these need beside them: an ONNX file does not say its preprocessing."""

_PLAIN: Final = re.compile(r"[A-Za-z0-9_+.:][A-Za-z0-9_+.:-]*")


def fit_command(body: Mapping[str, Any]) -> str:
    """Return the ``psc-fit`` line that makes a bundle of this version like one that is refused.

    It has the settings that the bundle records where all of them are plain words, none otherwise.  Paths and factories
    are left to the reader.
    """
    try:
        flags = _repeated(body["provenance"])
    except (AttributeError, KeyError, TypeError, ValueError):
        flags = "--model SPEC"
    files = _FILES.get(flags.split()[1], "--weights FILE --preprocess FILE ")
    return f"psc-fit {flags} {files}--train DIR --val DIR --out DIR"


def _repeated(provenance: Any) -> str:
    model = provenance["model"]
    spec = model if _LIBRARY_NETWORK.fullmatch(model) else _OWN_WEIGHTS.get(model.partition(":")[0], "SPEC")
    words = ["--model", spec]
    for name, value in provenance["model_args"].items():
        words += ["--model-arg", f"{_plain(name)}={_plain(value)}"]
    for name in _REPEATED:
        value = provenance["settings"].get(name)
        if value is not None and value is not False and value != _REMOVED.get(name):
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [_plain(value)])]
    line = " ".join(words)
    if len(line) > _MAX_REPEATED:
        raise ValueError(f"{len(line)} characters")
    return line


def _plain(value: Any) -> str:
    """Return a JSON value as a word that a shell leaves as it is, or raise :class:`ValueError`."""
    text = value if isinstance(value, str) else json.dumps(value)
    if not _PLAIN.fullmatch(text):
        raise ValueError(shortened(repr(text)))
    return text
