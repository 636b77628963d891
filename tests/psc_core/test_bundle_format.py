"""``docs/bundle-format.md`` against the code: a reader written from it agrees, and it names what bundles hold."""

import json
import re
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from psc_core import PSC, PSCRegressor, load_model
from psc_core.answers import CLASSIFICATION_DECISIONS
from psc_core.bundle import GRAPH, MAX_ARGUMENT, MAX_AXES, MAX_DEPTH, MAX_MANIFEST_BYTES, PARTS, Manifest
from psc_core.density import DENSITIES, class_values, draw_images
from psc_core.errors import BundleError
from psc_core.export.folder import RUNTIMES
from psc_core.export.graph import export_graphs
from psc_core.heads import dve, sngp
from psc_core.heads.softmax import TemperatureHead
from psc_core.images.preprocess import MAX_INPUT_PIXELS, MAX_RESIZE
from psc_core.learnt import fit_reviewed, store_images
from psc_core.maps import LEVELS, MAX_POSITIONS, POSITION_DENSITIES
from psc_core.network.load import MAX_MODULES, MAX_WEIGHTS
from psc_core.stored_images import MAX_COUNT, SIDE
from psc_core.tasks import TASKS
from psc_core.tasks.classification import Classification
from psc_core.tasks.regression import Regression
from tests.conftest import TinyJob
from tests.opened import opened
from tests.second_reader import SecondReader
from tools import forge

ALLOW = ("tests.tiny:network",)
DOCUMENT = Path(__file__).parents[2] / "docs" / "bundle-format.md"
TEXT = DOCUMENT.read_text()
WORDS = frozenset(re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", TEXT, flags=re.DOTALL | re.MULTILINE)))
CLASSIFICATION: dict[str, tuple[str, ...]] = {
    "tied-sngp": ("--density", "tied", "--head", "sngp", "--ood-score", "density"),
    "gda++-duq": ("--density", "gda++", "--head", "duq", "--no-second-scaling"),
    "rmd-original": (
        "--density", "rmd", "--predictions", "original", "--interpolation", "bicubic", "--background", "none",
        "--resize", "28", "--crop", "28"),
    "vector": (
        "--layer", "6", "--head", "duq", "--density", "mahalanobis++", "--train", "mnist:DATA", "--val", "mnist:DATA"),
    "two layers": ("--layer", "0", "--epsilon", "0.99"),
    "pooled": (
        "--layer", "0", "--c-proj", "4", "--d-proj", "4", "--max-memory", "160k", "--head", "duq", "--density", "gda"),
}  # fmt: skip
"""Fits of a classifier beside the default one: every density, head and kind of layer."""


REGRESSION: dict[str, tuple[str, ...]] = {
    "original": ("--predictions", "original", "--ood-score", "density", "--max-width", "60"),
    "dve-density": ("--head", "dve", "--ood-score", "density"),
}
"""Fits of a regression beside those with either head and checks."""


@pytest.fixture(scope="module")
def bundles(
    tiny_job: TinyJob, tiny_bundle: Path, data_root: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Classifiers; with 32 random features instead of 1,024."""
    folder = tmp_path_factory.mktemp("formats")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sngp, "FEATURES", 32)
        patch.setattr(sngp, "LENGTH_SCALE_FACTORS", (1.0,))
        fits = fitted(tiny_job, CLASSIFICATION, data_root, folder)
    learn_garments(tiny_bundle, folder / "reviewed")
    add_garments(tiny_bundle, folder / "added")
    return {"pooled++-laplace": tiny_bundle, **{name: folder / name for name in ("reviewed", "added")}, **fits}


def add_garments(bundle: Path, out: Path) -> None:
    """Save the bundle with two classes more."""
    psc = PSC.load(bundle, device="cpu", allow_factories=ALLOW)
    garments, digits = (opened(name).subset(torch.arange(150)) for name in ("fashion-mnist", "mnist"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, label in (("trouser", 1), ("bag", 8)):
            images = garments.subset((garments.first_labels() == label).nonzero()[:, 0])
            psc = psc.add_class(name, images, replace(digits, classes=psc.classes), risk=0.7)
    psc.save(out)


def learn_garments(bundle: Path, out: Path) -> None:
    """Save the bundle with the check ``reviewed``, whether or not it helps."""
    psc = PSC.load(bundle, device="cpu", allow_factories=ALLOW)
    garments, digits = (opened(name).subset(torch.arange(150)) for name in ("fashion-mnist", "mnist"))
    scorer, checks = psc.pipeline.scorer, psc.pipeline.checks
    assert checks is not None
    with torch.inference_mode():
        w = scorer.density.coordinates(scorer.embed(next(garments.batches(40)).images).density_input).clone()
    kinds = garments.subset(torch.arange(40))
    learnt = fit_reviewed(scorer.density, w, kinds.first_labels(), kinds.classes, ["2026-11-12"] * 40)
    learnt = store_images(learnt, kinds, w)
    checks = checks.with_reviewed(class_values(draw_images(scorer.density, checks.ascending.shape[1]), learnt.largest))
    pipeline = psc.pipeline.with_scorer(scorer.replace(reviewed=learnt), checks=checks)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        replace(psc, pipeline=pipeline).calibrate(digits, risk=0.7).save(out)


@pytest.fixture(scope="module")
def regressions(
    angle_job: TinyJob,
    angle_bundle: Path,
    neighbours_bundle: Path,
    data_root: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("regressions")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dve, "STEPS", 20)
        others = fitted(angle_job, REGRESSION, data_root, folder)
    return {"blr": angle_bundle, "dve": neighbours_bundle, **others}


def fitted(job: TinyJob, fits: dict[str, tuple[str, ...]], data_root: Path, folder: Path) -> dict[str, Path]:
    """Bundles by name, of a job with other flags each."""
    from psc_core.cli.fit import main

    for name, flags in fits.items():
        changed = [flag.replace("DATA", str(data_root)) for flag in flags]
        assert main([*job.args, *changed, "--no-report", "--out", str(folder / name)]) == 0
    return {name: folder / name for name in fits}


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    """Digits, garments and noise."""
    parts = [next(iter(opened(name).batches(24))).images for name in ("mnist", "fashion-mnist")]
    noise = torch.randint(0, 256, (8, 1, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return torch.cat([*parts, noise, torch.zeros_like(noise[:1])])


EXPORTED = ["pooled++-laplace", "reviewed", "added", *(name for name in CLASSIFICATION if name != "gda++-duq")]
"""That one's probabilities change by 10⁻³ with the rounding of its network, which no graph of it may do."""


@pytest.mark.thorough
@pytest.mark.parametrize("name", [*EXPORTED, "blr", "dve", "original"])
def test_an_exported_graph_agrees(
    bundles: dict[str, Path], regressions: dict[str, Path], images: torch.Tensor, tmp_path: Path, name: str
) -> None:
    model = load_model({**regressions, **bundles}[name], device="cpu", allow_factories=ALLOW)
    (tmp_path / "model.onnx").write_bytes(export_graphs(model)["model.onnx"].SerializeToString())
    ours = model.outputs(model.compute(images).packed.numpy())
    decisions = model.decide(ours)
    for runtime, start in RUNTIMES.items():
        answers = start(tmp_path / "model.onnx")(images.permute(0, 2, 3, 1).numpy())
        for score in set(ours.scores) & set(answers) - {"ood_p_value"}:
            np.testing.assert_allclose(answers[score], ours[score], rtol=2e-4, atol=2e-3, err_msg=f"{runtime} {score}")
        assert np.abs(answers["ood_p_value"] - ours["ood_p_value"]).max() <= 1.01 / (len(model.calibration) + 1)
        if model.num_probabilities:
            limit = 1e-3 if model.pipeline.scorer.head.kind == "duq" else 1e-4  # k^γ with a large γ
            assert np.abs(answers["probabilities"] - ours.probabilities).max() < limit
        equal = np.abs(answers["ood_p_value"] - ours["ood_p_value"]) < 1e-6
        assert equal.mean() > 0.7  # Some of the images have calibrated, and are as unusual as themselves.
        assert (answers["decision"] == decisions.decision)[equal].mean() > 0.98


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["pooled++-laplace", "reviewed", "added", *CLASSIFICATION])
def test_second_reader_agrees(bundles: dict[str, Path], images: torch.Tensor, name: str) -> None:
    psc, reader = PSC.load(bundles[name], device="cpu", allow_factories=ALLOW), SecondReader(bundles[name])
    with torch.inference_mode():
        scorer = psc.pipeline.scorer
        inputs = scorer.standardise(images)
        features, logits = scorer.backbone(inputs)
        z = scorer.embed(images).z
        ours = psc.outputs(psc.pipeline(images))
        layer_map = psc.pipeline.map
        grey = None if layer_map is None else psc.predict(images, maps=True).maps.numpy().astype(int)
        explanation = psc.pipeline.explain(images)[1]
    if layer_map is None:
        assert "map" not in reader.manifest
    else:
        distances = reader.map_distances(features[scorer.backbone.layers.index(layer_map.layer)].numpy())
        low, high = (reader.grey_levels(distances * factor) for factor in (1 - 1e-3, 1 + 1e-3))
        assert (low <= grey).all() and (grey <= high).all() and (reader.grey_levels(distances) == grey).mean() > 0.9
    stored_images = psc.pipeline.stored_images
    assert (stored_images is None) == ("stored_images" not in reader.manifest)
    if stored_images is not None:
        away = reader.thumbnail_distances(z.double().numpy(), [f.double().numpy() for f in features])
        np.testing.assert_allclose(explanation["stored_distance"].numpy(), away, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(reader.standardise(images.numpy()), inputs.numpy(), rtol=1e-5, atol=1e-6)
    # So few images may show no risk, and then nothing is accepted: the threshold of this test accepts half of them.
    middle = float(ours["predictive_entropy"].median())
    psc = replace(psc, policy=psc.policy.model_copy(update={"ambiguity_threshold": middle}))
    reader.manifest["policy"]["ambiguity_threshold"] = middle
    theirs = reader.answer([f.numpy() for f in features], None if logits is None else logits.double().numpy())

    digits = slice(0, 24)
    np.testing.assert_allclose(theirs.z, z.numpy(), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(theirs.log_density, ours["log_density"].numpy(), rtol=1e-4, atol=1e-3)
    for got, expected in ((theirs.probabilities, ours.probabilities), (theirs.entropy, ours["predictive_entropy"]),
                          (theirs.epistemic, ours["epistemic"])):  # fmt: skip
        np.testing.assert_allclose(got[digits], expected[digits].numpy(), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(got, expected.numpy(), rtol=1e-2, atol=1e-4)
    rank = 1.01 / (len(psc.calibration) + 1)
    assert np.abs(theirs.p_value - ours["ood_p_value"].numpy()).max() <= rank
    assert theirs.check_p_values.shape == ours.check_p_values.shape == (len(images), len(psc.checks))
    assert np.abs(theirs.check_p_values - ours.check_p_values.numpy()).max(initial=0) <= rank
    np.testing.assert_array_equal(theirs.is_ood, psc.predict(images).is_ood.numpy())
    decisions = psc.decide(psc.outputs(ours.packed.numpy()))
    edge = np.abs(theirs.probabilities - reader.set_threshold()) < 1e-4
    assert (theirs.prediction_set == decisions.prediction_set)[~edge].all()
    far = np.abs(theirs.entropy - psc.policy.ambiguity_threshold) > 1e-4
    ours_decided = np.array([CLASSIFICATION_DECISIONS[code] for code in decisions.decision])
    assert (np.array(theirs.decision) == ours_decided)[far].all()
    assert {"accept", "abstain_ood"} <= set(theirs.decision)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["blr", "dve", *REGRESSION])
def test_second_reader_agrees_on_a_regression(regressions: dict[str, Path], images: torch.Tensor, name: str) -> None:
    path = regressions[name]
    model, reader = PSCRegressor.load(path, device="cpu", allow_factories=ALLOW), SecondReader(path)
    with torch.inference_mode():
        features, output = model.pipeline.scorer.backbone(model.pipeline.scorer.standardise(images))
    theirs = reader.answer_values([f.numpy() for f in features], None if output is None else output.double().numpy())
    ours = model.predict(images)
    np.testing.assert_allclose(theirs.log_density, ours.log_density.numpy(), rtol=1e-4, atol=1e-3)
    for name in ("mean", "aleatoric", "epistemic"):
        np.testing.assert_allclose(getattr(theirs, name), ours.outputs[name].numpy(), rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(theirs.interval, ours.interval.numpy(), rtol=1e-3, atol=1e-2)
    rank = 1.01 / (len(model.calibration) + 1)
    assert np.abs(theirs.p_value - ours.ood_p_value.numpy()).max() <= rank
    limit = model.policy.max_width or np.inf
    far = np.abs(theirs.interval[:, 1] - theirs.interval[:, 0] - limit) > 0.1
    assert (np.array(theirs.decision) == np.array(ours.decision))[far].all()
    assert {"accept", "abstain_ood"} <= set(theirs.decision)


@pytest.mark.parametrize("kind", Regression.heads)
def test_regressions_fields_and_tensors_are_documented(regressions: dict[str, Path], kind: str) -> None:
    bodies = [json.loads((path / "manifest.json").read_text()) for path in regressions.values()]
    body = next(body for body in bodies if body["head"]["kind"] == kind)
    assert [name for name in fields(body) if name not in WORDS] == []
    body["provenance"].pop("settings"), body["provenance"].pop("model_args")
    assert [f for part in ("metrics", "provenance") for f in deep_names(body[part]) if f not in WORDS] == []
    assert {*body["head"]["sizes"]} <= WORDS


@pytest.mark.parametrize("kind", Regression.heads)
def test_tables_match_a_regressions_layouts(kind: str) -> None:
    section = TEXT.split("\n### Regression\n")[1].split("\n### ")[0]
    table = section.split(f"| tensor of {kind} |")[1].split("\n\n")[0]
    said = re.findall(r"`([a-z_]+)`", " ".join(re.findall(r"^\| (`.*?) \|", table, re.M)))
    assert sorted(said) == sorted(Regression.heads[kind].layout)


def test_table_matches_a_regressions_calibration(regressions: dict[str, Path]) -> None:
    table = TEXT.split("\n### Regression\n")[1].split("| tensor of the calibration |")[1].split("\n\n")[0]
    said = re.findall(r"^\| `([a-z_]+)` \|", table, re.M)
    for path in regressions.values():
        with safe_open(path / "calibration.safetensors", "numpy") as file:
            assert sorted(file.keys()) == sorted(said)


FREE = ("backbone.network.model_args", "density.record", "head.record", "density.sizes", "head.sizes",
        "checks.texture.density.sizes", "checks.texture.density.record", "map.density.sizes", "map.density.record",
        "collapse", "metrics", "provenance", "files")  # fmt: skip
"""Sections whose names are documented in prose, or are the writer's own."""


def fields(value: Any, at: str = "") -> Iterator[str]:
    """Dotted names of the fields of a manifest."""
    if not isinstance(value, dict) or at in FREE:
        return
    for key, inside in value.items():
        yield (name := f"{at}.{key}" if at else key)
        yield from fields(inside, name)


def deep_names(value: Any) -> Iterator[str]:
    """Every name below a section."""
    if isinstance(value, list):
        for item in value[:1]:
            yield from deep_names(item)
    if isinstance(value, dict):
        for key, inside in value.items():
            yield key
            yield from deep_names(inside)


def test_fields_are_documented(bundles: dict[str, Path]) -> None:
    for path in bundles.values():
        body = json.loads((path / "manifest.json").read_text())
        assert [name for name in fields(body) if name not in WORDS] == []
        assert {*body["files"]} <= WORDS
        assert {key for entry in body["files"].values() for key in entry} <= WORDS
        assert {key for part in ("density", "head") for key in (body[part] or {}).get("sizes", {})} <= WORDS
        body["provenance"].pop("settings"), body["provenance"].pop("model_args")
        assert [f for part in ("metrics", "provenance") for f in deep_names(body[part]) if f not in WORDS] == []
        layer_names = set(body["collapse"].pop("layers")[0])
        assert layer_names <= WORDS
        assert {f"collapse.{name}" for name in body["collapse"]} <= WORDS


def test_documented_fields_exist(bundles: dict[str, Path]) -> None:
    real = {name for path in bundles.values() for name in fields(json.loads((path / "manifest.json").read_text()))}
    real |= {"collapse.layers", *(f"collapse.{n}" for n in ("epsilon", "granularity", "pattern", "train_examples",
                                                            "val_examples", "notes", "seed", "measure"))}  # fmt: skip
    real |= {"backbone.hooks.stop", "backbone.hooks.dropped", "target.name", "target.unit", "policy.max_width",
             "head.layers", "density.layers", "backbone.tokens_first"}  # fmt: skip
    of_tasks = {name for task in TASKS.values() for name in task.model_fields}
    known = {*Manifest.model_fields, "task", *of_tasks} - {"task_name"}
    sections = "|".join(known)
    dotted = {word for word in WORDS if re.fullmatch(rf"({sections})\.[a-z_.]+", word) and not word.endswith(".json")}
    assert dotted - real == {"collapse.csv", GRAPH, *(f"{part}.safetensors" for part in PARTS)}
    top = re.findall(
        r"^\| `([a-z_]+)` \| (?:integer|text|list of text|list of objects|object|object or null) \|", TEXT, re.M
    )
    assert set(top) == known


ONE = {"images": 10, "slope": 1.0, "bias": 0.0}


@pytest.mark.parametrize(
    ("name", "where", "value", "message"),
    [
        ("reviewed", "checks.reviewed", None, r"checks\.names \(reviewed\)"),
        ("reviewed", "checks.reviewed.kinds", [], "kinds"),
        ("reviewed", "checks.reviewed.kinds", [{"name": "a", "images": 1, "day": None}], "tensors of 1 kinds"),
        ("reviewed", "checks.reviewed.counts_below", 0.0, "counts_below"),
        ("reviewed", "checks.reviewed.stored_images", None, "others too"),
        ("reviewed", "checks.reviewed.stored_images.count", 7, "stored images"),
        ("reviewed", "density.sizes.kept", 3, "sizes"),
        ("two layers", "density.layers", [], "backbone.layers"),
        ("two layers", "density.layers", ["0"], "backbone.layers"),
        ("rmd-original", "density.layers", ["4"], "density.layers for rmd"),
        ("added", "added_classes", [], "head.sizes.classes to be 12"),
        ("added", "added_classes", [ONE] * 11, "head.sizes.classes to be 1"),
        ("added", "added_classes", [{"images": 10, "slope": 0.0, "bias": 0.0}] * 2, "slope"),
        ("added", "added_classes", [ONE], "head.sizes.classes to be 11"),
        ("added", "density.sizes.classes", 4, "density.sizes.classes"),
    ],
)
def test_what_is_forged_is_refused(
    bundles: dict[str, Path], tmp_path: Path, name: str, where: str, value: Any, message: str
) -> None:
    copy = Path(shutil.copytree(bundles[name], tmp_path / "bundle"))
    forge.assign(copy, where, value)
    with pytest.raises(BundleError, match=message):
        PSC.load(copy, device="cpu", allow_factories=ALLOW)


def test_a_regression_has_no_added_classes(angle_bundle: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(angle_bundle, tmp_path / "bundle"))
    forge.assign(copy, "added_classes", [ONE])
    with pytest.raises(BundleError, match="expected no added_classes beside"):
        PSCRegressor.load(copy, device="cpu", allow_factories=ALLOW)


def documented_tensors(heading: str) -> set[tuple[str, str]]:
    """(name, kinds) of the tensor table under a heading; kinds is empty where the table has no such column."""
    section = TEXT.split(f"\n### {heading}\n")[1].split("\n### ")[0]
    table = section.split("| tensor |")[1].split("\n\n")[0].splitlines()
    with_kinds = "kinds" in table[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]
    return {(row[0].strip("`"), kind) for row in rows for kind in (row[2].split(", ") if with_kinds else [""])}


@pytest.mark.parametrize(
    ("heading", "kinds"),
    [
        ("Density", DENSITIES),
        ("Head", {**Classification.heads, TemperatureHead.kind: TemperatureHead}),
        ("Map", POSITION_DENSITIES),
    ],
)
def test_tensor_tables_match_layouts(heading: str, kinds: dict[str, Any]) -> None:
    real = {(name, kind) for kind, family in kinds.items() for name in family.layout}
    said = {
        (name, each)
        for name, kind in documented_tensors(heading)
        for each in (kinds.keys() - {TemperatureHead.kind} if kind == "all" else [kind])
    }
    assert said == real


@pytest.mark.parametrize(
    ("heading", "part"),
    [("Projection", "projection"), ("Calibration", "calibration"), ("Stored images", "stored_images")],
)
def test_tensor_tables_match_files(bundles: dict[str, Path], heading: str, part: str) -> None:
    paths = [path for path in bundles.values() if (path / f"{part}.safetensors").exists()]
    assert paths
    for path in paths:
        with safe_open(path / f"{part}.safetensors", "numpy") as file:
            values = {("values", "")} if part == "stored_images" else set()  # of a regression
            assert {(name, "") for name in file.keys()} == documented_tensors(heading) - values  # noqa: SIM118


def test_documented_limits() -> None:
    assert MAX_MANIFEST_BYTES == 16 << 20 and "at most 16 MiB" in TEXT
    assert MAX_DEPTH == 32 and "at most 32 levels" in TEXT
    assert MAX_INPUT_PIXELS == 1 << 22 and "≤ 2²²" in TEXT
    assert MAX_RESIZE == 8192 and "at most 8192" in TEXT
    assert MAX_ARGUMENT == 1 << 16 and "at most 2¹⁶ in magnitude" in TEXT
    assert MAX_POSITIONS == 4096 and "at most 4096 |" in TEXT and f"`levels` = {LEVELS}" in TEXT
    assert MAX_COUNT == 4096 and SIDE == 64 and "integer, 1 to 4096" in TEXT and "integers, 1 to 64" in TEXT
    assert MAX_AXES == 8 and "more than 8 axes" in TEXT
    assert (MAX_WEIGHTS, MAX_MODULES) == (1 << 31, 1 << 15) and "2³¹ weights, 2¹⁵ modules" in TEXT
