"""Watch the stream of p-values for drift: a conformal test martingale, and a window's out-of-distribution rate.

Symbols: ``n`` is the number of calibration images, ``t`` the number of images since the run began, and ``p`` the
served p-value of an image, ``p = (1 + #{calibration OOD scores ≥ its own}) / (n + 1)``.  So
``cell = p·(n + 1) - 1 ∈ {0, …, n}`` says between which two calibration scores the image falls.  The monitor bets on
``max(q, p)`` with the online p-value ``q = (1 + cell + #{earlier images in cells ≤ cell}) / (n + 1 + t)``; why, and
why its false alarms are bounded, is in docs/drift.md.

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
_ONSET: Final = 10.0  # c: with a larger value, bets begin later: late drift is found sooner, early drift later
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
    window_images: int
    window_ood_rate: float  # the fraction of the window's images with ``p ≤ alpha``; 0 while the window is empty
    # The probability of at least as many OOD images in the window if all were exchangeable with the calibration
    # images.
    window_tail_probability: float


# Of a monitor that has seen nothing.
NO_DRIFT: Final = DriftState(0.0, False, 0, window_images=0, window_ood_rate=0.0, window_tail_probability=1.0)


class DriftMonitor:
    """Watches served p-values for drift away from the calibration images, with the symbols of this module."""

    def __init__(self, calibration_count: int, alpha: float, *, false_alarm_probability: float, window: int) -> None:
        self.calibration_count = calibration_count  # n, the number of calibration images behind the p-values
        self._log_threshold = -math.log(false_alarm_probability)
        # p ≤ alpha is tested in whole numbers, so that neither the rounding of p nor that of alpha moves the boundary.
        self._ood_cells = ood_rank(alpha, calibration_count)
        self._observed = 0
        self._alarms = 0
        self._is_active = False
        self._has_failed = False
        self._window = np.zeros(window, bool)  # whether each of the latest images is OOD
        self._flagged = 0
        self._begin_run()

    def update(self, p_values: npt.ArrayLike) -> int:
        """Process served p-values in the order of their images; return the number of alarms that they raised."""
        values = np.asarray(p_values, np.float64)
        wrong = np.flatnonzero(~((values > 0.0) & (values <= 1.0)))
        good = values[: wrong[0]] if wrong.size else values
        cells = np.rint(good * (self.calibration_count + 1)).astype(np.int64) - 1
        cells = cells.clip(0, self.calibration_count)
        before = self._alarms
        while cells.size:
            cells = cells[self._take(cells[:_BLOCK]) :]
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
