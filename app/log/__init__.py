"""Write predictions to the files of :mod:`psc_core.log` without holding up an answer.

::

    event loop ─ append ─▶ waiting predictions ─▶ thread: draw │ digest │ store image │ open rows ─▶ a Parquet file

Waiting predictions and open rows share one limit of bytes.  What does not fit, or cannot be written, is dropped and
counted.
"""
