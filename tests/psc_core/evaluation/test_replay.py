"""Logged images under another bundle."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

from psc_core.errors import UsageError
from psc_core.evaluation.replay import replay
from psc_core.log.sample import read_sample
from psc_core.log.store import image_path, open_log
from psc_core.model import FittedModel
from psc_core.report.page import replay_text, write_replay
from tests.logged import Logged, dimmed, png, write_log
from tests.opened import loaded, opened


@pytest.fixture(scope="module")
def model(tiny_bundle: Path) -> FittedModel:
    return loaded(tiny_bundle)


def test_tables_say_what_they_are_of(model: FittedModel, tmp_path: Path) -> None:
    digits = opened("mnist")
    contents = [*(png(digits.image(i)[0]) for i in range(30)), *(dimmed(digits, i) for i in range(30))]
    now = model.predict(contents)
    other = {"accept": "abstain_ood", "abstain_ood": "accept", "abstain_ambiguous": "accept"}
    images = [
        Logged(
            content,
            sampled=i % 2 == 0,
            sample_probability=0.5 if i < 30 else 0.1,
            decision=other[now.decision[i]] if i % 3 == 0 else now.decision[i],
            answered="0" if i % 5 == 0 else now.labels[i],
        )
        for i, content in enumerate(contents)
    ]
    found = replay(
        write_log(tmp_path / "log", [*images, images[0], Logged(png(np.zeros((9, 9), np.uint8)), stored=False)]), model
    )
    assert len(found.rows) == 61 and len(found.images) == 60 and len(found.sample) == 31
    weights = [2.0 if i < 30 else 10.0 for i in range(0, 60, 2)] + [2.0]
    flips = [i % 3 == 0 for i in range(0, 60, 2)] + [True]
    flipped = found.flipped()
    assert flipped.rows == sum(flips)
    assert flipped.value == pytest.approx(sum(w for w, hit in zip(weights, flips, strict=True) if hit) / sum(weights))
    assert flipped.interval.low < flipped.value < flipped.interval.high
    document = found.to_json()
    json.dumps(document, allow_nan=False)
    assert sum(cell["rows"] for cell in document["stored_images"]["table"]) == 61
    assert sum(cell["fraction"] for cell in document["all_images"]["table"]) == pytest.approx(1)
    for before, after, examples in found.flips():
        assert before != after and len({row.position for row in examples}) == len(examples)
        scores = [row.ood_score for row in examples]
        assert scores == sorted(scores, reverse=after == "accept")
    assert "another label" in replay_text(found) and "relabelled" in document["all_images"]
    assert {"target", "moves"}.isdisjoint({*document, *document["stored_images"]})
    write_replay(found, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert page.count("<img") == sum(len(examples) for _, _, examples in found.flips()) and "nan" not in page


def test_without_a_random_sample_nothing_is_said_of_all(model: FittedModel, tmp_path: Path) -> None:
    image = Logged(png(np.zeros((28, 28), np.uint8)), sampled=False, answered="<b>", decision="accept")
    found = replay(write_log(tmp_path / "log", [image], model="<i>"), model)
    assert "all_images" not in found.to_json()
    write_replay(found, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "<i>" not in page and "&lt;i&gt;" in page
    with pytest.raises(UsageError, match="has no rows"):
        replay(open_log(tmp_path / "none"), model)
    log = write_log(tmp_path / "unstored", [Logged(image.content, stored=False)])
    with pytest.raises(UsageError, match="--log-images"):
        replay(log, model)


def test_a_regression_has_no_labels_but_numbers_that_moved(angle_bundle: Path, tmp_path: Path) -> None:
    model = loaded(angle_bundle)
    contents = [png(np.full((28, 28), 40 * i, np.uint8)) for i in range(5)]
    outputs = model.compute(contents)
    moves, images = [1.0, -2.0, 3.0, 4.0, 0.0], []
    for i, (content, move) in enumerate(zip(contents, moves, strict=True)):
        scores = {name: float(outputs[name][i]) for name in outputs.scores}
        logged = {**scores, "mean": scores["mean"] + move, "aleatoric": 0.0, "epistemic": 0.0}
        images.append(
            Logged(content, sampled=i < 3, sample_probability=0.5 if i else 0.01, scores=logged if i < 4 else {})
        )
    found = replay(write_log(tmp_path / "log", images), model)
    deviation = torch.hypot(outputs["aleatoric"], outputs["epistemic"])[:4]
    stored, sample = found.moves(), found.sampled_moves()
    assert [(each.name, each.rows) for each in stored] == [("mean", 4), ("deviation", 4)]
    assert [stored[0].median, stored[0].largest] == pytest.approx([2, 4], abs=1e-3)
    assert stored[1].largest == pytest.approx(float(deviation.max()), rel=1e-4)
    assert [sample[0].rows, sample[0].median, sample[0].largest] == pytest.approx(
        [3, 1, 3], abs=1e-3
    )  # The first weighs 100.
    document = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert document["target"] == {"name": "angle", "unit": "degrees"}
    assert document["stored_images"]["moves"] == [asdict(each) for each in stored]
    assert document["all_images"]["moves"] == [asdict(each) for each in sample]
    assert found.relabelled() is None and "relabelled" not in document["all_images"]
    write_replay(found, tmp_path / "page.html")
    for text in (replay_text(found), (tmp_path / "page.html").read_text()):
        assert "(angle, degrees)" in text and "another label" not in text


@pytest.mark.parametrize("cut", [0, 40, None])
def test_images_that_a_power_cut_damaged_are_left_out(model: FittedModel, tmp_path: Path, cut: int | None) -> None:
    images = [Logged(png(np.full((28, 28), 8 * i, np.uint8)), "label", "1", scores={"ood_score": i}) for i in range(9)]
    log = write_log(tmp_path, images)
    damaged = image_path(images[4].sha256, "png")
    if cut is None:
        log.delete(damaged)
    else:
        log.put(damaged, images[4].content[:cut])
    with pytest.warns(UserWarning, match=f"1 of 9 .*{damaged}.*psc-log delete"):
        found = replay(log, model)
    assert [row.position for row in found.rows] == list(range(8)) and len(found.images) == 8
    assert found.images.image(4)[0, 0, 0] == 8 * 5
    with pytest.warns(UserWarning, match=damaged):
        sample = read_sample(log, model)
    assert len(sample.of_class) == len(sample.weights) == 8
