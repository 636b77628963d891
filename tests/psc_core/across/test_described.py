import shutil
from pathlib import Path

import pytest
import torch

from psc_core import FitSettings, fit_projection, fit_psc, load_model, load_network, measure_collapse, open_dataset
from psc_core.bundle import read_bundle
from psc_core.cli.evaluate import main as evaluate
from psc_core.cli.fit import main
from psc_core.data.dataset import ImageDataset
from psc_core.data.open import in_network_order
from psc_core.network.described import describe
from tests import folders
from tests.conftest import Run

FAST = ("--device", "cpu", "--minimum-dim", "4", "--no-report", "--ood-score", "density", "--coverage", "0.9")


def opened(job: folders.Job, spec: str) -> tuple[ImageDataset, ImageDataset]:
    described = describe(spec)
    assert described.preprocess is not None
    parts = {"train": job.train, "val": job.val}
    train, val = (
        in_network_order(open_dataset(str(root), split=split, preprocess=described.preprocess), described.classes)[0]
        for split, root in parts.items()
    )
    return train, val


@pytest.mark.parametrize(
    "kind",
    [
        kind if kind in ("vit", "resnet", "swin") else pytest.param(kind, marks=pytest.mark.slow)
        for kind in folders.CONFIGURATIONS
    ],
)
def test_networks_of_transformers_are_fitted(kind: str, digit_folders: tuple[Path, Path], tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the networks are transformers'")
    spec = f"hf:{folders.save_transformer(tmp_path, folders.transformer(kind))}"
    train, val = opened(folders.Job(tmp_path, *digit_folders), spec)
    train = train.subset(torch.arange(0, len(train), 3))
    net = load_network(spec, num_classes=len(train.classes))
    settings = FitSettings(device="cpu", minimum_dim=4, ood_score="density", coverage=0.9, granularity="blocks")
    chosen = measure_collapse(net, train, val, settings=settings).choose()
    projection = fit_projection(net, chosen, train, val, settings=settings)
    model = fit_psc(net, chosen, projection, train, val, settings=settings)
    images = next(val.batches(20)).images
    once, again = model.predict(images), model.predict(images)
    assert model.classes == folders.NAMES
    assert torch.equal(once.probabilities, again.probabilities)


def test_a_trained_network_is_right_in_its_own_order(hf_job: folders.Job) -> None:
    spec = f"hf:{hf_job.model}"
    train, val = opened(hf_job, spec)
    net, batch = load_network(spec), next(val.batches(len(val)))
    with torch.inference_mode():
        predicted = net(val.preprocess.standardise(batch.images)).argmax(1)
    assert float((predicted == batch.labels).float().mean()) > 0.3  # 0.1 in another order
    assert train.classes == folders.NAMES != tuple(sorted(folders.NAMES))


def test_a_folder_of_timm_needs_no_other_flag(timm_job: folders.Job, tmp_path: Path, run: Run) -> None:
    folder = Path(shutil.copytree(timm_job.model, tmp_path / "net"))
    words = ["--model", f"timm:local-dir:{folder}", "--train", str(timm_job.train), "--val", str(timm_job.val)]
    out, _ = run(main, *words, *FAST, "--out", tmp_path / "b")
    assert "classes are in the order of the network's outputs, by their names" in out
    assert f"preprocessing: {folders.SIZE}; alpha dropped" in out
    shutil.rmtree(folder)
    manifest = read_bundle(tmp_path / "b").manifest
    assert manifest.classes == folders.NAMES
    assert manifest.backbone.network.spec == manifest.provenance["model"] == "timm:test_resnet"
    assert str(tmp_path) not in manifest.model_dump_json()
    model = load_model(tmp_path / "b", device="cpu")
    files = [next((timm_job.val / name).iterdir()) for name in folders.NAMES]
    assert model.predict(files).probabilities.shape == (10, 10)

    weights = str(timm_job.model / "model.safetensors")
    words = ["--bundle", str(tmp_path / "b"), "--id", str(timm_job.val), "--device", "cpu", "--weights", weights]
    assert "Are the answers right?" in run(evaluate, *words, "--train", timm_job.train, "--val", timm_job.val)[0]


def test_what_cannot_be_stored_is_told_before_a_fit(hf_job: folders.Job, tmp_path: Path, run: Run) -> None:
    words = ["--model", f"hf:{hf_job.model}", "--train", str(hf_job.train), "--val", str(hf_job.val)]
    out, err = run(main, *words, *FAST, "--precision", "bf16", "--out", tmp_path / "b", code=2)
    assert "computes in float32" in err and "collapse" not in out
