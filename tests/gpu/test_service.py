"""The service on a GPU: networks cut by hooks, explanations, ``--compile``, two models, reloads, too little memory."""

import asyncio
import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jaxtyping
import numpy as np
import pytest
import torch
from pydantic import SecretStr
from safetensors.torch import save_file
from starlette.testclient import TestClient
from torch import Tensor, nn

from app.inference.batcher import Batcher, RequestMode
from app.inference.decoder import Decoder
from app.inference.engine import Engine
from app.inference.steps import EagerStep, Step, make_step
from app.main import allow_compiled_shapes, create_app
from app.memory import MemoryBudget
from app.settings import Settings, load_settings
from benchmarks.serving.inputs import digits as encoded_digits
from psc_core import PRESETS, PSC
from psc_core.cli.fit import main as psc_fit
from tests.app.inference.support import Metrics
from tests.conftest import SHIPPED_BUNDLE
from tests.opened import opened
from tests.tiny import network

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = torch.device("cuda")
UNTRACEABLE = "tests.gpu.test_service:untraceable"
KEY = "k" * 32
FITS = 2  # The number of images for which there is memory in the test of too little memory.


class _Looks(nn.Module):
    """A network that looks at its input, so that it cannot be traced and waits for the device."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        if not bool(x.isfinite().all()):
            raise ValueError("expected finite images")
        logits: Tensor = self.body(x)
        return logits


def untraceable(num_classes: int = 10) -> nn.Module:
    return _Looks(network(num_classes))


@pytest.fixture(scope="module")
def hooked(tmp_path_factory: pytest.TempPathFactory, data_root: Path) -> Path:
    folder, data = tmp_path_factory.mktemp("hooked"), f"mnist:{data_root}"
    torch.manual_seed(0)
    save_file(untraceable().state_dict(), folder / "net.safetensors")
    words = ["--model", UNTRACEABLE, "--weights", str(folder / "net.safetensors"), "--preset=mnist", "--device=cpu"]
    words += ["--train", data, "--val", data, "--max-images=300", "--minimum-dim=8", "--no-report"]
    assert psc_fit([*words, "--out", str(folder / "bundle")]) == 0
    return folder / "bundle"


@pytest.fixture(scope="module")
def digits() -> Tensor:
    test = opened("dirty-mnist")
    return next(iter(test.batches(8))).images


def warm(psc: PSC, max_batch: int, **options: Any) -> Step:
    step = make_step(psc.pipeline, psc.preprocess.shape, max_batch=max_batch, device=psc.device, **options)
    step.warm_up()
    return step


def assert_same_as_eager(step: Step, psc: PSC, images: Tensor, atol: float) -> None:
    for count in (1, len(images)):
        step.input(0)[:count] = images[:count].numpy()
        step.launch(0, count)
        got = step.fetch(0, count)
        with torch.inference_mode():
            expected = psc.pipeline(images[:count].to(psc.device)).float().cpu().numpy()
        np.testing.assert_allclose(got, expected, rtol=1e-3, atol=atol)


def test_a_network_cut_by_hooks_runs_eagerly(hooked: Path, digits: Tensor) -> None:
    psc = PSC.load(hooked, device=DEVICE, allow_factories=[UNTRACEABLE])
    assert not psc.pipeline.is_traced
    step = warm(psc, 8)
    assert isinstance(step, EagerStep)
    assert_same_as_eager(step, psc, digits, 1e-3)


def test_explanations_equal_the_cpus(digits: Tensor) -> None:
    on_gpu, on_cpu = (
        warm(PSC.load(SHIPPED_BUNDLE, device=device), 4).explain(digits[:4].numpy(), RequestMode.EXPLAIN).explanation
        for device in (DEVICE, "cpu")
    )
    assert set(on_gpu) == set(on_cpu) != set()
    for name, array in on_cpu.items():
        np.testing.assert_allclose(on_gpu[name], array, rtol=1e-2, atol=0.05, err_msg=name)


@pytest.mark.filterwarnings("ignore")  # torch's own, when it compiles
def test_compiled_step_gives_the_same_outputs(digits: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # The compiler cannot look into its checks.
    allow_compiled_shapes()
    psc = PSC.load(SHIPPED_BUNDLE, device=DEVICE)
    assert_same_as_eager(warm(psc, 2, compiled=True), psc, digits[:2], 0.05)


@contextmanager
def serving(*served: Path, **settings: Any) -> Iterator[TestClient]:
    given: dict[str, Any] = {"device": str(DEVICE), "max_batch_size": 16, "backend": "folded", "log_level": "error"}
    bundles = tuple(map(str, served or (SHIPPED_BUNDLE,)))
    app = create_app(Settings(bundle=bundles, admin_keys=(SecretStr(KEY),), **given, **settings))
    with TestClient(app) as client:
        for _ in range(3000):
            if client.get("/readyz").status_code == 200:
                break
            client.portal.call(asyncio.sleep, 0.02)  # type: ignore[union-attr]
        yield client


def post(client: TestClient, image: bytes, path: str = "/predict") -> Any:
    return client.post(path, content=image, headers={"Content-Type": "image/png"})


def test_single_images_from_many_threads_and_an_explanation() -> None:
    images = encoded_digits(64)
    with serving() as client, ThreadPoolExecutor(32) as pool:
        assert {answer.status_code for answer in pool.map(lambda image: post(client, image), images)} == {200}
        explained = post(client, images[0], "/predict?explain=true")
        assert explained.json()["predictions"][0]["explanation"]
        assert "psc_batch_size_count" in client.get("/metrics").text


def test_a_traced_and_a_hooked_model_take_turns(hooked: Path) -> None:
    paths = [f"/models/{name}/predict" for name in (SHIPPED_BUNDLE.name, hooked.name)]
    jobs = [(image, path) for image in encoded_digits(32) for path in paths]
    with serving(SHIPPED_BUNDLE, hooked, allow_factories=(UNTRACEABLE,)) as client, ThreadPoolExecutor(16) as pool:
        alone = [post(client, *job).json()["predictions"][0]["confidence"] for job in jobs[:2]]
        answers = list(pool.map(lambda job: post(client, *job), jobs))
    assert {answer.status_code for answer in answers} == {200}
    together = [answer.json()["predictions"][0]["confidence"] for answer in answers[:2]]
    np.testing.assert_allclose(together, alone, atol=1e-3)


def test_reloads_under_load_lose_no_request_and_no_memory() -> None:
    (image,), held = encoded_digits(1), []
    with serving() as client, ThreadPoolExecutor(4) as pool:
        for _ in range(8):
            pending = [pool.submit(post, client, image) for _ in range(16)]
            answer = client.post("/admin/reload", headers={"Authorization": f"Bearer {KEY}"})
            assert answer.status_code == 200, answer.text
            assert {each.result().status_code for each in pending} == {200}
            gc.collect()
            held.append(torch.cuda.memory_allocated(DEVICE))
    # Each stream and handle of cuBLAS has a workspace of 32 MiB; after four reloads all have theirs.
    assert held[-1] <= 1.01 * held[3] and held[-1] - held[0] < 10 * (32 << 20), held


def test_metrics_have_the_gpu() -> None:
    with serving() as client:
        text = client.get("/metrics").text
    assert "\npsc_gpu_memory_bytes" in text
    assert "\npsc_gpu_utilisation_ratio" in text, "NVML?"


class Hungry:
    """A network that takes a part of the device's memory for each image."""

    is_traced = False

    def __init__(self) -> None:
        self.sizes = list[int]()

    def __call__(self, images: Tensor, /) -> Tensor:
        self.sizes.append(len(images))
        each = torch.cuda.mem_get_info(DEVICE)[1] // (FITS + 1)
        torch.empty(each * len(images), dtype=torch.uint8, device=DEVICE)
        return images.flatten(1).float().mean(1, keepdim=True)


def test_a_batch_too_large_for_the_memory_runs_in_halves() -> None:
    preprocess, hungry = PRESETS["mnist"], Hungry()
    step = EagerStep(hungry, preprocess.shape, max_batch=8, device=DEVICE)  # type: ignore[arg-type]
    step.warm_up = lambda *_: False  # type: ignore[method-assign]
    images = np.stack([np.full(preprocess.shape, value, np.uint8) for value in range(8)])
    limits = {"max_pixels": 10_000, "max_pixels_per_request": 1 << 20, "inline_decode_bytes": 1 << 20}
    settings = load_settings({"decode_threads": 1, **limits})

    async def run() -> Any:
        with ThreadPoolExecutor(1) as pool:
            budget = MemoryBudget(1 << 30, 1 << 40, max_pixels=10_000)
            decoder = Decoder(pool, budget, preprocess, settings)
            batcher = Batcher(max_batch=8, max_queue_images=64, max_delay_s=0.0)
            engine = Engine("hungry", step, decoder, batcher=batcher, recorder=Metrics(), deadline_s=50.0)
            await engine.start()
            try:
                return (await engine.predict(images)).packed
            finally:
                await engine.close(within_s=5)

    np.testing.assert_allclose(asyncio.run(run())[:, 0], range(8), atol=1e-3)
    assert max(hungry.sizes) == 8 and min(hungry.sizes) <= FITS, hungry.sizes
