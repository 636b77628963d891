"""Table "DDU case study": density separates out-of-distribution images, entropy separates ambiguous ones.

    python -m benchmarks.paper.ddu_case_study --scale cpu --data ROOT

Dirty-MNIST (MNIST and Ambiguous-MNIST) is in distribution, and Fashion-MNIST out of distribution.

* *base*: one Gaussian for each class on the network's penultimate features, and the entropy of its softmax;
* *SN*: the same for a network trained with spectral normalisation;
* *PSC*: density and head on the chosen layer of the base network;
* *shipped*: the bundle in ``artifacts/``.

Collapse is measured on MNIST, as in the paper's table of projections, because NC1 counts the different labels of an
ambiguous image as spread within classes, which no layer can remove.  ``--density`` and ``--collapse-on`` add a PSC row
with another density, or with the layer selected on all of Dirty-MNIST.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from benchmarks import fitting, plots, runs
from benchmarks.checkpoints import SPECTRAL_NORM, Trained, images_to_test, job_of, obtain
from benchmarks.runs import BUNDLE, Json, Run
from psc_core import metrics
from psc_core.compute import track_images
from psc_core.data.dataset import ImageDataset
from psc_core.data.open import open_dataset
from psc_core.density import DENSITIES
from psc_core.evaluation.baselines import Baselines
from psc_core.evaluation.classification import ClassificationEvaluator
from psc_core.heads.base import entropy
from psc_core.model import PSC

NAME = "ddu_case_study"

# The AUROC of in-distribution against OOD images by density, and of clean against ambiguous ones by entropy.
PAPER: Mapping[str, tuple[float | None, float | None]] = {
    "resnet18": (0.99, 0.97),
    "resnet18+SN": (0.99, 0.84),
    "resnet18+PSC": (0.99, 0.93),
    "vgg16": (0.93, 0.98),
    "vgg16+SN": (None, None),
    "vgg16+PSC": (1.00, 0.95),
}

DENSITY, COLLAPSE_ON = "gda", "mnist"  # The density and the data for collapse of the paper's rows.

NETWORKS = ("resnet18", "vgg16")
ROWS = ("resnet18", "sn", "vgg16", "shipped")  # The values of ``--only``.

GROUPS = {"mnist": "in-distribution", "ambiguous-mnist": "ambiguous"}

Scored = Mapping[str, Tensor]  # The scores ``"ood"`` and ``"entropy"``, each float64 (n,).


def main(argv: list[str] | None = None) -> Json:
    """Measure the rows, and write the table and its figures."""
    cli = runs.parser(__doc__)
    cli.add_argument("--only", choices=ROWS, action="extend", nargs="+", help="some of the rows")
    cli.add_argument("--density", choices=sorted(DENSITIES), default=DENSITY, help="of an added PSC row")
    cli.add_argument("--collapse-on", choices=("mnist", "dirty-mnist"), default=COLLAPSE_ON, help="of an added PSC row")
    args = cli.parse_args(argv)
    added = (args.density, args.collapse_on) != (DENSITY, COLLAPSE_ON)
    if added and {"sn", "shipped"} & set(args.only or ()):
        cli.error("--density and --collapse-on change a PSC; use them with --only resnet18 or vgg16")
    run = runs.start(NAME, args)
    for row in args.only or (NETWORKS if added else ROWS):
        if added:
            another_psc(run, row, args.density, args.collapse_on)
        elif row == "sn":
            spectral(run)
        elif row == "shipped":
            shipped(run)
        else:
            base_and_psc(run, row)
    draw(run, rows_of(run.record()))
    return run.write(fragment)


def rows_of(record: Json) -> Json:
    """Return the rows by model, those of the paper first."""
    found = {model: row for part in runs.results(record).values() for model, row in part.items()}
    return {model: found[model] for model in (*PAPER, *found) if model in found}


def base_and_psc(run: Run, network: str) -> Json:
    """Return both rows of one network."""
    job = job_of(run, network, "dirty-mnist")

    def compute() -> Json:
        trained = obtain(run, job)
        psc = fitted_psc(run, trained, DENSITY, COLLAPSE_ON)
        return {network: base_row(run, trained), f"{network}+PSC": psc_row(run, psc, trained)}

    return run.part(network, {"job": job.name, "collapse_on": COLLAPSE_ON}, compute)


def another_psc(run: Run, network: str, density: str, collapse_on: str) -> Json:
    """Return the PSC row of one network with another density or layer than the paper's."""
    job = job_of(run, network, "dirty-mnist")
    changes = [density] if density != DENSITY else []
    changes += [f"collapse on {collapse_on}"] if collapse_on != COLLAPSE_ON else []

    def compute() -> Json:
        trained = obtain(run, job)
        found = psc_row(run, fitted_psc(run, trained, density, collapse_on), trained)
        return {", ".join([f"{network}+PSC", *changes]): found}

    return run.part("-".join([network, *changes]).replace(" ", "-"), {"job": job.name}, compute)


def spectral(run: Run) -> Json:
    """Return the row of the ResNet-18 trained with spectral normalisation."""
    job = job_of(run, "resnet18", "dirty-mnist", spectral_norm=SPECTRAL_NORM)
    return run.part("resnet18-sn", {"job": job.name}, lambda: {"resnet18+SN": base_row(run, obtain(run, job))})


def shipped(run: Run) -> Json:
    """Return the row of the shipped bundle."""
    psc = PSC.load(BUNDLE, device=run.device)

    def compute() -> Json:
        test = images_to_test(run, open_dataset(run.spec("dirty-mnist"), split="test", preprocess=psc.preprocess))
        about = {"trained": "resnet18, 4 epochs, batch 128, seed 0", "bundle": psc.version}
        return {"resnet18+PSC, shipped": {**about, **scores_of_psc(run, psc, test)}}

    return run.part("shipped", {"bundle": psc.version}, compute)


def fitted_psc(run: Run, trained: Trained, density: str, collapse_on: str) -> PSC:
    """Fit PSC on the layer selected by the collapse of ``collapse_on``."""
    parts = fitting.stages(run, trained, density=density, collapse_on=fitting.pair_of(run, trained, collapse_on))
    return fitting.psc_of(run, trained, parts, density=density)


def about_fit(trained: Trained) -> Json:
    """Describe a row's training job and the number of images that it is fitted on."""
    return {"trained": trained.job.describe(), "fit_images": len(trained.fit_on)}


def psc_row(run: Run, psc: PSC, trained: Trained) -> Json:
    """Return the row of a PSC that was fitted here."""
    projection = psc.pipeline.scorer.projection
    size = f"{projection.c_proj} × {projection.d_proj}"
    return {**about_fit(trained), "z": size, **scores_of_psc(run, psc, trained.test_on)}


def scores_of_psc(run: Run, psc: PSC, test: ImageDataset) -> Json:
    """Return the layer and the scores of a PSC."""
    batch, sets = fitting.compute_of(run).batch_images, test_sets(run, test)
    scored = [ClassificationEvaluator().score_images(psc, data, batch_images=batch) for data in sets]
    found = [{"ood": each.ood["psc"], "entropy": each.entropy["psc"]} for each in scored]
    return {"layer": psc.layer, **row(sets[0], *found)}


def base_row(run: Run, trained: Trained) -> Json:
    """Return the row of a network alone."""
    baselines, sets = fitting.baselines_of(run, trained), test_sets(run, trained.test_on)
    return {**about_fit(trained), **row(sets[0], *(score_base(run, baselines, data) for data in sets))}


def test_sets(run: Run, inside: ImageDataset) -> tuple[ImageDataset, ImageDataset]:
    """Open the in- and out-of-distribution test images."""
    outside = open_dataset(run.spec("fashion-mnist"), split="test", preprocess=inside.preprocess)
    return inside, images_to_test(run, outside)


@torch.inference_mode()
def score_base(run: Run, baselines: Baselines, data: ImageDataset) -> Scored:
    """Compute the penultimate density and the softmax entropy of every image."""
    ood, entropies = [], []
    for batch in track_images(data, fitting.compute_of(run), f"scoring {data.name}"):
        found = baselines.score(batch.images.to(run.device))
        ood.append(found.scores["gda"].cpu())
        entropies.append(entropy(found.probabilities["original"]).cpu())
    return {"ood": torch.cat(ood), "entropy": torch.cat(entropies)}


def row(data: ImageDataset, inside: Scored, outside: Scored) -> Json:
    """Return both AUROCs and the histograms of one model."""
    groups = {name: data.groups[group] for group, name in GROUPS.items()}

    def split(score: str, sign: float) -> dict[str, Tensor]:
        parts = {name: sign * inside[score][where] for name, where in groups.items()}
        return {**parts, "out-of-distribution": sign * outside[score]}

    clean, ambiguous = (inside["entropy"][where] for where in groups.values())
    return {
        "auroc_ood": metrics.auroc(inside["ood"], outside["ood"]),
        "fpr95_ood": metrics.fpr95(inside["ood"], outside["ood"]),
        "auroc_ambiguous": metrics.auroc(clean, ambiguous),
        "test_images": {"in": len(inside["ood"]), "out": len(outside["ood"])},
        "log_density": plots.histograms(split("ood", -1.0)),
        "entropy": plots.histograms(split("entropy", 1.0)),
    }


def draw(run: Run, rows: Mapping[str, Json]) -> None:
    """Draw the density and entropy histograms of every model."""
    for key, xlabel in (("log_density", "log p(z), nats"), ("entropy", "predictive entropy, nats")):
        with plots.figure(run.figure(key), -(-len(rows) // 3), min(3, len(rows))) as axes:
            for axis, (model, found) in zip(axes.flat, rows.items(), strict=False):
                plots.draw_histograms(axis, found[key], title=model, xlabel=xlabel)
            axes.flat[0].legend(frameon=False, fontsize=8)
            for axis in axes.flat[len(rows) :]:
                axis.set_axis_off()


def fragment(record: Json) -> str:
    """Return the table with the paper's numbers, and the figures."""
    rows, lines = rows_of(record), []
    for model in dict.fromkeys((*PAPER, *rows)):
        ood, ambiguous = (runs.number(value, 2) for value in PAPER.get(model, (None, None)))
        found = rows.get(model)
        if found is None:
            missing = "N/A in the paper" if model == "vgg16+SN" else "not run"
            lines.append([model, missing, ood, missing, ambiguous, "—"])
            continue
        auroc = [runs.number(found[key], 4) for key in ("auroc_ood", "auroc_ambiguous")]
        lines.append([model, auroc[0], ood, auroc[1], ambiguous, _what(found)])
    header = ["model", "AUROC iD/OOD", "paper", "AUROC clean/ambiguous", "paper", "what was run"]
    stem = f"{record['name']}-{record['scale']}"
    figures = f"![densities]({stem}-log_density.svg)\n\n![entropies]({stem}-entropy.svg)"
    return "\n\n".join([runs.markdown_table(header, lines), figures, runs.provenance(record)])


def _what(found: Json) -> str:
    fitted = f"bundle {found['bundle']}" if "bundle" in found else f"fitted on {found['fit_images'] or 'all'} images"
    size = f", z {found['z']}" if "z" in found else ""
    tested = f"tested on {found['test_images']['in']:,} + {found['test_images']['out']:,}"
    return f"{found['trained']}, {fitted}; layer {found.get('layer', 'penultimate')}{size}; {tested}"


if __name__ == "__main__":
    main()
