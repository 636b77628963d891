"""A network's tensors are found in what training left, and in nothing that does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from psc_core.errors import NetworkError
from psc_core.network.weights import Weights, load_weights, read_weights


def network(num_classes: int = 3) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, num_classes))


def state(seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return network().state_dict()


def prefixed(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


def read(checkpoint: object, folder: Path) -> Weights:
    torch.save(checkpoint, folder / "net.pth")
    return read_weights(folder / "net.pth", network().state_dict())


def are_equal(tensors: Any, expected: dict[str, Tensor]) -> bool:
    return tensors.keys() == expected.keys() and all(torch.equal(tensors[name], expected[name]) for name in expected)


FOUND = {
    "as it is": (state(), ()),
    "timm": ({"state_dict": state(), "metric": 0.9}, ('found under "state_dict" of net.pth',)),
    "twice nested": ({"epoch": 1, "model": {"net": state()}}, ('found under "model.net" of net.pth',)),
    "several GPUs": (prefixed("module.", state()), ('removed the prefix "module."',)),
    "compiled": (
        {"model_state_dict": prefixed("module._orig_mod.", state())},
        ('found under "model_state_dict" of net.pth', 'removed the prefix "module._orig_mod."'),
    ),
    "Lightning": (
        {
            "state_dict": {**prefixed("model.", state()), "criterion.weight": torch.ones(2)},
            "pytorch-lightning_version": "2.5",
            "hyper_parameters": {"lr": 0.1},
            "optimizer_states": [{"state": {0: {"exp_avg": torch.ones(2)}}}],
        },
        (
            'found under "state_dict" of net.pth',
            'removed the prefix "model."',
            "ignored 1 other tensor (criterion.weight)",
        ),
    ),
    "moving averages beside": (
        {"state_dict_ema": state(1), "state_dict": state(), "ema": state(2)},
        ('found under "state_dict" of net.pth', 'not used: "state_dict_ema", "ema"'),
    ),
    "moving averages alone": ({"model_ema": state()}, ('found under "model_ema" of net.pth',)),
    "averages among the names": (
        {"net": {**prefixed("ema_model.", state(1)), **prefixed("model.", state())}},
        (
            'found under "net" of net.pth',
            'removed the prefix "model."',
            'not used: "ema_model." in "net"',
            "ignored 9 other tensors (ema_model.0.weight, ema_model.0.bias, ema_model.1.weight, …)",
        ),
    ),
    "averages inside": (
        {**state(), **prefixed("ema.", state(1))},
        ('not used: "ema."', "ignored 9 other tensors (ema.0.weight, ema.0.bias, ema.1.weight, …)"),
    ),
    "averaged by PyTorch": (
        {"n_averaged": torch.tensor(9), **prefixed("module.", state())},
        ('removed the prefix "module."', "ignored 1 other tensor (n_averaged)"),
    ),
    "parameters": ({name: nn.Parameter(part, requires_grad=False) for name, part in state().items()}, ()),
}


@pytest.mark.parametrize("case", FOUND)
def test_finds_the_tensors(case: str, tmp_path: Path) -> None:
    checkpoint, notes = FOUND[case]
    weights = read(checkpoint, tmp_path)
    assert are_equal(weights.tensors, state())
    assert weights.notes == notes
    net = network()
    load_weights(net, weights.tensors, num_classes=3, origin=weights.origin)
    assert are_equal(net.state_dict(), state())


@given(parts=st.lists(st.sampled_from(["module", "_orig_mod", "net", "model", "backbone", "0", "bn"]), max_size=6))
def test_any_prefix_is_removed(parts: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    weights = read(prefixed("".join(f"{part}." for part in parts), state()), tmp_path_factory.getbasetemp())
    assert are_equal(weights.tensors, state())


def test_one_dictionary_by_two_names_is_read_once(tmp_path: Path) -> None:
    tensors = state()
    assert read({"model": tensors, "state_dict": tensors}, tmp_path).notes == ('found under "model" of net.pth',)


def test_says_what_is_converted(tmp_path: Path) -> None:
    for dtype, name in ((torch.float16, "float16"), (torch.float64, "float64"), (torch.float8_e4m3fn, "float8_e4m3fn")):
        given = {key: part.to(dtype) if part.is_floating_point() else part for key, part in state().items()}
        weights = read(given, tmp_path)
        assert weights.notes == (f"converted 8 tensors from {name} to float32",)
        net = network()
        load_weights(net, weights.tensors, num_classes=3, origin="net.pth")
        assert torch.equal(net.get_parameter("0.weight"), given["0.weight"].float())


def test_batch_counters_may_be_absent() -> None:
    kept = {name: part for name, part in state().items() if "num_batches" not in name}
    load_weights(network(), kept, num_classes=3, origin="net.pth")


def changed(name: str, part: Tensor) -> dict[str, Tensor]:
    return {**state(), name: part}


REJECTED = {
    "1 missing (3.bias), 0 unexpected": {name: part for name, part in state().items() if name != "3.bias"},
    "0 missing, 1 unexpected (extra)": changed("extra", torch.zeros(1)),
    "expected 3.bias of shape (3,), got (3, 3)": changed("3.bias", torch.zeros(3, 3)),
    "expected 0.bias of shape (4,), got (1099511627776,)": changed("0.bias", torch.zeros(1).expand(1 << 40)),
    "3.bias has NaN or infinity; train it again": changed("3.bias", torch.tensor([0.0, torch.nan, 0.0])),
    "1.running_var has NaN or infinity": changed("1.running_var", torch.full((4,), 1e300, dtype=torch.float64)),
    "expected 3.bias of float32, got int8; save plain weights": changed("3.bias", torch.zeros(3, dtype=torch.int8)),
    "got complex64": changed("3.bias", torch.zeros(3, dtype=torch.complex64)),
    "got a sparse tensor": changed("3.bias", torch.zeros(3).to_sparse()),
    "got a tensor without values": changed("3.bias", torch.zeros(3, device="meta")),
    "is for 7 classes (3.weight is (7, 16)), the data has 3": {
        **state(), "3.weight": torch.zeros(7, 16), "3.bias": torch.zeros(7)
    },
    f"2 unexpected ({'x' * 100}…{'x' * 100}, y)": {**changed("x" * 999, torch.zeros(1)), "y": torch.zeros(1)},
}  # fmt: skip


@pytest.mark.parametrize("message", REJECTED)
def test_rejects_tensors_that_do_not_fit(message: str) -> None:
    with pytest.raises(NetworkError) as caught:
        load_weights(network(), REJECTED[message], num_classes=3, origin="net.pth")
    assert message in str(caught.value)


def test_whole_numbers_are_not_filled_from_floats() -> None:
    net = nn.BatchNorm1d(2)
    net.register_buffer("index", torch.zeros(2, dtype=torch.long))
    given = {**net.state_dict(), "num_batches_tracked": torch.tensor(3.0)}
    load_weights(net, given, num_classes=2, origin="net.pth")
    with pytest.raises(NetworkError, match="expected index of int64, got float32; save plain weights"):
        load_weights(net, {**given, "index": torch.tensor([0.5, 1.7])}, num_classes=2, origin="net.pth")


def test_a_larger_network_of_the_same_names_does_not_fit(tmp_path: Path) -> None:
    """As ResNet-34's for ResNet-18: what lies behind the prefix has to be the network's, all of it."""
    weights = read({"net": prefixed("module.", {**state(), "4.weight": torch.zeros(2)})}, tmp_path)
    origin = r'net\.pth \(found under "net" of net\.pth; removed the prefix "module\."\)'
    with pytest.raises(
        NetworkError, match=rf"{origin} does not fit the network: 0 missing, 1 unexpected \(4\.weight\)"
    ):
        load_weights(network(), weights.tensors, num_classes=3, origin=weights.origin)


def test_rejects_what_has_no_tensors_by_name(tmp_path: Path) -> None:
    for checkpoint in ({"epoch": 1}, [state()], torch.zeros(2), {"a": {"b": {"c": state()}}}, {1: torch.zeros(2)}):
        with pytest.raises(NetworkError, match=r"net\.pth holds no tensors by name"):
            read(checkpoint, tmp_path)


def test_one_of_several_files_is_told(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model-00001-of-00002.bin"
    torch.save({"0.weight": state()["0.weight"]}, path)
    with pytest.raises(NetworkError, match=r"is one of several files .*; give their \.index\.json"):
        read_weights(path, network().state_dict())
    torch.save(state(), path)
    assert read_weights(path, network().state_dict()).notes == ()


def test_rejects_a_whole_network(tmp_path: Path) -> None:
    for checkpoint in (network(), {"model": network(), "anchors": torch.ones(2)}):
        with pytest.raises(NetworkError) as caught:
            read(checkpoint, tmp_path)
        assert 'net = torch.load("net.pth", weights_only=False); safetensors.torch.save_file(' in str(caught.value)
    assert read({"model": network(), "state_dict": state()}, tmp_path).notes == ('found under "state_dict" of net.pth',)
