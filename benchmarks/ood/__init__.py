"""PSC against common OOD detectors on the same checkpoints."""
