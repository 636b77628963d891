"""Classification: one class of several for each image.

A prediction set with coverage 1 − α contains the classes whose probability is at least the k-th largest calibration
probability of a true label, ``k = ⌈(n + 1)(1 − α)⌉`` (score ``1 − p_y``: Sadinle et al. 2019).  It contains the true
label with probability ≥ 1 − α, over all images (marginal).  The most probable class is always in the set, which can
only raise coverage.  p-values are those of :mod:`psc_core.conformal`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count as count_from
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from psc_core import metrics
from psc_core.answers import (
    ACCEPTS_NOTHING,
    BETTER_THAN_GUESSING,
    CLASSIFICATION_DECISIONS,
    CLASSIFICATION_SCORES,
    FLOAT32_ROUNDING,
    LARGEST_CLASS,
    RISKS,
    BasePolicy,
    ClassificationAnswer,
    ClassificationPolicy,
    ClassificationQuery,
    ClassificationResponse,
)
from psc_core.compute import Compute
from psc_core.conformal import (
    MAX_SCORE,
    check_ascending,
    check_finite,
    check_fraction,
    check_range,
    check_rates,
    conformal_rank,
    equal_scores,
    thin,
    tolerant_ceil,
)
from psc_core.data.dataset import ImageDataset
from psc_core.errors import BundleError, UsageError
from psc_core.features import check_features
from psc_core.heads.base import ClassifierData, ClassifierHead, Features, Scored, fit_standardisation, in_memory
from psc_core.heads.duq import DuqHead
from psc_core.heads.laplace import LaplaceHead
from psc_core.heads.sngp import SngpHead
from psc_core.heads.softmax import TemperatureHead, better_of, fit_temperature_head
from psc_core.settings import DEFAULTS, FitSettings
from psc_core.stored_images import NEAREST
from psc_core.tasks.base import (
    CHECKS_OUTPUT,
    FIRST_EVALUATION_IMAGES,
    GUESSES,
    Agreement,
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

if TYPE_CHECKING:
    from psc_core.evaluation.evaluate import Evaluator
    from psc_core.report.content import TaskReport

CODE_ACCEPT, ABSTAIN_AMBIGUOUS, ABSTAIN_OOD = range(len(CLASSIFICATION_DECISIONS))


@dataclass(frozen=True, kw_only=True, eq=False)
class Decisions(BaseDecisions):
    """The decisions of a classifier on n images."""

    decision_names = CLASSIFICATION_DECISIONS

    class_index: npt.NDArray[np.int64]  # (n,) the most probable class
    confidence: FloatArray  # (n,) its probability
    prediction_set: npt.NDArray[np.bool_]  # (n, K) the classes in the set

    @property
    def label_index(self) -> npt.NDArray[np.int64]:
        return self.class_index

    def labels(self, classes: Sequence[str]) -> list[str]:
        return list(map(classes.__getitem__, self.class_index.tolist()))

    def likely_classes(self, outputs: Outputs[FloatArray]) -> list[list[int]]:
        """Return each prediction set, the most probable class first; of a large one the two most probable."""
        sizes = self.prediction_set.sum(axis=1)
        best = np.argsort(-outputs.probabilities, axis=1, kind="stable")[:, :NEAREST]
        return [row[: size if size <= NEAREST else 2] for row, size in zip(best.tolist(), sizes, strict=True)]

    def columns(
        self, outputs: Outputs[FloatArray], classes: Sequence[str], *, top_k: int | None = None, **options: int | None
    ) -> dict[str, Any]:
        probabilities = np.ascontiguousarray(outputs.probabilities)
        return {
            "label": self.labels(classes),
            "class_index": self.class_index,
            "confidence": self.confidence,
            **(
                {"probabilities": probabilities}
                if top_k is None
                else {"top": [_most_probable(row, classes, top_k) for row in probabilities]}
            ),
            **super().columns(outputs, classes),
            "prediction_set": [
                tuple(map(classes.__getitem__, members.nonzero()[0].tolist())) for members in self.prediction_set
            ],
        }


def _most_probable(probabilities: FloatArray, classes: Sequence[str], count: int) -> list[dict[str, Any]]:
    best = np.argsort(-probabilities, kind="stable")[:count].tolist()
    return [{"label": classes[k], "probability": probabilities[k]} for k in best]


@dataclass(frozen=True)
class Calibration(BaseCalibration):
    decision_names = CLASSIFICATION_DECISIONS
    graph_inputs = ("alpha", "ambiguity_threshold", "coverage")

    entropies: Float[Tensor, " n"]  # predictive entropies, ascending, nats
    error_bounds: Float[Tensor, " n"]  # of images with at most this entropy, at most this fraction is wrong
    label_probabilities: Float[Tensor, " n"]  # of the true label, ascending
    labels: Int[Tensor, " n"]  # the true label of each entry of label_probabilities
    num_classes: int  # K

    def decide(self, outputs: Outputs[FloatArray], policy: ClassificationPolicy) -> Decisions:
        probabilities = outputs.probabilities
        images, class_index = np.arange(len(outputs)), probabilities.argmax(axis=1)
        prediction_set = probabilities >= self.quantile(policy.coverage)
        prediction_set[images, class_index] = True
        is_ood = self.is_ood(outputs, policy)
        with np.errstate(over="ignore"):  # A threshold may be beyond every float32.
            is_clear = outputs["predictive_entropy"] <= policy.ambiguity_threshold  # NaN is not.
        decision = np.where(is_clear, np.int8(CODE_ACCEPT), np.int8(ABSTAIN_AMBIGUOUS))
        decision[is_ood] = ABSTAIN_OOD
        return Decisions(
            is_ood=is_ood,
            decision=decision,
            class_index=class_index,
            confidence=probabilities[images, class_index],
            prediction_set=prediction_set,
        )

    def decide_in_graph(
        self, scores: Mapping[str, Tensor], probabilities: Tensor, given: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        rank, is_kept = self.rank_in_graph(given["coverage"])
        smallest = torch.where(is_kept, self.label_probabilities[len(self) - rank], -torch.inf)
        confidence, class_index = probabilities.max(dim=1)
        is_best = torch.arange(self.num_classes) == class_index[:, None]
        is_ood = self.is_ood_in_graph(scores["ood_p_value"], given["alpha"])
        is_clear = scores["predictive_entropy"] <= given["ambiguity_threshold"]
        decision = torch.where(is_ood, ABSTAIN_OOD, torch.where(is_clear, CODE_ACCEPT, ABSTAIN_AMBIGUOUS))
        return {
            "probabilities": probabilities,
            "class_index": class_index,
            "confidence": confidence,
            "is_ood": is_ood,
            "decision": decision,
            "prediction_set": (probabilities >= smallest) | is_best,
        }

    def check_classes(self, count: int) -> None:
        if self.num_classes != count:
            raise BundleError(
                f"expected a calibration of {count} classes, got one of {self.num_classes}; fit the bundle again"
            )

    def entropy_quantiles(self) -> list[float]:
        return [float(value) for value in torch.quantile(self.entropies.cpu(), torch.linspace(0.0, 1.0, 101))]

    def changed(self, policy: BasePolicy, changes: Mapping[str, float]) -> BasePolicy:
        changed = super().changed(policy, changes)
        threshold, before = changes.get("ambiguity_threshold"), policy.model_dump()
        if threshold is None or (threshold == before["ambiguity_threshold"] and before["risk"] is not None):
            return changed
        # Another threshold was not chosen by the errors of the calibration images, so their bound holds for it.
        accepted = int((self.entropies <= threshold).sum())
        bound = float(self.error_bounds[accepted - 1]) if accepted else 1.0
        return changed.model_copy(update={"risk": bound if bound < 1 else None})

    def quantile(self, coverage: float) -> float:
        """Return the smallest probability with which a class is in a prediction set."""
        check_rates(len(self), coverage=coverage)
        return float(self._label_probabilities[len(self) - conformal_rank(coverage, len(self))])

    @cached_property
    def _label_probabilities(self) -> npt.NDArray[Any]:  # An array is read in less time than a tensor.
        return self.label_probabilities.numpy(force=True)

    @classmethod
    def check_tensors(cls, tensors: Mapping[str, Tensor]) -> None:
        scores = [tensors[name] for name in ("ood_scores", "entropies", "label_probabilities")]
        labels, classes = tensors["labels"], tensors["num_classes"]
        check_ascending(scores)
        if labels.shape != scores[0].shape:
            raise BundleError(
                f"expected a label for each of {len(scores[0])} calibration images, got labels of shape "
                f"{tuple(labels.shape)}; fit it again"
            )
        if classes.dtype != torch.int64 or classes.ndim:
            raise BundleError(f"expected one int64 num_classes of the calibration, got {classes.dtype} {classes.shape}")
        if labels.dtype != torch.int64 or labels.min() < 0 or labels.max() >= classes:
            raise BundleError(
                f"expected int64 calibration labels 0 … {int(classes) - 1}, got {labels.dtype} "
                f"{int(labels.min())} … {int(labels.max())}; fit it again"
            )
        bounds = tensors["error_bounds"]
        if bounds.dtype != torch.float32 or bounds.shape != scores[0].shape or not bool(bounds.isfinite().all()):
            raise BundleError(
                f"expected float32 error_bounds, one for each of {len(scores[0])} calibration images, got "
                f"{bounds.dtype} of shape {tuple(bounds.shape)}, or some that are not finite; fit it again"
            )
        limits = ((-MAX_SCORE, MAX_SCORE), (0.0, math.log(max(int(classes), 1))), (0.0, 1.0), (0.0, 1.0))
        names = ("ood_scores", "entropies", "label_probabilities", "error_bounds")
        for name, part, (low, high) in zip(names, (*scores, bounds), limits, strict=True):
            check_range(name, part, low, high, rounding=FLOAT32_ROUNDING)


@dataclass(frozen=True, repr=False, eq=False)
class ClassificationPrediction(BasePrediction):
    """Predictions of a classifier for n images, on the CPU.

    Examples:
        >>> from psc_core import PSC
        >>> bundle = "artifacts/dirty-mnist-resnet18"
        >>> prediction = PSC.load(bundle).predict([f"{bundle}/examples/clean.png"])
        >>> prediction.labels, prediction.prediction_set, prediction.predictive_entropy < 0.1
        (('7',), (('7',),), tensor([True]))
        >>> prediction
        ClassificationPrediction for 1 image: 1 accept
           label  confidence  entropy  log density  p-value  decision
        0      7       1.000    0.001       620.02   0.8978    accept
    """

    answer = ClassificationAnswer

    decisions: Decisions

    @property
    def predictive_entropy(self) -> Tensor:
        """``float32 (n,)`` nats; high where the image is ambiguous."""
        return self.outputs["predictive_entropy"]

    @property
    def epistemic(self) -> Tensor:
        """``float32 (n,)`` in the model's ``epistemic_unit``; 0 for the original network's predictions."""
        return self.outputs["epistemic"]

    @property
    def class_index(self) -> Tensor:
        """``int64 (n,)`` the most probable class."""
        return torch.from_numpy(self.decisions.class_index)

    @property
    def labels(self) -> tuple[str, ...]:
        """The name of the most probable class, for each image."""
        return tuple(self.decisions.labels(self.classes))

    @property
    def confidence(self) -> Tensor:
        """``float32 (n,)`` probability of the most probable class."""
        return torch.from_numpy(self.decisions.confidence)

    @property
    def probabilities(self) -> Tensor:
        """``float32 (n, K)`` probabilities of all classes."""
        return self.outputs.probabilities

    @property
    def prediction_set(self) -> tuple[tuple[str, ...], ...]:
        """The set of classes that contains the true one with the bundle's coverage, for each image."""
        return tuple(self._columns()["prediction_set"])


RISK_CONFIDENCE: Final = 0.95  # probability over calibration sets with which the error rate of clear images is kept
LARGEST_QUANTILE: Final = 0.95  # even a perfect classifier abstains on its most uncertain images


def fit_calibration(
    ood_score: Float[Tensor, " n"],  # nats, higher is more out-of-distribution
    entropy: Float[Tensor, " n"],  # predictive entropies, nats
    probabilities: Float[Tensor, "n classes"],
    labels: Int[Tensor, " n"],
    weights: Float[Tensor, " n"] | None = None,  # how many images each stands for
) -> Calibration:
    """Collect the scores of calibration images, as the served pipeline computes them.

    An image with several labels counts once: repeated ones would make n too large, and the guarantees void.
    """
    given = probabilities.gather(1, labels[:, None])[:, 0].float()
    check_finite({"OOD scores": ood_score, "entropies": entropy, "probabilities": given})
    order = equal_scores(-given, weights).flip(0)
    entropies = entropy.float()[equal_scores(entropy.float(), weights)]
    drawn = slice(None) if weights is None else thin(weights)  # Bounds need independent images.
    errors = Errors.of(entropy.float()[drawn], (probabilities.argmax(1) == labels)[drawn])
    return Calibration(
        ood_scores=ood_score.float()[equal_scores(ood_score.float(), weights)],
        entropies=entropies,
        error_bounds=errors.bounds_at(entropies),
        label_probabilities=given[order],
        labels=labels[order],
        num_classes=probabilities.shape[1],
    )


class Errors(NamedTuple):
    """How many images are accepted, and how many of these are wrong, by thresholds of the entropy.

    The thresholds are the entropies of n images, ascending; of equal ones the last, as these are accepted together.
    """

    entropies: Float[Tensor, " m"]  # nats, float64
    accepted: Int[Tensor, " m"]
    wrong: Int[Tensor, " m"]

    @classmethod
    def of(cls, entropy: Float[Tensor, " n"], correct: Bool[Tensor, " n"]) -> Errors:
        """Count them from the predictive entropies and whether the most probable class was the label."""
        ascending, order = entropy.double().sort(stable=True)
        last = torch.cat([ascending[1:] > ascending[:-1], torch.ones(1, dtype=torch.bool)])[: len(ascending)]
        wrong = (~correct)[order].cumsum(0)
        return cls(ascending[last], torch.arange(1, len(ascending) + 1)[last], wrong[last])

    def bounds(self, confidence: float) -> Float[Tensor, " m"]:
        """Return the Clopper–Pearson bound on the error rate of the images below each threshold, float64.

        Given the k-th smallest entropy the k − 1 images below it are independent draws from all images below it; its
        own image counts as an error of these if it is one.
        """
        from scipy import stats  # Imported here, so that a service does not load it.

        correct_below = (self.accepted - 1 - self.wrong).clamp(min=0)
        return torch.from_numpy(stats.beta.ppf(confidence, self.wrong + 1, correct_below)).nan_to_num(nan=1.0)

    def bounds_at(self, thresholds: Float[Tensor, " t"]) -> Float[Tensor, " t"]:
        """Return the bounds, with :data:`RISK_CONFIDENCE`, below any ascending thresholds, float32; 1 where none is."""
        bounds = torch.cat([torch.ones(1, dtype=torch.float64), self.bounds(RISK_CONFIDENCE)])
        return bounds[torch.searchsorted(self.entropies, thresholds.double(), right=True)].float()

    def threshold(self, risk: float, confidence: float = RISK_CONFIDENCE) -> float | None:
        """Return the largest entropy below which images are wrong at a rate of at most ``risk``, in nats.

        With ``confidence`` over calibration sets this holds.  The entropies are tested as thresholds in ascending
        order, each by its bound, until one fails (fixed-sequence testing: Bauer 1991; Angelopoulos et al. 2021): every
        test has its level, and a threshold that is too large passes only if the first one that is does.  Which are
        tested depends on the entropies alone.
        """
        check_fraction(risk, "risk")
        count = int(self.accepted[-1]) if len(self.accepted) else 0
        first, largest = first_test(count, risk, confidence), tolerant_ceil((count + 1) * LARGEST_QUANTILE)
        below = torch.cat([self.accepted.new_zeros(1), self.accepted])[:-1]
        # Equal entropies may span both limits: those of a sure network are 0.
        is_first = (below < first) & (below < largest)
        tested = (self.accepted >= first) & ((self.accepted <= largest) | is_first)
        passed = int((self.bounds(confidence)[tested] <= risk).cumprod(0).sum())
        return float(self.entropies[tested][passed - 1]) if passed else None

    def lowest(self, risks: Sequence[float]) -> tuple[float, float] | None:
        """Return the lowest of ``risks`` that a threshold keeps, and that threshold; None if none of them is kept.

        Each of m risks is tested with the confidence 1 − (1 − :data:`RISK_CONFIDENCE`) / m (Bonferroni), so that the
        one which is chosen holds with :data:`RISK_CONFIDENCE`.
        """
        confidence = 1 - (1 - RISK_CONFIDENCE) / len(risks)
        found = ((risk, self.threshold(risk, confidence)) for risk in sorted(risks))
        return next(((risk, threshold) for risk, threshold in found if threshold is not None), None)


def first_test(count: int, risk: float, confidence: float = RISK_CONFIDENCE) -> int:
    """Return the number of images that the smallest threshold accepts.

    It is four times as many as pass without an error, so that a single one does not end the tests, but at most half of
    the images where half of them are enough.
    """
    minimum = fewest(risk, confidence)
    return max(minimum, min(4 * minimum, count // 2))


def fewest(risk: float, confidence: float = RISK_CONFIDENCE) -> int:
    """Return the number of images that pass without an error."""
    return math.ceil(math.log(1 - confidence) / math.log(1 - risk)) + 1


def fewest_to_show(risk: float) -> int:
    """Return the number of images that show a threshold if none is wrong: a test accepts only a part of them."""
    return next(n for n in count_from(fewest(risk)) if tolerant_ceil((n + 1) * LARGEST_QUANTILE) >= fewest(risk))


ACCURACY_GAP: Final = 0.1  # loss of accuracy from training to validation images up to which no warning is given


class Classification(Task):
    """The task of a classifier: one class of several for each image."""

    name = "classification"
    noun = "classifier"
    response_type = ClassificationResponse
    answer_type = ClassificationAnswer
    policy_type = ClassificationPolicy
    query_type = ClassificationQuery
    calibration_type = Calibration
    prediction_type = ClassificationPrediction
    output_heads: ClassVar = {TemperatureHead.kind: TemperatureHead}
    heads: ClassVar[Mapping[str, type[ClassifierHead]]] = {head.kind: head for head in (LaplaceHead, SngpHead, DuqHead)}
    abstentions: ClassVar = {"ood": ABSTAIN_OOD, "ambiguous": ABSTAIN_AMBIGUOUS}
    limits: ClassVar = {**Task.limits, "ambiguity_threshold": "predictive_entropy"}
    tensors: ClassVar[Mapping[str, Datatype]] = {
        "probabilities": "FP32",
        **dict.fromkeys((*CLASSIFICATION_SCORES, CHECKS_OUTPUT), "FP32"),
        "is_ood": "BOOL",
        "decision": "INT64",
        "label": "BYTES",
        "class_index": "INT64",
    }
    explained = ("nearest_class", "class_distances")
    own_settings = ("risk", "head_input")
    compares_network_output = True

    @classmethod
    def takes(cls, data: ImageDataset) -> bool:
        return data.target is None

    @classmethod
    def check(cls, settings: FitSettings, images: int) -> None:
        super().check(settings, images)
        if settings.risk is not None and images < fewest_to_show(settings.risk):
            raise UsageError(
                f"a risk of {settings.risk:g} cannot be shown with {images} calibration images, even if all are right: "
                f"it takes {fewest_to_show(settings.risk)} of them, twice as many validation images; give more, or ask "
                "for a higher risk, or for auto"
            )
        if settings.predictions == "original":
            for name, default in (("head", next(iter(cls.heads))), ("head_input", DEFAULTS.head_input)):
                if getattr(settings, name) not in (None, default):
                    raise UsageError(
                        f"expected no {name} beside predictions 'original', which are the network's own; leave one out"
                    )

    @classmethod
    def fit_head(
        cls, train: Features, selection: Features, settings: FitSettings, device: torch.device
    ) -> ClassifierHead:
        """Return the head, the network's own logits with a temperature, or the better of both."""
        kind = cls.heads[settings.head_of(cls.heads)]
        if selection.network_output is None:
            return fit_head(train, selection, kind, settings.seed, device)
        logits = selection.network_output[:]
        tempered = fit_temperature_head(logits, selection.labels).to(device)
        if settings.predictions == "original":
            return tempered
        head = fit_head(train, selection, kind, settings.seed, device)
        read = (selection.head_input[:], logits, selection.labels, selection.images)
        return better_of(head, tempered, *(part.to(device) for part in read))

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
        """Return calibration scores, and the entropy below which the error rate ``settings.risk`` is kept.

        Without a risk it is the lowest of :data:`.RISKS` that can be shown; where none can, nothing is accepted.
        An image with several labels counts once, with its first.  Metrics and that entropy need independent images, so
        weighted ones are thinned for them.
        """
        labels, entropies = images.first_labels(), scored.scores["predictive_entropy"]
        calibration = fit_calibration(ood_score, entropies, scored.probabilities, labels, weights)
        if weights is not None:
            kept = thin(weights)
            scored, labels, entropies = scored.at(kept), labels[kept], entropies[kept]
        errors = Errors.of(entropies, scored.probabilities.argmax(1) == labels)
        risk, threshold = _shown(errors, settings.risk, or_higher=or_higher)
        policy = ClassificationPolicy(
            alpha=settings.alpha, ambiguity_threshold=threshold, coverage=settings.coverage, risk=risk
        )
        return Calibrated(calibration, policy, {**calibration_metrics(scored, labels), "risk_asked": settings.risk})

    @classmethod
    def first_evaluation(
        cls, net: Callable[[Tensor], Tensor], train: ImageDataset, val: ImageDataset, compute: Compute
    ) -> FirstEvaluation:
        (of_train, _, nan_train), (of_val, predicted, nan_val) = (
            network_accuracy(net, data, compute) for data in (train, val)
        )
        text = (
            f"the original network: accuracy {of_train:.3f} on training and {of_val:.3f} on validation images (at most "
            f"{FIRST_EVALUATION_IMAGES:,} of each)"
        )
        if broken := nan_train + nan_val:
            return FirstEvaluation(
                text,
                f"the original network gives NaN on {broken} of {len(train) + len(val)} images; check its weights and "
                "the preprocessing",
            )
        if not metrics.better_than_guessing(predicted, val.first_labels()):
            why = "its weights, the preprocessing or the order of the classes are wrong"
            if metrics.has_another_order(predicted, val.first_labels()):
                why = "the classes seem to be in another order; name them in the order of its outputs"
            return FirstEvaluation(text, f"{GUESSES}, {why}")
        if of_val < of_train - ACCURACY_GAP:
            return FirstEvaluation(
                text,
                "validation images are much harder for it: it has learnt the training images by heart "
                "(overfitting), or they are prepared in another way",
            )
        return FirstEvaluation(f"{text}; if it should be higher, check the preprocessing")

    def agreements(self, manifest: Any) -> Sequence[Agreement]:
        head, classes = manifest.head, len(manifest.network_classes)
        is_own = head.kind in self.output_heads
        return (
            ("predictions", "original" if is_own else "psc", manifest.predictions),
            ("head.sizes.classes", classes, classes if is_own else head.sizes.get("classes")),
            ("head.layers (of a classifier)", list(manifest.layers) if head.layers else [], head.layers),
        )

    def tensor(
        self, name: str, outputs: Outputs[FloatArray], decisions: BaseDecisions, classes: Sequence[str]
    ) -> npt.NDArray[Any] | Sequence[str]:
        if name == "label":
            return [classes[index] for index in decisions.label_index]
        return super().tensor(name, outputs, decisions, classes)

    @classmethod
    def evaluator(cls) -> Evaluator[Any, Any, Any]:
        from psc_core.evaluation.classification import ClassificationEvaluator

        return ClassificationEvaluator()

    @classmethod
    def report(cls) -> TaskReport[Any, Any]:
        from psc_core.report.tasks import ClassificationTaskReport

        return ClassificationTaskReport()

    def explain_head(
        self, explanation: Mapping[str, npt.NDArray[Any]], image: int, layers: Sequence[str]
    ) -> dict[str, Any]:
        parts = ("aleatoric", "epistemic")  # None if the head does not split its uncertainty
        return {name: float(explanation[name][image]) if name in explanation else None for name in parts}


def fit_head(
    train: Features, selection: Features, head: type[ClassifierHead], seed: int, device: torch.device
) -> ClassifierHead:
    """Fit a head to training features; every free number is chosen by the NLL of the selection split."""
    classes, shown = train.classes, train.images
    z, selection_z = train.head_input.to(device), selection.head_input[:].to(device)
    labels, selection_labels = train.labels.to(device), selection.labels.to(device)
    check_features(z, labels, num_classes=len(classes), class_names=classes, minimum=1)
    check_features(selection_z, selection_labels, num_classes=len(classes), class_names=classes, minimum=0)
    standardisation = fit_standardisation(z, train.widths)
    data = ClassifierData(
        train=standardisation(z),
        train_labels=labels,
        weights=shown.bincount()[shown].double().reciprocal().to(device),
        selection=in_memory(standardisation(selection_z)),
        selection_labels=selection_labels,
        num_classes=len(classes),
        seed=seed,
        standardisation=standardisation,
    )
    return head.fit(data).to(device)


def _shown(errors: Errors, asked: float | None, *, or_higher: bool) -> tuple[float | None, float]:
    """Return the risk that is promised and its threshold; None and :data:`.ACCEPTS_NOTHING` if none is shown."""
    risks = RISKS if asked is None else (asked, *(risk for risk in RISKS if risk > asked and or_higher))
    found = errors.lowest(risks)
    if found is None and asked is not None and not or_higher:
        other = errors.lowest(RISKS)
        remedy = f"risk auto takes {other[0]:g}" if other else "with risk auto nothing is accepted"
        if not other and (higher := errors.lowest([percent / 100 for percent in range(21, 100)])):
            remedy = f"the lowest that can be shown is {higher[0]:g}; {remedy}"
        wrong, count = (int(part[-1]) if len(part) else 0 for part in (errors.wrong, errors.accepted))
        raise UsageError(
            f"a risk of {asked:g} cannot be shown with {count} images, of which {wrong} are wrong: no entropy "
            f"threshold keeps it, which takes at least {fewest_to_show(asked)} accepted images with few errors; "
            f"{remedy} (--risk auto, in Python risk=None)"
        )
    return found or (None, ACCEPTS_NOTHING)


def calibration_metrics(scored: Scored, labels: Tensor) -> dict[str, Any]:
    """Return metrics of the calibration split, which selected nothing that they measure."""
    probabilities = scored.probabilities.double()
    confidence, predicted = probabilities.max(1)
    return {
        "validation_images": len(labels),
        "accuracy": metrics.accuracy(probabilities, labels),
        LARGEST_CLASS: float(labels.bincount().double().max()) / len(labels),
        BETTER_THAN_GUESSING: metrics.better_than_guessing(predicted, labels),
        "nll_nats": metrics.nll(probabilities, labels),
        "ece": metrics.ece(confidence, predicted == labels),
        "mean_entropy_nats": float(scored.scores["predictive_entropy"].double().mean()),
    }


def network_accuracy(
    net: Callable[[Tensor], Tensor], data: ImageDataset, compute: Compute
) -> tuple[float, Int[Tensor, " n"], int]:
    """Return the original network's accuracy, what it predicts, and on how many images it gives NaN.

    Of an image with several labels the fraction that is predicted counts.
    """
    labels, outputs = data.offsets.diff(), run_network(net, data, compute)
    predicted = outputs.argmax(1)
    hits = predicted.repeat_interleave(labels) == data.labels
    accuracy = float((hits / labels.repeat_interleave(labels)).sum()) / len(data)
    return accuracy, predicted, int(outputs.isnan().any(1).sum())
