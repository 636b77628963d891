"""Labelled images from folders, named data sets and factories, streamed in batches."""
