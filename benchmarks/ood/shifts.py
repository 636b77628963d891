"""Covariate shift: images of the known classes, taken otherwise.

Whether they should be flagged is a matter of taste: a shift that costs no accuracy need not be, one that makes the
network guess had better be.  So accuracy and the fraction flagged stand side by side.

All are ``uint8 (n, C, H, W)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torchvision.transforms.v2 import functional

NOISE = 0.1
"""Standard deviation of the noise, of black to white."""


def noisy(images: Tensor) -> Tensor:
    """With Gaussian noise of standard deviation :data:`NOISE`, the same for every run."""
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    return (images + 255 * NOISE * noise).round().clamp(0, 255).to(torch.uint8)


SHIFTS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "rotated by 15°": lambda images: functional.rotate(images, 15, functional.InterpolationMode.BILINEAR),
    "rotated by 45°": lambda images: functional.rotate(images, 45, functional.InterpolationMode.BILINEAR),
    "noise": noisy,
    "blurred": lambda images: functional.gaussian_blur(images, [5, 5], [1.0, 1.0]),
    "half the contrast": lambda images: functional.adjust_contrast(images, 0.5),
}
