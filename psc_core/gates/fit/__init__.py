"""Fit gates: their p-values, the made-up images that they are chosen on, the choice."""
