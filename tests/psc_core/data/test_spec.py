from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from psc_core.data.dataset import FileSource
from psc_core.data.open import image_folder, open_dataset, unread_files
from psc_core.errors import DataError, UsageError
from psc_core.images.preprocess import PRESETS
from tests.psc_core.data.support import TINY, write_folder


def test_classes_are_in_name_order(tmp_path: Path) -> None:
    dataset = image_folder(write_folder(tmp_path, {"dog": 2, "cat": 3}), TINY)
    assert dataset.classes == ("cat", "dog")
    assert dataset.first_labels().tolist() == [0, 0, 0, 1, 1]
    assert isinstance(dataset.source, FileSource)
    assert [dataset.source.path(i).parent.name for i in range(5)] == ["cat"] * 3 + ["dog"] * 2
    assert dataset.source.names.nbytes <= 5 * 20, "a few bytes an image, however long the folder's own path"


def test_rejects_empty_class_folder(tmp_path: Path) -> None:
    root = write_folder(tmp_path, {f"c{i:02d}": 0 if i == 16 else 1 for i in range(20)})
    with pytest.raises(DataError, match=r"class folder 17 of 20, .*c16, has no images"):
        image_folder(root, TINY)


@pytest.mark.parametrize("split", ["val", "test"])
def test_class_may_lack_validation_and_test_images(tmp_path: Path, split: str) -> None:
    """Its empty folder still says that it is one of the classes."""
    root = write_folder(tmp_path, {"a": 2, "b": 0, "c": 1})
    dataset = open_dataset(str(root), split=split, preprocess=TINY)
    assert (dataset.classes, dataset.first_labels().tolist()) == (("a", "b", "c"), [0, 0, 2])
    assert sum(len(batch.images) for batch in dataset.batches(2)) == 3
    with pytest.raises(DataError, match=r"class folder 2 of 3, .*b, has no images"):
        open_dataset(str(root), split="train", preprocess=TINY)


def test_rejects_folders_without_images(tmp_path: Path) -> None:
    root = write_folder(tmp_path, {"a": 0, "b": 0})
    for labelled_images in (True, False):
        with pytest.raises(DataError, match="has no images"):
            open_dataset(str(root), split="test", preprocess=TINY, labelled_images=labelled_images)


def test_rejects_missing_or_flat_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a directory"):
        image_folder(tmp_path / "none", TINY)
    Image.new("L", (3, 3)).save(tmp_path / "a.png")
    with pytest.raises(DataError, match="no class folders"):
        image_folder(tmp_path, TINY)
    assert len(image_folder(tmp_path, TINY, labelled_images=False)) == 1
    write_folder(tmp_path, {"more": 2})
    assert len(image_folder(tmp_path, TINY, labelled_images=False)) == 3


def test_rejects_class_names_outside_utf_8(tmp_path: Path) -> None:
    root = write_folder(tmp_path / os.fsdecode(b"caf\xe9"), {"a": 1, os.fsdecode(b"chien\xe9"): 1})
    with pytest.raises(DataError, match=r"not UTF-8, 'chien\\udce9'; rename it"):
        image_folder(root, TINY)
    assert len(image_folder(root, TINY, labelled_images=False)) == 2


def test_an_order_that_depends_on_the_form_of_the_names_is_said(tmp_path: Path) -> None:
    composed = image_folder(write_folder(tmp_path / "c", {"\u00e9t\u00e9": 1, "hiver": 1}), TINY)
    assert (composed.classes, composed.notes) == (("hiver", "\u00e9t\u00e9"), ())
    decomposed = image_folder(write_folder(tmp_path / "d", {"e\u0301te\u0301": 1, "hiver": 1}), TINY)
    assert decomposed.classes == ("\u00e9t\u00e9", "hiver")  # As torchvision's ImageFolder has them there.
    assert "--nfc" in decomposed.notes[0]


def test_two_forms_of_one_class_are_named(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "images", {"caf\u00e9": 1, "cafe\u0301": 1, "tea": 1})
    with pytest.raises(DataError) as raised:
        image_folder(root, TINY)
    assert r"'caf\xe9'" in str(raised.value) and r"'cafe\u0301'" in str(raised.value)


def test_spec_can_name_split(data_root: Path) -> None:
    chosen = open_dataset(f"mnist:{data_root}#test", split="train", preprocess=PRESETS["mnist"])
    assert len(chosen) == 800
    with pytest.raises(DataError, match="expected a split"):
        open_dataset(f"mnist:{data_root}#exam", split="train", preprocess=PRESETS["mnist"])


def test_directory_name_may_contain_number_sign(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "set#val", {"a": 1, "b": 1})
    assert len(open_dataset(str(root), split="train", preprocess=TINY)) == 2
    assert len(open_dataset(f"{root}#val", split="train", preprocess=TINY)) == 2


@pytest.mark.parametrize("spec", [".x:make", "..x.y:make", ":make"])
def test_rejects_paths_as_factories(spec: str) -> None:
    with pytest.raises(DataError, match=r"expected package\.module:factory, not a path"):
        open_dataset(spec, split="train", preprocess=TINY)


@pytest.mark.parametrize("spec", ["nowhere.module:make", "psc_core.data.open:nothing"])
def test_rejects_unknown_factories(spec: str) -> None:
    with pytest.raises(DataError, match="cannot be imported"):
        open_dataset(spec, split="train", preprocess=TINY)


def test_a_table_may_have_a_hash_in_its_name(tmp_path: Path) -> None:
    root = write_folder(tmp_path, {"a": 2})
    table = root / "ages#1.csv"
    table.write_text("file,age\na/0.png,1\na/1.png,2\n")
    for spec in (str(table), f"{table}#val"):
        assert len(open_dataset(spec, split="train", preprocess=TINY)) == 2


@pytest.mark.parametrize("given", [{"target": "age"}, {"unit": "years"}])
def test_a_target_of_what_is_no_table_is_refused(tmp_path: Path, data_root: Path, given: dict[str, str]) -> None:
    root = write_folder(tmp_path, {"a": 1, "b": 1})
    ((name, value),) = given.items()
    for spec in (str(root), f"{root}#val", f"mnist:{data_root}", f"rotated-mnist:{data_root}", "nowhere.module:make"):
        with pytest.raises(UsageError, match=f"is no table, so {name} '{value}' has no effect; leave it out, or give"):
            open_dataset(spec, split="train", preprocess=TINY, **given)  # type: ignore[arg-type]


def test_hidden_folders_are_no_classes(tmp_path: Path) -> None:
    root = write_folder(tmp_path, {"a": 1, ".ipynb_checkpoints": 0, ".thumbnails": 1, "__MACOSX": 1, "b": 1})
    for split in ("train", "val"):
        assert open_dataset(str(root), split=split, preprocess=TINY).classes == ("a", "b")


def test_hidden_files_of_a_class_are_no_images(tmp_path: Path) -> None:
    """A Mac leaves ``._0.png`` beside each ``0.png`` on foreign disks and in archives."""
    root = write_folder(tmp_path, {"a": 1, "b": 1})
    for name in ("._0.png", ".thumbnails/0.png"):
        (root / "a" / name).parent.mkdir(exist_ok=True)
        (root / "a" / name).write_bytes(b"Mac OS X")
    assert len(open_dataset(str(root), split="train", preprocess=TINY)) == 2


def test_files_of_a_folder_that_are_not_read_are_counted(tmp_path: Path) -> None:
    data = image_folder(write_folder(tmp_path / "images", {"a": 1, "b": 1}), TINY)
    assert unread_files(data) == ()
    for name in ("loose.png", "a/1.heic"):
        (tmp_path / "images" / name).touch()
    beside, others = unread_files(data)
    assert "beside the class folders: 1 .png" in beside and "by their suffix: 1 .heic" in others
    elsewhere = image_folder(write_folder(tmp_path / "others", {"a": 1}), TINY)
    assert unread_files(replace(elsewhere, name=data.name)) == (), "a data set may have the name of any folder"
