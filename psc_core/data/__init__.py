"""Labelled images as one streaming interface, whatever they are stored in."""
