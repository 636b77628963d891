"""Load a trained network, list its layers, and cut it after some of them."""

from typing import Final

LIBRARIES: Final = ("torchvision", "timm")
"""Families of networks that any bundle may name; :data:`psc_core.network.builders.BUILDERS` builds those of each."""

GRANULARITIES: Final = ("operations", "blocks", "all")
"""Which modules of a network are its layers, see :mod:`psc_core.network.layers`."""
