"""A row for each image that is drawn, and one Parquet file of the rows of a day."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("pyarrow", reason="pyarrow is not installed")

import pyarrow.parquet as pq

from app.inference.decoder import EncodedImage
from app.log import ROW_BYTES, OpenRows, Sampling, Source, Waiting, day_of, number_of
from psc_core.log.store import LoggedModel, file_of, image_path
from tests.app.fakes import FakeModel, FakeValueModel, pixels, png

VALUES = (0, 64, 255, 128)
"""Brightness of the images of a request; the classifier accepts all but the second, which is ambiguous."""

NOON = 1_700_049_600_000_000
"""15 November 2023, 12:00 UTC, microseconds."""


def request(sampling: Sampling, model: FakeModel | None = None, *, is_monitored: bool = True) -> Waiting:
    model = model or FakeModel()
    images = torch.stack([torch.from_numpy(pixels(value))[None] for value in VALUES])
    outputs = model.outputs(model.pipeline(images).numpy())
    decisions = model.calibration.thresholds(model.policy).decide(outputs)
    source = Source("m", LoggedModel(model.version, model.task, model.classes), sampling)
    files = [EncodedImage(png(value)) for value in VALUES]
    return Waiting(source, NOON, "r", files, outputs, decisions, model.policy, is_monitored, 100)


def written(rows: OpenRows) -> list[dict[str, Any]]:
    table: list[dict[str, Any]] = pq.read_table(io.BytesIO(rows.to_parquet())).to_pylist()
    return table


def test_an_image_is_drawn_by_its_number_and_decision() -> None:
    least = number_of("r", 0)
    made = request(Sampling(0.0, (least, 1.0, 1.0), (0.0, 0.0, 0.0)))
    accepted = [index for index in (0, 2, 3) if number_of("r", index) < least]
    assert [index for index, _ in made.drawn()] == sorted([1, *accepted]) and 0 not in accepted
    assert all(u == number_of("r", index) for index, u in made.drawn())


def test_rows_say_what_was_answered_and_which_images_are_stored() -> None:
    made = request(Sampling(0.0, (1.0, 1.0, 1.0), (0.0, 1.0, 1.0)))
    rows = OpenRows(made.source, day_of(NOON))
    (image,) = rows.add(made, made.drawn())
    digest = hashlib.sha256(png(64)).hexdigest()
    assert (image.path, image.data, image.row) == (image_path(digest, "png"), png(64), 1)
    assert len(rows) == 4 and rows.size == made.outputs.packed.nbytes + 4 * ROW_BYTES
    assert [row["image_path"] for row in written(rows)] == [None] * 4
    rows.stored(image)
    found = written(rows)
    assert [row["image_path"] for row in found] == [None, image.path, None, None]
    assert [row["label"] for row in found] == ["dark", "middle", "bright", "middle"]
    assert [row["decision"] for row in found] == ["accept", "abstain_ambiguous", "accept", "accept"]
    assert {(row["request_id"], row["bundle_version"], row["sampling_probability"]) for row in found} == {
        ("r", "v1", 1)
    }
    assert [row["image_index"] for row in found] == [0, 1, 2, 3] and rows.day == "2023-11-15"
    assert [row["predictive_entropy"] for row in found] == made.outputs["predictive_entropy"].tolist()


def test_only_images_that_came_as_pixels_are_stored_as_network_inputs() -> None:
    made = request(Sampling(0.0, (1.0, 1.0, 1.0), (1.0, 1.0, 1.0)))
    inputs = np.stack([pixels(value)[None] for value in VALUES])
    files = [EncodedImage(file_of(each)) for each in inputs]
    for images, suffix in ((inputs, ".dib"), (files, ".bmp")):
        stored = OpenRows(made.source, day_of(NOON)).add(made._replace(images=images), made.drawn())
        assert [Path(each.path).suffix for each in stored] == [suffix] * 4
        assert [each.data for each in stored] == [file.data for file in files]


def test_rows_of_several_requests_follow_each_other() -> None:
    made = request(Sampling(0.0, (1.0, 1.0, 1.0), (0.0, 1.0, 1.0)))
    rows = OpenRows(made.source, day_of(NOON))
    drawn = made.drawn()
    assert [image.row for _ in range(2) for image in rows.add(made, drawn[1:])] == [0, 3]
    assert [row["image_index"] for row in written(rows)] == [1, 2, 3, 1, 2, 3]


@pytest.mark.parametrize("is_monitored", [True, False])
def test_images_that_are_not_monitored_are_never_of_the_audit_slice(is_monitored: bool) -> None:
    made = request(Sampling(1.0, (1.0, 1.0, 1.0), (1.0, 1.0, 1.0)), is_monitored=is_monitored)
    rows = OpenRows(made.source, day_of(NOON))
    rows.add(made, made.drawn())
    assert {(row["sampled"], row["sample_probability"]) for row in written(rows)} == {
        (is_monitored, float(is_monitored))
    }


def test_a_regression_has_neither_labels_nor_probabilities() -> None:
    made = request(Sampling(0.0, (1.0, 1.0, 1.0), (0.0, 0.0, 0.0)), FakeValueModel())
    rows = OpenRows(made.source, day_of(NOON))
    assert rows.add(made, made.drawn()) == []
    found = written(rows)
    assert {(row["label"], row["probabilities"]) for row in found} == {(None, None)}
    assert [row["mean"] for row in found] == made.outputs["mean"].tolist()
