"""Cut a network after some of its layers by hooks, for networks that cannot be traced (control flow on data).

The network runs as it is.  Hooks catch the wanted outputs, copied as in :mod:`psc_core.network.graph`, and an exception
stops the forward pass after the last of them.  Modules that are first called after that point are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from psc_core.errors import NetworkError
from psc_core.network.graph import shared_copy
from psc_core.network.layout import INPUT


class _Stop(Exception):
    """All wanted layers have been reached."""


class _Dropped(nn.Module):
    """Placeholder for a module that the wanted layers do not need."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, *_args: Any, **_kwargs: Any) -> Tensor:
        raise NetworkError(
            f"this input needs {self.name}, which was dropped because the example did not need it; fit with "
            "predictions=base to keep the whole network"
        )


class HookedNetwork(nn.Module):
    """A network whose wanted outputs are caught by hooks; one thread at a time."""

    def __init__(
        self, net: nn.Module, layers: Sequence[str], *, keep_output: bool, stop: str | None, dropped: Sequence[str]
    ) -> None:
        """Store a copy of ``net`` without the modules named in ``dropped``; see :func:`plan_stop`."""
        super().__init__()
        self.net = shared_copy(net)
        self.layers = tuple(layers)
        self.keep_output = keep_output
        self.stop = stop
        for name in dropped:
            parent, _, attribute = name.rpartition(".")
            setattr(self.net.get_submodule(parent), attribute, _Dropped(name))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """One tensor per layer, then the logits if ``keep_output``."""
        values: dict[str, Tensor] = {}

        def catch(name: str, _module: nn.Module, args: tuple[Any, ...], output: Any = None) -> None:
            value = args[0] if name.endswith(INPUT) else output
            if not isinstance(value, Tensor):
                raise NetworkError(f"expected a tensor from layer {name}, got {type(value).__name__}")
            values[name] = value.clone()
            if name == self.stop:
                raise _Stop

        logits: Tensor | None = None
        handles = [_attach(self.net, name, partial(catch, name)) for name in self.layers]
        try:
            logits = self.net(x)
        except _Stop:
            pass
        finally:
            for handle in handles:
                handle.remove()
        missing = [name for name in self.layers if name not in values]
        if missing:
            raise NetworkError(
                f"this input does not reach layer {', '.join(missing)}; choose a layer that all inputs reach"
            )
        features = tuple(values[name] for name in self.layers)
        if not self.keep_output:
            return features
        if not isinstance(logits, Tensor):
            raise NetworkError(f"expected the network to return only logits, got {type(logits).__name__}")
        return (*features, logits)


def _attach(net: nn.Module, name: str, hook: Callable[..., None]) -> RemovableHandle:
    module = net.get_submodule(name.removesuffix(INPUT))
    return module.register_forward_pre_hook(hook) if name.endswith(INPUT) else module.register_forward_hook(hook)


@torch.inference_mode()
def plan_stop(net: nn.Module, layers: Sequence[str], example: Tensor) -> tuple[str | None, list[str]]:
    """Where a hooked forward pass can stop, and which modules it then never calls.

    Returns:
        The wanted layer that comes last, and the outermost modules called only after it; ``(None, [])`` if the example
        calls that layer more than once, because another input may call it more often.
    """
    events: list[str] = []
    entered: list[tuple[int, str]] = []

    def enter(name: str, *_: Any) -> None:
        entered.append((len(events), name))

    twin = shared_copy(net)
    for name, module in twin.named_modules():
        module.register_forward_pre_hook(partial(enter, name))
    for name in layers:
        _attach(twin, name, lambda *_, name=name: events.append(name))
    twin(example)
    if not events or events.count(events[-1]) > 1:
        return None, []
    before = {name for seen, name in entered if seen < len(events)}
    after = [name for seen, name in entered if seen == len(events) and name not in before]
    outermost = [name for name in dict.fromkeys(after) if not any(name.startswith(f"{other}.") for other in after)]
    return events[-1], outermost
