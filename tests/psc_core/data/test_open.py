from __future__ import annotations

import gzip
import os
import unicodedata
from dataclasses import replace
from pathlib import Path
from typing import Any
from unicodedata import normalize

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from psc_core.answers import Target
from psc_core.data.dataset import FileSource
from psc_core.data.open import (
    check_same,
    image_folder,
    in_network_order,
    match,
    open_dataset,
    read_idx,
    read_tar,
    unread_files,
)
from psc_core.errors import DataError, UsageError
from psc_core.images.preprocess import PRESETS
from tests.conftest import ROOT
from tests.psc_core.data.support import TINY, write_folder


def test_classes_are_in_name_order(tmp_path: Path) -> None:
    dataset = image_folder(write_folder(tmp_path, {"dog": 2, "cat": 3}), TINY)
    assert dataset.classes == ("cat", "dog")
    assert dataset.first_labels().tolist() == [0, 0, 0, 1, 1]
    assert isinstance(dataset.source, FileSource)
    assert [dataset.source.path(i).parent.name for i in range(5)] == ["cat"] * 3 + ["dog"] * 2
    assert dataset.source.names.nbytes <= 5 * 20, "a few bytes an image, however long the folder's own path"


@pytest.mark.parametrize("split", ["val", "test"])
def test_class_may_lack_validation_and_test_images(tmp_path: Path, split: str) -> None:
    """Its empty folder still says that it is one of the classes."""
    root = write_folder(tmp_path, {"a": 2, "b": 0, "c": 1})
    dataset = open_dataset(str(root), split=split, preprocess=TINY)
    assert (dataset.classes, dataset.first_labels().tolist()) == (("a", "b", "c"), [0, 0, 2])
    assert sum(len(batch.images) for batch in dataset.batches(2)) == 3
    with pytest.raises(DataError, match=r"class folder 2 of 3, .*b, has no images"):
        open_dataset(root, split="train", preprocess=TINY)


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


@pytest.mark.parametrize("given", [{"target": "age"}, {"unit": "years"}])
def test_a_target_of_what_is_no_table_is_refused(tmp_path: Path, data_root: Path, given: dict[str, str]) -> None:
    root = write_folder(tmp_path, {"a": 1, "b": 1})
    ((name, value),) = given.items()
    for spec in (str(root), f"{root}#val", f"mnist:{data_root}", f"rotated-mnist:{data_root}", "nowhere.module:make"):
        with pytest.raises(UsageError, match=f"is no table, so {name} '{value}' has no effect; leave it out, or give"):
            open_dataset(spec, split="train", preprocess=TINY, **given)  # type: ignore[arg-type]


def test_files_of_a_folder_that_are_not_read_are_counted(tmp_path: Path) -> None:
    data = image_folder(write_folder(tmp_path / "images", {"a": 1, "b": 1}), TINY)
    assert unread_files(data) == ()
    for name in ("loose.png", "a/1.heic"):
        (tmp_path / "images" / name).touch()
    beside, others = unread_files(data)
    assert "beside the class folders: 1 .png" in beside and "by their suffix: 1 .heic" in others
    unlabelled = image_folder(tmp_path / "images", TINY, labelled_images=False)
    assert unread_files(unlabelled, labelled_images=False) == (others,), "images beside folders are read"
    elsewhere = image_folder(write_folder(tmp_path / "others", {"a": 1}), TINY)
    assert unread_files(replace(elsewhere, name=data.name)) == (), "a data set may have the name of any folder"


@pytest.mark.parametrize(("name", "preset"), [("mnist", "mnist"), ("fashion-mnist", "mnist"), ("cifar10", "cifar10")])
def test_splits_are_disjoint_and_complete(data_root: Path, name: str, preset: str) -> None:
    sets = {
        split: open_dataset(f"{name}:{data_root}", split=split, preprocess=PRESETS[preset])
        for split in ("train", "val", "test")
    }
    train, val = set(sets["train"].indices.tolist()), set(sets["val"].indices.tolist())
    assert not train & val
    assert sorted(train | val) == list(range(len(sets["train"].source)))
    assert len(sets["test"].classes) == 10
    assert len({s.digest() for s in sets.values()}) == 3


def test_dirty_mnist_has_ten_training_labels_per_ambiguous_image(data_root: Path) -> None:
    train = open_dataset(f"dirty-mnist:{data_root}", split="train", preprocess=PRESETS["mnist"])
    assert (len(train), train.examples) == (1650 + 150, 1650 + 10 * 150)
    dirty = open_dataset(f"dirty-mnist:{data_root}", split="test", preprocess=PRESETS["mnist"])
    clean, ambiguous = dirty.groups["mnist"], dirty.groups["ambiguous-mnist"]
    assert (len(clean), len(ambiguous), dirty.examples) == (800, 300, 1100)
    raw = read_idx(data_root / "AmbiguousMNIST/raw/t10k-images-idx3-ubyte")
    assert np.array_equal(dirty.image(int(ambiguous[7]))[0], raw[7])


NAMES = st.lists(
    st.text(st.characters(categories=["L", "N"], include_characters=" _-"), min_size=1, max_size=6),
    min_size=2,
    max_size=8,
    unique=True,
)


@given(names=NAMES, data=st.data())
def test_equal_names_take_the_order_of_the_network(names: list[str], data: st.DataObject) -> None:
    of_network = data.draw(st.permutations(names))
    matched = match(names, of_network, "images")
    assert matched[0] == tuple(of_network)
    assert bool(matched[1]) == (of_network != names)


@given(count=st.integers(2, 8), data=st.data())
def test_case_and_separators_make_no_difference(count: int, data: st.DataObject) -> None:
    plain = [f"class {letter} of many" for letter in "abcdefgh"[:count]]
    spelled = [
        data.draw(st.sampled_from([str.upper, str.title, str.lower]))(
            name.replace(" ", data.draw(st.sampled_from(" _-")))
        )
        for name in plain
    ]
    of_network = data.draw(st.permutations(plain))
    assert match(spelled, of_network, "images")[0] == tuple(spelled[plain.index(name)] for name in of_network)


def test_equal_names_are_not_confused_with_similar_ones() -> None:
    assert match(["A", "a", "b_c", "b c"], ["b c", "a", "A", "b_c"], "")[0] == ("b c", "a", "A", "b_c")
    with pytest.raises(DataError, match=r"got 3 \(unknown: A, c; missing: C, A-\); use images"):
        match(["A", "a", "c"], ["a", "C", "A-"], "images")


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_labels_follow_names_of_either_form(form: Any) -> None:
    names = ["호랑이", "고양이", "café"]
    data = replace(
        open_dataset(f"mnist:{ROOT}/tests/data", split="test", preprocess=PRESETS["mnist"]),
        classes=tuple(unicodedata.normalize(form, name) for name in names),
        labels=torch.arange(800) % 3,
    )
    assert data.classes == tuple(names)
    turned = [unicodedata.normalize("NFD", name) for name in names[::-1]]
    ordered, _ = in_network_order(data, turned)
    assert ordered.classes == tuple(names[::-1]) and torch.equal(ordered.labels, 2 - data.labels)
    check_same(ordered, turned, "network's")


def test_other_names_keep_their_order() -> None:
    matched = match(["n01440764", "n01443537"], ["tench", "goldfish"], "images/train")
    assert matched[0] == ("n01440764", "n01443537")
    assert "order is taken to be that of its outputs" in matched[1]


@pytest.mark.parametrize(
    ("of_images", "message"),
    [
        (["cat", "dog"], r"expected the network's 3 classes in images, got 2 \(missing: bird\)"),
        (["bird", "cat", "dog", "eel"], r"got 4 \(unknown: eel\)"),
        (["bird", "cat", "hound"], r"got 3 \(unknown: hound; missing: dog\)"),
        ([f"c{i:02}" for i in range(20)], r"unknown: c00, .*, c09, …; missing"),
    ],
)
def test_odd_classes_are_named(of_images: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        match(of_images, ["bird", "dog", "cat"], "images")


@given(order=st.permutations([str(digit) for digit in range(10)]))
def test_labels_keep_their_names(order: list[str]) -> None:
    data = open_dataset(f"mnist:{ROOT}/tests/data", split="test", preprocess=PRESETS["mnist"])
    ordered, _ = in_network_order(data, order)
    assert ordered.classes == tuple(order)
    assert [ordered.classes[label] for label in ordered.labels] == [data.classes[label] for label in data.labels]
    back = ordered.in_order(data.classes)
    assert torch.equal(back.labels, data.labels) and back.digest() == data.digest()


def test_nothing_to_order() -> None:
    data = open_dataset(f"mnist:{ROOT}/tests/data", split="test", preprocess=PRESETS["mnist"])
    assert in_network_order(data, None) == (data, "")
    assert data.in_order(data.classes) is data.in_order(["other"]) is data.in_order([*data.classes[1:], "x"]) is data


AGE = Target(name="age", unit="years")


def table(folder: Path, text: str) -> str:
    Image.new("L", (3, 3), 7).save(folder / "a.png")
    Image.new("L", (3, 3), 9).save(folder / "b.png")
    (folder / "ages.csv").write_text(text)
    return str(folder / "ages.csv")


def test_reads_a_csv_beside_its_images(tmp_path: Path) -> None:
    data = open_dataset(table(tmp_path, "file,age\na.png,3\nb.png,4.5\n"), split="train", preprocess=TINY, unit="years")
    assert (data.target, data.values.tolist() if data.values is not None else None) == (AGE, [3.0, 4.5])
    assert [int(data.image(i)[0, 0, 0]) for i in range(2)] == [7, 9]


def test_reads_a_column_of_a_parquet_table(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table(tmp_path, "")
    columns = {"file": ["b.png", "a.png"], "age": [1, 2], "dose": [0.5, 0.25]}
    parquet.write_table(pa.table(columns), tmp_path / "t.parquet")
    data = open_dataset(str(tmp_path / "t.parquet"), split="val", preprocess=TINY, target="dose")
    assert data.target == Target(name="dose") and data.values is not None and data.values.tolist() == [0.5, 0.25]


CLASSES = "id,label\na.png,dog\nb.png, cat\n"


@pytest.mark.parametrize(("suffix", "separator"), [("csv", ","), ("csv", ";"), ("tsv", "\t"), ("parquet", "")])
def test_text_is_classes(tmp_path: Path, suffix: str, separator: str) -> None:
    path = Path(table(tmp_path, CLASSES.replace(",", separator))).rename(tmp_path / f"t.{suffix}")
    if suffix == "parquet":
        pa, parquet = (pytest.importorskip(f"pyarrow{part}") for part in ("", ".parquet"))
        parquet.write_table(pa.table({"id": ["a.png", "b.png"], "label": ["dog", "cat"]}), path)
    data = open_dataset(str(path), split="train", preprocess=TINY)
    assert (data.target, data.classes, data.labels.tolist()) == (None, ("cat", "dog"), [1, 0])
    assert [int(data.image(i)[0, 0, 0]) for i in range(2)] == [7, 9]


def test_paths_may_be_absolute_and_the_column_of_files_anywhere(tmp_path: Path) -> None:
    (tmp_path / "labels").mkdir()
    path = Path(table(tmp_path, "")).with_name("labels") / "t.csv"
    path.write_text(f"label,file,source\ndog,{tmp_path}/a.png,x\ncat,../b.png,y\n")
    data = open_dataset(str(path), split="train", preprocess=TINY, target="label")
    assert [int(data.image(i)[0, 0, 0]) for i in range(2)] == [7, 9]


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (("10", "9"), ("9", "10")),
        (("1.0", "0"), ("0", "1")),
        (("9007199254740993", "9007199254740992"), ("9007199254740992", "9007199254740993")),
        (("010", "009"), ("009", "010")),
    ],
)
def test_indices_are_classes_by_request(tmp_path: Path, labels: tuple[str, str], classes: tuple[str, str]) -> None:
    path = table(tmp_path, "id,label\na.png,{}\nb.png,{}\n".format(*labels))
    assert open_dataset(path, split="train", preprocess=TINY).target == Target(name="label")
    data = open_dataset(path, split="train", preprocess=TINY, numbers=False)
    assert (data.target, data.classes, data.labels.tolist()) == (None, classes, [1, 0])


def test_classes_may_look_like_numbers_in_part_by_request(tmp_path: Path) -> None:
    path = table(tmp_path, "id,label\na.png,7\nb.png,other\n")
    assert open_dataset(path, split="train", preprocess=TINY, numbers=False).classes == ("7", "other")
    path = table(tmp_path, "id,label\na.png,2_0\nb.png,1_0\n")
    assert open_dataset(path, split="train", preprocess=TINY).classes == ("1_0", "2_0")


def test_a_table_without_labels_needs_only_files(tmp_path: Path) -> None:
    path = table(tmp_path, "file,age,dose\na.png,3,1\nb.png,,2\n")
    data = open_dataset(path, split="test", preprocess=TINY, labelled_images=False)
    assert (data.target, data.classes, data.labels.tolist()) == (None, ("ages",), [0, 0])


def test_a_table_may_lack_classes_of_others(tmp_path: Path) -> None:
    data = open_dataset(table(tmp_path, CLASSES), split="val", preprocess=TINY)
    ordered = data.in_order(("dog", "bird", "cat"))
    assert (ordered.classes, ordered.labels.tolist()) == (("dog", "bird", "cat"), [0, 2])
    assert data.in_order(("dog", "bird")) is data


def opened(folder: Path, text: str, name: str = "t.csv", **given: Any) -> Any:
    table(folder, "")
    (folder / name).write_bytes(text.encode())
    return open_dataset(folder / name, split="train", preprocess=TINY, **given)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("file;age\na.png;12.500\nb.png;1.234,5\n", [12500.0, 1234.5]),
        ("file;age\na.png;12.500\nb.png;7.25\n", [12.5, 7.25]),
        ('file,age\na.png,"12,500"\nb.png,"1,234.5"\n', [12500.0, 1234.5]),
        ("file\tage\r\na.png\t 3 \r\nb.png\t4,5\r\n", [3.0, 4.5]),
        (" file , age \n a.png , 3 \n b.png,4\n", [3.0, 4.0]),
        ("file,age,,\na.png,3,,\nb.png,4,,\n,,,\n", [3.0, 4.0]),
        ("age,File\n3,a.png\n4,b.png\n", [3.0, 4.0]),
    ],
)
def test_numbers_are_read_as_the_whole_column_shows(tmp_path: Path, text: str, values: list[float]) -> None:
    data = opened(tmp_path, text)
    assert data.target == Target(name="age") and data.values.tolist() == values
    assert bool(data.notes) == any("," in cell for cell in ("1.234,5", '"12,500"', "4,5") if cell in text)


def test_booleans_and_bytes_of_parquet_are_as_in_a_csv(tmp_path: Path) -> None:
    pa, parquet = (pytest.importorskip(f"pyarrow{part}") for part in ("", ".parquet"))
    of_csv = opened(tmp_path, "file,label\na.png,True\nb.png,False\n")
    for labels, files in (([True, False], ["a.png", "b.png"]), ([b"True", b"False"], [b"a.png", b"b.png"])):
        parquet.write_table(pa.table({"file": files, "label": labels}), tmp_path / "t.parquet")
        data = open_dataset(str(tmp_path / "t.parquet"), split="train", preprocess=TINY)
        assert (data.target, data.classes, data.labels.tolist()) == (None, ("False", "True"), [1, 0])
        assert (of_csv.classes, of_csv.labels.tolist()) == (data.classes, [1, 0])
        assert [int(data.image(i)[0, 0, 0]) for i in range(2)] == [7, 9]


@pytest.mark.parametrize("of_table", ["NFC", "NFD"])
@pytest.mark.parametrize("of_disk", ["NFC", "NFD"])
def test_files_and_classes_are_found_in_either_form(tmp_path: Path, of_table: Any, of_disk: Any) -> None:
    folder = tmp_path / normalize(of_disk, "for\u00eat")
    folder.mkdir()
    for name, grey in (("caf\u00e9", 7), ("\u732b", 9)):
        Image.new("L", (3, 3), grey).save(folder / normalize(of_disk, f"{name}.png"))
    rows = "file,label\nfor\u00eat/caf\u00e9.png,\u00e9t\u00e9\n for\u00eat/\u732b.png ,hiver\n"
    data = opened(tmp_path, normalize(of_table, rows))
    assert (data.classes, data.labels.tolist()) == (("hiver", "\u00e9t\u00e9"), [1, 0])
    assert [int(data.image(i)[0, 0, 0]) for i in range(2)] == [7, 9]


def test_blanks_that_belong_to_the_name_of_a_file_are_kept(tmp_path: Path) -> None:
    Image.new("L", (3, 3), 5).save(tmp_path / " c.png")
    data = opened(tmp_path, "file,label\n c.png,x\n a.png,y\n")
    assert [int(data.image(i)[0, 0, 0]) for i in range(2)] == [5, 7]


NUMBERS, NAMED = {"numbers": True}, {"numbers": False}


@pytest.mark.parametrize(
    ("text", "given", "error", "said"),
    [
        ("", {}, DataError, "is empty"),
        ("\n\n", {}, DataError, "is empty"),
        ("file,age\n", {}, DataError, "has no rows"),
        ("age,image\n3,a.png\n", {}, DataError, "none of the files in the column 'age'"),
        ("id,label\na,cat\nb,dog\n", {}, DataError, "column 'id'"),
        ("file,age\na.png,3\nb.png,old\n", {}, DataError, "row 2 has age 'old'"),
        ("file,age\na.png,3\nb.png\n", {}, DataError, "row 2 has 1 values"),
        ("file,age\na.png,3\nb.png,nan\n", {}, DataError, "row 2 has age 'nan', expected a finite number"),
        ("file,age\na.png,1e400\n", {}, DataError, "row 1 has age '1e400', expected a finite number"),
        ("file,age,age\na.png,3,4\n", {}, DataError, "the column 'age' twice"),
        ("file,age, age \na.png,3,4\n", {}, DataError, "the column 'age' twice"),
        ("file,kind\na.png,cat\nb.png,\n", {}, DataError, "row 2 has no kind"),
        ("label,file\ncat,a.png\n3,\n", {}, DataError, "row 2 has no file"),
        ("a.png,3\nb.png,4\n", {}, DataError, "header"),
        ("file,age\na.png,3\nb.png,4\n./a.png,5\n", {}, DataError, "rows 1 and 3"),
        ("file,label\na.png,cat\nb.png,NaN\n", {}, DataError, "row 2"),
        ("file,age\na.png,45%\nb.png,50 %\n", {}, DataError, "--unit"),
        ("file;age\na.png;12.500\nb.png;3.250\n", {}, DataError, "row 1 .*12500"),
        ('file,age\na.png,"12,500"\nb.png,"3,250"\n', {}, DataError, "row 1 .*12500"),
        ("file;label\na.png;1.000\nb.png;2.000\n", {}, DataError, "row 1"),
        ("file,age,dose\na.png,3,1\n", {}, UsageError, "--target"),
        ("file\na.png\n", {}, UsageError, "the columns none beside"),
        ("file,age\na.png,3\n", {"target": "dose"}, UsageError, "no column 'dose'"),
        ("id,age\na.png,3\nb.png,4.5\n", NAMED, DataError, "row 2 has age '4.5', expected a class"),
        ("id,label\na.png,3\nb.png,nan\n", NAMED, DataError, "row 2 has label 'nan', expected a class index"),
        (f"id,label\na.png,3\nb.png,{'1' * 5000}\n", NAMED, DataError, "row 2 has label '1{99}…1{99}'"),
        ("id,label\na.png,007\nb.png,7\n", NAMED, DataError, "row 2 has label '7', a row before it '007'"),
        (CLASSES, NUMBERS, DataError, "row 1 has label 'dog', expected a number; correct it$"),
        ("id,age\na.png,1_0\n", NUMBERS, DataError, "row 1 has age '1_0', expected a number"),
        (CLASSES, {"unit": "years"}, UsageError, "unit 'years'"),
    ],
)
def test_bad_tables(tmp_path: Path, text: str, given: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        open_dataset(table(tmp_path, text), split="train", preprocess=TINY, **given)


def test_a_file_with_and_without_its_folder_is_one(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="rows 1 and 2 are of the file"):
        opened(tmp_path, f"file,age\na.png,3\n{tmp_path / 'a.png'},4\n")


def test_files_that_are_no_tables(tmp_path: Path) -> None:
    (tmp_path / "bad.parquet").write_bytes(b"PAR1")
    (tmp_path / "bad.csv").write_bytes("file;Größe\na.png;1\n".encode("cp1252"))
    for name, said in (("none.csv", "cannot read"), ("bad.parquet", "cannot read"), ("bad.csv", "as CSV in UTF-8")):
        with pytest.raises(DataError, match=said):
            open_dataset(str(tmp_path / name), split="train", preprocess=TINY)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (".x:make", "not a path"),
        ("..x.y:make", "not a path"),
        (":make", "not a path"),
        ("nowhere.module:make", "cannot be imported"),
        ("psc_core.data.open:nothing", "cannot be imported"),
    ],
)
def test_rejects_factories_that_are_none(spec: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        open_dataset(spec, split="train", preprocess=TINY)


def test_names_damaged_files(tmp_path: Path) -> None:
    for head in (
        b"",
        b"\0\0\x08",
        b"\0\0\x08\0",
        b"\0\0\x08\x03\0\0",
        b"\0\0\x09\x01\0\0\0\x01\0",
        b"\0\0\x08\x01\0\0\0\x05\x01",
    ):
        (tmp_path / "x.gz").write_bytes(gzip.compress(head))
        with pytest.raises(DataError, match="x: expected"):
            read_idx(tmp_path / "x")
    packed = gzip.compress(b"\x00\x00\x08\x01\x00\x00\x00\x05hello")
    for damaged in (packed[:-9], packed[:10] + b"\xff" * 9 + packed[19:]):
        (tmp_path / "x.gz").write_bytes(damaged)
        with pytest.raises(DataError, match="cannot read the IDX file"):
            read_idx(tmp_path / "x")
    with pytest.raises(DataError, match="tar archive"):
        read_tar(tmp_path / "none.tar.gz", "x/")


def test_hidden_files_and_folders_are_neither_images_nor_classes(tmp_path: Path) -> None:
    """A Mac leaves ``._0.png`` beside each ``0.png`` on foreign disks and in archives."""
    root = write_folder(tmp_path, {"a": 1, ".ipynb_checkpoints": 0, ".stored_images": 1, "__MACOSX": 1, "b": 1})
    for name in ("._0.png", ".stored_images/0.png"):
        (root / "a" / name).parent.mkdir(exist_ok=True)
        (root / "a" / name).write_bytes(b"Mac OS X")
    for split in ("train", "val"):
        data = open_dataset(str(root), split=split, preprocess=TINY)
        assert data.classes == ("a", "b") and len(data) == 2


def test_names_may_contain_a_number_sign(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "set#val", {"a": 2, "b": 1})
    (root / "ages#1.csv").write_text("file,age\na/0.png,1\na/1.png,2\nb/0.png,3\n")
    for spec in (root, f"{root}#val", root / "ages#1.csv", f"{root}/ages#1.csv#val"):
        assert len(open_dataset(str(spec), split="train", preprocess=TINY)) == 3


@pytest.mark.parametrize(
    ("columns", "names", "said"),
    [
        ([["a.png"], [1], [2]], ["file", "age", "age"], "the column 'age' twice"),
        ([["a.png", "b.png"], [[1], [2, 3]]], ["file", "label"], "row 1"),
        ([[b"\x89PNG\r\n\x1a\n\0\0\0", b""], [1, 2]], ["image", "label"], "row 1 has no path in the column 'image'"),
        (
            [[{"bytes": b"\x89PNG", "path": None}] * 2, [1, 2]],
            ["image", "label"],
            "row 1 has no path in the column 'image'",
        ),
        ([["c" * 300, "d"], [1, 2]], ["caption", "label"], "none of the files in the column 'caption' exists"),
        ([["c" * 5000, "d"], [1, 2]], ["caption", "label"], "row 1 has no path in the column 'caption'"),
    ],
)
def test_parquet_tables_that_are_refused(tmp_path: Path, columns: list[Any], names: list[str], said: str) -> None:
    pa, parquet = (pytest.importorskip(f"pyarrow{part}") for part in ("", ".parquet"))
    table(tmp_path, "")
    parquet.write_table(pa.table([*map(pa.array, columns)], names=names), tmp_path / "t.parquet")
    with pytest.raises(DataError, match=said):
        open_dataset(str(tmp_path / "t.parquet"), split="train", preprocess=TINY)
