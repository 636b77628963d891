"""Load the weights of a network from a safetensors file, checking every tensor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from psc_core.errors import NetworkError


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, on the CPU.

    Raises:
        NetworkError: No such file, or not a safetensors file.
    """
    if not path.is_file():
        raise NetworkError(f"there is no file of weights {path}; give a safetensors file")
    try:
        return safetensors.torch.load_file(path)
    except (SafetensorError, ValueError) as error:
        raise NetworkError(
            f"{path} is not a safetensors file ({error}); convert a PyTorch checkpoint with "
            "safetensors.torch.save_file(net.state_dict(), FILE)"
        ) from error


def load_weights(net: nn.Module, state: Mapping[str, Tensor], *, num_classes: int, origin: str) -> None:
    """Copy ``state`` into ``net``.

    Batch counters (``num_batches_tracked``) may be missing, because evaluation does not read them.

    Args:
        net: The network.
        state: Tensors by name.
        num_classes: Number of classes of the data, for messages.
        origin: Source of the tensors, for messages.

    Raises:
        NetworkError: Missing, unexpected or non-finite tensors, or tensors of the wrong shape.
    """
    wanted = net.state_dict()
    missing = [key for key in wanted if key not in state and not key.endswith("num_batches_tracked")]
    unexpected = [key for key in state if key not in wanted]
    if missing or unexpected:
        raise NetworkError(
            f"{origin} does not fit the network: {_count('missing', missing)}, {_count('unexpected', unexpected)}; "
            "check the model name and its arguments" + _prefix_hint(missing, unexpected)
        )
    for key, tensor in state.items():
        expected, got = tuple(wanted[key].shape), tuple(tensor.shape)
        if expected != got:
            if expected and got and expected[0] == num_classes and expected[1:] == got[1:]:
                raise NetworkError(
                    f"{origin} is for {got[0]} classes ({key} is {got}), the data has {num_classes}; use the data that "
                    "the network was trained on"
                )
            raise NetworkError(f"{origin}: expected {key} of shape {expected}, got {got}; check the model arguments")
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise NetworkError(f"{origin}: expected finite weights, {key} has NaN or infinity; train it again")
    wanted.update(state)  # keeps the version metadata that some modules read
    net.load_state_dict(wanted)


def _count(what: str, keys: list[str]) -> str:
    shown = ", ".join(keys[:3]) + (", …" if len(keys) > 3 else "")
    return f"{len(keys)} {what}" + (f" ({shown})" if keys else "")


def _prefix_hint(missing: list[str], unexpected: list[str]) -> str:
    """A hint if unexpected names are missing ones with a prefix; batch counters are never missing."""
    endings = tuple(f".{name}" for name in missing)
    for key in unexpected:
        if key.endswith(endings):
            name = max((ending[1:] for ending in endings if key.endswith(ending)), key=len)
            return f"; its names have the prefix {key.removesuffix(name)!r}: remove it"
    return ""
