"""Fitting a regression; nothing here is imported to serve one."""
