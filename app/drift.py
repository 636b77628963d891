"""Drift of the p-value stream: a conformal test martingale, and the window's out-of-distribution rate.

Symbols: ``n`` calibration images, ``t`` images seen since the monitor began, ``p`` the served p-value of an
image, ``p = (1 + #{calibration densities ≤ its density}) / (n + 1)``, so ``cell = p·(n + 1) - 1 ∈ {0, …, n}``
says between which two calibration densities the image falls.

**Why p is not bet on directly.**  The served p-values share one finite calibration set: given that set they
are only uniform up to about ``1/√n``, and any martingale that treats them as independent ends in an alarm on
a clean stream.  The monitor therefore forms the *online* conformal p-value, against calibration images and
all earlier images together, for which the counts per cell are enough::

    q = (1 + n_le + c_le) / (n + 1 + t),   n_le = cell,  c_le = #{earlier images in cells ≤ cell}

**No random tie-breaking.**  The smoothed online p-values are independent and uniform while the stream is
exchangeable with the calibration images.  ``q`` (whole cells, ties counted in full) is never smaller than
the smoothed one and every bet below decreases in ``q``, so the value computed here lies, path by path, below
a true test martingale: conservative, reproducible, and valid.

**Bets.**  Power bets ``f_ε(q) = ε·q^(ε-1)`` for a few ε (each integrates to one), mixed over ε *and* over
the moment the bet begins: the capital starts asleep, and before the k-th image of a run (k = 1, 2, …) the
fraction ``1/(k + 1)`` of the sleeping capital wakes, shared equally among the ε.  The value is sleeping plus
awake capital.
A long quiet stretch costs at most ``ln(k + 1)`` nats, so late drift is found about as fast as early drift.

**Bound.**  An alarm is raised when the value reaches ``1/δ``; then a new run begins at value one (the counts
per cell stay).  By Ville's inequality a run raises a false alarm, *ever*, with probability at most δ, and
runs multiply: ``P(at least k false alarms over the whole life) ≤ δ^k``.

Under lasting drift alarms repeat until the drifted images have become usual among all images seen; the
window's rate stays high for as long as the drift lasts.  State: ``n + 1`` counters, ``window`` flags, one
capital per ε.  Pure Python; call it from one thread.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

EXPONENTS: Final = (0.1, 0.25, 0.5, 0.75, 0.9)
"""The ε of the power bets: small for a few very strange images, large for a mild shift of many."""


@dataclass(frozen=True)
class DriftState:
    """What the monitor knows now.

    Attributes:
        observed: Images seen.
        log_martingale: Natural logarithm of the present run's value; ≤ 0 most of the time on a clean stream.
        alarms: Alarms raised so far.
        window_count: Images in the window (its length once it is full).
        window_ood_rate: Share of the window with ``p ≤ alpha``; 0 while the window is empty.
        window_tail_probability: ``P(Binomial(window_count, alpha) ≥ OOD images in the window)``.
    """

    observed: int
    log_martingale: float
    alarms: int
    window_count: int
    window_ood_rate: float
    window_tail_probability: float


class DriftMonitor:
    """Watches served p-values for a departure from the calibration images.

    Args:
        calibration_count: n, the number of calibration images behind the p-values.
        alpha: The p-value at or below which an image counts as out of distribution.
        false_alarm_probability: δ, the bound on a false alarm in one run, ever.
        window: Images in the window.

    Raises:
        ValueError: An argument out of range.
    """

    def __init__(
        self,
        calibration_count: int,
        alpha: float,
        *,
        false_alarm_probability: float = 0.01,
        window: int = 1000,
    ) -> None:
        if calibration_count < 1:
            raise ValueError(f"expected at least 1 calibration image, got {calibration_count}; calibrate the bundle")
        if not 0.0 < alpha < 1.0:
            raise ValueError(f"expected alpha between 0 and 1, got {alpha}; use for example 0.05")
        if not 0.0 < false_alarm_probability < 1.0:
            raise ValueError(
                f"expected a false-alarm probability between 0 and 1, got {false_alarm_probability}; "
                "use for example 0.01"
            )
        if window < 1:
            raise ValueError(f"expected a window of at least 1 image, got {window}; use for example 1000")
        self.calibration_count = calibration_count
        self.alpha = alpha
        self.false_alarm_probability = false_alarm_probability
        self._log_threshold = -math.log(false_alarm_probability)
        # p ≤ alpha as whole numbers: neither float32 p-values nor a binary alpha shift the boundary.
        self._ood_cells = math.floor(alpha * (calibration_count + 1) + 1e-9)
        self._counts = _CellCounts(calibration_count + 1)
        self._observed = 0
        self._alarms = 0
        self._flags: deque[bool] = deque(maxlen=window)
        self._flagged = 0
        self._begin_run()

    def update(self, p_values: Iterable[float]) -> int:
        """Take in served p-values in the order of the images.

        Returns:
            The number of alarms these images raised.

        Raises:
            ValueError: A p-value outside (0, 1], or NaN; the images before it are taken in.
        """
        before = self._alarms
        for p_value in p_values:
            if not 0.0 < p_value <= 1.0:
                raise ValueError(f"expected a p-value in (0, 1], got {p_value}; pass served p-values only")
            cell = min(max(round(p_value * (self.calibration_count + 1)) - 1, 0), self.calibration_count)
            self._remember(cell < self._ood_cells)
            self._bet(self._online_p_value(cell))
        return self._alarms - before

    @property
    def state(self) -> DriftState:
        """The present state (a copy)."""
        count = len(self._flags)
        return DriftState(
            observed=self._observed,
            log_martingale=self._log_value,
            alarms=self._alarms,
            window_count=count,
            window_ood_rate=self._flagged / count if count else 0.0,
            window_tail_probability=binomial_tail(self._flagged, count, self.alpha),
        )

    def _begin_run(self) -> None:
        self._run_length = 0
        self._log_value = 0.0
        self._log_awake = [-math.inf] * len(EXPONENTS)

    def _remember(self, is_ood: bool) -> None:
        if len(self._flags) == self._flags.maxlen:
            self._flagged -= self._flags[0]
        self._flags.append(is_ood)
        self._flagged += is_ood

    def _online_p_value(self, cell: int) -> float:
        earlier = self._counts.add(cell)
        online = (1 + cell + earlier) / (self.calibration_count + 1 + self._observed)
        self._observed += 1
        return online

    def _bet(self, q: float) -> None:
        self._run_length += 1
        k = self._run_length
        # Asleep before image k: Π_{j<k} (1 - 1/(j+1)) = 1/k; of it 1/(k+1) wakes, leaving 1/(k+1) asleep.
        log_woken = -math.log(k) - math.log(k + 1) - math.log(len(EXPONENTS))
        log_q = math.log(q)
        self._log_awake = [
            _log_add(log_capital, log_woken) + math.log(epsilon) + (epsilon - 1.0) * log_q
            for log_capital, epsilon in zip(self._log_awake, EXPONENTS, strict=True)
        ]
        total = -math.log(k + 1)
        for log_capital in self._log_awake:
            total = _log_add(total, log_capital)
        self._log_value = total
        if total >= self._log_threshold:
            self._alarms += 1
            self._begin_run()


def binomial_tail(successes: int, trials: int, probability: float) -> float:
    """``P(Binomial(trials, probability) ≥ successes)``, summed from exact log terms.

    Args:
        successes: Lower end of the tail, 0 to ``trials``.
        trials: Number of trials; with none the tail is 1.
        probability: Chance of each success, strictly between 0 and 1.
    """
    if successes <= 0:
        return 1.0
    log_odds = math.log(probability) - math.log1p(-probability)
    log_term = (
        math.lgamma(trials + 1)
        - math.lgamma(successes + 1)
        - math.lgamma(trials - successes + 1)
        + successes * math.log(probability)
        + (trials - successes) * math.log1p(-probability)
    )
    terms = []
    for k in range(successes, trials + 1):
        terms.append(math.exp(log_term))
        if k < trials:
            log_term += math.log(trials - k) - math.log(k + 1) + log_odds
    return min(1.0, math.fsum(terms))


def _log_add(a: float, b: float) -> float:
    """``ln(e^a + e^b)`` without overflow; ``a`` may be −∞."""
    high, low = (a, b) if a >= b else (b, a)
    return high if low == -math.inf else high + math.log1p(math.exp(low - high))


class _CellCounts:
    """Counts per cell with prefix sums in O(log cells): a Fenwick tree."""

    def __init__(self, cells: int) -> None:
        self._tree = [0] * (cells + 1)

    def add(self, cell: int) -> int:
        """Count one more in ``cell``; returns how many were in cells ≤ ``cell`` before."""
        tree = self._tree
        earlier = 0
        index = cell + 1
        while index > 0:
            earlier += tree[index]
            index &= index - 1
        index = cell + 1
        while index < len(tree):
            tree[index] += 1
            index += index & -index
        return earlier
