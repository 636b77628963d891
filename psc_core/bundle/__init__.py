"""The files of a fitted model: manifest, tensors, verification."""
