"""What a log keeps of a bundle tells which labels can be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unicodedata import normalize

import pytest

from psc_core.errors import DataError
from psc_core.log.store import read_model
from tests.psc_core.log.support import CLASSES, add_values, make_log


def test_labels_of_a_model(tmp_path: Path) -> None:
    log = make_log(tmp_path)
    add_values(log)
    assert (read_model(log, "v1").classes, read_model(log, "v1").check_label("cat")) == (CLASSES, "cat")
    with pytest.raises(DataError, match="one of the model's classes"):
        read_model(log, "v1").check_label("dgo")
    assert read_model(log, "w1").check_label(" 7 ") == "7.0"
    for text in ("cat", "nan", "inf", ""):
        with pytest.raises(DataError, match="a number for angle"):
            read_model(log, "w1").check_label(text)


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"target": 3, "classes": []}', b'{"task": "other"}'])
def test_what_cannot_be_used_is_named(tmp_path: Path, data: bytes) -> None:
    log = make_log(tmp_path)
    log.put("models/v1.json", data)
    with pytest.raises(DataError, match=r"models/v1\.json"):
        read_model(log, "v1")
    with pytest.raises(DataError, match=r"has no models/v2\.json"):
        read_model(log, "v2")


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_a_label_is_a_class_in_either_form_of_its_name(tmp_path: Path, form: Any) -> None:
    log = make_log(tmp_path)
    log.put(
        "models/v3.json",
        json.dumps(
            {"version": "v3", "task": "classification", "classes": [normalize(form, "cafe\u0301"), "tea"]}
        ).encode(),
    )
    model = read_model(log, "v3")
    assert model.classes == ("caf\u00e9", "tea")
    for text in ("caf\u00e9", "cafe\u0301", " cafe\u0301\u00a0"):
        assert model.check_label(text) == "caf\u00e9"
    with pytest.raises(DataError, match="did you mean 'tea'"):
        model.check_label("Tea")
