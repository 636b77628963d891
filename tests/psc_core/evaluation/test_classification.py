"""Evaluation of a classifier against loops, with a scorer that is a formula of the pixels; and its report."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as sklearn_metrics
from torch import Tensor, nn

from psc_core import metrics
from psc_core.answers import ClassificationPolicy
from psc_core.compute import Compute
from psc_core.data.dataset import ArraySource, ImageDataset, label_images
from psc_core.errors import DataError, UsageError
from psc_core.evaluation.baselines import fit_baselines
from psc_core.evaluation.classification import (
    QUALITIES,
    Acceptance,
    ClassCounts,
    ClassificationEvaluator,
    ClassificationReport,
    Doubled,
    Separation,
    acceptance,
    ambiguity,
    separation,
)
from psc_core.evaluation.evaluate import AUTOMATED, OTHERS, ObservedRate, evaluate
from psc_core.heads.base import Scored, entropy
from psc_core.heads.softmax import TemperatureHead
from psc_core.images.preprocess import Preprocess
from psc_core.metrics import CountInterval, Difference, RateInterval
from psc_core.model import PSC
from psc_core.network.cut import truncate
from psc_core.pipeline import Pipeline, Scorer
from psc_core.tasks.classification import fit_calibration
from tests.opened import opened
from tests.psc_core.test_metrics import LEVELS, tensor
from tests.reference import metrics as naive


def naive_sets(threshold: float, probabilities: Tensor) -> Tensor:
    members = [[p >= threshold or p == max(image) for p in image] for image in probabilities.tolist()]
    return torch.tensor(members)


PREPROCESS = Preprocess("L", 2, 2, None, (0.5,), (0.25,))
CLASSES = ("dark", "bright", "mixed")


class FormulaScorer(Scorer):
    """Softmax of three contrasts of the pixels; density falls with their spread."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.register_buffer("scale", torch.ones(1))
        self.preprocess = PREPROCESS
        self.head = TemperatureHead({"temperature": torch.ones(())}, record={})

    def forward(self, images: Tensor) -> Scored:
        x = images.flatten(1).float() / 255
        probabilities = torch.stack([1 - x[:, 0], x[:, 1], x[:, 2] - x[:, 3]], 1).mul(4).softmax(1)
        log_density = -10 * (x[:, 3] - 0.3).square() - x.mean(1)
        scores = {"predictive_entropy": entropy(probabilities), "log_density": log_density, "epistemic": x[:, 0]}
        return Scored(scores, probabilities)


def pixels(count: int, seed: int, *, low: int = 0, high: int = 200) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, (count, 2, 2), generator=generator).to(torch.uint8)


def dataset(name: str, images: Tensor, labels: Tensor, classes: tuple[str, ...] = CLASSES) -> ImageDataset:
    return label_images(name, classes, ArraySource(images.numpy()), labels, PREPROCESS)


def inside(count: int, seed: int) -> ImageDataset:
    images = pixels(count, seed)
    scored = FormulaScorer()(images[:, None])
    labels = torch.multinomial(scored.probabilities, 1, generator=torch.Generator().manual_seed(seed)).squeeze(1)
    return dataset("inside", images, labels)


@pytest.fixture(scope="module")
def psc() -> PSC:
    data = inside(199, 0)
    batch = next(data.batches(199))
    scores, probabilities = FormulaScorer()(batch.images)
    calibration = fit_calibration(-scores["log_density"], scores["predictive_entropy"], probabilities, batch.labels)
    return PSC(
        pipeline=Pipeline(FormulaScorer(), calibration.ood_scores),
        backbone=truncate(nn.Sequential(nn.Conv2d(1, 1, 1)), ["0"], keep_output=False),
        classes=CLASSES,
        calibration=calibration,
        policy=ClassificationPolicy(alpha=0.05, ambiguity_threshold=1.0, coverage=0.9),
        layers=("layer3",),
        name="formula",
        version="0" * 12,
    )


def report_of(psc: PSC, *data: Any, **options: Any) -> ClassificationReport:
    report = evaluate(psc, *data, **options).report
    assert isinstance(report, ClassificationReport)
    return report


OUTSIDE = dataset("outside", pixels(60, 9, low=150, high=256), torch.arange(60) % 5, tuple("vwxyz"))


def test_equals_loops(psc: PSC) -> None:
    data = inside(120, 1)
    report = report_of(psc, data, {"outside": OUTSIDE}, batch_images=17)
    batch, out = next(data.batches(120)), next(OUTSIDE.batches(60))
    served, unusual = (psc.outputs(psc.pipeline(b.images)) for b in (batch, out))
    p, y = served.probabilities.double(), batch.labels
    confidence, correct = p.amax(1).tolist(), (p.argmax(1) == y).tolist()

    quality = report.classification["psc"]
    assert quality["accuracy"] == pytest.approx(sum(correct) / 120)
    assert quality["nll"] == pytest.approx(naive.nll(p.tolist(), y.tolist(), metrics.LOG_FLOOR))
    assert quality["brier"] == pytest.approx(naive.brier(p.tolist(), y.tolist()))
    assert quality["ece"] == pytest.approx(naive.ece(confidence, correct, 15))
    assert quality["adaptive_ece"] == pytest.approx(naive.adaptive_ece(confidence, correct, 15))
    assert quality["aurc"] == pytest.approx(naive.aurc(confidence, correct))
    assert quality["augrc"] == pytest.approx(naive.augrc(confidence, correct))
    assert quality["coverage_at_risk_1_percent"] == pytest.approx(naive.coverage_at_risk(confidence, correct, 0.01))
    assert quality["coverage_at_risk_5_percent"] == pytest.approx(naive.coverage_at_risk(confidence, correct, 0.05))

    own = report.separation["outside"]["psc"]
    i, o = (-served["log_density"]).tolist(), (-unusual["log_density"]).tolist()
    assert own.auroc == pytest.approx(naive.auroc(i, o))
    is_in, scores = np.repeat([1, 0], [120, 60]), np.array(i + o)
    assert own.aupr_out == pytest.approx(sklearn_metrics.average_precision_score(1 - is_in, scores))
    assert own.aupr_in == pytest.approx(sklearn_metrics.average_precision_score(is_in, -scores))
    assert own.fpr95 == pytest.approx(float((np.array(i) >= sorted(o)[3]).mean()))  # 57 of 60 are 95 %.
    assert own.auroc_difference == (0.0, 0.0)
    assert set(report.separation["outside"]) == {"psc", "psc-entropy", "psc-epistemic"}
    assert report.separation["outside"]["psc-entropy"].auroc == pytest.approx(
        naive.auroc(served["predictive_entropy"].tolist(), unusual["predictive_entropy"].tolist())
    )

    assert report.false_alarms.count == int((served["ood_p_value"] <= 0.05).sum())
    assert report.flagged["outside"] == pytest.approx(float((unusual["ood_p_value"] <= 0.05).double().mean()))
    sets = naive_sets(psc.calibration.quantile(0.9), served.probabilities)
    assert report.misses.count == sum(not sets[m, y[m]] for m in range(120))
    accepted = ((served["predictive_entropy"] <= 1.0) & ~(served["ood_p_value"] <= 0.05)).tolist()
    assert 0 < report.accepted == sum(accepted) < 120
    assert report.accepted_wrong == sum(a and not c for a, c in zip(accepted, correct, strict=True))
    assert report.ood_accepted["outside"] == pytest.approx(
        float(((unusual["predictive_entropy"] <= 1.0) & ~(unusual["ood_p_value"] <= 0.05)).double().mean())
    )
    assert report.doubled.alpha == 0.1
    assert report.doubled.false_alarms == pytest.approx(float((served["ood_p_value"] <= 0.1).double().mean()))
    assert report.doubled.flagged["outside"] == float((unusual["ood_p_value"] <= 0.1).double().mean())
    for label, name in enumerate(data.classes):
        of_class = (y == label).tolist()
        alarms = (served["ood_p_value"] <= 0.05).tolist()
        parts = (of_class, correct, accepted, [a and not c for a, c in zip(accepted, correct, strict=True)], alarms)
        counts = [sum(of and p for of, p in zip(of_class, part, strict=True)) for part in parts]
        assert dataclasses.astuple(report.by_class[name]) == tuple(counts)
    assert report.mean_set_size == pytest.approx(float(sets.sum()) / 120)
    assert (report.images, report.examples, report.ood_images) == (120, 120, {"outside": 60})
    assert report.model == {"name": "formula", "version": "0" * 12, "layer": "layer3"}
    assert report.ambiguity == {}


def test_rates_hold_on_exchangeable_data(psc: PSC) -> None:
    report = report_of(psc, inside(2000, 5), {})
    assert report.false_alarms.assessment == report.misses.assessment == "as stated"


def test_several_labels_per_image(psc: PSC) -> None:
    images = pixels(30, 3)
    labels = torch.stack([torch.arange(30) % 3, torch.arange(30) // 10], 1)
    data = dataset("several", images, labels)
    report = report_of(psc, data, {"outside": OUTSIDE}, batch_images=7)
    p = psc.outputs(psc.pipeline(images[:, None])).probabilities.double()
    repeated = p.repeat_interleave(2, 0).tolist()
    assert (report.images, report.examples, report.false_alarms.images) == (30, 60, 30)
    assert report.classification["psc"]["nll"] == pytest.approx(
        naive.nll(repeated, labels.flatten().tolist(), metrics.LOG_FLOOR)
    )
    sets = naive_sets(psc.calibration.quantile(0.9), p.float())
    assert report.misses.count == sum(not sets[m, m % 3] for m in range(30))


def test_ambiguity_of_marked_images(psc: PSC) -> None:
    data = dataclasses.replace(
        inside(50, 4), groups={"mnist": torch.arange(30), "ambiguous-mnist": torch.arange(30, 50)}
    )
    report = report_of(psc, data, {})
    h = ClassificationEvaluator().score_images(psc, data).entropy["psc"].tolist()
    assert report.ambiguity == {"psc": pytest.approx(naive.auroc(h[:30], h[30:]))}
    values = {"psc": torch.arange(4.0)}
    assert ambiguity(values, {"ambiguous": torch.arange(4)}) == {}
    assert ambiguity(values, {"clean": torch.arange(4), "ambiguous": torch.arange(0)}) == {}
    assert ambiguity(values, {"unambiguous": torch.arange(2), "ambiguous-mnist": torch.arange(2, 4)}) == {"psc": 1.0}


def test_with_baselines(psc: PSC) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).eval().requires_grad_(False)
    train = inside(200, 6)
    baselines = fit_baselines(net, "2", train, inside(100, 7), compute=Compute(torch.device("cpu")))
    report = report_of(psc, inside(90, 8), {"outside": OUTSIDE}, baselines)
    assert set(report.classification) == {"psc", "original", "temperature"}
    assert report.classification["original"]["accuracy"] == report.classification["temperature"]["accuracy"]
    difference = report.separation["outside"]["knn"].auroc_difference
    assert difference.value == pytest.approx(
        report.separation["outside"]["psc"].auroc - report.separation["outside"]["knn"].auroc
    )
    assert len(report.separation["outside"]) == 10


def test_original_predictions_have_no_epistemic_score(psc: PSC) -> None:
    scorer = FormulaScorer()
    backbone = truncate(nn.Sequential(nn.Conv2d(1, 1, 1)), ["0"], keep_output=True)
    original = dataclasses.replace(psc, pipeline=Pipeline(scorer, psc.calibration.ood_scores), backbone=backbone)
    assert set(ClassificationEvaluator().score_images(original, inside(5, 1)).ood) == {"psc", "psc-entropy"}


def test_one_image(psc: PSC) -> None:
    report = report_of(psc, inside(1, 1), {"one": dataset("one", pixels(1, 2), torch.tensor([0]))})
    assert report.separation["one"]["psc"].auroc in (0.0, 0.5, 1.0)
    assert report.separation["one"]["psc-entropy"].auroc_difference.standard_error == math.inf


def test_rejects_other_data(psc: PSC) -> None:
    with pytest.raises(DataError, match=r"model's 3 classes in outside, got 5 \(unknown: .*; missing: "):
        evaluate(psc, OUTSIDE, {})
    shuffled = dataset("shuffled", pixels(3, 0), torch.arange(3), CLASSES[::-1])
    with pytest.raises(DataError, match="another order"):
        evaluate(psc, shuffled, {})
    other = dataclasses.replace(inside(3, 0), preprocess=Preprocess("L", 2, 2, None, (0.1,), (0.25,)))
    with pytest.raises(UsageError, match=r"preprocess=model\.preprocess"):
        evaluate(psc, other, {})


def test_the_original_network_gives_its_softmax_in_the_precision_of_its_model() -> None:
    data = opened("mnist", "val")
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 10)).eval()
    images = next(data.batches(5)).images
    cpu = torch.device("cpu")
    original, half = (
        ClassificationEvaluator().original_network(net, data, compute)
        for compute in (Compute(cpu, batch_images=8), Compute(cpu, "bf16"))
    )
    with torch.inference_mode():
        scored, outputs = original.score(images), half.outputs(images)
    logits = net((images.double() / 255 - 0.1307).div(0.3081).float()).double()
    expected = logits.exp() / logits.exp().sum(1, keepdim=True)
    assert torch.allclose(scored.probabilities["original"], expected, atol=1e-5)
    assert torch.allclose(scored.scores["max-softmax"], 1 - expected.amax(1), atol=1e-5)
    assert torch.equal(outputs, outputs.bfloat16().double()) and not torch.equal(outputs, logits)


@pytest.mark.parametrize(("alpha", "above"), [(0.1, 5), (0.05, 2), (0.001, 0)])
def test_a_threshold_keeps_the_rate_of_false_alarms(alpha: float, above: int) -> None:
    scores = {"psc": torch.randperm(50).double()}
    threshold = separation(scores, scores, alpha)["psc"].threshold
    assert int((scores["psc"] > threshold).sum()) == above


IMAGES = st.lists(st.tuples(LEVELS, LEVELS, st.booleans()), min_size=1, max_size=12)


@given(IMAGES, IMAGES)
def test_acceptance_equals_loops(
    known: list[tuple[float, float, bool]], unknown: list[tuple[float, float, bool]]
) -> None:
    inside, outside = (
        {"psc": tensor([row[0] for row in rows]), "psc-entropy": tensor([row[1] for row in rows])}
        for rows in (known, unknown)
    )
    found = acceptance(inside, outside, torch.tensor([row[2] for row in known]))
    ranks = {
        name: [max(naive.rank(row[axis], [other[axis] for other in known]) for axis in (0, 1)) for row in rows]
        for name, rows in (("known", known), ("unknown", unknown))
    }
    correct = [row[2] for row in known] + [False] * len(unknown)
    own = found["psc-decision"]
    assert own.ood_accepted == pytest.approx(naive.ood_accepted(ranks["known"], ranks["unknown"], 0.95))
    assert own.aurc == pytest.approx(naive.aurc([-rank for rank in ranks["known"] + ranks["unknown"]], correct))
    scores = [row[0] for row in known + unknown]
    limits = scores[: len(known)], scores[len(known) :]
    assert found["psc"].ood_accepted == pytest.approx(naive.ood_accepted(*limits, 0.95))
    assert found["psc"].aurc == pytest.approx(naive.aurc([-score for score in scores], correct))


def separated(auroc: float, difference: float, error: float) -> Separation:
    return Separation(auroc, 0.9, 0.8, 0.2, Difference(difference, error), threshold=1.25)


def classification(nll: float) -> dict[str, float]:
    values = (0.96, nll, 0.05, 0.005, 0.006, 0.001, 0.002, 0.9, 1.0)
    return dict(zip(QUALITIES, values, strict=True))


def rate(count: int) -> ObservedRate:
    return ObservedRate(
        0.05, count, 1000, 199, 0.99, RateInterval(0.03, 0.07), CountInterval(33, 69), CountInterval(20, 80)
    )


REPORT = ClassificationReport(
    model={"name": "digits", "version": "0123456789ab", "layer": "layer3.0"},
    id_name="mnist",
    images=1000,
    examples=1000,
    classification={
        "psc": classification(0.136),
        "original": classification(0.15),
        "temperature": classification(0.14),
    },
    ood_images={"fashion": 500, "near|far": 400, "hard": 300},
    separation={
        "fashion": {
            "psc": separated(0.99, 0, 0),
            "psc-entropy": separated(0.999, -0.009, 0.001),
            "knn": separated(0.97, 0.02, 0.002),
            "gda": separated(0.98, 0.01, 0.001),
        },
        "near|far": {"psc": separated(0.90, 0, 0), "knn": separated(0.905, -0.005, 0.004)},
        "hard": {
            "psc": separated(0.80, 0, 0),
            "knn": separated(0.9, -0.1, 0.01),
            "gda": separated(0.85, -0.05, 0.01),
            "energy": separated(0.7, 0.1, 0.01),
        },
    },
    acceptance={
        name: {"psc-decision": Acceptance(0.02, 0.3), "psc": Acceptance(0.04, 0.35), "knn": Acceptance(0.03, 0.36)}
        for name in ("fashion", "near|far", "hard")
    },
    flagged={"fashion": 0.93, "near|far": 0.5, "hard": 0.4},
    ood_accepted={"fashion": 0.05, "near|far": 0.45, "hard": 0.5},
    doubled=Doubled(0.1, 0.09, {"fashion": 0.97, "near|far": 0.6, "hard": 0.5}),
    risk=0.01,
    false_alarms=rate(50),
    misses=rate(95),
    accepted=800,
    accepted_wrong=16,
    mean_set_size=1.07,
    by_class={"one": ClassCounts(600, 590, 500, 4, 40), "two|three": ClassCounts(400, 370, 300, 12, 10)},
    has_checks=True,
    ambiguity={"psc": 0.97, "original": 0.96},
)


def test_summary_names_wins_ties_and_losses() -> None:
    right, automated, alarms, others, sets = REPORT.answers().values()
    found = {ood: [line for line in others if line.startswith(f"{ood}:")] for ood in REPORT.separation}
    (fashion, wins, better, moved), (_, tie, _), (_, loses, _) = found.values()
    assert "500 images 93 % are called" in fashion and "2 % unclear, and 5 % are accepted" in fashion
    assert "PSC wins" in wins and "gda" in wins and "predictive_entropy > 1.25" in better
    assert "2 % of these" in moved and "4 % by its OOD score" in moved and "3 % by knn" in moved
    assert "alpha 0.1" in others[-1] and "50 % of hard, and 9 % of mnist" in others[-1]
    assert "PSC ties with knn" in tie and "PSC loses to knn, gda" in loses
    assert "96 % of 1000" in right[0] and "two|three, 7.5 % (30 of 400)" in right[1]
    assert "best is psc and original and temperature" in right[2]
    assert "As promised" in alarms[0] and "one, 6.67 % (40 of 600)" in alarms[1] and "More than promised" in sets[0]
    assert "where 199 images set the threshold" in alarms[0]
    assert "800 of 1000 images are accepted (80 %)" in automated[0]
    low, high = metrics.binomial_interval(16, 800, level=0.99)
    assert f"2 % (16 of 800; {100 * low:.3g} % to {100 * high:.3g} %" in automated[1] and low < 0.01
    assert automated[1].endswith("Not enough images to tell whether it keeps the promised at most 1 %.")
    assert automated[2] == "Most errors that are accepted: class two|three, 3 % (12 of 400)."
    assert "50 unusual, 150 unclear" in automated[3]
    changes = ({"accepted_wrong": 24}, {"risk": None}, {"risk": 1.0}, {"accepted": 500, "accepted_wrong": 0})
    broken, silent, certain, few = (dataclasses.replace(REPORT, **of) for of in changes)
    assert "More than promised, which was at most 1 %" in broken.answers()[AUTOMATED][1]
    assert "promised" not in silent.answers()[AUTOMATED][1]
    assert certain.answers()[AUTOMATED][1].endswith("As promised: at most 100 %.")
    assert "tell: 528 that are all right would show the promised at most 1 %." in few.answers()[AUTOMATED][1]


@pytest.mark.parametrize(
    ("wrong", "accepted", "shown"), [(0, 3, "Not"), (1, 3, "Not"), (0, 527, "Not"), (0, 528, "As"), (63, 9456, "As")]
)
def test_a_promise_is_kept_where_the_images_show_it(wrong: int, accepted: int, shown: str) -> None:
    report = dataclasses.replace(REPORT, accepted=accepted, accepted_wrong=wrong)
    assert f"with 99% confidence). {shown} " in report.answers()[AUTOMATED][1]


def test_answers_say_what_was_not_measured() -> None:
    of_one, found = {"one": ClassCounts(9, 5, 2, 1, 1)}, {"fashion": 0.99, "near|far": 0.95, "hard": 1.0}
    none = dataclasses.replace(REPORT, accepted=0, accepted_wrong=0, by_class=of_one, flagged=found)
    right, automated, alarms, *_ = none.answers().values()
    assert automated[0] == "0 of 1000 images are accepted (0 %)." and "Wrong" not in automated[1]
    assert not any("alpha" in line for line in none.answers()[OTHERS])  # nearly all are found
    assert not any("class" in line for line in (*right, *alarms))  # one class is not compared
    alone_separated, quality = {"fashion": {"psc": separated(0.99, 0, 0)}}, {"psc": classification(0.1)}
    own = {"fashion": {"psc-decision": Acceptance(0.02, 0.3), "psc": Acceptance(0.04, 0.35)}}
    alone = dataclasses.replace(
        REPORT, separation=alone_separated, acceptance=own, classification=quality, flagged={"fashion": 1.0}
    )
    *_, others, _ = alone.answers().values()
    assert len(others) == 2 and "no other method" in others[1]
    *_, others, _ = dataclasses.replace(REPORT, separation={}, acceptance={}, flagged={}).answers().values()
    assert len(others) == 1 and "--ood" in others[0]


@pytest.mark.parametrize("has_checks", [True, False])
def test_only_a_model_with_checks_can_be_taught(has_checks: bool) -> None:
    lines = dataclasses.replace(REPORT, has_checks=has_checks).answers()[OTHERS]
    assert ("--learn" in lines[-1]) == has_checks and "alpha 0.1" in lines[-1]
    for shared in ({"hard": 30}, dict.fromkeys(REPORT.flagged, 30)):
        lines = dataclasses.replace(REPORT, has_checks=has_checks, shared=shared).answers()[OTHERS]
        assert ("--learn" in lines[-1]) == (has_checks and len(shared) == 1), "what would be taught is the classes"


def test_unknown_standard_error_is_a_tie() -> None:
    tiny = {"psc": separated(0.5, 0, math.inf), "knn": separated(1.0, -0.5, math.inf)}
    report = dataclasses.replace(REPORT, separation={"hard": tiny})
    assert any(line.startswith("hard: PSC ties with knn") for line in report.summary())
    document = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert document["separation"]["hard"]["knn"]["auroc_difference"] == {"value": -0.5, "standard_error": None}


def test_json_holds_every_number_and_the_summary() -> None:
    data = json.loads(json.dumps(REPORT.to_json(), allow_nan=False))
    assert data["classification"]["psc"]["nll"] == 0.136
    assert data["separation"]["hard"]["gda"]["auroc_difference"] == {"value": -0.05, "standard_error": 0.01}
    assert data["false_alarms"]["calibrated_acceptance"] == [20, 80]
    assert data["false_alarms"]["rate"] == 0.05 and data["misses"]["assessment"] == "higher than stated"
    assert data["by_class"]["one"]["false_alarms"] == 40
    assert data["summary"] == REPORT.summary()
