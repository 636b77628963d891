"""Read the preprocessing of transformers, ``preprocessor_config.json``, timm, ``pretrained_cfg``, and torchvision.

A :class:`psc_core.images.preprocess.Preprocess` resizes to the input, or resizes the shorter side and crops the centre,
bilinearly or bicubically, antialiased; then it standardises.  Alpha is dropped as in torchvision and timm, or blended
onto white where transformers converts to RGB (its version 5.24; older ones drop it).  Deviations from this are reported
part by part, so that a flag can replace only the part concerned.

In transformers the class of the image processor decides what its numbers mean:

================================  ==================================================================================
``size`` as a single number       the shorter side for :data:`SHORTER_SIDE`, both sides for :data:`BOTH_SIDES`
ConvNext                          below 384: shorter side to ⌊size / crop_pct⌋, then a centre crop; else both sides
Levit, PoolFormer                 shorter side to ⌊size · 256/224⌋, to ⌊size / crop_pct⌋, before the crop
EfficientNet                      ``rescale_offset``: pixel · factor − 1; ``include_top``: twice by ``image_std``
================================  ==================================================================================
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass, replace
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from psc_core.errors import NetworkError, UsageError, fault
from psc_core.images import INTERPOLATIONS
from psc_core.images.preprocess import PRESETS, Preprocess

# The parts of a preprocessing that flags can replace: all of it; size and crop; the filter; mean and deviation.
Aspect = Literal["whole", "size", "interpolation", "statistics"]
# The known image processors of transformers, without the suffix of their names.
BOTH_SIDES: Final = ("ViT", "DeiT", "Beit", "Blip", "DINOv3ViT", "EfficientNet", "Pvt", "Segformer", "Siglip")
SHORTER_SIDE: Final = ("Bit", "CLIP", "ConvNext", "Levit", "MobileNetV1", "MobileNetV2", "PoolFormer")
_ON_WHITE: Final = ("Bit", "Blip", "CLIP", "Siglip")  # blend alpha onto white where do_convert_rgb is not written
_LIKE_PILLOW: Final[dict[str, Any]] = {"background": "none", "crop_rounding": "even"}  # in torchvision and timm
_OLDEST: Final = {"beit": "Beit", "convnext": "ConvNext", "deit": "DeiT", "swin": "ViT", "vit": "ViT"}  # by type
_RESAMPLE: Final = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")  # Pillow's filters by number
_UNKNOWN_STEPS: Final = ("do_pad", "do_flip_channel_order", "do_color_quantize", "do_align_long_axis", "do_thumbnail")
Geometry = tuple[int, int, int | None]  # (height, width, resize) of a :class:`Preprocess`
Described = tuple[Preprocess, dict[Aspect, str]]  # and a sentence for each part of a description that it approximates


def whole(described: Described, remedy: str) -> Preprocess:
    """Return the preprocessing if PSC supports every part of it; raise :class:`UsageError` with a remedy if not."""
    preprocess, unlike = described
    for reason in unlike.values():
        raise UsageError(f"{reason}; {remedy}")
    return preprocess


class _Processor(BaseModel):
    """The fields of ``preprocessor_config.json`` that describe how an image becomes an input."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    image_processor_type: str | None = None
    feature_extractor_type: str | None = None  # the name of the field in older files
    do_convert_rgb: bool | None = None
    do_resize: bool | None = None
    size: int | tuple[int, int] | dict[str, int | None] | None = None
    resample: int | None = None
    crop_pct: float | None = None
    do_center_crop: bool | None = None
    crop_size: int | tuple[int, int] | dict[str, int | None] | None = None
    do_rescale: bool | None = None
    rescale_factor: float | None = None
    rescale_offset: bool | None = None
    include_top: bool | None = None
    do_normalize: bool | None = None
    image_mean: float | tuple[float, ...] | None = None
    image_std: float | tuple[float, ...] | None = None


class _Pretrained(BaseModel):
    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    input_size: tuple[int, int, int] | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    crop_pct: float | None = None
    crop_mode: str | None = None
    interpolation: str | None = None


class _Unlike(Exception):
    """The reason why a part of a preprocessing cannot be followed exactly, and the nearest supported geometry."""

    def __init__(self, reason: str, nearest: Geometry | None = None) -> None:
        super().__init__(reason)
        self.nearest = nearest


def read_processor(written: Mapping[str, Any], config: Mapping[str, Any], origin: str) -> Described:
    """Read an image processor of transformers from its file's content and its network's configuration."""
    try:
        processor = _Processor.model_validate(dict(written))
    except ValidationError as error:
        raise NetworkError(f"{origin}: {fault(error.errors()[0], 'field')}; save the image processor again") from error
    channels = _check_channels(config.get("num_channels", 3), origin)
    unlike: dict[Aspect, str] = {}
    model = _model_of(processor, str(config.get("model_type")))
    if reason := _unknown(processor, model):
        unlike["whole"] = f"{origin} {reason}"
    try:
        with _usual("size, crop_size and crop_pct", origin):
            geometry = _geometry(processor, model)
    except _Unlike as reason:
        side = config.get("image_size")
        side = side[0] if isinstance(side, list) and side else side
        square = (side if isinstance(side, int) else None) or 224
        unlike["size"], geometry = f"{origin} {reason}", reason.nearest or (square, square, None)
    try:
        interpolation = _interpolation(processor, model)
    except _Unlike as reason:
        unlike["interpolation"], interpolation = f"{origin} {reason}", "bicubic"
    try:
        with _usual("image_mean, image_std and rescale_factor", origin):
            mean, std = _statistics(processor, model, channels)
    except _Unlike as reason:
        unlike["statistics"] = f"{origin} {reason}"
        mean, std = ((0.5,) * channels,) * 2
    preprocess = _preprocess(channels, geometry, mean, std, interpolation, origin)
    on_white = model in _ON_WHITE if processor.do_convert_rgb is None else processor.do_convert_rgb
    return replace(preprocess, background="white") if on_white else preprocess, unlike


def read_timm(written: Mapping[str, Any], origin: str) -> Described:
    """Read the evaluation preprocessing in timm's ``pretrained_cfg``; missing fields have timm's defaults."""
    imagenet, unlike = PRESETS["imagenet"], dict[Aspect, str]()
    try:
        found = _Pretrained.model_validate(dict(written))
    except ValidationError as error:
        raise NetworkError(f"{origin}: {fault(error.errors()[0], 'field')}; save the network again") from error
    channels, height, width = found.input_size or (3, 224, 224)
    mean, std = found.mean or imagenet.mean, found.std or imagenet.std
    with _usual("input_size and crop_pct", origin):
        resized = [math.floor(side / (found.crop_pct or 0.875)) for side in (height, width)]
    mode, interpolation = found.crop_mode or "center", found.interpolation or "bicubic"
    resize = max(resized) if mode == "center" else None
    if mode not in ("center", "squash"):
        unlike["size"] = f"{origin} crops by {mode!r}"
    elif mode == "center" and height != width:
        unlike["size"] = f"{origin} crops to {height} × {width} pixels, which is not a square"
    elif mode == "squash" and resized != [height, width]:
        unlike["size"] = f"{origin} resizes to {resized[0]} × {resized[1]} and then crops to {height} × {width}"
    if interpolation not in INTERPOLATIONS:
        unlike["interpolation"], interpolation = f"{origin} resizes by the filter {interpolation!r}", "bicubic"
    channels = _check_channels(channels, origin)
    if len(mean) != channels or len(std) != channels:
        unlike["statistics"] = f"{origin} has {len(mean)} means and {len(std)} deviations for {channels} channels"
        mean, std = ((0.5,) * channels,) * 2
    preprocess = _preprocess(channels, (height, width, resize), mean, std, interpolation, origin)
    return replace(preprocess, **_LIKE_PILLOW), unlike


def read_torchvision(transforms: Any, origin: str) -> Described:
    """Read the transforms of torchvision's weights, an ``ImageClassification``."""
    try:
        (side,), (resize,) = transforms.crop_size, transforms.resize_size
        mean, std, interpolation = transforms.mean, transforms.std, transforms.interpolation.value
    except (AttributeError, ValueError):
        return PRESETS["imagenet"], {"whole": f"the transforms of {origin} are not those of a classifier"}
    unlike: dict[Aspect, str] = {}
    if interpolation not in INTERPOLATIONS:
        unlike["interpolation"], interpolation = f"{origin} resizes by the filter {interpolation!r}", "bicubic"
    preprocess = _preprocess(3, (side, side, resize), mean, std, interpolation, origin)
    return replace(preprocess, **_LIKE_PILLOW), unlike


@contextmanager
def _usual(fields: str, origin: str) -> Iterator[None]:
    """Turn arithmetic errors of a block into :class:`NetworkError`: only malformed files hold such numbers."""
    try:
        yield
    except ArithmeticError as error:
        raise NetworkError(f"{origin}: expected {fields} of usual magnitudes ({error}); fix it") from error


def _preprocess(
    channels: int,
    geometry: Geometry,
    mean: Sequence[float],
    std: Sequence[float],
    interpolation: str,
    origin: str,
) -> Preprocess:
    mode, statistics = "RGB" if channels == 3 else "L", (tuple(mean), tuple(std))
    try:
        return Preprocess(mode, *geometry, *statistics, interpolation)
    except UsageError as error:
        raise NetworkError(f"{origin}: {error}") from error


def _check_channels(channels: object, origin: str) -> int:
    if type(channels) is not int or channels not in (1, 3):
        raise NetworkError(f"{origin}: expected a network for images of 1 or 3 channels, got {channels!r:.100}; fix it")
    return channels


def _model_of(processor: _Processor, model_type: str) -> str:
    """Return the class of a processor without suffix: ``"ViT"`` for ``ViTImageProcessorFast``."""
    name = processor.image_processor_type or processor.feature_extractor_type
    return re.sub("(ImageProcessor|FeatureExtractor)(Fast|Pil)?$", "", name) if name else _OLDEST.get(model_type, "")


def _unknown(processor: _Processor, model: str) -> str:
    """Return the reason why the preprocessing as a whole is not understood, or an empty string."""
    if model not in (*BOTH_SIDES, *SHORTER_SIDE):
        return f"is of an image processor that PSC does not know, {model or 'without a name'}"
    steps = [step for step in _UNKNOWN_STEPS if (processor.model_extra or {}).get(step)]
    return f"changes images in ways that PSC does not support: {', '.join(steps)}" if steps else ""


def _geometry(processor: _Processor, model: str) -> Geometry:
    if processor.do_resize is False:
        raise _Unlike("does not resize images")
    size = _sides(processor.size, square=model in BOTH_SIDES)
    wants_crop = processor.crop_size is not None if processor.do_center_crop is None else processor.do_center_crop
    crop = _sides(processor.crop_size, square=True) if wants_crop else {}
    if size.keys() == {"shortest_edge"}:
        shorter = size["shortest_edge"]
        if model == "ConvNext":
            if shorter >= 384:
                return shorter, shorter, None
            crop = {"height": shorter, "width": shorter}
        if model == "ConvNext" or (model == "PoolFormer" and processor.crop_pct):
            shorter = int(shorter / (processor.crop_pct or 224 / 256))
        elif model == "Levit":
            shorter = int(256 / 224 * shorter)
        if crop.keys() != {"height", "width"}:
            raise _Unlike("keeps proportions and does not crop", (shorter, shorter, shorter))
        if max(crop.values()) > shorter:
            raise _Unlike(f"crops to more than the shorter side of {shorter} pixels", (shorter, shorter, shorter))
        return crop["height"], crop["width"], shorter
    if size.keys() != {"height", "width"}:
        raise _Unlike(f"has the size {processor.size}, which is not of one input")
    height, width = size["height"], size["width"]
    if crop and crop != size:
        if crop.keys() != {"height", "width"} or max(crop.values()) > min(height, width):
            raise _Unlike(f"resizes to {height} × {width} pixels and then crops to {processor.crop_size}")
        raise _Unlike(
            f"resizes to {height} × {width} pixels, whatever the proportions, and then crops to {crop['height']} × "
            f"{crop['width']}",
            (crop["height"], crop["width"], min(height, width)),
        )
    return height, width, None


def _sides(size: int | tuple[int, int] | dict[str, int | None] | None, *, square: bool) -> dict[str, int]:
    if isinstance(size, tuple):
        return dict(zip(("height", "width"), size, strict=True))
    if isinstance(size, int):
        return {"height": size, "width": size} if square else {"shortest_edge": size}
    return {name: side for name, side in (size or {}).items() if side is not None}


def _interpolation(processor: _Processor, model: str) -> str:
    number = 2 if processor.resample is None and model == "ViT" else processor.resample
    if number is None:
        raise _Unlike("does not say by which filter images are resized")
    name = _RESAMPLE[number] if 0 <= number < len(_RESAMPLE) else str(number)
    if name not in INTERPOLATIONS:
        raise _Unlike(f"resizes by the filter {name!r}")
    return name


def _statistics(processor: _Processor, model: str, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and deviation, on the [0, 1] scale, that equal the written scaling, shift and standardisation."""
    factor, offset = processor.rescale_factor or 1 / 255, 1.0 if processor.rescale_offset else 0.0
    if processor.do_rescale is False:
        factor, offset = 1.0, 0.0
    wanted = processor.do_normalize is not False
    again = model == "EfficientNet" and processor.include_top is not False
    mean, std = (0.0,) * channels, (1.0,) * channels
    if wanted or again:
        if processor.image_mean is None or processor.image_std is None:
            raise _Unlike("does not say by which mean and deviation images are standardised")
        written_mean, written_std = (
            value if isinstance(value, tuple) else (value,) * channels
            for value in (processor.image_mean, processor.image_std)
        )
        if len(written_mean) != channels or len(written_std) != channels:
            raise _Unlike(f"has {len(written_mean)} means and {len(written_std)} deviations for {channels} channels")
        mean = written_mean if wanted else mean
        std = tuple(value ** (wanted + again) for value in written_std)
    # (pixel · factor − offset − mean) / std, where pixel = 255 x
    scale = 255 * factor
    return tuple((value + offset) / scale for value in mean), tuple(value / scale for value in std)


_OF_TORCHVISION: Final = ("crop_size", "resize_size", "mean", "std", "interpolation")  # whose class is private
_REMEDY: Final = (
    'say what it does to a file, as Preprocess("RGB", 224, 224, 256, mean, std, crop_rounding="even") of torchvision '
    "and timm, or take one of PRESETS"
)


def as_preprocess(given: Any) -> Preprocess:
    """Return a preprocessing that is given as one, or as an object of another library.

    Such are the transforms of torchvision's weights, timm's ``pretrained_cfg`` or data configuration, and an image
    processor of transformers.

    Examples:
        >>> print(as_preprocess({"input_size": (1, 64, 64), "crop_pct": 0.5, "mean": (0.5,), "std": (0.2,)}))
        L, shorter side to 128, centre 64 × 64 pixels, bicubic; mean 0.5; std 0.2; alpha dropped
    """
    if isinstance(given, Preprocess):
        return given
    origin = f"the {type(given).__name__}"
    if all(hasattr(given, name) for name in _OF_TORCHVISION):
        return whole(read_torchvision(given, origin), _REMEDY)
    written = given
    if is_dataclass(given) and not isinstance(given, type):
        written = asdict(given)
    elif hasattr(given, "to_dict"):
        written = given.to_dict()
    if isinstance(written, Mapping) and "image_processor_type" in written:
        return whole(read_processor(written, {}, origin), _REMEDY)
    if isinstance(written, Mapping) and "input_size" in written:
        return whole(read_timm(written, origin), _REMEDY)
    raise UsageError(f"expected a Preprocess, got a {type(given).__name__}; {_REMEDY}")
