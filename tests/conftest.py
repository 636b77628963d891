"""Shared fixtures; shapes of the public numeric functions are checked while tests run."""

from __future__ import annotations

import fcntl
import inspect
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jaxtyping
import pytest
import torch
from beartype import BeartypeConf, beartype
from hypothesis import HealthCheck, settings
from jaxtyping import jaxtyped

if TYPE_CHECKING:
    from psc_core.data.dataset import ImageDataset


def _jaxtyped(*, typechecker: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Decorate as jaxtyping does, but check no axes where no array is named: that takes a fifth of the tests' time."""
    check_axes, check = jaxtyped(typechecker=typechecker), beartype(conf=BeartypeConf(violation_type=TypeError))

    def decorate(each: Any) -> Any:
        try:
            named = str([*inspect.get_annotations(each, eval_str=True).values()])
        except (NameError, TypeError):  # of what comes later in the file
            return check_axes(each)
        return check_axes(each) if isinstance(each, type) or "jaxtyping." in named else check(each)

    return decorate


# Before psc_core is imported by any test: annotations become checks.
jaxtyping.jaxtyped = _jaxtyped  # type: ignore[assignment]
jaxtyping.install_import_hook("psc_core", "beartype.beartype")

torch.set_num_threads(1)
os.environ.setdefault("PSC_BACKEND", "folded")  # Measuring backends takes seconds, and its result varies.
settings.register_profile("nightly", deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("nightly"), derandomize=True, max_examples=40)
settings.load_profile("ci")


def pytest_xdist_auto_num_workers() -> int:
    """Return the number of workers of ``-n auto``: more than processors, because a quarter of the time is waiting."""
    return 3 * len(os.sched_getaffinity(0)) // 2


@dataclass(frozen=True)
class TinyJob:
    """Arguments of a quick ``psc-fit`` run (without ``--out``) and its trained network."""

    args: tuple[str, ...]
    net: torch.nn.Module

    @property
    def weights(self) -> str:
        """The file of the network's weights."""
        return self.args[self.args.index("--weights") + 1]


Run = Callable[..., tuple[str, str]]


ROOT = Path(__file__).resolve().parents[1]
SHIPPED_BUNDLE = ROOT / "artifacts" / "dirty-mnist-resnet18"


# Folders and files whose tests start processes, browsers or whole fits.
THOROUGH = (
    "/across/", "/attacks/", "/browser/", "/deploy/", "/docs/", "/nightly/", "/app/test_healthcheck.py",
    "/app/test_processes.py", "/app/test_server.py",
    "/cli/test_fit_on_gpu.py", "/cli/test_job.py", "/fitting/test_calibrate.py",
    "/fitting/test_checkpoint.py", "/fitting/test_distributed.py", "/fitting/test_in_memory.py",
    "/fitting/test_memory.py", "/fitting/test_recalibrate.py", "/fitting/test_stored_images.py",
    "/network/test_export.py", "/network/test_onnx.py", "/psc_core/test_allocator.py",
    "/psc_core/test_bundle_format.py",
    "/tests/test_examples.py", "/tests/test_openapi.py", "/tests/test_serving_imports.py", "/tests/test_shipped.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that ``make test`` leaves to ``make test-all``."""
    for item in items:
        if any(part in item.path.as_posix() for part in THOROUGH):
            item.add_marker(pytest.mark.thorough)


@pytest.fixture(scope="session", autouse=True)
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A cache folder of the tests' own, for their subprocesses too."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session", autouse=True)
def warm_exports() -> Iterator[None]:
    """The processes that export networks to ONNX are forks of one that has imported what takes seconds."""
    from tests import warm

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("psc_core.network.export.subprocess", warm)
        yield


@pytest.fixture(scope="session")
def data_root() -> Path:
    """Small real subsets of the data sets, kept in the repository."""
    return ROOT / "tests" / "data"


@pytest.fixture(scope="session")
def full_data() -> Path:
    """The whole data sets, where PSC_DATA names them."""
    if not os.environ.get("PSC_DATA"):
        pytest.skip("PSC_DATA does not name the full data sets")
    return Path(os.environ["PSC_DATA"])


@pytest.fixture(scope="session")
def shipped_bundle() -> Path:
    """The bundle that the repository ships."""
    return SHIPPED_BUNDLE


def made_once(temporary: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a folder that the first of the test processes to ask for it has filled."""
    root = temporary.getbasetemp()
    folder = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "made" / name
    folder.parent.mkdir(exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.with_suffix(".whole").exists():
            folder.mkdir()
            make(folder)
            folder.with_suffix(".whole").touch()
    return folder


def _job(
    temporary: pytest.TempPathFactory, data: str, train: Callable[[ImageDataset], torch.nn.Module], *words: str
) -> TinyJob:
    from safetensors.torch import load_file, save_file

    from psc_core.data.open import open_dataset
    from psc_core.images.preprocess import PRESETS
    from tests import tiny

    def save_trained(folder: Path) -> None:
        net = train(open_dataset(data, split="train", preprocess=PRESETS["mnist"]))
        save_file(net.state_dict(), folder / "net.safetensors")

    weights = made_once(temporary, train.__name__, save_trained) / "net.safetensors"
    state = load_file(weights)
    net = tiny.network(len(state["8.bias"])).eval()
    net.load_state_dict(state)
    args = ["--model", "tests.tiny:network", "--weights", str(weights), "--preset", "mnist", "--device", "cpu"]
    return TinyJob((*args, "--train", data, "--val", data, "--minimum-dim", "8", *words), net)


@pytest.fixture(scope="session")
def tiny_job(tmp_path_factory: pytest.TempPathFactory, data_root: Path) -> TinyJob:
    """A small network trained on real digits and its command line for ``psc-fit``, once a test process."""
    from tests import tiny

    return _job(tmp_path_factory, f"dirty-mnist:{data_root}", tiny.train, "--stored-images", "20")


def _bundle(temporary: pytest.TempPathFactory, name: str, job: TinyJob, *words: str) -> Path:
    from psc_core.cli.fit import main

    def fit(folder: Path) -> None:
        assert main([*job.args, *words, "--out", str(folder / name)]) == 0

    return made_once(temporary, f"{name}-of-job", fit) / name


@pytest.fixture(scope="session")
def tiny_bundle(tiny_job: TinyJob, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle that ``psc-fit`` makes of :func:`tiny_job`."""
    return _bundle(tmp_path_factory, "bundle", tiny_job)


@pytest.fixture
def bundle(tiny_bundle: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))


@pytest.fixture(scope="session")
def angle_job(tmp_path_factory: pytest.TempPathFactory, data_root: Path) -> TinyJob:
    """A small network that predicts the angle of turned digits, and its command line for ``psc-fit``."""
    from tests import tiny

    words = ("--task", "regression", "--coverage", "0.9")
    return _job(tmp_path_factory, f"rotated-mnist:{data_root}", tiny.train_values, *words)


@pytest.fixture(scope="session")
def neighbours_bundle(angle_job: TinyJob, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with the head ``dve``, which is fitted in few steps."""
    from psc_core.heads import dve

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dve, "STEPS", 20)
        return _bundle(tmp_path_factory, "neighbours", angle_job, "--head", "dve", "--no-report")


@pytest.fixture(scope="session")
def angle_bundle(angle_job: TinyJob, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle that ``psc-fit`` makes of :func:`angle_job`."""
    return _bundle(tmp_path_factory, "angles", angle_job)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command line that ends with ``code``: what it says on its standard output, and on standard error."""

    def run(main: Callable[[list[str]], int], *words: object, code: int = 0) -> tuple[str, str]:
        try:
            ended = main([*map(str, words)])
        except SystemExit as ending:
            ended = int(ending.code or 0)
        out, err = capsys.readouterr()
        assert ended == code, (out, err)
        return out, err

    return run


@pytest.fixture
def device_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step is quick enough for the event loop, so that a test may hold the network up while it looks at the rest."""
    monkeypatch.setattr("app.inference.steps.QUICK_SECONDS", 0.0)
