"""The cache is read only where nobody else can have written to it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from psc_core.network import load as cache
from psc_core.network.load import cache_file, read_checked, version_of, write_checked


def install(folder: Path, version: str, *, distribution: str, code: str = "") -> None:
    """Install a module ``standin`` by a distribution of some name."""
    (folder / "standin").mkdir(parents=True)
    (folder / "standin" / "__init__.py").write_text(code or f"__version__ = {version!r}")
    info = folder / f"{distribution}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")


@pytest.mark.parametrize("distribution", ["standin", "standin_gpu", "another_name"])
@pytest.mark.parametrize("version", ["1.22.0", "2.16.0.dev20260101", "2.15.0+cu132"])
def test_the_version_of_a_module_does_not_need_a_distribution_of_its_name(
    distribution: str, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, version, distribution=distribution)
    monkeypatch.syspath_prepend(tmp_path)
    assert version_of("standin") == version
    sys.modules.pop("standin", None)


def test_another_version_has_another_place_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "PACKAGES", ("standin",))
    places = []
    for version in ("1.0", "1.1"):
        install(tmp_path / version, version, distribution="standin_gpu")
        with monkeypatch.context() as at:
            at.syspath_prepend(tmp_path / version)
            places += [cache_file("onnx", b"network"), cache_file("onnx", b"network")]
            sys.modules.pop("standin", None)
    assert places[0] == places[1] != places[2] == places[3]


@pytest.mark.parametrize("code", ["import no_such_module", "raise OSError('libcudnn.so.9: cannot open')", "pass"])
def test_a_broken_installation_still_has_a_place(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "1.0", distribution="standin_gpu", code=code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(cache, "PACKAGES", ("standin", "no_such_module"))
    assert cache_file("onnx", b"network").suffix == ".onnx"
    sys.modules.pop("standin", None)


def test_a_cache_that_others_may_write_to_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "psc"
    folder.mkdir(mode=0o700)
    file = folder / "key.onnx"
    write_checked(file, b"graph")
    assert read_checked(file) == b"graph" and not caplog.records
    file.chmod(0o666)
    assert read_checked(file) is None
    file.chmod(0o600)
    folder.chmod(0o777)
    assert read_checked(file) is None
    folder.chmod(0o700)
    assert read_checked(file) == b"graph" and len(caplog.records) == 2
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert read_checked(file) is None
    monkeypatch.undo()
    (folder / "link.onnx").symlink_to(file)
    os.mkfifo(folder / "pipe.onnx")
    assert read_checked(folder / "link.onnx") is None and read_checked(folder / "pipe.onnx") is None
