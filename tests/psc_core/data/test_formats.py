from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from psc_core.data.formats import read_idx, read_tar
from psc_core.errors import DataError


@pytest.mark.parametrize(
    "content", [b"", b"\x00\x00\x08", b"\x00\x00\x09\x01\x00\x00\x00\x01\x00", b"\x00\x00\x08\x01\x00\x00\x00\x05\x01"]
)
def test_names_damaged_idx_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.gz").write_bytes(gzip.compress(content))
    with pytest.raises(DataError, match="x: expected"):
        read_idx(tmp_path / "x")


def test_names_truncated_gzip(tmp_path: Path) -> None:
    (tmp_path / "x.gz").write_bytes(gzip.compress(b"\x00\x00\x08\x01\x00\x00\x00\x05hello")[:-9])
    with pytest.raises(DataError, match="cannot read the IDX file"):
        read_idx(tmp_path / "x")


def test_names_missing_archive(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="tar archive"):
        read_tar(tmp_path / "none.tar.gz", "x/")
