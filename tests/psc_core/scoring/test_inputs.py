"""Where the images come from: folders and lists of paths, streamed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from psc_core.errors import DataError, UsageError
from psc_core.scoring import NamedImage, in_parts, named_images
from tests.psc_core.scoring.support import rows_of


def test_list_of_paths(folder: Path, scored: Path, tmp_path: Path) -> None:
    paths = [str(folder / row["item"]) for row in rows_of(scored)]
    (tmp_path / "list.txt").write_text("\n".join(paths[:3]) + "\n\n" + paths[3] + "\r\n")
    assert [each.image for each in named_images(tmp_path / "list.txt")] == paths[:4]


def test_a_column_is_of_parquet_files(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "list.txt").touch()
    for source in (folder, tmp_path / "list.txt"):
        with pytest.raises(UsageError, match=r"has no columns, a \.parquet file has; leave out the column 'picture'"):
            named_images(source, "picture")


def test_a_damaged_parquet_file_is_named(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    whole, torn, noise = (tmp_path / f"{name}.parquet" for name in ("whole", "torn", "noise"))
    pq.write_table(pa.table({"image": [b"some bytes"] * 9}), whole)
    torn.write_bytes(whole.read_bytes()[:4] + b"\xff" * 20 + whole.read_bytes()[24:])  # The first page of the column.
    noise.write_bytes(b"PAR1 is not enough")
    for file in (torn, noise):
        with pytest.raises(DataError, match=rf"{file.name} cannot be read as Parquet \(.*\); write it again"):
            list(named_images(file))


def test_names_that_are_not_unicode(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"\xff.png")).touch()
    (found,) = named_images(tmp_path)
    assert found.name == "\N{REPLACEMENT CHARACTER}.png"
    assert Path(str(found.image)).exists()


def test_images_stream() -> None:
    taken: list[int] = []

    def images() -> Any:
        for number in range(1_000_000):
            taken.append(number)
            yield NamedImage(str(number), b"")

    assert [each.name for each in next(in_parts(images(), 3))] == ["0", "1", "2"]
    assert len(taken) == 3
