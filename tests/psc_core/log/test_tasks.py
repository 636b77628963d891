"""Tasks for people come back as answers."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

from psc_core.log.labels import Labels, labels_of, read_answers
from psc_core.log.review import label_studio_prefix, review, to_csv, to_label_studio
from tests.psc_core.log.support import add_values, make_log


def test_tasks_of_label_studio(tmp_path: Path) -> None:
    log = make_log(tmp_path, 4)
    add_values(log)
    chosen = review(log, Labels())
    tasks = json.loads(to_label_studio(chosen, label_studio_prefix(log)))
    assert len(tasks) == 5
    scores = [each["predictions"][0]["score"] for each in tasks]
    assert scores == sorted(scores) and scores[0] >= 0 and scores[-1] < 1
    for each, image in zip(tasks, chosen, strict=True):
        (prediction,) = each["predictions"]
        assert prediction["model_version"] == image.row["bundle_version"]
        assert each["data"]["image"] == f"/data/local-files/?d={image.row['image_path']}"
        assert each["data"]["sampled"] is False and each["data"]["reason"]
        if image.row["label"] is None:
            assert prediction["result"] == []
        else:
            (region,) = prediction["result"]
            assert (region["type"], region["value"]) == ("choices", {"choices": ["dog"]})
    for each in tasks:  # What people make of them is read back.
        each["annotations"] = [{"result": each["predictions"][0]["result"], "completed_by": 1}]
    (tmp_path / "done.json").write_text(json.dumps(tasks))
    assert {each.label for each in labels_of(log, read_answers(tmp_path / "done.json"))} == {"dog"}


def test_lines_of_a_csv(tmp_path: Path) -> None:
    log = make_log(tmp_path, 4)
    text = to_csv(review(log, Labels()), "https://images/")
    lines = list(csv.DictReader(io.StringIO(text)))
    assert len(lines) == 4 and all(line["image"].startswith("https://images/images/") for line in lines)
    (tmp_path / "labels.csv").write_text(text)
    assert labels_of(log, read_answers(tmp_path / "labels.csv")) == []
    (tmp_path / "labels.csv").write_text(text.replace("False,\r\n", "False,cat\r\n"))
    assert len(labels_of(log, read_answers(tmp_path / "labels.csv"))) == 4
    assert to_csv([], "").startswith("request_id,")
