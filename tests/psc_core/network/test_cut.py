from __future__ import annotations

import copy
import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from psc_core.errors import NetworkError, UsageError
from psc_core.network.cut import HookedNetwork, HookPlan, cut_graph, readable_copy, rebuild_backbone, truncate
from psc_core.network.layers import INPUT_SUFFIX, canonical, list_layers
from psc_core.network.load import load_network
from tests import tiny

HERE = __name__


def mlp(num_classes: int) -> nn.Module:
    """Every activation works in place, on the very tensors that are wanted."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 12),
        nn.ReLU(inplace=True),
        nn.Linear(12, 8),
        nn.ReLU(inplace=True),
        nn.Linear(8, num_classes),
    )


class EarlyExit(nn.Module):
    """Control flow on data: cannot be traced."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.bright = nn.Conv2d(4, 4, 3, padding=1)
        self.dark = nn.Conv2d(4, 4, 1)
        self.late = nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU(inplace=True))
        self.head = nn.Linear(6, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu_(self.stem(x))
        x = self.bright(x) if float(x.detach().mean()) > 10 else self.dark(x)
        return self.head(self.late(x).mean((2, 3)))


class Loop(nn.Module):
    """Calls one module as often as the data say."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.step = nn.Conv2d(1, 1, 3, padding=1)
        self.head = nn.Linear(64, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2 if float(x.sum()) < 1e9 else 1):
            x = self.step(x)
        return self.head(x.flatten(1))


class Statements(nn.Module):
    """In-place calls whose results nobody reads."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 3, 3)
        self.act = nn.ReLU(inplace=True)
        self.second = nn.Conv2d(3, 3, 3)
        self.head = nn.Linear(3, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.act(x)
        x.mul_(2.0)
        torch.clamp(x, max=0.5, out=x)
        x = self.second(x)
        x.add_(1.0)
        return self.head(x.mean((2, 3)))


FACTORIES = tuple(f"{HERE}:{name}" for name in ("mlp", "EarlyExit", "Loop", "Statements"))
CASES: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "resnet18": ("torchvision:resnet18", {"stem": "small"}, (3, 16, 16)),
    "vgg11": ("torchvision:vgg11", {"stem": "small"}, (3, 28, 28)),
    "vgg11_bn": ("torchvision:vgg11_bn", {"stem": "small"}, (3, 28, 28)),
    "convnext_tiny": ("torchvision:convnext_tiny", {}, (3, 32, 32)),
    "vit_b_16": ("torchvision:vit_b_16", {"image_size": 32}, (3, 32, 32)),
    "swin_t": ("torchvision:swin_t", {}, (3, 32, 32)),
    "densenet121": ("torchvision:densenet121", {}, (3, 32, 32)),
    "mlp": (FACTORIES[0], {}, (1, 8, 8)),
    "early_exit": (FACTORIES[1], {}, (1, 8, 8)),
    "loop": (FACTORIES[2], {}, (1, 8, 8)),
    "statements": (FACTORIES[3], {}, (1, 8, 8)),
}


def nightly(names: Iterable[str]) -> list[Any]:
    """Large networks that are much like others among these are cut at night."""
    return [
        pytest.param(name, marks=pytest.mark.slow) if name in ("vgg11", "convnext_tiny") else name for name in names
    ]


def build(name: str) -> tuple[nn.Module, Tensor]:
    spec, model_args, shape = CASES[name]
    torch.manual_seed(0)
    net = load_network(spec, num_classes=5, model_args=model_args)
    return net, torch.randn(3, *shape)


@torch.inference_mode()
def hooked(net: nn.Module, layers: Sequence[str], x: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Independent reference: hooks on the whole network."""
    values: dict[str, Tensor] = {}
    handles = []
    for name in layers:
        module = net.get_submodule(name.removesuffix(INPUT_SUFFIX))
        if name.endswith(INPUT_SUFFIX):
            handles.append(
                module.register_forward_pre_hook(lambda _m, args, name=name: values.__setitem__(name, args[0].clone()))
            )
        else:
            handles.append(
                module.register_forward_hook(lambda _m, _args, out, name=name: values.__setitem__(name, out.clone()))
            )
    logits = net(x)
    for handle in handles:
        handle.remove()
    return values, logits


def parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_hooks_drop_later_modules_but_keep_branches() -> None:
    net, x = build("early_exit")
    backbone = truncate(net, ["dark"], keep_output=False, trial=x[:1])
    kept = {key.split(".")[2] for key in backbone.state_dict()}
    assert kept == {"stem", "bright", "dark"}
    assert backbone.spec()["hooks"] == {"stop": "dark", "dropped": ["late", "head"]}
    with torch.no_grad(), pytest.raises(NetworkError, match="this input needs late, which was dropped"):
        backbone(x + 1e4)
    whole = truncate(net, ["dark"], keep_output=True, trial=x[:1])
    with torch.no_grad(), pytest.raises(NetworkError, match="does not reach layer dark"):
        whole(x + 1e4)


def test_cutting_does_not_change_network() -> None:
    for name in ("vgg11", "early_exit"):
        net, x = build(name)
        keys, logits = list(net.state_dict()), net(x)
        truncate(net, [list_layers(net, x[:1])[0].name], keep_output=False, trial=x[:1])
        assert list(net.state_dict()) == keys and torch.equal(net(x), logits)
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


@pytest.mark.parametrize("name", nightly(["resnet18", "convnext_tiny", "vit_b_16", "swin_t"]))
@torch.inference_mode()
def test_graph_compiles_and_reads_channels_last(name: str) -> None:
    net, x = build(name)
    layers = [info.name for info in list_layers(net, x[:1])]
    backbone = truncate(net, [layers[2], layers[-3]], keep_output=True)
    expected = backbone.body(x)
    compiled = torch.compile(backbone.body, backend="eager", fullgraph=True, dynamic=False)
    for got, value in zip(compiled(x), expected, strict=True):
        assert torch.allclose(got, value, rtol=1e-4, atol=1e-5)
    last = backbone.to(memory_format=torch.channels_last)(x.contiguous(memory_format=torch.channels_last))
    for got, value in zip([*last[0], last[1]], [*backbone(x)[0], expected[-1]], strict=True):
        assert got is not None and torch.allclose(got, value, rtol=1e-3, atol=1e-4)


def test_layers_come_in_requested_order() -> None:
    net, x = build("mlp")
    forward = truncate(net, ["1", "3"], keep_output=False)(x)[0]
    backward = truncate(net, ["3", "1"], keep_output=False)(x)[0]
    assert [f.shape[1] for f in forward] == [12, 8]
    assert torch.equal(forward[0], backward[1]) and torch.equal(forward[1], backward[0])


class Baked(nn.Module):
    """Traces without an error into a graph that is wrong: a tensor is no Tensor while tracing."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Any) -> Tensor:
        x = self.first(x.flatten(1))
        return self.head(2 * x if isinstance(x, Tensor) else x)


def test_example_detects_wrong_trace() -> None:
    net, trial = Baked().eval(), torch.randn(1, 1, 2, 2)
    assert truncate(net, ["first"], keep_output=True).is_traced
    backbone = truncate(net, ["first"], keep_output=True, trial=trial)
    assert not backbone.is_traced
    assert torch.equal(backbone(trial)[1], net(trial))


class Dropping(nn.Module):
    """Drops at random in evaluation mode too."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(64, 16), nn.Linear(16, 2)
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x.flatten(1))
        return self.head(nn.functional.dropout(first, self.p))


def test_rejects_random_output() -> None:
    trial = torch.randn(1, 1, 8, 8)
    torch.manual_seed(0)
    for cut in (["first", "head"], ["head:input"]):
        with pytest.raises(NetworkError, match=r"the same output for the same image.*is dropout always on"):
            truncate(Dropping(0.3), cut, keep_output=False, trial=trial)
    with pytest.raises(NetworkError, match="the same output for the same image"):
        truncate(Dropping(0.3), ["first"], keep_output=True, trial=trial)
    assert truncate(Dropping(0.3), ["first"], keep_output=False, trial=trial).is_traced  # not yet dropped


class Keeps(nn.Module):
    """Keeps what it has computed, one by one and in containers, and a running mean that is a result itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(3, 2)
        self.last: Any = None
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x.flatten(1))
        self.last = {"hidden": [hidden, (hidden * 2,)]}
        self.mean = 0.9 * self.mean + 0.1 * hidden.mean(0)
        return self.second(hidden)


def normalised(by: Callable[[nn.Module], Any]) -> nn.Module:
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    by(net[1])
    return net


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning", "ignore:.*spectral_norm:FutureWarning")
@pytest.mark.parametrize(
    "build",
    [
        lambda: normalised(nn.utils.spectral_norm),
        lambda: normalised(nn.utils.weight_norm),
        lambda: normalised(partial(prune.l1_unstructured, name="weight", amount=0.3)),
        lambda: normalised(nn.utils.parametrizations.spectral_norm),
        Keeps,
    ],
)
def test_a_network_just_trained_is_cut(build: Callable[[], nn.Module]) -> None:
    """A pass with gradients leaves weights or activations in attributes, which ``deepcopy`` refuses."""
    torch.manual_seed(0)
    net, x = build(), torch.randn(5, 1, 2, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    net(x).square().sum().backward()
    optimizer.step()
    net(x)
    first = next(name for name, module in net.named_modules() if isinstance(module, nn.Linear))
    backbone = truncate(net, [first], keep_output=True, trial=x[:1])
    values, logits = hooked(net.eval(), [first], x)
    (features,), got = backbone(x)
    torch.testing.assert_close(features[..., 0], values[first])
    torch.testing.assert_close(got, logits)


def test_rebuild_rejects_wrong_state() -> None:
    net, _ = build("mlp")
    backbone = truncate(net, ["3"], keep_output=False)
    spec, state = backbone.spec(), backbone.state_dict()
    with pytest.raises(NetworkError, match="allow-list"):
        rebuild_backbone(spec, state, ())
    with pytest.raises(NetworkError, match="1 missing"):
        rebuild_backbone(spec, dict(list(state.items())[1:]), FACTORIES)
    with pytest.raises(NetworkError, match="1 unexpected"):
        rebuild_backbone(spec, {**state, "more": torch.zeros(1)}, FACTORIES)
    with pytest.raises(NetworkError, match="finite"):
        rebuild_backbone(spec, {key: value + torch.inf for key, value in state.items()}, FACTORIES)


class Within(nn.Module):
    """Runs a network in a state that its trace would lose."""

    def __init__(self, run: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.run = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)), run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.net, x)


def in_bfloat16(net: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return net(x)


def partly_in_bfloat16(net: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        x = net[0](x)  # type: ignore[index]
    return net[1:](x.float())  # type: ignore[index]


@pytest.mark.parametrize(
    "run",
    [
        in_bfloat16,
        partly_in_bfloat16,
        torch.autocast("cpu", torch.bfloat16)(lambda net, x: net(x)),
        lambda net, x: in_bfloat16(net, x).float(),
        lambda net, x: net(x.to(torch.bfloat16).float()),
        torch.inference_mode()(lambda net, x: net(x)),
        torch.no_grad()(lambda net, x: net(x)),
    ],
)
def test_a_network_that_sets_its_own_state_is_cut(run: Callable[[nn.Module, Tensor], Tensor]) -> None:
    net, x = Within(run).eval(), torch.randn(5, 1, 8, 8)
    names = ["net.0", "net.3:input"]
    with torch.inference_mode():
        values, logits = hooked(net, names, x)
        features, got = truncate(net, names, keep_output=True, trial=x[:1])(x)
    torch.testing.assert_close(features[0], values["net.0"].flatten(2))
    torch.testing.assert_close(features[1][..., 0], values["net.3:input"])
    torch.testing.assert_close(got, logits)


class Meanwhile(nn.Module):
    """Runs a function on another thread each time its forward pass is entered."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 2)
        self.run = function

    def __deepcopy__(self, memo: dict[int, Any]) -> Meanwhile:
        return self

    def forward(self, x: Tensor) -> Tensor:
        thread = threading.Thread(target=self.run)
        thread.start()
        thread.join(0.5)
        return self.second(self.first(x))


def test_network_runs_while_another_is_traced() -> None:
    served, x, answers = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.ones(1, 2), []
    cut_graph(Meanwhile(lambda: answers.append(served(x))), ["first"], keep_output=False)
    assert len(answers) == 1
    assert torch.equal(answers[0], served(x))


def test_concurrent_traces_restore_torch() -> None:
    call, outer_is_done, cut = nn.Module.__call__, threading.Event(), []
    inner = Meanwhile(lambda: outer_is_done.wait(60))
    outer = Meanwhile(lambda: cut.append(cut_graph(inner, ["first"], keep_output=False)))
    cut_graph(outer, ["first"], keep_output=False)
    outer_is_done.set()
    end = time.monotonic() + 60
    while not cut and time.monotonic() < end:
        time.sleep(0.01)
    assert len(cut) == 1
    assert nn.Module.__call__ is call


def test_the_first_of_several_outputs_is_the_layers() -> None:
    class Attending(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return 2 * x, x.softmax(1)

    class First(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
            return pair[0] + 1

    net = nn.Sequential(Attending(), First()).eval()
    images = torch.randn(2, 3)
    hooked = HookedNetwork(net, ["0", "1"], HookPlan(), keep_output=False)(images)
    for twice, plus_one in (hooked, cut_graph(net, ["0", "1"], keep_output=False)(images)):
        assert torch.equal(twice, 2 * images) and torch.equal(plus_one, 2 * images + 1)


def test_threads_do_not_swap_what_hooks_catch() -> None:
    class Slow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.kept = x
            time.sleep(0.01)
            return 2 * self.kept

    net = nn.Sequential(nn.Identity(), Slow())
    hooked = copy.deepcopy(HookedNetwork(net, ["0", "1"], HookPlan(), keep_output=False))
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(hooked, [torch.full((1,), float(index)) for index in range(12)]))
    assert [(float(once), float(twice)) for once, twice in answers] == [(index, 2 * index) for index in range(12)]


IMAGES = torch.zeros(2, 1, 28, 28)


@pytest.mark.parametrize(
    "wrapped", [torch.compile, nn.DataParallel, lambda net: torch.compile(nn.DataParallel(torch.compile(net)))]
)
def test_what_only_runs_a_network_is_skipped(wrapped: Callable[[Any], nn.Module]) -> None:
    net = tiny.network().eval()
    copied = readable_copy(wrapped(net))
    assert [name for name, _ in copied.named_modules()] == [name for name, _ in net.named_modules()]
    assert torch.equal(copied(IMAGES), net(IMAGES))


@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16, torch.double])
def test_other_precisions_become_single(dtype: torch.dtype) -> None:
    net = tiny.network().to(dtype)
    copied = readable_copy(net)
    assert copied(IMAGES).dtype == torch.float32
    assert {parameter.dtype for parameter in net.parameters()} == {dtype}, "the network itself stays as it is"
    single = tiny.network()
    single.register_buffer("mean", torch.zeros(1, dtype=torch.double))
    assert readable_copy(single).get_buffer("mean").dtype == torch.double


@pytest.mark.parametrize("name", nightly(CASES))
@torch.inference_mode()
def test_layers_and_logits_equal_hooks_and_survive_a_bundle(name: str) -> None:
    net, x = build(name)
    infos = list_layers(net, x[:1])
    layers = [info.name for info in infos]
    values, logits = hooked(net, layers, x)
    whole = truncate(net, layers, keep_output=True, trial=x[:1])
    assert whole.is_traced == (name not in ("early_exit", "loop"))
    features, out = whole(x)
    assert out is not None and torch.equal(out, logits)
    for info, feature in zip(infos, features, strict=True):
        assert feature.shape == (3, *info.shape)
        assert torch.equal(feature, canonical(values[info.name], info.form)), info.name

    middle = (len(infos) - 1) // 2
    backbone, expected = truncate(net, [layers[middle]], keep_output=False, trial=x[:1]), features[middle]
    (feature,), logits = backbone(x)
    assert logits is None and torch.equal(feature, expected)
    for batch in (x[:1], torch.cat([x, x])):
        assert torch.allclose(backbone(batch)[0][0][:1], expected[:1], rtol=1e-4, atol=1e-5)
    if name != "loop":
        assert parameters(backbone) < parameters(net)

    before = torch.get_rng_state()
    spec = json.loads(json.dumps(backbone.spec()))
    twin = rebuild_backbone(spec, backbone.state_dict(), FACTORIES)
    assert torch.equal(torch.get_rng_state(), before)
    assert twin.is_traced == backbone.is_traced and torch.equal(twin(x)[0][0], expected)
    assert twin.state_dict().keys() == backbone.state_dict().keys()


@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("tokens", [2, 3, 4])
@torch.inference_mode()
def test_tokens_before_images_are_read_as_after_them(tokens: int, loops: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced, and cut by hooks where the control flow depends on data."""
    if loops:
        forward = tiny.Attends.forward
        monkeypatch.setattr(tiny.Attends, "forward", lambda self, x: forward(self, x) if float(x.sum()) < 1e9 else x)
    size = {"tokens": tokens, "in_channels": 3}
    first, second = (
        load_network("tests.tiny:Tokens", num_classes=5, model_args={**size, "first": value}) for value in (True, False)
    )
    second.load_state_dict(first.state_dict())
    x = torch.randn(3, 3, 28, 28)
    for granularity in ("operations", "blocks", "all"):
        infos, expected = (list_layers(net, x[:1], granularity=granularity) for net in (first, second))
        assert infos == expected
    layers = ["patch", "blocks.1", "blocks.2", "head:input"]
    of_first, of_second = (truncate(net, layers, keep_output=True, trial=x[:1]) for net in (first, second))
    assert of_first.is_traced == (not loops)
    assert of_first.spec()["tokens_first"] == ["blocks.1", "blocks.2"] and "tokens_first" not in of_second.spec()
    rebuilt = rebuild_backbone(json.loads(json.dumps(of_first.spec())), of_first.state_dict(), ["tests.tiny:Tokens"])
    for batch in (x, x[:1], x[:2], x[[0, 1, 2, 0]]):
        expected, _ = of_second(batch)
        for backbone in (of_first, of_first.fused("fp32"), rebuilt):
            torch.testing.assert_close(backbone(batch)[0], expected)


class Gives(nn.Module):
    """Returns what it is told to, behind a layer of five dimensions."""

    def __init__(self, form: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.cube, self.form = nn.Unflatten(1, (1, 2, 2, 1)), form

    def forward(self, x: Tensor) -> Any:
        return self.form(self.cube(x.flatten(1)))


SMALL = torch.zeros(1, 1, 2, 2)
LOGITS = Gives(lambda cube: {"logits": cube.flatten(1)})


def uncopied() -> nn.Module:
    net = Baked()
    net.first.turn = threading.Lock()  # type: ignore[assignment]
    return net


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")
@pytest.mark.parametrize(
    ("cut", "said"),
    [
        (lambda: truncate(build("mlp")[0], ["first"], keep_output=False), "no layer 'first'"),
        (lambda: truncate(build("resnet18")[0], ["layer5.0"], keep_output=False), "did you mean layer"),
        (lambda: truncate(build("mlp")[0], [], keep_output=False), "at least one"),
        (lambda: truncate(build("mlp")[0], ["1", "1"], keep_output=False), "each once"),
        (lambda: truncate(build("early_exit")[0], ["dark"], keep_output=False), "pass a trial input"),
        (lambda: truncate(LOGITS, ["cube"], keep_output=False)(SMALL), "a map, tokens or a vector"),
        (lambda: truncate(LOGITS, ["cube"], keep_output=True, trial=SMALL)(SMALL), "only logits"),
        (lambda: truncate(Baked(), ["first"], keep_output=False).spec(), "no name builds"),
        (lambda: truncate(uncopied(), ["first"], keep_output=False), r"cannot be copied: .*'first\.turn'"),
        (lambda: readable_copy(torch.jit.trace(tiny.network().eval(), IMAGES)), r'load_network\("onnx:net\.onnx"\)'),
        *((lambda other=other: readable_copy(other), r"load_network") for other in ("net.pth", {}, lambda x: x)),
    ],
)
def test_what_cannot_be_cut_is_refused(cut: Callable[[], object], said: str) -> None:
    with pytest.raises((NetworkError, UsageError), match=said):
        cut()
