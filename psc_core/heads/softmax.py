"""Multinomial logistic regression, from which heads start, and the prior precision τ and temperature T of a posterior.

:func:`choose_softmax` minimises, over labelled examples with features φ_i and label y_i,

    ``Σ_i −log softmax(W φ_i + b)_{y_i} + (τ / 2)(‖W‖² + ‖b‖²)``

by Newton's method with conjugate gradients, from a fixed start: deterministic, no step size.  A step takes one pass
over the examples, in blocks of features and float64.  τ is chosen by selection NLL along a path from strong to weak,
each fit starting from the one before; the fit with the chosen one is then run to :data:`TOLERANCE`.  A weaker prior has
to be worth it: where hardly a selection example is wrong, the NLL falls as long as the weights grow.

With ``θ = [W b]``, ``φ̃ = (φ, 1)`` and ``p`` the probabilities at the start of a step, the curvature

    ``C = (1/n) Σ_i (diag p_i − p_i p_iᵀ) ⊗ φ̃_i φ̃_iᵀ + τ/n``

is never formed.  Products with it are float32, which changes the path and not the minimum, and read the examples from
memory where they fit (:data:`KEPT_VALUES`).  (A part of the examples will not do in their place: where they are few for
the weights, steps are too long in all directions that the part does not show.)  Products are taken in variables V in
which C is near the identity, as far as a Kronecker product can make it so (KFAC, Martens & Grosse 2015, with examples
weighted by what they contribute).  With ``w = 1 − Σ_c p_c²``, and sums over m of the examples,

    ``A = (1/m) Σ_i φ̃_i φ̃_iᵀ = Q_A diag(λ) Q_Aᵀ``,   ``λ_A`` the diagonal of ``Q_Aᵀ (Σ_i w_i φ̃_i φ̃_iᵀ / Σ_i w_i) Q_A``
    ``B = (1/m) Σ_i (diag p_i − p_i p_iᵀ) = Q_B diag(λ_B) Q_Bᵀ``
    ``V = √(λ_B λ_Aᵀ + τ/n) ∘ (Q_Bᵀ θ Q_A)``

``Q_A`` stays that of the examples, and ``λ_A`` is measured anew at every step (as in EKFAC, George et al. 2018): with
1,400 features a decomposition takes as long as a hundred products.  A gradient entry in V is a distance to the minimum
in units of which √(1/n) is the statistical error of the weights; without V, iterations end in a valley where the last
digit of a feature moves a probability by 10⁻³.

:func:`choose_posterior`: of a posterior ``f ~ N(μ, s²)`` over logits a head serves ``softmax(f / T)``, its logits have
mean μ / T and variance s² / T²; probabilities, mutual information and samples all belong to it.  In the probit
approximation

    ``probabilities = softmax((μ / T) / √(1 + π s² / (8 T²))) = softmax(μ / √(T² + π s² / 8))``

T cannot undo what s² flattens, so the selection NLL tells when a posterior is too wide, as Kronecker factors make it
where classes are separable.  It does not tell when one is too narrow: weights that are well calibrated alone gain
nothing from a posterior, and the NLL hardly changes up to τ = ∞, where epistemic uncertainty vanishes.  So the prior is
the one that the weights were fitted with, or the least strong of the stronger ones that costs at most :data:`COST`.

:class:`TemperatureHead` serves the softmax of the network's own logits divided by a temperature T (Guo et al. 2017,
equation 9).  There is no posterior, so epistemic uncertainty is 0.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import ClassVar, Final, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from psc_core import linalg
from psc_core.compute import track
from psc_core.errors import NetworkError, warn
from psc_core.features import FeatureMatrix, as_matrix, blocks
from psc_core.fitted import Record
from psc_core.heads.base import ClassifierHead, ClassifierOutput, Scored, in_memory, score_classes
from psc_core.metrics import better_than_guessing, label_nll

SAMPLE_VALUES: Final = 1 << 24  # largest m × columns, and m × classes, that V is measured on (64 MiB each)
KEPT_VALUES: Final = 1 << 26  # largest n × dim, and n × classes, that products with C keep (256 MiB each)
ROWS: Final = 1024  # of the sample that are read at once where a copy of all would double it
TINY: Final = 1e-30  # where all p are certain in float32, the weights w are zero


class Sample(NamedTuple):
    """The m examples that V is measured on."""

    axes: Float[Tensor, "columns columns"]  # ``Q_A``
    phi: Float[Tensor, "m columns"]  # φ̃ along them, float32

    def probabilities(self, theta: Float[Tensor, "classes columns"]) -> Float[Tensor, "m classes"]:
        """Return p of each example, float32."""
        return (self.phi @ (theta @ self.axes).T.float()).softmax(dim=1)


def curvature_sample(features: Float[Tensor, "n dim"] | FeatureMatrix, classes: int) -> Sample:
    """Return one example at random from each of m equal parts: they may come in order, or repeat periodically."""
    n, columns = len(features), features.shape[1] + 1
    m = max(1, min(n, SAMPLE_VALUES // max(columns, classes)))
    offset = torch.rand(m, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = ((torch.arange(m) + offset) * (n / m)).long().clamp(max=n - 1)
    phi = torch.empty(m, columns, device=features.device)
    moment = torch.zeros(columns, columns, dtype=torch.float64, device=features.device)
    for chunk, block in blocks(as_matrix(features).take(rows.to(features.device)), columns=2 * columns):
        augmented = functional.pad(block.double(), (0, 1), value=1.0)
        phi[chunk] = augmented.float()
        moment += augmented.T @ augmented
    axes = linalg.eigh(moment).vectors
    narrow = axes.float()
    for part in torch.split(phi, ROWS):
        part.copy_(part @ narrow)
    return Sample(axes, phi)


class Variables(NamedTuple):
    """``V = scale ∘ (outputsᵀ θ inputs)`` for θ = [W b]: back to θ, and for gradients with respect to θ."""

    outputs: Float[Tensor, "classes classes"]
    inputs: Float[Tensor, "columns columns"]
    scale: Float[Tensor, "classes columns"]

    def theta(self, v: Tensor) -> Tensor:
        return self.outputs @ (v / self.scale) @ self.inputs.T

    def gradient(self, gradient: Tensor) -> Tensor:
        return (self.outputs.T @ gradient @ self.inputs) / self.scale


def variables_at(p: Float[Tensor, "m classes"], sample: Sample, *, ridge: float) -> Variables:
    """Return V, float64, where the examples of a sample have the probabilities ``p``; ``ridge`` is τ/n."""
    outputs, weights = p.sum(0).diag() - p.T @ p, (1 - p.square().sum(1)).clamp(min=0)
    total = sum(
        w @ phi.square() for w, phi in zip(torch.split(weights, ROWS), torch.split(sample.phi, ROWS), strict=True)
    )
    values = (total / weights.sum().clamp(min=TINY)).double()
    b = linalg.eigh(outputs.double() / len(p))
    scale = (torch.outer(b.values.clamp(min=0), values) + ridge).sqrt()
    return Variables(b.vectors, sample.axes, scale)


def in_float32(features: Float[Tensor, "n dim"] | FeatureMatrix) -> FeatureMatrix:
    """Return the features in float32, in memory if they fit."""
    if isinstance(features, Tensor):
        return as_matrix(features.float())
    if len(features) * features.shape[1] <= KEPT_VALUES:
        return as_matrix(in_memory(features))
    return features.map(lambda block: block.float(), features.shape[1], torch.float32)


class Curvature:
    """C in V at one θ, float32."""

    def __init__(
        self, theta: Float[Tensor, "classes columns"], features: FeatureMatrix, variables: Variables, *, ridge: float
    ) -> None:
        self.theta, self.features, self.ridge = theta.float(), features, ridge
        self.variables = Variables(*(part.float() for part in variables))
        self.kept: Tensor | None = None  # p of all examples
        if len(features) * len(theta) <= KEPT_VALUES:
            self.kept = in_memory(features.map(self.probabilities, len(theta), torch.float32))

    def probabilities(self, phi: Float[Tensor, "m dim"]) -> Float[Tensor, "m classes"]:
        return functional.linear(phi, self.theta[:, :-1], self.theta[:, -1]).softmax(dim=1)

    def times(self, v: Float[Tensor, "classes columns"]) -> Float[Tensor, "classes columns"]:
        along, n = self.variables.theta(v), len(self.features)
        total = self.ridge * along
        for chunk, phi in blocks(self.features, columns=len(along)):
            p = self.probabilities(phi) if self.kept is None else self.kept[chunk]
            weighted = functional.linear(phi, along[:, :-1], along[:, -1]).mul_(p)
            spread = weighted.sub_(p * weighted.sum(1, keepdim=True)).div_(n)
            total[:, :-1] += spread.T @ phi
            total[:, -1] += spread.sum(0)
        return self.variables.gradient(total)


def newton_direction(
    curvature: Curvature,
    downhill: Float[Tensor, "classes columns"],  # minus the gradient in V
    tolerance: float,
) -> Float[Tensor, "classes columns"]:
    """Return Δ in V, float64, with ``C Δ ≈ downhill``: the closer, the smaller the gradient is."""
    residual = downhill.float()
    direction, search, size = torch.zeros_like(residual), residual, residual.square().sum()
    enough = min(INEXACT, float(size) ** 0.25) ** 2 * size
    for _ in range(PRODUCTS):
        product = curvature.times(search)
        step = size / (search * product).sum()
        direction += step * search
        residual = residual - step * product
        before, size = size, residual.square().sum()
        if size <= enough or residual.abs().max() <= tolerance / 3:
            break
        search = residual + size / before * search
    return direction.double()


TEMPERATURES: Final = (0.01, 100.0)  # range of T; logits that are right on every selection image would drive T to 0
PRIOR_IMAGES: Final = 1.0  # strength of the prior that T is 1: a of a Gamma prior on 1 / T with its mode at 1
STRONGER: Final = tuple(10.0 ** (k / 4) for k in range(29))  # values of τ, times that of the weights
COST: Final = (2e-3, 1e-4)  # in mean selection NLL, of a wider posterior: relative, or nats if that is more


class Choice(NamedTuple):
    """The chosen posterior."""

    prior_precision: float  # τ of its prior
    temperature: float  # T that the logits are divided by
    selection_nll: float  # mean selection NLL with both, nats

    def record(self, softmax: SoftmaxFit) -> Record:
        """Return the entries of a head's record that say how weights and posterior were chosen."""
        return {
            "map_precision": softmax.prior_precision,
            "map_val_nll": softmax.selection_nll,
            "prior_precision": self.prior_precision,
            "temperature": self.temperature,
            "val_nll": self.selection_nll,
        }


def nll(logits: Float[Tensor, "n classes"], labels: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Return the negative log-likelihood of each label under ``softmax(logits)``, nats."""
    return functional.cross_entropy(logits, labels, reduction="none").double()


def divide_by_temperature(
    mean: Float[Tensor, "n classes"], variance: Float[Tensor, " n #classes"], temperature: float
) -> Float[Tensor, "n classes"]:
    """Return the probit logits ``μ / √(T² + π s² / 8)``."""
    return mean * (temperature**2 + (math.pi / 8.0) * variance).rsqrt()


def choose_posterior(
    mean: Float[Tensor, "m classes"],  # μ of each selection example
    variance_with: Callable[[float], Float[Tensor, " m #classes"]],  # s² of each for a given τ
    labels: Int[Tensor, " m"],
    *,
    prior_precision: float,
) -> Choice:
    """Return the smallest of ``prior_precision`` × :data:`STRONGER`, each with its own T, that costs little NLL."""
    found = []
    for factor in STRONGER:
        variance = variance_with(factor * prior_precision)
        temperature = choose_temperature(mean, variance, labels)
        selection_nll = nll(divide_by_temperature(mean, variance, temperature), labels).mean().item()
        found.append(Choice(factor * prior_precision, temperature, selection_nll))
    least = min(choice.selection_nll for choice in found)
    limit = least + max(COST[0] * least, COST[1])
    return next(choice for choice in found if choice.selection_nll <= limit)


def worth(labels: Int[Tensor, " m"]) -> float:
    """Return what a number that is chosen has to gain over m examples, log(m) / 2 nats (Schwarz 1978).

    A smaller gain is within the error of the estimate.
    """
    return math.log(len(labels)) / 2


def choose_temperature(
    mean: Float[Tensor, "m classes"], variance: Float[Tensor, " m #classes"], labels: Int[Tensor, " m"]
) -> float:
    """Return T of the least NLL plus prior within :data:`TEMPERATURES`, or 1.

    One that is not 1 has to gain :func:`worth` over the examples.
    """
    mean, variance = mean.double(), variance.double()  # the rounding of float32 moves a flat minimum by 10⁻⁴

    def loss(log_temperature: float) -> float:
        prior = PRIOR_IMAGES * (math.exp(-log_temperature) - 1 + log_temperature)
        return nll(divide_by_temperature(mean, variance, math.exp(log_temperature)), labels).sum().item() + prior

    limits = (math.log(TEMPERATURES[0]), math.log(TEMPERATURES[1]))
    from scipy.optimize import minimize_scalar  # Imported here, so that a service does not load it.

    found = minimize_scalar(loss, bounds=limits, method="bounded", options={"xatol": 1e-6})
    return math.exp(found.x) if found.fun + worth(labels) < loss(0.0) else 1.0


PRIOR_PRECISIONS: Final = (1e4, 1e3, 1e2, 1e1, 1e0, 1e-1, 1e-2)  # τ, for features of unit variance
RISES: Final = 2  # of the selection NLL in a row, that end the path
STEPS: Final = 100  # maximum number of Newton steps for one precision
PRODUCTS: Final = 500  # maximum number of products with C in a step
INEXACT: Final = 0.25  # largest remaining error of a step, relative to the gradient
PATH_TOLERANCE: Final = 1e-4  # the next along the path of τ: selection NLLs are accurate to 10⁻⁴ nats
TOLERANCE: Final = 3e-7  # largest gradient entry at the chosen τ: its probabilities are accurate to about 10⁻⁵
UNFINISHED: Final = 10.0  # times the tolerance, beyond what rounding hides
LENGTHS: Final = tuple(0.5**k for k in range(30))  # of a step, the first that lowers the objective
SUFFICIENT: Final = 1e-4  # of the slope that a step has to gain (Armijo 1966)
ROUNDING: Final = 1e-13  # of the objective, relative


class SoftmaxFit(NamedTuple):
    """A fitted multinomial logistic regression."""

    weight: Float[Tensor, "classes dim"]
    bias: Float[Tensor, " classes"]
    prior_precision: float  # τ of the prior
    selection_nll: float  # mean selection NLL, nats

    def logits(self, features: Float[Tensor, "m dim"]) -> Float[Tensor, "m classes"]:
        """Return ``W φ + b``, in the type of the features."""
        return functional.linear(features, self.weight.to(features.dtype), self.bias.to(features.dtype))

    def theta(self) -> Float[Tensor, "classes columns"]:
        """``[W b]``."""
        return torch.cat([self.weight, self.bias[:, None]], dim=1)

    def divided_by(self, temperature: float) -> dict[str, Tensor]:
        """Return the tensors of a head whose logits are divided by a temperature."""
        return {"weight": self.weight / temperature, "bias": self.bias / temperature}


def choose_softmax(
    train: Float[Tensor, "n dim"] | FeatureMatrix,
    train_labels: Int[Tensor, " n"],
    selection: Float[Tensor, "m dim"],
    selection_labels: Int[Tensor, " m"],
    *,
    num_classes: int,
    finish: bool = True,
) -> SoftmaxFit:
    """Return a fit along :data:`PRIOR_PRECISIONS`: the strongest prior of the best.

    These are the fits whose NLL over the m selection examples is higher than the lowest by at most :func:`worth`.  The
    path ends once the NLL has risen :data:`RISES` times in a row and the fit with the lowest is better than guessing:
    where training images are of other proportions than the selection split, the NLL first rises while the biases learn
    these, and falls below that only when the weights grow.  If ``finish``, the fit is finished, and the progress is
    reported: with many features, each takes minutes.
    """

    origin = torch.zeros(num_classes, train.shape[1] + 1, dtype=torch.float64, device=train.device)
    examples = curvature_sample(train, num_classes), in_float32(train)

    def fit(prior_precision: float, start: Tensor, tolerance: float) -> SoftmaxFit:
        weight, bias = fit_softmax(
            train, train_labels, prior_precision=prior_precision, start=start, tolerance=tolerance, examples=examples
        )
        found = SoftmaxFit(weight, bias, prior_precision, math.nan)
        return found._replace(selection_nll=nll(found.logits(selection), selection_labels).mean().item())

    def walk() -> Iterator[SoftmaxFit]:
        """Yield the strongest of the best fits so far after each fit."""
        gain = worth(selection_labels) / len(selection_labels)
        weaker, rises = fit(PRIOR_PRECISIONS[0], origin, PATH_TOLERANCE), 0
        best = [weaker]  # the last has the least NLL
        for prior_precision in PRIOR_PRECISIONS[1:]:
            yield best[0]
            before, weaker = weaker, fit(prior_precision, weaker.theta(), PATH_TOLERANCE)
            rises = rises + 1 if weaker.selection_nll > before.selection_nll else 0
            if weaker.selection_nll <= best[-1].selection_nll:
                best = [*(each for each in best if each.selection_nll <= weaker.selection_nll + gain), weaker]
            if rises >= RISES and better_than_guessing(best[-1].logits(selection).argmax(1), selection_labels):
                break
        yield best[0]
        if finish:
            yield fit(best[0].prior_precision, best[0].theta(), TOLERANCE)

    fits = track(walk(), total=len(PRIOR_PRECISIONS) + 1, description="head") if finish else walk()
    return deque(fits, maxlen=1).pop()


def fit_softmax(
    features: Float[Tensor, "n dim"] | FeatureMatrix,
    labels: Int[Tensor, " n"],
    *,
    prior_precision: float,  # τ > 0, or the minimum may be at infinity
    start: Float[Tensor, "classes columns"],  # initial ``[W b]``
    tolerance: float = TOLERANCE,  # largest gradient entry, in V, that ends the iterations
    examples: tuple[Sample, FeatureMatrix] | None = None,  # those that V is measured on, and all in float32
) -> tuple[Float[Tensor, "classes dim"], Float[Tensor, " classes"]]:
    """Fit weights and bias for one prior precision, float64."""
    theta, ridge = start, prior_precision / len(features)
    sample, narrow = examples or (curvature_sample(features, len(start)), in_float32(features))
    loss, gradient = objective(theta, features, labels, prior_precision=prior_precision)
    for _ in range(STEPS):
        variables = variables_at(sample.probabilities(theta), sample, ridge=ridge)
        downhill = -variables.gradient(gradient)
        residual = float(downhill.abs().max())
        if residual <= tolerance:
            break
        direction = newton_direction(Curvature(theta, narrow, variables, ridge=ridge), downhill, tolerance)
        change, slope = variables.theta(direction), float((downhill * direction).sum())
        for length in LENGTHS:
            found = objective(theta + length * change, features, labels, prior_precision=prior_precision)
            if float(found[0] - loss) <= ROUNDING * float(loss) - SUFFICIENT * length * slope:
                break
        else:  # Rounding hides what is left to gain.
            break
        theta, (loss, gradient) = theta + length * change, found
    if tolerance <= TOLERANCE and residual > UNFINISHED * tolerance:  # Others only lead to the last one.
        warn(
            f"the weights of the head are not at their optimum: the gradient is {residual:.1g}, and {tolerance:.1g} "
            "would do; look for training images that are far from all others, or take another head"
        )
    return theta[:, :-1], theta[:, -1]


def objective(
    theta: Float[Tensor, "classes columns"],
    features: Float[Tensor, "n dim"] | FeatureMatrix,
    labels: Int[Tensor, " n"],
    *,
    prior_precision: float,
) -> tuple[Float[Tensor, ""], Float[Tensor, "classes columns"]]:
    """Return the module's objective divided by n, and its gradient ``[Σ (p − e_y) φᵀ, Σ (p − e_y)] + τ θ``."""
    weight, bias = theta[:, :-1], theta[:, -1]
    loss = 0.5 * prior_precision * theta.square().sum()
    gradient = prior_precision * theta
    for chunk, block in blocks(features, columns=features.shape[1] + len(theta)):
        phi, targets = block.to(theta.dtype), labels[chunk, None]
        log_probabilities = functional.linear(phi, weight, bias).log_softmax(dim=1)
        loss -= log_probabilities.gather(1, targets).sum()
        residual = log_probabilities.exp_()
        residual.scatter_add_(1, targets, torch.full_like(targets, -1, dtype=residual.dtype))
        gradient[:, :-1] += residual.T @ phi
        gradient[:, -1] += residual.sum(0)
    return loss / len(features), gradient / len(features)


class TemperatureHead(ClassifierHead):
    """The softmax above; it reads the network's output instead of features."""

    kind = "own"  # the network's own softmax, in the bundle format
    reads_output = True
    has_temperature = True
    layout: ClassVar = {"temperature": ()}

    def forward(self, z: Float[Tensor, "batch classes"]) -> ClassifierOutput:
        logits = z / self.temperature
        return ClassifierOutput(logits.softmax(1), torch.zeros_like(logits[:, 0]))

    def score(self, features: Float[Tensor, "batch dim"], output: Float[Tensor, "batch outputs"] | None) -> Scored:
        if output is None:
            raise NetworkError("the original network's predictions need a backbone that keeps the network's output")
        return score_classes(*self(output))

    def explain(self, features: Float[Tensor, "batch dim"]) -> dict[str, Tensor]:
        return {}

    def refit_temperature(
        self, probabilities: Float[Tensor, "n classes"], labels: Int[Tensor, " n"]
    ) -> TemperatureHead:
        """Return the head with a temperature refitted to its probabilities for n other examples, or itself.

        What the record says of how the head was chosen stays.
        Log-probabilities serve as logits: they differ by a constant of each example, which cancels in the softmax.
        """
        temperature = self.temperature.cpu()
        fitted = fit_temperature_head(probabilities.clamp(min=torch.finfo(probabilities.dtype).tiny).log(), labels)
        factor = float(fitted.temperature)
        if factor == 1:
            return self
        record = {**self.record, **fitted.record, "temperature": float(temperature) * factor}
        return TemperatureHead({"temperature": temperature * factor}, record=record)


def fit_temperature_head(logits: Float[Tensor, "m classes"], labels: Int[Tensor, " m"]) -> TemperatureHead:
    """Fit the temperature by validation NLL, see :func:`.softmax.choose_temperature`; what gives NaN does not count."""
    usable = ~logits.softmax(1).isnan().any(1)
    temperature = choose_temperature(logits[usable], logits.new_zeros(int(usable.sum()), 1), labels[usable])
    spread = float((logits.amax(1) - logits.amin(1)).nanmedian())
    is_flat, is_steep = spread < TEMPERATURES[0], temperature > 0.99 * TEMPERATURES[1]
    # No constant would help a network that guesses.
    if (is_flat or is_steep) and better_than_guessing(logits.argmax(1), labels):
        warn(
            f"the network's own logits are too {'small' if is_flat else 'large'} for a temperature of "
            f"{TEMPERATURES[0]:g} to {TEMPERATURES[1]:g}, those of an image differ by {spread:.2g}: its probabilities "
            "are wrong; multiply its output by a constant, so that they differ by about 10"
        )
    record = {"temperature": temperature, "val_nll": float(own_nll(logits, temperature, labels).mean())}
    return TemperatureHead({"temperature": logits.new_tensor(temperature)}, record=record)


def own_nll(logits: Float[Tensor, "m classes"], temperature: float, labels: Int[Tensor, " m"]) -> Float[Tensor, " m"]:
    """Return −log p(label) of the network's own softmax, nats; zero or NaN costs as in :func:`better_of`."""
    return label_nll((logits.double() / temperature).softmax(1).nan_to_num(nan=0.0), labels)


def better_of(
    head: ClassifierHead,
    tempered: TemperatureHead,
    z: Float[Tensor, "m dim"],
    logits: Float[Tensor, "m classes"],
    labels: Int[Tensor, " m"],
    images: Int[Tensor, " m"] | None = None,  # which image each example shows; None where no two show the same
) -> ClassifierHead:
    """Return the head, unless its NLL on the selection split is higher by more than one paired standard error.

    Labels of one image share its error, so that differences are summed by image before they count as independent.
    The record of the returned head has the difference and its error, nats.  A probability of zero, or
    NaN, costs 87.3 nats (:data:`psc_core.metrics.LOG_FLOOR`).
    """
    of_head = label_nll(head(z).probabilities.nan_to_num(nan=0.0), labels)
    difference = of_head - own_nll(logits, float(tempered.temperature), labels)
    mean = float(difference.mean())
    of_images = difference - mean
    if images is not None:
        of_images = of_images.new_zeros(int(images.max()) + 1).index_add_(0, images, of_images)
    error = float(of_images.norm()) / len(difference)
    chosen: ClassifierHead = tempered if mean > error else head
    return chosen.recording({"nll_above_own": mean, "nll_above_own_error": error})
