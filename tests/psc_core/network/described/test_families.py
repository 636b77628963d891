"""Which specs describe themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from psc_core.errors import NetworkError
from psc_core.network.described import DESCRIBERS, NetworkSpec, describe, is_described
from psc_core.network.load import load_network
from tests import folders


@pytest.mark.parametrize("spec", ["torchvision:resnet18", "timm:resnet18", "package.module:factory"])
def test_others_say_nothing(spec: str) -> None:
    assert describe(spec) == NetworkSpec(spec)
    assert not is_described(spec)


@pytest.mark.parametrize("prefix", DESCRIBERS)
def test_needs_the_folder_or_the_file(prefix: str) -> None:
    assert is_described(f"{prefix}nowhere")
    with pytest.raises(NetworkError, match=r"there is no (folder|file) nowhere"):
        describe(f"{prefix}nowhere")


def test_describes_without_the_library_or_the_weights(
    hf_job: folders.Job, timm_job: folders.Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("transformers", "timm", "safetensors.torch"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    for spec in (f"hf:{hf_job.model}", f"timm:local-dir:{timm_job.model}", f"hf:{timm_job.model}"):
        found = describe(spec)
        assert found.classes == folders.NAMES and found.num_classes == 10
        assert (found.preprocess, found.unlike) == (folders.SIZE, {})
        assert [file.name for file in found.weights] == ["model.safetensors"]


def test_number_of_classes_is_the_folders(hf_job: folders.Job, timm_job: folders.Job) -> None:
    for spec in (f"hf:{hf_job.model}", f"timm:local-dir:{timm_job.model}"):
        with pytest.raises(NetworkError, match="is for 10 classes, the data has 3"):
            load_network(spec, num_classes=3)
    with pytest.raises(NetworkError, match="torchvision:resnet18 does not say its number of classes"):
        load_network("torchvision:resnet18")


def test_a_folder_is_never_read_for_a_bundle(timm_job: folders.Job, hf_job: Path) -> None:
    from psc_core.network.load import build

    with pytest.raises(NetworkError, match="timm has no network 'local-dir:"):
        build(NetworkSpec(f"timm:local-dir:{timm_job.model}", 10))
    with pytest.raises(NetworkError, match="cannot import the factory hf:"):
        build(NetworkSpec("hf:net", 10))
