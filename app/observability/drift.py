"""Watch the stream of p-values for drift: a conformal test martingale, and a window's out-of-distribution rate.

Symbols: ``n`` is the number of calibration images, ``t`` the number of images since the run began, and ``p`` the
served p-value of an image, ``p = (1 + #{calibration OOD scores ≥ its own}) / (n + 1)``.  So
``cell = p·(n + 1) - 1 ∈ {0, …, n}`` says between which two calibration scores the image falls.

**Why the bets are not on p alone.**  The served p-values share one finite calibration set: given that set they are
uniform only up to about ``1/√n``, and any martingale that treats them as independent ends in an alarm on a clean
stream.  So the monitor computes the *online* conformal p-value, against the calibration images and all earlier images
of the run together, for which the counts per cell are enough::

    q = (1 + n_le + c_le) / (n + 1 + t),   n_le = cell,  c_le = #{earlier images in cells ≤ cell}

and bets on ``max(q, p)``.  Earlier images alone must not make an in-distribution image look unusual: after many very
easy images every other image has a small q, but not a small p.

**No random tie-breaking.**  The smoothed online p-values are independent and uniform while the stream is exchangeable
with the calibration images.  ``max(q, p)`` (whole cells, ties counted in full) is never smaller than the smoothed
p-value, and every bet below decreases in it, so the value computed here lies, path by path, below a true test
martingale: it is conservative, reproducible and valid.

**Bets.**  Power bets ``f_ε(q) = ε·q^(ε-1)`` for a few ε (each integrates to one) are mixed over ε *and* over the moment
when the bet begins.  All capital starts asleep, and after k images of a run the fraction ``s_k = ln c / ln(k + c)``
sleeps; the part that wakes before the k-th image, ``w_k = s_{k-1} - s_k``, is divided equally among the ε.  The value
is sleeping plus awake capital.  ``w_k ≈ ln c/(k ln² k)`` falls almost as slowly as the terms of a convergent sum can.
So after k quiet images ``m ln c/(k ln² k)`` of the capital wakes in the first m images of a drift, and late drift is
found about as fast as early drift.

**Bound.**  An alarm is raised when the value reaches ``1/δ``.  Then a new run begins at value one, without any
memory of the images before it, so images that raised alarms never become usual.  By Ville's inequality the probability
that a run ever raises a false alarm is at most δ, over the draw of the calibration images; the runs of one monitor
share these, so the numbers of their false alarms are not independent.  A new process, replica or bundle begins a new
monitor; N monitors, each with the bound δ/N, raise any false alarm with probability at most δ, whatever they share.

**Episodes.**  An alarm begins an episode, which counts as one however long the drift lasts.  An episode ends
with evidence of quiet, not with the lack of an alarm: images are tested in trials of ``window`` images, each of
which begins at value one.  A trial fails if its value reaches ``1/QUIET``, or if so many of its images are out of
distribution that this has a probability below ``QUIET``.  The first trial that does not fail ends the episode, and a
run with the bound δ begins.  A trial of exchangeable images fails with probability at most 2·QUIET, so most episodes
end within two windows after their drift.  Drift that is too weak to show in one window ends its episode early, and
should raise its alarm again.

**Window.**  An image is out of distribution by comparison with the k-th largest of n calibration scores, so the number
of such images among m exchangeable ones is not binomial but beta-binomial with k and n + 1 - k: with few calibration
images, every rate from 0 to several times alpha is likely.

The state is ``n + 1`` counters, ``window`` flags and one capital per ε.  Images are processed in blocks, with a few
array operations each; to be called from one thread.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from scipy.special import betaln

from psc_core.conformal import ood_rank

# The ε of the power bets: small values find a few very unusual images, large ones a mild shift of many.
EXPONENTS: Final = (0.1, 0.25, 0.5, 0.75, 0.9)

# c: with a larger value, bets begin later, so that late drift is found sooner and early drift later.
_ONSET: Final = 10.0

QUIET: Final = 0.05  # the probability below which a trial is too unusual to end an episode

_BLOCK: Final = 128
_EPSILONS: Final = np.array(EXPONENTS)[:, None]
_EARLIER: Final = np.tril(np.ones((_BLOCK, _BLOCK), bool), -1)

Floats = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True)
class DriftState:
    """The present state of a monitor."""

    log_martingale: float  # the natural logarithm of the present run's value; ≤ 0 most of the time on a clean stream
    is_active: bool  # whether an episode of drift is going on
    alarms: int  # the number of alarms so far, one for each episode
    window_images: int  # the number of images in the window
    window_ood_rate: float  # the fraction of the window's images with ``p ≤ alpha``; 0 while the window is empty
    # The probability of at least as many OOD images in the window if all were exchangeable with the calibration
    # images.
    window_tail_probability: float


class DriftMonitor:
    """Watches served p-values for drift away from the calibration images, with the symbols of this module."""

    def __init__(
        self,
        calibration_count: int,
        alpha: float,
        *,
        false_alarm_probability: float,
        window: int,
    ) -> None:
        self.calibration_count = calibration_count  # n, the number of calibration images behind the p-values
        self.alpha = alpha  # the p-value at or below which an image counts as out of distribution
        self.false_alarm_probability = false_alarm_probability
        self._log_threshold = -math.log(false_alarm_probability)
        # p ≤ alpha is tested in whole numbers, so that neither the rounding of p nor that of alpha moves the boundary.
        self._ood_cells = ood_rank(alpha, calibration_count)
        self._observed = 0
        self._alarms = 0
        self._is_active = False
        self._has_failed = False
        self._window = np.zeros(window, bool)  # the number of images in the window, and in a trial of an episode
        self._flagged = 0
        self._begin_run()

    def update(self, p_values: npt.ArrayLike) -> int:
        """Process served p-values in the order of their images.

        Returns:
            The number of alarms that these images raised.
        """
        values = np.asarray(p_values, np.float64)
        wrong = np.flatnonzero(~((values > 0.0) & (values <= 1.0)))
        good = values[: wrong[0]] if wrong.size else values
        cells = np.rint(good * (self.calibration_count + 1)).astype(np.int64) - 1
        cells = cells.clip(0, self.calibration_count)
        before = self._alarms
        while cells.size:
            taken = self._take(cells[:_BLOCK])
            cells = cells[taken:]
        if wrong.size:
            raise ValueError(f"expected a p-value in (0, 1], got {values[wrong[0]]}; pass served p-values only")
        return self._alarms - before

    @property
    def state(self) -> DriftState:
        """A copy of the present state."""
        count = min(self._observed, len(self._window))
        return DriftState(
            log_martingale=self._log_value,
            is_active=self._is_active,
            alarms=self._alarms,
            window_images=count,
            window_ood_rate=self._flagged / count if count else 0.0,
            window_tail_probability=window_tail(self._flagged, count, self._ood_cells, self.calibration_count),
        )

    def _take(self, cells: npt.NDArray[np.int64]) -> int:
        """Process the next images, at most up to the end of a run or trial; return how many."""
        if self._is_active:
            cells = cells[: len(self._window) - self._trial_images]
        is_alarm = self._has_failed
        if is_alarm:
            taken = len(cells)
        else:
            quiet = -math.log(QUIET)
            threshold = min(quiet, self._log_threshold) if self._is_active else self._log_threshold
            taken, is_alarm = self._bet(cells, threshold)
        self._remember(cells[:taken] < self._ood_cells)
        self._observed += taken
        if self._is_active:
            self._has_failed = is_alarm
            self._trial_images += taken
            if self._trial_images == len(self._window):  # The window now holds the images of this trial alone.
                self._is_active = is_alarm or self.state.window_tail_probability < QUIET
                self._begin_run()
        elif is_alarm:
            self._alarms += 1
            self._is_active = True
            self._begin_run()
        return taken

    def _begin_run(self) -> None:
        self._counts = np.zeros(self.calibration_count + 1, np.int64)
        self._run_length = 0
        self._trial_images = 0
        self._has_failed = False
        self._log_value = 0.0
        self._log_awake = np.full((len(EXPONENTS), 1), -np.inf)

    def _remember(self, is_ood: npt.NDArray[np.bool_]) -> None:
        """Overwrite the oldest flags of the window with those of the next images."""
        size = len(self._window)
        first = self._observed + max(0, len(is_ood) - size)
        last = is_ood[-size:]
        places = (first + np.arange(len(last))) % size
        self._flagged += int(last.sum()) - int(self._window[places].sum())
        self._window[places] = last

    def _online_p_values(self, cells: npt.NDArray[np.int64]) -> Floats:
        """Return max(q, p) of each image of a block."""
        among = (cells <= cells[:, None]) & _EARLIER[: len(cells), : len(cells)]
        earlier = self._counts.cumsum()[cells] + among.sum(axis=1)
        images = self.calibration_count + 1.0 + self._run_length + np.arange(len(cells))
        served = (1.0 + cells) / (self.calibration_count + 1.0)
        q: Floats = np.maximum((1.0 + cells + earlier) / images, served)
        return q

    def _bet(self, cells: npt.NDArray[np.int64], log_threshold: float) -> tuple[int, bool]:
        """Bet on the next images until the value reaches a threshold; return on how many, and whether it did.

        With F_k the product of the first k bets, the awake capital S_k = (S_{k-1} + w_k) f(q_k) is
        F_k (S_0 + Σ_{j≤k} w_j / F_{j-1}), which two cumulative sums in logarithms compute.
        """
        k = self._run_length + 1.0 + np.arange(cells.size)
        before, asleep = math.log(_ONSET) / np.log(k - 1.0 + _ONSET), math.log(_ONSET) / np.log(k + _ONSET)
        log_woken = np.log((before * np.log1p(1.0 / (k - 1.0 + _ONSET)) / np.log(k + _ONSET)) / len(EXPONENTS))
        log_bets = np.log(_EPSILONS) + (_EPSILONS - 1.0) * np.log(self._online_p_values(cells))
        log_product = log_bets.cumsum(axis=1)
        stakes = np.concatenate([self._log_awake, log_woken - log_product + log_bets], axis=1)
        log_awake = log_product + np.logaddexp.accumulate(stakes, axis=1)[:, 1:]
        log_values = np.logaddexp(np.logaddexp.reduce(log_awake, axis=0), np.log(asleep))
        reached = np.flatnonzero(log_values >= log_threshold)
        if reached.size:
            self._log_value = float(log_values[reached[0]])
            return int(reached[0]) + 1, True
        self._counts += np.bincount(cells, minlength=len(self._counts))
        self._run_length += cells.size
        self._log_awake = log_awake[:, -1:]
        self._log_value = float(log_values[-1])
        return cells.size, False


def window_tail(ood: int, images: int, rank: int, n: int) -> float:
    """Return P(BetaBinomial(images, rank, n + 1 - rank) ≥ ood).

    It is the probability that at least ``ood`` of the images score above the rank-th largest of the n calibration
    scores.  That is so if at most rank - 1 of these are among the rank + ood - 1 highest of all scores, so it is a sum
    of at most ``rank`` hypergeometric probabilities.
    """
    if ood <= 0:
        return 1.0
    highest = rank + ood - 1
    below = np.arange(max(0, highest - images), rank)
    log_terms = _log_binomial(n, below) + _log_binomial(images, highest - below) - _log_binomial(n + images, highest)
    return min(1.0, float(np.exp(log_terms).sum()))


def _log_binomial(n: int, k: npt.ArrayLike) -> Floats:
    """Return ln C(n, k)."""
    k = np.asarray(k, np.float64)
    result: Floats = -math.log(n + 1.0) - betaln(n - k + 1.0, k + 1.0)
    return result
