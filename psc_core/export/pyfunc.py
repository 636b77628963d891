"""A bundle as an MLflow model: ``mlflow models serve`` answers as ``POST /predict`` does.

    MLmodel, requirements.txt, input_example.json   by MLflow: signature, parameters, packages, an image to try
    data/bundle/                                    the bundle, verified whenever it is loaded

``MLmodel`` names this module, of which MLflow calls :func:`_load_pyfunc`; so a folder holds neither pickles nor code.
"""

from __future__ import annotations

import binascii
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import torch
from pydantic import ValidationError

from psc_core import __version__
from psc_core.answers import BasePolicy
from psc_core.errors import ImageError, UsageError, all_faults, needs
from psc_core.images.decode import as_base64, png_of
from psc_core.images.preprocess import describe_image
from psc_core.model import FittedModel, load_model
from psc_core.network import LIBRARIES
from psc_core.scoring import NOT_FINITE

if TYPE_CHECKING:
    from pandas import DataFrame

COLUMN: Final = "image"
BUNDLE: Final = "bundle"  # the folder of the bundle, below MLflow's data


class Predictor:
    """A fitted model as MLflow calls it."""

    def __init__(self, model: FittedModel) -> None:
        self.model = model

    def predict(self, model_input: DataFrame, params: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """Return the answer of ``POST /predict`` for each image of a column, files as bytes or base64 text.

        An image or a threshold of ``params`` that cannot be used refuses all, as it does there; the error is MLflow's,
        whose server shows the text of no other.
        """
        from mlflow.exceptions import MlflowException

        try:
            model = replace(self.model, policy=self._policy_with(params or {}))
            pixels = [self._pixels(index, cell) for index, cell in enumerate(model_input[COLUMN])]
            batch = np.array(pixels, np.uint8).reshape(-1, *model.preprocess.shape)
            prediction = model.predict(torch.from_numpy(batch))
            finite = prediction.outputs.packed.isfinite().all(dim=1).tolist()
            if not all(finite):
                raise UsageError(f"image {finite.index(False)}: {NOT_FINITE}")
        except (ImageError, UsageError) as error:
            raise MlflowException.invalid_parameter_value(str(error)) from error
        return prediction.to_dict()

    def _policy_with(self, params: Mapping[str, Any]) -> BasePolicy:
        try:
            policy = type(self.model.policy).model_validate({**self.model.policy.model_dump(), **params})
        except ValidationError as error:
            raise UsageError(all_faults(error.errors(), "parameter")) from error
        self.model.calibration.check(policy)
        return policy

    def _pixels(self, index: int, cell: object) -> npt.NDArray[np.uint8]:
        try:
            if isinstance(cell, str):  # Perhaps in lines: MLflow's clients write bytes so.
                cell = binascii.a2b_base64(b"".join(cell.encode(errors="replace").split()), strict_mode=True)
            if not isinstance(cell, bytes):
                raise UsageError(f"expected base64 text or bytes of an image file, got {describe_image(cell)}")
            return self.model.preprocess.from_bytes(cell)
        except binascii.Error as error:
            raise UsageError(f"image {index}: expected base64 of an image file, with padding ({error})") from error
        except (ImageError, UsageError) as error:
            raise UsageError(f"image {index}: {error}") from error


def _load_pyfunc(data_path: str) -> Predictor:
    return Predictor(load_model(data_path))


def save_pyfunc(model: FittedModel, folder: Path, *, overwrite: bool = False) -> None:
    """Write an MLflow model to a new or empty folder, or in place of another one that may be overwritten.

    A factory's network becomes a graph, since nobody can allow it.
    """
    pyfunc = needs("an MLflow model", "mlflow", "pandas", "mlflow.pyfunc")
    from mlflow import models, types
    from pandas import DataFrame

    replaces = overwrite and (folder / "MLmodel").is_file()
    if folder.exists() and any(folder.iterdir()) and not replaces:
        raise UsageError(f"{folder} is not empty; give a new folder")
    names, network = model.calibration.graph_inputs, model.backbone.cut.network
    params = types.ParamSchema([types.ParamSpec(name, "double", getattr(model.policy, name)) for name in names])
    # Text, not binary: MLflow decodes binary in some forms of a request, and not in "inputs".
    signature = models.ModelSignature(types.Schema([types.ColSpec("string", COLUMN)]), params=params)
    noise = DataFrame({COLUMN: [as_base64(png_of(model.preprocess.noise()[0, :, :32, :32].numpy()))]})
    library = network.spec.partition(":")[0] if network else ""
    with TemporaryDirectory(dir=folder.parent if replaces else None) as scratch:
        written = Path(scratch) / "new" if replaces else folder
        manifest = model.save(bundle := Path(scratch) / BUNDLE, graph=library not in LIBRARIES)
        extra = "[onnx]" if manifest.backbone.network is None else "[timm]" if library == "timm" else ""
        pyfunc.save_model(
            str(written), __name__, str(bundle), signature=signature, input_example=noise,
            pip_requirements=[f"psc{extra}=={__version__}"], metadata={"name": model.name, "version": manifest.version},
        )  # fmt: skip
        if replaces:  # Now, as nothing can fail any more.
            folder.rename(Path(scratch) / "old")
            written.rename(folder)
