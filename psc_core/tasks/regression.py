"""Regression: one number for each image, with its name and unit.

With y the true number of an image, μ its mean and σ = √(aleatoric² + epistemic²), n calibration images and coverage
1 − α, the interval is

    ``[μ − q σ, μ + q σ]``,   q = the ⌈(n + 1)(1 − α)⌉-th smallest ``|y − μ| / σ`` of the calibration images

and contains the true number of a future in-distribution image with probability ≥ 1 − α, over all images (split
conformal with normalised residuals: Papadopoulos et al. 2002; Lei et al. 2018, section 5.2).  Its ends are float32,
rounded outward, so that no rounding takes a number out of it.

Collapse, projection, density and checks work on classes.  For a regression these are *bins*: the numbers between two
neighbouring quantiles of the training images, so that each bin has about as many of them.  (The analogy is ours.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor

from psc_core import metrics
from psc_core.answers import (
    BETTER_THAN_GUESSING,
    REGRESSION_DECISIONS,
    REGRESSION_SCORES,
    WITHOUT_IMAGE,
    RegressionAnswer,
    RegressionPolicy,
    RegressionQuery,
    RegressionResponse,
    Target,
)
from psc_core.collapse import LinearFit
from psc_core.compute import Compute
from psc_core.conformal import (
    MAX_SCORE,
    check_ascending,
    check_finite,
    check_range,
    check_rates,
    conformal_rank,
    equal_scores,
    thin,
)
from psc_core.data.dataset import ImageDataset, known_values
from psc_core.errors import DataError, FitError, warn
from psc_core.features import check_features
from psc_core.heads.base import Features, Head, RegressionData, RegressionHead, Scored, fit_standardisation
from psc_core.heads.blr import BayesianLinearHead
from psc_core.heads.dve import DeepVecchiaHead
from psc_core.settings import FitSettings
from psc_core.tasks.base import (
    CHECKS_OUTPUT,
    FIRST_EVALUATION_IMAGES,
    GUESSES,
    BaseCalibration,
    BaseDecisions,
    BasePrediction,
    Calibrated,
    Datatype,
    FirstEvaluation,
    FloatArray,
    Outputs,
    Task,
    run_network,
)
from psc_core.text import parse_number

if TYPE_CHECKING:
    from psc_core.evaluation.evaluate import Evaluator
    from psc_core.report.content import TaskReport

FINITE: Final = (np.finfo(np.float32).min, np.finfo(np.float32).max)
NEXT: Final = 0.6  # so many ε of its size from a float32, rounded, lies the next one
SPREADS: Final = (1e-15, 1e15)  # standard deviations of the numbers that a model can be fitted to
NARROW: Final = 1e-5  # relative to the numbers' mean; below that standard deviation the rounding of float32 is seen
OUTLYING: Final = 10  # times the error of nine in ten images; an RMSE above it comes from a few numbers
FEWEST_FOR_A_LINE: Final = 10  # images that a straight line through outputs and numbers is fitted to
UNIT_ERROR: Final = 0.1  # deviations of the numbers; a smaller RMSE is not that of another unit
GRID: Final = 1e-3  # steps of a grid, by which a mean on it may be off
OWN: Final = 1e-4  # standard deviations; a number that is nearer to the mean is the model's own, up to rounding
CODE_ACCEPT, ABSTAIN_UNCERTAIN, ABSTAIN_OOD = range(len(REGRESSION_DECISIONS))


def _round_up(ends: npt.NDArray[np.float64]) -> FloatArray:
    """Return float32 numbers that are not below ``ends``, unless these are beyond every one: JSON has no infinity.

    Rounded to the nearest, an interval of numbers near 1.7e9 would be up to 64 narrower on either side.
    """
    rounded = np.clip(ends, *FINITE).astype(np.float32)
    return np.where(rounded < np.minimum(ends, FINITE[1]), np.nextafter(rounded, FINITE[1]), rounded)


def ends(mean: FloatArray, half: npt.NDArray[np.float64]) -> tuple[FloatArray, FloatArray]:
    """Return both ends of intervals around means, rounded outward."""
    center = mean.astype(np.float64)
    return 0 - _round_up(half - center), _round_up(center + half)  # 0 and not −0


@dataclass(frozen=True, kw_only=True, eq=False)
class Decisions(BaseDecisions):
    """The decisions of a regression on n images."""

    decision_names = REGRESSION_DECISIONS

    lower: FloatArray  # (n,) ends of the interval, in the target's unit
    upper: FloatArray  # (n,)

    def columns(self, outputs: Outputs[FloatArray], classes: Sequence[str], **options: int | None) -> dict[str, Any]:
        first = dict.fromkeys(outputs.scores)  # The scores come before the interval; their values are the base's.
        return {**first, "lower": self.lower, "upper": self.upper, **super().columns(outputs, classes)}


@dataclass(frozen=True)
class Calibration(BaseCalibration):
    decision_names = REGRESSION_DECISIONS
    graph_inputs = ("alpha", "max_width", "coverage")

    residuals: Float[Tensor, " n"]  # |y − μ| / σ, ascending

    def decide(self, outputs: Outputs[FloatArray], policy: RegressionPolicy) -> Decisions:
        quantile = self.quantile(policy.coverage)
        is_ood = self.is_ood(outputs, policy)
        decision = np.full(len(outputs), CODE_ACCEPT, np.int8)
        deviation = np.hypot(outputs["aleatoric"], outputs["epistemic"], dtype=np.float64)
        lower, upper = ends(outputs["mean"], quantile * deviation)
        if policy.max_width is not None:
            with np.errstate(over="ignore"):  # The width may be beyond every float32, or NaN.
                decision[~(upper - lower <= policy.max_width)] = ABSTAIN_UNCERTAIN
        decision[is_ood] = ABSTAIN_OOD
        return Decisions(is_ood=is_ood, decision=decision, lower=lower, upper=upper)

    def decide_in_graph(
        self, scores: Mapping[str, Tensor], probabilities: Tensor, given: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        deviation = (scores["aleatoric"].square() + scores["epistemic"].square()).sqrt()
        rank, is_kept = self.rank_in_graph(given["coverage"])
        half = torch.where(is_kept, self.residuals[rank - 1] * deviation, torch.inf)
        mean, step = scores["mean"], NEXT * torch.finfo(torch.float32).eps
        lower, upper = mean - half, mean + half  # The distance from the mean shows what rounding took off an end.
        lower = torch.where(mean - lower < half, lower - step * lower.abs(), lower)
        upper = torch.where(upper - mean < half, upper + step * upper.abs(), upper)
        is_ood = self.is_ood_in_graph(scores["ood_p_value"], given["alpha"])
        is_narrow = upper - lower <= given["max_width"]
        decision = torch.where(is_ood, ABSTAIN_OOD, torch.where(is_narrow, CODE_ACCEPT, ABSTAIN_UNCERTAIN))
        return {"lower": lower, "upper": upper, "is_ood": is_ood, "decision": decision}

    def quantile(self, coverage: float) -> float:
        """Return q, half the width of an interval in standard deviations."""
        check_rates(len(self), coverage=coverage)
        return float(self.residuals[conformal_rank(coverage, len(self)) - 1])

    @classmethod
    def check_tensors(cls, tensors: Mapping[str, Tensor]) -> None:
        check_ascending([tensors["ood_scores"], tensors["residuals"]])
        for name, low in (("ood_scores", -MAX_SCORE), ("residuals", 0.0)):
            check_range(name, tensors[name], low, MAX_SCORE)


@dataclass(frozen=True, repr=False, eq=False)
class RegressionPrediction(BasePrediction):
    """Predictions of a regression for n images, on the CPU.

    Examples:
        >>> from psc_core.tasks.base import Outputs
        >>> from psc_core.answers import REGRESSION_SCORES as SCORES
        >>> from psc_core.tasks.regression import Calibration
        >>> from psc_core.answers import RegressionPolicy
        >>> policy = RegressionPolicy(alpha=0.05, max_width=None, coverage=0.95)
        >>> packed = torch.tensor([[50.0, 3.0, 4.0, -9.0, 9.0, 0.5], [20.0, 0.0, 1.0, -99.0, 99.0, 0.01]])
        >>> calibration = Calibration(torch.arange(20.0), torch.full((20,), 2.0))
        >>> decisions = calibration.decide(Outputs(packed.numpy(), SCORES, ()), policy)
        >>> target = Target(name="age", unit="years")
        >>> prediction = RegressionPrediction(Outputs(packed, SCORES, ()), decisions, ("low", "high"), target)
        >>> prediction.mean, prediction.interval, prediction.decision
        (tensor([50., 20.]), tensor([[40., 60.],
                [18., 22.]]), ('accept', 'abstain_ood'))
    """

    answer = RegressionAnswer

    decisions: Decisions
    target: Target

    @property
    def mean(self) -> Tensor:
        """``float32 (n,)`` the predicted numbers, in the target's unit."""
        return self.outputs["mean"]

    @property
    def aleatoric(self) -> Tensor:
        """``float32 (n,)`` standard deviation of the noise, in the target's unit."""
        return self.outputs["aleatoric"]

    @property
    def epistemic(self) -> Tensor:
        """``float32 (n,)`` standard deviation that more training data would remove, in the target's unit."""
        return self.outputs["epistemic"]

    @property
    def lower(self) -> Tensor:
        """``float32 (n,)`` lower end of the interval that contains the true number with the bundle's coverage."""
        return torch.from_numpy(self.decisions.lower)

    @property
    def upper(self) -> Tensor:
        """``float32 (n,)`` upper end of the interval."""
        return torch.from_numpy(self.decisions.upper)

    @property
    def interval(self) -> Tensor:
        """``float32 (n, 2)`` both ends of the interval."""
        return torch.stack([self.lower, self.upper], dim=1)


BINS: Final = 10  # maximum number of bins
IMAGES_PER_BIN: Final = 20  # training images that a bin should have; fewer images make fewer bins


def quantile_edges(values: Float[Tensor, " n"]) -> Float[Tensor, " edges"]:
    """Return the numbers that separate the bins, ascending: quantiles of ``values`` that leave each bin two images."""
    bins = min(BINS, max(2, len(values) // IMAGES_PER_BIN))
    ascending = values.double().sort().values
    if ascending[0] == ascending[-1]:
        raise DataError(f"expected numbers that differ between images, all are {float(ascending[0]):g}; nothing to fit")
    if len(values) < 4 or ascending[1] == ascending[-2]:
        raise DataError(
            "expected a number with two training images below it and two others, to make bins; "
            f"{len(values)} images have {len({*ascending.tolist()})} different numbers, too few or too rare; add some"
        )
    edges: list[float] = []
    below = 0  # images below the last edge
    for edge in ascending[torch.arange(1, bins) * len(values) // bins].tolist():
        count = int((ascending < edge).sum())
        if min(count - below, len(values) - count) >= 2:  # A class of one image has no covariance.
            edges.append(edge)
            below = count
    # Where nearly all are equal, no quantile parts them.
    return ascending.new_tensor(edges) if edges else ascending[ascending > ascending[1]][:1]


def label_in_bins(dataset: ImageDataset, edges: Float[Tensor, " edges"]) -> ImageDataset:
    """Return ``dataset`` labelled with the bin of each number; one that equals an edge belongs to the bin above."""
    shown = ([float(f"{edge:.{digits}g}") for edge in edges.tolist()] for digits in range(4, 18))
    apart = next(each for each in shown if len(set(each)) == len(edges))  # 17 digits tell any two apart.
    ends = ["", *(str(edge).removesuffix(".0") for edge in apart), ""]
    names = [_bin_name(low, high) for low, high in pairwise(ends)]
    labels = torch.bucketize(known_values(dataset.values), edges, right=True)
    return replace(dataset, labels=labels, classes=tuple(names))


def _bin_name(low: str, high: str) -> str:
    return f"{low} to {high}" if low and high else f"below {high}" if high else f"{low} and above"


def fit_calibration(
    ood_score: Float[Tensor, " n"],  # nats, higher is more out-of-distribution
    mean: Float[Tensor, " n"],  # μ, in the target's unit
    deviation: Float[Tensor, " n"],  # σ, in the target's unit
    values: Float[Tensor, " n"],  # y, in the target's unit
    weights: Float[Tensor, " n"] | None = None,  # how many images each stands for
) -> Calibration:
    """Collect the scores of calibration images, as the served pipeline computes them."""
    residuals = ((values.double() - mean.double()).abs() / deviation.double()).float()
    check_finite({"OOD scores": ood_score, "residuals": residuals})
    scores = (ood_score.float(), residuals)
    return Calibration(*(part[equal_scores(part, weights)] for part in scores))


class Regression(Task):
    """The task of a network that predicts a number; density and checks work on bins of the numbers."""

    name = "regression"
    noun = "regression"
    response_type = RegressionResponse
    answer_type = RegressionAnswer
    policy_type = RegressionPolicy
    query_type = RegressionQuery
    calibration_type = Calibration
    prediction_type = RegressionPrediction
    heads: ClassVar[Mapping[str, type[RegressionHead]]] = {
        head.kind: head for head in (BayesianLinearHead, DeepVecchiaHead)
    }
    abstentions: ClassVar = {"ood": ABSTAIN_OOD, "uncertain": ABSTAIN_UNCERTAIN}
    tensors: ClassVar[Mapping[str, Datatype]] = {
        **dict.fromkeys((*REGRESSION_SCORES, "lower", "upper", CHECKS_OUTPUT), "FP32"),
        "is_ood": "BOOL",
        "decision": "INT64",
    }
    explained = ("nearest_bin", "bin_distances")
    has_numbers = True
    layer_quality = LinearFit
    own_settings = ("max_width",)
    why_not_extended = "a regression's bundle does not keep where its bins part, which are the classes of its density"

    target: Target

    @classmethod
    def takes(cls, data: ImageDataset) -> bool:
        return data.target is not None

    @classmethod
    def labelled(cls, train: ImageDataset, val: ImageDataset) -> tuple[ImageDataset, ImageDataset]:
        edges = quantile_edges(known_values(train.values))
        return label_in_bins(train, edges), label_in_bins(val, edges)

    @classmethod
    def check_half(cls, images: ImageDataset) -> None:
        values = known_values(images.values)
        if bool((values == values[0]).all()):
            raise DataError(
                f"expected numbers that differ in each half of the validation images and among those that calibrate, "
                f"of {images.name} all {len(values)} are {float(values[0]):g}; give more images"
            )

    @classmethod
    def of_images(cls, train: ImageDataset) -> Regression:
        if train.target is None:
            raise DataError(f"expected numbers in {train.name}, got {len(train.classes)} classes; give a table")
        spread = float(known_values(train.values).std(correction=0))
        if not (spread == 0 or SPREADS[0] <= spread <= SPREADS[1]):  # All equal, they are refused elsewhere.
            raise DataError(
                f"the numbers of {train.name} spread by {spread:.2g}, whose square float32 cannot hold; give them in a "
                f"unit in which they spread by {SPREADS[0]:g} to {SPREADS[1]:g}"
            )
        return cls(target=train.target)

    @classmethod
    def describe_labels(cls, train: ImageDataset) -> str:
        return f"numbers of {train.target}"

    @classmethod
    def confidence_check(cls, *, ambiguous: bool) -> tuple[bool, str]:
        return False, "a regression has no class probabilities, so confidence is no check"

    @classmethod
    def fit_head(
        cls, train: Features, selection: Features, settings: FitSettings, device: torch.device
    ) -> RegressionHead:
        """Return the head; the network's own predictions, where the selection split has them, replace its mean."""
        z, selection_z = train.head_input.to(device), selection.head_input[:].to(device)
        for features in (z, selection_z):
            labels = torch.zeros(len(features), dtype=torch.int64, device=device)
            check_features(features, labels, num_classes=1, class_names=None, minimum=2)
        values = known_values(train.values).double().to(device)
        center, scale = values.mean(), values.std(correction=0)
        if not float(scale) > 0:
            raise FitError("expected numbers that differ between images, all are equal; nothing to fit")

        if float(scale) < NARROW * abs(float(center)):
            warn(
                f"the numbers spread by {float(scale):.2g} around {float(center):.7g}, of which float32 keeps about "
                f"seven digits, so intervals are wider by rounding; subtract {float(center):.3g} from all numbers"
            )

        def standard(numbers: Tensor) -> Tensor:
            return (numbers.double().to(device) - center) / scale

        standardisation, own = fit_standardisation(z, train.widths), selection.network_output
        data = RegressionData(
            train=standardisation(z),
            train_values=standard(values),
            train_images=train.images.to(device),
            selection=standardisation(selection_z)[:],
            selection_values=standard(known_values(selection.values)),
            selection_mean=None if own is None else standard(own[:][:, 0]),
            center=center,
            scale=scale,
            widths=train.widths,
            seed=settings.seed,
            standardisation=standardisation,
        )
        return cls.heads[settings.head_of(cls.heads)].fit(data).to(device)

    @classmethod
    def calibrate(
        cls,
        scored: Scored,
        ood_score: Float[Tensor, " n"],
        images: ImageDataset,
        settings: FitSettings,
        weights: Float[Tensor, " n"] | None = None,
        *,
        or_higher: bool = False,
    ) -> Calibrated:
        """Return OOD scores and residuals of the images; weighted ones are thinned for width and metrics.

        Without a ``max_width`` it is the width of one interval for all images: a wider one says less than none.
        """
        cls.check_half(images)
        values, mean = known_values(images.values), scored.scores["mean"]
        deviation = torch.hypot(scored.scores["aleatoric"], scored.scores["epistemic"])
        calibration = fit_calibration(ood_score, mean, deviation, values, weights)
        own = (values.double() - mean.double()).abs() < OWN * deviation.double()
        copied = 2 * int(own.sum()) > len(own) and not is_rounded(mean[own])  # Rounded ones may be right.
        if copied or calibration.quantile(settings.coverage) < OWN:
            raise DataError(
                f"{int(own.sum())} of {len(own)} numbers are what the model predicts, so intervals would be too narrow "
                "for others; label images with measured numbers, not with the model's own, or give others"
            )
        if weights is not None:
            kept = thin(weights)
            values, mean, deviation = values[kept], mean[kept], deviation[kept]
        measured = calibration_metrics(mean, deviation, values)
        width = settings.max_width
        if width is None:
            width = measured[WITHOUT_IMAGE] = width_without_image(values, settings.coverage)
        return Calibrated(
            calibration, RegressionPolicy(alpha=settings.alpha, max_width=width, coverage=settings.coverage), measured
        )

    @classmethod
    def first_evaluation(
        cls, net: Callable[[Tensor], Tensor], train: ImageDataset, val: ImageDataset, compute: Compute
    ) -> FirstEvaluation:
        (of_train, _), (of_val, predicted) = (network_rmse(net, data, compute) for data in (train, val))
        values = known_values(val.values)
        spread = float(known_values(train.values).std(correction=0))
        unit = f" {cls.of_images(train).target.unit}".rstrip()
        text = (
            f"the original network: RMSE {of_train:.4g} on training and {of_val:.4g}{unit} on validation images (at "
            f"most {FIRST_EVALUATION_IMAGES:,} of each), the deviation of the numbers is {spread:.4g}"
        )
        warning, error = "", (values - predicted.double()).abs()
        x, y = (each.double() - each.double().mean() for each in (predicted, values))
        by_line = float((y - (x @ y / x.square().sum()) * x).square().mean().sqrt())
        if not metrics.rises_with(predicted, values):
            warning = f"{GUESSES}, its weights or the preprocessing are wrong"
        elif of_val > OUTLYING * float(error.quantile(0.9)) > 0:
            worst = int(error.argmax())
            warning = (
                f"a few numbers are far from what the network says, the furthest is {float(values[worst]):.6g} where "
                f"it says {float(predicted[worst]):.4g}; correct them or leave their images out, also where they stand "
                "for a missing number"
            )
        elif of_val > spread:
            warning = "always predicting the mean would be better; is the network's output in the table's unit?"
        elif len(values) >= FEWEST_FOR_A_LINE and of_val > max(2 * by_line, UNIT_ERROR * spread):
            warning = (
                "a straight line through the network's outputs would more than halve their error; are they in the "
                "table's unit?"
            )
        else:
            text += "; if it should be lower, check the preprocessing"
        return FirstEvaluation(text, warning, of_val)

    def check_images(self, classes: Sequence[str], data: ImageDataset) -> None:
        wanted = self.target
        if data.target != wanted:
            raise DataError(
                f"expected numbers of {wanted} in {data.name}, got {data.target or 'classes'}; give a table of these "
                f"numbers, in Python with target={wanted.name!r}, unit={wanted.unit!r}"
            )

    def relabelled(self, data: ImageDataset, labels: Sequence[str]) -> ImageDataset:
        return replace(data, target=self.target, values=torch.tensor([*map(float, labels)], dtype=torch.float64))

    def number(self) -> Target:
        return self.target

    def network_outputs(self, classes: Sequence[str]) -> int:
        return 1

    def probabilities(self, classes: Sequence[str]) -> int:
        return 0

    def epistemic_unit(self, head: Head) -> str:
        return f"standard deviation, {self.target.unit}".removesuffix(", ")

    def parse_label(self, text: str, classes: Sequence[str], marks: str = ".") -> str:
        value = parse_number(text, marks)
        if value is None or not math.isfinite(value):
            raise DataError(f"expected a number for {self.target}, got {text!r}; correct the label")
        return repr(value)

    def numbers(self, outputs: Outputs[FloatArray]) -> dict[str, FloatArray]:
        """Return the means and the deviations, in proportion to which an interval is wide."""
        return {"mean": outputs["mean"], "deviation": np.hypot(outputs["aleatoric"], outputs["epistemic"])}

    def difference(self, outputs: Outputs[Tensor], other: Outputs[Tensor]) -> tuple[str, Tensor]:
        deviation = torch.hypot(outputs["aleatoric"], outputs["epistemic"])
        return "means", (outputs["mean"] - other["mean"]) / deviation

    @classmethod
    def evaluator(cls) -> Evaluator[Any, Any, Any]:
        from psc_core.evaluation.regression import RegressionEvaluator

        return RegressionEvaluator()

    @classmethod
    def report(cls) -> TaskReport[Any, Any]:
        from psc_core.report.tasks import RegressionTaskReport

        return RegressionTaskReport()

    def explain_head(
        self, explanation: Mapping[str, npt.NDArray[Any]], image: int, layers: Sequence[str]
    ) -> dict[str, Any]:
        """Return one ``LayerNeighbours`` for each layer that the head reads, if it reads layers."""
        if "neighbour_image" not in explanation:
            return {}
        names = ("layer_weight", "neighbour_image", "neighbour_value", "neighbour_distance")
        of_layers = zip(layers, *(explanation[name][image] for name in names), strict=True)
        return {
            "nearest_examples": [
                {
                    "layer": layer,
                    "weight": float(weight),
                    "examples": [
                        {"image": int(position), "value": float(value), "distance": float(distance)}
                        for position, value, distance in zip(*examples, strict=True)
                    ],
                }
                for layer, weight, *examples in of_layers
            ]
        }

    def metric_labels(self, classes: tuple[str, ...]) -> tuple[str, ...]:
        return (self.target.name,)


def calibration_metrics(
    mean: Float[Tensor, " n"], deviation: Float[Tensor, " n"], values: Float[Tensor, " n"]
) -> dict[str, Any]:
    """Return metrics of the calibration split, which selected nothing that they measure."""
    mean, deviation = mean.double(), deviation.double()
    return {
        "validation_images": len(values),
        "rmse": metrics.rmse(mean, values),
        "r2": metrics.r2(mean, values),
        BETTER_THAN_GUESSING: metrics.rises_with(mean, values),
        "nll_nats": metrics.gaussian_nll(mean, deviation, values),
        "crps": metrics.crps(mean, deviation, values),
    }


def width_without_image(values: Float[Tensor, " n"], coverage: float) -> float:
    """Return how wide the interval is between the quantiles of the numbers that lie as far out as ``coverage`` says."""
    ends = torch.tensor([(1 - coverage) / 2, (1 + coverage) / 2], dtype=torch.float64)
    lower, upper = map(float, torch.quantile(values.double(), ends))
    # Where nearly all numbers are equal, any interval is wider.
    return max(upper - lower, float(torch.finfo(torch.float32).tiny))


def is_rounded(means: Float[Tensor, " n"]) -> bool:
    """Return whether all means lie on an even grid, as those of a network that answers in whole numbers."""
    steps = torch.unique(means.double()).diff()
    if not len(steps):
        return True
    counts = steps / steps.min()
    return bool(((counts - counts.round()).abs() < GRID).all())


def network_rmse(
    net: Callable[[Tensor], Tensor], data: ImageDataset, compute: Compute
) -> tuple[float, Float[Tensor, " n"]]:
    """Return the RMSE of the original network on images with numbers, and what it predicts."""
    predicted = run_network(net, data, compute)[:, 0]
    return metrics.rmse(predicted, known_values(data.values)), predicted
