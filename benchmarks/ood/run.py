"""Compare PSC with common OOD detectors on the same networks, with three seeds of each.

    python -m benchmarks.ood.run --scale cpu --data ROOT [--setting dirty-mnist …] [--seeds 0 1 2]

Every setting and seed is a part, and the report holds all parts so far.  A seed changes the initialisation, the order,
the images to fit on and the halves of the validation images; for pretrained networks the classes too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch

from benchmarks import fitting, runs
from benchmarks.checkpoints import Trained, scale_of
from benchmarks.data import random_images
from benchmarks.fitting import Penultimate
from benchmarks.ood import detectors, peers, tables
from benchmarks.ood.detectors import DEFAULT, PSC_OPTIONS, Detector, Images, scored
from benchmarks.ood.settings import AT_SCALE, MANY, SETTINGS, SHIFTS, Setting
from benchmarks.probabilities import DIVISIONS, divide, examples_of, qualities, qualities_of
from benchmarks.runs import Json, Run
from psc_core import metrics
from psc_core.data.dataset import split_validation
from psc_core.heads.base import ClassifierHead
from psc_core.model import PSC

SHIFTED_IMAGES = 2000  # The number of test images that are shifted.


def main(argv: list[str] | None = None) -> Json:
    """Run settings; write each record with all parts so far, and print its report; return the records by name."""
    cli = runs.parser(__doc__)
    cli.add_argument("--setting", choices=sorted(SETTINGS), action="extend", nargs="+", help="default: the scale's")
    cli.add_argument("--seeds", type=int, nargs="+", help="default: the scale's")
    args = cli.parse_args(argv)
    settings = [SETTINGS[name] for name in args.setting or AT_SCALE[args.scale]]
    records: Json = {}
    for name in dict.fromkeys(setting.record for setting in settings):
        run = runs.start(name, args)
        for seed in args.seeds or scale_of(run).seeds:
            for setting in settings:
                if setting.record == name:
                    one_setting(replace(run, seed=seed), setting)
        records[name] = run.write(tables.fragment)
    return records


def one_setting(run: Run, setting: Setting) -> Json:
    run = setting.limited(run)
    job = setting.job(run)

    def compute() -> Json:
        trained = setting.obtain(run)
        parts = fitting.stages(run, trained, density=PSC_OPTIONS[DEFAULT]["density"])
        pscs = detectors.fit_pscs(run, trained)
        selection = split_validation(trained.val, run.seed)[0]
        val = fitting.penultimate_features(run, trained, selection, per_example=False)
        fitted, failed = fit_all(run, trained, val)
        fitted = [*detectors.of_psc([*pscs.pipelines, detectors.WITH_ENTROPY]), *fitted]
        inside = detectors.read(run, trained, pscs, trained.test_on)
        outside = {
            name: detectors.read(run, trained, pscs, data) for name, data in setting.test_images(run, trained).items()
        }
        projection = parts.projection.projection
        return {
            "setting": setting.name,
            "seed": run.seed,
            "trained": job.describe(),
            "fit_images": len(trained.fit_on),
            "images": {"inside": len(inside.labels), **{name: len(each.labels) for name, each in outside.items()}},
            "accuracy": float((inside.logits.argmax(1) == inside.labels).double().mean()),
            "peers": peers.version(),
            "failed": failed,
            "checks": pscs.default.checks,
            "texture": pscs.default.report["metrics"]["checks"]["chosen"],
            "chosen": _collapse(parts, list(parts.chosen.layers)),
            "size": [projection.c_proj, projection.d_proj],
            "penultimate": _collapse(parts, [fitting.penultimate_layer(trained)]),
            "families": {detector.name: detector.family for detector in fitted},
            "calibration": calibration(run, trained, pscs.default, anew=setting.record != MANY),
            "outside": {name: compare(fitted, inside, images) for name, images in outside.items()},
            "shifts": shifted(run, trained, pscs.default),
        }

    return run.part(f"{setting.name}-s{run.seed}", {"job": job.name, "peers": peers.version()}, compute)


def _collapse(parts: fitting.Stages, names: list[str]) -> Json:
    layers = [parts.report.layer(name) for name in names]
    return {"layers": names, "nc1": [layer.nc1 for layer in layers], "nc4": [layer.quality for layer in layers]}


def calibration(run: Run, trained: Trained, psc: PSC, *, anew: bool) -> Json:
    """Measure the probabilities of a head at PSC's layer that is fitted, as ``psc-fit`` does, on all images.

    Unless ``anew``, they are those of the model as it is: with many classes a head takes many minutes.
    """
    selection = split_validation(trained.val, run.seed)[0]
    val, test = (examples_of(run, trained, psc, data) for data in (selection, trained.test))
    if not anew:
        head = cast(ClassifierHead, psc.pipeline.scorer.head)
        return {"images": len(trained.fit_on), "rows": qualities_of(run, {"psc": head}, val, test), "divided": []}
    train = examples_of(run, trained, psc, trained.train, logits=False)
    return {
        "images": len(trained.train),
        "rows": qualities(run, train, val, test),
        "divided": [qualities(run, train, *divide(run, val, test, number)) for number in range(DIVISIONS)],
    }


def fit_all(run: Run, trained: Trained, val: Penultimate) -> tuple[list[Detector], dict[str, str]]:
    """Return the fitted detectors that are not PSC's, and the reason for each that failed."""
    train = fitting.penultimate_features(run, trained, trained.fit_on, per_example=True)
    output = fitting.linear_output(trained.net)
    theirs, failed = peers.fit_peers(train, output, run.seed)
    return [*detectors.fit_penultimate(train, val, len(trained.train.classes), output), *theirs], failed


def compare(fitted: list[Detector], inside: Images, outside: Images) -> Json:
    found = {}
    for detector in fitted:
        known, unknown = scored(detector, inside), scored(detector, outside)
        found[detector.name] = {"auroc": metrics.auroc(known, unknown), "fpr95": metrics.fpr95(known, unknown)}
    return found


@torch.inference_mode()
def shifted(run: Run, trained: Trained, psc: PSC) -> Json:
    """Return the network's accuracy and the fraction that PSC flags at its alpha, without a shift and with each."""
    data = random_images(trained.test_on, SHIFTED_IMAGES, run.seed)
    kinds = {"none": torch.Tensor.contiguous, **SHIFTS}
    hits, flagged = dict.fromkeys(kinds, 0), dict.fromkeys(kinds, 0)
    labels = data.first_labels().split(detectors.BATCH_IMAGES)
    for batch, of_batch in zip(data.batches(detectors.BATCH_IMAGES), labels, strict=True):
        for name, shift in kinds.items():
            images = shift(batch.images)
            logits = trained.net(psc.preprocess.standardise(images.to(run.device)))
            hits[name] += int((logits.argmax(1).cpu() == of_batch).sum())
            flagged[name] += int(psc.predict(images).is_ood.sum())
    count = len(data)
    return {name: {"accuracy": hits[name] / count, "flagged": flagged[name] / count} for name in kinds}


if __name__ == "__main__":
    main()
