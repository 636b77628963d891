"""All errors in one tree, each class for one arrow of the pipeline.

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

Messages say what is wrong and what to do.  The command line prints them in one line and exits with code 2; the service
maps them to HTTP in one table (``app/http/problems.py``).
"""

from __future__ import annotations


class PSCError(Exception):
    """Base of every error this project raises on purpose."""


class UsageError(PSCError):
    """A command-line flag or function argument that cannot be used."""


class DataError(PSCError):
    """A data set that is missing, empty, or laid out wrongly."""


class NetworkError(PSCError):
    """A network or its weights that cannot be built, loaded, traced or cut."""


class FitError(PSCError):
    """Features from which the model cannot be fitted."""


class BundleError(PSCError):
    """A bundle that is missing, damaged, of another schema, or that names a factory that is not allowed."""


class ImageError(PSCError):
    """An image that cannot be used; the subclasses say why."""


class UnsupportedImage(ImageError):
    """Bytes that are not an image of a supported format."""


class ImageTooLarge(ImageError):
    """An image whose header claims more pixels than the limit."""


class UndecodableImage(ImageError):
    """An image of a supported format whose data is damaged, or made to be expensive to decode."""


class DeviceError(PSCError):
    """The compute device failed; the process should be replaced."""
