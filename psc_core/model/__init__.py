"""The fitted model: pixels to outputs, outputs to decisions, save and load."""
