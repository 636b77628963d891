"""Float64 linear algebra on matrices read in blocks: eigenproblems, covariances, moments, R² and tails.

Symbols: ``n`` rows, ``d`` columns of a feature matrix; ``C`` a ``d × d`` covariance; ``λ, U`` its eigenvalues and
eigenvectors, ``C = U diag(λ) Uᵀ``.

Covariances are sums of centred outer products over blocks of rows, with the mean first, so that nothing cancels and no
feature matrix is copied to float64 as a whole.  Where the mean is not known first, each batch of b vectors is centred
on its own mean m and merged with the n vectors before it by n b / (n + b) times the outer product of m − μ (Chan, Golub
& LeVeque 1983).  Singular covariances are repaired by raising small eigenvalues to a floor; the number raised and the
largest increase are returned, so that callers can record them.

Class means, scatter about them and distances to them are accumulated batch by batch.  With h_i the feature vector of
labelled example i, μ_c the mean of class c over its n_c examples and μ_G = (1/K) Σ_c μ_c,

    within  = Σ_c Σ_{i∈c} ‖h_i − μ_c‖²          between = Σ_c n_c ‖μ_c − μ_G‖²
    total   = Σ_i ‖h_i − μ_G‖² = within + between

The last equality is exact for the exact class means, whatever the class sizes.  NC1 = within / total is
Tr(Σ_W)/Tr(Σ_T) of the paper's section 4.1, with every labelled example weighted equally.

One pass is as accurate as two: a batch is centred on its own class means m_c and merged into the sums so far
(Chan, Golub & LeVeque 1983),

    within ← within + Σ ‖h_i − m_c‖² + n_c b_c / (n_c + b_c) ‖m_c − μ_c‖²,     μ_c ← μ_c + b_c / (n_c + b_c) (m_c − μ_c)

with b_c examples of class c in the batch.  Only squares of differences are added, so nothing cancels, unlike in
Σ‖h‖² − N‖μ‖², which loses every digit where collapse is strong.  The cost of a batch is its size times the number of
classes in it, so images are best read class by class (:func:`psc_core.data.dataset.stable_order`).  Features are
converted to float64 one block of columns at a time, never a whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from psc_core.features import FeatureMatrix, blocks

DEAD_UNIT: Final = 1e-2  # minimum deviation that features are divided by, relative to the layer's root mean square

# Maximum standard deviation that rounding alone may give to a float32 feature, in steps of its values. A product of a
# thousand terms errs by a few steps of the largest, and differently in batches of other sizes.
ROUNDING_STEPS: Final = 64

# Minimum eigenvalue where 1 is typical, because float32 features do not resolve standard deviations 1,000 times smaller
# than typical ones.
EIGENVALUE_FLOOR: Final = 1e-6

SAMPLES_PER_COLUMN: Final = 10  # minimum degrees of freedom per column for a covariance that is not shrunk


class Eigen(NamedTuple):
    """The decomposition ``C = vectors @ diag(values) @ vectors.T``, values descending."""

    values: Float[Tensor, " d"]
    vectors: Float[Tensor, "d d"]


class InverseRoot(NamedTuple):
    """The inverse square root ``C^(−1/2)``, with eigenvalues clamped to a floor."""

    root: Float[Tensor, "d d"]  # symmetric, root @ C @ root = I
    log_det: float  # log det C of the clamped matrix
    n_clamped: int  # number of eigenvalues below the floor
    largest_increase: float  # largest amount added to an eigenvalue


def distances(x: Float[Tensor, "*batch n dim"], y: Float[Tensor, "*other m dim"]) -> Float[Tensor, "*pairs n m"]:
    """Return the distances of all pairs, of differences, which do not cancel; ONNX has no ``cdist``."""
    if torch.compiler.is_exporting():
        pairs: Tensor = torch.linalg.vector_norm(x.unsqueeze(-2) - y.unsqueeze(-3), dim=-1)
        return pairs
    return torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")


def inner_products(matrix: Float[Tensor, "*batch m m"], y: Float[Tensor, "*batch m k"]) -> Float[Tensor, "*batch k k"]:
    """Return ``yᵀ A⁻¹ y`` of positive definite A; ONNX solves no equations, so there rows of A are eliminated."""
    if torch.compiler.is_exporting():
        rest: Tensor = torch.cat([torch.cat([matrix, y], -1), functional.pad(-y.mT, (0, y.shape[-1]))], -2)
        for _ in range(matrix.shape[-1]):  # Each first row is subtracted from those below, so that its column vanishes.
            rest = rest[..., 1:, 1:] - rest[..., 1:, :1] * (rest[..., :1, 1:] / rest[..., :1, :1])
        return rest
    half: Tensor = torch.linalg.solve_triangular(torch.linalg.cholesky_ex(matrix).L, y, upper=False)
    return half.mT @ half


def positions(
    ascending: Float[Tensor, "*checks n"], values: Float[Tensor, "*checks batch"], *, right: bool = False
) -> Int[Tensor, "*checks batch"]:
    """Return ``torch.searchsorted``, by which NaN comes last; ONNX has no binary search, so there it is a count."""
    if torch.compiler.is_exporting():
        row, column = ascending[..., None, :], values[..., None]
        # Floats, because OpenVINO 2026.4 sums integers wrongly where there is one image.
        above = (row > column if right else row >= column).float()
        return (ascending.shape[-1] - above.sum(-1)).long()
    return torch.searchsorted(ascending, values, right=right)


def rounding_of(size: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the largest standard deviation that rounding alone may give to features of this size."""
    return ROUNDING_STEPS * torch.finfo(dtype).eps * size.abs()


def sizes_of(mean: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return the size of each feature of a layer with this mean, at least the median of the layer.

    A feature whose mean is zero by chance is a sum of terms as large as the others'; the few of a transformer that are
    a thousand times larger say nothing of these.
    """
    return torch.maximum(mean.abs(), mean.abs().median())


def fix_signs(vectors: Float[Tensor, "d k"]) -> Float[Tensor, "d k"]:
    """Flip the sign of each column so that its entry of largest magnitude is positive, for reproducible fits."""
    if vectors.numel() == 0:
        return vectors
    largest = vectors.gather(0, vectors.abs().argmax(dim=0, keepdim=True))
    return vectors * torch.where(largest < 0, -1.0, 1.0).to(vectors.dtype)


def eigh(matrix: Float[Tensor, "d d"]) -> Eigen:
    """Decompose a symmetric positive semi-definite matrix into eigenvalues and eigenvectors, in float64.

    The matrix is symmetrised first, and negative round-off in the values is clamped to zero.  If the device's solver
    fails (CUDA's may, on low-rank input), the CPU's is used.  The result is on the input's device.
    """
    symmetric = 0.5 * (matrix.double() + matrix.double().T)
    try:
        values, vectors = torch.linalg.eigh(symmetric)
    except RuntimeError:
        values, vectors = (part.to(matrix.device) for part in torch.linalg.eigh(symmetric.cpu()))
    return Eigen(values.flip(0).clamp(min=0.0), fix_signs(vectors.flip(1)))


def inverse_root(matrix: Float[Tensor, "d d"]) -> InverseRoot:
    """Return the inverse square root of a covariance whose eigenvalues are about 1."""
    values, vectors = eigh(matrix)
    clamped = values.clamp(min=EIGENVALUE_FLOOR)
    root = (vectors * clamped.rsqrt()) @ vectors.T
    increase = clamped - values
    return InverseRoot(root, clamped.log().sum().item(), int((increase > 0).sum()), increase.max().item())


def mean_of_rows(rows: Float[Tensor, "n d"] | FeatureMatrix) -> Float[Tensor, " d"]:
    total = torch.zeros(rows.shape[1], dtype=torch.float64, device=rows.device)
    for _, block in blocks(rows):
        total += block.double().sum(0)
    return total / len(rows)


def scatter_about(rows: Float[Tensor, "n d"] | FeatureMatrix, mean: Float[Tensor, " d"]) -> Float[Tensor, "d d"]:
    """Return ``Σ_i (x_i − mean)(x_i − mean)ᵀ``, float64."""
    total = torch.zeros(rows.shape[1], rows.shape[1], dtype=torch.float64, device=rows.device)
    for _, block in blocks(rows):
        centred = block.double() - mean
        total += centred.T @ centred
    return total


def covariance(scatter: Float[Tensor, "d d"], degrees_of_freedom: int) -> tuple[Float[Tensor, "d d"], float]:
    """Return ``scatter / degrees_of_freedom``, shrunk if these are few, and the shrinkage intensity ρ in [0, 1]."""
    sample = scatter / degrees_of_freedom
    if degrees_of_freedom >= SAMPLES_PER_COLUMN * len(scatter):
        return sample, 0.0
    return oas_shrinkage(sample, degrees_of_freedom)


def oas_shrinkage(covariance: Float[Tensor, "d d"], samples: int) -> tuple[Float[Tensor, "d d"], float]:
    """Shrink a covariance towards ``(tr C / d) I`` by oracle approximation.

    ``ρ = min(1, ((1 − 2/d) tr C² + tr² C) / ((m + 1 − 2/d)(tr C² − tr² C / d)))`` and
    ``C ← (1 − ρ) C + ρ (tr C / d) I``; Chen, Wiesel, Eldar & Hero 2010, equation 23.  ``m`` is ``samples``, the degrees
    of freedom of ``C``; ρ is 1 when ``C`` is a multiple of the identity or zero.
    """
    d = covariance.shape[0]
    trace = covariance.trace()
    trace_of_square = covariance.square().sum()
    spread = (samples + 1 - 2 / d) * (trace_of_square - trace.square() / d)
    pull = (1 - 2 / d) * trace_of_square + trace.square()
    rho = 1.0 if spread <= 0 else min(1.0, (pull / spread).item())
    target = (trace / d) * torch.eye(d, dtype=covariance.dtype, device=covariance.device)
    return (1 - rho) * covariance + rho * target, rho


class Moments(NamedTuple):
    """Mean and covariance of the vectors of each group, float64."""

    vectors: int  # their number
    mean: Float[Tensor, "groups dim"]
    covariance: Float[Tensor, "groups dim dim"]


class MomentSums:
    """The sums over the vectors so far."""

    def __init__(self, groups: int, dim: int, device: torch.device | str = "cpu") -> None:
        self._count = 0
        self._mean = torch.zeros(groups, dim, dtype=torch.float64, device=device)
        self._products = self._mean.new_zeros(groups, dim, dim)

    def add(self, vectors: Float[Tensor, "batch groups dim"]) -> None:
        """Merge a batch of at least one vector, which is not modified."""
        x = vectors.transpose(0, 1).to(torch.float64, copy=True)
        mean, total = x.mean(1), self._count + len(vectors)
        gap = mean - self._mean
        x -= mean[:, None]
        self._products.baddbmm_(x.transpose(1, 2), x)
        self._merge(gap, self._count * len(vectors) / total)
        self._mean += gap * (len(vectors) / total)
        self._count = total

    def finish(self, sum_: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Moments:
        """Return the moments and use up the sums; ``sum_`` adds a tensor over all processes, each with a vector."""
        total = sum_(self._mean.new_tensor(float(self._count)))
        mean = sum_(self._mean * (self._count / total))
        if int(total) > self._count:
            self._merge(self._mean - mean, float(self._count))
        return Moments(int(total), mean, sum_(self._products).div_(total))

    def _merge(self, gap: Float[Tensor, "groups dim"], weight: float) -> None:
        self._products.baddbmm_(gap[:, :, None], gap[:, None], alpha=weight)


def r_squared(squared_errors: Float[Tensor, " n"], y: Float[Tensor, " n"]) -> float:
    """Return R² = 1 − Σ_i (y_i − ŷ_i)² / Σ_i (y_i − ȳ)², the fraction of the variance that predictions explain.

    If all numbers are equal, it is 1 if all predictions are exact and 0 otherwise, as in scikit-learn's ``r2_score``.
    """
    total, left = total_squares(y), float(squared_errors.sum())
    return 1.0 - left / total if total > 0 else float(left == 0)


def r_squared_error(one: Float[Tensor, " n"], other: Float[Tensor, " n"], y: Float[Tensor, " n"]) -> float:
    """Return the standard error of the difference between two R², from the squared errors of both."""
    total = total_squares(y)
    return float((one - other).norm()) / total if total > 0 else 0.0


def total_squares(y: Float[Tensor, " n"]) -> float:
    """Return Σ (y − ȳ)²; exactly 0 if all numbers are equal, in spite of the rounding of ȳ."""
    return 0.0 if bool((y == y[0]).all()) else float((y - y.mean()).square().sum())


TAIL_FRACTION: Final = 0.05  # fraction of the values that are the tail


def tail_excess(ascending: Float[Tensor, "m ..."], k: int) -> Float[Tensor, "..."]:
    """Return the mean excess of the k largest values of each column over the next smaller one, float64."""
    wide = ascending.double()
    return (wide[len(wide) - k :] - wide[max(0, len(wide) - k - 1)]).mean(dim=0)


MIN_COLUMNS = 1024  # minimum number of columns for a separate pass, whatever the memory budget
# Number of entries converted to float64 at a time: 1 MiB on a CPU, which stays in a core's cache; 64 MiB on CUDA, for
# few kernel launches.
_BLOCK = {"cpu": 1 << 17, "cuda": 1 << 23}
_ROUNDING = 1e-28  # fraction of Σ n_c‖μ_c‖² below which scatter is only the float64 rounding of constant features


class ClassPairs(NamedTuple):
    """The labelled examples of a batch as distinct (image, class) pairs, weighted by their number of examples."""

    image_index: Int[Tensor, " pairs"] | None  # the image of each pair; None if pair m is image m
    present: Int[Tensor, " present"]  # the classes in the batch, ascending
    position: Int[Tensor, " pairs"]  # the index of each pair's class in present
    counts: Float[Tensor, " present"]  # float64, the number of examples of each class
    indicator: Float[Tensor, "present pairs"]  # float64, the weight of each pair in the row of its class, else zero
    root_weights: Float[Tensor, " pairs"] | None  # the square root of each weight; None if all are one


def class_pairs(
    labels: Int[Tensor, " examples"], image_index: Int[Tensor, " examples"], device: torch.device | str = "cpu"
) -> ClassPairs:
    """Return the pairs on ``device`` for the examples ``(image_index[m], labels[m])`` of a batch, images ascending."""
    alone = len(image_index) == 0 or (
        int(image_index[-1]) == len(image_index) - 1 and bool((image_index.diff() == 1).all())
    )
    weights = torch.ones(len(labels), dtype=torch.float64)
    if not alone:
        pairs, counts = torch.unique(torch.stack([image_index, labels]), dim=1, return_counts=True)
        image_index, labels, weights = pairs[0], pairs[1], counts.double()
    present, position = torch.unique(labels, return_inverse=True)
    indicator = torch.zeros(len(present), len(labels), dtype=torch.float64)
    indicator[position, torch.arange(len(labels))] = weights
    return ClassPairs(
        None if alone else image_index.to(device),
        present.to(device),
        position.to(device),
        indicator.sum(1).to(device),
        indicator.to(device),
        None if bool((weights == 1).all()) else weights.sqrt().to(device),
    )


class ClassScatter:
    """The ``counts`` (classes,), class ``means`` (classes, dim) and scatter ``within`` of the examples so far, float64.

    ``within`` is Σ_i ‖h_i − μ_label‖², or with ``by_column`` the contribution (dim,) of each column.
    """

    def __init__(self, classes: int, dim: int, device: torch.device | str = "cpu", *, by_column: bool = False) -> None:
        self.counts = torch.zeros(classes, dtype=torch.float64, device=device)
        self.means = torch.zeros(classes, dim, dtype=torch.float64, device=device)
        self.within = torch.zeros((dim,) if by_column else (), dtype=torch.float64, device=device)

    def add(self, features: Float[Tensor, "images dim"], batch: ClassPairs) -> None:
        """Merge a batch of at least one image, which is not modified."""
        pairs, by_column = batch.indicator.shape[1], self.within.ndim == 1
        batch_means = self.means.new_empty(len(batch.present), features.shape[1])
        scatter = torch.zeros_like(self.within)
        buffer: Tensor | None = None
        for columns in _columns(features.shape[1], pairs, features.device):
            block = features[:, columns]
            if batch.image_index is not None:
                block = block.index_select(0, batch.image_index)
            if buffer is None or buffer.shape != block.shape:
                buffer = torch.empty(block.shape, dtype=torch.float64, device=block.device)
            x = buffer.copy_(block)
            means = (batch.indicator @ x).div_(batch.counts[:, None])
            batch_means[:, columns] = means
            x -= means if len(means) == 1 else means.index_select(0, batch.position)
            if batch.root_weights is not None:
                x *= batch.root_weights[:, None]
            part = scatter[columns] if by_column else scatter
            part += _sum_of_squares(x, by_column=by_column)
        self.within += scatter
        self.counts.index_add_(0, batch.present, batch.counts)
        fraction = (batch.counts / self.counts.index_select(0, batch.present))[:, None]
        gaps = batch_means.sub_(self.means.index_select(0, batch.present))
        self.means.index_add_(0, batch.present, gaps * fraction)
        gaps *= (batch.counts[:, None] * (1 - fraction)).sqrt_()
        self.within += _sum_of_squares(gaps, by_column=by_column)

    def all_reduce(self, sum_: Callable[[Tensor], Tensor]) -> None:
        """Merge the sums of all processes, as if one process had seen all examples."""
        counts = sum_(self.counts.clone())
        scale = counts.clamp_min(1)[:, None]
        means = sum_(self.means * (self.counts[:, None] / scale))
        gaps = self.means.sub_(means).square_()
        self.within = sum_(self.within + (self.counts @ gaps if self.within.ndim else self.counts @ gaps.sum(1)))
        self.counts, self.means = counts, means

    def total(self) -> Float[Tensor, " dim"]:
        """Return the total scatter of each column about μ_G (needs ``by_column``)."""
        centre = self.means[self.counts > 0].mean(0)
        return self.within + self.counts @ (self.means - centre).square_()

    def mean_and_std(self) -> tuple[Float[Tensor, " dim"], Float[Tensor, " dim"]]:
        """Return mean and standard deviation (1 if constant) of each column over all examples; needs ``by_column``."""
        n = self.counts.sum()
        mean = (self.counts @ self.means) / n
        std = ((self.within + self.counts @ (self.means - mean).square_()) / n).sqrt()
        floor = 1e-6 * std.square().mean().sqrt()
        return mean, torch.where(std > floor, std, 1.0)


def scatter_sums(scatter: ClassScatter) -> Float[Tensor, "3"]:
    """Return Σ_W, Σ_B = Σ_c n_c ‖μ_c − μ_G‖² and Σ_c n_c ‖μ_c‖², which bounds its rounding; of ranges they add up."""
    sums = functional.pad(scatter.within[None], (0, 2))
    means, counts = scatter.means, scatter.counts
    for columns in _columns(means.shape[1], len(means), means.device):
        block = means[:, columns]
        sums[1] += counts @ (block - block.mean(0)).square_().sum(1)
        sums[2] += counts @ block.square().sum(1)
    return sums.cpu()


def nc1_of(sums: Float[Tensor, "3"]) -> float:
    """Return NC1 = within / (within + between); 0 for constant features, which have collapsed completely."""
    within, between, magnitude = sums.tolist()
    total = within + between
    return within / total if total > _ROUNDING * magnitude else 0.0


def is_rounding(sums: Float[Tensor, "3"]) -> bool:
    """Return whether the features are constant, up to the rounding of float32."""
    within, between, magnitude = sums.tolist()
    return bool(within + between <= (ROUNDING_STEPS * torch.finfo(torch.float32).eps) ** 2 * magnitude)


def distances_from(
    means: Float[Tensor, "classes dim"],
) -> Callable[[Float[Tensor, "batch dim"]], Float[Tensor, "batch classes"]]:
    """Return a function from features to ‖h − μ_c‖² − ‖h − μ_G‖², float64, smallest for the nearest of the means.

    Features and means, which are overwritten, are centred on μ_G first, x = h − μ_G and m_c = μ_c − μ_G, so that
    ‖m_c‖² − 2 x·m_c has no large terms that cancel.  Distances over ranges of columns add up.
    """
    centre = means.mean(0)
    directions = means.sub_(centre)
    offsets = means.new_zeros(len(means))
    for part in _columns(means.shape[1], len(means), means.device):
        offsets += directions[:, part].square().sum(1)

    def measure(features: Float[Tensor, "batch dim"]) -> Float[Tensor, "batch classes"]:
        distances = offsets.repeat(len(features), 1)
        for part in _columns(features.shape[1], max(1, len(features)), features.device):
            distances.addmm_(features[:, part] - centre[part], directions[:, part].T, alpha=-2.0)
        return distances

    return measure


def _sum_of_squares(x: Tensor, *, by_column: bool) -> Tensor:
    """Return the sum of squares of all entries, or of each column; ``x`` may be overwritten."""
    return x.square_().sum(0) if by_column else torch.dot(x.flatten(), x.flatten())


def _columns(width: int, rows: int, device: torch.device) -> Iterator[slice]:
    step = max(1, _BLOCK[device.type] // max(1, rows))
    return (slice(start, min(width, start + step)) for start in range(0, width, step))
