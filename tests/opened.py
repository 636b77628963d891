"""Data sets of the repository and bundles that tests made, opened as most tests need them."""

from pathlib import Path

from psc_core.data.dataset import ImageDataset
from psc_core.data.open import open_dataset
from psc_core.images.preprocess import PRESETS
from psc_core.model import FittedModel, load_model
from tests.conftest import ROOT


def opened(name: str, split: str = "test") -> ImageDataset:
    """A small data set of ``tests/data``, in the size of MNIST."""
    return open_dataset(f"{name}:{ROOT}/tests/data", split=split, preprocess=PRESETS["mnist"])


def loaded(bundle: Path) -> FittedModel:
    """A bundle on the CPU, whose network may be :func:`tests.tiny.network`."""
    return load_model(bundle, device="cpu", allow_factories=["tests.tiny:network"])
