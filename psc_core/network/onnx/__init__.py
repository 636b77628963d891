"""Networks as ONNX graphs, run by ONNX Runtime alone; needs the extra ``psc[onnx]``.

::

    file or bundle ─▶ model (read, checked) ─▶ graph (layers, logits) ─▶ rewrite (cut) ─▶ backbone (run)
    network of PyTorch ─▶ export ─────────────────────────────────────────────────────────────▲
"""

from __future__ import annotations

import importlib.util
from typing import Final

PACKAGES: Final = ("onnx", "onnxscript", "onnxruntime")
INSTALLED: Final = all((spec := importlib.util.find_spec(name)) and spec.origin for name in PACKAGES)
"""True if networks can be exported to ONNX and run; a folder that an uninstalled package left has no origin."""
