"""Feature densities: log p (B,) in nats of z (B, D) or of features averaged over positions.

Shapes: B images, K classes, D = dim of z, P = kept components; n or m labelled examples.

The densities come first, then the choice of components (:func:`fit_pca`), the tie between the classes' covariances,
:func:`extend_density`, and last :func:`fit_density`.  To add a kind, subclass :class:`Density` with its ``layout`` and
``fit``, and list it in ``DENSITIES``.

All are mixtures of Gaussians, ``log p(y) = logsumexp_k (log π_k + log N(y; μ_k, Σ_k))``, the paper's feature density
(appendix B.2, equation 2), with y the PCA projection of z and π_k the class proportions.  They work in coordinates

    ``w = (z − mean) @ basis``

in which the within-class covariance pooled over classes is the identity, whatever the units of z.  Everything up to the
difference ``w − m_k`` from a class mean is float64, because it cancels where classes are tight; what follows does not,
and is float32.  The constants hold the change of variables: ``log p`` stays the log-density of y.
With ``m_k`` the class means and ``S_k`` the class covariances in these coordinates:

=================  =================================================================================================
``gda``            one covariance for each class: squared distance ``‖S_k^(−1/2) (w − m_k)‖²``
``gda++``          the same after ``z ← z / ‖z‖``
``pooled++``       ``gda++`` not of z but of features averaged over positions, of the chosen layer and beside them of
                   the penultimate one if it has collapsed; at most 512 components; minus half of the log-density of
                   one Gaussian fitted to all images
``tied``           one covariance for all classes: ``‖w − m_k‖²``
``mahalanobis++``  the same after ``z ← z / ‖z‖`` (Müller & Hein 2025, who take the smallest distance as their score)
``rmd``            relative Mahalanobis (Ren et al. 2021): the ``tied`` log-density minus that of one Gaussian for
                   all images
=================  =================================================================================================

**Relative.**  What is subtracted, a weight times the log-density of one Gaussian for all images, is subtracted from
``log π_k + log N_k`` too; the result is a log-ratio in nats.  It takes away what is unusual in a way that says nothing
about classes (Ren et al. 2021).  With the weight 1, images far from all classes are told less well.  ``pooled++`` lets
the squared distance from all images count up to a limit, which 99 % of the held-out images (without them, of the
training images) keep.  Without it the ratio rises with the distance where the covariance of a class is more than twice
that of all images, and one odd image in a class is enough for that.

**Components.**  With ``cov(z) = U diag(λ) Uᵀ`` (denominator n − 1, λ descending), y is ``(z − mean(z)) U[:, :P]``: an
orthonormal projection, so ``log p(y)`` is in the units of z.  P, unless the caller gives it, is the smallest of:

* the components that explain 99 % of the variance, or those above a minimum variance, whichever the density asks for;
* the rank: components with a standard deviation above 10⁻⁵ of the largest and above the rounding error of the
  features' own type (constant columns, repeated columns and n ≤ dim leave components below);
* a limit given by the density, so that a class of average size has more images than components.

The covariance is dim × dim in float64, so dim up to about 4,096 is practical (128 MiB).

**Moments.**  Fitting goes from y to ``x = y diag(λ^(−1/2))``, of unit total variance, and to ``w = x Σ_W(x)^(−1/2)``.
Class moments are the paper's (equations 3 and 4): ``μ_c``, ``Σ_c`` with denominator ``n_c − 1`` and priors ``n_c / n``;
a change of coordinates does not alter them.  An image with several labels weighs as often as it is labelled, but is one
observation: with m_c images of n_c labelled examples, ``Σ_c`` is the mean square times ``m_c / (m_c − 1)``.  Two
departures apply only where the paper's estimate is poor; the fit's record says how often:

* With fewer than ten images (beyond one a class) per component, covariances are shrunk
  (:func:`psc_core.linalg.covariance`) towards a multiple of the identity: in w that is the pooled covariance,
  in x the total one.
* Eigenvalues below 10⁻⁶ are clamped to it, that is, deviations a thousand times smaller than the pooled (in w) or the
  total ones (in x), as identical images or complete collapse give.

**Tie.**  Held-out images, where they are given, choose t in ``Σ_k = (1 − t) S_k + t I``, however many images there are
(Friedman's regularised discriminant, 1989): of :data:`TIED_WEIGHTS` the one under which they are most likely, each
under its own class.  Training images would choose too small a t: the network was fitted to them, so they lie closer to
their means.

**Extension.**  A density keeps mean μ_k, covariance Σ_k and proportion of each class, which with n give n_k.  Moments
need no more (Chan, Golub & LeVeque 1983): m_k more images of class k, with the mean a_k, each counted t times, make

    ``B_k  = Σ_i (w_i − a_k)(w_i − a_k)ᵀ + n_k m_k / (n_k + m_k) (a_k − μ_k)(a_k − μ_k)ᵀ``
    ``μ'_k = μ_k + m_k / (n_k + m_k) (a_k − μ_k)``
    ``Σ'_k = ((n_k − 1) Σ_k + B_k) / (n_k + m_k − 1)``
    ``W'   = ((n − K) I + Σ_k B_k) / (n + m − K)``           pooled within classes: it was the identity

and in the same way the covariance of all images (the limit stays).  The new coordinates are
``w' = (w − δ) W'^(−1/2)``, δ the mean of all, so that the pooled covariance is the identity again.  This is the fit to
all images, except that the components stay, that a covariance that was shrunk is extended as it is (more images
outweigh that in time), and that where images have several labels n_k counts labelled examples in the degrees of
freedom too.

**Added class.**  :func:`widen_density`: m images of a class that the density has not seen give one more mean,
covariance (shrunk as above) and proportion m / (n + m).  The coordinates stay those of the classes before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from psc_core import linalg
from psc_core.errors import FitError
from psc_core.features import FeatureMatrix, as_matrix, blocks, check_features, images_of_classes
from psc_core.fitted import Fitted, Record, restore


class ConstantFeatures(FitError):
    """Features that are equal for all images, up to rounding."""


class DensityOutput(NamedTuple):
    """The log-densities of a batch, nats."""

    log_density: Float[Tensor, " batch"]  # log p, the logsumexp of class_log_joint
    class_log_joint: Float[Tensor, "batch classes"]  # log π_k + log N(y; μ_k, Σ_k)


class DensityExplanation(NamedTuple):
    """Where the images of a batch lie relative to the classes."""

    class_distances: Float[Tensor, "batch classes"]  # Mahalanobis, in standard deviations
    nearest_class: Int[Tensor, " batch"]  # index of the class at the smallest distance
    component_deviation: Float[Tensor, "batch kept"]  # whitened difference from it; its norm is the distance


class Density(Fitted):
    """Base of the densities, with ``mean`` (D,), ``basis`` (D, P) and ``constants`` (K,)."""

    # Float64 up to the difference from a class mean, which cancels where classes are tight.
    in_float64: ClassVar[frozenset[str]] = frozenset({"mean", "basis", "centres"})

    reads: ClassVar[Literal["z", "pooled"]] = "z"  # or layers' features averaged over positions
    unit_length: ClassVar[bool] = False  # True if z is divided by its Euclidean norm first
    # Fraction of the largest variance above which the automatic choice keeps a component; ``None``: it keeps the
    # components that explain 99 % of the variance.
    minimum_variance: ClassVar[float | None] = None
    maximum_components: ClassVar[int | None] = None  # of the automatic choice; None: as memory allows
    has_class_covariances: ClassVar[bool] = False  # then memory limits the automatic choice of components
    tied_by_held_out: ClassVar[bool] = False  # whether held-out examples tie the classes' covariances
    background_weight: ClassVar[float] = 0.0  # of one Gaussian for all images, see "Relative" above

    @classmethod
    def fit(cls, pooled: Pooled, held_out: HeldOut | None) -> tuple[dict[str, Tensor], Record]:
        """Return the tensors besides ``mean`` and ``basis``, and the entries of the record that this kind adds."""
        raise NotImplementedError

    def coordinates(self, z: Float[Tensor, "batch dim"]) -> Float[Tensor, "batch kept"]:
        """Return w, in which the pooled within-class covariance is the identity, in the type of ``mean``."""
        z = z.to(self.mean.dtype)
        if self.unit_length:
            z = _unit(z)
        return (z - self.mean) @ self.basis

    def class_distances(self, w: Float[Tensor, "batch kept"]) -> Float[Tensor, "batch classes"]:
        """Return the Mahalanobis distance to every class, in standard deviations."""
        raise NotImplementedError

    def deviation(self, w: Float[Tensor, "batch kept"], classes: Int[Tensor, " batch"]) -> Float[Tensor, "batch kept"]:
        """Return the whitened difference of each image from the mean of its class in ``classes``."""
        raise NotImplementedError

    def forward(self, z: Float[Tensor, "batch dim"]) -> DensityOutput:
        return self.at(self.coordinates(z))

    def at(self, w: Float[Tensor, "batch kept"]) -> DensityOutput:
        """Return the log-densities of images with these :meth:`coordinates`."""
        joint = self.class_log_joint(w)
        # Not the log of a sum: float32 holds nothing below e^−103, and densities can be far smaller.
        return DensityOutput(joint.logsumexp(dim=1), joint)

    def class_log_joint(self, w: Float[Tensor, "batch kept"]) -> Float[Tensor, "batch classes"]:
        """Return ``log π_k + log N_k``, nats, minus what is subtracted."""
        distances = self.class_distances(w)
        return self.relative(torch.addcmul(self.constants, distances, distances, value=-0.5), w)

    def relative(
        self, joint: Float[Tensor, "batch classes"], w: Float[Tensor, "batch kept"]
    ) -> Float[Tensor, "batch classes"]:
        """Return ``joint`` minus the weighted log-density of one Gaussian for all images."""
        if not self.background_weight:
            return joint
        # In float64: far from the data both terms are large and nearly equal.
        squares = (w @ self.background.to(w.dtype)).square().sum(dim=1)
        if BACKGROUND_LIMIT in self.layout:
            squares = squares.minimum(self.background_limit.to(w.dtype))
        background = self.background_constant - 0.5 * squares
        return (joint - self.background_weight * background[:, None]).float()

    def explain(self, z: Float[Tensor, "batch dim"]) -> DensityExplanation:
        return self.explain_at(self.coordinates(z))

    def explain_at(self, w: Float[Tensor, "batch kept"]) -> DensityExplanation:
        """Return the explanation of images with these :meth:`coordinates`."""
        distances = self.class_distances(w)
        nearest = distances.argmin(dim=1)
        return DensityExplanation(distances, nearest, self.deviation(w, nearest))


class ClasswiseDensity(Density):
    """One covariance for each class; ``centres`` (K, P) are the class means m_k, ``whiteners`` (K, P, P) S_k^(−1/2)."""

    kind = "gda"
    has_class_covariances = True
    layout: ClassVar = {
        "mean": ("dim",),
        "basis": ("dim", "kept"),
        "centres": ("classes", "kept"),
        "whiteners": ("classes", "kept", "kept"),
        "constants": ("classes",),
    }

    @classmethod
    def fit(cls, pooled: Pooled, held_out: HeldOut | None) -> tuple[dict[str, Tensor], Record]:
        """Held-out examples choose how alike the whiteners are."""
        x, root, device = pooled.x, pooled.inverse.root, pooled.means.device
        w = x.map(lambda part: part @ root, x.shape[1], torch.float64)
        num_classes = len(pooled.classes)
        # Float32, and K × P × P the largest tensor: whiteners apply to differences, which no longer cancel.
        whiteners = torch.empty(num_classes, *root.shape, device=device)
        centres, constants = torch.empty_like(pooled.means), pooled.constants.clone()
        record: Record = {}
        tied_weight = None
        average = sum(n_images for _, n_images in pooled.classes) / num_classes
        if held_out is not None:
            unseen, labels = held_out
            tied_weight = record["tied_weight"] = choose_tied_weight(
                (_moments(w.take(rows), n_images), unseen[labels == k], n_images / average)
                for k, (rows, n_images) in enumerate(pooled.classes)
            )
        shrinkages = []
        clamped, increase = pooled.inverse.n_clamped, pooled.inverse.largest_increase
        for k, (rows, n_images) in enumerate(pooled.classes):
            centres[k], covariance = _moments(w.take(rows), n_images)
            if tied_weight is None:
                covariance, shrinkage = linalg.covariance(covariance * (n_images - 1), n_images - 1)
            else:
                shrinkage = float(weights_of_class(n_images / average, [tied_weight]))
                covariance = blend(covariance, shrinkage)
            inverse = linalg.inverse_root(covariance)
            whiteners[k] = inverse.root
            constants[k] -= 0.5 * inverse.log_det
            shrinkages.append(shrinkage)
            clamped, increase = clamped + inverse.n_clamped, max(increase, inverse.largest_increase)
        record |= {
            "clamped_eigenvalues": clamped,
            "largest_increase": increase,
            "shrunk_classes": sum(shrinkage > 0 for shrinkage in shrinkages),
            "mean_shrinkage": sum(shrinkages) / num_classes,
        }
        return {"constants": constants, "centres": centres, "whiteners": whiteners}, record

    def class_distances(self, w: Float[Tensor, "batch kept"]) -> Float[Tensor, "batch classes"]:
        batch = max(1, SERVE_ELEMENTS // self.centres.numel())
        if w.shape[0] > batch:  # not len, which torch.export would keep
            return torch.cat([self.class_distances(part) for part in torch.split(w, batch)])
        # Float64 up to here, where it cancels; the product does not, and float32 takes half the memory.
        differences = (w - self.centres[:, None]).float()
        distances: Tensor = torch.linalg.vector_norm(differences @ self.whiteners.mT, dim=2)
        return distances.T

    def deviation(self, w: Float[Tensor, "batch kept"], classes: Int[Tensor, " batch"]) -> Float[Tensor, "batch kept"]:
        return torch.einsum("bpq,bq->bp", self.whiteners[classes], (w - self.centres[classes]).float())


class UnitLengthDensity(ClasswiseDensity):
    """:class:`ClasswiseDensity` of z / ‖z‖."""

    kind = "gda++"
    unit_length = True
    tied_by_held_out = True


# Whitens w under one Gaussian for all images, and its constant: the tensors of a density with a ``background_weight``.
BACKGROUND: Final = {"background": ("kept", "kept"), "background_constant": ()}
BACKGROUND_LIMIT: Final = "background_limit"  # the tensor () that limits the squared distance from all images
WITHIN_LIMIT: Final = 0.99  # part of the held-out images that it leaves as they are


class PooledDensity(UnitLengthDensity):
    """:class:`UnitLengthDensity` of features averaged over positions, relative to all images."""

    kind = "pooled++"
    layout: ClassVar = {**UnitLengthDensity.layout, **BACKGROUND, BACKGROUND_LIMIT: ()}
    background_weight = 0.5
    reads = "pooled"
    minimum_variance = 1e-6
    maximum_components = 512


class TiedDensity(Density):
    """One covariance shared by all classes; ``centres`` (K, P) are the class means m_k."""

    kind = "tied"
    layout: ClassVar = {
        "mean": ("dim",),
        "basis": ("dim", "kept"),
        "centres": ("classes", "kept"),
        "constants": ("classes",),
    }

    @classmethod
    def fit(cls, pooled: Pooled, held_out: HeldOut | None) -> tuple[dict[str, Tensor], Record]:
        return {"constants": pooled.constants, "centres": pooled.means @ pooled.inverse.root}, {}

    def class_distances(self, w: Float[Tensor, "batch kept"]) -> Float[Tensor, "batch classes"]:
        # From differences: ‖w‖² − 2 w·m + ‖m‖², PyTorch's default for more than 25 points, cancels for tight classes.
        return linalg.distances(w, self.centres).float()

    def deviation(self, w: Float[Tensor, "batch kept"], classes: Int[Tensor, " batch"]) -> Float[Tensor, "batch kept"]:
        return (w - self.centres[classes]).float()


class UnitLengthTiedDensity(TiedDensity):
    """:class:`TiedDensity` of z / ‖z‖."""

    kind = "mahalanobis++"
    unit_length = True


class RelativeDensity(TiedDensity):
    """:class:`TiedDensity` relative to all images."""

    kind = "rmd"
    layout: ClassVar = {**TiedDensity.layout, **BACKGROUND}
    background_weight = 1.0

    def class_log_joint(self, w: Float[Tensor, "batch kept"]) -> Float[Tensor, "batch classes"]:
        return self.relative(self.constants - 0.5 * linalg.distances(w, self.centres).square(), w)


_KINDS = (ClasswiseDensity, TiedDensity, UnitLengthDensity, UnitLengthTiedDensity, PooledDensity, RelativeDensity)
DENSITIES: Final[Mapping[str, type[Density]]] = {family.kind: family for family in _KINDS}


def restore_density(config: Mapping[str, Any], state: Mapping[str, Tensor]) -> Density:
    """Return the density with this ``config()`` and ``state_dict()``."""
    return restore(DENSITIES, config, state)


SERVE_ELEMENTS: Final = 1 << 25  # largest B × K × P block of differences (256 MiB of float64); larger batches are split


EXPLAINED_VARIANCE: Final = 0.99  # fraction of the variance that the automatic choice keeps
RANK_TOLERANCE: Final = 1e-10  # smallest variance of a component that counts for the rank, relative to the largest


class PCA(NamedTuple):
    """A fitted projection, float64."""

    mean: Float[Tensor, " dim"]  # of z
    components: Float[Tensor, "dim kept"]  # orthonormal columns, largest variance first
    variances: Float[Tensor, " kept"]  # of each kept component
    explained: float  # fraction of the total variance that is kept

    @property
    def whitening(self) -> Float[Tensor, "dim kept"]:
        """``U diag(λ^(−1/2))``: takes z − mean to coordinates of unit variance."""
        return self.components * self.variances.rsqrt()

    def whiten(self, z: FeatureMatrix) -> FeatureMatrix:
        """Return ``(z − mean) @ whitening``, float64 (n, kept), which is computed as it is read."""
        whitening = self.whitening
        return z.map(lambda part: (part.double() - self.mean) @ whitening, whitening.shape[1], torch.float64)


def rank_of(mean: Float[Tensor, " dim"], components: linalg.Eigen, feature_dtype: torch.dtype) -> int:
    """Return how many principal components of features that were computed in ``feature_dtype`` are not rounding."""
    values, vectors = components
    # The error of rounded features along each component: some steps of their size, for which their mean stands.
    rounding = linalg.rounding_of(mean.abs() @ vectors.abs(), feature_dtype)
    significant = values > torch.maximum(RANK_TOLERANCE * values[0], rounding.square())
    # Up to the first that is not significant: the rounding error, unlike the variance, need not descend.
    return int(significant.long().cumprod(0).sum())


def fit_pca(
    z: Float[Tensor, "n dim"] | FeatureMatrix,
    *,
    kept: int | None,  # number of components P; ``None`` chooses it by the rule of this module
    limit: int,  # the largest number that the automatic choice may take
    minimum_variance: float | None = None,  # as :attr:`Density.minimum_variance`
    feature_dtype: torch.dtype | None = None,  # in which the features were computed; None: that of z
) -> PCA:
    """Fit the projection to features."""
    mean = linalg.mean_of_rows(z)
    # A single image has no variance: zero is refused below as rank 0, where 0 / 0 would be NaN.
    values, vectors = components = linalg.eigh(linalg.scatter_about(z, mean) / max(1, len(z) - 1))
    rank = rank_of(mean, components, feature_dtype or z.dtype)
    if rank == 0:
        raise ConstantFeatures(
            "expected features that differ between images, all are equal up to rounding; choose another layer"
        )
    explained = values.cumsum(0) / values.sum()
    if kept is None:
        if minimum_variance is None:
            enough = int((explained < EXPLAINED_VARIANCE).sum()) + 1
        else:
            enough = int((values > minimum_variance * values[0]).sum())
        kept = max(1, min(enough, rank, limit))
    elif not 1 <= kept <= rank:
        raise FitError(
            f"expected 1 ≤ pca ≤ {rank} (the rank of {len(z)} × {z.shape[1]} features), got {kept}; "
            "give a smaller number or none, to choose it from the data"
        )
    return PCA(mean, vectors[:, :kept], values[:kept], explained[kept - 1].item())


TIED_WEIGHTS: Final = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8, 0.95, 1.0)  # values of t


def weights_of_class(size: float, tied: Sequence[float] = TIED_WEIGHTS) -> Float[Tensor, " weights"]:
    """Return ``t / (t + (1 − t) n_k / n̄)`` for each t, float64: of a class with so many times the average images.

    The pooled covariance counts as many images in every class: more than a small class has of its own.
    """
    weights = torch.tensor(tied, dtype=torch.float64)
    return weights / (weights + (1 - weights) * size)


class ClassMoments(NamedTuple):
    """Mean and covariance of one class, float64."""

    mean: Float[Tensor, " P"]
    covariance: Float[Tensor, "P P"]


def blend(class_covariance: Float[Tensor, "P P"], tied_weight: float) -> Float[Tensor, "P P"]:
    """Return ``(1 − t) S_k + t I``."""
    tied = torch.eye(len(class_covariance), dtype=class_covariance.dtype, device=class_covariance.device)
    return (1 - tied_weight) * class_covariance + tied_weight * tied


def log_likelihoods(
    of_class: ClassMoments, images: Float[Tensor, "m P"], size: float = 1.0
) -> Float[Tensor, " weights"]:
    """Return ``Σ_i log N(w_i; m_k, Σ_k)`` over held-out images of the class for every t, up to a constant, nats."""
    values, vectors = linalg.eigh(of_class.covariance)
    squares = ((images.double() - of_class.mean) @ vectors).square().sum(0)
    weights = weights_of_class(size).to(values.device)[:, None]
    variances = ((1 - weights) * values + weights).clamp(min=linalg.EIGENVALUE_FLOOR)
    return -0.5 * (squares / variances + len(images) * variances.log()).sum(1)


def choose_tied_weight(classes: Iterable[tuple[ClassMoments, Float[Tensor, "_ P"], float]]) -> float:
    """Return the t under which the held-out images of all classes are most likely, on a tie the largest.

    Each class has its moments, its held-out images and n_k / n̄.
    """
    total = sum(log_likelihoods(*each).cpu() for each in classes)
    return max(zip(total.tolist(), TIED_WEIGHTS, strict=True))[1]  # type: ignore[union-attr]


EXAMPLES: Final = "examples"  # the entry of a density's record that holds n


class Extended(NamedTuple):
    """An extended density, and how its coordinates changed."""

    density: Density
    offset: Float[Tensor, " P"]  # δ, float64
    turn: Float[Tensor, "P P"]  # W'^(−1/2), float64

    def moved(self, w: Float[Tensor, "images P"]) -> Float[Tensor, "images P"]:
        """Return ``w'`` for coordinates ``w`` of the density before, in their type."""
        return ((w.double() - self.offset) @ self.turn).to(w.dtype)


def can_extend(family: type[Density]) -> bool:
    """Return whether more images can extend a density: it has the tensors of one of these, and so all moments."""
    kinds = (ClasswiseDensity, TiedDensity, PooledDensity, RelativeDensity)
    return any(family.layout == kind.layout for kind in kinds)


def class_counts(density: Density, examples: int) -> Float[Tensor, " K"]:
    """Return n_k, whole numbers as float64: n times the class proportions that the density's constants hold."""
    return (examples * class_proportions(density)).round().clamp(min=2)


def class_proportions(density: Density) -> Float[Tensor, " K"]:
    """Return π_k, float64."""
    return _log_proportions(density).softmax(0)


def class_covariances(density: Density) -> Iterator[Float[Tensor, "P P"]]:
    """Yield Σ_k of each class in w, float64."""
    if isinstance(density, ClasswiseDensity):
        for whitener in density.whiteners:
            root = torch.linalg.inv(whitener.double())
            yield root @ root.mT
    else:
        kept = density.basis.shape[1]
        yield from [torch.eye(kept, dtype=torch.float64, device=density.basis.device)] * len(density.constants)


def draw_images(density: Density, count: int) -> Float[Tensor, "count P"]:
    """Return w of images drawn from the density's Gaussians, the same on every call, on the CPU."""
    generator = torch.Generator().manual_seed(0)
    classes = torch.multinomial(class_proportions(density).cpu(), count, replacement=True, generator=generator)
    drawn = torch.empty(count, density.basis.shape[1], dtype=torch.float64)
    for k, centre in enumerate(density.get_buffer("centres").cpu()):
        of_class = classes == k
        w = torch.randn(int(of_class.sum()), len(centre), generator=generator, dtype=torch.float64)
        if isinstance(density, ClasswiseDensity) and len(w):
            w = torch.linalg.solve(density.whiteners[k].double().cpu(), w.T).T
        drawn[of_class] = w + centre
    return drawn


def class_values(
    drawn: Float[Tensor, "n P"],  # :func:`draw_images`
    value: Callable[[Tensor], Float[Tensor, " n"]],  # of n images, from w
    like: Float[Tensor, " m"] | None = None,
) -> Float[Tensor, " n"]:
    """Return values of drawn images.

    They get the median and the mean deviation from it of values ``like`` those of images to come, of which there may be
    few: another camera moves both.
    """
    values = value(drawn).double()
    if like is not None:
        middle, wanted = values.median(), like.double().median()
        scale = (like.double() - wanted).abs().mean() / (values - middle).abs().mean()
        values = wanted + (values - middle) * (scale if scale > 0 else 1)
    return values.float()


def extend_density(
    density: Density, features: Float[Tensor, "m D"], labels: Int[Tensor, " m"], *, examples: int, times: int = 1
) -> Extended:
    """Return the density of its n = ``examples`` labelled examples and of m ≥ 1 more, each counted ``times`` times."""
    if not can_extend(type(density)):
        raise FitError(f"a density {density.kind!r} has tensors that more images cannot extend; fit it again")
    classes, m, device = len(density.constants), times * len(labels), density.basis.device
    if not features.isfinite().all():
        raise FitError("expected finite features of the images that extend the density; check the precision")
    if examples < 2 * classes:
        raise FitError(
            f"expected at least two labelled examples of each of {classes} classes, got {examples}; fit it again"
        )
    z, labels = features.double().to(device), labels.to(device)
    z = _unit(z) if density.unit_length else z
    w, centres, counts = density.coordinates(z), density.get_buffer("centres"), class_counts(density, examples)
    merged = [_merge(counts[k], centres[k], w[labels == k], times) for k in range(classes)]
    after, means, added = map(torch.stack, zip(*merged, strict=True))
    n, identity = float(counts.sum()), torch.eye(w.shape[1], dtype=torch.float64, device=device)
    within = linalg.inverse_root(((n - classes) * identity + added.sum(0)) / (n + m - classes))
    offset, turn = m / (n + m) * w.mean(0), within.root
    tensors = {
        "mean": density.mean + m / (n + m) * (z.mean(0) - density.mean),
        "basis": density.basis @ turn,
        "centres": (means - offset) @ turn,
        "constants": _log_proportions(density).logsumexp(0) + (after / (n + m)).log() - 0.5 * within.log_det,
    }
    record = {**density.record, EXAMPLES: int(n) + m, "clamped_eigenvalues": within.n_clamped}
    if isinstance(density, ClasswiseDensity):
        roots = [
            linalg.inverse_root(turn @ ((seen - 1) * covariance + more) @ turn / (now - 1))
            for seen, covariance, more, now in zip(counts, class_covariances(density), added, after, strict=True)
        ]
        tensors["whiteners"] = torch.stack([each.root for each in roots])
        tensors["constants"] -= 0.5 * tensors["constants"].new_tensor([each.log_det for each in roots])
        record["clamped_eigenvalues"] += sum(each.n_clamped for each in roots)
    if density.background_weight:
        whitener = density.background.double()
        before = torch.linalg.inv(whitener @ whitener.T)
        _, _, more = _merge(counts.sum(), torch.zeros_like(offset), w, times)  # w is centred on the mean of all
        covariance = turn @ ((n - 1) * before + more) @ turn / (n + m - 1)
        tensors["background"] = torch.linalg.inv(torch.linalg.cholesky(covariance)).T
        change = torch.linalg.slogdet(covariance)[1] + within.log_det - torch.linalg.slogdet(before)[1]
        tensors["background_constant"] = density.background_constant - 0.5 * change
    if BACKGROUND_LIMIT in density.layout:
        tensors[BACKGROUND_LIMIT] = density.background_limit
    return Extended(type(density)(tensors, record=record).to(device), offset, turn)


def widen_density(density: Density, features: Float[Tensor, "m D"], *, examples: int) -> Density:
    """Return the density of n = ``examples`` labelled examples with one more class, of m images; its w stays."""
    if not can_extend(type(density)):
        raise FitError(f"a density {density.kind!r} has tensors that no class can be added to; fit it again")
    if not features.isfinite().all():
        raise FitError("expected finite features of the images of the added class; check the precision")
    w, m = density.coordinates(features.to(density.basis.device)), len(features)
    mean, n = w.double().mean(0), int(class_counts(density, examples).sum())
    constant = _log_proportions(density).logsumexp(0) + math.log(m / (n + m))
    tensors = {name: density.get_buffer(name) for name in density.layout}
    if isinstance(density, ClasswiseDensity):
        inverse = linalg.inverse_root(linalg.covariance(linalg.scatter_about(w, mean), m - 1)[0])
        tensors["whiteners"] = torch.cat([density.whiteners, inverse.root[None].float()])
        constant = constant - 0.5 * inverse.log_det
    tensors["centres"] = torch.cat([density.get_buffer("centres"), mean[None]])
    tensors["constants"] = torch.cat([density.constants.double() + math.log(n / (n + m)), constant[None]])
    return type(density)(tensors, record={**density.record, EXAMPLES: n + m}).to(mean.device)


def _merge(
    examples: Float[Tensor, ""], mean: Float[Tensor, " P"], more: Float[Tensor, "images P"], times: int
) -> tuple[Float[Tensor, ""], Float[Tensor, " P"], Float[Tensor, "P P"]]:
    """Return n_k + m_k, μ'_k and B_k of a class with more images, each counted ``times`` times; there may be none."""
    if not len(more):
        return examples, mean, mean.new_zeros(len(mean), len(mean))
    new, count = more.mean(0), times * len(more)
    gap, weight = new - mean, count / (examples + count)
    added = times * linalg.scatter_about(more, new) + examples * weight * gap.outer(gap)
    return examples + count, mean + weight * gap, added


def _log_proportions(density: Density) -> Float[Tensor, " K"]:
    """Return log n_k / n plus a constant that is the same for every class, the volume of the coordinates."""
    constants = density.constants.double()
    if isinstance(density, ClasswiseDensity):
        constants = constants - torch.linalg.slogdet(density.whiteners.double())[1]  # −½ log det Σ_k
    return constants


WHITENER_ELEMENTS: Final = 1 << 26  # maximum K × P × P for the automatic choice of P (256 MiB of float32)


class Examples(NamedTuple):
    """n labelled examples of K classes."""

    features: Float[Tensor, "n dim"] | FeatureMatrix  # what the density reads, any float type, read in blocks
    labels: Int[Tensor, " n"]  # class index of each
    num_classes: int  # K
    images: Int[Tensor, " n"] | None = None  # which image each one shows; None where no two show the same
    class_names: Sequence[str] | None = None  # for messages

    @property
    def n_images(self) -> int:
        """Number of different images that the examples show."""
        return len(self.features) if self.images is None else int(self.images.bincount().count_nonzero())


def fit_density(
    train: Examples, *, kind: str = "gda", pca: int | None = None, held_out: Examples | None = None
) -> Density:
    """Fit a density with ``pca`` components (None chooses); ``held_out`` examples may set how far classes are tied."""
    family = DENSITIES[kind]
    features, labels, num_classes, images, names = train
    counts = check_features(features, labels, num_classes=num_classes, class_names=names, minimum=2, images=images)
    z = _lengths(family, as_matrix(features))
    limit = train.n_images - num_classes  # the largest P that the automatic choice may take
    if limit < 1:  # Only images with labels of several classes can be so few.
        raise FitError(
            f"expected more images than classes, got {train.n_images} images of {num_classes} classes; the means of "
            "these leave nothing to fit a covariance to, so add images"
        )
    if family.has_class_covariances:
        limit = min(limit, math.isqrt(WHITENER_ELEMENTS // num_classes))
    projection = fit_pca(
        z,
        kept=pca,
        limit=max(1, min(limit, family.maximum_components or limit)),
        minimum_variance=family.minimum_variance,
        feature_dtype=features.dtype,  # z may be float64 already; this says how exact the features are.
    )
    pooled = pool(projection, z, train, counts)
    apart = None
    if family.tied_by_held_out and held_out is not None and len(held_out.labels):
        w = projection.whiten(_lengths(family, as_matrix(held_out.features)))[:] @ pooled.inverse.root
        apart = w, held_out.labels.to(w.device)
    of_kind, measured = family.fit(pooled, apart)
    if family.background_weight:  # In x the Gaussian for all images has the mean 0 and the covariance I, and x = w V⁻¹.
        of_kind["background"] = torch.linalg.inv(pooled.inverse.root)
        of_kind["background_constant"] = torch.tensor(-0.5 * pooled.volume, device=pooled.means.device)
    if BACKGROUND_LIMIT in family.layout:
        x = pooled.x if apart is None else as_matrix(apart[0] @ of_kind["background"])
        squares = torch.cat([part.square().sum(1) for _, part in blocks(x)])  # not all rows at once
        of_kind[BACKGROUND_LIMIT] = squares.sort().values[math.ceil(WITHIN_LIMIT * len(squares)) - 1]
    tensors = {"mean": projection.mean, "basis": projection.whitening @ pooled.inverse.root, **of_kind}
    record: Record = {
        EXAMPLES: len(z),
        "components": len(projection.variances),
        "explained_variance": projection.explained,
        "pooled_shrinkage": pooled.shrinkage,
        "clamped_eigenvalues": pooled.inverse.n_clamped,
        "largest_increase": pooled.inverse.largest_increase,
    }
    return family(tensors, record=record | measured).to(z.device)


class Pooled(NamedTuple):
    """The training examples in x and their pooled covariance, float64, to which every density is fitted."""

    x: FeatureMatrix  # (n, P)
    means: Float[Tensor, "K P"]  # of each class, in x
    inverse: linalg.InverseRoot  # of the pooled covariance: its root is V
    shrinkage: float  # of the pooled covariance
    volume: float  # −2 × the log-density at the centre of one Gaussian for all images
    constants: Float[Tensor, " K"]  # of one covariance for all classes
    classes: Sequence[tuple[Int[Tensor, " members"], int]]  # labelled examples of each class, and its number of images


def pool(projection: PCA, z: FeatureMatrix, train: Examples, counts: Int[Tensor, " K"]) -> Pooled:
    """Return class means and pooled covariance of ``counts`` labelled examples of each class, in x."""
    observed = counts if train.images is None else images_of_classes(train.images, train.labels, train.num_classes)
    # A stable sort, so that each fit adds the images of a class in the same order.
    members = torch.split(train.labels.argsort(stable=True), counts.tolist())
    x = projection.whiten(z)
    means = torch.stack([linalg.mean_of_rows(x.take(rows)) for rows in members])
    scatter = means.new_zeros(x.shape[1], x.shape[1])
    for rows, mean in zip(members, means, strict=True):
        scatter += linalg.scatter_about(x.take(rows), mean)
    # Labelled examples of one image are one observation; the K means take one degree of freedom each.
    n_images = train.n_images
    covariance, shrinkage = linalg.covariance(scatter * (n_images / len(z)), n_images - train.num_classes)
    inverse = linalg.inverse_root(covariance)
    volume = len(projection.variances) * math.log(2 * math.pi) + projection.variances.log().sum().item()
    constants = (counts / len(z)).double().log() - 0.5 * volume - 0.5 * inverse.log_det
    classes = list(zip(members, observed.tolist(), strict=True))
    return Pooled(x, means, inverse, shrinkage, volume, constants, classes)


HeldOut = tuple[Float[Tensor, "m P"], Int[Tensor, " m"]]  # w and labels of held-out examples


def _unit(z: Float[Tensor, "n dim"]) -> Float[Tensor, "n dim"]:
    """Return z / ‖z‖, in float64 however short; zero stays zero."""
    return functional.normalize(z, eps=torch.finfo(z.dtype).tiny)


def _lengths(family: type[Density], z: FeatureMatrix) -> FeatureMatrix:
    """Return the features as the density reads them: in float64 and of unit length, or as they are."""
    if not family.unit_length:
        return z
    return z.map(lambda part: _unit(part.double()), z.shape[1], torch.float64)


def _moments(w: FeatureMatrix, images: int) -> ClassMoments:
    """Return mean and covariance of the labelled examples of a class, which show this many ``images``."""
    mean = linalg.mean_of_rows(w)
    return ClassMoments(mean, linalg.scatter_about(w, mean) * (images / len(w)) / (images - 1))
