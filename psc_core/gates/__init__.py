"""Gates: readings of one forward pass, each with its own p-values, combined into one OOD score."""
