from __future__ import annotations

import argparse
import gzip
import io
import json
import os
import pickle
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save, save_file
from torch import Tensor, nn

from psc_core.errors import NetworkError
from psc_core.network import weights as checkpoints
from psc_core.network.weights import Weights, files_of, is_whole_network, load_weights, read_checkpoint, read_weights

TENSORS = {"a.weight": torch.arange(6.0).view(2, 3), "a.bias": torch.ones(2), "count": torch.tensor(7)}
older = partial(torch.save, _use_new_zipfile_serialization=False)


def are_equal(tensors: Any, expected: dict[str, Tensor]) -> bool:
    return tensors.keys() == expected.keys() and all(torch.equal(tensors[name], expected[name]) for name in expected)


@pytest.mark.parametrize("name", ["net.pth", "net.pt", "model.bin", "last.ckpt", "best.pth.tar"])
@pytest.mark.parametrize("write", [save_file, torch.save, older])
def test_the_content_tells_the_format(tmp_path: Path, name: str, write: Callable[[object, Path], None]) -> None:
    write(TENSORS, tmp_path / name)
    assert are_equal(read_checkpoint(tmp_path / name), TENSORS)
    assert files_of(tmp_path / name) == [tmp_path / name]


class Ordered(OrderedDict[str, Any]): ...


class Plain(dict[Any, Any]): ...


class Listed(list[Any]): ...


def training_state() -> dict[str, Any]:
    """What a training loop keeps beside its weights."""
    net = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    return {
        "optimizer": optimizer.state_dict(),
        "the optimizer itself": optimizer,
        "scheduler": scheduler.state_dict(),
        "args": argparse.Namespace(lr=0.1, out=Path("x")),
        "losses": defaultdict(list, {"train": [1.0, 2.0], "val": [np.float32(3)]}),
        "nested": defaultdict(Ordered, {"a": Ordered(b=deque([1, 2], maxlen=5))}),
        "recent": deque([1.0, 2.0]),
        "none yet": deque(),
        "plain": Plain(a=1),
        "listed": Listed([1, Listed([Plain(a=[2])])]),
        "counts": Counter("aab"),
        "best": np.float64(0.9),
        "by epoch": {np.int64(1): 0.5, np.int64(2): 0.6},
        "rng": np.random.default_rng(0),
        "state": np.random.RandomState(0).get_state(),
    }


@pytest.mark.parametrize("write", [torch.save, older])
def test_what_a_training_loop_keeps_does_no_harm(tmp_path: Path, write: Callable[[object, Path], None]) -> None:
    beside = training_state()
    write({**beside, "state_dict": TENSORS}, tmp_path / "net.pth")
    held = read_checkpoint(tmp_path / "net.pth")
    assert held.keys() == {*beside, "state_dict"} and are_equal(held["state_dict"], TENSORS)
    assert not is_whole_network(held) and len(held["by epoch"]) == 2
    assert held["recent"] == [1.0, 2.0] and held["plain"] == {"a": 1} and held["listed"] == [1, [{"a": [2]}]]
    assert held["losses"]["train"] == [1.0, 2.0] and held["nested"]["a"]["b"] == [1, 2]
    for name, value in beside.items():
        write({name: value, "state_dict": TENSORS}, tmp_path / "net.pth")
        assert are_equal(read_checkpoint(tmp_path / "net.pth")["state_dict"], TENSORS)


@pytest.mark.parametrize("write", [torch.save, older])
@pytest.mark.parametrize("kind", [Ordered, Plain, partial(defaultdict, list)])
def test_any_dictionary(tmp_path: Path, kind: Callable[[Any], Any], write: Callable[[object, Path], None]) -> None:
    for content in (kind(TENSORS), {"state_dict": kind(TENSORS)}):
        write(content, tmp_path / "net.pth")
        held = read_checkpoint(tmp_path / "net.pth")
        assert are_equal(held.get("state_dict", held), TENSORS)
    state = Ordered(TENSORS)
    state._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]  # as that of a network
    write(state, tmp_path / "net.pth")
    assert are_equal(read_checkpoint(tmp_path / "net.pth"), TENSORS)


class Command:
    """Runs a command when it is unpickled."""

    def __init__(self, run: Callable[..., object], *args: object) -> None:
        self.call = run, args

    def __reduce__(self) -> Any:
        return self.call


RUN: list[str] = []  # what ran since it was cleared


def recorded(name: str, *_: object) -> Any:
    RUN.append(name)
    return {}


class Recorder:
    """Tells of everything that a reader might do to it."""

    def __new__(cls, *_: object) -> Any:
        RUN.append("__new__")
        return super().__new__(cls)

    def __init__(self, *_: object) -> None:
        RUN.append("__init__")

    def __setstate__(self, state: object) -> None:
        RUN.append("__setstate__")

    def __getstate__(self) -> object:
        return {"a": 1}


class RecordingDict(Plain):
    def __setitem__(self, *_: object) -> None:
        RUN.append("__setitem__")


class RecordingList(Listed):
    def append(self, _: object) -> None:
        RUN.append("append")

    def extend(self, _: object) -> None:
        RUN.append("extend")


def containers(inside: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    some = st.lists(inside, max_size=3)
    kinds = [list, tuple, deque, Listed, RecordingList, partial(Command, recorded, "called")]
    named = st.dictionaries(st.sampled_from("abc"), inside, max_size=3)
    mappings = [dict, Ordered, Plain, RecordingDict, partial(defaultdict, list)]
    return st.one_of(
        *(some.map(kind) for kind in kinds),  # type: ignore[arg-type]
        *(named.map(kind) for kind in mappings),
        named.map(lambda state: argparse.Namespace(**state)),
        inside.map(lambda value: defaultdict(recorded, a=value)),
    )


LEAVES = st.one_of(
    st.builds(Recorder),
    st.integers(-9, 9),
    st.sampled_from([recorded, Recorder, RecordingDict, np.float64(1), Path("x"), nn.Linear, torch.ones(2), eval]),
)


def held_objects(value: Any) -> Iterator[Any]:
    yield value
    if isinstance(value, dict | list | tuple):
        for part in [*value.keys(), *value.values()] if isinstance(value, dict) else value:
            yield from held_objects(part)


@given(beside=st.recursive(LEAVES, containers, max_leaves=12), write=st.sampled_from([torch.save, older]))
def test_nothing_that_a_file_names_is_run(beside: Any, write: Callable[[object, Path], None], written: Path) -> None:
    path = written / "drawn.pth"
    write({"state_dict": TENSORS, "beside": beside}, path)
    RUN.clear()
    try:
        held = read_checkpoint(path)
    except NetworkError as error:
        assert "only if you trust it" in str(error)
    else:
        assert are_equal(held["state_dict"], TENSORS)
        own = (dict, OrderedDict, list, tuple, int, str, Tensor)
        for value in held_objects(held):
            kind = value if isinstance(value, type) else type(value)
            assert kind in own or kind.__module__ == checkpoints.__name__, kind
    assert RUN == []


def test_the_lines_that_convert_a_network_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    net = nn.Sequential(nn.Linear(2, 2))
    torch.save(net, "net.pth")
    told = str(checkpoints.needs_code(Path("net.pth"), "a whole network"))
    exec(told.partition("if it is a dictionary: ")[2], {"torch": torch, "safetensors": __import__("safetensors.torch")})
    assert are_equal(read_checkpoint(Path("net.safetensors")), net.state_dict())


def archive(path: Path, names: list[str], *, packed: bool = False, size: int = 10) -> Path:
    with ZipFile(path, "w", **({"compression": ZIP_DEFLATED} if packed else {})) as file:
        for name in names:
            file.writestr(name, b"\0" * size)
    return path


def test_rejects_what_is_no_regular_file(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    os.mkfifo(tmp_path / "pipe")
    for name in ("folder", "zero", "pipe", "loop", "no"):
        for file in (tmp_path / name, index(tmp_path, {"a": name})):
            with pytest.raises(NetworkError, match=r"is a folder|not a regular file|no file"):
                read_checkpoint(file)
    reading, writing = os.pipe()
    try:
        with pytest.raises(NetworkError, match="not a regular file"):
            read_checkpoint(Path(f"/dev/fd/{reading}"))
    finally:
        os.close(reading), os.close(writing)


def index(folder: Path, files: object, name: str = "model.safetensors.index.json") -> Path:
    (folder / name).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": files}))
    return folder / name


@pytest.mark.parametrize(("suffix", "write"), [("safetensors", save_file), ("bin", torch.save)])
def test_reads_the_files_of_an_index(tmp_path: Path, suffix: str, write: Callable[[object, Path], None]) -> None:
    first, second = (f"model-0000{n}-of-00002.{suffix}" for n in (1, 2))
    write({name: TENSORS[name] for name in ("a.weight", "a.bias")}, tmp_path / first)
    write({"count": TENSORS["count"], "unused": torch.ones(1)}, tmp_path / second)
    path = index(tmp_path, {"a.weight": first, "a.bias": first, "count": second}, f"model.{suffix}.index.json")
    assert are_equal(read_checkpoint(path), TENSORS)
    assert files_of(path) == [path, tmp_path / first, tmp_path / second]
    hub = tmp_path / "hub"  # A folder of links to the files, as the hub's client makes.
    hub.mkdir()
    for file in files_of(path):
        (hub / file.name).symlink_to(file)
    assert are_equal(read_checkpoint(hub / path.name), TENSORS)


def test_rejects_an_index_of_files_elsewhere_or_without_its_tensors(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "net.safetensors")
    (tmp_path / "deeper").mkdir()
    save_file(TENSORS, tmp_path / "deeper" / "net.safetensors")
    elsewhere = ["deeper/net.safetensors", "../net.safetensors", str(tmp_path / "net.safetensors"), ".", "", "a\0/b"]
    for name in (*elsewhere, "other.index.json", "x" * 9999 + "/y"):
        with pytest.raises(NetworkError, match="which is not beside it; copy the whole folder") as caught:
            read_checkpoint(index(tmp_path, {"count": name}))
        assert len(str(caught.value)) < 500
    with pytest.raises(NetworkError, match=r"net\.safetensors lacks b"):
        read_checkpoint(index(tmp_path, {"a.bias": "net.safetensors", "b": "net.safetensors"}))
    for name in ("a\0b", ".."):
        with pytest.raises(NetworkError, match=r"no file of weights|is a folder"):
            read_checkpoint(index(tmp_path, {"count": name}))


def test_rejects_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors.index.json"
    for text in (b"", b"[]", b"{}", b'{"weight_map": 3}', b'{"weight_map": {"a": 3}}', b"\xff", b"[" * 100_000):
        path.write_bytes(text)
        for read in (read_checkpoint, files_of):
            with pytest.raises(NetworkError, match=r"index\.json (is damaged|has no weight_map)"):
                read(path)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "MAX_TEXT", 1)
        with pytest.raises(NetworkError, match="an index of at most 1 bytes"):
            read_checkpoint(path)
    monkeypatch.setattr(checkpoints, "MAX_CLASSES", 1)
    torch.save({"a": Foreign(), "b": Path("x")}, tmp_path / "net.pth")
    with pytest.raises(NetworkError, match="objects of 2 classes"):
        read_checkpoint(tmp_path / "net.pth")
    (tmp_path / "net.onnx").write_bytes(b"\x08\x08\x12\x00" * 16)
    with pytest.raises(NetworkError, match=r"give --model onnx:\S+net\.onnx"):
        read_checkpoint(tmp_path / "net.onnx")


def held_or_refused(path: Path) -> None:
    """Something is read, or refused in one line that says nothing of the inside."""
    try:
        read_checkpoint(path)
    except NetworkError as error:
        assert len(str(error)) < 1000 and "\n" not in str(error)


WRITTEN = {"net.pth": torch.save, "older.pth": older, "net.safetensors": save_file}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    for name, write in WRITTEN.items():
        write(TENSORS if write is save_file else {"state_dict": TENSORS, "best": np.float64(1)}, folder / name)
    (folder / "part.safetensors").write_bytes(save(TENSORS))
    index(folder, dict.fromkeys(TENSORS, "part.safetensors"))
    return folder


FLIPS = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=8)


@pytest.mark.parametrize("name", [*WRITTEN, "model.safetensors.index.json"])
@given(flips=FLIPS, kept=st.one_of(st.just(1.0), st.floats(0, 1)))
def test_damaged_files(written: Path, name: str, flips: list[tuple[float, int]], kept: float) -> None:
    content = (written / name).read_bytes()
    damaged = bytearray(content)
    for where, byte in flips:
        damaged[int(where * len(damaged))] = byte
    (written / name).write_bytes(damaged[: round(kept * len(damaged))])
    try:
        held_or_refused(written / name)
    finally:
        (written / name).write_bytes(content)


PICKLED = "net/data.pkl"


@given(flips=FLIPS)
def test_damaged_pickles_are_read_or_refused(written: Path, flips: list[tuple[float, int]]) -> None:
    """Damage where it matters, in an archive that is whole."""
    path = written / "again.pth"
    with ZipFile(written / "net.pth") as whole, ZipFile(path, "w") as again:
        for entry in whole.namelist():
            content = bytearray(whole.read(entry))
            for where, byte in flips if entry == PICKLED else ():
                content[int(where * len(content))] = byte
            again.writestr(entry, bytes(content))
    held_or_refused(path)


def test_claims_take_no_memory(tmp_path: Path) -> None:
    """A tensor of a terabyte whose storage is not there, and one that repeats a single number."""
    torch.save({"a": torch.zeros(1000)}, tmp_path / "net.pth")
    with ZipFile(tmp_path / "net.pth") as whole:
        entries = {name: whole.read(name) for name in whole.namelist()}
    claimed = entries[PICKLED].replace(b"M\xe8\x03", b"J\xff\xff\xff\x7f")  # 1000, and 2³¹ − 1
    assert claimed != entries[PICKLED]
    with ZipFile(tmp_path / "net.pth", "w") as file:
        for name, content in (entries | {PICKLED: claimed}).items():
            file.writestr(name, content)
    with pytest.raises(NetworkError, match="damaged"):
        read_checkpoint(tmp_path / "net.pth")
    torch.save({"a": torch.zeros(1).expand(1 << 40)}, tmp_path / "net.pth")
    assert read_checkpoint(tmp_path / "net.pth")["a"].shape == (1 << 40,)


class Foreign:
    """A class of the program that trained."""


@pytest.mark.parametrize("protocol", [4, 5])
@pytest.mark.parametrize("zipped", [True, False])
def test_a_newer_pickle_is_not_damaged_but_needs_code(tmp_path: Path, protocol: int, zipped: bool) -> None:
    state = {"a.weight": torch.ones(2)}
    options: dict[str, Any] = {"pickle_protocol": protocol, "_use_new_zipfile_serialization": zipped}
    for held in ({"net": state, "settings": Foreign()}, state):
        torch.save(held, tmp_path / "net.pth", **options)
        with pytest.raises(NetworkError) as raised:
            read_checkpoint(tmp_path / "net.pth")
        said = str(raised.value)
        assert "damaged" not in said and "save_file(net.state_dict()" in said
        assert (f"{__name__}.Foreign" in said) == (held is not state and zipped)


def packed(name: str) -> bytes:
    inner = io.BytesIO()
    with ZipFile(inner, "w") as archive:
        archive.writestr(name, b"x")
    return inner.getvalue()


@pytest.mark.parametrize(
    ("content", "cure"),
    [
        (b"", "copy it again"),
        (bytes(600), "copy it again"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs pull"),
        (b"\xef\xbb\xbf\n<!DOCTYPE html><html>" + bytes(99), "download the file again"),
        (b"<?xml version='1.0'?><Error/>", "download the file again"),
        (b'{"message": "Not Found"}', "JSON"),
        (b"\x89HDF\r\n\x1a\n" + bytes(99), "onnx:"),
        (b"\x93NUMPY\x01\x00" + bytes(99), "torch.from_numpy"),
        (gzip.compress(b"x" * 99), "unpack"),
        (b"a" * 257 + b"ustar" + bytes(99), "unpack"),
        (pickle.dumps(Foreign(), 4), "Foreign"),
        (packed("w.npy"), "torch.from_numpy"),
        (packed("net/best.pth"), "best.pth"),
        (packed("net/models/model.json"), "torch.export.load"),
    ],
    ids=range(14),
)
@pytest.mark.parametrize("suffix", [".pth", ".safetensors", ".bin"])
def test_what_is_no_checkpoint_is_named_with_its_cure(tmp_path: Path, content: bytes, cure: str, suffix: str) -> None:
    file = tmp_path / f"net{suffix}"
    file.write_bytes(content)
    with pytest.raises(NetworkError) as raised:
        read_checkpoint(file)
    assert cure in str(raised.value) and "damaged" not in str(raised.value)


def network(num_classes: int = 3) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, num_classes))


def state(seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return network().state_dict()


def prefixed(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


def read(checkpoint: object, folder: Path) -> Weights:
    torch.save(checkpoint, folder / "net.pth")
    return read_weights(folder / "net.pth", network().state_dict())


@given(parts=st.lists(st.sampled_from(["module", "_orig_mod", "net", "model", "backbone", "0", "bn"]), max_size=6))
def test_any_prefix_is_removed(parts: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    weights = read(prefixed("".join(f"{part}." for part in parts), state()), tmp_path_factory.getbasetemp())
    assert are_equal(weights.tensors, state())


def test_older_names_of_torchvision_are_read(tmp_path: Path) -> None:
    old = ("a.mlp.linear_1.weight", "a.mlp.linear_2.bias", "denselayer1.norm.1.bias", "denselayer1.conv.2.weight")
    new = ("a.mlp.0.weight", "a.mlp.3.bias", "denselayer1.norm1.bias", "denselayer1.conv2.weight")
    torch.save({f"module.{name}": torch.full((1,), float(i)) for i, name in enumerate(old)}, tmp_path / "net.pth")
    for names in (new, old):
        found = read_weights(tmp_path / "net.pth", dict.fromkeys(names, torch.zeros(1)))
        assert [float(found.tensors[name]) for name in names] == [0, 1, 2, 3]


def test_says_what_is_converted(tmp_path: Path) -> None:
    for dtype, name in ((torch.float16, "float16"), (torch.float64, "float64"), (torch.float8_e4m3fn, "float8_e4m3fn")):
        given = {key: part.to(dtype) if part.is_floating_point() else part for key, part in state().items()}
        weights = read(given, tmp_path)
        assert weights.notes == (f"converted 8 tensors from {name} to float32",)
        net = network()
        load_weights(net, weights.tensors, num_classes=3, origin="net.pth")
        assert torch.equal(net.get_parameter("0.weight"), given["0.weight"].float())


def test_batch_counters_may_be_absent() -> None:
    kept = {name: part for name, part in state().items() if "num_batches" not in name}
    load_weights(network(), kept, num_classes=3, origin="net.pth")


def changed(name: str, part: Tensor) -> dict[str, Tensor]:
    return {**state(), name: part}


REJECTED = {
    "1 missing (3.bias), 0 unexpected": {name: part for name, part in state().items() if name != "3.bias"},
    "0 missing, 1 unexpected (extra)": changed("extra", torch.zeros(1)),
    "expected 3.bias of shape (3,), got (3, 3)": changed("3.bias", torch.zeros(3, 3)),
    "expected 0.bias of shape (4,), got (1099511627776,)": changed("0.bias", torch.zeros(1).expand(1 << 40)),
    "3.bias has NaN or infinity; train it again": changed("3.bias", torch.tensor([0.0, torch.nan, 0.0])),
    "1.running_var has NaN or infinity": changed("1.running_var", torch.full((4,), 1e300, dtype=torch.float64)),
    "expected 3.bias of float32, got int8; save plain weights": changed("3.bias", torch.zeros(3, dtype=torch.int8)),
    "got complex64": changed("3.bias", torch.zeros(3, dtype=torch.complex64)),
    "got a sparse tensor": changed("3.bias", torch.zeros(3).to_sparse()),
    "got a tensor without values": changed("3.bias", torch.zeros(3, device="meta")),
    "is for 7 classes (3.weight is (7, 16)), the data has 3": {
        **state(), "3.weight": torch.zeros(7, 16), "3.bias": torch.zeros(7)
    },
    f"2 unexpected ({'x' * 100}…{'x' * 100}, y)": {**changed("x" * 999, torch.zeros(1)), "y": torch.zeros(1)},
}  # fmt: skip


@pytest.mark.parametrize("message", REJECTED)
def test_rejects_tensors_that_do_not_fit(message: str) -> None:
    with pytest.raises(NetworkError) as caught:
        load_weights(network(), REJECTED[message], num_classes=3, origin="net.pth")
    assert message in str(caught.value)


def test_whole_numbers_are_not_filled_from_floats() -> None:
    net = nn.BatchNorm1d(2)
    net.register_buffer("index", torch.zeros(2, dtype=torch.long))
    given = {**net.state_dict(), "num_batches_tracked": torch.tensor(3.0)}
    load_weights(net, given, num_classes=2, origin="net.pth")
    with pytest.raises(NetworkError, match="expected index of int64, got float32; save plain weights"):
        load_weights(net, {**given, "index": torch.tensor([0.5, 1.7])}, num_classes=2, origin="net.pth")


def test_rejects_what_has_no_tensors_by_name(tmp_path: Path) -> None:
    for checkpoint in ({"epoch": 1}, [state()], torch.zeros(2), {"a": {"b": {"c": state()}}}, {1: torch.zeros(2)}):
        with pytest.raises(NetworkError, match=r"net\.pth holds no tensors by name"):
            read(checkpoint, tmp_path)


def test_one_of_several_files_is_told(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model-00001-of-00002.bin"
    torch.save({"0.weight": state()["0.weight"]}, path)
    with pytest.raises(NetworkError, match=r"is one of several files .*; give their \.index\.json"):
        read_weights(path, network().state_dict())
    torch.save(state(), path)
    assert read_weights(path, network().state_dict()).notes == ()


def test_rejects_a_whole_network(tmp_path: Path) -> None:
    torch.save(network(), tmp_path / "net.pth")
    assert is_whole_network(read_checkpoint(tmp_path / "net.pth"))
    older(network(), tmp_path / "net.pth")
    with pytest.raises(NetworkError, match=r"weights_only=False\)"):
        read_checkpoint(tmp_path / "net.pth")
    for checkpoint in (network(), {"model": network(), "anchors": torch.ones(2)}):
        with pytest.raises(NetworkError) as caught:
            read(checkpoint, tmp_path)
        assert 'net = torch.load("net.pth", weights_only=False); safetensors.torch.save_file(' in str(caught.value)
    assert read({"model": network(), "state_dict": state()}, tmp_path).notes == ('found under "state_dict" of net.pth',)


def test_rejects_other_archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, pickled = tmp_path / "net.pt", ["net/data.pkl", "net/version"]
    monkeypatch.setattr(checkpoints, "MAX_TEXT", 100)
    for names, options, message in (
        ([*pickled, "net/constants.pkl"], {}, "torch.jit.load"),
        (["word/document.xml"], {}, "not one of torch.save"),
        (pickled, {"packed": True, "size": 50 << 20}, "packed"),
        (pickled, {"size": 101}, "more than 100 bytes"),
    ):
        archive(path, names, **options)
        with pytest.raises(NetworkError, match=message):
            read_checkpoint(path)


FOUND: dict[str, Any] = {
    "as it is": state(),
    "timm": {"state_dict": state(), "metric": 0.9},
    "twice nested": {"epoch": 1, "model": {"net": state()}},
    "several GPUs": prefixed("module.", state()),
    "compiled": {"model_state_dict": prefixed("module._orig_mod.", state())},
    "Lightning": {
        "state_dict": {**prefixed("model.", state()), "criterion.weight": torch.ones(2)},
        "optimizer_states": [{"state": {0: {"exp_avg": torch.ones(2)}}}],
    },
    "moving averages beside": {"state_dict_ema": state(1), "state_dict": state(), "ema": state(2)},
    "moving averages alone": {"model_ema": state()},
    "averages among the names": {"net": {**prefixed("ema_model.", state(1)), **prefixed("model.", state())}},
    "averages inside": {**state(), **prefixed("ema.", state(1))},
    "averaged by PyTorch": {"n_averaged": torch.tensor(9), **prefixed("module.", state())},
    "parameters": {name: nn.Parameter(part, requires_grad=False) for name, part in state().items()},
    "by two names": dict.fromkeys(("model", "state_dict"), state()),
}


NOTES = {
    "as it is": (),
    "Lightning": (
        'found under "state_dict" of net.pth',
        'removed the prefix "model."',
        "ignored 1 other tensor (criterion.weight)",
    ),
    "moving averages beside": ('found under "state_dict" of net.pth', 'not used: "state_dict_ema", "ema"'),
    "by two names": ('found under "model" of net.pth',),
}


@pytest.mark.parametrize("case", FOUND)
def test_finds_the_tensors(case: str, tmp_path: Path) -> None:
    weights = read(FOUND[case], tmp_path)
    assert are_equal(weights.tensors, state())
    assert weights.notes == NOTES.get(case, weights.notes)
    net = network()
    load_weights(net, weights.tensors, num_classes=3, origin=weights.origin)
    assert are_equal(net.state_dict(), state())
