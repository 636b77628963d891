"""``psc-fit`` on whole networks of every family: fit, save, load, predict, on the CPU with random weights."""

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from psc_core.cli import fit as cli
from psc_core.data.open import open_dataset
from psc_core.images.preprocess import PRESETS, Preprocess
from psc_core.model import PSC
from psc_core.network.load import load_network
from psc_core.settings import PRECISIONS
from tests.fake_gpu import assert_steps_on_gpu

CLASSES = 10
PER_CLASS = {"train": 6, "val": 5, "test": 2}


class Checked(nn.Module):
    """A network that cannot be traced: its forward pass looks at its input."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 12, 3, stride=2, padding=1), nn.ReLU(inplace=True))
        self.body = nn.Sequential(nn.Conv2d(12, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
        self.tail = nn.Conv2d(16, 24, 3, stride=2, padding=1)
        self.fc = nn.Linear(24, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        if not bool(x.isfinite().all()):
            raise ValueError("expected finite images")
        return self.fc(self.tail(self.body(self.stem(x))).relu().mean((2, 3)))


def untraceable(num_classes: int = CLASSES) -> nn.Module:
    return Checked(num_classes)


@dataclass(frozen=True)
class Case:
    """A network as ``--model``, pixels of a side, its ``--model-arg``, and whether it is cut as a graph."""

    spec: str
    size: int
    model_args: tuple[str, ...] = ()
    is_traced: bool = True

    @property
    def id(self) -> str:
        return self.spec.rpartition(":")[2]


TINY = Case("tests.tiny:network", 32, ("in_channels=3",))
CASES = [
    Case("torchvision:resnet50", 64),
    Case("torchvision:vgg16_bn", 32),
    Case("torchvision:convnext_tiny", 64),
    Case("torchvision:vit_b_16", 64, ("image_size=64",)),
    Case("torchvision:swin_t", 64),
    Case("tests.nightly.test_architectures:untraceable", 32, is_traced=False),
]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory, data_root: Path) -> Path:
    """``train/``, ``val/`` and ``test/`` in the ImageFolder layout, from the CIFAR-10 subset."""
    root = tmp_path_factory.mktemp("images")
    with tarfile.open(data_root / "cifar10-jpeg.tar.gz") as tar:
        by_class: dict[str, list[tarfile.TarInfo]] = {}
        for member in sorted(tar.getmembers(), key=lambda m: m.name):
            if member.isfile() and "/train/" in member.name:
                by_class.setdefault(member.name.split("/")[-2], []).append(member)
        assert len(by_class) == CLASSES
        for name, members in by_class.items():
            rest = iter(members)
            for split, count in PER_CLASS.items():
                folder = root / split / name
                folder.mkdir(parents=True)
                for _ in range(count):
                    member = next(rest)
                    handle = tar.extractfile(member)
                    assert handle is not None
                    (folder / Path(member.name).name).write_bytes(handle.read())
    return root


@dataclass(frozen=True)
class Setup:
    case: Case
    net: nn.Module
    folders: Path
    weights: Path

    def run(self, monkeypatch: pytest.MonkeyPatch, out: Path, *more: str) -> tuple[PSC, PSC]:
        """``psc-fit``; the PSC that it wrote, as it was when written and as it is loaded."""
        fitted: list[PSC] = []
        save = PSC.save

        def remembered(psc: PSC, path: Path, **options: bool) -> object:
            fitted.append(psc)
            return save(psc, path, **options)

        monkeypatch.setattr(PSC, "save", remembered)
        args = ["--model", self.case.spec, "--weights", str(self.weights), "--preset", "imagenet", "--device", "cpu"]
        args += ["--train", str(self.folders / "train"), "--val", str(self.folders / "val"), "--batch-images", "32"]
        args += ["--size", str(self.case.size), "--out", str(out), "--no-report", *more]
        for pair in self.case.model_args:
            args += ["--model-arg", pair]
        assert cli.main(args) == 0
        return fitted[0], PSC.load(out, device="cpu", allow_factories=(self.case.spec,))


def preprocess_of(case: Case) -> Preprocess:
    return replace(PRESETS["imagenet"], height=case.size, width=case.size, resize=None)


def images_of(case: Case, folders: Path) -> Tensor:
    preprocess = preprocess_of(case)
    return next(open_dataset(str(folders / "test"), split="test", preprocess=preprocess).batches(64)).images


def set_up(case: Case, folders: Path, where: Path) -> Setup:
    """Random weights, none of them at a special value (zero heads, unit norms), saved as safetensors.

    Logits are standardised over some images, or a deep network's softmax would be the same 0s and 1 for all.
    """
    torch.manual_seed(0)
    arguments = dict(pair.split("=") for pair in case.model_args)
    net = load_network(case.spec, num_classes=CLASSES, model_args={k: int(v) for k, v in arguments.items()})
    with torch.no_grad():
        for parameter in net.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
        logits = net(preprocess_of(case).standardise(images_of(case, folders)))
        last = [module for module in net.modules() if isinstance(module, nn.Linear)][-1]
        last.weight /= logits.std(0)[:, None]
        last.bias.sub_(logits.mean(0)).div_(logits.std(0))
    save_file(net.state_dict(), where / "net.safetensors")
    return Setup(case, net, folders, where / "net.safetensors")


def assert_loaded_is_fitted(fitted: PSC, loaded: PSC, images: Tensor) -> None:
    with torch.inference_mode():
        expected = fitted.outputs(fitted.pipeline(images[:8]))
        for size in (1, 3, 8):
            got = fitted.outputs(torch.cat([loaded.pipeline(part) for part in images[:8].split(size)]))
            assert bool(got.packed.isfinite().all())
            torch.testing.assert_close(got.probabilities, expected.probabilities, rtol=1e-5, atol=1e-5)
            for name in ("predictive_entropy", "epistemic", "log_density"):
                torch.testing.assert_close(got[name], expected[name], rtol=1e-5, atol=1e-5)
            # A p-value is a rank: the last digit of a density may cross one calibration score.
            step = 1.5 / (len(fitted.calibration) + 1)
            torch.testing.assert_close(got["ood_p_value"], expected["ood_p_value"], rtol=0, atol=step)


def assert_original_is_the_network(setup: Setup, psc: PSC, images: Tensor) -> None:
    """``--predictions original`` gives the original network's softmax at its temperature."""
    with torch.inference_mode():
        logits = setup.net(psc.preprocess.standardise(images))
        expected = (logits / psc.pipeline.scorer.head.state_dict()["temperature"]).softmax(1)
    assert float(logits.softmax(1).std(0).min()) > 0.01  # images do differ
    assert psc.predictions == "original"
    torch.testing.assert_close(psc.predict(images).probabilities, expected, rtol=0, atol=1e-5)


def check(setup: Setup, monkeypatch: pytest.MonkeyPatch, where: Path) -> None:
    """Both kinds of predictions, the second at the layer that the first chose."""
    images = images_of(setup.case, setup.folders)
    fitted, loaded = setup.run(monkeypatch, where / "psc")
    assert loaded.backbone.is_traced == setup.case.is_traced
    assert loaded.version and len(loaded.classes) == CLASSES
    assert_loaded_is_fitted(fitted, loaded, images)
    for precision in PRECISIONS:
        assert_steps_on_gpu(loaded, precision)
    monkeypatch.undo()

    pattern = "^(" + "|".join(name.replace(".", r"\.") for name in loaded.layers) + ")$"
    fitted, loaded = setup.run(monkeypatch, where / "original", "--predictions", "original", "--layers", pattern)
    assert_loaded_is_fitted(fitted, loaded, images)
    assert_original_is_the_network(setup, loaded, images)
    for precision in PRECISIONS:
        assert_steps_on_gpu(loaded, precision)


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """A folder emptied afterwards: weights and bundles of a VGG take gigabytes."""
    yield tmp_path
    for file in tmp_path.rglob("*.safetensors"):
        file.unlink()


def test_small_network(folders: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(set_up(TINY, folders, scratch), monkeypatch, scratch)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_family(case: Case, folders: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(set_up(case, folders, scratch), monkeypatch, scratch)
