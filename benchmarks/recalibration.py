"""Recalibrate after a shift: false alarms and coverage before and after, by labels of a random slice and others.

    python -m benchmarks.recalibration --scale cpu --data ROOT

Two models get images of their classes that differ from the images that calibrated them.  The shipped bundle gets
digits by other writers (MNIST's test half).  EfficientNet-Lite0 with ImageNet's weights, frozen, gets CIFAR-10
photographs that are blurred, have half the contrast or are rotated by 15°.  Each image goes through the pipeline
once.  Then, many times, one random half of the images plays the log of a service, and the other half the images
that come next: the labels of n images of the first half calibrate, as ``psc-recalibrate`` does, and false alarms and
coverage are measured on the second half.  The n images are

* *audit*: a random slice, as in the prediction log;
* *informative*: the images that teach a model most, the most unusual and the most uncertain ones of the log; or
* *accepted*: images that the model accepted, as if people corrected the answers that they saw.

Every image shows a class of the model, so every alarm is a false one.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks import fitting, pretrained, runs
from benchmarks.data import random_images
from benchmarks.ood.settings import SHIFTS
from benchmarks.pretrained import PretrainedJob
from benchmarks.runs import BUNDLE, Json, Run
from psc_core import PSC, fit_psc
from psc_core.calibrate import settings_of
from psc_core.conformal import conformal_p_values
from psc_core.data.dataset import ImageDataset
from psc_core.data.open import open_dataset
from psc_core.images.preprocess import Images
from psc_core.settings import FitSettings
from psc_core.tasks.calibration import BaseCalibration
from psc_core.tasks.classification.decide import Decisions
from psc_core.tasks.fit.task import task_fit
from psc_core.tasks.head import Scored
from psc_core.tasks.outputs import Outputs, pack
from psc_core.tasks.policy import BasePolicy

NAME: Final = "recalibration"
REPEATS: Final = {"smoke": 3, "cpu": 50, "full": 50}
IMAGES: Final = {"smoke": 400, "cpu": 2000, "full": 10_000}
"""The number of digits in each set; half of them are the log, half come next."""

PHOTOGRAPHS: Final = {"cpu": 1200, "full": 10_000}
"""The same number of photographs, whose network is slower."""

FITTED_ON: Final = 1000
"""The photographs that PSC is fitted on; the output layer of the frozen network has 5,000."""

VALIDATION: Final = 800
"""The photographs that select and calibrate."""

LABELS: Final = (100, 250, 500)
"""The numbers of labels of the audit slice."""

OTHERS: Final = 250
"""The number of labels chosen otherwise; only a part of the log, because any choice of nearly all images is fair."""

SEEN: Final = ("rotated by 15°", "blurred", "half the contrast")
AS_FITTED: Final = "as fitted"
BATCH: Final = 64

MEASURED: Final = {"alarms": "false alarms, %", "coverage": "coverage, %", "errors": "wrong of accepted, %"}


class Seen(NamedTuple):
    """The scores of n images by the pipeline."""

    images: ImageDataset
    outputs: Outputs[Tensor]

    def at(self, positions: Tensor) -> Seen:
        """Return some of the images."""
        packed = self.outputs.packed[positions]
        return Seen(self.images.subset(positions), Outputs(packed, self.outputs.scores, self.outputs.gates))


def main(argv: list[str] | None = None) -> Json:
    """Score the images, then draw labels and calibrate many times."""
    run = runs.start(NAME, runs.parser(__doc__).parse_args(argv))
    settings = {"seed": run.seed, "repeats": REPEATS[run.scale], "images": IMAGES[run.scale], "others": OTHERS}
    run.part("digits", settings, partial(digits, run))
    if run.scale != "smoke":
        settings["images"] = PHOTOGRAPHS[run.scale]
        run.part("photographs", settings, partial(photographs, run))
    return run.write(fragment)


def digits(run: Run) -> Json:
    """Measure the shipped bundle on digits by writers whom it has not seen."""
    model = PSC.load(BUNDLE, device=run.device)
    opened = partial(open_dataset, preprocess=model.preprocess)
    sets = {
        "its own validation images": opened(run.spec("dirty-mnist"), split="val"),
        "other writers, clean and ambiguous": opened(run.spec("dirty-mnist"), split="test"),
        "other writers, clean digits": opened(run.spec("mnist"), split="test"),
    }
    return compare(run, model, {name: (images, None) for name, images in sets.items()})


def photographs(run: Run) -> Json:
    """Measure a frozen pretrained network on shifted photographs."""
    few = replace(run, fit_images=FITTED_ON, test_images=PHOTOGRAPHS[run.scale])
    trained = pretrained.obtain(few, PretrainedJob(10, per_class=500, epochs=0, seed=run.seed))
    trained = replace(trained, val=random_images(trained.val, VALIDATION, run.seed))
    parts = fitting.stages(few, trained, density=FitSettings.density)
    model = fit_psc(
        trained.net, parts.candidate, parts.projection, trained.fit_on, trained.val, settings=fitting.settings_of(few)
    )
    shifts: dict[str, Callable[[Tensor], Tensor] | None] = {"as they were": None}
    shifts |= {name: SHIFTS[name] for name in SEEN}
    return compare(few, model, {name: (trained.test, shift) for name, shift in shifts.items()})


def compare(run: Run, model: PSC, sets: Mapping[str, tuple[ImageDataset, Callable[[Tensor], Tensor] | None]]) -> Json:
    """Return the rates of each way to calibrate, on each set."""
    settings = settings_of(model, {})
    rows: Json = {}
    for name, (images, shift) in sets.items():
        print(name, flush=True)
        images = random_images(images, run.test_images or IMAGES[run.scale], run.seed)
        seen = Seen(
            images, model.outputs(kept_once(run, f"{model.name}-{name}", partial(scored, model, images, shift)))
        )
        found: dict[str, list[Json]] = {}
        for repeat in range(REPEATS[run.scale]):
            order = torch.randperm(len(seen.images), generator=torch.Generator().manual_seed(repeat))
            log, after = (seen.at(half) for half in order.chunk(2))
            found.setdefault(AS_FITTED, []).append(kept(model, model.calibration, model.policy, after))
            chosen = {f"audit, {n}": log.at(torch.arange(n)) for n in LABELS if n <= len(log.images)}
            others = min(OTHERS, len(log.images) // 2)
            chosen[f"informative, {others}"] = log.at(informative(log.outputs)[:others])
            chosen[f"accepted, {others}"] = log.at(accepted(model, log.outputs)[:others])
            for how, labelled in chosen.items():
                calibration, policy = calibrated(labelled, settings)
                found.setdefault(how, []).append(kept(model, calibration, policy, after))
        rows[name] = {how: {key: [each[key] for each in all_] for key in MEASURED} for how, all_ in found.items()}
    return {
        "promised": {"alpha": settings.alpha, "coverage": settings.coverage, "risk": settings.risk},
        "repeats": REPEATS[run.scale],
        "rows": rows,
    }


@torch.inference_mode()
def scored(model: PSC, images: ImageDataset, shift: Callable[[Images], Images] | None) -> Tensor:
    """Return the packed outputs for every image after a shift."""
    batches = images.batches(BATCH)
    packed = [model.pipeline((shift(b.images) if shift else b.images).to(model.device)).cpu() for b in batches]
    return torch.cat(packed)


def kept_once(run: Run, name: str, compute: Callable[[], Tensor]) -> Tensor:
    """Return the outputs for a run's images, computed once and kept beside its networks."""
    number = run.test_images or IMAGES[run.scale]
    file = (
        run.checkpoints / f"{NAME}-{''.join(c if c.isalnum() else '-' for c in name)}-{number}-s{run.seed}.safetensors"
    )
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file({"packed": compute()}, file)
    return load_file(file)["packed"]


def informative(outputs: Outputs[Tensor]) -> Tensor:
    """Return the positions, those among the most unusual or the most uncertain first."""
    ranks = [outputs[name].argsort(descending=True).argsort() for name in ("ood_score", "predictive_entropy")]
    return torch.minimum(*ranks).argsort(stable=True)


def accepted(model: PSC, outputs: Outputs[Tensor]) -> Tensor:
    """Return the positions of the images that the model accepts as fitted, in random order."""
    decisions = model.decide(model.outputs(outputs.packed.numpy()))
    return torch.from_numpy(decisions.decision == 0).nonzero()[:, 0]


def calibrated(labelled: Seen, settings: FitSettings) -> tuple[BaseCalibration, BasePolicy]:
    """Return calibration and policy by the labels of some images."""
    outputs = labelled.outputs
    scores = Scored({name: outputs[name] for name in outputs.scores}, outputs.probabilities)
    fit = task_fit("classification")
    found = fit.calibrate(scores, outputs["ood_score"].contiguous(), labelled.images, settings, or_higher=True)
    return found.calibration, found.policy


def kept(model: PSC, calibration: BaseCalibration, policy: BasePolicy, after: Seen) -> Json:
    """Return the false alarms, coverage and errors among accepted images, under a calibration."""
    old, labels = after.outputs, after.images.first_labels()
    scores = {name: old[name] for name in old.scores}
    scores["ood_p_value"] = conformal_p_values(calibration.ood_scores, old["ood_score"].contiguous())
    packed = pack(old.scores, scores, old.probabilities, [old.gate_p_values])
    decisions = calibration.thresholds(policy).decide(model.outputs(packed.numpy()))
    assert isinstance(decisions, Decisions)
    right, passed = decisions.class_index == labels.numpy(), decisions.decision == 0
    return {
        "alarms": float(decisions.is_ood.mean()),
        "coverage": float(decisions.prediction_set[range(len(labels)), labels].mean()),
        "errors": float(1 - right[passed].mean()) if passed.any() else 0.0,
    }


def fragment(record: Json) -> str:
    """Return a table for each model: mean ± standard error over the repeats (and their standard deviation)."""
    texts = []
    for name, part in sorted(runs.results(record).items()):
        guaranteed = part["promised"]
        rows = [
            [images, how, *(cell(measured[key]) for key in MEASURED)]
            for images, ways in part["rows"].items()
            for how, measured in sorted(ways.items(), key=lambda way: (way[0] != AS_FITTED, len(way[0]), way[0]))
        ]
        texts.append(
            f"{name.capitalize()}: guaranteed are {guaranteed['alpha']:.0%} false alarms, {guaranteed['coverage']:.0%} "
            f"coverage and at most {guaranteed['risk']:.0%} wrong of accepted images; {part['repeats']} repeats."
        )
        texts.append(runs.markdown_table(["images", "calibrated", *MEASURED.values()], rows))
    return "\n\n".join([*texts, runs.provenance(record)])


def cell(values: list[float]) -> str:
    """Format per cent: mean ± standard error (standard deviation of a single repeat)."""
    percent = [100 * value for value in values]
    return f"{runs.plus_minus(percent, 2)} ({statistics.stdev(percent):.1f})"


if __name__ == "__main__":
    main()
