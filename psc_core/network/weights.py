"""Find a network's tensors in a checkpoint of any training framework, without running anything that the file names.

=====================  ===========================================================================================
safetensors            memory-mapped tensors
``torch.save``         ``torch.load(weights_only=True)``, memory-mapped; read whole if written before PyTorch 1.6
``….index.json``       the tensors in the neighbouring files that its ``weight_map`` names
=====================  ===========================================================================================

The format is found from the content, because suffixes vary.  Besides tensors a checkpoint may hold objects of any
class, such as settings, metrics and an optimizer; ``weights_only`` would refuse the whole file because of one of them,
so each becomes an empty stand-in.  ``weights_only`` can fill only plain dictionaries and lists, so these replace the
classes whose objects the pickle fills: subclasses of both, ``defaultdict``, ``deque``.

A checkpoint holds more than a state dict, and its names say where the network was in the trained module.  So every
dictionary with tensors, at most two levels deep, is searched with every prefix of its names that ends in a dot: the
tensors are found in the place that has all of the network's names.  Of several such places, one whose name marks no
moving average comes first, then the outermost, then the shortest prefix.  Tensors outside of the prefix are ignored,
and so are those of another such place; any other name that the network lacks is an error, because it means another
network.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import pickletools
import re
import stat
import warnings
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any, Final
from zipfile import ZIP_STORED, ZipFile, ZipInfo

import safetensors.torch
import torch
from torch import Tensor, nn

from psc_core.errors import NetworkError, join_names, shorten

KNOWN_SUFFIXES: Final = ".safetensors, .pth, .pt, .bin, .ckpt, or the .index.json of several files"
INDEX: Final = ".index.json"  # the suffix of a file that names other files, which hold the tensors
MAX_TEXT: Final = 64 << 20  # of an index or of the pickle besides the tensors, which are parsed as a whole, in bytes
_SHOWN_NAMES: Final = 3
MAX_CLASSES: Final = 1000  # maximum number of classes for which a stand-in is made
_OLDER_FORM: Final = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # before zip archives
_HEAD: Final = 512  # the number of first bytes that tell what a file is
_UNPACK: Final = "is compressed; unpack it, and give the file of weights in it"
_NUMPY: Final = (
    "holds arrays of NumPy; save them as torch.save({name: torch.from_numpy(array) for name, array in arrays.items()}, "
    '"net.pth")'
)

# What files are that are taken for checkpoints, and what to do, by their first bytes.
_OTHER_FORMATS: Final[Mapping[bytes, str]] = {
    b"version https://git-lfs": "is a pointer of Git LFS in place of the file; fetch the file with git lfs pull",
    b"<": "is a web page, so its download failed or needs a login; download the file again",
    b"{": "is JSON; give the file of weights",
    b"\x89HDF": "is HDF5, as Keras writes it; export the network to ONNX, and give it as onnx:FILE",
    b"\x93NUMPY": _NUMPY,
    b"GGUF": "is for llama.cpp; give the network's PyTorch weights",
    b"\x1f\x8b": _UNPACK,
    b"BZh": _UNPACK,
    b"\xfd7zXZ": _UNPACK,
    b"7z\xbc\xaf": _UNPACK,
    b"\x28\xb5\x2f\xfd": _UNPACK,
}

# How the names of those classes and functions begin that a state dict of tensors needs too.
_HARMLESS: Final = ("collections.OrderedDict", "torch._utils.", "torch.storage.", "torch.serialization.", "builtins.")
_READ_PROTOCOL: Final = 3  # the newest pickle protocol that ``weights_only`` can read
_BEFORE: Final = 3  # pickles before the object's in that older form: a magic number, a version, the machine
_FILLS: Final = {"SETITEM": OrderedDict, "SETITEMS": OrderedDict, "APPEND": list, "APPENDS": list}  # by instruction
# The pickle instructions whose result has the class that is their first operand, or the class of that operand.
_KEEPS: Final = frozenset({*_FILLS, "BUILD", "REDUCE", "NEWOBJ"})


def read_checkpoint(path: Path) -> Any:
    _check_regular(path)
    if path.name.endswith(INDEX):
        return _read_parts(path)
    with path.open("rb") as file:
        head = file.read(_HEAD)
    if head[8:9] == b"{":  # the header follows its length
        with _damage_named(path):
            return safetensors.torch.load_file(path)
    if head.startswith(b"PK"):
        return _read_archive(path)
    if head.startswith(_OLDER_FORM):
        return _load(path, _older_pickle(path), mmap=False)
    raise _other_format(path, head)


def _other_format(path: Path, head: bytes) -> NetworkError:
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if not head:
        return NetworkError(f"{path} is empty; copy it again")
    if not head.strip(b"\0"):
        return NetworkError(f"{path} begins with zeros, so it was not copied whole; copy it again")
    if path.suffix == ".onnx":
        return NetworkError(
            f"{path} holds a network, not a checkpoint of one; give --model onnx:{path}, without --weights"
        )
    for start, what in _OTHER_FORMATS.items():
        if text.startswith(start):
            return NetworkError(f"{path} {what}")
    if head[257:262] == b"ustar":
        return NetworkError(
            f"{path} is a tar archive; unpack it, or if PyTorch before 0.2 wrote it, load it there and save "
            "net.state_dict() again"
        )
    if re.search(r"\.ckpt-?[0-9]*\.(index|meta|data-[0-9]+-of-[0-9]+)$", path.name):
        return NetworkError(f"{path} is of TensorFlow; export the network to ONNX, and give it as onnx:FILE")
    if head.startswith(b"\x80") and head[1:2] <= b"\x05":
        with _damage_named(path):
            pickled = path.read_bytes() if path.stat().st_size <= MAX_TEXT else b""
            return needs_code(path, f"a pickle{_shown(_named_in(pickled))}")
    if path.suffix == ".safetensors":
        return NetworkError(f"{path} is damaged, or no safetensors; copy it again")
    return NetworkError(f"{path} is not a checkpoint that can be read; expected {KNOWN_SUFFIXES}")


def files_of(path: Path) -> list[Path]:
    return [path, *sorted(set(_read_index(path).values()))] if path.name.endswith(INDEX) else [path]


def digest_of(paths: Iterable[Path]) -> str:
    """Return the SHA-256 of the files, and those that they list, one after the other, hexadecimal."""
    sha = hashlib.sha256()
    for part in chain.from_iterable(map(files_of, paths)):
        _check_regular(part)
        with part.open("rb") as file:
            hashlib.file_digest(file, lambda: sha)
    return sha.hexdigest()


def is_whole_network(checkpoint: object) -> bool:
    """Return whether a whole network was saved, directly or in a dictionary, and not its state dict."""
    parts = [checkpoint, *(checkpoint.values() if isinstance(checkpoint, Mapping) else ())]
    return any(isinstance(part, _StandIn) and part.is_network for part in parts)


def needs_code(path: Path, what: str) -> NetworkError:
    """Return the error for a checkpoint that only code can load."""
    return NetworkError(
        f"{path} holds {what}, and loading it would run code that the file names; only if you trust it, convert "
        "it, or the state dict in it if it is a dictionary: "
        f'net = torch.load("{path.name}", weights_only=False); '
        'safetensors.torch.save_file(net.state_dict(), "net.safetensors")'
    )


def _check_regular(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        raise NetworkError(f"there is no file of weights {path}; give one: {KNOWN_SUFFIXES}") from error
    if not stat.S_ISREG(mode):
        given = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
        raise NetworkError(f"{path} is {given}; give a file of weights: {KNOWN_SUFFIXES}")


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    """Turn any error of a block into one that says that the file is damaged; readers raise many types on bad bytes."""
    try:
        yield
    except NetworkError:
        raise
    except Exception as error:
        raise NetworkError(
            f"{path} is damaged, or no checkpoint ({type(error).__name__} while reading it); copy it again"
        ) from error


def _read_index(path: Path) -> dict[str, Path]:
    """Return the file of each tensor, by the name of the tensor."""
    _check_regular(path)
    if path.stat().st_size > MAX_TEXT:
        raise NetworkError(f"expected an index of at most {MAX_TEXT} bytes, {path} has more; copy it again")
    with _damage_named(path):
        found = json.loads(path.read_bytes())
    files = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(files, dict) or not files or not all(isinstance(file, str) for file in files.values()):
        raise NetworkError(f"{path} has no weight_map; save the network again")
    for file in files.values():
        if not file or Path(file).name != file or file.endswith(INDEX):
            raise NetworkError(
                f"{path} names the file {shorten(file)!r}, which is not beside it; copy the whole folder"
            )
    return {name: path.parent / file for name, file in files.items()}


def _read_parts(path: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    files = _read_index(path)
    for file in sorted(set(files.values())):
        held = read_checkpoint(file)
        for name in (name for name, where in files.items() if where == file):
            if not isinstance(held, Mapping) or not isinstance(held.get(name), Tensor):
                raise NetworkError(f"{file} lacks {shorten(name)}, which {path.name} looks for there; copy both again")
            tensors[name] = held[name]
    return tensors


def _read_archive(path: Path) -> Any:
    """Read a zip archive of ``torch.save``; refuse compressed entries, which may need any amount of memory."""
    with _damage_named(path), ZipFile(path) as archive:
        entries = archive.infolist()
    names = {entry.filename.rpartition("/")[2] for entry in entries if entry.filename.count("/") == 1}
    if "constants.pkl" in names:
        raise NetworkError(
            f"{path} is a TorchScript archive, which is code; only if you trust it, convert it: "
            f'net = torch.jit.load("{path.name}"); safetensors.torch.save_file(net.state_dict(), "net.safetensors")'
        )
    if "data.pkl" not in names:
        raise NetworkError(f"{path} is a zip archive, but not one of torch.save: {_archived(path, entries)}")
    is_packed = any(entry.compress_type != ZIP_STORED for entry in entries)
    if is_packed or sum(entry.file_size for entry in entries) > path.stat().st_size:
        raise NetworkError(f"{path} is packed, which torch.save does not do; save it again")
    pickles = [entry for entry in entries if entry.filename.endswith("/data.pkl")]
    if any(entry.file_size > MAX_TEXT for entry in pickles):
        raise _too_much(path)
    with _damage_named(path), ZipFile(path) as archive:
        return _load(path, archive.read(pickles[0]), mmap=True)


def _archived(path: Path, entries: Sequence[ZipInfo]) -> str:
    names = [entry.filename for entry in entries]
    if names and all(name.endswith(".npy") for name in names):
        return f"it {_NUMPY}"
    if any("exported_program" in name or "/models/" in name or name.endswith("archive_format") for name in names):
        return (
            f"torch.export wrote it; in Python, torch.save(dict(torch.export.load({path.name!r}).state_dict), "
            '"net.pth") saves its weights'
        )
    inside = [name for name in names if name.endswith((".pth", ".pt", ".bin", ".ckpt", ".safetensors", ".onnx"))]
    return f"unpack it, it holds {', '.join(map(shorten, inside[:3]))}" if inside else f"expected {KNOWN_SUFFIXES}"


def _older_pickle(path: Path) -> bytes:
    """Return the pickle of the object in a file of the older form, without loading it."""
    with _damage_named(path), path.open("rb") as file:
        for _ in range(_BEFORE):
            _pass_over(file)
        start = file.tell()
        _pass_over(file)
        size = file.tell() - start
        if size > MAX_TEXT:
            raise _too_much(path)
        file.seek(start)
        return file.read(size)


def _pass_over(file: IO[bytes]) -> None:
    """Move to the end of the pickle at the current position."""
    for _ in pickletools.genops(file):
        pass


def _too_much(path: Path) -> NetworkError:
    return NetworkError(f"{path} has more than {MAX_TEXT} bytes beside its tensors; save the state dict alone")


def _unknown_in(pickled: bytes) -> list[str]:
    """Return the classes and functions in a pickle that ``weights_only`` does not know."""
    archive = io.BytesIO()
    with ZipFile(archive, "w") as file:
        file.writestr("net/data.pkl", pickled)
        file.writestr("net/version", "3")
    archive.seek(0)
    return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(archive))


def _walk(pickled: bytes) -> tuple[list[str], dict[str, type]]:
    """Return the classes and functions that a pickle names, and those whose objects it fills, without creating any."""
    named = dict[str, None]()
    filled: dict[str, type] = {}
    stack: list[str] = []  # the class, or the text, of each object; empty for others
    marks: list[int] = []
    memo: dict[int, str] = {}
    argument: Any
    for code, argument, _ in pickletools.genops(pickled):
        taken = code.stack_before
        if pickletools.markobject in taken:
            del stack[marks.pop() :]
            taken = taken[: taken.index(pickletools.markobject)]
        operands = [stack.pop() for _ in taken]
        if code.name == "MARK":
            marks.append(len(stack))
        elif code.name == "MEMOIZE":
            stack += operands
            memo[len(memo)] = stack[-1]
        elif code.name in ("PUT", "BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif code.name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif code.name in ("GLOBAL", "STACK_GLOBAL"):
            name = argument.replace(" ", ".") if code.name == "GLOBAL" else ".".join(operands[::-1])
            named[name] = None
            stack.append(name)
        elif code.name in _KEEPS:
            stack.append(operands[-1])
            if code.name in _FILLS:
                filled[operands[-1]] = _FILLS[code.name]
        else:
            stack += [argument if "UNICODE" in code.name else ""] * len(code.stack_after)
    return list(named), filled


def _named_in(pickled: bytes) -> list[str]:
    """Return the classes and functions that a pickle names, but for those of every state dict."""
    named, _ = _walk(pickled)
    return [name for name in named if not (name.startswith(_HARMLESS) or re.fullmatch(r"torch\.\w+", name))]


def _shown(names: Sequence[str]) -> str:
    return f" ({join_names([*map(shorten, names)], _SHOWN_NAMES)})" if names else ""


class _StandIn:
    """An empty stand-in for an object of a class that is not loaded."""

    is_network = False

    def __new__(cls, *_args: object, **_named: object) -> _StandIn:
        return super().__new__(cls)

    def __init__(self, *_args: object, **_named: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        self.is_network = isinstance(state, Mapping) and "_modules" in state


class _Filled:
    """A stand-in for a class whose objects are filled, which creates an empty plain dictionary or list."""

    makes: type

    def __new__(cls, *_args: object, **_named: object) -> Any:
        return cls.makes()


def _stand_in(makes: type | None) -> type:
    return type("StandIn", (_StandIn,), {}) if makes is None else type("StandIn", (_Filled,), {"makes": makes})


def _load(path: Path, pickled: bytes, *, mmap: bool) -> Any:
    """Load a file of ``torch.save``, with stand-ins for the classes that ``weights_only`` does not know."""
    with _damage_named(path):
        if pickled[:1] == b"\x80" and pickled[1] > _READ_PROTOCOL:
            raise needs_code(path, f"a pickle of protocol {pickled[1]}{_shown(_named_in(pickled))}")
        unknown = _unknown_in(pickled)
        filled = _walk(pickled)[1] if unknown else {}
    if len(unknown) > MAX_CLASSES:
        raise needs_code(path, f"objects of {len(unknown)} classes")
    stand_ins: list[Any] = [(_stand_in(filled.get(name)), name) for name in unknown]
    with warnings.catch_warnings(), _damage_named(path):
        warnings.simplefilter("ignore")  # about unusual pickles
        try:
            with torch.serialization.safe_globals(stand_ins):
                if path.suffix == ".safetensors":  # torch.load goes by that suffix.
                    return torch.load(io.BytesIO(path.read_bytes()), map_location="cpu", weights_only=True)
                return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        except pickle.UnpicklingError as error:
            if mmap and not unknown:
                raise  # a damaged file, since it names no class that could be refused
            raise needs_code(path, f"a whole network or other objects{_shown(unknown)}") from error


_LEVELS: Final = 2
_PREFIX_PARTS: Final = 16
_AVERAGE: Final = re.compile(r"(^|[._])(ema|averaged?|shadow)([._]|$)", re.IGNORECASE)
_ONE_OF_SEVERAL: Final = re.compile(r"-\d+-of-\d+\.")
_COUNTER: Final = "num_batches_tracked"  # counts batches of normalisation; evaluation does not read it


@dataclass(frozen=True)
class Weights:
    """Tensors by a network's names, and notes for the user on how they were found."""

    tensors: Mapping[str, Tensor]
    origin: str  # for messages
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Place:
    """The tensors of one dictionary in a checkpoint whose names share a prefix."""

    path: str  # the keys that lead to the dictionary, joined by dots; empty for the checkpoint itself
    held: Mapping[str, Tensor]  # all of the dictionary's tensors
    prefix: str
    found: int  # the number of the network's names in this place

    @property
    def is_average(self) -> bool:
        """True if the names that lead here say that these are moving averages of trained weights."""
        return bool(_AVERAGE.search(self.path) or _AVERAGE.search(self.prefix))

    def __str__(self) -> str:
        path, prefix = (f'"{shorten(name)}"' for name in (self.path, self.prefix))
        return f"{prefix} in {path}" if self.path and self.prefix else path if self.path else prefix

    def tensors(self, others: Sequence[_Place]) -> tuple[dict[str, Tensor], list[str]]:
        """Return the tensors without the prefix, and the names of tensors outside of the prefix or in ``others``."""
        copies = tuple(each.prefix for each in others if each.held is self.held and each.prefix.startswith(self.prefix))
        outside = [name for name in self.held if not name.startswith(self.prefix) or name.startswith(copies)]
        inside = self.held.keys() - set(outside)
        return {name.removeprefix(self.prefix): self.held[name] for name in self.held if name in inside}, outside


def read_weights(path: Path, wanted: Mapping[str, Tensor]) -> Weights:
    """Read the tensors of a network from a checkpoint; ``wanted`` is the network's state dict."""
    checkpoint = read_checkpoint(path)
    found = {at: _renamed(held, wanted) for at, held in _dictionaries(checkpoint).items()}
    places = [place for at, held in found.items() for place in _places(at, held, wanted)]
    needed = sum(not name.endswith(_COUNTER) for name in wanted)
    fitting = sorted((place for place in places if place.found == needed), key=lambda place: place.is_average)
    if not fitting and is_whole_network(checkpoint):
        raise needs_code(path, "a whole network")
    if not fitting and _ONE_OF_SEVERAL.search(path.name):
        raise NetworkError(f"{path} is one of several files that hold the network's tensors; give their .index.json")
    if not places:
        raise NetworkError(f"{path} holds no tensors by name; give the network's state dict")
    place, others = (fitting[0], fitting[1:]) if fitting else (max(places, key=lambda place: place.found), [])
    tensors, outside = place.tensors(others)
    notes = list(_notes(path, place, others, outside))
    origin = f"{path} ({'; '.join(notes)})" if notes else str(path)
    return Weights(tensors, origin, (*notes, *_conversions(tensors, wanted)))


def load_weights(net: nn.Module, state: Mapping[str, Tensor], *, num_classes: int | None, origin: str) -> None:
    """Copy ``state`` into ``net`` in its dtypes; batch counters, which evaluation does not read, may be missing."""
    wanted = net.state_dict()
    missing = [key for key in wanted if key not in state and not key.endswith(_COUNTER)]
    unexpected = [key for key in state if key not in wanted]
    if missing or unexpected:
        raise NetworkError(
            f"{origin} does not fit the network: {_counted('missing', missing)}, {_counted('unexpected', unexpected)}; "
            "check the model name and its arguments"
        )
    for key, tensor in state.items():
        expected, got = tuple(wanted[key].shape), tuple(tensor.shape)
        if expected != got:
            if got and expected == (num_classes, *got[1:]):
                raise NetworkError(
                    f"{origin} is for {got[0]} classes ({key} is {got}), the data has {num_classes}; use the data that "
                    "the network was trained on"
                )
            raise NetworkError(f"{origin}: expected {key} of shape {expected}, got {got}; check the model arguments")
        if unfit := _unfit(tensor, wanted[key], is_counter=key.endswith(_COUNTER)):
            raise NetworkError(f"{origin}: expected {key} of {_type(wanted[key])}, got {unfit}; save plain weights")
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor.to(wanted[key].dtype)).all()):
            raise NetworkError(f"{origin}: expected finite weights, {key} has NaN or infinity; train it again")
    wanted.update(state)  # keeps the version metadata that some modules read
    net.load_state_dict(wanted)


def _unfit(tensor: Tensor, like: Tensor, *, is_counter: bool) -> str:
    """Return the reason why a tensor's values cannot become the network's, or an empty string."""
    if tensor.is_quantized or tensor.layout != torch.strided:
        return "a quantised tensor" if tensor.is_quantized else "a sparse tensor"
    if tensor.is_meta:
        return "a tensor without values"
    rank, wanted = _rank(tensor), _rank(like)
    differs = rank > wanted or (rank, wanted) == (0, 1)
    return _type(tensor) if differs and not is_counter else ""


def _rank(tensor: Tensor) -> int:
    return 2 if tensor.is_complex() else int(tensor.is_floating_point())


def _dictionaries(checkpoint: object) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of each dictionary that has any, outer dictionaries first, by the path of keys to it."""
    found: dict[str, dict[str, Tensor]] = {}
    level, seen = [("", checkpoint)], set[int]()
    for _ in range(_LEVELS + 1):
        below = []
        for path, part in level:
            if not isinstance(part, Mapping) or id(part) in seen:
                continue
            seen.add(id(part))
            by_name = {name: value for name, value in part.items() if isinstance(name, str)}
            held = {name: value.detach() for name, value in by_name.items() if type(value) in (Tensor, nn.Parameter)}
            if held:
                found[path] = held
            below += [(f"{path}.{name}".lstrip("."), value) for name, value in by_name.items() if name not in held]
        level = below
    return found


# Older names in torchvision's own files, of the MLPs of vit_* and of the layers of densenet*, and what replaces them.
_OLDER: Final = (
    (re.compile(r"\bmlp\.linear_1\."), "mlp.0."),
    (re.compile(r"\bmlp\.linear_2\."), "mlp.3."),
    (re.compile(r"(\bdenselayer\d+\.(?:norm|conv))\.(?=[12]\.)"), r"\1"),
)


def _renamed(held: dict[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors by their newer names, unless the network itself has older ones."""
    for older, newer in _OLDER:
        if not any(map(older.search, wanted)):
            held = {older.sub(newer, name): tensor for name, tensor in held.items()}
    return held


def _places(path: str, held: dict[str, Tensor], wanted: Mapping[str, Tensor]) -> list[_Place]:
    """Return the places in one dictionary: each prefix of one of the network's names, and the empty prefix."""
    found = Counter({"": 0})
    for name in held:
        parts = name.split(".", _PREFIX_PARTS)
        for count in range(len(parts)):
            rest = ".".join(parts[count:])
            if rest in wanted and not rest.endswith(_COUNTER):
                found[name.removesuffix(rest)] += 1
    return [_Place(path, held, prefix, found[prefix]) for prefix in sorted(found, key=len)]


def _notes(path: Path, place: _Place, others: Sequence[_Place], outside: Sequence[str]) -> Iterator[str]:
    if place.path:
        yield f'found under "{shorten(place.path)}" of {path.name}'
    if place.prefix:
        yield f'removed the prefix "{shorten(place.prefix)}"'
    if others:
        yield f"not used: {', '.join(map(str, others[:3]))}{', …' * (len(others) > 3)}"
    if outside:
        yield f"ignored {_counted('other tensor' + 's' * (len(outside) > 1), outside)}"


def _conversions(tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> Iterator[str]:
    types = Counter(
        (_type(tensor), _type(wanted[name]))
        for name, tensor in tensors.items()
        if name in wanted and tensor.dtype != wanted[name].dtype and not name.endswith(_COUNTER)
    )
    for (given, used), count in types.items():
        yield f"converted {count} tensor{'s' * (count > 1)} from {given} to {used}"


def _type(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _counted(noun: str, names: Sequence[str]) -> str:
    return f"{len(names)} {noun}" + (f" ({join_names([*map(shorten, names)], 3)})" if names else "")
