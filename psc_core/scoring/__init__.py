"""Offline scoring: every output for a folder, a list or a Parquet column of images, part by part."""
