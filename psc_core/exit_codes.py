"""What the command lines end with."""

from __future__ import annotations

from typing import Final

OK: Final = 0

FAILURE: Final = 1
"""A bug or a failed device; Python itself ends a traceback with it."""

BAD_INPUT: Final = 2
"""Bad usage or bad input, said in one line; argparse's own."""

INTERRUPTED: Final = 130
"""Ctrl-C, 128 + SIGINT.  ``psc-serve`` ends with :data:`OK`, for that is how it is told to stop."""
