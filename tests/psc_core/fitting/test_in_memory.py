import copy
import multiprocessing
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset
from torchvision import transforms
from torchvision.datasets import ImageFolder

from psc_core import PRESETS, PSC, PSCRegressor, fit_projection, fit_psc, measure_collapse, open_dataset, open_loader
from psc_core.bundle import HISTORY
from psc_core.data.dataset import ImageDataset, ImageSource, known_values
from psc_core.errors import DataError, LoaderWarning, NetworkError, UsageError
from psc_core.images.preprocess import Preprocess
from psc_core.model import TRIAL_IMAGES
from psc_core.tasks.regression import width_without_image
from tests import tiny
from tests.conftest import TinyJob
from tests.folders import transformer
from tests.opened import loaded, opened

Splits = tuple[TensorDataset, TensorDataset]
MNIST = PRESETS["mnist"]
TRANSFORM = transforms.Compose(
    [transforms.Grayscale(), transforms.ToTensor(), transforms.Normalize(MNIST.mean, MNIST.std)]
)
STATISTICS: dict[str, Any] = {"mean": MNIST.mean, "std": MNIST.std}
QUICK: dict[str, Any] = {"layer": "4", "head": "duq", "c_proj": 4, "d_proj": 2}


def pairs(data: ImageDataset, labels: torch.Tensor | None = None) -> TensorDataset:
    inputs = torch.cat([data.preprocess.standardise(batch.images) for batch in data.batches(64)])
    return TensorDataset(inputs, data.first_labels() if labels is None else labels)


@pytest.fixture(scope="module")
def train(train: ImageDataset) -> ImageDataset:
    return train.subset(torch.arange(600))


@pytest.fixture(scope="module")
def splits(train: ImageDataset, val: ImageDataset) -> Splits:
    return pairs(train), pairs(val)


@pytest.fixture(scope="module")
def test() -> TensorDataset:
    return pairs(opened("mnist"))


@pytest.fixture(scope="module")
def fitted(net: nn.Module, splits: Splits) -> PSC:
    return PSC.fit(net, *splits, **STATISTICS, **QUICK)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, train: ImageDataset, val: ImageDataset) -> Path:
    root = tmp_path_factory.mktemp("folders")
    for split, data in (("train", train), ("val", val)):
        for index, label in enumerate(data.first_labels().tolist()):
            path = root / split / data.classes[label] / f"{index:04}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(data.image(index)[0]).save(path)
    return root


@pytest.fixture(scope="module")
def by_folders(net: nn.Module, folders: Path) -> PSC:
    images = [open_dataset(str(folders / split), split=split, preprocess=MNIST) for split in ("train", "val")]
    chosen = measure_collapse(net, *images, device="cpu").choose()
    projection = fit_projection(net, chosen, *images, device="cpu")
    return fit_psc(net, chosen, projection, *images, device="cpu")


def test_inputs_that_nobody_compared_are_told_once(net: nn.Module, splits: Splits, fitted: PSC) -> None:
    train, val = map(iter, splits)
    with pytest.warns(LoaderWarning) as told:
        PSC.fit(net, train, val, **STATISTICS, **QUICK)
    assert sum("data were not compared" in str(each.message) for each in told) == 1
    with pytest.warns(LoaderWarning, match="the calibration data were not compared"):
        fitted.calibrate(iter(splits[1]))


@pytest.mark.parametrize("workers", [0, 2])
def test_equals_folders(net: nn.Module, folders: Path, by_folders: PSC, test: TensorDataset, workers: int) -> None:
    started = {"num_workers": workers, "multiprocessing_context": "forkserver"} if workers else {}
    multiprocessing.set_forkserver_preload(["torch", "torchvision.datasets"])  # Workers start from one that has them.
    data = [ImageFolder(str(folders / split), TRANSFORM) for split in ("train", "val")]
    loaders = [DataLoader(each, batch_size=50, **started) for each in data]  # type: ignore[arg-type]
    in_memory = PSC.fit(net, *loaders, **STATISTICS)
    assert in_memory.layers == by_folders.layers and in_memory.checks == by_folders.checks
    inputs = test.tensors[0][:200]
    expected, got = by_folders.predict(MNIST.to_pixels(inputs)), in_memory(inputs)
    assert got.decision == expected.decision
    for name in ("probabilities", "predictive_entropy", "log_density", "epistemic"):
        torch.testing.assert_close(getattr(got, name), getattr(expected, name), rtol=1e-4, atol=1e-4, msg=name)
    # The score of checks is made of empirical p-values, which are steep where many readings lie.
    torch.testing.assert_close(got.ood_score, expected.ood_score, rtol=2e-3, atol=2e-3)
    rank = 1.5 / (len(by_folders.calibration) + 1)  # Rounding may pass one calibration image.
    torch.testing.assert_close(got.ood_p_value, expected.ood_p_value, rtol=0, atol=rank)
    pictures = [Image.fromarray(pixels.numpy()) for pixels in MNIST.to_pixels(inputs)[:, 0]]
    assert in_memory(pictures).decision == expected.decision


def test_order_does_not_matter(net: nn.Module, splits: Splits, fitted: PSC) -> None:
    """Which images calibrate depends on the order, so only the training images are shuffled."""
    train, val = splits
    shuffled = DataLoader(train, batch_size=33, shuffle=True, generator=torch.Generator().manual_seed(1))
    other = PSC.fit(net, shuffled, val, **STATISTICS, **QUICK)
    inputs = val.tensors[0]
    torch.testing.assert_close(other(inputs).log_density, fitted(inputs).log_density, rtol=1e-3, atol=1e-3)
    assert np.mean([a == b for a, b in zip(other(inputs).decision, fitted(inputs).decision, strict=True)]) > 0.98


def test_the_network_stays_as_it_is(splits: Splits, test: TensorDataset) -> None:
    first, last = (nn.ReLU(inplace=True), nn.Conv2d(1, 8, 3, stride=4)), (nn.Flatten(), nn.Linear(392, 10))
    net = nn.Sequential(*first, nn.BatchNorm2d(8), nn.Dropout(), *last)
    net[4].eval()
    before, inputs = copy.deepcopy(net.state_dict()), splits[0].tensors[0].clone()
    settings = STATISTICS | QUICK | {"layer": "1"}
    psc = PSC.fit(net, *splits, **settings)
    assert net.training and net[3].training and not net[4].training
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert torch.equal(splits[0].tensors[0], inputs), "the first layer changes its input in place"
    expected = psc(test.tensors[0][:20])
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    assert torch.equal(psc(test.tensors[0][:20]).outputs.packed, expected.outputs.packed)
    psc.probe()


@pytest.mark.parametrize("channels", [1, 3])
def test_a_network_that_flattens_by_view(splits: Splits, test: TensorDataset, tmp_path: Path, channels: int) -> None:
    torch.manual_seed(0)
    data = [
        TensorDataset(inputs.expand(-1, channels, -1, -1), labels)
        for inputs, labels in (split.tensors for split in splits)
    ]
    statistics = {name: value * channels for name, value in STATISTICS.items()}
    psc = PSC.fit(tiny.LeNet(10, channels), *data, layer="conv2", head="duq", **statistics)
    assert psc.pipeline.scorer.backbone.memory_format == torch.channels_last
    inputs = test.tensors[0][:50].expand(-1, channels, -1, -1)
    expected, got = psc(inputs), PSC.load(psc.save(tmp_path / "view") and tmp_path / "view", device="cpu")(inputs)
    assert got.decision == expected.decision
    for name in ("probabilities", "log_density"):
        torch.testing.assert_close(getattr(got, name), getattr(expected, name), rtol=1e-4, atol=1e-4, msg=name)


def test_without_mean_and_std_only_inputs_are_known(
    net: nn.Module, splits: Splits, fitted: PSC, test: TensorDataset, tmp_path: Path
) -> None:
    with pytest.warns(UserWarning, match=r"cannot be saved: .*fit\(…, mean=…, std=…\)"):
        psc = PSC.fit(net, *splits, **QUICK)
    inputs = test.tensors[0][:100]
    torch.testing.assert_close(psc(inputs).log_density, fitted(inputs).log_density)
    pixels = torch.zeros(30, 1, 28, 28, dtype=torch.uint8)
    for use in (lambda: psc([np.zeros((28, 28), np.uint8)]), lambda: psc.calibrate([(pixels, torch.zeros(30).long())])):
        with pytest.raises(UsageError, match="does not know how pixels become inputs"):
            use()
    with pytest.raises(UsageError, match=r"how files become inputs; .* fit\(…, mean=…, std=…\), or preprocess=…"):
        psc.save(tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


def test_a_transformer_names_classes_that_nobody_named() -> None:
    pytest.importorskip("transformers")
    names, net = ("cat", "dog"), transformer("vit", ("cat", "dog"))
    images = [(torch.rand(3, 32, 32) * 2 - 1, i % 2) for i in range(200)]
    settings: dict[str, Any] = {"layer": "model.vit.layers.0", "head": "duq"}
    with pytest.warns(UserWarning, match="cannot be saved"):
        assert PSC.fit(net, images[:100], images[100:], **settings).classes == names
        net.config.id2label = {0: "LABEL_0", 1: "LABEL_1"}
        assert PSC.fit(net, images[:100], images[100:], **settings).classes == ("0", "1")


class Pets(TensorDataset):
    """Bright cats and dark dogs, by labels in the order of names."""

    classes = ("cat", "dog")

    def __init__(self, count: int) -> None:
        labels = torch.arange(count) % 2
        super().__init__(torch.rand(count, 3, 32, 32) * 0.5 + 0.5 * (labels == 0)[:, None, None, None], labels)


def test_classes_are_in_the_order_of_a_transformers_outputs() -> None:
    pytest.importorskip("transformers")
    net, train, val = transformer("vit", ("dog", "cat")), Pets(200), Pets(101)
    settings: dict[str, Any] = {"mean": 0.5, "std": 0.5, "layer": "model.vit.layers.0", "head": "duq"}
    with pytest.warns(UserWarning, match="classes are in the order of the network's outputs, by their names"):
        psc = PSC.fit(net, DataLoader(train, batch_size=8), val, **settings)
    assert psc.classes == ("dog", "cat")
    for data in (val, open_loader(val, mean=0.5, std=0.5)):
        again = psc.calibrate(data)
        assert again.classes == psc.classes and again.report["metrics"]["accuracy"] > 0.9
    shown = psc(val.tensors[0]).labels
    assert sum(name == val.classes[label] for name, label in zip(shown, val.tensors[1], strict=True)) > 90
    with pytest.raises(DataError, match=r"unknown: cow; missing: dog"):
        PSC.fit(net, *(open_loader(each, mean=0.5, std=0.5, classes=("cat", "cow")) for each in (train, val)))


class Branching(nn.Sequential):
    """What it computes depends on values, so no graph can hold it."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = super().forward(images if images.mean() > -9 else -images)
        return logits


@dataclass(frozen=True)
class Damaged:
    """Images of which the first cannot be decoded; counts how often the others are."""

    inner: ImageSource
    reads: Counter[int] = field(default_factory=Counter)

    def __len__(self) -> int:
        return len(self.inner)

    def read(self, index: int, preprocess: Preprocess) -> npt.NDArray[np.uint8]:
        if index == 0:
            raise DataError("the first image is damaged")
        self.reads[index] += 1
        return self.inner.read(index, preprocess)

    def fingerprint(self, index: int) -> bytes:
        return self.inner.fingerprint(index)

    def modified_ns(self, index: int) -> int:
        return self.inner.modified_ns(index)


def test_files_are_decoded_once_and_damaged_ones_skipped(net: nn.Module, folders: Path) -> None:
    images = [open_dataset(str(folders / split), split=split, preprocess=MNIST) for split in ("train", "val")]
    sources = [Damaged(each.source) for each in images]
    data = [replace(each, source=source) for each, source in zip(images, sources, strict=True)]
    with pytest.warns(UserWarning, match="left out: the first image is damaged; .*; left out 2 "):
        psc = PSC.fit(net, *data, **QUICK)
    assert all(source.reads == dict.fromkeys(range(1, len(source)), 1) for source in sources)
    assert len(psc.calibration) == len(images[1]) // 2  # half of those that are left, rounded up


def test_a_network_that_no_bundle_can_hold_is_told_of_first(splits: Splits, capfd: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    layers = (nn.Conv2d(1, 8, 3, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(392, 10))
    settings = {**QUICK, **STATISTICS, "layer": "0"}
    with pytest.warns(UserWarning, match=r"cannot be saved: the network after 0 has no ONNX model: .* = load_network"):
        psc = PSC.fit(Branching(*layers), *splits, **settings)
    printed = "".join(capfd.readouterr())
    assert "def forward" not in printed and "user code" not in printed
    assert len(psc(splits[1].tensors[0][:5])) == 5
    with pytest.raises(NetworkError, match="has no ONNX model"):
        psc.save("never")
    PSC.fit(nn.Sequential(*layers), *splits, **settings)  # Without a warning.


@pytest.mark.filterwarnings("ignore:the images show for no ambiguity threshold")
def test_calibration_on_other_images(fitted: PSC, test: TensorDataset, tmp_path: Path) -> None:
    calibrated = fitted.calibrate(DataLoader(Subset(test, range(400)), batch_size=64, shuffle=True))
    inputs = test.tensors[0][400:]
    before, after = fitted(inputs), calibrated(inputs)
    for name in ("log_density", "ood_score", "predictive_entropy", "probabilities"):
        assert torch.equal(getattr(before, name), getattr(after, name))
    scores = calibrated(test.tensors[0][:400]).ood_score
    expected = (1 + (scores[None] >= after.ood_score[:, None]).sum(1)) / 401
    torch.testing.assert_close(after.ood_p_value, expected.float())
    of_checks = torch.stack(list(calibrated(test.tensors[0][:400]).checks.values())).double()
    torch.testing.assert_close(of_checks.mean(1), torch.full((3,), 402 / 802, dtype=torch.float64), atol=2e-3, rtol=0)
    assert (len(calibrated.calibration), len(fitted.calibration)) == (400, len(fitted.calibration))
    assert calibrated.policy.alpha == fitted.policy.alpha and calibrated.report["metrics"]["validation_images"] == 400
    assert calibrated.report["metrics"]["projection"] == fitted.report["metrics"]["projection"]
    assert calibrated.trial is not None and len(calibrated.trial) == TRIAL_IMAGES
    manifests = [model.save(tmp_path / name) for name, model in (("one", fitted), ("two", calibrated))]
    assert manifests[0].version != manifests[1].version and HISTORY not in manifests[0].provenance
    (entry,) = manifests[1].provenance[HISTORY]
    assert [entry[name] for name in ("labels", "calibrated_on", "effective_sample_size")] == [400] * 3
    again = loaded(tmp_path / "two")
    assert again(inputs).decision == after.decision
    from_bundle = PSC.load(tmp_path / "one", device="cpu", allow_factories=["tests.tiny:network"])
    twice = from_bundle.calibrate(Subset(test, range(400)))
    assert twice(inputs).decision == after.decision
    history = twice.calibrate(Subset(test, range(50))).report["provenance"][HISTORY]
    assert [each["from"] for each in history] == [manifests[0].version, ""]
    assert history[0]["sha256"] != history[1]["sha256"]


def test_a_calibration_that_shows_no_risk_accepts_nothing(fitted: PSC, test: TensorDataset) -> None:
    images, labels = test.tensors
    wrong = TensorDataset(images, (labels + 1) % 10)
    with pytest.warns(UserWarning, match="NO BETTER THAN GUESSING.*NOTHING IS ACCEPTED"):
        again = fitted.calibrate(wrong)
    assert again.policy.risk is None and "accept" not in again(images).decision
    with pytest.raises(UsageError, match=r"risk of 0\.2 cannot be shown"):
        fitted.calibrate(wrong, risk=0.2)


def test_a_network_that_guesses_is_named_before_the_fit(net: nn.Module, splits: Splits) -> None:
    train, val = splits
    shuffled = TensorDataset(val.tensors[0], val.tensors[1].roll(7))
    with pytest.warns(UserWarning, match="THE NETWORK IS NO BETTER THAN GUESSING"):
        PSC.fit(net, train, shuffled, layer="4", c_proj=4, d_proj=2, **STATISTICS)


def test_a_head_that_is_far_worse_than_the_network_is_said(angle_job: TinyJob) -> None:
    few, val = opened("rotated-mnist", "train").subset(torch.arange(0, 200, 8)), opened("rotated-mnist", "val")
    quick = {"layer": "4", "c_proj": 4, "d_proj": 2, "coverage": 0.9}
    with pytest.warns(UserWarning, match=r"head's RMSE is .* the network's own was .* predictions='original'"):
        PSCRegressor.fit(angle_job.net, few, val, **quick)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the head's RMSE")
        PSCRegressor.fit(angle_job.net, few, val, predictions="original", **quick)


def test_a_regression(angle_job: TinyJob, tmp_path: Path) -> None:
    sets = {split: opened("rotated-mnist", split) for split in ("train", "val", "test")}
    loaders = {split: pairs(data, data.values) for split, data in sets.items()}
    with pytest.raises(UsageError, match="a regression does not read risk"):
        PSCRegressor.fit(angle_job.net, loaders["train"], loaders["val"], risk=0.1)
    model = PSCRegressor.fit(
        angle_job.net, loaders["train"], DataLoader(loaders["val"], batch_size=7), target="angle", unit="degrees",
        layer="4", c_proj=4, d_proj=2, coverage=0.9, **STATISTICS,
    )  # fmt: skip
    assert str(model.target) == "angle, degrees"
    inputs = loaders["test"].tensors[0][:50]
    assert model(inputs).interval.shape == (50, 2) and len(model(inputs).to_dict()) == 50
    calibrated = model.calibrate(loaders["test"])
    assert torch.equal(calibrated(inputs).mean, model(inputs).mean)
    with pytest.raises(UsageError, match="a regression does not read risk"):
        model.calibrate(loaders["test"], risk=0.1)
    assert len(calibrated.calibration) == len(loaders["test"]) and calibrated.policy.coverage == 0.9
    narrow = model.calibrate(loaders["test"], coverage=0.5)  # Its width is the calibration's, as none is asked for.
    assert narrow.policy.max_width == pytest.approx(
        width_without_image(known_values(sets["test"].values), 0.5), rel=1e-6
    )
    assert "an interval that holds 50% of the numbers" in narrow.policy.headline(narrow.report["metrics"])
    asked = narrow.calibrate(loaders["test"], max_width=20.0).calibrate(loaders["test"], coverage=0.9)
    assert asked.policy.max_width == 20.0 and "width_without_image" not in asked.report["metrics"]
    with pytest.raises(DataError, match=r"expected numbers of angle, degrees in .*, got angle, radians"):
        target = model.target.model_copy(update={"unit": "radians"})
        model.calibrate(replace(sets["test"], target=target))


def test_classes_are_the_networks_outputs_or_named(net: nn.Module, splits: Splits) -> None:
    train, val = splits
    five = [Subset(each, (each.tensors[1] < 5).nonzero().flatten().tolist()) for each in splits]
    with pytest.raises(NetworkError, match=r"\(1, 5\) for one image, got \(1, 10\); .*classes="):
        PSC.fit(net, *five)
    with pytest.raises(NetworkError, match=r"\(1, 5\) for one image, got \(1, 10\)"):
        PSC.fit(net, *five, classes=tuple("abcde"), predictions="original")
    with pytest.warns(UserWarning, match=r"the head will predict, .* of shape \(1, 5\) for one image, got \(1, 10\)"):
        named = PSC.fit(net, *five, classes=tuple("abcde"), **STATISTICS, **QUICK)
    assert named.classes == tuple("abcde") and set(named(val.tensors[0][:9]).labels) <= {*"abcde"}
    with pytest.raises(DataError, match="expected labels in 0…4"):
        PSC.fit(net, train, val, classes=tuple("abcde"))
    for last, fault in ((nn.Softmax(1), "got probabilities"), (nn.Flatten(0), r"got \(10,\); keep both axes")):
        with pytest.raises(NetworkError, match=fault):
            PSC.fit(nn.Sequential(net, last), train, val, classes=tuple("abcdefghij"))


def test_opened_data_and_loaders_go_together(net: nn.Module, train: ImageDataset, splits: Any, fitted: PSC) -> None:
    psc = PSC.fit(net, train, splits[1], **QUICK)
    assert torch.equal(psc(splits[1].tensors[0]).log_density, fitted(splits[1].tensors[0]).log_density)


def test_a_target_that_a_data_set_has_is_refused(angle_job: TinyJob) -> None:
    train, val = (opened("rotated-mnist", split) for split in ("train", "val"))
    quick: dict[str, Any] = {"layer": "4", "c_proj": 4, "d_proj": 2}
    with pytest.raises(UsageError, match="what their labels mean; leave out target, unit, or give"):
        PSCRegressor.fit(angle_job.net, train, val, target="tilt", unit="radians", **quick)
    loader = DataLoader(pairs(val, val.values), batch_size=64)
    assert PSCRegressor.fit(angle_job.net, train, loader, **quick).target == train.target


@contextmanager
def set_by_the_program(kind: str) -> Iterator[None]:
    with ExitStack() as left:
        if kind == "float64":
            torch.set_default_dtype(torch.float64)
            left.callback(torch.set_default_dtype, torch.float32)
        elif kind == "device":
            torch.set_default_device("meta")
            left.callback(torch.set_default_device, None)
        elif kind == "modes":
            left.enter_context(torch.autocast("cpu", torch.bfloat16))
            left.enter_context(torch.inference_mode())
        else:
            torch.use_deterministic_algorithms(mode=True)
            left.callback(torch.use_deterministic_algorithms, mode=False)
        yield


@pytest.mark.parametrize("kind", ["float64", "device", "modes", "deterministic"])
def test_what_the_program_has_set_changes_no_number(
    net: nn.Module, splits: Splits, fitted: PSC, test: TensorDataset, kind: str, tmp_path: Path
) -> None:
    inputs = test.tensors[0][:50]
    expected = fitted(inputs).probabilities
    p_value = fitted.calibrate(splits[1], risk=0.3)(inputs).ood_p_value
    with set_by_the_program(kind):
        psc = PSC.fit(net, *splits, **STATISTICS, **QUICK)
        psc.save(tmp_path / "bundle")
        again = PSC.load(tmp_path / "bundle", device="cpu", allow_factories=["tests.tiny:network"])
        found = [model(inputs).probabilities for model in (fitted, psc, again)]
        calibrated = fitted.calibrate(splits[1], risk=0.3)(inputs).ood_p_value
    for each in (*found, again(inputs).probabilities):
        torch.testing.assert_close(each, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(calibrated, p_value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alfa": 0.1}, "did you mean alpha"),
        ({"target": "age"}, "got 'target'"),
        ({"task": "regression"}, "expected no task"),
        ({"coverage": None}, "expected coverage of type float, got None"),
        ({"seed": True}, "expected seed of type int, got True of type bool"),
        ({"head": "none"}, "expected head of a classifier"),
        ({"max_width": 3.0}, "a classifier does not read max_width"),
        ({"layer": "8"}, "before the output, got '8'"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(
    net: nn.Module, splits: Splits, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        PSC.fit(net, *splits, **settings)


def test_data_that_cannot_be_used_are_refused(
    net: nn.Module, splits: Splits, train: ImageDataset, val: ImageDataset
) -> None:
    for given, named in (({"classes": tuple("abcdefghij")}, "classes"), (STATISTICS, "mean, std")):
        with pytest.raises(UsageError, match=f"leave out {named}"):
            PSC.fit(net, train, val, **given, **QUICK)
    with pytest.raises(UsageError, match="hold some images out"):
        PSC.fit(net, splits[0], Subset(splits[0], range(10, 30)), **STATISTICS, **QUICK)
    with pytest.raises(NetworkError, match="cannot run an input of shape"):
        PSC.fit(nn.Linear(3, 10), *splits)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"alpha": 0.01}, "alpha"),
        ({"risk": 2.0}, "risk"),
        ({"layer": "x", "head": "duq"}, "a classifier does not read head, layer"),
        ({"max_width": 3.0}, "a classifier does not read max_width"),
        ({"device": "meta"}, "a classifier does not read device"),  # The model has one.
        ({"batch_images": -5}, "batch_images"),
    ],
)
def test_calibration_refuses_settings(fitted: PSC, test: TensorDataset, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        fitted.calibrate(Subset(test, range(30)), **settings)


def test_calibration_keeps_the_rates_that_are_not_changed(fitted: PSC, test: TensorDataset, val: ImageDataset) -> None:
    changed = fitted.calibrate(Subset(test, range(30)), alpha=0.2, coverage=0.8, batch_images=7)
    assert (changed.policy.alpha, changed.policy.coverage) == (0.2, 0.8)
    assert fitted.calibrate(val).policy.alpha == fitted.policy.alpha
    with pytest.raises(UsageError, match="the model's preprocessing"):
        fitted.calibrate(replace(val, preprocess=replace(MNIST, mean=(0.5,))))
    with pytest.raises(DataError, match="labels in 0…9"):
        fitted.calibrate([(test.tensors[0][:30], test.tensors[1][:30] + 5)])
    with pytest.raises(DataError, match="unknown: nine; missing: 9"):
        fitted.calibrate(replace(val, classes=(*val.classes[:9], "nine")))
