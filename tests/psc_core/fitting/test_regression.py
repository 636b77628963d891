from functools import partial
from pathlib import Path

import pytest
import torch

from psc_core import FitSettings, PSCRegressor, fit_projection, fit_regressor, measure_collapse, open_dataset
from psc_core.cli.fit import main
from psc_core.data.dataset import ImageDataset
from psc_core.images.preprocess import PRESETS
from psc_core.model import load_model
from psc_core.tasks.regression import Regression
from tests.conftest import TinyJob

Images = tuple[ImageDataset, ImageDataset]
ALLOW = ("tests.tiny:network",)
CPU = FitSettings(device="cpu")


@pytest.fixture(scope="module")
def turned(data_root: Path) -> Images:
    opened = partial(open_dataset, f"rotated-mnist:{data_root}", preprocess=PRESETS["mnist"])
    return opened(split="train"), opened(split="val")


def test_the_library_fits_what_the_command_line_fits(angle_job: TinyJob, angle_bundle: Path, turned: Images) -> None:
    train, val = turned
    chosen = measure_collapse(angle_job.net, train, val, settings=CPU).choose()
    projection = fit_projection(angle_job.net, chosen, train, val, minimum_dim=8, settings=CPU)
    ours = fit_regressor(angle_job.net, chosen, projection, train, val, coverage=0.9, settings=CPU)
    theirs = PSCRegressor.load(angle_bundle, device="cpu", allow_factories=ALLOW)
    images = next(val.batches(20)).images
    torch.testing.assert_close(ours.predict(images).outputs.packed, theirs.predict(images).outputs.packed)
    assert ours.classes == theirs.classes == Regression.labelled(train, val)[0].classes


def test_the_networks_own_mean_is_kept(angle_job: TinyJob, turned: Images, tmp_path: Path) -> None:
    out = tmp_path / "original"
    words = ["--predictions", "original", "--ood-score", "density", "--no-report", "--out", str(out)]
    assert main([*angle_job.args, *words]) == 0
    model = load_model(out, device="cpu", allow_factories=ALLOW)
    images = next(turned[1].batches(50)).images
    with torch.inference_mode():
        own = angle_job.net(turned[1].preprocess.standardise(images))[:, 0]
    assert isinstance(model, PSCRegressor) and model.predictions == "original" and model.checks == ()
    torch.testing.assert_close(model.predict(images).mean, own, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--task", "classification"), "the task of these images is regression, --task regression: "),
        (("--head", "laplace"), "expected head of a regression to be one of blr, dve"),
        (("--coverage", "0.999"), "expected coverage"),
        (("--head-input", "z"), "a regression does not read head_input"),
        (("--unit", "degrees"), "is no table, so unit 'degrees' has no effect"),
    ],
)
def test_what_does_not_fit_is_refused(
    angle_job: TinyJob, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], said: str
) -> None:
    assert main([*angle_job.args, *flags, "--out", str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err
