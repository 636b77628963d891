"""Fitting a model of several labels; nothing here is imported to serve one."""
