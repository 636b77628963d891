import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from psc_core.errors import NetworkError
from psc_core.network.cut import truncate
from psc_core.network.described import describe
from psc_core.network.layers import list_layers
from psc_core.network.load import load_network
from psc_core.network.onnx import OnnxNetwork, open_onnx
from psc_core.network.onnx_check import files_of_model
from tests.conftest import ROOT

X = torch.randn(5, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def convolutional() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4),
    ).eval()  # fmt: skip


def written(net: nn.Module, file: Path, images: int | None = None, x: Tensor = X) -> Path:
    """Export a network, for any number of images or for so many."""
    with warnings.catch_warnings(action="ignore"):
        axes = ({0: torch.export.Dim.DYNAMIC},) if images is None else None
        program = torch.onnx.export(net, (x[: images or 2],), dynamo=True, dynamic_shapes=axes, verbose=False)
    assert program is not None
    onnx.save(program.model_proto, file)
    return file


def changed(file: Path, change: Callable[[onnx.ModelProto], None]) -> OnnxNetwork:
    model = onnx.load(file)
    change(model)
    onnx.save(model, file)
    return open_onnx(file)


@pytest.mark.parametrize("images", [None, 1])
def test_logits_and_features_equal_those_of_pytorch(tmp_path: Path, images: int | None) -> None:
    net = convolutional()
    other = load_network(f"onnx:{written(net, tmp_path / 'net.onnx', images)}", num_classes=4)
    torch.testing.assert_close(other(X), net(X), rtol=1e-4, atol=1e-5)
    expected = [layer.name for layer in list_layers(net, X[:1])]
    found = list_layers(other, X[:1])
    assert [layer.role for layer in found] == ["hidden"] * 2 + ["trunk", "penultimate", "output"]
    assert [(each.form, each.shape) for each in found] == [(each.form, each.shape) for each in list_layers(net, X[:1])]
    names = [layer.name for layer in found]
    in_onnx, logits = truncate(other, names[1:], keep_output=True, trial=X[:1])(X)
    in_torch, _ = truncate(net, expected[1:], keep_output=True)(X)
    torch.testing.assert_close(in_onnx, in_torch, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits, other(X))
    # The first convolution has the normalisation behind it folded in.
    normalised, _ = truncate(net, ["1"], keep_output=False)(X)
    torch.testing.assert_close(truncate(other, names[:1], keep_output=False, trial=X[:1])(X)[0], normalised)


class Attention(nn.Module):
    """Two blocks of a vision transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 12, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, 12))
        self.blocks = nn.ModuleList(
            nn.ModuleList([nn.LayerNorm(12), nn.Linear(12, 36), nn.Linear(12, 12)]) for _ in "12"
        )
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), self.patches(x).flatten(2).transpose(1, 2)], 1)
        for norm, mixed, out in self.blocks:
            q, k, v = mixed(norm(x)).chunk(3, -1)
            x = x + out(torch.softmax(q @ k.transpose(1, 2), -1) @ v)
        logits: Tensor = self.head(x[:, 0])
        return logits


@pytest.mark.parametrize("images", [None, 1])
def test_transformers_have_blocks_and_run_one_by_one_where_they_must(tmp_path: Path, images: int | None) -> None:
    torch.manual_seed(0)
    net = Attention().eval()
    other = open_onnx(written(net, tmp_path / "net.onnx", images))
    torch.testing.assert_close(other(X), net(X), rtol=1e-4, atol=1e-5)
    assert other.notes == (() if images is None else ("takes one image at a time",))
    for granularity, count in (("operations", 5), ("blocks", 3)):
        layers = list_layers(other, X[:1], granularity=granularity)
        assert len(layers) == count
        assert [(layer.form, layer.shape) for layer in layers if layer.role in ("hidden", "trunk")][-2:] == [
            ("tokens", (12, 17))
        ] * 2
        assert next(layer.shape for layer in layers if layer.role == "penultimate") == (12, 1)
    features, _ = truncate(other, [layers[1].name], keep_output=False, trial=X[:1])(X)
    assert features[0].shape == (5, 12, 17)
    assert len(list_layers(other, X[:1], granularity="all")) > 10


def test_a_softmax_at_the_end_is_skipped(tmp_path: Path) -> None:
    net = convolutional()
    other = open_onnx(written(nn.Sequential(net, nn.Softmax(1)).eval(), tmp_path / "net.onnx"))
    torch.testing.assert_close(other(X), net(X), rtol=1e-4, atol=1e-5)
    assert other.notes == ("ends in a softmax, whose input is taken as the logits",)


class Several(nn.Module):
    """A network that returns three other numbers, its probabilities, its logits, and no vector."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        logits: Tensor = self.net(x)
        return logits[:, :3] + 1, logits.softmax(1), logits.clone(), x.mean((2, 3)).unsqueeze(2)


def test_of_several_outputs_the_logits_are_taken(tmp_path: Path) -> None:
    net = convolutional()
    file = written(Several(net).eval(), tmp_path / "net.onnx")
    other = load_network(f"onnx:{file}", num_classes=4)
    torch.testing.assert_close(other(X), net(X), rtol=1e-4, atol=1e-5)
    assert isinstance(other, OnnxNetwork) and len(other.notes) == 1 and "several outputs" in other.notes[0]
    with pytest.raises(
        NetworkError, match=r"may be the numbers, got .*; export it again .* numbers \(batch, 1\) alone"
    ):
        open_onnx(file, 1)(X)
    for classes in (None, 5):
        with pytest.raises(NetworkError, match=r"may be the logits, got .* \(\d, 3\), .* \(\d, 4\)"):
            open_onnx(file, classes)(X)


def test_channels_last_and_integer_inputs(tmp_path: Path) -> None:
    class Exported(nn.Module):
        """As Keras exports: channels last, pixels of 0 to 255."""

        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.net(x.float().permute(0, 3, 1, 2) / 255)
            return logits

    net = convolutional()
    pixels = torch.randint(0, 256, (2, 16, 16, 3), dtype=torch.uint8)
    other = open_onnx(written(Exported(net).eval(), tmp_path / "net.onnx", x=pixels))
    images = pixels.permute(0, 3, 1, 2).float()
    torch.testing.assert_close(other(images), net(images / 255), rtol=1e-4, atol=1e-5)
    assert torch.equal(other(images * 0.9999999), other(images))


def test_a_bias_that_is_computed_from_constants_is_no_layer(tmp_path: Path) -> None:
    """As Keras writes a dense layer: a product, and the sum with a converted bias."""
    file = written(convolutional(), tmp_path / "net.onnx")

    def split(model: onnx.ModelProto) -> None:
        head = model.graph.node[-1]
        weight, bias = head.input[1:]
        kind = TensorProto.FLOAT
        nodes = [
            helper.make_node("Cast", [bias], ["converted"], to=kind),
            helper.make_node("Transpose", [weight], ["turned"], perm=[1, 0]),
            helper.make_node("MatMul", [head.input[0], "turned"], ["raw"]),
            helper.make_node("Identity", ["raw"], ["product"]),
            helper.make_node("Add", ["converted", "product"], [head.output[0]]),
        ]
        model.graph.node.remove(head)
        model.graph.node.extend(nodes)

    expected = list_layers(open_onnx(file), X[:1])
    found = list_layers(changed(file, split), X[:1])
    assert [(layer.role, layer.shape) for layer in found] == [(layer.role, layer.shape) for layer in expected]


def test_quantised_networks_have_the_same_layers(tmp_path: Path) -> None:
    from onnxruntime import quantization

    class Reader(quantization.CalibrationDataReader):
        def __init__(self, name: str) -> None:
            self.batches = iter([{name: X.numpy()}])

        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(self.batches, None)

    file = written(convolutional(), tmp_path / "net.onnx")
    plain = open_onnx(file)
    with warnings.catch_warnings(action="ignore"):
        reader = Reader(onnx.load(file).graph.input[0].name)
        quantization.quantize_static(file, tmp_path / "int8.onnx", reader)
    other = open_onnx(tmp_path / "int8.onnx")
    assert {node.op_type for node in onnx.load(tmp_path / "int8.onnx").graph.node} >= {"DequantizeLinear", "Conv"}
    assert (other(X) - plain(X)).abs().max() < 0.1
    assert [layer.shape for layer in list_layers(other, X[:1])] == [layer.shape for layer in list_layers(plain, X[:1])]


def test_constants_beside_the_file(tmp_path: Path) -> None:
    file = written(convolutional(), tmp_path / "net.onnx")
    expected = open_onnx(file)(X)
    onnx.save(onnx.load(file), file, save_as_external_data=True, location="net.data", size_threshold=0)
    torch.testing.assert_close(open_onnx(file)(X), expected)
    data = tmp_path / "net.data"
    assert describe(f"onnx:{file}").weights == (file, data)
    whole = data.read_bytes()
    data.write_bytes(whole[:-4])
    with pytest.raises(NetworkError, match=r"cannot read the constant .* from 'net.data': it is too short"):
        open_onnx(file)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "net.data").write_bytes(whole)
    data.unlink()
    data.symlink_to(elsewhere / "net.data")
    open_onnx(file)  # A link inside the folder.
    moved = tmp_path / "model" / "net.onnx"
    moved.parent.mkdir()
    moved.write_bytes(file.read_bytes())
    with pytest.raises(NetworkError, match="No such file"):
        open_onnx(moved)
    (moved.parent / "net.data").symlink_to(elsewhere / "net.data")
    for read in (open_onnx, files_of_model):
        with pytest.raises(NetworkError, match="not a file in the model's folder"):
            read(moved)


def test_initializers_among_the_inputs_are_none(tmp_path: Path) -> None:
    """Files of old exporters list their weights as inputs."""

    def listed(model: onnx.ModelProto) -> None:
        for tensor in model.graph.initializer:
            value = numpy_helper.to_array(tensor)
            model.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, value.shape))

    file = written(convolutional(), tmp_path / "net.onnx")
    expected = open_onnx(file)(X)
    torch.testing.assert_close(changed(file, listed)(X), expected)


def of_batch(net: nn.Module) -> nn.Module:
    """The network with a softmax over images behind its pooling."""
    return nn.Sequential(*net[:5], nn.Softmax(0), *net[5:])


def test_a_graph_whose_answer_depends_on_the_batch_is_refused(tmp_path: Path) -> None:
    file = written(of_batch(convolutional()), tmp_path / "net.onnx")
    with pytest.raises(NetworkError, match=r"net\.onnx: .* the other images of the batch; .* 'softmax'"):
        open_onnx(file)(X)


def test_a_graph_of_one_image_that_would_depend_on_others_is_run_image_by_image(tmp_path: Path) -> None:
    net = of_batch(convolutional())
    other = open_onnx(written(net, tmp_path / "net.onnx", 1))
    torch.testing.assert_close(other(X), torch.cat([net(each) for each in X.split(1)]), rtol=1e-4, atol=1e-5)


def test_says_what_a_file_must_be(tmp_path: Path) -> None:
    file = written(convolutional(), tmp_path / "net.onnx")
    net, wrong = open_onnx(file), open_onnx(written(convolutional()[:1], tmp_path / "map.onnx"))
    three = open_onnx(written(convolutional(), tmp_path / "three.onnx", 3))

    def second_input(model: onnx.ModelProto) -> None:
        model.graph.input.append(helper.make_tensor_value_info("more", TensorProto.FLOAT, [1]))

    for use, said in (
        (lambda: open_onnx(tmp_path), "no ONNX file"),
        (lambda: net(torch.zeros(1, 3, 32, 32)), r"is for images of 3 × 16 × 16 .* got 3 × 32 × 32"),
        (lambda: net(torch.zeros(3, 16, 16)), "expected images"),
        (lambda: truncate(net, ["conv2d_9"], keep_output=False, trial=X[:1]), "did you mean conv2d"),
        (lambda: truncate(net, ["conv2d"], keep_output=False), "pass a trial input"),
        (lambda: load_network(f"onnx:{file}", num_classes=4, weights=file), "leave out weights"),
        (lambda: three(X), r"batches of 3 images only; export it with one image, images\[:1\], or"),
        (lambda: wrong(X), "got"),
        (lambda: changed(file, second_input), "expected one input of images"),
    ):
        with pytest.raises(NetworkError, match=said):
            use()


def test_a_session_sends_nothing_and_keeps_no_device_id(tmp_path: Path) -> None:
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Abs", ["x"], ["y"])], "g", value[:1], value[1:])
    model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])
    onnx.save(model, tmp_path / "net.onnx")
    code = "import psc_core, onnxruntime; onnxruntime.InferenceSession('net.onnx')"
    unset = {"ORT_DISABLE_TELEMETRY", "XDG_CACHE_HOME"}
    env = {name: value for name, value in os.environ.items() if name not in unset}
    env |= {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env=env, timeout=120)
    assert [file.name for file in tmp_path.iterdir()] == ["net.onnx"]
