"""The prediction log: predictions in, files of :mod:`psc_core.log` out, without holding up an answer.

::

    event loop ─ append ─▶ waiting predictions ─▶ thread: draw │ digest │ store image │ open rows ─▶ a Parquet file

All that is held draws on one limit of bytes; what does not fit, or cannot be written, is dropped and counted.
"""
