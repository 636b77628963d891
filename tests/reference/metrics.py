"""Naive float64 twins of metrics and baselines: loops over pairs, groups and thresholds."""

import itertools
import math
import statistics
from collections.abc import Sequence

from scipy import special, stats


def nll(probabilities: Sequence[Sequence[float]], labels: Sequence[int], floor: float) -> float:
    return sum(-math.log(max(p[y], floor)) for p, y in zip(probabilities, labels, strict=True)) / len(labels)


def brier(probabilities: Sequence[Sequence[float]], labels: Sequence[int]) -> float:
    total = 0.0
    for p, y in zip(probabilities, labels, strict=True):
        total += sum((value - (c == y)) ** 2 for c, value in enumerate(p))
    return total / len(labels)


def ece(confidence: Sequence[float], correct: Sequence[bool], bins: int) -> float:
    total = 0.0
    for b in range(bins):
        members = [i for i, c in enumerate(confidence) if (b / bins < c <= (b + 1) / bins) or (b == 0 and c == 0)]
        if members:
            gap = sum(confidence[i] for i in members) / len(members) - sum(correct[i] for i in members) / len(members)
            total += len(members) / len(confidence) * abs(gap)
    return total


def by_confidence(confidence: Sequence[float], values: Sequence[float]) -> list[float]:
    """Most confident first; ties replaced by the mean of their group."""
    result: list[float] = []
    for level in sorted(set(confidence), reverse=True):
        group = [v for c, v in zip(confidence, values, strict=True) if c == level]
        result += [sum(group) / len(group)] * len(group)
    return result


def adaptive_ece(confidence: Sequence[float], correct: Sequence[bool], bins: int) -> float:
    hits = by_confidence(confidence, [float(c) for c in correct])
    ordered = sorted(confidence, reverse=True)
    n, bins = len(ordered), min(bins, len(ordered))
    total = 0.0
    for b in range(bins):
        members = [i for i in range(n) if math.floor(i * bins / n) == b]
        gap = sum(ordered[i] for i in members) / len(members) - sum(hits[i] for i in members) / len(members)
        total += len(members) / n * abs(gap)
    return total


def auroc(in_scores: Sequence[float], out_scores: Sequence[float]) -> float:
    wins = [(o > i) + 0.5 * (o == i) for o, i in itertools.product(out_scores, in_scores)]
    return sum(wins) / len(wins)


def ood_accepted(in_scores: Sequence[float], out_scores: Sequence[float], accepted: float) -> float:
    """Fraction of the second below or at the lowest of the first that accepts enough of them."""
    n = len(in_scores)
    threshold = min(t for t in in_scores if sum(s <= t for s in in_scores) >= accepted * n - 1e-9)
    return sum(s <= threshold for s in out_scores) / len(out_scores)


def rank(value: float, among: Sequence[float]) -> float:
    """Fraction of ``among`` below, equal ones counted half."""
    return sum((other < value) + 0.5 * (other == value) for other in among) / len(among)


def aurc(confidence: Sequence[float], correct: Sequence[bool]) -> float:
    errors = by_confidence(confidence, [float(not c) for c in correct])
    return sum(sum(errors[:k]) / k for k in range(1, len(errors) + 1)) / len(errors)


def augrc(confidence: Sequence[float], correct: Sequence[bool]) -> float:
    """The closed form of Traub et al. (2024) through the AUROC of right against wrong."""
    right = [c for c, ok in zip(confidence, correct, strict=True) if ok]
    wrong = [c for c, ok in zip(confidence, correct, strict=True) if not ok]
    acc = len(right) / len(correct)
    ranking = auroc(wrong, right) if right and wrong else 1.0
    return (1 - ranking) * acc * (1 - acc) + (1 - acc) ** 2 / 2


def coverage_at_risk(confidence: Sequence[float], correct: Sequence[bool], risk: float) -> float:
    best = 0.0
    for threshold in set(confidence):
        accepted = [ok for c, ok in zip(confidence, correct, strict=True) if c >= threshold]
        if accepted.count(False) <= risk * len(accepted) + 1e-9:
            best = max(best, len(accepted) / len(confidence))
    return best


def knn_distance(query: Sequence[float], bank: Sequence[Sequence[float]], neighbours: int) -> float:
    return sorted(math.dist(query, row) for row in bank)[min(neighbours, len(bank)) - 1]


def tempered_nll(logits: Sequence[Sequence[float]], labels: Sequence[int], temperature: float) -> float:
    log_p = special.log_softmax([[f / temperature for f in row] for row in logits], axis=1)
    return -statistics.fmean(row[label] for row, label in zip(log_p, labels, strict=True))


def weighted_median(values: Sequence[float], weights: Sequence[float]) -> float:
    return min(
        value for value in values
        if sum(w for v, w in zip(values, weights, strict=True) if v <= value) >= sum(weights) / 2
    )  # fmt: skip


def binomial_mass(trials: int, rate: float) -> list[float]:
    """P(X = k) for k = 0 … trials."""
    mass: list[float] = stats.binom.pmf(range(trials + 1), trials, rate).tolist()
    return mass


def auroc_difference(
    in_first: Sequence[float], out_first: Sequence[float], in_second: Sequence[float], out_second: Sequence[float]
) -> tuple[float, float]:
    """DeLong: the difference and its standard error from the structural components, pair by pair."""

    def wins(inside: Sequence[float], outside: Sequence[float]) -> list[list[float]]:
        return [[(o > i) + 0.5 * (o == i) for i in inside] for o in outside]

    first, second = wins(in_first, out_first), wins(in_second, out_second)
    gaps = [[a - b for a, b in zip(*pair, strict=True)] for pair in zip(first, second, strict=True)]
    by_out = [statistics.fmean(row) for row in gaps]
    by_in = [statistics.fmean(column) for column in zip(*gaps, strict=True)]
    variance = statistics.variance(by_out) / len(by_out) + statistics.variance(by_in) / len(by_in)
    return statistics.fmean(by_out), math.sqrt(variance)
