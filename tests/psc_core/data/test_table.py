"""Tables of images with their classes or numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unicodedata import normalize

import pytest
from PIL import Image

from psc_core.answers import Target
from psc_core.data.open import open_dataset
from psc_core.errors import DataError, UsageError
from tests.psc_core.data.support import TINY

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


def test_the_suffix_of_a_table_may_be_of_any_case(tmp_path: Path) -> None:
    text = "file,age\na.png,3\nb.png,4.5\n"
    path = Path(table(tmp_path, text)).rename(tmp_path / "AGES.CSV")
    assert len(open_dataset(str(path), split="train", preprocess=TINY)) == 2


def test_reads_a_column_of_a_parquet_table(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table(tmp_path, "")
    columns = {"file": ["b.png", "a.png"], "age": [1, 2], "dose": [0.5, 0.25]}
    parquet.write_table(pa.table(columns), tmp_path / "t.parquet")
    data = open_dataset(str(tmp_path / "t.parquet"), split="val", preprocess=TINY, target="dose")
    assert data.target == Target(name="dose") and data.values is not None and data.values.tolist() == [0.5, 0.25]


@pytest.mark.parametrize(
    ("text", "target", "error", "said"),
    [
        ("", None, DataError, "is empty"),
        (
            "age,image\n3,a.png\n",
            None,
            DataError,
            r"none of the files in the column 'age' exists, the first is .*3;",
        ),
        (
            "id,label\na,cat\nb,dog\n",
            None,
            DataError,
            "column 'id' exists, the first is .*a; give paths",
        ),
        (
            "file,age\na.png,3\nb.png,old\n",
            None,
            DataError,
            "row 2 has age 'old', expected a number; correct it, or give",
        ),
        ("file,age\na.png,3\nb.png\n", None, DataError, "row 2 has 1 values"),
        ("file,age,dose\na.png,3,1\n", None, UsageError, "choose one with --target"),
        ("file,age\na.png,3\n", "dose", UsageError, "no column 'dose', it has the columns age beside"),
        ("file,age\na.png,nan\n", None, DataError, "finite numbers"),
        ("file,age,age\na.png,3,4\n", None, DataError, "has the column 'age' twice; name each column once"),
        ("\n\n", None, DataError, "is empty"),
        ("file,age\n", None, DataError, "has no rows"),
        ("file\na.png\n", None, UsageError, "has the columns none beside that of the files, 'file'; choose"),
        (
            "file,kind\na.png,cat\nb.png,\n",
            None,
            DataError,
            "row 2 has no kind; give its class, or leave the image out",
        ),
    ],
)
def test_bad_tables_say_what_is_wrong(
    tmp_path: Path, text: str, target: str | None, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        open_dataset(table(tmp_path, text), split="train", preprocess=TINY, target=target)


@pytest.mark.parametrize("first", ["", "sep=;\n"])
def test_numbers_between_semicolons_may_have_decimal_commas(tmp_path: Path, first: str) -> None:
    path = table(tmp_path, f"{first}file;age\na.png;1,5\nb.png;23.5\n")
    data = open_dataset(path, split="train", preprocess=TINY)
    assert data.values is not None and data.values.tolist() == [1.5, 23.5]
    path = table(tmp_path, "file;label\na.png;1,0\nb.png;0\n")
    assert open_dataset(path, split="train", preprocess=TINY, numbers=False).classes == ("0", "1")


def test_a_table_in_another_encoding_says_how_to_save_it(tmp_path: Path) -> None:
    Path(table(tmp_path, "")).write_bytes("file;Größe\na.png;1\n".encode("cp1252"))
    with pytest.raises(DataError, match="save it as CSV in UTF-8"):
        open_dataset(str(tmp_path / "ages.csv"), split="train", preprocess=TINY)


def test_blank_lines_of_a_csv_are_no_rows(tmp_path: Path) -> None:
    data = open_dataset(table(tmp_path, "file,age\n\na.png,3\nb.png,4\n\n"), split="train", preprocess=TINY)
    assert data.values is not None and data.values.tolist() == [3.0, 4.0]


def test_two_columns_of_one_name_are_refused_in_a_parquet_table(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = [pa.array(["a.png"]), pa.array([1]), pa.array([2])]
    parquet.write_table(pa.table(columns, names=["file", "age", "age"]), tmp_path / "t.parquet")
    with pytest.raises(DataError, match="has the column 'age' twice"):
        open_dataset(str(tmp_path / "t.parquet"), split="train", preprocess=TINY)


def test_missing_and_damaged_tables(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot read the table"):
        open_dataset(str(tmp_path / "none.csv"), split="train", preprocess=TINY)
    (tmp_path / "bad.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match="cannot read the table"):
        open_dataset(str(tmp_path / "bad.parquet"), split="train", preprocess=TINY)


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
def test_class_indices_are_classes_by_request_in_their_own_order(
    tmp_path: Path, labels: tuple[str, str], classes: tuple[str, str]
) -> None:
    path = table(tmp_path, "id,label\na.png,{}\nb.png,{}\n".format(*labels))
    assert open_dataset(path, split="train", preprocess=TINY).target == Target(name="label")
    data = open_dataset(path, split="train", preprocess=TINY, numbers=False)
    assert (data.target, data.classes, data.labels.tolist()) == (None, classes, [1, 0])


def test_classes_may_look_like_numbers_in_part_by_request(tmp_path: Path) -> None:
    path = table(tmp_path, "id,label\na.png,7\nb.png,other\n")
    assert open_dataset(path, split="train", preprocess=TINY, numbers=False).classes == ("7", "other")
    path = table(tmp_path, "id,label\na.png,2_0\nb.png,1_0\n")
    assert open_dataset(path, split="train", preprocess=TINY).classes == ("1_0", "2_0")


@pytest.mark.parametrize(
    ("text", "given", "error", "said"),
    [
        (
            "id,age\na.png,3\nb.png,4.5\n",
            {"numbers": False},
            DataError,
            "row 2 has age '4.5', expected a class",
        ),
        (
            "id,label\na.png,3\nb.png,nan\n",
            {"numbers": False},
            DataError,
            "row 2 has label 'nan', expected a class index of at most 100 digits, as in other rows; give its class",
        ),
        (
            f"id,label\na.png,3\nb.png,{'1' * 101}\n",
            {"numbers": False},
            DataError,
            "row 2 has label '1{101}', expected a class index of at most 100 digits",
        ),
        (
            f"id,label\na.png,3\nb.png,{'1' * 5000}\n",
            {"numbers": False},
            DataError,
            "row 2 has label '1{99}…1{99}', expected a class index of at most 100 digits",
        ),
        (
            "id,label\na.png,007\nb.png,7\n",
            {"numbers": False},
            DataError,
            "row 2 has label '7', a row before it '007'; write a class one way",
        ),
        (CLASSES, {"numbers": True}, DataError, "row 1 has label 'dog', expected a number"),
        ("id,age\na.png,1_0\n", {"numbers": True}, DataError, "row 1 has age '1_0', expected a number"),
        (
            CLASSES,
            {"unit": "years"},
            UsageError,
            "has classes in 'label', which have no unit; leave out the unit 'years'",
        ),
    ],
)
def test_a_table_for_another_task_is_refused(
    tmp_path: Path, text: str, given: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        open_dataset(table(tmp_path, text), split="train", preprocess=TINY, **given)


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
    return open_dataset(str(folder / name), split="train", preprocess=TINY, **given)


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


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("file;age\na.png;12.500\nb.png;3.250\n", "row 1 .*12500"),
        ('file,age\na.png,"12,500"\nb.png,"3,250"\n', "row 1 .*12500"),
        ("file,age\na.png,45%\nb.png,50 %\n", "--unit"),
        ("a.png,3\nb.png,4\n", "header"),
        ("label,file\ncat,a.png\n3,\n", "row 2 has no file"),
        ("file,age\na.png,3\nb.png,4\n./a.png,5\n", "rows 1 and 3"),
        ("file,label\na.png,cat\na.png,dog\n", "rows 1 and 2"),
        ("file,label\na.png,cat\nb.png,NaN\n", "row 2"),
        ("file,age, age \na.png,3,4\n", "'age' twice"),
        ("file;label\na.png;1.000\nb.png;2.000\n", "row 1"),
    ],
)
def test_what_can_be_read_in_two_ways_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        opened(tmp_path, text)


def test_excels_unicode_text_is_read(tmp_path: Path) -> None:
    table(tmp_path, "")
    (tmp_path / "t.csv").write_bytes("file\tGr\u00f6\u00dfe\r\na.png\t3\r\nb.png\t4\r\n".encode("utf-16"))
    data = open_dataset(str(tmp_path / "t.csv"), split="train", preprocess=TINY, target="Gro\u0308\u00dfe")
    assert data.target == Target(name="Gr\u00f6\u00dfe") and data.values is not None
    assert data.values.tolist() == [3.0, 4.0]


def test_booleans_and_bytes_of_parquet_are_as_in_a_csv(tmp_path: Path) -> None:
    pa, parquet = (pytest.importorskip(f"pyarrow{part}") for part in ("", ".parquet"))
    of_csv = opened(tmp_path, "file,label\na.png,True\nb.png,False\n")
    for labels, files in (([True, False], ["a.png", "b.png"]), ([b"True", b"False"], [b"a.png", b"b.png"])):
        parquet.write_table(pa.table({"file": files, "label": labels}), tmp_path / "t.parquet")
        data = open_dataset(str(tmp_path / "t.parquet"), split="train", preprocess=TINY)
        assert (data.target, data.classes, data.labels.tolist()) == (None, ("False", "True"), [1, 0])
        assert (of_csv.classes, of_csv.labels.tolist()) == (data.classes, [1, 0])
        assert [int(data.image(i)[0, 0, 0]) for i in range(2)] == [7, 9]


def test_a_cell_that_holds_several_values_is_no_class(tmp_path: Path) -> None:
    pa, parquet = (pytest.importorskip(f"pyarrow{part}") for part in ("", ".parquet"))
    table(tmp_path, "")
    parquet.write_table(pa.table({"file": ["a.png", "b.png"], "label": [[1], [2, 3]]}), tmp_path / "t.parquet")
    with pytest.raises(DataError, match="row 1"):
        open_dataset(str(tmp_path / "t.parquet"), split="train", preprocess=TINY)


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
