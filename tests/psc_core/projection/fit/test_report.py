"""What a fit says of its projection."""

from __future__ import annotations

from dataclasses import replace

import torch

from psc_core.projection import ProjectionReport


def test_summary_names_the_choice_and_what_it_was_chosen_from() -> None:
    table = torch.full((2, 4), 0.5, dtype=torch.float64)
    report = ProjectionReport(2, 1, "", 0.3, 0.91, table, table)
    assert report.summary(0.92) == (
        "projection 2 × 1: NC1 0.500 (scaled layer 0.300), NC4 0.5000 (scaled layer 0.9100, raw 0.9200)"
    )
    more = replace(report, positions=((1, 0.8), (2, 0.95)), note="pooled", warning="lost")
    assert more.summary(0.92).splitlines()[1:] == [
        "density on made-up images by spatial components (mean AUROC): 1 0.8000, 2 0.9500",
        "note: pooled",
        "note: lost",
    ]
