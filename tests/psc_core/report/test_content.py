"""What a report keeps comes back as it was, or with one clear error."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from psc_core.errors import BundleError
from psc_core.report.content import FILE, Content
from psc_core.tasks import TASKS
from tests.psc_core.report.support import content, value_content


def test_comes_back_as_it_was(tmp_path: Path) -> None:
    kept = content()
    kept.save(tmp_path)
    back = Content.load(tmp_path, TASKS["classification"])
    assert back.version == kept.version
    assert [(images.name, images.role) for images in back.sets] == [(each.name, each.role) for each in kept.sets]
    for got, expected in zip(back.sets, kept.sets, strict=True):
        assert got.quality == expected.quality
        for name in ("ood_score", "entropy", "predicted", "labels"):
            assert torch.equal(getattr(got, name), getattr(expected, name))
        assert {name: values.tolist() for name, values in got.correct.items()} == {
            name: values.tolist() for name, values in expected.correct.items()
        }
    assert back.pictures[0].why == "most typical" and back.pictures[0].pixels.shape == (1, 4, 5)
    assert torch.equal(back.sizes["nc4"], kept.sizes["nc4"])


def test_numbers_of_a_regression_come_back_as_they_were(tmp_path: Path) -> None:
    kept = value_content()
    groups = {"near": torch.tensor([0, 2]), "far": torch.tensor([1])}
    kept = replace(kept, sets=(*kept.sets[:2], replace(kept.sets[2], groups=groups)))
    kept.save(tmp_path)
    back = Content.load(tmp_path, TASKS["regression"]).sets
    for got, expected in zip(back, kept.sets, strict=True):
        assert type(got) is type(expected) and (got.name, got.role) == (expected.name, expected.role)
        assert got.quality == expected.quality
        for name in ("ood_score", "mean", "deviation", "values"):
            assert torch.equal(getattr(got, name), getattr(expected, name))
    assert {name: positions.tolist() for name, positions in back[2].groups.items()} == {"near": [0, 2], "far": [1]}


def test_an_image_may_be_shown_for_two_reasons(tmp_path: Path) -> None:
    kept = content()
    other = replace(kept.pictures[0], why="most unusual")
    replace(kept, pictures=(kept.pictures[0], other)).save(tmp_path)
    assert [picture.why for picture in Content.load(tmp_path, TASKS["classification"]).pictures] == [
        "most typical",
        "most unusual",
    ]


def test_a_test_comes_behind_its_fit() -> None:
    fitted, tested = content(), replace(content(), sets=content().sets[1:], pictures=())
    both = fitted.extended_by(tested)
    assert [images.name for images in both.sets] == ["validation", "turned", "clothes", "turned", "clothes"]
    assert both.pictures == fitted.pictures and both.sizes == fitted.sizes
    others = (replace(fitted.pictures[0], why="most unusual"),)
    assert fitted.extended_by(replace(tested, pictures=others)).pictures == others


@pytest.mark.parametrize("task", TASKS)
def test_a_file_that_is_missing_or_damaged(tmp_path: Path, task: str) -> None:
    with pytest.raises(BundleError, match="--no-report"):
        Content.load(tmp_path, TASKS[task])
    (tmp_path / FILE).write_bytes(b"no tensors")
    with pytest.raises(BundleError, match="is damaged"):
        Content.load(tmp_path, TASKS[task])
    for metadata in ({}, {"report": "[]"}, {"report": '{"version": "v", "sets": [{"name": "a"}], "pictures": []}'}):
        save_file({"x": torch.zeros(1)}, tmp_path / FILE, metadata=metadata)
        with pytest.raises(BundleError, match="is damaged"):
            Content.load(tmp_path, TASKS[task])


def test_content_of_another_task_is_damaged(tmp_path: Path) -> None:
    content().save(tmp_path)
    with pytest.raises(BundleError, match="is damaged"):
        Content.load(tmp_path, TASKS["regression"])
