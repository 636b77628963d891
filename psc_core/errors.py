"""The one tree of errors, each class tied to one arrow of the pipeline.

::

    usage ─▶ data ─▶ network ─▶ fit ─▶ bundle ─▶ bytes ─▶ image ─▶ prediction
      │       │        │         │       │         │        │
      │       │        │         │       │         │        └ DeviceError
      │       │        │         │       │         └ UnsupportedImage, ImageTooLarge, UndecodableImage
      │       │        │         │       └ BundleError
      │       │        │         └ FitError
      │       │        └ NetworkError
      │       └ DataError
      └ UsageError

Messages say what was expected, what was found and what to do.  The command line ends with code 2 on any
of them (one line, no traceback); the service maps them to HTTP in one table (``app/errors.py``).
"""

from __future__ import annotations


class PSCError(Exception):
    """Base of every error this project raises on purpose."""


class UsageError(PSCError):
    """A command-line flag or function argument that cannot be used."""


class DataError(PSCError):
    """A data set that is missing, empty, or not laid out as promised."""


class NetworkError(PSCError):
    """A network or its weights that cannot be built, loaded, traced or cut."""


class FitError(PSCError):
    """Features from which the asked-for model cannot be fitted."""


class BundleError(PSCError):
    """A bundle that is missing, corrupt, of another schema, or that names a factory not allowed."""


class ImageError(PSCError):
    """One input image that cannot be used; the three subclasses say why."""


class UnsupportedImage(ImageError):
    """Bytes that are not an image format we read."""


class ImageTooLarge(ImageError):
    """An image whose header promises more pixels than the limit."""


class UndecodableImage(ImageError):
    """An image of a known format whose data is damaged, or made to cost far more to decode than its pixels."""


class DeviceError(PSCError):
    """The compute device failed; the process should be replaced."""
