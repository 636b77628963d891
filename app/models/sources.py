"""Where the served models come from: bundles, or memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from app.models.affordable import check_affordable
from app.settings import Settings
from psc_core.model.base import FittedModel
from psc_core.model.load import build_model


class ModelSource(Protocol):
    """Fitted models by name, each read again whenever it is loaded."""

    @property
    def names(self) -> tuple[str, ...]:
        """The model names, the default first."""

    def load(self, name: str) -> FittedModel:
        """Read the model of this name; called on a thread."""


@dataclass(frozen=True)
class BundleSource:
    """The bundles that the settings name."""

    settings: Settings

    @property
    def names(self) -> tuple[str, ...]:
        """The model names, the default first."""
        return tuple(name for name, _ in self.settings.named_bundles)

    def load(self, name: str) -> FittedModel:
        """Read, verify, build and probe the bundle of this name.

        Raises:
            BundleError: If the bundle cannot be used.
        """
        settings, path = self.settings, dict(self.settings.named_bundles)[name]
        model = build_model(path, device=settings.device, allow_factories=settings.allow_factories)
        # Before its first image, for which an oversized network would take minutes, or all memory.
        check_affordable(model, max_batch=settings.max_batch_size, seconds=settings.warmup_seconds)
        return model.probed()


@dataclass(frozen=True)
class MemorySource:
    """Models that the caller has in memory."""

    models: Mapping[str, FittedModel]

    @property
    def names(self) -> tuple[str, ...]:
        """The model names, the default first."""
        return tuple(self.models)

    def load(self, name: str) -> FittedModel:
        """Return the model of this name."""
        return self.models[name]
