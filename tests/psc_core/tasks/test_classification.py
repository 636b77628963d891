"""A classifier: its answers, the calibration of its thresholds and sets, and its first evaluation."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from psc_core import PSC, FitSettings
from psc_core.answers import (
    ACCEPTS_NOTHING,
    CLASSIFICATION_DECISIONS,
    CLASSIFICATION_SCORES,
    RISKS,
    ClassificationAnswer,
    ClassificationExplanation,
    ClassificationPolicy,
)
from psc_core.data.dataset import ArraySource, ImageDataset, label_images
from psc_core.errors import BundleError, FitError, UsageError
from psc_core.heads.base import entropy
from psc_core.tasks.base import FloatArray, Outputs, pack, run_network
from psc_core.tasks.classification import (
    ABSTAIN_AMBIGUOUS,
    RISK_CONFIDENCE,
    Calibration,
    Classification,
    Errors,
    fewest_to_show,
    first_test,
    fit_calibration,
    network_accuracy,
)
from tests.conftest import TinyJob
from tests.decisions import IMAGES, Decider
from tests.opened import opened
from tests.reference import calibration as naive

TASK = Classification()
CLASSES = ('a "quoted" label', "ä", "2")
numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)
fractions = st.floats(0, 1, width=32)
packed_outputs = (
    st.integers(1, 5)
    .flatmap(
        lambda n: st.tuples(
            hnp.arrays(np.float32, (n, len(CLASSIFICATION_SCORES)), elements=numbers),
            hnp.arrays(np.float32, (n, 3), elements=fractions),
        )
    )
    .map(np.hstack)
)
policies = st.builds(
    ClassificationPolicy,
    alpha=st.integers(1, IMAGES).map(lambda rank: rank / (IMAGES + 1)),
    ambiguity_threshold=fractions,
    coverage=st.just(0.9),
)


def documents(
    outputs: Outputs[FloatArray], probability: float, policy: ClassificationPolicy, top_k: int | None = None
) -> list[Any]:
    """The documents as a client reads them."""
    decisions = Decider(policy, probability).decide(outputs)
    built = decisions.documents(outputs, CLASSES[: outputs.probabilities.shape[1]], top_k=top_k)
    text = orjson.dumps(built, option=orjson.OPT_SERIALIZE_NUMPY)
    parsed: list[Any] = json.loads(text, parse_float=lambda number: float(np.float32(number)))
    return parsed


def naive_document(
    values: list[float], probability: float, policy: ClassificationPolicy, top_k: int | None
) -> dict[str, Any]:
    entropy, log_density, ood_score, p_value, epistemic, *probabilities = values
    best = max(range(3), key=lambda k: (probabilities[k], -k))
    steps = IMAGES + 1  # p-values are whole numbers of these
    is_ood = p_value * steps <= round(policy.alpha * steps) + 0.5
    ambiguous = bool(entropy > np.float32(policy.ambiguity_threshold))
    document: dict[str, Any] = {"label": CLASSES[best], "class_index": best, "confidence": probabilities[best]}
    if top_k is None:
        document["probabilities"] = probabilities
    else:
        order = sorted(range(3), key=lambda k: -probabilities[k])[:top_k]
        document["top"] = [{"label": CLASSES[k], "probability": probabilities[k]} for k in order]
    return {
        **document,
        "predictive_entropy": entropy,
        "log_density": log_density,
        "ood_score": ood_score,
        "ood_p_value": p_value,
        "epistemic": epistemic,
        "is_ood": is_ood,
        "decision": CLASSIFICATION_DECISIONS[2 if is_ood else int(ambiguous)],
        "prediction_set": [CLASSES[k] for k in range(3) if probabilities[k] >= probability or k == best],
    }


@settings(max_examples=settings().max_examples // 3)
@given(packed_outputs, fractions, policies, st.none() | st.integers(1, 4))
def test_equals_the_naive_document(
    packed: FloatArray, probability: float, policy: ClassificationPolicy, top_k: int | None
) -> None:
    outputs = Outputs(packed, CLASSIFICATION_SCORES, ())
    outputs["ood_p_value"][:] = np.round(np.clip(outputs["ood_p_value"], 0, 1) * (IMAGES + 1)) / (IMAGES + 1)
    expected = [naive_document(values, probability, policy, top_k) for values in packed.tolist()]
    got = documents(outputs, probability, policy, top_k)
    for document, of_image in zip(got, expected, strict=True):
        assert list(document) == list(of_image) and document == of_image
        assert ClassificationAnswer.model_validate(document).model_dump(exclude_none=True) == document


def test_the_likely_classes_are_a_small_prediction_set() -> None:
    row = [0.1, -0.3, 0.4, 0.5, 0.2, 0.1, 0.4, 0.3, 0.2]
    outputs = Outputs(np.array([row], np.float32), CLASSIFICATION_SCORES, ())
    policy = ClassificationPolicy(alpha=0.05, ambiguity_threshold=0.5, coverage=0.9)
    found = [Decider(policy, limit).decide(outputs).likely_classes(outputs) for limit in (0.35, 0.15, 0.05)]
    assert found == [[[1]], [[1, 2, 3]], [[1, 2]]]  # Of a large set the two most probable.


def test_checks_are_named() -> None:
    row = [0.1, -0.3, 0.4, 0.5, 0.2, 0.25, 0.05, 0.7, 0.125, 0.75]
    outputs = Outputs(np.array([row], np.float32), CLASSIFICATION_SCORES, ("texture", "content"))
    (document,) = documents(outputs, 1.0, ClassificationPolicy(alpha=0.05, ambiguity_threshold=0.5, coverage=0.9))
    assert document["checks"] == {"texture": 0.125, "content": 0.75}
    assert len(document["probabilities"]) == 3
    assert ClassificationAnswer.model_validate(document).model_dump(exclude_none=True) == document


def test_threshold_beyond_every_float32_is_never_reached() -> None:
    outputs = Outputs(np.array([[3e38, 0, 0, 1, 0, 1.0]], np.float32), CLASSIFICATION_SCORES, ())
    policy = ClassificationPolicy(alpha=0.05, ambiguity_threshold=1e300, coverage=0.9)
    assert documents(outputs, 1.0, policy)[0]["decision"] == "accept"


def explanation(**more: npt.NDArray[np.float32]) -> dict[str, npt.NDArray[Any]]:
    return {
        "nearest_class": np.array([1]),
        "class_distances": np.array([[3.0, 1.0, 2.0]], np.float32),
        "component_deviation": np.array([[0.5, -4.0, 1.0, 0.0, 2.0, -0.1, 3.0]], np.float32),
        **more,
    }


def test_explanation_names_the_most_unusual_components() -> None:
    split = {"aleatoric": np.array([0.5], np.float32), "epistemic": np.array([0.25], np.float32)}
    (document,) = TASK.explanations(explanation(**split), CLASSES, ("layer3",))
    document["class_distances"] = document["class_distances"].tolist()
    assert ClassificationExplanation.model_validate(document).model_dump() == {
        **document, "map": None, "nearest": None, "reviewed": None
    }  # fmt: skip
    assert document["nearest_class"] == "ä"
    assert [each["component"] for each in document["unusual_components"]] == [1, 6, 4, 2, 0]
    assert [each["deviation"] for each in document["unusual_components"]] == [-4.0, 3.0, 2.0, 1.0, 0.5]
    assert (document["aleatoric"], document["epistemic"]) == (0.5, 0.25)


def test_explanation_of_original_predictions_does_not_split_the_uncertainty() -> None:
    (document,) = TASK.explanations(explanation(), CLASSES, ("layer3",))
    assert (document["aleatoric"], document["epistemic"]) == (None, None)


def calibrate(n: int = 200, classes: int = 4) -> Calibration:
    random = torch.Generator().manual_seed(0)
    probabilities = torch.randn(n, classes, generator=random).mul(2).softmax(1)
    drawn = torch.multinomial(probabilities, 1, generator=random)[:, 0]
    entropy = torch.special.entr(probabilities).sum(1)
    return fit_calibration(torch.randn(n, generator=random), entropy, probabilities, drawn)


def prediction_sets(threshold: float, probabilities: Tensor) -> Tensor:
    packed = torch.cat([torch.zeros(len(probabilities), len(CLASSIFICATION_SCORES)), probabilities], 1)
    policy = ClassificationPolicy(alpha=0.5, ambiguity_threshold=1.0, coverage=0.9)
    decisions = Decider(policy, threshold).decide(Outputs(packed.numpy(), CLASSIFICATION_SCORES, ()))
    return torch.from_numpy(decisions.prediction_set)


@pytest.mark.parametrize("risk", [0.01, 0.05, 0.2])
def test_fewest_images_that_show_a_threshold(risk: float) -> None:
    n = fewest_to_show(risk)
    shown = [
        Errors.of(torch.linspace(0, 1, count), torch.ones(count, dtype=torch.bool)).threshold(risk) is not None
        for count in (n - 1, n)
    ]
    assert shown == [False, True]


@pytest.mark.parametrize("sure", [0.9, 0.96, 1.0])
def test_images_of_which_the_network_is_sure_are_accepted(sure: float) -> None:
    entropy = torch.linspace(-sure, 1 - sure, 2000).clamp(min=0)
    found = Errors.of(entropy, torch.ones(2000, dtype=torch.bool)).threshold(0.05)
    assert found is not None and found >= 0
    assert Errors.of(entropy, torch.arange(2000) % 10 > 0).threshold(0.05) is None


def test_rejects_scores_that_are_not_finite() -> None:
    n, zeros = 5, torch.zeros(5)
    with pytest.raises(FitError, match="finite OOD scores"):
        fit_calibration(zeros - math.inf, zeros, torch.full((n, 2), 0.5), torch.zeros(n, dtype=torch.int64))


@given(
    st.lists(st.tuples(st.sampled_from([0.0, 0.1, 0.5, 0.7, 1.0, 2.0]), st.booleans()), min_size=1, max_size=60),
    st.sampled_from([0.01, 0.05, 0.3, 0.9]),
    st.sampled_from([0.5, 0.95]),
)
def test_ambiguity_threshold_matches_counting(images: list[tuple[float, bool]], risk: float, quantile: float) -> None:
    entropy = torch.tensor([value for value, _ in images])
    correct = torch.tensor([right for _, right in images])
    first = first_test(len(images), risk)
    expected = naive.ambiguity_threshold(entropy, correct, risk, quantile, confidence=RISK_CONFIDENCE, first=first)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("psc_core.tasks.classification.LARGEST_QUANTILE", quantile)
        got = Errors.of(entropy, correct).threshold(risk)
    assert got == (None if expected is None else pytest.approx(expected))


def test_the_lowest_risk_is_kept_in_the_stated_fraction_of_calibrations() -> None:
    """Of images of entropy h a fraction (c h)³ is wrong, so where all below t are accepted (c t)³ / 4 are.

    For each c another of the risks is close to what the smallest threshold that is tested keeps.
    """
    generator = torch.Generator().manual_seed(0)
    for hardness in (0.7, 1.0, 1.3, 1.6):
        kept = 0
        for _ in range(200):
            entropy = torch.rand(500, generator=generator)
            correct = torch.rand(500, generator=generator) >= (hardness * entropy).clamp(max=1) ** 3
            found = Errors.of(entropy, correct).lowest(RISKS)
            kept += found is None or (hardness * found[1]) ** 3 / 4 <= found[0]
        assert kept >= 0.95 * 200


@given(st.integers(0, 2**32), st.integers(1, 300), st.floats(0, 1))
def test_the_lowest_risk_is_the_first_that_a_threshold_keeps(seed: int, n: int, errors: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    entropy, wrong = torch.rand(n, generator=generator), torch.rand(n, generator=generator) < errors
    counted = Errors.of(entropy, ~wrong)
    thresholds = [counted.threshold(risk, confidence=1 - 0.05 / len(RISKS)) for risk in RISKS]
    shown = [(risk, threshold) for risk, threshold in zip(RISKS, thresholds, strict=True) if threshold is not None]
    assert counted.lowest(RISKS) == (shown[0] if shown else None)
    asked = counted.threshold(0.07)
    assert counted.lowest([0.07]) == (None if asked is None else (0.07, asked))


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.1, 0.5, 0.7]), st.booleans()), max_size=40))
def test_bounds_are_those_of_clopper_and_pearson(images: list[tuple[float, bool]]) -> None:
    """So many errors have at the bound exactly the probability 1 − confidence, one image being left out."""
    entropy, correct = (torch.tensor([row[i] for row in images]) for i in range(2))
    at = torch.tensor([-1.0, 0.0, 0.3, 0.7, 2.0])
    for threshold, bound in zip(at.tolist(), Errors.of(entropy, correct.bool()).bounds_at(at).tolist(), strict=True):
        accepted = [right for value, right in images if value <= threshold + 1e-6]
        n, errors = len(accepted) - 1, accepted.count(False)
        if errors >= n:
            assert bound == 1
        else:
            tail = math.fsum(math.comb(n, k) * bound**k * (1 - bound) ** (n - k) for k in range(errors + 1))
            assert tail == pytest.approx(1 - RISK_CONFIDENCE, rel=1e-4)


@pytest.mark.parametrize(("n", "accuracy"), [(8, 0.5), (100, 0.7), (1000, 0.5)])
def test_of_guesses_no_risk_is_shown(n: int, accuracy: float) -> None:
    generator = torch.Generator().manual_seed(n)
    entropy = torch.rand(n, generator=generator)
    found = [Errors.of(entropy, torch.rand(n, generator=generator) < accuracy).lowest(RISKS) for _ in range(200)]
    assert found.count(None) >= 0.95 * 200


@given(st.floats(0, 88), st.integers(2, 50))
def test_where_nothing_is_accepted_no_entropy_is_low_enough(sharpness: float, classes: int) -> None:
    """Not even that of a probability of 1."""
    probabilities = torch.zeros(1, classes)
    probabilities[0, 0] = sharpness
    scores = dict.fromkeys(CLASSIFICATION_SCORES, torch.ones(1)) | {"predictive_entropy": torch.zeros(1)}
    policy = ClassificationPolicy(alpha=0.05, ambiguity_threshold=ACCEPTS_NOTHING, coverage=0.9)
    outputs = Outputs(pack(CLASSIFICATION_SCORES, scores, probabilities.softmax(1)).numpy(), CLASSIFICATION_SCORES, ())
    assert Decider(policy, 1.0).decide(outputs).decision == [ABSTAIN_AMBIGUOUS]


def test_a_policy_that_so_few_images_cannot_keep() -> None:
    fitted = calibrate(99)
    fitted.check(ClassificationPolicy(alpha=0.05, ambiguity_threshold=1.0, coverage=0.9))
    assert fitted.ood_score_threshold(0.05) == sorted(fitted.ood_scores.tolist())[-5]
    with pytest.raises(UsageError, match="expected alpha"):
        fitted.check(ClassificationPolicy(alpha=0.001, ambiguity_threshold=1.0, coverage=0.9))


@given(st.integers(0, 2**16), st.integers(5, 40), st.integers(50, 83))
def test_prediction_sets_match_the_definition(seed: int, n: int, percent: int) -> None:
    random = torch.Generator().manual_seed(seed)
    probabilities = (torch.randint(0, 4, (n, 3), generator=random) + 0.5).float()
    probabilities /= probabilities.sum(1, keepdim=True)
    labels = torch.randint(0, 3, (n,), generator=random)
    fitted = fit_calibration(torch.zeros(n), torch.zeros(n), probabilities, labels)
    true = probabilities.gather(1, labels[:, None])[:, 0].tolist()
    got = prediction_sets(fitted.quantile(percent / 100), probabilities)
    for row, members in zip(probabilities.tolist(), got, strict=True):
        assert set(members.nonzero()[:, 0].tolist()) == naive.prediction_set(true, row, Fraction(percent, 100))


def test_a_tiny_coverage_has_the_largest_quantile() -> None:
    fitted = calibrate(30)
    assert fitted.quantile(1e-14) == float(fitted.label_probabilities[-1])


def test_quantiles_of_the_entropies() -> None:
    entropies = torch.rand(99).sort().values
    quantiles = replace(calibrate(99), entropies=entropies).entropy_quantiles()
    assert quantiles == pytest.approx(np.percentile(entropies.double().numpy(), range(101)).tolist(), abs=1e-6)


@given(st.floats(-2, 5, width=32))
def test_a_policy_with_another_threshold_promises_what_its_images_show(threshold: float) -> None:
    fitted = replace(calibrate(3), entropies=torch.tensor([0.0, 0.5, 1.0]), error_bounds=torch.tensor([1.0, 0.2, 0.1]))
    policy = ClassificationPolicy(alpha=0.5, ambiguity_threshold=0.7, coverage=0.5, risk=0.03)
    expected = {0: None, 1: None, 2: 0.2, 3: 0.1}[sum(threshold >= entropy for entropy in (0.0, 0.5, 1.0))]
    changed = fitted.changed(policy, {"ambiguity_threshold": threshold})
    assert changed.model_dump()["risk"] == (expected and pytest.approx(expected))
    for same in ({"alpha": 0.1}, {"ambiguity_threshold": 0.7}):  # The threshold that was chosen by the errors.
        assert fitted.changed(policy, same).model_dump()["risk"] == 0.03


def test_tensors_round_trip() -> None:
    fitted = calibrate()
    again = Calibration.from_tensors(fitted.tensors())
    assert len(again) == 200
    assert all(torch.equal(tensor, again.tensors()[name]) for name, tensor in fitted.tensors().items())
    assert all(fitted.tensors()[name].dtype == torch.float32 for name in ("ood_scores", "entropies"))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("ood_scores", None), ("ood_scores", torch.Tensor.double), ("ood_scores", lambda t: t.flip(0)),
        ("ood_scores", lambda t: t * 1e30), ("entropies", lambda t: t[:-1]), ("entropies", lambda t: t * math.nan),
        ("entropies", lambda t: t - 1), ("labels", lambda t: t + 3), ("labels", lambda t: t[0]),
        ("labels", lambda t: t[:, None]), ("labels", torch.Tensor.float), ("error_bounds", None),
        ("error_bounds", lambda t: t + 1), ("error_bounds", lambda t: t * math.nan),
        ("label_probabilities", lambda t: t + 1), ("num_classes", torch.Tensor.int),
    ],
)  # fmt: skip
def test_rejects_unusable_tensors(name: str, change: Callable[[Tensor], Tensor] | None) -> None:
    tensors = dict(calibrate().tensors())
    tensor = tensors.pop(name)
    if change is not None:
        tensors[name] = change(tensor)
    with pytest.raises(BundleError, match="expected"):
        Calibration.from_tensors(tensors)


def test_rejects_scores_of_other_classes() -> None:
    calibrate().check_classes(calibrate().num_classes)
    with pytest.raises(BundleError, match="of 7 classes"):
        calibrate().check_classes(7)


def test_p_value_equal_to_alpha_is_ood(psc: PSC, digits: torch.Tensor) -> None:
    ranks = len(psc.calibration) + 1
    p_value = round(ranks * float(psc.predict(digits[:1]).ood_p_value)) / ranks  # Before it was rounded to float32.
    at, below = (
        dataclasses.replace(psc, policy=psc.policy.model_copy(update={"alpha": alpha}))
        for alpha in (p_value, p_value * (1 - 1e-6))
    )
    assert at.predict(digits[:1]).decision == ("abstain_ood",)
    assert at.predict(digits[:1]).is_ood.tolist() == [True]
    assert below.predict(digits[:1]).is_ood.tolist() == [False]


def test_what_is_no_number_is_not_accepted(psc: PSC, digits: torch.Tensor) -> None:
    open_to_all = dataclasses.replace(psc, policy=psc.policy.model_copy(update={"ambiguity_threshold": 9.0}))
    packed = psc.compute(digits[:4]).packed.numpy()
    outputs = psc.outputs(packed)
    outputs["ood_p_value"][:] = 1
    outputs["predictive_entropy"][1] = float("nan")
    names = [open_to_all.decide(outputs).decision_names[code] for code in open_to_all.decide(outputs).decision]
    assert names == ["accept", "abstain_ambiguous", "accept", "accept"]


def test_fields_of_a_prediction_agree(psc: PSC, digits: torch.Tensor) -> None:
    prediction = psc.predict(digits)
    torch.testing.assert_close(prediction.probabilities.sum(1), torch.ones(len(digits)))
    torch.testing.assert_close(prediction.predictive_entropy, entropy(prediction.probabilities))
    assert tuple(prediction.checks) == psc.checks == ("texture", "content")
    assert torch.equal(prediction.is_ood, prediction.ood_p_value <= psc.policy.alpha)
    assert prediction.labels == tuple(psc.classes[i] for i in prediction.class_index.tolist())
    best = prediction.probabilities.max(1)
    assert torch.equal(prediction.confidence, best.values)
    threshold = psc.calibration.quantile(psc.policy.coverage)
    assert prediction.prediction_set == tuple(
        tuple(name for k, name in enumerate(psc.classes) if p[k] >= threshold or k == top)
        for p, top in zip(prediction.probabilities.tolist(), best.indices.tolist(), strict=True)
    )
    scores = psc.calibration.ood_scores.double()
    expected = [(1 + int((scores >= float(s)).sum())) / (1 + len(scores)) for s in prediction.ood_score]
    torch.testing.assert_close(prediction.ood_p_value.double(), torch.tensor(expected).double(), atol=1e-6, rtol=0)


COMPUTE = FitSettings(device="cpu").compute()


@pytest.fixture(scope="module")
def train() -> ImageDataset:
    return opened("mnist", "train")


def test_network_accuracy_counts_the_fraction_of_labels_that_is_predicted(train: ImageDataset) -> None:
    data = replace(train, labels=train.labels.repeat_interleave(2), offsets=2 * train.offsets)
    k = len(data.classes)
    data.labels[::6] = (data.labels[::6] + 1) % k
    images = torch.cat([batch.images for batch in data.batches(256)])
    lookup = {image.numpy().tobytes(): i for i, image in enumerate(images)}
    answers = torch.randint(0, k, (len(data),), generator=torch.Generator().manual_seed(0))
    answers[: len(data) // 2] = data.labels[::2][: len(data) // 2]

    class Remembers(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            pixels = ((x - shift) / scale).round().to(torch.uint8)
            return torch.nn.functional.one_hot(answers[[lookup[each.numpy().tobytes()] for each in pixels]], k).float()

    scale, shift = data.preprocess.scale_and_shift()
    pairs = data.labels.view(-1, 2)
    expected = float((pairs == answers[:, None]).double().mean())
    assert network_accuracy(Remembers(), data, COMPUTE)[0] == pytest.approx(expected)


def test_warns_of_validation_images_that_are_prepared_otherwise(tiny_job: TinyJob, train: ImageDataset) -> None:
    val = opened("mnist", "val")
    turned = torch.cat([batch.images for batch in val.batches(256)])[:, 0].flip(1).numpy()
    others = label_images("turned", val.classes, ArraySource(turned), val.labels, val.preprocess)
    said = Classification.first_evaluation(tiny_job.net, train, others, COMPUTE)
    assert "much harder" in said.warning


def test_warns_of_classes_in_another_order(tiny_job: TinyJob, train: ImageDataset) -> None:
    some = train.subset(torch.arange(300))
    right = run_network(tiny_job.net, some, COMPUTE).argmax(1) == some.first_labels()
    few = some.subset(torch.cat([right.nonzero()[:, 0], (~right).nonzero()[:20, 0]]))  # as of a network trained longer
    said = Classification.first_evaluation(lambda x: tiny_job.net(x).roll(1, 1), few, few, COMPUTE)
    assert "NO BETTER THAN GUESSING" in said.warning and "in another order" in said.warning


def test_images_are_counted_that_a_network_gives_nan_on(tiny_job: TinyJob, train: ImageDataset) -> None:
    def broken(x: Tensor) -> Tensor:
        outputs: Tensor = tiny_job.net(x)
        return torch.where((outputs.argmax(1) == 3)[:, None], torch.nan, outputs)

    few = train.subset(torch.arange(300))
    count = int((run_network(tiny_job.net, few, COMPUTE).argmax(1) == 3).sum())
    said = Classification.first_evaluation(broken, few, few, COMPUTE)
    assert f"{2 * count} of 600 images" in said.warning
