"""Devices, processes, progress, and the one loop over a data set."""
