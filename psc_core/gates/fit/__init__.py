"""Fit gates: their p-values, the made-up images on which they are compared, and the choice."""
