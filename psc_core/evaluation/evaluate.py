"""The parts of every task's evaluation: the network as a baseline, observed rates, the base class of reports."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final, Generic, NamedTuple, TypeVar

from jaxtyping import Bool, Float
from torch import Tensor, nn

from psc_core import metrics
from psc_core.bundle import HISTORY
from psc_core.compute import Compute, autocast
from psc_core.data.cache import REPEATED, repeated_images, shared_images
from psc_core.data.dataset import ImageDataset
from psc_core.errors import UsageError
from psc_core.images.preprocess import Images, Preprocess
from psc_core.metrics import CountInterval, RateInterval
from psc_core.model import FittedModel
from psc_core.network.described import describe
from psc_core.network.weights import digest_of
from psc_core.settings import BATCH_IMAGES, Precision
from psc_core.text import align

PRIMARY: Final = "psc"  # the score by which the service decides; all others are compared with it
LEVEL: Final = 0.99  # the confidence level of the intervals around observed rates
SURELY_BELOW: Final = 2.0  # a rate is as stated only where the images show it to be below this multiple of the nominal

# The questions that the reports of all tasks answer.
AUTOMATED: Final = "How much can be automated?"
FALSE_ALARMS: Final = "Are false alarms as rare as promised?"
OTHERS: Final = "Are other images found?"
NO_OTHERS: Final = "Not measured: --ood NAME=DIR gives images that should be found."

AUROC_MEANS: Final = "how often an OOD image has the higher score of two; 0.5 is chance, 1 perfect"


@dataclass(frozen=True)
class ObservedRate:
    nominal: float
    count: int  # number of images with the event
    images: int  # number of test images
    calibrated_on: int  # number of calibration images
    level: float  # confidence level of the three intervals
    interval: RateInterval  # rates that explain the count (Clopper–Pearson)
    acceptance: CountInterval  # counts that the nominal rate explains (binomial)
    calibrated_acceptance: CountInterval  # the same after calibration on few images (beta-binomial)

    @property
    def rate(self) -> float:
        return self.count / self.images

    @property
    def assessment(self) -> str:
        """``"as stated"``, ``"higher than stated"`` or ``"lower than stated"``, by the beta-binomial interval.

        ``"not shown"`` where that interval holds the count, but also those of rates far above the nominal one.
        """
        low, high = self.calibrated_acceptance
        if low <= self.count <= high:
            return "as stated" if self.interval.high <= SURELY_BELOW * self.nominal else "not shown"
        return "higher than stated" if self.count > high else "lower than stated"


def observed_rate(happened: Bool[Tensor, " n"], nominal: float, calibration_images: int) -> ObservedRate:
    count, images = int(happened.sum()), len(happened)
    return ObservedRate(
        nominal=nominal,
        count=count,
        images=images,
        calibrated_on=calibration_images,
        level=LEVEL,
        interval=metrics.binomial_interval(count, images, level=LEVEL),
        acceptance=metrics.binomial_acceptance(images, nominal, level=LEVEL),
        calibrated_acceptance=metrics.beta_binomial_acceptance(images, nominal, calibration_images, level=LEVEL),
    )


@dataclass(frozen=True)
class Table:
    """Lines of text under a title; the first column is aligned to the left, the others to the right."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Mapping[str, str] = field(default_factory=dict)  # what columns and rows mean, by their title
    folded: bool = True  # whether a page shows it on demand only

    def to_text(self) -> str:
        head, *lines = align([self.header, *self.rows])
        rule = "─" * max(map(len, (head, *lines)))
        return "\n".join([self.title, head, rule, *lines])

    def to_markdown(self) -> str:
        align = ["---", *["---:"] * (len(self.header) - 1)]
        lines = [" | ".join(cell.replace("|", "\\|") for cell in line) for line in (self.header, align, *self.rows)]
        return "\n".join([f"### {self.title}", "", *(f"| {line} |" for line in lines)])


def percent(part: float) -> str:
    """Format a fraction as a percentage of three digits."""
    return f"{100 * part:.3g} %"


def describe_rate(what: str, rate: ObservedRate) -> str:
    """Say how often something happened, how often it was to happen, and what chance explains."""
    low, high = rate.calibrated_acceptance
    chance = f"{f'{low} to' if low else 'up to'} {high} can be chance"
    found = {
        "as stated": f"As promised: {chance}",
        "not shown": f"Not enough images to tell: {chance}",
        "higher than stated": f"More than promised: up to {high} can be chance",
        "lower than stated": f"Fewer than promised: down to {low} can be chance",
    }
    measured = f"{percent(rate.rate)} ({rate.count} of {rate.images}), target {percent(rate.nominal)}"
    return f"{what}: {measured}. {found[rate.assessment]} where {rate.calibrated_on} images set the threshold."


@dataclass(frozen=True)
class Report(ABC):
    """The base class of reports on how good a model is on test images."""

    model: Mapping[str, str]  # identifies the model by at least name, version and layer
    id_name: str  # name of the in-distribution test data
    images: int  # number of these images
    warnings: tuple[str, ...] = field(default=(), kw_only=True)
    shared: Mapping[str, int] = field(default_factory=dict, kw_only=True)  # images that are test images too, by OOD set

    @abstractmethod
    def heading(self) -> str:
        """Say which model was measured on what."""

    @abstractmethod
    def answers(self) -> dict[str, list[str]]:
        """Return sentences on what was found, by the question that they answer."""

    @abstractmethod
    def tables(self) -> list[Table]:
        """Return what was measured."""

    def summary(self) -> list[str]:
        return [sentence for sentences in self.answers().values() for sentence in sentences]

    def words(self) -> dict[str, str]:
        """Return what columns and rows of the tables mean, by their title."""
        return {word: meaning for table in self.tables() for word, meaning in table.words.items()}

    def to_text(self, *, verbose: bool = False) -> str:
        """Return the report for a terminal; its tables only if ``verbose``."""
        parts = [[question, *(f"  {each}" for each in found)] for question, found in self.answers().items()]
        if verbose:
            tables, words = self.tables(), [f"{word}: {meaning}" for word, meaning in self.words().items()]
            parts = [*([table.to_text()] for table in tables), words, *parts]
        return "\n\n".join([self.heading(), *self._warned(), *map("\n".join, parts)]) + "\n"

    def to_markdown(self) -> str:
        """Return the report as a Markdown page."""
        answers = [
            "\n".join([f"## {question}", "", *(f"- {each}" for each in found)])
            for question, found in self.answers().items()
        ]
        tables = [table.to_markdown() for table in self.tables()]
        words = "\n".join(f"- **{word}**: {meaning}" for word, meaning in self.words().items())
        parts = [f"# {self.heading()}", *self._warned(), *answers, "## All measurements", *tables, words]
        return "\n\n".join(parts) + "\n"

    def _warned(self) -> list[str]:
        return [f"WARNING: {warning}" for warning in self.warnings]

    def to_json(self) -> dict[str, Any]:
        """Return the report with its summary as JSON types."""
        data: dict[str, Any] = {**asdict(self), "summary": self.summary()}
        for name, rate in vars(self).items():
            if isinstance(rate, ObservedRate):
                data[name] |= {"rate": rate.rate, "assessment": rate.assessment}
        return data


@dataclass(frozen=True)
class OriginalNetwork:
    """A network as it was trained, in the precision of the model, so that the two differ only by the fit."""

    net: nn.Module  # on the device, with the outputs from which its task predicts
    preprocess: Preprocess
    precision: Precision

    def outputs(self, images: Images) -> Float[Tensor, "batch outputs"]:
        """Return the network's outputs, float64."""
        inputs = self.preprocess.standardise(images)
        with autocast(images.device, self.precision):
            output: Tensor = self.net(inputs)
        return output.double()


AnyModel = TypeVar("AnyModel", bound=FittedModel)
AnyScored = TypeVar("AnyScored")  # what one pass keeps of the images of a data set
AnyBaselines = TypeVar("AnyBaselines")


class Evaluator(ABC, Generic[AnyModel, AnyScored, AnyBaselines]):
    """How models of one task are measured; :meth:`.Task.evaluator` returns it."""

    has_baselines: ClassVar[bool] = False  # whether psc-eval can fit other detectors to the same network

    @abstractmethod
    def open_images(
        self, model: AnyModel, spec: str, *, split: str = "test", target: str | None = None
    ) -> ImageDataset:
        """Open labelled images."""

    def open_baselines(
        self, model: AnyModel, weights: Path, train: ImageDataset, val: ImageDataset, *, batch_images: int
    ) -> AnyBaselines:
        """Fit the other detectors on the network that the model was cut from."""
        raise UsageError(f"a {model.task.noun} has no baselines; leave them out")

    @abstractmethod
    def original_network(self, net: nn.Module, data: ImageDataset, compute: Compute) -> AnyBaselines:
        """Return the original network as a baseline, on the device."""

    @abstractmethod
    def score_images(
        self,
        model: AnyModel,
        data: ImageDataset,
        baselines: AnyBaselines | None = None,
        *,
        batch_images: int = BATCH_IMAGES,
        packed: Tensor | None = None,
    ) -> AnyScored:
        """Send ``data`` once through the served path, unless its ``packed`` outputs are known, and the baselines."""

    @abstractmethod
    def quality_of(self, scored: AnyScored, data: ImageDataset) -> dict[str, dict[str, float]]:
        """Return the metrics by predictor; none for data that are not labelled with what the model predicts."""

    @abstractmethod
    def compare(
        self, model: AnyModel, id_data: ImageDataset, inside: AnyScored, outside: Mapping[str, AnyScored]
    ) -> Report:
        """Return the report of scored images: ``inside`` for ``id_data``, ``outside`` for each OOD set."""


class Evaluation(NamedTuple):
    """A report, and the scored images behind it, in the form of the model's task."""

    report: Report
    inside: Any  # in-distribution images
    outside: Mapping[str, Any]  # out-of-distribution images, by name


def seen_warning(model: FittedModel, data: ImageDataset, fitted_on: Mapping[str, ImageDataset]) -> str:
    """Return a warning, or "", if more test images than a few duplicates have fitted or calibrated the model."""
    nouns, provenance = {"train": "training", "val": "validation"}, model.report.get("provenance", {})
    recorded = [(noun, provenance.get(split)) for split, noun in nouns.items()]
    recorded += [("calibration", entry) for entry in provenance.get(HISTORY, ())]
    digest = data.digest()
    counts = [
        (noun, len(data)) for noun, entry in recorded if isinstance(entry, dict) and entry.get("sha256") == digest
    ]
    counts += [(nouns[split], shared_images(images, data)) for split, images in fitted_on.items()]
    for noun, count in counts:
        if count > REPEATED * len(data):
            return (
                f"{count} of the {len(data)} images of {data.name} are {noun} images of the model; what is measured on "
                "them does not hold for new ones, so give images that it has not seen"
            )
    return ""


def repeated_warning(data: ImageDataset) -> str:
    """Return a warning, or "", if more images than a few repeat: as copies, or in several rows of a table."""
    if (count := repeated_images(data)) <= REPEATED * len(data):
        return ""
    return (
        f"{count} of the {len(data)} images of {data.name} are repeated, so that fewer are measured than are counted "
        "and the intervals are too narrow; give each once: no copies, no row twice"
    )


def shared_with(data: ImageDataset, ood: Mapping[str, ImageDataset]) -> dict[str, int]:
    """Return how many images of each out-of-distribution set are test images, where these are more than a few."""
    counts = {name: shared_images(data, others) for name, others in ood.items()}
    return {name: count for name, count in counts.items() if count > REPEATED * len(ood[name])}


def shared_warning(data: ImageDataset, name: str, others: ImageDataset, count: int) -> str:
    return (
        f"{count} of the {len(others)} images of {name} are images of {data.name} too, so that no score tells them "
        "apart; give images that are out of distribution"
    )


def weights_warning(model: FittedModel, weights: Path) -> str:
    """Refuse other weights than the fit's; return a warning, or "", where the bundle has no digest to compare."""
    family = "onnx:" if weights.suffix == ".onnx" else "hf:" if weights.is_dir() else ""
    provenance = model.report.get("provenance", {})
    fitted, digest = str(provenance.get("model")), provenance.get("weights_sha256")
    if digest is None or not (fitted.startswith(family) if family else model.backbone.cut.network):
        return f"the bundle does not say whether its network had the weights in {weights}"
    if digest != digest_of(describe(f"{family}{weights}").weights if family else [weights]):
        raise UsageError(f"{weights} has other weights than the network of {model.name}; give those of its fit")
    return ""


def evaluate(
    model: FittedModel,
    id_data: ImageDataset,
    ood: Mapping[str, ImageDataset],
    baselines: Any = None,  # detectors on the same network, or None to evaluate the model alone
    *,
    batch_images: int = BATCH_IMAGES,
) -> Evaluation:
    """Send every data set through the served path once, and compare."""
    task = model.task.evaluator()
    model.task.check_images(model.classes, id_data)
    inside = task.score_images(model, id_data, baselines, batch_images=batch_images)
    outside = {name: task.score_images(model, data, baselines, batch_images=batch_images) for name, data in ood.items()}
    return Evaluation(task.compare(model, id_data, inside, outside), inside, outside)
