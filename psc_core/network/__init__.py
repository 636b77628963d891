"""Load a trained network, list its layers, and cut it after some of them."""

from typing import Final

# The network libraries that every bundle may name; :data:`psc_core.network.load.BUILDERS` has their builders.
LIBRARIES: Final = ("torchvision", "timm")
