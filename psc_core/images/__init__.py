"""Turn encoded images into fixed-size ``uint8`` arrays: limits, decoding, preprocessing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

SUFFIXES: Final = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")  # of files that count as images
INTERPOLATIONS: Final = ("bilinear", "bicubic")  # the filters for resizing, all antialiased
CROP_ROUNDINGS: Final = ("down", "even")  # of an offset that ends in ½: as transformers; as torchvision and timm
BACKGROUNDS: Final = ("black", "white", "none")  # that alpha is blended onto; with none it is dropped
# The fields of a :class:`.preprocess.Preprocess`, in order: colour mode, height, width, resize, mean and deviation.
Fields = tuple[str, int, int, int | None, tuple[float, ...], tuple[float, ...]]

# The preprocessing of well-known data sets by name, from which :data:`.preprocess.PRESETS` is made.
PRESET_FIELDS: Final[Mapping[str, Fields]] = {
    "mnist": ("L", 28, 28, None, (0.1307,), (0.3081,)),
    "fashion-mnist": ("L", 28, 28, None, (0.2860,), (0.3530,)),
    "cifar10": ("RGB", 32, 32, None, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "imagenet": ("RGB", 224, 224, 256, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}
