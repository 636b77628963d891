"""A fitted model on test images, beside other detectors.

:mod:`.evaluate` runs an evaluation.  What differs between tasks lies in the module with a task's name; each offers

================== ================================================================================================
``open_images``    the in-distribution test images that a spec names
``open_baselines`` other detectors, fitted on the network that the model was cut from
``own_network``    the network itself, as a baseline
``score_images``   one pass of a data set through the served path, and beside it the baselines
``quality_of``     metrics of scored images, by predictor
``compare``        the :class:`.base.Report` of scored images
================== ================================================================================================
"""
