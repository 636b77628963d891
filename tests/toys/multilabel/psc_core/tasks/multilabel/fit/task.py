"""How a model of several labels is fitted."""

from __future__ import annotations

from typing import Final

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from psc_core.compute import Compute
from psc_core.conformal import equal_scores
from psc_core.data.dataset import ImageDataset
from psc_core.settings import FitSettings
from psc_core.tasks.fit.task import Calibrated, Features, FirstLook, HeadJob, TaskFit, run_network
from psc_core.tasks.head import Scored
from psc_core.tasks.multilabel.calibration import Calibration
from psc_core.tasks.multilabel.fit.head import FITS
from psc_core.tasks.multilabel.heads.base import MultilabelHead
from psc_core.tasks.multilabel.policy import MultilabelPolicy
from psc_core.tasks.multilabel.task import Multilabel


class MultilabelFit(TaskFit):
    """How a model of several labels is fitted: an example is an image with one label that holds."""

    task_type = Multilabel
    fits = FITS

    def takes(self, data: ImageDataset) -> bool:
        return data.target is None and data.is_ambiguous

    def describe_labels(self, train: ImageDataset) -> str:
        return f"some of {len(train.classes)} labels each"

    def confidence_gate(self, *, ambiguous: bool) -> tuple[bool, str]:
        return False, "images have several labels by nature, so confidence is no gate"

    def fit_head(self, job: HeadJob) -> MultilabelHead:
        parts = (part for each in (job.train, job.selection) for part in _images_of(each, len(job.classes)))
        return FITS[job.kind](*(part.to(job.device) for part in parts))

    def calibrate(
        self,
        scored: Scored,
        ood_score: Float[Tensor, " n"],
        images: ImageDataset,
        settings: FitSettings,
        weights: Float[Tensor, " n"] | None = None,
        *,
        or_higher: bool = False,
    ) -> Calibrated:
        """Return OOD scores, and how badly the worst label of each image is told."""
        true = held(images)
        missed = torch.where(true, 1 - scored.probabilities, scored.probabilities)
        scores = (ood_score.float(), missed.amax(1))
        calibration = Calibration(*(part[equal_scores(part, weights)] for part in scores))
        policy = MultilabelPolicy(alpha=settings.alpha, max_undecided=0, coverage=settings.coverage)
        right = (scored.probabilities >= 0.5) == true
        metrics = {
            "validation_images": len(images),
            "accuracy": float(right.double().mean()),
            "exact": float(right.all(1).double().mean()),
        }
        return Calibrated(calibration, policy, metrics)

    def first_look(self, net: nn.Module, train: ImageDataset, val: ImageDataset, compute: Compute) -> FirstLook:
        found = [network_accuracy(net, data, compute) for data in (train, val)]
        return FirstLook(
            f"the network itself: {found[0]:.3f} of the labels right on training, {found[1]:.3f} on validation images"
        )


FIT: Final = MultilabelFit()


def held(data: ImageDataset) -> Bool[Tensor, "n labels"]:
    """Return which labels each image has."""
    found = torch.zeros(len(data), len(data.classes), dtype=torch.bool)
    found[torch.arange(len(data)).repeat_interleave(data.offsets.diff()), data.labels] = True
    return found


def network_accuracy(net: nn.Module, data: ImageDataset, compute: Compute) -> float:
    """Return the fraction of labels that the network itself gets right."""
    return float(((run_network(net, data, compute) >= 0) == held(data)).double().mean())


def _images_of(features: Features, labels: int) -> tuple[Float[Tensor, "n dim"], Bool[Tensor, "n labels"]]:
    """Return features and labels of each image, in the order of the data set; an image has an example a label."""
    first = torch.empty(int(features.images.max()) + 1, dtype=torch.int64)
    first[features.images] = torch.arange(len(features.images))
    found = torch.zeros(len(first), labels, dtype=torch.bool)
    found[features.images, features.labels] = True
    return features.head_input[:][first], found
