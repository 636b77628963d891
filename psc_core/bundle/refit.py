"""The ``psc-fit`` command that refits a bundle of another version.

People paste this command into a shell, so a hostile bundle must not choose it: it repeats plain words only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from psc_core.errors import shortened
from psc_core.network import LIBRARIES

_REMOVED: Final = {"ood_score": "density+entropy"}
"""The values of settings that older bundles record but ``psc-fit`` no longer accepts."""

_MAX_REPEATED: Final = 1000
"""Maximum length of the repeated settings, in characters."""

_LIBRARY_NETWORK: Final = re.compile(rf"({'|'.join(LIBRARIES)}):[A-Za-z0-9_.-]+")
_OWN_WEIGHTS: Final = {"hf": "hf:DIR", "onnx": "onnx:FILE"}
"""The specs of networks that come with their weights, by family."""

_FILES: Final = {"hf:DIR": "", "onnx:FILE": "--preprocess FILE "}
"""The flags that these networks need besides: an ONNX file does not describe its preprocessing."""

_PLAIN: Final = re.compile(r"[A-Za-z0-9_+.:][A-Za-z0-9_+.:-]*")


def fit_command(body: Mapping[str, Any]) -> str:
    """Return the ``psc-fit`` command that refits a bundle of another version.

    It repeats the recorded settings if all of them are plain words, and otherwise none; not those that suited the
    machine of then.  Paths and factories are left as placeholders.
    """
    try:
        flags = _repeated(body["provenance"])
    except (AttributeError, KeyError, TypeError, ValueError):
        flags = "--model SPEC"
    files = _FILES.get(flags.split()[1], "--weights FILE --preprocess FILE ")
    return f"psc-fit {flags} {files}--train DIR --val DIR --out DIR"


def _repeated(provenance: Any) -> str:
    from psc_core.settings import settings_where  # Of fitting: loaded only where a bundle is refused.

    model = provenance["model"]
    spec = model if _LIBRARY_NETWORK.fullmatch(model) else _OWN_WEIGHTS.get(model.partition(":")[0], "SPEC")
    words = ["--model", spec]
    for name, value in provenance["model_args"].items():
        words += ["--model-arg", f"{_plain(name)}={_plain(value)}"]
    of_machine = settings_where(of_machine=True)
    for name in (name for name in settings_where() if name not in of_machine):
        value = provenance["settings"].get(name)
        if value is not None and value is not False and value != _REMOVED.get(name):
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [_plain(value)])]
    line = " ".join(words)
    if len(line) > _MAX_REPEATED:
        raise ValueError(f"{len(line)} characters")
    return line


def _plain(value: Any) -> str:
    """Return a JSON value as a word that needs no quoting in a shell, or raise :class:`ValueError`."""
    text = value if isinstance(value, str) else json.dumps(value)
    if not _PLAIN.fullmatch(text):
        raise ValueError(shortened(repr(text)))
    return text
