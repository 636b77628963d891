"""Fitting a head; nothing here is imported to serve one."""
