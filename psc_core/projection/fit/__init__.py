"""Fitting a projection; nothing here is imported to serve one."""
