"""Find a network's tensors in a checkpoint, and copy them into the network.

A checkpoint holds more than a state dict, and its names say where the network lay in what was trained.  So every
dictionary with tensors is looked at, at most two levels deep, and every prefix of its names that ends in a dot: the
tensors are those of the place that has all of the network's names.  Of several such places, one that by its name is no
moving average goes first, then the outermost, then the shortest prefix.  Tensors outside of the prefix are left, as
those of another such place; each other name that the network does not have is an error, because then it is another
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
_COUNTER: Final = "num_batches_tracked"  # of batch normalisation, which evaluation does not read


@dataclass(frozen=True)
class Weights:
    """Tensors by a network's names, and what was done to find them, for people."""

    tensors: Mapping[str, Tensor]
    origin: str  # of messages
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Place:
    """The tensors of one dictionary in a checkpoint whose names have one prefix."""

    path: str  # the keys that lead to the dictionary, with dots between; empty for the checkpoint itself
    held: Mapping[str, Tensor]  # all of the dictionary's tensors
    prefix: str
    found: int  # how many of the network's names are here

    @property
    def is_average(self) -> bool:
        """True for moving averages of trained weights, by the names that lead here."""
        return bool(_AVERAGE.search(self.path) or _AVERAGE.search(self.prefix))

    def __str__(self) -> str:
        path, prefix = (f'"{shortened(name)}"' for name in (self.path, self.prefix))
        return f"{prefix} in {path}" if self.path and self.prefix else path if self.path else prefix

    def tensors(self, others: Sequence[_Place]) -> tuple[dict[str, Tensor], list[str]]:
        """Return the tensors without the prefix, and the names of those that lie outside of it, or in ``others``."""
        copies = tuple(each.prefix for each in others if each.held is self.held and each.prefix.startswith(self.prefix))
        outside = [name for name in self.held if not name.startswith(self.prefix) or name.startswith(copies)]
        inside = self.held.keys() - set(outside)
        return {name.removeprefix(self.prefix): self.held[name] for name in self.held if name in inside}, outside


def read_weights(path: Path, wanted: Mapping[str, Tensor]) -> Weights:
    """Read the tensors of a network, whose own state dict is ``wanted``, from a checkpoint.

    Raises:
        NetworkError: No such file, one that cannot be read without running its code, or one without tensors by name.
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
    """Copy ``state`` into ``net``, in the network's types.

    Batch counters (``num_batches_tracked``) may be missing, because evaluation does not read them.
    The number of classes of the data and the ``origin`` of the tensors are for messages.

    Raises:
        NetworkError: Missing, unexpected or non-finite tensors, or tensors of the wrong shape or kind.
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
    """Return the reason why a tensor's values cannot become the network's; empty if they can."""
    if tensor.is_quantized or tensor.layout != torch.strided:
        return "a quantised tensor" if tensor.is_quantized else "a sparse tensor"
    if tensor.is_meta:
        return "a tensor without values"
    kind, wanted = _kind(tensor), _kind(like)
    differs = kind > wanted or (kind, wanted) == (0, 1)
    return _type(tensor) if differs and not is_counter else ""


def _kind(tensor: Tensor) -> int:
    return 2 if tensor.is_complex() else int(tensor.is_floating_point())


def _dictionaries(checkpoint: object) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of each dictionary that has any, outer ones first, by the path that leads there."""
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
    """Return the places in one dictionary: the prefixes by which it has one of the network's names, and none."""
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
    """Say which tensors the network holds in another type."""
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
