"""Networks of other people's habits, from the fit to the step that the service runs."""

from __future__ import annotations

from pathlib import Path

import torch

from app.inference.steps import make_step
from psc_core import PRESETS, PSC, fit_projection, fit_psc, measure_collapse, open_dataset
from psc_core.network.load import load_network
from psc_core.pipeline import available_backends, pipeline_on
from psc_core.settings import BACKENDS
from tests import tiny

FACTORY = "tests.tiny:LeNet"


def test_a_network_that_flattens_by_view(data_root: Path, tmp_path: Path) -> None:
    train, val, test = (
        open_dataset(f"mnist:{data_root}", split=split, preprocess=PRESETS["mnist"])
        for split in ("train", "val", "test")
    )
    net = load_network(FACTORY, num_classes=10)
    net.load_state_dict(tiny.train(train, epochs=3, factory=tiny.LeNet).state_dict())
    chosen = measure_collapse(net, train, val).choose("conv2")
    fitted = fit_psc(net, chosen, fit_projection(net, chosen, train, val), train, val, predictions="original")
    fitted.save(tmp_path / "bundle")
    psc = PSC.load(tmp_path / "bundle", device="cpu", allow_factories=[FACTORY])
    assert psc.backbone.keep_output and psc.pipeline.scorer.backbone.memory_format == torch.channels_last
    assert available_backends(psc) == BACKENDS

    images = next(iter(test.batches(5))).images
    expected = fitted.pipeline(images)
    for backend in BACKENDS:
        step = make_step(pipeline_on(psc, backend), (1, 28, 28), max_batch=5, device=torch.device("cpu"))
        step.warm_up()
        step.input(0)[:5] = images.numpy()
        step.launch(0, 5)
        got = torch.from_numpy(step.fetch(0, 5))
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
