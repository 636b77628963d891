import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from psc_core.errors import NetworkError
from psc_core.network.cut import Backbone, truncate
from psc_core.network.export import check_exportable, to_onnx
from psc_core.network.load import load_network, read_checked, spec_of

SIZE = (1, 28, 28)


def backbone(layers: list[str], *, keep_output: bool = False) -> Backbone:
    torch.manual_seed(0)
    net = load_network("tests.tiny:network", num_classes=4)
    return truncate(net, layers, keep_output=keep_output)


@pytest.mark.parametrize("keep_output", [False, True])
def test_outputs_equal_pytorch_for_any_number_of_images_and_threads(keep_output: bool) -> None:
    net = backbone(["2", "6"], keep_output=keep_output)
    exported = to_onnx(net, SIZE)
    before = torch.get_num_threads()
    for threads, count in ((1, 1), (1, 5), (2, 3)):
        torch.set_num_threads(threads)
        images = torch.randn(count, *SIZE)
        with torch.inference_mode():
            (expected, logits), (got, got_logits) = net(images), exported(images.to(memory_format=torch.channels_last))
        torch.testing.assert_close(got, expected)
        assert (got_logits is None) == (logits is None) == (not keep_output)
        if logits is not None:
            torch.testing.assert_close(got_logits, logits)
    torch.set_num_threads(before)


def test_names_what_cannot_be_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    net = backbone(["2"])
    other = load_network(f"{__name__}:sorts", num_classes=4)
    net.cut = replace(net.cut, network=spec_of(other))
    with pytest.raises(NetworkError, match="the network after 2 has no ONNX model: "):
        to_onnx(net, SIZE)
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(NetworkError, match="no process could be run to export"):
        to_onnx(net, SIZE)
    monkeypatch.setattr(tempfile, "tempdir", "/no/such/folder")
    with pytest.raises(NetworkError, match="TMPDIR"):
        to_onnx(net, SIZE)


class OfOneLength(nn.Sequential):
    """Its ``len`` makes the number of images a constant of the graph."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        features = super().forward(input)
        return features + torch.zeros(len(features), 4)


def test_tells_what_stands_below_a_heading() -> None:
    net = OfOneLength(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 26 * 26, 4)).eval()
    with pytest.raises(NetworkError, match=r"has no ONNX model: [^\n]*: [^\n]*tracing inferred a static shape"):
        check_exportable(net, torch.zeros(1, *SIZE), "fp32")


def test_exports_a_network_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    net, images = backbone(["2"]), torch.randn(2, *SIZE)
    expected = to_onnx(net, SIZE)(images)
    (kept,) = tmp_path.glob("psc/*")
    with monkeypatch.context() as without_python:
        without_python.setattr(sys, "executable", "/no/such/python")
        torch.testing.assert_close(to_onnx(net, SIZE)(images), expected, rtol=0, atol=0)
        for parameter in net.parameters():
            parameter.data += 1
        with pytest.raises(NetworkError, match="no process could be run"):
            to_onnx(net, SIZE)
    torch.testing.assert_close(to_onnx(net, SIZE)(images), net(images))
    kept.write_bytes(kept.read_bytes()[:-1])
    torch.testing.assert_close(to_onnx(backbone(["2"]), SIZE)(images), expected, rtol=0, atol=0)
    assert read_checked(kept) is not None and len(list(tmp_path.glob("psc/*"))) == 2


def test_needs_no_writable_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    net, images = backbone(["2"]), torch.randn(2, *SIZE)
    torch.testing.assert_close(to_onnx(net, SIZE)(images), net(images))


def sorts(num_classes: int) -> nn.Module:
    """A factory of another network than its weights are of."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 8), nn.ReLU(), nn.Linear(8, num_classes))
