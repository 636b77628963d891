"""Small pictures of training images that a model keeps, and the search for those that an image is nearest to.

With the coordinates ``w`` (P,) that the density gives an image, in which the pooled within-class covariance is the
identity (:meth:`psc_core.density.Density.coordinates`), and the coordinates ``e_i`` of kept image i,

    ``distance_i = ‖ w − e_i ‖``        in standard deviations within a class

An ordinary distance is the median, over the kept images, of that to the nearest *other* one.  The coordinates lie on
the device, the pictures on the host.  The images are drawn at random with a fixed seed, equally many of each class,
because they have to be typical of the training data.  The images farthest from each other (a k-centre) would be
outliers, and the images nearest to a class mean (herding) would all look alike.

Shapes: B images, N kept images, P components, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn
from torch.nn import functional

from psc_core.data.dataset import ImageDataset, balanced_positions
from psc_core.errors import BundleError, UsageError, shorten
from psc_core.images.decode import as_base64, png_of
from psc_core.images.preprocess import Pixels
from psc_core.linalg import distances

SIDE: Final = 64  # maximum height and width of a stored image, in pixels; with three channels it takes 12 KiB
MAX_COUNT: Final = 4096  # maximum number of kept images; their pixels take 48 MiB
NEAREST: Final = 3  # the number of kept images of the likely classes that an explanation shows
STORED_DISTANCE: Final = "stored_distance"  # the name of the distances in an explanation
_VALUES: Final = "values"
_LAYOUT: Final = {  # type and axes of each tensor; a regression's has the target's values too
    "embedding": (torch.float32, ("count", "kept")),
    "pixels": (torch.uint8, ("count", "channels", "height", "width")),
    "images": (torch.int64, ("count",)),  # positions in the training data
    "labels": (torch.int64, ("count",)),
    _VALUES: (torch.float64, ("count",)),
}


class StoredImages(nn.Module):
    """The kept training images of a model."""

    embedding: Tensor

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        sizes: dict[str, int] = {}
        for name in filter(tensors.__contains__, _LAYOUT):  # fixed order, so that a fault has one message
            tensor, shape, (dtype, axes) = tensors[name], tuple(tensors[name].shape), _LAYOUT[name]
            expected = tuple(sizes.setdefault(axis, size) for axis, size in zip(axes, shape, strict=False))
            if tensor.dtype != dtype or len(shape) != len(axes) or shape != expected or not tensor.numel():
                raise BundleError(
                    f"expected {dtype} stored_images.{name} with axes {axes} and the sizes {sizes}, got "
                    f"{tensor.dtype} {shape}; fit the bundle again"
                )
        if sizes["count"] > MAX_COUNT or max(sizes["height"], sizes["width"]) > SIDE or sizes["channels"] not in (1, 3):
            raise BundleError(
                f"expected at most {MAX_COUNT} stored images of 1 or 3 channels and at most {SIDE} × {SIDE} pixels, "
                f"got sizes {sizes}; fit the bundle again"
            )
        self.sizes = sizes  # of the axes: with :meth:`tensors` they restore the images
        self.register_buffer("embedding", tensors["embedding"], persistent=False)
        # Plain attributes, which stay on the host when the module moves to a device.
        self._on_host = {name: tensor.cpu() for name, tensor in tensors.items() if name != "embedding"}
        self._pngs: dict[int, str] = {}
        self.ordinary: float | None = None  # median distance to the nearest other kept image; None where all are alike
        if len(self) > 1:
            others = torch.cdist(self.embedding, self.embedding).fill_diagonal_(torch.inf)
            self.ordinary = float(others.amin(dim=1).median()) or None

    def __len__(self) -> int:
        return len(self.embedding)

    def tensors(self) -> dict[str, Tensor]:
        return {"embedding": self.embedding, **self._on_host}

    def moved(self, move: Callable[[Tensor], Tensor]) -> StoredImages:
        """Return the same images in other coordinates of the density; ``move`` maps the embedding."""
        return StoredImages({**self.tensors(), "embedding": move(self.embedding)})

    @classmethod
    def restore(
        cls,
        sizes: Mapping[str, int],
        tensors: Mapping[str, Tensor],
        *,
        components: int,
        channels: int,
        classes: int,
        has_values: bool,
    ) -> StoredImages:
        """Rebuild the stored images from their ``sizes``, the section of a manifest, and :meth:`tensors`."""
        expected = set(_LAYOUT) if has_values else set(_LAYOUT) - {_VALUES}
        if set(tensors) != expected:
            raise BundleError(
                f"expected stored image tensors {sorted(expected)}, got {shorten(repr(sorted(tensors)))}; fit again"
            )
        found = cls(tensors)
        if found.sizes != {**sizes, "kept": components, "channels": channels}:
            raise BundleError(
                f"expected stored images of {components} components, {channels} channels and sizes {dict(sizes)}, got "
                f"{found.sizes}; fit the bundle again"
            )
        labels = tensors["labels"]
        if int(labels.min()) < 0 or int(labels.max()) >= classes or int(tensors["images"].min()) < 0:
            raise BundleError(
                f"expected stored images with labels from 0 to {classes - 1} and positions from 0, got others; fit the "
                "bundle again"
            )
        return found

    def forward(self, coordinates: Float[Tensor, "batch components"]) -> Float[Tensor, "batch kept"]:
        """Return the distance to each kept image, in standard deviations within a class."""
        # A matrix product would be faster, but inexact for an image that nearly equals a kept one.
        return distances(coordinates.float(), self.embedding)

    def documents(
        self, distances: npt.NDArray[Any], classes: Sequence[str], likely: Sequence[int] = ()
    ) -> list[dict[str, Any]]:
        """Return kept images to show with one image, as :class:`psc_core.answers.StoredImage` members.

        First come the nearest of the ``likely`` classes, in turn, then the nearest of all if it is of another class.
        """
        host, order = self._on_host, np.argsort(distances, kind="stable")
        labels = host["labels"].numpy()[order]
        turns = zip_longest(*(order[labels == label][:NEAREST].tolist() for label in likely))
        shown = [kept for kept in chain.from_iterable(turns) if kept is not None][:NEAREST]
        shown = [*shown, *order[: 0 if labels[0] in likely else 1].tolist()] if shown else order[:NEAREST].tolist()
        return [
            {
                "image": int(host["images"][kept]),
                "label": classes[int(host["labels"][kept])],
                **({"value": float(host[_VALUES][kept])} if _VALUES in host else {}),
                "distance": float(distances[kept]),
                **({} if self.ordinary is None else {"relative_distance": float(distances[kept]) / self.ordinary}),
                "png": self._png_of(kept),
            }
            for kept in shown
        ]

    def _png_of(self, kept: int) -> str:
        """Return a stored image as PNG in base64, made when it is first shown."""
        if kept not in self._pngs:
            self._pngs[kept] = as_base64(png_of(self._on_host["pixels"][kept].numpy()))
        return self._pngs[kept]


def check_count(count: int, classes: int) -> None:
    """Check that the number of kept images covers the classes."""
    if not classes <= count <= MAX_COUNT:
        raise UsageError(
            f"expected stored_images from {classes}, one training image of each class, to {MAX_COUNT}, got {count}"
        )


def choose_images(train: ImageDataset, count: int, seed: int) -> Int[Tensor, " kept"]:
    """Draw at most ``count`` images, balanced over classes, and return their positions; avoid ambiguous images."""
    firsts = train.first_labels()
    others = train.labels != firsts.repeat_interleave(train.offsets.diff())
    ambiguous = torch.zeros(len(train), dtype=torch.bool)
    ambiguous[torch.arange(len(train)).repeat_interleave(train.offsets.diff())[others]] = True
    has_clear = torch.zeros(len(train.classes), dtype=torch.bool)
    has_clear[firsts[~ambiguous]] = True
    candidates = (~ambiguous | ~has_clear[firsts]).nonzero()[:, 0]
    return candidates[balanced_positions(train.subset(candidates), count, seed)]


def shrink(images: Pixels) -> UInt8[Tensor, "batch channels rows columns"]:
    """Shrink images to at most :data:`SIDE` pixels in each direction, keeping their proportions."""
    height, width = images.shape[2:]
    scale = SIDE / max(height, width)
    if scale >= 1:
        return images
    size = max(1, round(scale * height)), max(1, round(scale * width))
    return functional.interpolate(images, size, mode="bilinear", antialias=True)
