"""Folders of networks, in the hub's cache too, and their JSON files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from psc_core.errors import NetworkError
from psc_core.network import described
from psc_core.network.described import folder_of, read_json, weights_in


def test_a_folder_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert folder_of(str(tmp_path)) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "net").mkdir()
    assert folder_of("~/net") == tmp_path / "net"


@pytest.mark.parametrize("name", ["nowhere", "./nowhere", "/no/where/at/all", "a/b/c", "../x"])
def test_says_that_there_is_no_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NetworkError, match="there is no folder"):
        folder_of(name)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, which cannot be reached."""
    hub = pytest.importorskip("huggingface_hub", reason="it keeps the cache")

    def unreachable(*_: Any, **__: Any) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(hub.HfApi, "repo_info", unreachable)
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def keep(cache: Path, **contents: str) -> Path:
    """Keep a model ACME/net in the cache as the hub's client does, by links."""
    repository = cache / "models--ACME--net"
    snapshot = repository / "snapshots" / ("0" * 40)
    for folder in (snapshot, repository / "blobs", repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    for name, content in contents.items():
        (repository / "blobs" / name).write_text(content)
        (snapshot / name.replace("_json", ".json").replace("_safe", ".safetensors")).symlink_to(f"../../blobs/{name}")
    return snapshot


def test_finds_a_model_in_the_cache(cache: Path) -> None:
    snapshot = keep(cache, config_json='{"a": 1}', model_safe="")
    found = folder_of("ACME/net")
    assert found == snapshot
    assert read_json(found / "config.json") == {"a": 1}
    assert weights_in(found, ["model.safetensors"]) == (found / "model.safetensors",)


def test_names_the_flag_that_downloads(cache: Path) -> None:
    with pytest.raises(NetworkError, match="no model of this name; give --allow-download to get it from the hub"):
        folder_of("ACME/other")


def test_asks_the_hub_on_request_only(cache: Path) -> None:
    with pytest.raises(AssertionError, match="the hub was asked"):
        folder_of("ACME/other", allow_download=True)


def test_downloads_pickles_only_where_there_is_nothing_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub", reason="it downloads")
    asked: list[list[str]] = []

    def snapshot(_name: str, *, allow_patterns: list[str], local_files_only: bool) -> str:
        assert not local_files_only
        asked.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", snapshot)
    folder_of("ACME/net", allow_download=True)
    assert asked == [["*.json", "*.safetensors"], ["pytorch_model*.bin"]]
    (tmp_path / "model.safetensors").touch()
    folder_of("ACME/net", allow_download=True)
    assert len(asked) == 3


@pytest.mark.parametrize("error", [OSError("no route\nto host"), ValueError("401: gated")])
def test_says_why_it_cannot_download(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub", reason="it downloads")

    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(hub, "snapshot_download", fail)
    with pytest.raises(NetworkError, match=r"^cannot download ACME/net: (no route|401: gated)$"):
        folder_of("ACME/net", allow_download=True)


def test_reads_an_object(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": [1, 2]}')
    assert read_json(tmp_path / "a.json") == {"a": [1, 2]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[1]", "expected .* to hold a JSON object, got list"),
        (b"[" * 100_000, "is not JSON"),
    ],
)
def test_rejects_what_is_no_object(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(NetworkError, match=message):
        read_json(tmp_path / "a.json")


def test_reads_regular_files_of_a_bounded_size_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "large.json").write_text(json.dumps({"a": "b" * 100}))
    monkeypatch.setattr(described, "MAX_JSON", 100)
    for name in ("pipe.json", "large.json", "."):
        with pytest.raises(NetworkError, match="a regular file of at most 100 bytes"):
            read_json(tmp_path / name)
    with pytest.raises(NetworkError, match="No such file or directory; is that the folder of a network"):
        read_json(tmp_path / "absent.json")


def test_takes_the_first_weights(tmp_path: Path) -> None:
    for name in ("model.safetensors", "pytorch_model.bin"):
        (tmp_path / name).touch()
    names = ["absent", "model.safetensors", "pytorch_model.bin"]
    assert weights_in(tmp_path, names) == (tmp_path / "model.safetensors",)
    with pytest.raises(NetworkError, match="has no weights, expected one of absent"):
        weights_in(tmp_path, ["absent"])


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({}, "has no weight_map"),
        ({"weight_map": {}}, "has no weight_map"),
        ({"weight_map": {"a": 1}}, "has no weight_map"),
        ({"weight_map": {"a": "absent"}}, "'absent', which is not beside it"),
        ({"weight_map": {"a": "../outside"}}, "outside', which is not beside it"),
    ],
)
def test_reads_an_index(index: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "outside").touch()
    folder = tmp_path / "net"
    folder.mkdir()
    for name in ("1", "2"):
        (folder / name).touch()
    file = folder / "model.safetensors.index.json"
    file.write_text(json.dumps({"weight_map": {"a": "2", "b": "1", "c": "2"}}))
    assert weights_in(folder, [file.name]) == (folder / "1", folder / "2")
    file.write_text(json.dumps(index))
    with pytest.raises(NetworkError, match=message):
        weights_in(folder, [file.name])
