"""Evaluate a fitted model on test images, beside other detectors.

:mod:`.evaluate` runs an evaluation.  The parts that depend on the task lie in a module named after it, which has

================== ================================================================================================
``open_images``    opens the in-distribution test images that a spec names
``open_baselines`` fits other detectors on the network that the model was cut from
``plain_network``  returns the plain network, as a baseline
``score_images``   sends a data set through the served path and the baselines
``quality_of``     returns the metrics of scored images, by predictor
``compare``        returns the :class:`.base.Report` of scored images
================== ================================================================================================
"""
