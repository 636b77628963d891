"""What every task shares: outputs, decisions, calibration, predictions in Python, and the :class:`Task` itself.

The network's step packs what it computes for n images into one matrix, so that one copy brings it to the host: a column
for each score of the task, then K probabilities (0 for a task without them), then the p-value of each check; float32,
(n, S + K + G).  A calibration turns outputs into decisions under a policy.
"""

from __future__ import annotations

import reprlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from functools import cached_property, partial
from html import escape
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, Literal, NamedTuple, TypeVar, get_args

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float, Int
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from psc_core.answers import ASKED_FOR, BaseAnswer, BasePolicy, PredictQuery, Response, Target
from psc_core.collapse import LayerQuality, NearestMean
from psc_core.compute import Compute, passes
from psc_core.conformal import check_rates, decision_p_value, ood_score_threshold
from psc_core.data.dataset import ImageDataset
from psc_core.data.open import check_same
from psc_core.errors import BundleError, DataError, UsageError, join_names, needs
from psc_core.heads.base import Features, Head, Scored
from psc_core.settings import DEFAULTS, OWNERS, FitSettings
from psc_core.text import align, compose

if TYPE_CHECKING:
    from pandas import DataFrame

    from psc_core.evaluation.evaluate import Evaluator
    from psc_core.report.content import TaskReport


FloatArray = npt.NDArray[np.float32]
Matrix = TypeVar("Matrix", Tensor, FloatArray)


@dataclass(frozen=True)
class Outputs(Generic[Matrix]):
    """A packed matrix, read by name; what it returns are views."""

    packed: Matrix  # float32 (n, S + K + G)
    scores: Sequence[str]  # names of its scores
    checks: Sequence[str]  # names of the model's checks

    def __len__(self) -> int:
        return len(self.packed)

    def __getitem__(self, score: str) -> Matrix:
        return self.packed[:, self.scores.index(score)]

    @property
    def probabilities(self) -> Matrix:
        return self.packed[:, len(self.scores) : self.packed.shape[1] - len(self.checks)]

    @property
    def check_p_values(self) -> Matrix:
        return self.packed[:, self.packed.shape[1] - len(self.checks) :]


def pack(
    names: Sequence[str],
    scores: Mapping[str, Float[Tensor, " batch"]],
    probabilities: Float[Tensor, "batch classes"],
    check_p_values: Sequence[Float[Tensor, "batch checks"]] = (),
) -> Float[Tensor, "batch columns"]:
    """Return the packed matrix; ``check_p_values`` has at most one entry."""
    return torch.cat([*(scores[name][:, None] for name in names), probabilities, *check_p_values], dim=1)


GRAPH_ROUNDING: Final = 1e-3  # of a rank, because a graph's thresholds are float32

AnyDecisions = TypeVar("AnyDecisions", bound="BaseDecisions")


@dataclass(frozen=True, kw_only=True, eq=False)
class BaseDecisions:
    """The decisions on n images; every field is an array with a row for each image."""

    decision_names: ClassVar[tuple[str, ...]]  # the ``DECISIONS`` of the task's answer

    is_ood: npt.NDArray[np.bool_]  # (n,) p-value ≤ alpha
    decision: npt.NDArray[np.int8]  # (n,) positions in :attr:`decision_names`

    def __len__(self) -> int:
        return len(self.decision)

    def at(self: AnyDecisions, images: slice | Sequence[int] | npt.NDArray[Any]) -> AnyDecisions:
        """Return the decisions on some of the images: a slice, their positions, or a mask."""
        return type(self)(**{each.name: getattr(self, each.name)[images] for each in fields(self)})

    def labels(self, classes: Sequence[str]) -> Sequence[str | None]:
        """Return the one label of each image's answer; None for a task whose answer has none."""
        return [None] * len(self)

    def likely_classes(self, outputs: Outputs[FloatArray]) -> Sequence[Sequence[int]]:
        """Return the classes whose stored training images explain each answer best; empty where it names none."""
        return [()] * len(self)

    @property
    def label_index(self) -> npt.NDArray[np.int64]:
        """The index of each image's label among :meth:`Task.metric_labels`."""
        return np.zeros(len(self), np.int64)

    def columns(self, outputs: Outputs[FloatArray], classes: Sequence[str], **options: int | None) -> dict[str, Any]:
        """Return each field of the n answers by name, as in the JSON: an array, images first, or a value for each.

        A task adds its own to these, which all have; ``checks`` is left out for a model without checks.
        """
        columns: dict[str, Any] = dict(zip(outputs.scores, outputs.packed.T, strict=False))
        if outputs.checks:
            columns["checks"] = list(map(dict, map(partial(zip, outputs.checks), outputs.check_p_values)))
        columns["is_ood"] = self.is_ood
        columns["decision"] = list(map(self.decision_names.__getitem__, self.decision.tolist()))
        return columns

    def documents(
        self, outputs: Outputs[FloatArray], classes: Sequence[str], **options: int | None
    ) -> list[dict[str, Any]]:
        """Return one answer for each image, in a form that orjson can write, see :meth:`columns`."""
        columns = self.columns(outputs, classes, **options)
        # Not strict: past the end of each array, numpy would raise an IndexError, which takes a microsecond.
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=False)]


@dataclass(frozen=True)
class BaseCalibration(ABC):
    """Scores of n calibration images, float32, each sorted separately, by which a policy becomes decisions."""

    decision_names: ClassVar[tuple[str, ...]]  # of :meth:`decide`
    graph_inputs: ClassVar[tuple[str, ...]] = ()  # thresholds of the policy that an exported graph takes

    ood_scores: Float[Tensor, " n"]  # OOD scores, ascending, nats

    def __len__(self) -> int:
        return self._count

    @cached_property
    def _count(self) -> int:  # Requests ask for it several times, and a tensor takes longer to tell it.
        return len(self.ood_scores)

    def ood_score_threshold(self, alpha: float) -> float:
        """Return the OOD score (nats) above which p ≤ α, exactly, even where the rounding of p matters."""
        return ood_score_threshold(self.ood_scores, alpha)

    def entropy_quantiles(self) -> list[float] | None:
        """Return the 0, 1, …, 100 % quantiles of the predictive entropies, nats; None where the task has none."""
        return None

    def check_classes(self, count: int) -> None:  # noqa: B027 (scores of bins need no check)
        """Raise :class:`BundleError` for scores of another number of classes."""

    def changed(self, policy: BasePolicy, changes: Mapping[str, float]) -> BasePolicy:
        """Return the policy with other values of some thresholds, and of what these promise."""
        return policy.model_copy(update=dict(changes))

    def check(self, policy: BasePolicy) -> None:
        """Raise :class:`UsageError` for a policy that so few calibration images cannot keep."""
        check_rates(len(self), alpha=policy.alpha, coverage=policy.coverage)

    def is_ood(self, outputs: Outputs[FloatArray], policy: BasePolicy) -> npt.NDArray[np.bool_]:
        """Return which of n images are out of distribution under a policy."""
        return outputs["ood_p_value"] <= decision_p_value(policy.alpha, len(self))

    @abstractmethod
    def decide(self, outputs: Outputs[FloatArray], policy: Any) -> BaseDecisions:
        """Return the decisions on n images under a policy of the task."""

    def decide_in_graph(
        self, scores: Mapping[str, Tensor], probabilities: Tensor, given: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return the fields of :meth:`decide`, and others, in operations that an exported graph has."""
        raise UsageError("a model of this task cannot be exported, as its calibration has no decide_in_graph")

    def is_ood_in_graph(self, p_value: Float[Tensor, " batch"], alpha: Float[Tensor, ""]) -> Bool[Tensor, " batch"]:
        """Return :meth:`is_ood`, likewise; all images are where no p-value is as small as alpha."""
        rank = torch.floor(alpha * (len(self) + 1) + GRAPH_ROUNDING)
        return (p_value <= (rank + 0.5) / (len(self) + 1)) | ~(rank >= 1)

    def rank_in_graph(self, coverage: Float[Tensor, ""]) -> tuple[Int[Tensor, ""], Bool[Tensor, ""]]:
        """Return the rank of the conformal quantile, likewise, and whether so few images can keep the coverage."""
        rank = coverage * (len(self) + 1) - GRAPH_ROUNDING
        return torch.ceil(rank).long().clamp(1, len(self)), rank <= len(self)

    @abstractmethod
    def quantile(self, coverage: float) -> float:
        """Return the conformal quantile that bounds prediction sets or intervals of this nominal coverage."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the fields by name, for a safetensors file."""
        return {each.name: torch.as_tensor(getattr(self, each.name)) for each in fields(self)}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> BaseCalibration:
        """Return the calibration whose :meth:`tensors` these are; raises :class:`BundleError` for others."""
        names = sorted(each.name for each in fields(cls))
        if sorted(tensors) != names:
            raise BundleError(f"expected calibration tensors {names}, got {reprlib.repr(sorted(tensors))}")
        cls.check_tensors(tensors)
        values: dict[str, Any] = {name: tensor if tensor.ndim else tensor.item() for name, tensor in tensors.items()}
        return cls(**values)

    @classmethod
    @abstractmethod
    def check_tensors(cls, tensors: Mapping[str, Tensor]) -> None:
        """Raise :class:`BundleError` for tensors of the fields that no calibration has."""


SHOWN: Final = 10  # maximum number of images that the text of predictions shows
Positions = int | np.integer[Any] | slice | Sequence[int] | npt.NDArray[Any] | Tensor  # an image, or some
AnyPrediction = TypeVar("AnyPrediction", bound="BasePrediction")


@dataclass(frozen=True, repr=False, eq=False)
class BasePrediction:
    """Predictions for n images, on the CPU.

    Examples:
        >>> from psc_core import PSC
        >>> bundle = "artifacts/dirty-mnist-resnet18"
        >>> prediction = PSC.load(bundle).predict([f"{bundle}/examples/{name}.png" for name in ("clean", "shirt")])
        >>> isinstance(prediction, BasePrediction), prediction[prediction.ood_p_value.argsort()].decision
        (True, ('abstain_ood', 'accept'))

    Attributes:
        outputs: The outputs of the network step.
        decisions: The decisions under the bundle's policy.
        classes: The names of the classes; of a regression, of the bins of its target.
        maps: ``uint8 (n, rows, columns)``: how unusual each part of the images is, at most 255; None unless asked
            for.  One in ``10^(4g/255)`` positions of in-distribution images has the grey level g or more.
    """

    answer: ClassVar[type[BaseAnswer]]

    outputs: Outputs[Tensor]
    decisions: BaseDecisions
    classes: tuple[str, ...]
    maps: Tensor | None = field(default=None, kw_only=True)

    def __len__(self) -> int:
        return len(self.outputs)

    def __getitem__(self: AnyPrediction, images: Positions) -> AnyPrediction:
        # Positions by numpy's rules, once for all parts: torch takes bytes for a mask, and no negative step.
        index = images.cpu().numpy() if isinstance(images, Tensor) else images
        if not isinstance(index, slice) and not np.size(index):
            index = np.empty(0, np.int64)  # [] would be of floats.
        at = np.ascontiguousarray(np.arange(len(self))[index]).reshape(-1)
        decisions = self.decisions.at(at)
        rows = torch.from_numpy(at)
        maps = None if self.maps is None else self.maps[rows]
        outputs = replace(self.outputs, packed=self.outputs.packed[rows])
        return replace(self, outputs=outputs, decisions=decisions, maps=maps)

    @property
    def log_density(self) -> Tensor:
        """``float32 (n,)`` log density of the features, nats."""
        return self.outputs["log_density"]

    @property
    def ood_score(self) -> Tensor:
        """``float32 (n,)`` what the decision rests on, nats; higher is more unusual."""
        return self.outputs["ood_score"]

    @property
    def ood_p_value(self) -> Tensor:
        """``float32 (n,)`` fraction of calibration images that are at least as unusual."""
        return self.outputs["ood_p_value"]

    @property
    def checks(self) -> dict[str, Tensor]:
        """The p-value of each check, ``float32 (n,)``, by name; empty for a model without checks."""
        return dict(zip(self.outputs.checks, self.outputs.check_p_values.T, strict=True))

    @property
    def is_ood(self) -> Tensor:
        """``bool (n,)``: whether the p-value is at most the bundle's α."""
        return torch.from_numpy(self.decisions.is_ood)

    @property
    def decision(self) -> tuple[str, ...]:
        """The name of each image's decision."""
        return tuple(self.decisions.decision_names[code] for code in self.decisions.decision.tolist())

    def columns(self) -> dict[str, list[Any]]:
        """Return the fields of the task's answer by name, each with a value of JSON types for every image."""
        return {
            name: column.tolist() if isinstance(column, np.ndarray) else [*map(_plain, column)]
            for name, column in self._columns().items()
        }

    def to_dict(self) -> list[dict[str, Any]]:
        """Return a dictionary for each image, of JSON types: the answer of ``POST /predict`` for it."""
        columns = self.columns()
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def to_pandas(self) -> DataFrame:
        """Return a table with a row for each image and a column for each field, ``checks.NAME`` for each check.

        Raises:
            UsageError: If pandas is not installed.
        """
        pandas = needs("to_pandas", "pandas", "pandas")
        cells: dict[str, Any] = {}
        for name, column in self._columns().items():
            if name == "checks":
                cells |= {f"checks.{check}": p_values.numpy() for check, p_values in self.checks.items()}
            else:
                cells[name] = column if getattr(column, "ndim", 1) == 1 else column.tolist()
        table: DataFrame = pandas.DataFrame(cells)
        return table

    def _columns(self) -> dict[str, Any]:
        """Return the fields of the task's answer by name, in the order of their declaration."""
        outputs = Outputs(self.outputs.packed.numpy(), self.outputs.scores, self.outputs.checks)
        columns = self.decisions.columns(outputs, self.classes)
        return {name: columns[name] for name in self.answer.model_fields if name in columns}

    def __repr__(self) -> str:
        table = self._table()
        lines = align(table, left=()) if table else []
        return "\n".join([self._title(), *lines, *self._rest()])

    def _repr_html_(self) -> str:  # The same for a notebook.
        head, *rows = self._table() or [[]]
        cells = ["".join(f"<th>{escape(cell)}</th>" for cell in head)]
        cells += ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
        table = "".join(f"<tr>{row}</tr>" for row in cells)
        return f"<p>{escape(self._title())}</p><table>{table}</table><p>{escape(''.join(self._rest()))}</p>"

    def _title(self) -> str:
        counts = Counter(self.decision)
        counted = ", ".join(f"{counts[name]} {name}" for name in self.decisions.decision_names if counts[name])
        return f"{type(self).__name__} for {len(self)} image{'s' * (len(self) != 1)}{': ' * bool(counted)}{counted}"

    def _table(self) -> list[list[str]]:
        """Return the titles of the columns and a row for each of the first images; empty without images."""
        # An answer with NaN is shown, not refused.
        rows = [self.answer.model_construct(**row).cells() for row in self[:SHOWN].to_dict()]
        return [["", *rows[0]], *([str(index), *row.values()] for index, row in enumerate(rows))] if rows else []

    def _rest(self) -> list[str]:
        return [f"… {len(self) - SHOWN} more"] if len(self) > SHOWN else []


def _plain(cell: Any) -> Any:
    if isinstance(cell, dict):
        return {name: float(number) for name, number in cell.items()}
    return list(cell) if isinstance(cell, tuple) else cell


Agreement = tuple[str, object, object]  # a field of the manifest by its place in the JSON, what it should be, and is
Datatype = Literal["FP32", "INT64", "UINT8", "BOOL", "BYTES"]  # of a tensor of the Open Inference Protocol
CHECKS_OUTPUT: Final = "checks"  # the tensor of the checks' p-values, in the order of a model's checks
UNUSUAL_COMPONENTS: Final = 5  # how many components an explanation names
FIRST_EVALUATION_IMAGES: Final = 1000  # of each set, that :meth:`Task.first_evaluation` is given at most


class Calibrated(NamedTuple):
    """A calibration, the policy that goes with it, and the metrics of the calibration split."""

    calibration: BaseCalibration
    policy: BasePolicy
    metrics: Mapping[str, Any]  # JSON types


class FirstEvaluation(NamedTuple):
    """How good the network is before anything is fitted to it."""

    text: str
    warning: str = ""
    rmse: float | None = None  # on validation images, of a regression


GUESSES: Final = "THE NETWORK IS NO BETTER THAN GUESSING ON VALIDATION IMAGES"


class Task(BaseModel, ABC):
    """What a model predicts: how that is fitted, decided, described and measured.

    A task is a value.  Its fields are what a manifest keeps of it, as the target of a regression; everything else is
    the same for all models of the task.  To add one, write a subclass, list it in :data:`psc_core.tasks.TASKS`, and
    declare its answer, policy and query as in :mod:`psc_core.answers`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: ClassVar[str]  # as ``--task`` takes it
    noun: ClassVar[str]  # for a model in messages: ``"classifier"``
    response_type: ClassVar[type[Response]]  # the answer to a request
    answer_type: ClassVar[type[BaseAnswer]]  # for one image in it
    policy_type: ClassVar[type[BasePolicy]]  # thresholds that a user sets
    query_type: ClassVar[type[PredictQuery]] = PredictQuery  # of a request
    calibration_type: ClassVar[type[BaseCalibration]]  # by which a policy becomes thresholds
    prediction_type: ClassVar[type[BasePrediction]]  # of ``predict`` in Python
    heads: ClassVar[Mapping[str, type[Head]]]  # the heads by kind; the first is the default
    output_heads: ClassVar[Mapping[str, type[Head]]] = {}  # those of the original network's predictions
    abstentions: ClassVar[Mapping[str, int]]  # the code of the decision for each reason to abstain
    limits: ClassVar[Mapping[str, str]] = {"alpha": "ood_p_value"}  # the score for each threshold of the policy
    tensors: ClassVar[Mapping[str, Datatype]]  # of the v2 protocol, by name, in order
    explained: ClassVar[tuple[str, str]]  # fields of an explanation: the nearest class or bin, the distances to all
    has_numbers: ClassVar[bool] = False  # whether an image has a number besides its class or bin
    layer_quality: ClassVar[type[LayerQuality]] = NearestMean  # measured besides NC1
    own_settings: ClassVar[tuple[str, ...]] = ()  # settings that not every task reads, but this one
    compares_network_output: ClassVar[bool] = False  # with the head's, unless settings decide
    why_not_extended: ClassVar[str] = ""  # by more images; empty where a density can be

    # The images of a fit.

    @classmethod
    @abstractmethod
    def takes(cls, data: ImageDataset) -> bool:
        """Return whether the images are labelled with what the task predicts."""

    @classmethod
    def of_images(cls, train: ImageDataset) -> Task:
        """Return the task of a model of these images; raises :class:`DataError` if they lack what it predicts."""
        return cls()

    @classmethod
    def labelled(cls, train: ImageDataset, val: ImageDataset) -> tuple[ImageDataset, ImageDataset]:
        """Return both, labelled with the classes that collapse, projection, density and checks work on."""
        return train, val.in_order(train.classes)

    @classmethod
    def check_half(cls, images: ImageDataset) -> None:
        """Raise :class:`DataError` if nothing can be measured on one half of the validation images."""

    @classmethod
    def describe_labels(cls, train: ImageDataset) -> str:
        """Return a phrase that says how the images are labelled."""
        return f"{len(train.classes)} classes"

    def check_images(self, classes: Sequence[str], data: ImageDataset) -> None:
        """Raise :class:`DataError` unless images are labelled with what a model of these ``classes`` predicts."""
        check_same(data, classes, "model's")

    def parse_label(self, text: str, classes: Sequence[str], marks: str = ".") -> str:
        """Return what a person says of an image as a log keeps it: one of the classes, unless a task says otherwise."""
        label = compose(text)
        if label not in classes:
            known, near = join_names(classes, 10), get_close_matches(label.casefold(), map(str.casefold, classes), 1)
            meant = [name for name in classes if name.casefold() in near]
            advice = f"did you mean {meant[0]!r}?" if meant else "correct the label"
            raise DataError(f"expected one of the model's classes ({known}), got {text!r}; {advice}")
        return label

    def relabelled(self, data: ImageDataset, labels: Sequence[str]) -> ImageDataset:
        """Return images that are labelled as people said, by labels of :meth:`parse_label`."""
        position, labels = {label: index for index, label in enumerate(data.classes)}, [*map(compose, labels)]
        if odd := sorted({*labels} - {*position}):
            raise DataError(
                f"labels of {data.name} are no classes of the model: {join_names(odd, 10)}; say what each is now by "
                "psc-log rename LOG OLD NEW (none_of_the_classes for one that the model does not have, which keeps "
                "its name), or calibrate a bundle that has these classes"
            )
        return replace(data, labels=torch.tensor([position[label] for label in labels]))

    # The fit.

    @classmethod
    def reads(cls, setting: str) -> bool:
        """Return whether a fit of this task reads a setting."""
        return setting in cls.own_settings or setting not in OWNERS

    @classmethod
    def averages_layer(cls, settings: FitSettings) -> bool:
        """Return whether a head reads the chosen layer's features averaged over positions besides z."""
        return cls.reads("head_input") and settings.head_input == "both"

    @classmethod
    def check(cls, settings: FitSettings, images: int) -> None:
        """Raise :class:`UsageError` for a setting that this task does not read, or that so few images cannot keep."""
        for name, owner in OWNERS.items():
            if not cls.reads(name) and getattr(settings, name) != getattr(DEFAULTS, name):
                raise UsageError(f"a {cls.noun} does not read {name}, which is for {owner}; leave it out")

    @classmethod
    @abstractmethod
    def first_evaluation(
        cls, net: Callable[[Tensor], Tensor], train: ImageDataset, val: ImageDataset, compute: Compute
    ) -> FirstEvaluation:
        """Say how good the original network, on the device, is on at most :data:`FIRST_EVALUATION_IMAGES` of each set.

        A person can compare it with what is known of the network: images that are resized, cropped or standardised
        otherwise than in training make it worse, and nothing else shows that.
        """

    @classmethod
    @abstractmethod
    def fit_head(cls, train: Features, selection: Features, settings: FitSettings, device: torch.device) -> Head:
        """Return a head fitted to ``train``, on the device; the free numbers are chosen on ``selection``."""

    @classmethod
    def confidence_check(cls, *, ambiguous: bool) -> tuple[bool, str]:
        """Return whether confidence is a check, and why, a sentence; ``ambiguous`` where images have many labels."""
        if ambiguous:
            return False, "some images have several labels, so confidence is no check and no images are mixed"
        return True, "no image has several labels, so confidence is a check"

    @classmethod
    @abstractmethod
    def calibrate(
        cls,
        scored: Scored,
        ood_score: Float[Tensor, " n"],  # OOD scores of the images, nats
        images: ImageDataset,
        settings: FitSettings,
        weights: Float[Tensor, " n"] | None = None,  # how many images each one stands for; None where all are equal
        *,
        or_higher: bool = False,  # whether a higher risk may replace one that cannot be shown
    ) -> Calibrated:
        """Return the calibration on n images of the calibration split, as the served pipeline scored them."""

    # The manifest, and the properties of a model.

    def manifest_fields(self) -> dict[str, Any]:
        """Return the fields of a manifest that describe the task, JSON types."""
        return {"task": self.name, **self.model_dump()}

    def agreements(self, manifest: Any) -> Sequence[Agreement]:
        """Return the agreements between fields of a manifest that this task alone requires."""
        return ()

    def number(self) -> Target | None:
        """Return the number that a model predicts; None where it predicts something else."""
        return None

    def network_outputs(self, classes: Sequence[str]) -> int:
        """Return the number of outputs of a network of the task."""
        return len(classes)

    def probabilities(self, classes: Sequence[str]) -> int:
        """Return the number of columns of probabilities in the outputs."""
        return len(classes)

    def epistemic_unit(self, head: Head) -> str:
        """Return the unit of the epistemic uncertainty, for display; empty where there is none."""
        return head.epistemic_unit

    # How psc-eval and reports measure a model; imported when asked for, because a service does neither.

    @classmethod
    def evaluator(cls) -> Evaluator[Any, Any, Any]:
        """Return how models of the task are measured; raises :class:`UsageError` where they cannot be."""
        raise UsageError(f"a {cls.noun} cannot be evaluated; measure it in Python")

    @classmethod
    def report(cls) -> TaskReport[Any, Any]:
        """Return what reports say and show of a model; raises :class:`UsageError` where there are none."""
        raise UsageError(f"a {cls.noun} has no report; fit with --no-report")

    # Predictions.

    def prediction(
        self, outputs: Outputs[Tensor], decisions: BaseDecisions, classes: tuple[str, ...]
    ) -> BasePrediction:
        return self.prediction_type(outputs, decisions, classes, **dict(self))  # Its own fields too: a target.

    def numbers(self, outputs: Outputs[FloatArray]) -> dict[str, FloatArray]:
        """Return what the answers say in the unit of :meth:`number`, by name, each (n,); empty where there is none."""
        return {}

    def decision_names(self) -> tuple[str, ...]:
        """Return the names of the decisions, by their codes."""
        return get_args(self.answer_type.model_fields["decision"].annotation)

    def columns(self) -> dict[str, Any]:
        """Return the types of the columns that ``psc-score`` writes: own fields, and an answer's except on request."""
        found = {**type(self).model_fields, **self.answer_type.model_fields}
        return {name: field.annotation for name, field in found.items() if name not in ASKED_FOR}

    def difference(self, outputs: Outputs[Tensor], other: Outputs[Tensor]) -> tuple[str, Tensor]:
        """Return the name of the predicted quantity, and the difference in it of two outputs for the same images."""
        return "probabilities", outputs.probabilities - other.probabilities

    def explanations(
        self, explanation: Mapping[str, npt.NDArray[Any]], classes: Sequence[str], layers: Sequence[str]
    ) -> list[dict[str, Any]]:
        """Return an explanation for each image, from ``Pipeline.explain``; the head tells ``layers`` apart."""
        nearest, distances = self.explained
        deviations = explanation["component_deviation"]
        most = np.argsort(-np.abs(deviations), axis=1, kind="stable")[:, :UNUSUAL_COMPONENTS].tolist()
        return [
            {
                nearest: classes[index],
                distances: np.ascontiguousarray(explanation["class_distances"][image]),
                "unusual_components": [{"component": k, "deviation": float(deviations[image, k])} for k in most[image]],
                **self.explain_head(explanation, image, layers),
            }
            for image, index in enumerate(explanation["nearest_class"].tolist())
        ]

    @abstractmethod
    def explain_head(
        self, explanation: Mapping[str, npt.NDArray[Any]], image: int, layers: Sequence[str]
    ) -> dict[str, Any]:
        """Return what the head adds to the explanation of one image."""

    def tensor_shape(self, name: str, classes: Sequence[str], checks: Sequence[str]) -> list[int]:
        """Return the shape of one of the :attr:`tensors` without its first axis, the images."""
        if name == CHECKS_OUTPUT:
            return [len(checks)]
        return [self.probabilities(classes)] if name == "probabilities" else []

    def tensor(
        self, name: str, outputs: Outputs[FloatArray], decisions: BaseDecisions, classes: Sequence[str]
    ) -> npt.NDArray[Any] | Sequence[str]:
        """Return the values of one of the :attr:`tensors`, which for ``BYTES`` are texts."""
        if name == CHECKS_OUTPUT:
            return outputs.check_p_values
        if name == "probabilities":
            return outputs.probabilities
        if name == "decision":
            return decisions.decision.astype(np.int64)  # As in an exported graph.
        values: npt.NDArray[Any] | None = getattr(decisions, name, None)
        return outputs[name] if values is None else values

    def metric_labels(self, classes: tuple[str, ...]) -> tuple[str, ...]:
        """Return the labels by which metrics count images."""
        return classes


def run_network(
    net: Callable[[Tensor], Tensor], data: ImageDataset, compute: Compute
) -> Float[Tensor, "images outputs"]:
    """Return the original network's outputs for every image, in the precision of ``compute``, as float32 on the CPU."""
    outputs = passes(data, compute, f"the network on {data.name}", net)
    return torch.cat([output.float().cpu() for output, _ in outputs])
