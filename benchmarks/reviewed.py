"""What few reviewed images teach: the check ``reviewed``, and a class that is added.

    python -m benchmarks.reviewed --scale cpu --data ROOT [--setting lite0-tuned-8 …] [--seeds 0 1 2]

Networks and data are those of :mod:`benchmarks.ood.settings`.  Unknown images show the classes that a network was not
trained on.  Of each setting and seed a part holds :data:`DRAWS` draws of reviewed images for each :data:`COUNTS`: all
unknown classes together as one kind, all with their names, one class alone, and one class where 30 % of the labels are
wrong.  Four hundred other images of the classes take the place of the reviewed random sample: a quarter places the
check, the rest calibrates.  All of it is measured on images that had no part in it.

A class is added from the images of one unknown class: how many of its other images are answered with it, how many right
answers of the other classes it takes, and by how many nats it makes the median image more ambiguous.
"""

from __future__ import annotations

import copy
import statistics
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks import fitting, runs
from benchmarks.checkpoints import Trained
from benchmarks.data import random_images
from benchmarks.ood.settings import SETTINGS, Setting
from benchmarks.runs import Json, Run
from psc_core.checks import Checks, check_values
from psc_core.conformal import conformal_p_values
from psc_core.data.dataset import ImageDataset, split_validation
from psc_core.density import class_values, draw_images
from psc_core.errors import UsageError
from psc_core.heads.base import Scored, entropy
from psc_core.learnt import Moments, fit_added, fit_reviewed, is_answer, log_odds, moments_of, widen
from psc_core.metrics import auroc
from psc_core.model import PSC

DRAWS, COUNTS, SAMPLED, ALPHA, WRONG = 30, (10, 25, 100, 400), 400, 0.05, 0.3
SAMPLES = (400, 1600)  # reviewed images of the random sample beside an added class
ADDED_MEASURES = (("recall", 100), ("lost", 100), ("entropy", 1))  # with their scales
ADDED_HEADER = [
    "images of the class",
    "draws",
    "sample",
    "recognised, %",
    "right answers of others lost, %",
    "entropy, nats",
]

FULL = ("lite0-tuned-8", "lite2-tuned-8", "lite0-frozen-5", "cifar10-held-out-1", "mnist-held-out-1")
AT_SCALE = {"smoke": ("mnist-held-out-0",), "cpu": FULL, "full": FULL}

Read = dict[str, Tensor]  # Coordinates "w" and the values of the checks of n images, and their labels "y".


def main(argv: list[str] | None = None) -> Json:
    cli = runs.parser(__doc__)
    cli.add_argument("--setting", choices=sorted(SETTINGS), action="extend", nargs="+", help="default: the scale's")
    cli.add_argument("--seeds", type=int, nargs="+", default=[0])
    args = cli.parse_args(argv)
    run = runs.start("reviewed", args)
    for seed in args.seeds:
        for name in args.setting or AT_SCALE[args.scale]:
            one_setting(replace(run, seed=seed), SETTINGS[name])
    return run.write(table)


def one_setting(run: Run, setting: Setting) -> Json:
    run = setting.limited(run)
    numbers = {"draws": DRAWS, "counts": COUNTS, "sampled": SAMPLED, "samples": SAMPLES, "alpha": ALPHA, "wrong": WRONG}

    def compute() -> Json:
        trained = setting.obtain(run)
        stages = fitting.stages(run, trained, density="pooled++")
        model = fitting.psc_of(run, trained, stages, density="pooled++", ood_score="checks")
        sets = {name: read(model, data) for name, data in images_of(run, setting, trained).items()}
        return {"today": today(model, sets), "rows": rows(model, sets), "added": added_rows(model, sets)}

    return run.part(f"{setting.name}-{run.seed}", {"job": setting.job(run).name, **numbers}, compute)


def images_of(run: Run, setting: Setting, trained: Trained) -> dict[str, ImageDataset]:
    """Return the images of the classes, the unknown ones to review and to measure, and the far ones, by name."""
    _, calibration = split_validation(trained.val, run.seed)
    outside = dict(setting.test_images(run, trained))
    unknown = outside.pop("other classes")
    order = torch.randperm(len(unknown), generator=torch.Generator().manual_seed(run.seed))
    review, measure = order.tensor_split(2)
    outside = outside or SETTINGS["cifar10"].test_images(run, trained)  # Held-out classes of CIFAR-10 come alone.
    return {
        "sample": calibration,
        "known": random_images(trained.test_on, 2000, run.seed),
        "review": unknown.subset(review),
        "near": unknown.subset(measure),
        **{f"far {name}": random_images(data, 600, run.seed) for name, data in outside.items()},
    }


@torch.inference_mode()
def read(model: PSC, data: ImageDataset) -> Read:
    scorer, w, values, probabilities = model.pipeline.scorer, [], [], []
    for batch in data.batches(64):
        embedding = scorer.embed(batch.images.to(model.device))
        scored = scorer.score(embedding)
        w.append(scorer.density.coordinates(embedding.density_input).cpu())
        values.append(check_values(model.checks, scored.scores).cpu())
        probabilities.append(scored.probabilities.cpu())
    found = {"w": w, "values": values, "p": probabilities}
    return {name: torch.cat(parts) for name, parts in found.items()} | {"y": data.first_labels()}


def today(model: PSC, sets: dict[str, Read]) -> Json:
    """Return the AUROC of the checks as they are fitted."""
    scores = {name: model.pipeline.checks.score(of["values"]) for name, of in sets.items()}  # type: ignore[union-attr]
    return {name: auroc(scores["known"], each) for name, each in scores.items() if name not in ("sample", "known")}


def rows(model: PSC, sets: dict[str, Read]) -> list[Json]:
    """Return mean and standard deviation over the draws of each measure, for each number and way of labels."""
    found, density, checks = [], model.pipeline.scorer.density, model.pipeline.checks
    assert checks is not None
    kinds = sorted({*sets["review"]["y"].tolist()})
    fitted = moments_of(density), draw_images(density, checks.ascending.shape[1]), checks
    for count in COUNTS:
        for way in ("one kind", "named", "one class", "30 % wrong"):
            draws = [
                one_draw(
                    fitted,
                    sets,
                    count,
                    draw,
                    None if way in ("one kind", "named") else kinds[draw % len(kinds)],
                    named=way == "named",
                    wrong=way == "30 % wrong",
                )
                for draw in range(DRAWS)
            ]
            of = [each for each in draws if each is not None]
            measured = {name: [each[name] for each in of if each[name] is not None] for name in (of or [{}])[0]}
            summary = {
                name: [round(statistics.mean(values), 5), round(statistics.pstdev(values), 5)]
                for name, values in measured.items()
                if values
            }
            found += [{"reviewed": count, "way": way, "draws": len(of), **summary}] if of else []
    return found


def one_draw(
    fitted: tuple[Moments, Tensor, Checks],  # of the classes, and images drawn from them
    sets: dict[str, Read],
    count: int,
    draw: int,
    kind: int | None,
    *,
    named: bool,
    wrong: bool,
) -> Json | None:
    """Learn from one draw; None where there are too few images."""
    generator = torch.Generator().manual_seed(draw)
    review, near, sample = sets["review"], sets["near"], sets["sample"]
    pool = (review["y"] == kind).nonzero()[:, 0] if kind is not None else torch.arange(len(review["y"]))
    if len(pool) < count:
        return None
    chosen = pool[torch.randperm(len(pool), generator=generator)[:count]]
    drawn = torch.randperm(len(sample["y"]), generator=generator)
    count_sampled = min(SAMPLED, len(drawn))
    places, calibrates, mistaken = drawn.tensor_split([count_sampled // 4, count_sampled])
    w, labels = review["w"][chosen], review["y"][chosen] if named else torch.zeros(count, dtype=torch.int64)
    if wrong:
        replaced = min(round(WRONG * count), len(mistaken))
        w = torch.cat([w[replaced:], sample["w"][mistaken[:replaced]]])
    moments, images, checks = fitted
    learnt = fit_reviewed(moments, w, labels, [str(each) for each in range(10)])
    values = {name: learnt(of["w"]).amax(1) for name, of in sets.items()}
    new = checks.with_reviewed(class_values(images, learnt.largest, values["sample"][places]))
    before = {name: checks.score(of["values"]) for name, of in sets.items()}
    after = {name: new.score(torch.cat([of["values"], values[name][:, None]], dim=1)) for name, of in sets.items()}
    same = torch.ones(len(near["y"]), dtype=torch.bool) if kind is None else near["y"] == kind
    alarms = {}
    for when, scores in ((" before", before), ("", after)):
        ascending = scores["sample"][calibrates].sort().values
        p_values = {each: conformal_p_values(ascending, scores[each]) for each in ("known", "near")}
        alarms[f"alarms known{when}"] = float((p_values["known"] <= ALPHA).double().mean())
        alarms[f"alarms near{when}"] = float((p_values["near"][same] <= ALPHA).double().mean())
    far = [name for name in sets if name.startswith("far")]
    return {
        "same": auroc(after["known"], after["near"][same]),
        "same before": auroc(before["known"], before["near"][same]),
        "other": None if same.all() else auroc(after["known"], after["near"][~same]),
        "other before": None if same.all() else auroc(before["known"], before["near"][~same]),
        "far": statistics.mean(auroc(after["known"], after[name]) for name in far),
        "far before": statistics.mean(auroc(before["known"], before[name]) for name in far),
        **alarms,
    }


def added_rows(model: PSC, sets: dict[str, Read]) -> list[Json]:
    """Return mean and standard deviation over the draws of what a class does that is added, for each number."""
    kinds, found = sorted({*sets["review"]["y"].tolist()}), []
    for sampled in SAMPLES:
        for count in (*COUNTS[:2], 50, *COUNTS[2:]):
            draws = [one_class(model, sets, count, draw, kinds[draw % len(kinds)], sampled) for draw in range(DRAWS)]
            of = [each for each in draws if each is not None]
            summary = {
                name: [round(statistics.mean(values), 5), round(statistics.pstdev(values), 5)]
                for name in (of or [{}])[0]
                for values in [[each[name] for each in of]]
            }
            found += [{"images": count, "sampled": sampled, "draws": len(of), **summary}] if of else []
    return found


def one_class(model: PSC, sets: dict[str, Read], count: int, draw: int, kind: int, sampled: int) -> Json | None:
    """Add a class; None where there are too few images, or it is refused."""
    generator, density = torch.Generator().manual_seed(draw), copy.deepcopy(model.pipeline.scorer.density).cpu()
    pool = (sets["review"]["y"] == kind).nonzero()[:, 0]
    if len(pool) < count or len(sets["sample"]["y"]) < sampled // 4:
        return None
    new = sets["review"]["w"][pool[torch.randperm(len(pool), generator=generator)[:count]]]
    sample, known = sets["sample"], sets["known"]
    drawn = torch.randperm(len(sample["y"]), generator=generator)[: sampled // 4]
    drawn = drawn[(sample["p"].argmax(1) == sample["y"])[drawn]]
    try:
        found, _, _ = fit_added("new", density, new, sample["w"][drawn], sample["p"][drawn])
    except UsageError:
        return None
    wide = torch.cat([density.get_buffer("centres"), new.double().mean(0)[None]])
    near = sets["near"]["y"] == kind
    odds = {name: log_odds(of["w"], wide, [found]) for name, of in sets.items()}
    recognised = is_answer(odds["near"][near, 0], sets["near"]["p"][near])
    taken = is_answer(odds["known"][:, 0], known["p"]) & (known["p"].argmax(1) == known["y"])
    zero = torch.zeros(len(known["y"]))
    scored = Scored({"epistemic": zero, "energy": zero}, known["p"])
    after = widen(scored, odds["known"]).scores["predictive_entropy"].median()
    return {
        "recall": float(recognised.double().mean()),
        "lost": float(taken.double().mean()),
        "entropy": float(after - entropy(known["p"]).median()),
    }


def table(record: Json) -> str:
    """Return the Markdown of all parts: before → after ± the standard deviation of a single draw.

    A draw is left out where its class has too few images, so that rows of fewer draws are of other classes.
    """
    header = [
        "reviewed",
        "draws",
        "of them",
        "AUROC, these kinds",
        "kinds never reviewed",
        "far",
        "false alarms, %",
        "found, %",
    ]
    lines = []
    for name, result in runs.results(record).items():
        cells = [
            [
                str(row["reviewed"]),
                str(row["draws"]),
                row["way"],
                *(_both(row, each, 1) for each in ("same", "other", "far")),
            ]
            + [_both(row, each, 100) for each in ("alarms known", "alarms near")]
            for row in result["rows"]
        ]
        of_added = [
            [str(row["images"]), str(row["draws"]), str(row["sampled"]), *(_one(row, *each) for each in ADDED_MEASURES)]
            for row in result["added"]
        ]
        lines += [f"**{name}**", "", runs.markdown_table(header, cells), ""]
        lines += [runs.markdown_table(ADDED_HEADER, of_added), ""]
    return "\n".join([*lines, runs.provenance(record)])


def _one(row: Json, name: str, scale: int) -> str:
    mean, spread = row[name]
    return f"{scale * mean:.{3 if scale == 1 else 1}f} ± {scale * spread:.{3 if scale == 1 else 1}f}"


def _both(row: Json, name: str, scale: int) -> str:
    if name not in row:
        return ""
    (before, _), (after, spread) = row[f"{name} before"], row[name]
    digits = 3 if scale == 1 else 1
    return f"{scale * before:.{digits}f} → {scale * after:.{digits}f} ± {scale * spread:.{digits}f}"


if __name__ == "__main__":
    main()
