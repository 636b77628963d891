"""Regressions: PSC beside a deep ensemble and MC dropout."""
