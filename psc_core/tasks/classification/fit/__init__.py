"""Fitting a classifier; nothing here is imported to serve one."""
