"""The measurements for a machine with a GPU, in parts of minutes: ``python -m benchmarks.gpu.run``."""
