"""Only regular files of a bounded size are read, whatever else a folder holds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from psc_core.errors import ImageTooLarge, UnsupportedImage
from psc_core.images.files import MAX_FILE_BYTES, read_file


def test_reads_files_and_links_to_them(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"data")
    (tmp_path / "link").symlink_to("a")
    assert read_file(tmp_path / "a") == read_file(str(tmp_path / "link")) == b"data"
    (tmp_path / "empty").touch()
    assert read_file(tmp_path / "empty") == b""


def test_refuses_what_has_no_end(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("pipe", "zero"):
        with pytest.raises(UnsupportedImage, match="expected a regular file"):
            read_file(tmp_path / name)


def test_refuses_a_file_that_claims_too_much(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(ImageTooLarge, match=f"at most {MAX_FILE_BYTES} bytes, got {MAX_FILE_BYTES + 1}"):
        read_file(tmp_path / "sparse")


def test_a_folder_leaves_no_descriptor_open(tmp_path: Path) -> None:
    before = os.dup(0)  # The lowest free one.
    os.close(before)
    with pytest.raises(IsADirectoryError):
        read_file(tmp_path)
    after = os.dup(0)
    os.close(after)
    assert after <= before


def test_a_missing_file_is_the_callers(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "none")
    with pytest.raises(ValueError, match="null"):
        read_file("a\0b")
