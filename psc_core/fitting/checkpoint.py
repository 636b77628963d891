"""What an interrupted fit keeps: the collapse report and the projection, in a directory beside the bundle.

A stage's file is used again only when the job is the same as far as it matters here: data, weights, version,
preprocessing, device kind and the settings that these stages read, compared by digest.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from psc_core.collapse.report import CollapseReport
    from psc_core.compute.distributed import Reducer
    from psc_core.fitting.stages import FittedProjection

Kept = TypeVar("Kept")


class Checkpoint:
    """Files of finished stages.

    Args:
        folder: Where they are kept.
        job: What makes two runs the same job, JSON types.
        fresh: Drop what an earlier run left.
    """

    def __init__(self, folder: Path, job: Mapping[str, Any], *, fresh: bool = False) -> None:
        self.folder = folder
        self.key = hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()
        self._stamp = folder / "job.txt"
        if fresh or (folder.exists() and (not self._stamp.exists() or self._stamp.read_text() != self.key)):
            self.clear()

    @staticmethod
    def agreed(kept: Kept | None, reducer: Reducer) -> Kept | None:
        """``kept`` if every process has it, else None for all: only one machine's disk may hold the files."""
        import torch

        have = reducer.sum_(torch.tensor([float(kept is not None)]))
        return kept if int(have) == reducer.world else None

    def _write(self, name: str, data: bytes) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._stamp.write_text(self.key)
        part = self.folder / f"{name}.part"
        part.write_bytes(data)
        part.rename(self.folder / name)

    def load_collapse(self) -> CollapseReport | None:
        """The finished report, if there is one."""
        from psc_core.collapse.report import CollapseReport

        file = self.folder / "collapse.json"
        return CollapseReport.from_json(json.loads(file.read_text())) if file.exists() else None

    def save_collapse(self, report: CollapseReport, *, writer: bool = True) -> None:
        """Keep a finished report; of several processes only the writer writes."""
        if not writer:
            return
        self._write("collapse.json", json.dumps(report.to_json()).encode())

    def load_projection(self) -> FittedProjection | None:
        """The finished projection, if there is one."""
        from safetensors.torch import load

        from psc_core.fitting.stages import FittedProjection
        from psc_core.projection.fit.projection import ProjectionReport
        from psc_core.projection.fit.ranks import RankChoice
        from psc_core.projection.module import Projection

        file, notes = self.folder / "projection.safetensors", self.folder / "projection.json"
        if not file.exists() or not notes.exists():
            return None
        tensors, body = load(file.read_bytes()), json.loads(notes.read_text())
        report = ProjectionReport(
            RankChoice(**body["choice"]),
            body["scaled_nc1"],
            body["scaled_nc4"],
            tensors.pop("nc1"),
            tensors.pop("nc4"),
            body["pooled"],
        )
        return FittedProjection(Projection.restore(body["config"], tensors), report)

    def save_projection(self, fitted: FittedProjection, *, writer: bool = True) -> None:
        """Keep a finished projection; of several processes only the writer writes."""
        if not writer:
            return
        from safetensors.torch import save

        report = fitted.report
        tensors = {**fitted.projection.state_dict(), "nc1": report.nc1, "nc4": report.nc4}
        self._write("projection.safetensors", save({k: v.contiguous() for k, v in tensors.items()}))
        body = {
            "config": fitted.projection.config(),
            "choice": asdict(report.choice),
            "pooled": report.pooled,
            "scaled_nc1": report.scaled_nc1,
            "scaled_nc4": report.scaled_nc4,
        }
        self._write("projection.json", json.dumps(body).encode())

    def clear(self) -> None:
        """Remove everything kept."""
        shutil.rmtree(self.folder, ignore_errors=True)
