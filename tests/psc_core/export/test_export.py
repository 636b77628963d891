"""A bundle as one ONNX file, in the runtimes that people run it with."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from PIL import Image, ImageOps
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from app import export_cli as cli
from psc_core import PSC, PSCRegressor, load_network
from psc_core.bundle import read_bundle
from psc_core.errors import BundleError, NetworkError, UsageError
from psc_core.export.folder import README, RUNTIMES, VECTORS, _readme, check, export_model, images_below, table
from psc_core.export.graph import ANY_SIZE, GRAPH, PIXELS, export_graphs
from psc_core.images.preprocess import PRESETS, Preprocess
from psc_core.model import FittedModel, load_model
from tests.conftest import ROOT, Run, TinyJob
from tests.opened import opened
from tools import forge

BUNDLE = ROOT / "artifacts" / "dirty-mnist-resnet18"
CPP = os.environ.get("ORT_CPP", "")  # the folder of onnxruntime_cxx_api.h


@pytest.fixture(scope="module")
def model() -> FittedModel:
    return load_model(BUNDLE, device="cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped bundle, exported by the command."""
    out = tmp_path_factory.mktemp("exported") / "digits"
    assert cli.main(["--bundle", str(BUNDLE), "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    """100 digits and 100 garments."""
    sets = (opened(name) for name in ("mnist", "fashion-mnist"))
    return torch.cat([next(each.batches(100)).images for each in sets])


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_answers_are_those_of_the_bundle(folder: Path, model: FittedModel, images: torch.Tensor, runtime: str) -> None:
    pixels = images.permute(0, 2, 3, 1).numpy()
    compute = RUNTIMES[runtime](folder / GRAPH)
    answers, outputs = compute(pixels), model.compute(images)
    decisions = model.decide(model.outputs(outputs.packed.numpy()))
    assert np.abs(answers["probabilities"] - outputs.probabilities.numpy()).max() < 1e-4
    assert np.abs(answers["ood_p_value"] - outputs["ood_p_value"].numpy()).max() < 1e-3
    assert np.abs(answers["checks"] - outputs.check_p_values.numpy()).max() < 1e-3
    for name in ("predictive_entropy", "epistemic", "ood_score", "log_density"):
        np.testing.assert_allclose(answers[name], outputs[name].numpy(), rtol=1e-4, atol=1e-3)
    for name in ("class_index", "is_ood", "decision", "prediction_set"):
        assert (answers[name] == getattr(decisions, name)).all(), name
    np.testing.assert_allclose(answers["confidence"], decisions.confidence, atol=1e-5)
    for count in (1, 3):  # whatever number of images come together
        few = compute(pixels[:count])
        np.testing.assert_allclose(few["ood_p_value"], answers["ood_p_value"][:count], atol=1e-3)
        assert len(few["decision"]) == count


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_images_of_any_size(folder: Path, model: FittedModel, images: torch.Tensor, runtime: str) -> None:
    compute = RUNTIMES[runtime](folder / ANY_SIZE)
    for count in (3, 64):  # more and fewer than an image has rows
        as_they_are = compute(images[:count].permute(0, 2, 3, 1).numpy())
        np.testing.assert_allclose(as_they_are["probabilities"], model.compute(images[:count]).probabilities, atol=1e-4)
    for image, size in zip(images[::20], [(56, 56), (200, 90), (31, 400), (20, 9), (1, 1)] * 2, strict=True):
        pixels = np.asarray(Image.fromarray(image[0].numpy()).resize(size, Image.Resampling.BICUBIC))
        ours = model.predict([pixels])
        answers = compute(pixels[None, :, :, None])
        assert answers["decision"][0] == model.calibration.decision_names.index(ours.decision[0])
        np.testing.assert_allclose(answers["probabilities"], ours.probabilities, atol=0.02)
        assert answers["ood_p_value"][0] == pytest.approx(float(ours.ood_p_value[0]), abs=0.02)


def test_thresholds_are_inputs_with_defaults(folder: Path, model: FittedModel, images: torch.Tensor) -> None:
    session = onnxruntime.InferenceSession(folder / GRAPH)
    names, pixels = [each.name for each in session.get_outputs()], images.permute(0, 2, 3, 1).numpy()
    outputs = model.outputs(model.compute(images).packed.numpy())
    for given in ({"alpha": 0.2}, {"coverage": 0.999}, {"ambiguity_threshold": 0.01}, {"alpha": 0.5, "coverage": 0.5}):
        policy = model.policy.model_copy(update=given)
        expected = model.calibration.decide(outputs, policy)
        feed = {PIXELS: pixels, **{name: np.array(value, np.float32) for name, value in given.items()}}
        answers = dict(zip(names, session.run(None, feed), strict=True))
        for name in ("decision", "is_ood", "prediction_set"):
            assert (answers[name] == getattr(expected, name)).all(), (given, name)
    for beyond in (1e-5, 0.0, -1.0, np.nan):  # What no calibration keeps is refused elsewhere; a graph accepts nothing.
        (is_ood,) = session.run(["is_ood"], {PIXELS: pixels, "alpha": np.array(beyond, np.float32)})
        assert is_ood.all()
    for beyond in (0.99999, 1.0, np.nan):
        (all_classes,) = session.run(["prediction_set"], {PIXELS: pixels, "coverage": np.array(beyond, np.float32)})
        assert all_classes.all()
    about = json.loads(session.get_modelmeta().custom_metadata_map["psc"])
    assert about["classes"] == list(model.classes) and about["version"] == model.version
    assert about["policy"] == model.policy.model_dump()
    assert about["preprocess"] == json.loads(json.dumps(model.preprocess.to_json()))
    assert about["decisions"] == ["accept", "abstain_ambiguous", "abstain_ood"]


def test_only_standard_operators(folder: Path) -> None:
    graph = onnx.load(folder / GRAPH)
    onnx.checker.check_model(graph, full_check=True)
    assert {each.domain for each in graph.opset_import} <= {""} and {node.domain for node in graph.graph.node} <= {""}
    assert not graph.functions and not graph.graph.value_info
    double = {each.name for each in graph.graph.initializer if each.data_type == onnx.TensorProto.DOUBLE}
    assert not double
    assert str(ROOT) not in graph.SerializeToString().decode("latin-1")


def output_of_readme(folder: Path) -> str:
    (block,) = re.findall(r"```python\n(.*?)```", (folder / README).read_text(encoding="utf-8"), re.DOTALL)
    found = subprocess.run([sys.executable, "-c", block], cwd=folder, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_the_readme_runs(folder: Path) -> None:
    assert output_of_readme(folder).startswith("abstain_ood 0.0")
    for name in ("alpha", "ambiguity_threshold", "coverage"):
        assert f"`{name}` (" in (folder / README).read_text()


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_the_readme_loads_files_as_the_bundle_does(model: FittedModel, tmp_path: Path, mode: str) -> None:
    preprocess = Preprocess(mode, 32, 24, None, *(((0.5,) * len(mode),) * 2))
    scorer = model.pipeline.scorer.replace(preprocess=preprocess)
    readme = _readme(replace(model, pipeline=model.pipeline.with_scorer(scorer)))
    (lines,) = re.findall(r"^def load.*?(?=^image = )", readme, re.MULTILINE | re.DOTALL)
    found: dict[str, Any] = {"numpy": np, "Image": Image, "ImageOps": ImageOps}
    exec(lines, found)
    noise = np.random.default_rng(0)
    grey = noise.integers(0, 1 << 16, (32, 24)).astype(np.uint16)
    colours = noise.integers(0, 256, (32, 24, 3)).astype(np.uint8)
    for name, pixels in {
        "16.png": grey,
        "16.tif": grey,
        "8.png": grey.astype(np.uint8),
        "colours.png": colours,
    }.items():
        Image.fromarray(pixels).save(tmp_path / name)
        expected = preprocess.from_bytes((tmp_path / name).read_bytes()).transpose(1, 2, 0)
        assert np.array_equal(np.atleast_3d(found["load"](tmp_path / name)), expected), name


@pytest.mark.skipif(not CPP, reason="ORT_CPP names no headers of onnxruntime")
def test_the_readme_runs_in_cpp(folder: Path, tmp_path: Path) -> None:
    (block,) = re.findall(r"```cpp\n(.*?)```", (folder / README).read_text(), re.DOTALL)
    (tmp_path / "main.cpp").write_text(block)
    (library,) = Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so.*")
    (tmp_path / "libonnxruntime.so.1").symlink_to(library)
    compiled = ["g++", "-std=c++17", f"-I{CPP}", tmp_path / "main.cpp", library, f"-Wl,-rpath,{tmp_path}"]
    subprocess.run([*compiled, "-o", tmp_path / "main"], check=True)
    said = subprocess.run([tmp_path / "main"], cwd=folder, capture_output=True, text=True, check=True).stdout
    session = onnxruntime.InferenceSession(folder / GRAPH)
    black = {PIXELS: np.zeros((1, *load_file(folder / VECTORS)[PIXELS].shape[1:]), np.uint8)}
    (decision,), (p_value,) = session.run(["decision", "ood_p_value"], black)
    assert re.fullmatch(rf"decision {decision}, p-value ([\d.e-]+)\n", said)
    assert float(said.split()[-1]) == pytest.approx(p_value, rel=1e-5)


def test_proof_travels_along(folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = load_file(folder / VECTORS)
    assert len(vectors[PIXELS]) == 64 and vectors["decision"].unique().tolist() == [0, 1, 2]  # the bundle's examples
    text, _ = run(cli.main, "--check", folder)
    assert text.count("equal") == 2 * len(RUNTIMES)
    assert text.count(" 0 of 64 ") == text.count(" 0 of 8 ") == len(RUNTIMES)
    found = check(folder)
    assert [(each.runtime, each.graph) for each in found] == [
        (name, file) for name in RUNTIMES for file in (GRAPH, ANY_SIZE)
    ]
    assert all(each.agrees for each in found)
    assert "other answers  probabilities apart  ood_p_value apart  log_density apart" in table(found)
    monkeypatch.setattr("psc_core.export.folder.RUNTIMES", {"no_such_runtime": RUNTIMES["openvino"]})
    with pytest.raises(NetworkError, match="no runtime is installed of no_such_runtime"):
        check(folder)


NAMES = ["probabilities", "ood_p_value", "decision", "prediction_set"]


@pytest.mark.parametrize("name", [*NAMES, *(f"any-size/{name}" for name in NAMES)])
def test_other_answers_are_found(folder: Path, tmp_path: Path, run: Run, name: str) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    vectors = load_file(copy / VECTORS)
    first = vectors[name][0]
    changed = (first + 1) % 3 if name.endswith("decision") else ~first if first.dtype == torch.bool else first + 0.2
    vectors[name][0] = changed
    save_file(vectors, copy / VECTORS)
    text, err = run(cli.main, "--check", copy, code=2)
    assert "DIFFERS" in text and "a runtime answers differently" in err


def test_folders_that_are_none(folder: Path, tmp_path: Path, run: Run) -> None:
    with pytest.raises(BundleError, match="no exported folder"):
        check(tmp_path)
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    save_file({**load_file(other / VECTORS), "more": torch.ones(64)}, other / VECTORS)
    _, err = run(cli.main, "--check", other, code=2)
    assert "'more' of vectors.safetensors and model.onnx do not fit together" in err
    broken = Path(shutil.copytree(folder, tmp_path / "broken"))
    (broken / GRAPH).write_bytes(b"no graph")
    assert "model.onnx is not an ONNX file" in run(cli.main, "--check", broken, code=2)[1]
    with pytest.raises(BundleError, match="was written by psc-export and is no bundle"):
        read_bundle(folder)


def test_commands_that_are_refused(folder: Path, tmp_path: Path, run: Run) -> None:
    words = ["--bundle", str(BUNDLE), "--out"]
    for given, why in (
        ([], "give --bundle DIR and --out DIR"),
        (words[:2], "give --bundle DIR and --out DIR"),
        ([*words, str(tmp_path / "x"), "--check", str(folder)], "give --bundle DIR and --out DIR"),
        ([*words, str(folder)], "give --overwrite"),
        ([*words, str(tmp_path / "x"), "--images", str(tmp_path)], "there are no images below"),
        (["--bundle", str(folder), "--out", str(tmp_path / "x")], "is no bundle"),
    ):
        _, err = run(cli.main, *given, code=2)
        assert why in err
    assert not (tmp_path / "x").exists()


def test_models_that_are_refused(model: FittedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = model.pipeline.scorer.backbone.fused("bf16")
    with pytest.raises(UsageError, match="computes in float32, and this model in bfloat16"):
        export_graphs(replace(model, pipeline=model.pipeline.with_backbone(backbone)))
    monkeypatch.setattr(type(model.preprocess), "is_known", property(lambda _: False))
    with pytest.raises(UsageError, match="has to say how files become inputs"):
        export_graphs(model)


def test_in_python(model: FittedModel, images: torch.Tensor, tmp_path: Path) -> None:
    model.export(tmp_path / "out", [image[0].numpy() for image in images[:3]])
    vectors = load_file(tmp_path / "out" / VECTORS)
    assert torch.equal(vectors[PIXELS][:3].permute(0, 3, 1, 2), images[:3])
    assert all(each.agrees for each in check(tmp_path / "out"))
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(UsageError, match="that psc-export did not write"):
        model.export(tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"


def test_in_python_the_runtimes_are_compared(
    model: FittedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(graph: Path) -> Callable[..., dict[str, Any]]:
        run = RUNTIMES["onnxruntime"](graph)
        return lambda images: {name: value + value.dtype.type(1) for name, value in run(images).items()}

    monkeypatch.setattr("psc_core.export.folder.RUNTIMES", {"onnxruntime": wrong})
    with pytest.raises(NetworkError, match=r"differently, onnxruntime with model\.onnx"):
        model.export(tmp_path / "out")


def linked_examples(folder: Path, bundle: Path) -> None:
    """Put a copy of the shipped bundle there, whose examples are links like those that a stranger may send along."""
    shutil.copytree(BUNDLE, bundle)
    for name, home in (("mounted", bundle / "examples" / "..data"), ("private", folder)):
        home.mkdir(exist_ok=True)
        Image.new("L", (28, 28), 50 if name == "private" else 200).save(home / f"{name}.png")
        (bundle / "examples" / f"{name}.png").symlink_to(home / f"{name}.png")


def test_links_out_of_a_bundle_are_not_followed(tmp_path: Path) -> None:
    private, bundle, whole = tmp_path / "private", tmp_path / "bundle", tmp_path / "whole"
    linked_examples(private, bundle)
    own = {"ambiguous.png", "clean.png", "corner.png", "shirt.png", "mounted.png"}
    assert {Path(file).name for file in images_below(bundle / "examples", bundle=bundle)} == own
    shutil.copytree(bundle, whole, symlinks=True)
    shutil.rmtree(whole / "examples")
    (whole / "examples").symlink_to(private)
    assert images_below(whole / "examples", must=False, bundle=whole) == []
    assert len(images_below(whole / "examples")) == 1  # as --images of one's own
    shutil.copytree(BUNDLE / "examples", whole / "..data" / "examples")
    (whole / "examples").unlink()
    (whole / "examples").symlink_to(Path("..data") / "examples")  # as volumes are mounted
    assert len(images_below(whole / "examples", bundle=whole)) == 4


def test_an_export_holds_no_image_from_outside_the_bundle(tmp_path: Path, run: Run) -> None:
    linked_examples(tmp_path / "private", tmp_path / "bundle")
    run(cli.main, "--bundle", tmp_path / "bundle", "--out", tmp_path / "out")
    images = load_file(tmp_path / "out" / VECTORS)[PIXELS]
    assert [bool((images == grey).flatten(1).all(1).any()) for grey in (50, 200)] == [False, True]


def test_the_hubs_cache_is_no_link_out(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--o--n" / "snapshots" / "01ab", tmp_path / "models--o--n" / "blobs"
    (snapshot / "examples").mkdir(parents=True)
    blobs.mkdir()
    shutil.copy(BUNDLE / "examples" / "clean.png", blobs / "digest")
    (snapshot / "examples" / "clean.png").symlink_to(Path("../../../blobs/digest"))
    assert len(images_below(snapshot / "examples", bundle=snapshot)) == 1


def test_a_graph_of_the_users_stays(model: FittedModel, tmp_path: Path, run: Run) -> None:
    (tmp_path / GRAPH).write_bytes(b"mine")
    for more, why in (([], "holds model.onnx already"), (["--overwrite"], "that psc-export did not write")):
        _, err = run(cli.main, "--bundle", BUNDLE, "--out", tmp_path, *more, code=2)
        assert why in err
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [b"mine"]


def changed_vectors(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        vectors = load_file(folder / VECTORS)
        change(vectors)
        save_file({name: each.contiguous() for name, each in vectors.items()}, folder / VECTORS)

    return damage


def without(name: str) -> Callable[[Path], None]:
    return changed_vectors(lambda vectors: vectors.pop(name))


def with_other(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Path], None]:
    return changed_vectors(lambda vectors: vectors.update({name: change(vectors[name])}))


def changed_graph(change: Callable[[onnx.ModelProto], object], file: str = GRAPH) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        graph = onnx.load(folder / file)
        change(graph)
        (folder / file).write_bytes(graph.SerializeToString())

    return damage


def with_other_output(name: str, operator: str, other: Any = None, **attributes: Any) -> Callable[[Path], None]:
    """The graph's last operation before an output is another one."""

    def change(graph: onnx.ModelProto) -> None:
        (node,) = (node for node in graph.graph.node if name in node.output)
        node.op_type = operator
        node.attribute.extend(helper.make_attribute(key, value) for key, value in attributes.items())
        if other is not None:
            graph.graph.initializer.append(numpy_helper.from_array(np.array(other), "other"))
            node.input.append("other")

    return changed_graph(change)


def with_constant_elsewhere(place: str) -> Callable[[Path], None]:
    def change(graph: onnx.ModelProto) -> None:
        constant = graph.graph.initializer[0]
        constant.ClearField("raw_data")
        constant.data_location = TensorProto.EXTERNAL
        constant.external_data.add(key="location", value=place)

    return changed_graph(change)


def of_another_maker(graph: onnx.ModelProto) -> None:
    graph.opset_import.append(helper.make_opsetid("evil", 1))
    graph.graph.node[-1].domain = "evil"


def too_large(graph: onnx.ModelProto) -> None:
    sides = numpy_helper.from_array(np.array([1 << 20, 1 << 22]), "sides")
    graph.graph.initializer.append(sides)
    graph.graph.node.insert(0, helper.make_node("ConstantOfShape", ["sides"], ["large"]))


def replaced_by(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        shutil.move(folder / name, folder.parent / name)
        make(folder / name)

    return damage


def both(*names: str) -> Callable[[Path], None]:
    """Outputs that are NaN in the graph and in the vectors."""

    def damage(folder: Path) -> None:
        for name in names:
            with_other_output(name, "Add", np.float32("nan"))(folder)
            with_other(name, lambda values: values * torch.nan)(folder)

    return damage


NAN = np.float32("nan")
LINKED = [replaced_by(name, lambda file: file.symlink_to(file.parents[1] / file.name)) for name in (GRAPH, VECTORS)]
DAMAGES: dict[str, Callable[[Path], object]] = {
    **{f"half of {name}": lambda folder, name=name: os.truncate(folder / name, 1 << 22) for name in (GRAPH, ANY_SIZE)},
    "no graph": lambda folder: os.truncate(folder / GRAPH, 0),
    "a terabyte": lambda folder: os.truncate(folder / GRAPH, 1 << 40),
    "vectors cut short": lambda folder: os.truncate(folder / VECTORS, 5_000),
    "vectors of a terabyte": lambda folder: os.truncate(folder / VECTORS, 1 << 40),
    "a linked graph": LINKED[0],
    "linked vectors": LINKED[1],
    "a pipe": replaced_by(VECTORS, lambda file: os.mkfifo(file)),
    "a device": replaced_by(GRAPH, lambda file: file.symlink_to("/dev/zero")),
    "a loop": replaced_by(VECTORS, lambda file: file.symlink_to(file.name)),
    **{f"a constant in {name}": with_constant_elsewhere(name) for name in ("../../etc/passwd", "/etc/passwd", VECTORS)},
    **{f"operators in {name}": changed_graph(of_another_maker, name) for name in (GRAPH, ANY_SIZE)},
    "a constant of terabytes": changed_graph(lambda graph: graph.graph.initializer[0].dims.append(1 << 40)),
    **{f"a tensor of terabytes in {name}": changed_graph(too_large, name) for name in (GRAPH, ANY_SIZE)},
    "no input": changed_graph(lambda graph: graph.graph.ClearField("input")),
    **{f"{name} NaN": with_other_output(name, "Add", NAN) for name in ("probabilities", "ood_p_value", "epistemic")},
    **{f"{name} NaN on both sides": both(name) for name in ("probabilities", "log_density")},
    "an infinite density": with_other_output("log_density", "Div", np.float32(0)),
    "decision (1, n)": with_other_output("decision", "Unsqueeze", [0]),
    "decision (n, 1)": with_other_output("decision", "Unsqueeze", [1]),
    "decision of one image": with_other_output("decision", "ReduceMax", [0]),
    "other classes": with_other_output("class_index", "Neg"),
    "is_ood turned": with_other_output("is_ood", "Not"),
    "images as floats": with_other("images", torch.Tensor.float),
    "smaller images": with_other("images", lambda images: images[:, :20]),
    "one image": changed_vectors(lambda vectors: vectors.update({k: v[:1] for k, v in vectors.items() if v.ndim})),
    "no image": changed_vectors(lambda vectors: vectors.update({k: v[:0] for k, v in vectors.items() if v.ndim})),
    **{f"without {name}": without(name) for name in ("images", "alpha", "step", "decision", "probabilities")},
    **{f"without {name} ": without(name) for name in ("prediction_set", "log_density")},
    "decisions in a column": with_other("decision", lambda decision: decision[:, None]),
    "one probability": with_other("probabilities", lambda values: values[:, :1]),
    "an alpha for each image": with_other("alpha", lambda alpha: alpha.repeat(64)),
    "alpha NaN": with_other("alpha", lambda alpha: alpha * torch.nan),
    "probabilities as integers": with_other("probabilities", torch.Tensor.int),
    **{str(kind): with_other("probabilities", lambda p, kind=kind: (p + 0.1).to(kind))  # type: ignore[misc]
       for kind in (torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64)},
    "a long name": changed_vectors(lambda vectors: vectors.update({"\x1b[31m\n" * 9999: torch.ones(64)})),
    "no folder": shutil.rmtree,
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_folders_are_never_equal(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], damage: str
) -> None:
    copied = Path(shutil.copytree(folder, tmp_path / "copied"))
    DAMAGES[damage](copied)
    assert cli.main(["--check", str(copied)]) == 2
    err = capfd.readouterr().err
    assert err.startswith("psc-export: ") and err.count("\n") == 1 and len(err) < 1000 and "\x1b" not in err, err


BROKEN: dict[str, Callable[[Path], object]] = {
    "policy": lambda bundle: forge.assign(bundle, "policy.alpha", -1.0),
    "network": lambda bundle: forge.assign(bundle, "backbone.network.spec", "os:system"),
    "head": lambda bundle: forge.edit_part(bundle, "head", lambda tensors: tensors.pop(min(tensors))),
    "weights": lambda bundle: os.truncate(bundle / "backbone.safetensors", 100),
    "manifest": lambda bundle: (bundle / "manifest.json").write_bytes(b"{"),
}


@pytest.mark.parametrize("part", BROKEN)
def test_bundles_are_refused_as_on_load(bundle: Path, tmp_path: Path, run: Run, part: str) -> None:
    BROKEN[part](bundle)
    with pytest.raises(BundleError) as caught:
        load_model(bundle, device="cpu", allow_factories=forge.ALLOW)
    words = ["--bundle", str(bundle), "--allow-factories", *forge.ALLOW, "--out", str(tmp_path / "out")]
    assert run(cli.main, *words, code=2) == ("", f"psc-export: {caught.value}\n")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("call", [1, 2, 3])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_an_interrupted_export_leaves_the_former_one(
    folder: Path, model: FittedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int, error: BaseException
) -> None:
    out = Path(shutil.copytree(folder, tmp_path / "out"))
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    calls = iter(range(1, 4))

    def sync(_: int) -> None:
        if next(calls) == call:
            raise error

    monkeypatch.setattr(
        "psc_core.export.folder.export_graphs", lambda _: {GRAPH: onnx.ModelProto(producer_name="other")}
    )
    monkeypatch.setattr("psc_core.bundle.os.fsync", sync)
    with pytest.raises((BundleError, KeyboardInterrupt)):
        export_model(model, out)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before


def test_a_link_in_the_folder_is_replaced_and_not_followed(
    model: FittedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / GRAPH).symlink_to(tmp_path / "mine")
    monkeypatch.setattr(
        "psc_core.export.folder.export_graphs", lambda _: {GRAPH: onnx.ModelProto(producer_name="other")}
    )
    export_model(model, tmp_path / "out")
    assert (tmp_path / "mine").read_text() == "mine" and not (tmp_path / "out" / GRAPH).is_symlink()
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == sorted([GRAPH, VECTORS, README])


@pytest.mark.thorough
def test_names_of_any_kind(model: FittedModel, tmp_path: Path) -> None:
    classes = ('say "no"', "it's", "a\nb", "Ωμέγα", "数字", "עברית", "{x}", "`code`", "</script>", "\\")
    named = replace(model, classes=classes, name="# *my* [net](x)\n```python\nraise\n```\x1b_2_ <b>|</b>", version="")
    named.export(tmp_path)
    session = onnxruntime.InferenceSession(tmp_path / GRAPH)
    about = json.loads(session.get_modelmeta().custom_metadata_map["psc"])
    assert tuple(about["classes"]) == classes and about["name"] == named.name
    title, empty, *rest = (tmp_path / README).read_text(encoding="utf-8").splitlines()
    assert title == r"# \# \*my\* \[net\](x) \`\`\`python raise \`\`\` \_2\_ \<b\>\|\</b\>"
    assert not empty and not any("raise" in line for line in rest)
    assert output_of_readme(tmp_path).startswith("abstain_ood 0.0") and all(each.agrees for each in check(tmp_path))


class Transformer(nn.Module):
    """A vision transformer of two blocks and a class token."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.token = nn.Conv2d(1, 16, 7, 7), nn.Parameter(torch.randn(1, 1, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
        self.blocks, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        logits: Tensor = self.head(self.blocks(torch.cat([self.token.expand(x.shape[0], -1, -1), tokens], 1))[:, 0])
        return logits


class OneImage(nn.Module):
    """Relies on a batch of one image."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x).reshape(10, 1).transpose(0, 1).reshape(1, 10)
        return logits


def onnx_file(net: nn.Module, file: Path, images: int | None = None) -> Path:
    """A file as of old exporters, in which constants are among the inputs."""
    axes = None if images else ({0: torch.export.Dim.DYNAMIC},)
    given = (torch.zeros(images or 2, 1, 28, 28),)
    program = torch.onnx.export(net, given, dynamo=True, dynamic_shapes=axes, verbose=False)
    assert program is not None
    graph = program.model_proto
    for each in graph.graph.initializer:
        graph.graph.input.append(helper.make_tensor_value_info(each.name, each.data_type, each.dims))
    graph.ir_version = 3
    file.write_bytes(graph.SerializeToString())
    return file


Fit = Callable[..., PSC]


@pytest.fixture(scope="module")
def fit() -> Fit:
    """Fit a network in memory to a few digits, by half of which it is calibrated."""
    sets = [opened("mnist", split) for split in ("train", "test")]
    train, val = (TensorDataset(batch.images, batch.labels) for batch in (next(each.batches(300)) for each in sets))

    def fit(net: nn.Module, **settings: Any) -> PSC:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Nothing is accepted after so few images.
            return PSC.fit(net, train, val, preprocess=PRESETS["mnist"], **settings)

    return fit


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["transformer", "onnx"])
def test_networks_of_other_kinds(
    fit: Fit, tiny_job: TinyJob, images: Tensor, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    torch.manual_seed(0)
    net = Transformer().eval()
    if kind == "onnx":
        net = load_network(f"onnx:{onnx_file(tiny_job.net, tmp_path / 'net.onnx')}", num_classes=10)
    psc = fit(net)
    psc.save(tmp_path / "bundle", graph=True)
    words = ["--bundle", str(tmp_path / "bundle"), "--out", str(tmp_path / "out")]
    assert cli.main(words) == 0 and capsys.readouterr().out.count(" equal") == 2 * len(RUNTIMES)
    ours, limit = psc.compute(images), 1.01 / (len(psc.calibration) + 1)
    for start in RUNTIMES.values():
        answers = start(tmp_path / "out" / GRAPH)(images.permute(0, 2, 3, 1).numpy())
        assert np.abs(answers["probabilities"] - ours.probabilities.numpy()).max() < 1e-4
        assert np.abs(answers["ood_p_value"] - ours["ood_p_value"].numpy()).max() < limit
    # These calibrated, so that rounding may move a score past itself; with 150 a p-value then differs by 0.0066.
    assert len(psc.calibration) == 150 and psc.trial is not None
    psc.export(tmp_path / "out", psc.trial)
    found = check(tmp_path / "out")
    assert all(each.agrees for each in found) and max(each.apart["ood_p_value"] for each in found) < limit


@pytest.mark.thorough
def test_a_network_that_takes_one_image_at_a_time_is_refused(fit: Fit, tiny_job: TinyJob, tmp_path: Path) -> None:
    file = onnx_file(OneImage(tiny_job.net).eval(), tmp_path / "net.onnx", images=1)
    psc = fit(load_network(f"onnx:{file}", num_classes=10), predictions="original", ood_score="density")
    with pytest.raises(UsageError, match="takes one image at a time"):
        psc.export(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.thorough
@pytest.mark.parametrize("fitted", ["angle_bundle", "neighbours_bundle"])
def test_readme_and_answers_of_a_regression(fitted: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    words = ["--bundle", str(request.getfixturevalue(fitted)), "--out", str(tmp_path / "out")]
    assert cli.main([*words, "--allow-factories", *forge.ALLOW]) == 0
    decision, numbers = output_of_readme(tmp_path / "out").splitlines()
    mean, lower, upper = map(float, numbers.split())
    assert decision.startswith("abstain_ood") and lower < mean < upper
    mended = load_file(tmp_path / "out" / VECTORS)
    for name in ("mean", "upper", "decision"):
        damaged = {**mended, name: mended[name] + (1 if name == "decision" else 0.5)}
        save_file(damaged, tmp_path / "out" / VECTORS)
        assert not any(each.agrees for each in check(tmp_path / "out") if each.graph == GRAPH), name


GREY_8 = Preprocess("L", 8, 8, None, (0.5,), (0.5,))


@pytest.mark.parametrize("head", ["blr", "dve"])
def test_numbers_near_zero_keep_their_mean(head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As lengths in metres of what is some nanometres long."""
    monkeypatch.setattr("psc_core.heads.dve.STEPS", 20)
    random = torch.Generator().manual_seed(0)
    bright = torch.rand(400, 1, 1, 1, generator=random)
    pixels = (255 * (0.8 * bright + 0.2 * torch.rand(400, 1, 8, 8, generator=random))).byte()
    values = 3e-9 + 6e-9 * bright[:, 0, 0, 0]
    train, val = (TensorDataset(pixels[at::2], values[at::2]) for at in (0, 1))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 1)).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        psc = PSCRegressor.fit(
            net, train, val, target="length", unit="m", preprocess=GREY_8, layer="0", head=head, pca=3
        )
    onnx.save(export_graphs(psc)[GRAPH], tmp_path / GRAPH)
    run = RUNTIMES["onnxruntime"](tmp_path / GRAPH)
    np.testing.assert_allclose(run(pixels[:50].permute(0, 2, 3, 1).numpy())["mean"], psc(pixels[:50]).mean, rtol=1e-3)


@pytest.mark.thorough
def test_colour_and_many_classes_with_their_own_covariances(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {}
    for classes in (10, 100):
        labels = torch.arange(classes).repeat_interleave(8)
        colours = torch.rand(classes, 3, 1, 1)[labels] + 0.1 * torch.rand(len(labels), 3, 12, 12)
        pixels = colours.mul(200).byte()
        train, val = (TensorDataset(pixels[at::2], labels[at::2]) for at in (0, 1))
        preprocess = Preprocess("RGB", 12, 12, None, (0.5,) * 3, (0.5,) * 3)
        net = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(200, classes)).eval()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            psc = PSC.fit(net, train, val, preprocess=preprocess, layer="0", density="gda", head="duq", pca=5)
        psc.export(tmp_path / str(classes), pixels[1::2])
        assert all(each.agrees for each in check(tmp_path / str(classes)))
        graph = onnx.load(tmp_path / str(classes) / GRAPH).graph
        after = [each for each in graph.initializer if each.name.startswith("answers/")]
        sizes[classes] = len(graph.node), sum(each.ByteSize() for each in after)
    assert sizes[100][0] == sizes[10][0] and sizes[100][1] < 11 * sizes[10][1]
    assert output_of_readme(tmp_path / "100").count("\n") == 2
