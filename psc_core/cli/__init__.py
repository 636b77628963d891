"""The command lines ``psc-fit`` and ``psc-eval``."""
