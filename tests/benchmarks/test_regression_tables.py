"""The comparison on small tables: what is split, what is trained, what the exact process is."""

from __future__ import annotations

import pytest
import torch

from benchmarks.regression import tables
from psc_core.heads.fit import dve


def test_splits_are_standardised_and_share_no_row() -> None:
    x, y = tables.table("diabetes")
    parts = tables.split(x, y, seed=1)
    assert [len(rows) for _, rows in parts] == [310, 88, 44] and x.shape == (442, 10)
    torch.testing.assert_close(parts.train[0].mean(0), torch.zeros(10), atol=1e-5, rtol=0)
    assert float(parts.train[1].std()) == pytest.approx(1.0)
    rows = torch.cat([part for part, _ in parts])
    assert len(rows.unique(dim=0)) == len(x.unique(dim=0))


def test_every_method_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "WIDTHS", (16, 8))
    monkeypatch.setattr(tables, "MEMBERS", 2)
    monkeypatch.setattr(dve, "STEPS", 20)
    x, y = (part[:90] for part in tables.table("diabetes"))
    monkeypatch.setattr(tables, "table", lambda name: (x, y))
    net = tables.trained(tables.split(x, y, seed=0), 1, epochs=1, seed=0)
    assert tables.hidden(net, torch.zeros(3, 10)).shape == (3, 24)
    part = tables.compare("diabetes", 0, epochs=2)
    assert set(part["methods"]) == {
        "the network alone", "deep ensemble of 2", "exact process on the inputs", "DVE",
    }  # fmt: skip
    assert all(0.3 < found["rmse"] < 2 and found["nll"] < 20 for found in part["methods"].values())
    record = {"origins": {}, "result": {"parts": {"diabetes-0": part}}}
    monkeypatch.setattr(tables.runs, "provenance", lambda record: "")
    assert "| diabetes | DVE | " in tables.fragment(record)
