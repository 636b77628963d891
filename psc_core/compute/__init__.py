"""Devices, processes, progress, and the one loop that runs a network over a data set."""
