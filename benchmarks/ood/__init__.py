"""PSC against the detectors people use, on the same checkpoints."""
