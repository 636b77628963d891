"""Keep the finished stages of a fit in a folder beside the bundle, so that an interrupted fit goes on from there.

The stages are the collapse report (``collapse.json``) and the projection (``fitted_projection.safetensors``).  Only the
same job uses them again: its data, weights, version, preprocessing, type of device and the settings that these stages
read are compared by digest (``job.txt``).
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import save

from psc_core.bundle import write_file
from psc_core.collapse import CollapseReport
from psc_core.compute import Compute
from psc_core.projection import FittedProjection, Projection, ProjectionReport

Stage = TypeVar("Stage")


class Checkpoint:
    """The results of finished stages; of several processes the first writes them."""

    def __init__(self, folder: Path, key: str, compute: Compute) -> None:
        self.folder = folder
        self.key = key
        self.compute = compute
        self._stamp = folder / "job.txt"

    @classmethod
    def of(cls, folder: Path, job: Mapping[str, Any], compute: Compute | None = None) -> Checkpoint:
        """Return the checkpoint of ``job`` (JSON types) in ``folder``, which may hold stages of another job."""
        key = hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()
        return cls(folder, key, compute or Compute(torch.device("cpu")))

    @property
    def is_resumed(self) -> bool:
        """Whether an interrupted run of this job left the folder."""
        return self._stamp.exists() and self._stamp.read_text() == self.key

    def load_collapse(self) -> CollapseReport | None:
        """Return the collapse report, or None where it is not finished."""
        file = self.folder / "collapse.json"
        report = CollapseReport.from_json(json.loads(file.read_text())) if file.exists() else None
        return agreed(report, self.compute)

    def save_collapse(self, report: CollapseReport) -> None:
        """Keep a finished report."""
        self._write("collapse.json", json.dumps(report.to_json()).encode())

    def load_projection(self) -> FittedProjection | None:
        """Return the projection, or None where it is not finished."""
        file = self.folder / "fitted_projection.safetensors"
        projection = None
        if file.exists():
            with safe_open(file, "pt") as kept:
                config, report, layers = (json.loads(kept.metadata()[key]) for key in ("config", "report", "layers"))
                tensors = {name: kept.get_tensor(name) for name in kept.keys()}  # noqa: SIM118 - not a mapping
            report |= {"nc1": tensors.pop("nc1"), "nc4": tensors.pop("nc4")}
            report["positions"] = tuple(map(tuple, report["positions"]))
            projection = FittedProjection(
                Projection.restore(config, tensors), ProjectionReport(**report), tuple(layers)
            )
        return agreed(projection, self.compute)

    def save_projection(self, fitted: FittedProjection) -> None:
        """Keep a finished projection in one file: its tensors, and the rest as JSON in the metadata."""
        report = asdict(fitted.report)
        tensors = {**fitted.projection.state_dict(), "nc1": report.pop("nc1"), "nc4": report.pop("nc4")}
        kept = {"config": fitted.projection.config(), "report": report, "layers": fitted.layers}
        metadata = {key: json.dumps(value) for key, value in kept.items()}
        data = save({name: part.contiguous() for name, part in tensors.items()}, metadata)
        self._write("fitted_projection.safetensors", data)

    def _write(self, name: str, data: bytes) -> None:
        if self.compute.rank != 0:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        self._stamp.write_text(self.key)
        part = self.folder / f"{name}.part"
        write_file(part, data)
        part.rename(self.folder / name)

    def clear(self) -> None:
        """Remove everything kept."""
        shutil.rmtree(self.folder, ignore_errors=True)


def agreed(stage: Stage | None, compute: Compute) -> Stage | None:
    """Return ``stage`` where every process has it, else None in all: files may be on the disk of one machine only."""
    have = compute.sum_(torch.tensor([float(stage is not None)]))
    return stage if int(have) == compute.world else None
