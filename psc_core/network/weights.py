"""Find a network's tensors in a checkpoint, and copy them into the network.

A checkpoint holds more than a state dict, and its names say where the network was in the trained module.  So every
dictionary with tensors, at most two levels deep, is searched with every prefix of its names that ends in a dot: the
tensors are found in the place that has all of the network's names.  Of several such places, one whose name marks no
moving average comes first, then the outermost, then the shortest prefix.  Tensors outside of the prefix are ignored,
and so are those of another such place; any other name that the network lacks is an error, because it means another
network.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

from psc_core.errors import NetworkError, listed, shortened
from psc_core.network.checkpoints import is_whole_network, needs_code, read_checkpoint

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
        path, prefix = (f'"{shortened(name)}"' for name in (self.path, self.prefix))
        return f"{prefix} in {path}" if self.path and self.prefix else path if self.path else prefix

    def tensors(self, others: Sequence[_Place]) -> tuple[dict[str, Tensor], list[str]]:
        """Return the tensors without the prefix, and the names of tensors outside of the prefix or in ``others``."""
        copies = tuple(each.prefix for each in others if each.held is self.held and each.prefix.startswith(self.prefix))
        outside = [name for name in self.held if not name.startswith(self.prefix) or name.startswith(copies)]
        inside = self.held.keys() - set(outside)
        return {name.removeprefix(self.prefix): self.held[name] for name in self.held if name in inside}, outside


def read_weights(path: Path, wanted: Mapping[str, Tensor]) -> Weights:
    """Read the tensors of a network from a checkpoint; ``wanted`` is the network's state dict.

    Raises:
        NetworkError: If the file is missing, cannot be read without running its code, or has no tensors by name.
    """
    checkpoint = read_checkpoint(path)
    places = [place for at, held in _dictionaries(checkpoint).items() for place in _places(at, held, wanted)]
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


def load_weights(net: nn.Module, state: Mapping[str, Tensor], *, num_classes: int, origin: str) -> None:
    """Copy ``state`` into ``net``, converted to the network's dtypes.

    Batch counters (``num_batches_tracked``) may be missing, because evaluation does not read them.  The number of
    classes of the data and the ``origin`` of the tensors are for messages.

    Raises:
        NetworkError: If tensors are missing, unexpected, not finite, or of the wrong shape or dtype.
    """
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
        yield f'found under "{shortened(place.path)}" of {path.name}'
    if place.prefix:
        yield f'removed the prefix "{shortened(place.prefix)}"'
    if others:
        yield f"not used: {', '.join(map(str, others[:3]))}{', …' * (len(others) > 3)}"
    if outside:
        yield f"ignored {_counted('other tensor' + 's' * (len(outside) > 1), outside)}"


def _conversions(tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield a note for each conversion of tensors to the network's dtypes."""
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
    return f"{len(names)} {noun}" + (f" ({listed([*map(shortened, names)], 3)})" if names else "")
