"""What is said of a loader's images."""

from __future__ import annotations

import pytest

from psc_core.answers import UNNAMED, Target
from psc_core.data.loaders import LoaderDescription, LoaderPreprocessing
from psc_core.images.preprocess import PRESETS


@pytest.mark.parametrize(
    ("description", "given"),
    [
        (LoaderDescription(), ()),
        (LoaderDescription(target=UNNAMED), ()),
        (LoaderDescription(LoaderPreprocessing(PRESETS["mnist"])), ("preprocess",)),
        (LoaderDescription(LoaderPreprocessing(mean=0.0, std=1.0), classes=()), ("mean", "std", "classes")),
        (LoaderDescription(target=Target(name="value", unit="years")), ("unit",)),
    ],
)
def test_only_what_differs_from_the_defaults_is_given(description: LoaderDescription, given: tuple[str, ...]) -> None:
    assert description.given() == given
