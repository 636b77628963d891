"""Fit a model to a trained network, stage by stage (:mod:`.stages`), and calibrate it again later."""
