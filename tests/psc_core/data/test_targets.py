"""Tables of images and numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from psc_core.data.dataset import ImageDataset
from psc_core.data.sources import ArraySource
from psc_core.data.spec import open_dataset
from psc_core.data.targets import measured
from psc_core.errors import DataError, UsageError
from psc_core.images.preprocess import PRESETS
from psc_core.target import Target
from tests.psc_core.data.support import TINY

AGE = Target(name="age", unit="years")


def numbers(values: list[float]) -> ImageDataset:
    source = ArraySource(np.zeros((len(values), 3, 3), np.uint8))
    return measured("some", AGE, source, torch.tensor(values, dtype=torch.float64), TINY)


def test_subset_and_batches_keep_the_numbers() -> None:
    data = numbers([3.0, 1.0, 2.0]).subset(torch.tensor([2, 0]))
    (batch,) = data.batches(5)
    assert batch.values is not None and batch.values.tolist() == [2.0, 3.0]
    assert data.digest() != numbers([2.0, 3.5]).digest() and data.digest() == numbers([2.0, 3.0]).digest()


@pytest.mark.parametrize(("values", "said"), [([1.0, float("nan")], "finite numbers of age, got 1"), ([], "at least")])
def test_unusable_numbers_are_refused(values: list[float], said: str) -> None:
    with pytest.raises(DataError, match=said):
        numbers(values)


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
        ("image,age\na.png,3\n", None, DataError, "no column 'file', it has image, age; give this name to the"),
        ("file,age\na.png,old\n", None, DataError, "row 1 has age 'old'"),
        ("file,age\na.png,3\nb.png\n", None, DataError, "row 2 has 1 values"),
        ("file,age,dose\na.png,3,1\n", None, UsageError, "choose one with --target"),
        ("file,age\na.png,3\n", "dose", UsageError, "no column 'dose'"),
        ("file,age\na.png,nan\n", None, DataError, "finite numbers"),
        ("file,age,age\na.png,3,4\n", None, DataError, "has the column 'age' twice; name each column once"),
        ("\n\n", None, DataError, "is empty"),
    ],
)
def test_bad_tables_say_what_is_wrong(
    tmp_path: Path, text: str, target: str | None, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        open_dataset(table(tmp_path, text), split="train", preprocess=TINY, target=target)


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


def test_rotated_digits_are_digits_turned_by_their_angle(data_root: Path) -> None:
    turned, plain = (
        open_dataset(f"{name}:{data_root}", split="test", preprocess=PRESETS["mnist"])
        for name in ("rotated-mnist", "mnist")
    )
    again = open_dataset(f"rotated-mnist:{data_root}", split="test", preprocess=PRESETS["mnist"])
    assert turned.values is not None and again.values is not None and torch.equal(turned.values, again.values)
    assert float(turned.values.abs().max()) <= 60 and float(turned.values.std()) > 30
    for index in range(20):
        back = Image.fromarray(turned.image(index)[0]).rotate(-float(turned.values[index]), Image.Resampling.BILINEAR)
        difference = np.abs(np.asarray(back, float) - plain.image(index)[0]).mean()
        wrong = np.abs(turned.image(index)[0].astype(float) - plain.image(index)[0]).mean()
        assert difference < max(12.0, wrong / 2)
