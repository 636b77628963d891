"""The command lines ``psc-fit``, ``psc-eval`` and ``psc-score``."""
