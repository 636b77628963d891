"""Fitting a density; nothing here is imported to serve one."""
