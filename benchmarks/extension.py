"""Extend a density by reviewed images after a shift: false alarms, and alarms on clothes, before and after.

    python -m benchmarks.extension --scale cpu --data ROOT

The shipped bundle of digits gets digits by other writers (MNIST's test half) from another camera.  A service has logged
:data:`LABELS` of them in its audit slice and as many outside it, all of them reviewed; ``psc-recalibrate`` calibrates
on the slice, without and with ``--extend-density``.  Both results are measured on later images: digits and
Fashion-MNIST's clothes from the same camera, and clothes from the first camera.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import torch
from torch import Tensor

from benchmarks import runs
from benchmarks.runs import BUNDLE, Json, Run
from psc_core import PSC
from psc_core.bundle import HISTORY
from psc_core.data.dataset import ArraySource, ImageDataset, labelled
from psc_core.data.open import open_dataset
from psc_core.metrics import auroc
from psc_core.model import FittedModel
from psc_core.recalibrate import Audit, recalibrate_from_audit

NAME: Final = "extension"
REPEATS: Final = {"smoke": 1, "cpu": 1, "full": 10}
LABELS: Final = {"smoke": 100, "cpu": 500, "full": 500}
"""The number of reviewed images in the audit slice, and as many outside it."""

IMAGES: Final = {"smoke": 100, "cpu": 300, "full": 2000}
"""The number of digits, and of clothes, that come next."""

SAME: Final = "as it was"

CAMERAS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    SAME: lambda images: images,
    "black is a little grey": lambda images: (8 + images.float() * 247 / 255).to(torch.uint8),
    "pale on grey": lambda images: (40 + 0.6 * images.float()).to(torch.uint8),
}
"""The change of pixels by another camera."""

MEASURED: Final = {
    "alarms": "false alarms, %",
    "found": "alarms on clothes, %",
    "auroc": "AUROC, clothes",
    "auroc_before": "AUROC, clothes as they were",
}


def main(argv: list[str] | None = None) -> Json:
    """Calibrate both ways for each camera, several times."""
    run = runs.start(NAME, runs.parser(__doc__).parse_args(argv))
    for repeat in range(REPEATS[run.scale]):
        settings = {"seed": run.seed + repeat, "labels": LABELS[run.scale], "images": IMAGES[run.scale]}
        for name in CAMERAS:
            part = "".join(c if c.isalnum() else "-" for c in f"{name} {repeat}")
            run.part(part, settings, partial(measure, run, name, settings["seed"]))
    return run.write(fragment)


def measure(run: Run, name: str, seed: int) -> Json:
    """Return the results of each way for one camera, on images that a seed draws."""
    model = PSC.load(BUNDLE, device=run.device)
    digits = open_dataset(run.spec("mnist"), split="test", preprocess=model.preprocess)
    clothes = open_dataset(run.spec("fashion-mnist"), split="test", preprocess=model.preprocess)
    labels, images = LABELS[run.scale], IMAGES[run.scale]
    random, camera = torch.Generator().manual_seed(seed), CAMERAS[name]
    order = torch.randperm(len(digits), generator=random)[: 2 * labels + images]
    audit, more, now = (seen(digits, each, camera) for each in order.split([labels, labels, images]))
    drawn = torch.randperm(len(clothes), generator=random)[:images]
    unusual = [next(seen(clothes, drawn, how).batches(images)).images for how in (camera, CAMERAS[SAME])]
    reviewed = Audit(audit, torch.ones(labels, dtype=torch.float64), {}, ("2026-01-01", "2026-01-01"), labels)
    found: dict[str, FittedModel] = {"as fitted": model}
    found["recalibrated"] = recalibrate_from_audit(model, reviewed, {}).model
    found["with --extend-density"] = recalibrate_from_audit(model, reviewed, {}, more).model
    ways = {}
    for way, each in found.items():
        history = each.report["provenance"].get(HISTORY, [{}])[-1]
        extension = history.get("extension", {})
        ways[way] = {**quality(each, next(now.batches(images)).images, *unusual), "times": extension.get("times")}
    return {"camera": name, "labels": labels, "ways": ways, "extension": extension}


def seen(data: ImageDataset, positions: Tensor, camera: Callable[[Tensor], Tensor]) -> ImageDataset:
    """Return some images as a camera sees them."""
    batch = next(data.subset(positions).batches(len(positions)))
    pixels = camera(batch.images)[:, 0].numpy()
    return labelled("another camera", data.classes, ArraySource(pixels), batch.first_labels(), data.preprocess)


def quality(model: FittedModel, inside: Tensor, *outside: Tensor) -> Json:
    """Return false alarms, alarms on unusual images, and the OOD score's AUROC between the two."""
    of_inside, *of_outside = (model.compute(images) for images in (inside, *outside))
    alpha = model.policy.alpha
    auroc_now, auroc_before = (auroc(of_inside["ood_score"], each["ood_score"]) for each in of_outside)
    return {
        "alarms": float((of_inside["ood_p_value"] <= alpha).double().mean()),
        "found": float((of_outside[0]["ood_p_value"] <= alpha).double().mean()),
        "auroc": auroc_now,
        "auroc_before": auroc_before,
    }


def fragment(record: Json) -> str:
    """Return a table of mean ± standard error over the repeats."""
    parts = list(runs.results(record).values())
    ways: dict[tuple[str, str], list[Json]] = {}
    for camera in CAMERAS:
        for part in parts:
            for way, measured in part["ways"].items() if part["camera"] == camera else ():
                ways.setdefault((camera, way), []).append(measured)
    rows = [
        [*names, *(cell(key, [each[key] for each in measured]) for key in MEASURED), times(measured)]
        for names, measured in ways.items()
    ]
    labels, repeats = parts[0]["labels"], len(parts) // len({part["camera"] for part in parts})
    text = f"{labels} reviewed images in the audit slice and {labels} outside it; repeats: {repeats}."
    return "\n\n".join(
        [text, runs.markdown_table(["camera", "bundle", *MEASURED.values(), "times"], rows), runs.provenance(record)]
    )


def cell(key: str, values: list[float]) -> str:
    """Format per cent with one decimal, AUROC with four."""
    if key in ("alarms", "found"):
        return runs.plus_minus([100 * value for value in values], 1)
    return f"{statistics.mean(values):.4f}"


def times(measured: list[Json]) -> str:
    """Return how many training images each image counted as, by repeat."""
    return ", ".join(str(each["times"]) for each in measured if each["times"] is not None)


if __name__ == "__main__":
    main()
