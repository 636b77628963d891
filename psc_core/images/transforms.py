"""Take the preprocessing from what a program has at hand: torchvision's, timm's and transformers' own objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any, Final

from psc_core.errors import UsageError
from psc_core.images.preparation import Preparation, read_processor, read_timm, read_torchvision
from psc_core.images.preprocess import Preprocess

_OF_TORCHVISION: Final = ("crop_size", "resize_size", "mean", "std", "interpolation")
"""The attributes of torchvision's ``ImageClassification``, which lies in a private module."""

_REMEDY: Final = 'say what it does to a file, as Preprocess("RGB", 224, 224, 256, mean, std), or take one of PRESETS'


def as_preprocess(given: Any) -> Preprocess:
    """Return a preprocessing that is given as one, or as an object of another library.

    Args:
        given: A :class:`.Preprocess`, the transforms of torchvision's weights, ``pretrained_cfg`` or the data
            configuration of a timm model, or an image processor of transformers.

    Raises:
        UsageError: If it is something else, or PSC cannot follow it in every part.
        NetworkError: If its fields give no valid input.

    Example:
        >>> print(as_preprocess({"input_size": (1, 64, 64), "crop_pct": 0.5, "mean": (0.5,), "std": (0.2,)}))
        L, shorter side to 128, centre 64 × 64 pixels, bicubic; mean 0.5; std 0.2
    """
    if isinstance(given, Preprocess):
        return given
    found = _read(given)
    if found is None:
        raise UsageError(f"expected a Preprocess, got a {type(given).__name__}; {_REMEDY}")
    return found.whole(_REMEDY)


def _read(given: Any) -> Preparation | None:
    """Read an object of another library; None if it is of none that is known."""
    origin = f"the {type(given).__name__}"
    if all(hasattr(given, name) for name in _OF_TORCHVISION):
        return read_torchvision(given, origin)
    written = given
    if is_dataclass(given) and not isinstance(given, type):
        written = asdict(given)
    elif hasattr(given, "to_dict"):
        written = given.to_dict()
    if isinstance(written, Mapping) and "image_processor_type" in written:
        return read_processor(written, {}, origin)
    return read_timm(written, origin) if isinstance(written, Mapping) and "input_size" in written else None
