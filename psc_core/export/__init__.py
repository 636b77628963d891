"""A bundle's decision as one ONNX file: pixels in; scores, prediction set or interval, and decision out.

    images uint8 (n, h, w, c) ─▶ inputs of the network ─▶ network ─▶ everything after it
                                 :class:`.Inputs`         its graph  :class:`.Answers`

Three graphs become one, of which PyTorch exports the first and the last.  A second file differs in the first: it takes
images of any size, and resizes and crops them.  Everything after the network is float32 there, though the service
computes up to the difference from a class mean in float64; :func:`.folder.check` says what that costs.  What ONNX
lacks, :mod:`psc_core.linalg` exports as something else.  Where a threshold is an input with a default, a caller may
give another.
"""
