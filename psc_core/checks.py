"""Checks: values of one forward pass, each with its own p-values, combined into one OOD score.

=============  ==================================================  ==========================================
check          value, higher is more unusual                       an alarm means
=============  ==================================================  ==========================================
``texture``    −log p of an early layer's features, averaged       unusual texture: surface, contrast, colours
               over positions, nats
``content``    minus the log density of the model, nats            unknown kind: parts that no class has
``confidence`` Σ p^0.2 of the other probable classes               no class stands out
``reviewed``   what :mod:`psc_core.learnt` has learnt, in         like images that people reviewed as none of
               standard deviations of images of the classes        the classes
=============  ==================================================  ==========================================

With the p-value ``p_g`` of each check the OOD score is

    ``−Σ_g log min(1, p_g / τ_g)``     nats

with ``τ_g = 1`` except for ``texture`` and ``reviewed`` (a soft form of the truncated product of Zaykin et al. 2002;
with all τ = 1 it is half of the statistic of Fisher 1932).  Near out-of-distribution images have typical textures, and
most images are like none that was reviewed: how typical they are would only add noise to the sum.

The conformal p-value among m images is at least 1 / (m + 1), so all values beyond the largest of m are tied, but in a
sum their distance beyond it matters.  So with the values ``r_1 ≤ … ≤ r_m`` of in-distribution images ``p_g`` is

* ``(m + 1 − i) / (m + 1)`` at ``r_i``, and its logarithm is linear in between; below ``r_1`` it is as at ``r_1``;
* ``exp(−(r − r_m) / s) / (m + 1)`` beyond ``r_m``: an exponential tail of scale s, the mean excess of the largest
  values over the next smaller one (the maximum-likelihood scale of an exponential tail; Embrechts et al., Modelling
  Extremal Events, 1997, section 6.2).

These p-values only rank and weigh, and guarantee nothing.  Because the values of one image depend on each other, the
score's p-value does not come from χ² but is conformal, on images that were used neither to choose the checks nor to fit
``p_g`` (Bates et al. 2023).  The p-value of a single check is conformal on the same images.

Checks are chosen by least regret over the transforms that make out-of-distribution images: detectors that are good at
near images are poor at far ones and vice versa, so a mean over transforms would depend on how many of each there are.
The regret of an option on a transform is the best option's AUROC minus its own; the option whose largest regret is
smallest is chosen, and of equal options the one with the highest mean AUROC.

Shapes: B images, G checks, m images that ``p_g`` is fitted to, n calibration images.

Checks and maps are chosen on synthetic out-of-distribution images, made from in-distribution ones, so that no other
data are needed:

=========== =====================================================================  ====================================
transform   result                                                                 stands for
=========== =====================================================================  ====================================
mixed       mean of two images of different classes                                near: unseen classes, whose parts are
turned      by 90°                                                                 known and whose whole is not
upside_down by 180°
binary      each channel above its median white, else black                        far: other textures, contrasts and
contrast    deviations from the image's mean × 4                                   layouts
framed      black around the middle half of height and width
=========== =====================================================================  ====================================

If images are ambiguous by nature, a mix of two is in distribution and is left out.  A patch over a rectangle of a
quarter to a half of either side is unusual at a known place: a ``crop`` of another image (CutPaste, Li et al. 2021)
stands for objects and seams; a ``texture``, stripes, checks or noise of two colours, for surfaces that no image has.

All images are ``uint8 (n, C, H, W)``, computed on the device of the input.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor, nn
from torch.nn import functional

from psc_core.compute import Compute, track_images
from psc_core.conformal import conformal_p_values
from psc_core.data.dataset import ImageDataset
from psc_core.errors import BundleError, FitError
from psc_core.images.preprocess import Pixels
from psc_core.linalg import TAIL_FRACTION, positions, rounding_of, tail_excess
from psc_core.metrics import auroc
from psc_core.text import align

IMAGES: Final = 1000  # maximum number of images from which others are made
REAL: Final = "real"
MIXED: Final = "mixed"
CONTRAST: Final = 4.0  # factor on the deviations from an image's mean


def mix(images: Pixels, labels: Int[Tensor, " batch"], generator: torch.Generator) -> UInt8[Tensor, "mixed _ _ _"]:
    """Average each image with a random partner, and leave out the pairs of one class."""
    partner = torch.randperm(len(images), generator=generator)
    other = labels != labels[partner]
    mean = (images[other].float() + images[partner[other]].float()) / 2
    return mean.round().to(torch.uint8)


def turn(images: Pixels) -> Pixels:
    turned = torch.rot90(images, 1, (2, 3))
    if turned.shape == images.shape:
        return turned
    resized = functional.interpolate(turned.float(), images.shape[2:], mode="bilinear")
    return resized.round().to(torch.uint8)


def binarise(images: Pixels) -> Pixels:
    median = images.flatten(2).float().median(dim=2).values[:, :, None, None]
    return (images > median).to(torch.uint8) * 255


def raise_contrast(images: Pixels) -> Pixels:
    grey: Float[Tensor, "batch 1 1 1"] = images.float().mean(dim=(1, 2, 3), keepdim=True)
    return torch.addcmul(grey, images - grey, torch.tensor(CONTRAST)).clamp(0, 255).round().to(torch.uint8)


def frame(images: Pixels) -> Pixels:
    height, width = images.shape[2:]
    top, left = height // 4, width // 4
    framed = torch.zeros_like(images)
    middle = (..., slice(top, height - top), slice(left, width - left))
    framed[middle] = images[middle]
    return framed


TRANSFORMS: Final[Mapping[str, Callable[[Pixels], Pixels]]] = {  # those that need only one image
    "turned": turn,
    "upside_down": lambda images: torch.rot90(images, 2, (2, 3)),
    "binary": binarise,
    "contrast": raise_contrast,
    "framed": frame,
}


def synthetic_batches(
    dataset: ImageDataset, compute: Compute, description: str, *, mixed: bool, seed: int
) -> Iterator[Mapping[str, Pixels]]:
    """Yield at most :data:`IMAGES` images in batches on the device: the originals, and the output of each transform.

    Partners to mix are drawn within a batch, so that mixes depend on its size, and a batch in which no pair has two
    classes, as that of a single image, has none.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = dataset.subset(torch.randperm(len(dataset), generator=generator)[:IMAGES])
    for batch in track_images(drawn, compute, description):
        pixels = dataset.preprocess.to_pixels(batch.images)
        made = {REAL: pixels, **{transform: make(pixels) for transform, make in TRANSFORMS.items()}}
        if mixed and len(mixes := mix(pixels, batch.first_labels(), generator)):
            made[MIXED] = mixes
        yield {transform: images.to(compute.device) for transform, images in made.items()}


@torch.inference_mode()
def by_transform(
    batches: Iterable[Mapping[str, Tensor]], step: Callable[[Tensor], Mapping[Any, Tensor]]
) -> dict[str, dict[Any, Tensor]]:
    """Concatenate the named results of ``step`` over the batches, (n, …) by transform and name, on the CPU."""
    parts: dict[str, dict[Any, list[Tensor]]] = {}
    for made in batches:
        for transform, images in made.items():
            for name, values in step(images).items():
                parts.setdefault(transform, {}).setdefault(name, []).append(values.cpu())
    return {
        transform: {name: torch.cat(each) for name, each in of_transform.items()}
        for transform, of_transform in parts.items()
    }


CROP: Final = "crop"
TEXTURE: Final = "texture"
PATCHES: Final = (CROP, TEXTURE)


def paste(images: Pixels, patch: str, generator: torch.Generator) -> tuple[Pixels, Bool[Tensor, "batch height width"]]:
    """Paste a patch into each image, and return the images and masks of the patches.

    A crop comes from another of these images, on the CPU, or from the image itself if it is the only one.
    """
    patched = images.clone()
    mask = torch.zeros(len(images), *images.shape[2:], dtype=torch.bool)
    order = torch.randperm(len(images), generator=generator).tolist()
    for image, other in zip(order, [*order[1:], *order[:1]], strict=True):
        rows, columns = (_span(side, generator) for side in images.shape[2:])
        mask[image, rows, columns] = True
        height, width = rows.stop - rows.start, columns.stop - columns.start
        if patch == CROP:
            top, left = (_below(end, generator) for end in (images.shape[2] - height + 1, images.shape[3] - width + 1))
            put_in = images[other, :, top : top + height, left : left + width]
        else:
            put_in = _texture(images.shape[1], height, width, generator)
        patched[image, :, rows, columns] = put_in
    return patched, mask


def _texture(channels: int, height: int, width: int, generator: torch.Generator) -> UInt8[Tensor, "channels _ _"]:
    """Return stripes, checks or noise of two colours and a random period."""
    colours = torch.randint(0, 256, (2, channels), generator=generator, dtype=torch.uint8)
    period = 1 + _below(max(1, min(height, width) // 4), generator)
    down, across = (torch.arange(side) // period for side in (height, width))
    which = _below(3, generator)
    if which == 0:
        pattern = (down[:, None] + 0 * across) % 2
    elif which == 1:
        pattern = (down[:, None] + across) % 2
    else:
        pattern = torch.randint(0, 2, (height, width), generator=generator)
    return colours[pattern].permute(2, 0, 1)


def _span(side: int, generator: torch.Generator) -> slice:
    """Draw a span of a quarter to a half of a side, at least one pixel."""
    length = max(1, side // 4 + _below(max(1, side // 4 + 1), generator))
    start = _below(side - length + 1, generator)
    return slice(start, start + length)


def _below(end: int, generator: torch.Generator) -> int:
    return int(torch.randint(0, end, (), generator=generator))


def log_p_pieces(
    ascending: Float[Tensor, "checks m"], scales: Float[Tensor, " checks"]
) -> Float[Tensor, "checks m_plus_1 3"]:
    """Return the log p-value of each check as straight lines, float64.

    Line i holds for values with i of ``ascending`` at or below them; it is given by its start, value there and slope.
    """
    checks, m = ascending.shape
    knots = ascending.double()
    ranks = torch.arange(m, dtype=torch.float64, device=knots.device)
    logs = torch.log((m - ranks) / (m + 1)).expand(checks, m)
    rises = logs.diff(dim=1) / knots.diff(dim=1)
    rises = rises.nan_to_num(neginf=0.0)  # no value lies between equal knots
    slopes = torch.cat([rises, -1 / scales.double()[:, None]], dim=1)
    flat = torch.stack([knots[:, :1], logs[:, :1], torch.zeros_like(knots[:, :1])], dim=2)
    return torch.cat([flat, torch.stack([knots, logs, slopes], dim=2)], dim=1)


def log_p_values(
    ascending: Float[Tensor, "checks m"],
    pieces: Float[Tensor, "checks m_plus_1 3"],
    values: Float[Tensor, "checks batch"],
) -> Float[Tensor, "checks batch"]:
    """Return log p-values in nats, continuous and decreasing in each value; NaN for NaN.

    They are float64: in float32 a score would depend on the position of its image in a batch.
    """
    lines = positions(ascending, values, right=True)
    start, value, slope = pieces.gather(1, lines[..., None].expand(-1, -1, 3)).unbind(2)
    return torch.addcmul(value, slope, values - start)


CONTENT: Final = "content"  # as bundles and answers call the check that reads the model's density
CONFIDENCE: Final = "confidence"
REVIEWED: Final = "reviewed"
CHECKS: Final = (TEXTURE, CONTENT, CONFIDENCE, REVIEWED)  # names of all checks; a model has some, in this order
COUNTS_BELOW: Final = {TEXTURE: 0.2, REVIEWED: 0.03}  # p-values below which these count along with other checks


def check_values(names: Sequence[str], scores: Mapping[str, Float[Tensor, " batch"]]) -> Float[Tensor, "batch checks"]:
    """Return the values of the checks ``names``, from the scores of a :class:`psc_core.heads.base.Scored`."""
    values = {**scores, CONTENT: -scores["log_density"]}
    return torch.stack([values[name] for name in names], dim=1)


class Checks(nn.Module):
    """Combines values into one OOD score, and gives the p-value of each check."""

    ascending: Tensor
    scales: Tensor
    calibration: Tensor
    log_below: Tensor  # log τ_g, float64 (G, 1)
    pieces: Tensor  # from :func:`log_p_pieces`

    def __init__(
        self,
        names: Sequence[str],  # some of :data:`CHECKS`, in that order
        ascending: Tensor,  # float32 (G, m) values that ``p_g`` is fitted to, sorted
        scales: Tensor,  # float32 (G,) scales of the tails, positive
        calibration: Tensor,  # float32 (G, n) values of the calibration images, sorted
        counts_below: Mapping[str, float] = MappingProxyType({}),  # τ in (0, 1] of the checks where it is not 1
    ) -> None:
        super().__init__()
        self.names = tuple(names)
        self.counts_below = dict(counts_below)
        if self.names != tuple(name for name in CHECKS if name in names) or not names:
            raise BundleError(f"expected checks of {', '.join(CHECKS)} in this order, got {list(names)}")
        fitted = {"ascending": ascending, "scales": scales, "calibration": calibration}
        for (name, tensor), axes in zip(fitted.items(), (2, 1, 2), strict=True):
            if tensor.dtype != torch.float32 or tensor.ndim != axes or len(tensor) != len(names):
                raise BundleError(
                    f"expected float32 checks.{name} of {len(names)} checks, got {tensor.dtype} "
                    f"{tuple(tensor.shape)}; fit the bundle again"
                )
            self.register_buffer(name, tensor.contiguous())
        for part in (ascending, calibration):
            if part.shape[1] == 0 or not (part.diff(dim=1) >= 0).all():
                raise BundleError("expected ascending values of the checks; fit the bundle again")
        if not (scales > 0).all():
            raise BundleError("expected positive scales of the checks; fit the bundle again")
        below = [counts_below.get(name, 1.0) for name in names]
        log_below = torch.tensor(below, dtype=torch.float64).log()[:, None].to(ascending.device)
        self.register_buffer("log_below", log_below, persistent=False)
        self.register_buffer("pieces", log_p_pieces(self.ascending, scales), persistent=False)

    def calibrated_on(self, values: Float[Tensor, "checks n"]) -> Checks:
        """Return these checks with other values of calibration images, sorted, on their device."""
        device = values.device
        return Checks(self.names, self.ascending.to(device), self.scales.to(device), values, self.counts_below)

    def without_reviewed(self) -> Checks:
        """Return the other checks."""
        kept = len(self.names) - (REVIEWED in self.names)  # it is the last
        below = {name: value for name, value in self.counts_below.items() if name != REVIEWED}
        tensors = (self.ascending[:kept], self.scales[:kept], self.calibration[:kept])
        return Checks(self.names[:kept], *tensors, below)

    def resampled(self, count: int) -> Float[Tensor, "checks count"]:
        """Return ``count`` values of each check to which nearly the same p_g is fitted, with the scales as they are."""
        before, after = (torch.arange(n, 0, -1).double().div(n + 1).log() for n in (self.ascending.shape[1], count))
        within = [np.interp(-after, -before, row) for row in self.ascending.double().cpu()]
        beyond = self.scales[:, None].double().cpu() * (before[-1] - after).clamp(min=0)
        return (torch.from_numpy(np.stack(within)) + beyond).to(self.ascending)

    def refitted(self, name: str, values: Float[Tensor, " n"]) -> Checks:
        """Return these checks with the p_g of one fitted to other values; it has to be calibrated."""
        at, one = self.names.index(name), fit_checks([name], *[values[:, None].to(self.ascending)] * 2)
        ascending, scales = self.ascending.clone(), self.scales.clone()
        ascending[at], scales[at] = one.resampled(ascending.shape[1])[0], one.scales[0]
        return Checks(self.names, ascending, scales, self.calibration, self.counts_below)

    def with_reviewed(self, values: Float[Tensor, " m"]) -> Checks:
        """Return these checks with another ``reviewed``, whose p_g is fitted to ``values``; it has to be calibrated.

        The others get as many values.
        """
        others, one = self.without_reviewed(), values.to(self.ascending).sort().values[None]
        return Checks(
            (*others.names, REVIEWED),
            torch.cat([others.resampled(len(values)), one]),
            torch.cat([others.scales, tail_scales(one.T)]),
            torch.cat([others.calibration, one.amax().expand(1, others.calibration.shape[1])]),
            others.counts_below | {REVIEWED: COUNTS_BELOW[REVIEWED]},
        )

    def score(self, values: Float[Tensor, "batch checks"]) -> Float[Tensor, " batch"]:
        """Return ``−Σ_g log min(1, p_g / τ_g)``, in nats; higher is more unusual."""
        log_p = log_p_values(self.ascending, self.pieces, values.T.contiguous())
        return -(log_p - self.log_below).clamp(max=0).sum(dim=0).float()

    def p_values(self, values: Float[Tensor, "batch checks"]) -> Float[Tensor, "batch checks"]:
        """Return the conformal p-value of each check, ``(1 + #{calibration ≥ this}) / (n + 1)``."""
        return conformal_p_values(self.calibration, values.T.contiguous()).T


MINIMUM_TAIL: Final = 5  # minimum number of values for the scale of the tail, if there are as many


def fit_checks(
    names: Sequence[str], selection: Float[Tensor, "m checks"], calibration: Float[Tensor, "n checks"]
) -> Checks:
    """Fit checks to the values of both halves of the validation images."""
    for part in (selection, calibration):
        if not part.isfinite().all():
            raise FitError("expected finite values of the checks; check the precision")
    ascending = selection.float().sort(dim=0).values
    scales = tail_scales(ascending)
    if constant := [name for name, values in zip(names, ascending.T, strict=True) if not vary(values)]:
        raise FitError(f"expected values that differ between images, those of {', '.join(constant)} are all equal")
    below = {name: value for name, value in COUNTS_BELOW.items() if name in names and len(names) > 1}
    return Checks(names, ascending.T, scales, calibration.float().sort(dim=0).values.T, below)


def vary(values: Float[Tensor, " m"]) -> bool:
    """Return whether values differ by more than rounding."""
    return bool(values.max() - values.min() > rounding_of(values.abs().max()))


def tail_scales(ascending: Float[Tensor, "m checks"]) -> Float[Tensor, " checks"]:
    """Return the mean excess of the k largest values over the next smaller one, at least 1/1000 of the range.

    k is :data:`.TAIL_FRACTION` of the values, at least :data:`MINIMUM_TAIL`, and less than their number.
    """
    count = len(ascending)
    k = max(1, min(count - 1, max(MINIMUM_TAIL, round(TAIL_FRACTION * count))))
    wide = ascending.double()
    return torch.maximum(tail_excess(wide, k), (wide[-1] - wide[0]) / 1000).float()


Auroc = Mapping[str, float]  # the AUROC for each transform of synthetic OOD images
KINDS_KEY: Final = "kinds"  # in a bundle: the transforms, or the patches of a map, as their AUROCs follow


def best_of(aurocs: Mapping[str, Auroc]) -> dict[str, float]:
    """Return the highest AUROC for each transform; all options have the same transforms."""
    transforms = next(iter(aurocs.values()))
    return {transform: max(each[transform] for each in aurocs.values()) for transform in transforms}


def regret(aurocs: Mapping[str, Auroc], option: str) -> float:
    """Return the largest difference between the best option and this option over the transforms."""
    return max(best - aurocs[option][transform] for transform, best in best_of(aurocs).items())


def least_regret(aurocs: Mapping[str, Auroc]) -> str:
    """Return the option with the least regret, of equal ones the first."""
    return min(aurocs, key=partial(regret, aurocs))


@dataclass(frozen=True)
class CheckChoice:
    """The options that were compared and the chosen one, each named by its checks with the early layer in brackets."""

    aurocs: Mapping[str, Auroc]  # by option, each with the same transforms
    selectable: tuple[str, ...]  # options that may be chosen; the others are shown for comparison
    reason: str  # a sentence on the options that may not be chosen

    @property
    def chosen(self) -> str:
        """The option with the least regret."""
        means = {name: statistics.mean(of_transform.values()) for name, of_transform in self.aurocs.items()}
        return min(self.selectable, key=lambda name: (regret(self.aurocs, name), -means[name]))

    def table(self) -> str:
        """Return one line for each option, least regret first, with its AUROC for each transform."""
        rows = [["checks", "regret", *best_of(self.aurocs)]]
        for name in sorted(self.aurocs, key=partial(regret, self.aurocs)):
            numbers = (f"{value:.4f}" for value in (regret(self.aurocs, name), *self.aurocs[name].values()))
            rows.append([name, *numbers, "◀ chosen" * (name == self.chosen)])
        least = least_regret(self.aurocs)
        among = " of those that may be chosen" if least not in self.selectable else ""
        conclusion = f"checks: {self.chosen} has the least regret over synthetic OOD images{among}; {self.reason}"
        return "\n".join([*align(rows), conclusion])

    def to_json(self) -> dict[str, Any]:
        """Return the choice as a manifest records it, in JSON types."""
        return {
            "chosen": self.chosen,
            "regret": regret(self.aurocs, self.chosen),
            "reason": self.reason,
            KINDS_KEY: list(best_of(self.aurocs)),
            "options": [
                {"checks": name, "selectable": name in self.selectable, "auroc": list(of_transform.values())}
                for name, of_transform in self.aurocs.items()
            ],
        }


def compare(
    values: Mapping[str, Mapping[str, Tensor]],  # of n images, (n,), by transform, then by check or early layer
    names: Sequence[str],
    layers: Sequence[str],
    *,
    reason: str,
) -> CheckChoice:
    """Compare all checks with each early layer, and fewer checks for the record, by AUROC on each transform."""
    real, transforms = values[REAL], [name for name in values if name != REAL]
    full = {option_name(layer, names): [layer, *names] for layer in layers} or {option_name(None, names): list(names)}
    fewer = {option_name(None, names): list(names), **{name: [name] for name in names}}
    fewer |= {option_name(layer, ()): [layer] for layer in layers}
    aurocs = {}
    for option, columns in (fewer | full).items():
        inside = torch.stack([real[column] for column in columns], dim=1)
        checks = fit_checks([TEXTURE if name in layers else name for name in columns], inside, inside)
        synthetic = {each: torch.stack([values[each][name] for name in columns], dim=1) for each in transforms}
        aurocs[option] = {each: auroc(checks.score(inside), checks.score(values)) for each, values in synthetic.items()}
    return CheckChoice(aurocs, tuple(full), reason)


def option_name(layer: str | None, names: Sequence[str]) -> str:
    """Return the name of an option in tables, such as ``texture[layer1] + content``."""
    return " + ".join([*([] if layer is None else [f"{TEXTURE}[{layer}]"]), *names])
