"""The files of a fitted model: manifest, tensors and their verification."""
