"""``psc-score``: every output for a folder, a list or a Parquet column of images, offline, part by part."""
