"""Evaluate a fitted model on test images, beside other detectors.

:mod:`.evaluate` runs an evaluation, :mod:`.base` says what a task gives to it, :mod:`.classification` and
:mod:`.regression` give it, and :mod:`.replay` answers the images of a log again.
"""
