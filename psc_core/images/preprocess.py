"""Turn a decoded image into the network input, in two halves that meet at a fixed-size ``uint8`` array.

The host half (colour mode, resize, centre crop) gives ``uint8 (channels, height, width)``, the smallest array that can
be copied to the device.  The device half scales to [0, 1] and standardises: ``(x / 255 − mean) / std``.  Fitting,
evaluation and the service use both halves of this one class.  Floating-point images are network inputs already, made
by a loader of the user, and pass the device half unchanged; :meth:`Preprocess.to_pixels` is its inverse.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, UInt8
from PIL import Image
from pydantic import ConfigDict
from torch import Tensor
from torch.nn import functional

from psc_core.errors import ImageError, UsageError
from psc_core.images import BACKGROUNDS, CROP_ROUNDINGS, INTERPOLATIONS, PRESET_FIELDS
from psc_core.images.decode import DEFAULT_MAX_PIXELS, OpenImage, open_image, to_grey_or_rgb
from psc_core.images.files import read_file

Pixels = UInt8[Tensor, "batch channels height width"]
Inputs = Float[Tensor, "batch channels height width"]
Images = Pixels | Inputs
MAX_INPUT_PIXELS: Final = 1 << 22  # maximum size of the network input, height × width in pixels
MAX_RESIZE: Final = 8192  # maximum length of the shorter side before the crop, in pixels
_CHANNELS = {"L": 1, "RGB": 3}
_FILTERS = {name: Image.Resampling[name.upper()] for name in INTERPOLATIONS}

# The libraries for resizing, which offer the same filters. On CPUs with AVX2, decoding and resizing a photograph take a
# sixth to a third less time with PyTorch; on others PyTorch gives the same pixels, but more slowly. The two differ by
# at most 1 of 255; for tall images, whose columns Pillow resizes before the rows, by more where a bicubic filter
# overshoots.
RESIZERS: Final = ("torch", "pillow")
_ROUNDING: Final = 1e-6  # relative difference of two means or deviations that may be one number, kept as float32
MAKE_KNOWN: Final = "give fit the mean and std of your transform, fit(…, mean=…, std=…), or preprocess=…"
GREY: Final = 'take --preset mnist with your --size, --mean and --std, or a preprocess of mode "L"'
_ROWS: Final = 64  # of an image, copied at a time
_MAX_ENLARGED: Final = 4  # size in crops of what PyTorch resizes: unlike Pillow it resizes the whole and then crops


@dataclass(frozen=True)
class Preprocess:
    """The steps that turn an image into a network input.

    The shorter side is resized to ``resize`` pixels before a centre crop of ``height × width``; ``None`` resizes
    directly to that size, without a crop.

    Raises:
        UsageError: If the settings give no valid input.

    Examples:
        >>> PRESETS["imagenet"].from_image(Image.new("RGB", (640, 480))).shape
        (3, 224, 224)
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid", strict=True)  # for the field of a manifest

    is_known: ClassVar[bool] = True  # False if it is unknown how files become inputs, see :mod:`psc_core.data.loaders`

    mode: str  # "L" (one grey channel) or "RGB"
    height: int
    width: int
    resize: int | None
    mean: tuple[float, ...]  # of each channel, on the [0, 1] scale
    std: tuple[float, ...]
    interpolation: str = "bilinear"  # or "bicubic"
    resizer: str = "torch"  # or "pillow", the default of a manifest without this key
    background: str = BACKGROUNDS[0]  # that alpha is blended onto: "black", "white", or "none", which drops alpha
    crop_rounding: str = CROP_ROUNDINGS[0]  # of an offset of the crop that ends in ½: "down", or "even"

    def __post_init__(self) -> None:
        if self.resize is None and self.crop_rounding in CROP_ROUNDINGS:  # Nothing is cropped, so that both are equal.
            object.__setattr__(self, "crop_rounding", CROP_ROUNDINGS[0])
        for what, value, allowed in (
            ("mode", self.mode, _CHANNELS),
            ("interpolation", self.interpolation, _FILTERS),
            ("resizer", self.resizer, RESIZERS),
            ("background", self.background, BACKGROUNDS),
            ("crop_rounding", self.crop_rounding, CROP_ROUNDINGS),
        ):
            if value not in allowed:
                raise UsageError(f"expected {what} one of {sorted(allowed)}, got {value!r}")
        if len(self.mean) != self.channels or len(self.std) != self.channels:
            grey = f", or for a network of one channel {GREY}" if len(self.mean) == len(self.std) == 1 else ""
            raise UsageError(
                f"expected {self.channels} means and stds for mode {self.mode}, got "
                f"{len(self.mean)} and {len(self.std)}; give one of each for every channel{grey}"
            )
        if min(self.std) <= 0:
            raise UsageError(f"expected positive stds, got {self.std}")
        if not all(bool(part.isfinite().all()) for part in self.scale_and_shift()):
            raise UsageError(f"expected means and stds that give finite inputs, got {self.mean} and {self.std}")
        if min(self.height, self.width) < 1 or self.height * self.width > MAX_INPUT_PIXELS:
            raise UsageError(
                f"expected height × width of 1 to {MAX_INPUT_PIXELS} input pixels, got {self.height}×{self.width}"
            )
        if self.resize is not None and not max(self.height, self.width) <= self.resize <= MAX_RESIZE:
            raise UsageError(
                f"expected resize from the crop {self.height}×{self.width} up to {MAX_RESIZE}, got {self.resize}"
            )

    @property
    def channels(self) -> int:
        return _CHANNELS[self.mode]

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape (channels, height, width) of an input."""
        return self.channels, self.height, self.width

    def from_bytes(self, data: bytes, *, max_pixels: int = DEFAULT_MAX_PIXELS) -> npt.NDArray[np.uint8]:
        """Decode and convert an encoded image; see :func:`psc_core.images.decode.decode_image` for the errors."""
        return self.from_file(open_image(data, max_pixels=max_pixels))

    def from_file(self, file: OpenImage) -> npt.NDArray[np.uint8]:
        if self.resizer == "torch" and self._is_small(file.image.size):
            samples = file.samples(self.mode)
            if samples is not None:
                return self._from_samples(samples)
        return self._from_upright(file.decode(self.background))

    def from_image(self, image: Image.Image) -> npt.NDArray[np.uint8]:
        """Convert, resize (antialiased) and centre-crop an image to ``uint8 (channels, height, width)``."""
        return self._from_upright(to_grey_or_rgb(image, self.background))

    def _from_upright(self, image: Image.Image) -> npt.NDArray[np.uint8]:
        if image.mode != self.mode:
            image = image.convert(self.mode)
        if self.resizer == "torch" and self._is_small(image.size):
            # Pillow stores RGB as four bytes a pixel; copying all four takes half as long as picking three.
            form, channels = ("RGBX", 4) if self.mode == "RGB" else ("L", 1)
            samples = np.empty((image.height, image.width, channels), np.uint8)
            for top in range(0, image.height, _ROWS):  # In parts, because Pillow holds what it copies three times.
                rows = samples[top : top + _ROWS]
                part = image.crop((0, top, image.width, top + len(rows)))
                rows[:] = np.frombuffer(part.tobytes("raw", form), np.uint8).reshape(rows.shape)
            return self._from_samples(samples)
        width, height = self._resized(*image.size)
        left, top = self.offset(width - self.width), self.offset(height - self.height)
        x, y = image.width / width, image.height / height
        box = left * x, top * y, (left + self.width) * x, (top + self.height) * y
        image = image.resize((self.width, self.height), _FILTERS[self.interpolation], box)
        cropped = np.frombuffer(image.tobytes(), np.uint8).reshape(self.height, self.width, self.channels)
        return np.array(cropped.transpose(2, 0, 1), order="C")  # a copy: bytes are read-only

    def _from_samples(self, samples: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Resize ``samples`` (height, width, at least ``channels``) with PyTorch, then crop."""
        width, height = self._resized(samples.shape[1], samples.shape[0])
        left, top = self.offset(width - self.width), self.offset(height - self.height)
        planes = samples.transpose(2, 0, 1)
        if (height, width) != samples.shape[:2]:
            # NumPy's views, not PyTorch's, which release the interpreter lock each time and then wait to get it back.
            # Not [None]: with its stride of 0 PyTorch does not see channels last and unpacks the result in a slow loop.
            batch = torch.from_numpy(samples.reshape(1, *samples.shape).transpose(0, 3, 1, 2))
            planes = functional.interpolate(batch, (height, width), mode=self.interpolation, antialias=True).numpy()[0]
        return np.ascontiguousarray(planes[: self.channels, top : top + self.height, left : left + self.width])

    def _resized(self, width: int, height: int) -> tuple[int, int]:
        """Return the (width, height) to which an image is resized before the crop."""
        if self.resize is None:
            return self.width, self.height
        # Rounded down, as in torchvision, timm and transformers.
        return self.resize * width // min(width, height), self.resize * height // min(width, height)

    def offset(self, spare: Any) -> Any:
        """Return how many of the ``spare`` pixels of a side lie before the crop; a number or a symbol of a graph."""
        return spare // 2 + (spare % 4 // 3 if self.crop_rounding == "even" else 0)

    def _is_small(self, size: tuple[int, int]) -> bool:
        """Return whether PyTorch can resize an image of this (width, height) in little memory, rows first."""
        width, height = self._resized(*size)
        allowed = _MAX_ENLARGED * self.height * self.width
        return width * height <= allowed and width * size[1] <= max(allowed, size[0] * size[1])

    def scale_and_shift(self) -> tuple[Float[Tensor, "channels 1 1"], Float[Tensor, "channels 1 1"]]:
        """Return the ``float32`` scale and shift with which the device half is x · scale + shift."""
        scale = torch.tensor([1.0 / (255.0 * s) for s in self.std])
        shift = torch.tensor([-m / s for m, s in zip(self.mean, self.std, strict=True)])
        return scale[:, None, None], shift[:, None, None]

    def noise(self) -> Pixels:
        """Return one image of noise, the same on every call, for uses without real images."""
        return torch.randint(0, 256, (1, *self.shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))

    def standardise(self, images: Images) -> Inputs:
        """Standardise ``uint8`` images to ``float32`` on their own device; float images stay unchanged."""
        scale, shift = self.scale_and_shift()
        return standardise(images, scale.to(images.device), shift.to(images.device))

    def to_pixels(self, images: Images) -> Pixels:
        """Invert :meth:`standardise`, with clamping and rounding; ``uint8`` images stay unchanged.

        Examples:
            >>> pixels = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
            >>> mnist = PRESETS["mnist"]
            >>> torch.equal(mnist.to_pixels(mnist.standardise(pixels)), pixels)
            True
        """
        if not images.is_floating_point():
            return images
        scale, shift = (part.to(images.device) for part in self.scale_and_shift())
        return ((images - shift) / scale).clamp(0, 255).round().to(torch.uint8)

    def differences(self, other: Preprocess) -> tuple[str, ...]:
        """Return the names of the attributes in which the two differ by more than the rounding of a float32.

        Two of unknown preprocessing are compared by their shapes alone; one of each kind differs in its description.

        Examples:
            >>> PRESETS["mnist"].differences(Preprocess("L", 32, 32, None, (0.5,), (0.5,)))
            ('height', 'width', 'mean', 'std')
        """
        if self.is_known != other.is_known:
            return ("description",)
        if not self.is_known:
            return () if self.shape == other.shape else ("shape",)
        ours, theirs = asdict(self), asdict(other)
        return tuple(name for name, value in ours.items() if not _is_close(value, theirs[name]))

    def __str__(self) -> str:
        size = f"{self.height} × {self.width} pixels"
        resized = f"resized to {size}" if self.resize is None else f"shorter side to {self.resize}, centre {size}"
        mean, std = (", ".join(f"{value:g}" for value in values) for values in (self.mean, self.std))
        alpha = {"black": "", "none": "; alpha dropped"}.get(self.background, f"; alpha on {self.background}")
        return f"{self.mode}, {resized}, {self.interpolation}; mean {mean}; std {std}{alpha}"

    def to_json(self) -> dict[str, Any]:
        """Return the attributes as JSON types, without those that a manifest implies: bilinear, Pillow, black, down."""
        implied = {"interpolation": "bilinear", "resizer": "pillow", "background": "black", "crop_rounding": "down"}
        return {name: value for name, value in asdict(self).items() if (name, value) not in implied.items()}


def standardise(images: Images, scale: Float[Tensor, "channels 1 1"], shift: Float[Tensor, "channels 1 1"]) -> Inputs:
    """Return ``images`` · ``scale`` + ``shift``, all on one device; float images are inputs already and are copied."""
    if images.is_floating_point():
        return images.clone()  # a copy, because a network may change its input in place
    return images.float().mul_(scale).add_(shift)


def _is_close(one: Any, other: Any) -> bool:
    """Return whether two attributes are the same, numbers of channels up to :data:`_ROUNDING`."""
    if not isinstance(one, tuple) or len(one) != len(other):
        return bool(one == other)
    return all(math.isclose(a, b, rel_tol=_ROUNDING) for a, b in zip(one, other, strict=True))


def mode_of(channels: int) -> str:
    mode = next((mode for mode, count in _CHANNELS.items() if count == channels), None)
    if mode is None:
        raise UsageError(f"expected images of 1 channel (grey) or 3 (RGB), got {channels}")
    return mode


PRESETS: Mapping[str, Preprocess] = {
    name: Preprocess(*fields, crop_rounding="even") for name, fields in PRESET_FIELDS.items()
}
# One image: a path, an encoded file, a Pillow image, or ``uint8`` pixels (height, width) or (height, width, 3).
ImageLike = str | Path | bytes | Image.Image | npt.NDArray[Any]
CANNOT_READ: Final = "cannot read an image: "  # how the error of a file begins that cannot be opened


def as_batch(images: Sequence[ImageLike] | Tensor, preprocess: Preprocess) -> Images:
    """Read images of any size and form into one batch; a tensor must be a batch already, of pixels or float inputs."""
    if isinstance(images, Tensor):
        return _tensor_batch(images, preprocess)
    if isinstance(images, (str, bytes, Path, Image.Image, np.ndarray)):
        remedy = "give torch.from_numpy(images)" if getattr(images, "ndim", 0) == 4 else "put it into a list"
        raise UsageError(f"expected a list of images or a tensor, got {describe_image(images)}; {remedy}")
    if not isinstance(images, Iterable):
        raise UsageError(f"expected a list of images or a tensor, got {describe_image(images)}")
    pixels = read_each(images, partial(read_image, preprocess=preprocess))
    return torch.from_numpy(np.stack(pixels)) if pixels else torch.empty((0, *preprocess.shape), dtype=torch.uint8)


def read_each(
    images: Iterable[Any], read: Callable[[Any], npt.NDArray[np.uint8]], where: str = ""
) -> list[npt.NDArray[np.uint8]]:
    """Read images one by one; an error names the image: its path, or its position behind ``where``."""
    pixels = []
    for position, image in enumerate(images):
        try:
            pixels.append(read(image))
        except ImageError as error:
            name = image if isinstance(image, str | Path) else f"{where}image {position}"
            raise type(error)(f"{name}: {error}") from error
    return pixels


def _tensor_batch(images: Tensor, preprocess: Preprocess) -> Images:
    wanted = f"(n, {', '.join(map(str, preprocess.shape))})"
    if images.shape == preprocess.shape:
        raise UsageError(f"expected a batch {wanted}, got one image {tuple(images.shape)}; add an axis, images[None]")
    if not (images.dtype == torch.uint8 or images.is_floating_point()) or images.shape[1:] != preprocess.shape:
        raise UsageError(
            f"expected uint8 pixels or float inputs of shape {wanted}, got {images.dtype} {tuple(images.shape)}"
        )
    if images.dtype == torch.uint8:
        check_known(preprocess)
        return images
    inputs = images.detach().float()
    if not bool(inputs.isfinite().all()):
        raise UsageError("expected finite inputs, got some that are NaN or infinite; correct or leave out these images")
    return inputs


def check_known(preprocess: Preprocess) -> None:
    if not preprocess.is_known:
        raise UsageError(
            "this model does not know how pixels become inputs; give float tensors as the loader does, or " + MAKE_KNOWN
        )


def read_image(image: ImageLike, preprocess: Preprocess) -> npt.NDArray[np.uint8]:
    """Read one image as ``uint8 (channels, height, width)``."""
    check_known(preprocess)
    if isinstance(image, str | Path):
        try:
            image = read_file(image)
        except (OSError, ValueError) as error:
            raise UsageError(f"{CANNOT_READ}{error}") from error
    if isinstance(image, bytes):
        return preprocess.from_bytes(image)
    if isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.size:
        image = Image.fromarray(image) if image.ndim == 2 or image.shape[2:] == (3,) else image
    if isinstance(image, Image.Image):
        return preprocess.from_image(image)
    remedy = "; make one batch of tensors, torch.stack(images)" if isinstance(image, Tensor) else ""
    if isinstance(image, np.ndarray) and image.dtype != np.uint8 and image.dtype.kind in "bfiu":
        remedy = "; scale its samples to 0 … 255, which only you know how, and convert them to uint8"
    elif isinstance(image, np.ndarray) and image.ndim == 3 and image.shape[2] == 4:
        remedy = "; give image[:, :, :3], or Image.fromarray(image), whose alpha is blended onto the background"
    elif isinstance(image, np.ndarray) and image.ndim == 3 and 1 in image.shape:
        remedy = "; leave out the axis of its only channel, image.squeeze()"
    elif isinstance(image, np.ndarray) and image.ndim == 3 and image.shape[0] == 3:
        remedy = "; put its channels last, image.transpose(1, 2, 0)"
    raise UsageError(
        "expected paths, encoded images (bytes), Pillow images, or uint8 arrays (height, width) or "
        f"(height, width, 3), got {describe_image(image)}{remedy}"
    )


def describe_image(image: Any) -> str:
    if isinstance(image, np.ndarray):
        return f"an array of {image.dtype} {image.shape}"
    return "None" if image is None else f"a {type(image).__name__}"
