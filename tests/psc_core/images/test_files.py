import errno
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from psc_core.errors import DataError, ImageTooLarge, UnsupportedImage
from psc_core.images.files import MAX_FILE_BYTES, files_below, read_file, sample_file, unread_below, unread_beside


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
        for read in (read_file, sample_file):
            with pytest.raises(UnsupportedImage, match="expected a regular file"):
                read(tmp_path / name)


@pytest.mark.parametrize("size", [0, 1, 100, 10_000])
def test_a_sample_tells_files_apart_by_their_middle_end_and_size(tmp_path: Path, size: int) -> None:
    data = bytes(size)
    files = [data, b"1" + data] + (
        [data[: size // 2] + b"1" + data[size // 2 + 1 :], data[1:] + b"1"] if size > 1 else []
    )
    for number, each in enumerate(files):
        (tmp_path / f"{number}").write_bytes(each)
        (tmp_path / f"copy of {number}").write_bytes(each)
        assert sample_file(tmp_path / f"{number}") == sample_file(tmp_path / f"copy of {number}")
    assert len({sample_file(tmp_path / f"{number}") for number in range(len(files))}) == len(files)


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


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def test_files_below_are_those_of_the_library(tmp_path: Path) -> None:
    touch(tmp_path, "b/2", "b/1", "a/c/3", "a/4", "5", "b/d/6")
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    (tmp_path / "empty").mkdir()
    found = list(files_below(tmp_path))
    assert sorted(found) == sorted(str(path) for path in tmp_path.rglob("*") if not path.is_dir())
    assert [os.path.relpath(path, tmp_path) for path in found] == ["5", "a/4", "a/c/3", "b/1", "b/2", "b/d/6"]


def test_linked_folders_are_read_once_and_only_where_that_is_asked_for(tmp_path: Path) -> None:
    touch(tmp_path, "root/a/1", "elsewhere/2")
    root = tmp_path / "root"
    for link, target in (("a/up", root), ("b", root / "a"), ("c", tmp_path / "elsewhere"), ("d", root / "c")):
        (root / link).symlink_to(target)
    for linked, names in ((True, ["a/1", "c/2"]), (False, ["a/1"])):
        assert [os.path.relpath(path, root) for path in files_below(root, linked=linked)] == names


def test_a_folder_that_cannot_be_listed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its images would be missing without a word."""
    (tmp_path / "closed").mkdir()
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    scandir = os.scandir

    def listed(folder: str) -> Any:
        if folder.endswith("closed"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), folder)
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", listed)
    with pytest.raises(DataError, match=r"cannot list the folder .*closed \(Permission denied\)"):
        list(files_below(tmp_path))
    (tmp_path / "closed").rmdir()
    assert list(files_below(tmp_path)) == [str(tmp_path / "circle")]
    assert list(files_below(tmp_path / "none")) == []


def test_hidden_files_and_folders_are_skipped(tmp_path: Path) -> None:
    touch(tmp_path, ".DS_Store", "._1.jpg", "1.jpg", ".stored_images/1.jpg", "__MACOSX/a/._1.jpg", "a/1.jpg")
    assert [os.path.relpath(path, tmp_path) for path in files_below(tmp_path)] == ["1.jpg", "a/1.jpg"]


def test_a_folder_may_be_deep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deeper than Python calls functions inside functions."""
    monkeypatch.chdir(tmp_path)
    for _ in range(1200):
        Path("d").mkdir()
        os.chdir("d")
    Path("x").touch()
    os.chdir(tmp_path)
    assert [path.count("/d") for path in files_below(tmp_path)] == [str(tmp_path).count("/d") + 1200]
    subprocess.run(["rm", "-r", "d"], check=True)  # pytest would by a function that calls itself.


def test_files_that_are_not_read_are_counted(tmp_path: Path) -> None:
    touch(tmp_path, "1.JPG", ".DS_Store", "Thumbs.db", "a/1.HEIC", "a/2.heic", "a/notes")
    assert "2 .heic, 1 .db, 1 without a suffix" in unread_below(tmp_path)
    assert unread_below(tmp_path / "a" / "1.HEIC") == unread_below("mnist:tests/data") == ""


def test_images_beside_the_class_folders_are_counted(tmp_path: Path) -> None:
    assert unread_beside(tmp_path) == ""
    touch(tmp_path, "1.JPG", "2.jpg", "3.png", "4.heic", ".5.jpg", "a/6.jpg", "b.png/7.jpg")
    assert "2 .jpg, 1 .png" in unread_beside(tmp_path)
    assert unread_beside(tmp_path / "b.png" / "7.jpg") == ""
