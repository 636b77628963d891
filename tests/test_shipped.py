"""The shipped bundle over real HTTP: what the README's ``curl`` lines say, and served = fitted."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.runs import RESULTS
from psc_core import PSC, ClassificationPrediction, open_dataset
from tests.conftest import SHIPPED_BUNDLE
from tests.encoded import encode
from tests.psc_core.images.support import png_of
from tests.served import HTTP, serve_shipped

EXAMPLES = SHIPPED_BUNDLE / "examples"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A service of the shipped bundle."""
    with serve_shipped() as address:
        yield address


def ask(url: str, *files: tuple[str, bytes]) -> list[dict]:  # type: ignore[type-arg]
    answer = HTTP.post(f"{url}/predict", files=[("images", file) for file in files])
    assert answer.status_code == 200, answer.text
    return answer.json()["predictions"]  # type: ignore[no-any-return]


def example(name: str) -> tuple[str, bytes]:
    return name, (EXAMPLES / name).read_bytes()


def test_readme_examples(url: str) -> None:
    (clean,) = ask(url, example("clean.png"))
    assert (clean["label"], clean["is_ood"], clean["decision"]) == ("7", False, "accept")
    assert clean["predictive_entropy"] < 0.1
    (ambiguous,) = ask(url, example("ambiguous.png"))
    assert (ambiguous["is_ood"], ambiguous["decision"]) == (False, "abstain_ambiguous")
    assert ambiguous["predictive_entropy"] > 0.5
    assert len(ambiguous["prediction_set"]) > 1
    (shirt,) = ask(url, example("shirt.png"))
    assert (shirt["is_ood"], shirt["decision"]) == (True, "abstain_ood")


def test_the_unusual_corner_is_found(url: str) -> None:
    parts = [("images", example("corner.png"))]
    answer = HTTP.post(f"{url}/predict?explain=true&map=true", files=parts)
    (corner,) = answer.json()["predictions"]
    assert (corner["label"], corner["decision"]) == ("7", "abstain_ood")
    left, top, right, bottom = corner["explanation"]["map"]["box"]
    piece, shared = (12 / 28) ** 2, (min(right, 12 / 28) - left) * (min(bottom, 12 / 28) - top)  # of the shirt
    assert shared / (piece + (right - left) * (bottom - top) - shared) > 0.7  # The whole corner, 79 × 57 %, has 0.4.
    assert [each["label"] for each in corner["explanation"]["nearest"]] == ["7"] * 3


@pytest.fixture(scope="module")
def psc() -> PSC:
    return PSC.load(SHIPPED_BUNDLE, device="cpu")


@pytest.fixture(scope="module")
def mixed(psc: PSC, data_root: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, bytes]]:
    """Digits, ambiguous digits and clothes, as PNG files."""
    folder = tmp_path_factory.mktemp("mixed")
    files = []
    for spec in ("mnist", "ambiguous-mnist", "fashion-mnist"):
        data = open_dataset(f"{spec}:{data_root}", split="test", preprocess=psc.preprocess)
        for i in range(24):
            path = folder / f"{spec}-{i}.png"
            Image.fromarray(data.image(i)[0]).save(path)
            files.append((path.name, path.read_bytes()))
    return files[::3] + files[1::3] + files[2::3]


@pytest.fixture(scope="module")
def expected(psc: PSC, mixed: list[tuple[str, bytes]]) -> ClassificationPrediction:
    return psc.predict([data for _, data in mixed])


@pytest.mark.parametrize("size", [1, 2, 5, 16, 37, 64])
def test_served_equals_fitted(
    url: str, psc: PSC, mixed: list[tuple[str, bytes]], expected: ClassificationPrediction, size: int
) -> None:
    parts = [mixed[start : start + size] for start in range(0, len(mixed), size)]
    with ThreadPoolExecutor(8) as pool:  # requests overlap, so batches mix images of several requests
        served = [prediction for answer in pool.map(lambda part: ask(url, *part), parts) for prediction in answer]
    got = torch.tensor([prediction["probabilities"] for prediction in served])
    torch.testing.assert_close(got, expected.probabilities, atol=1e-5, rtol=0)
    p_values = np.array([prediction["ood_p_value"] for prediction in served])
    assert np.abs(p_values - expected.ood_p_value.numpy()).max() <= 2 / (1 + len(psc.calibration))
    assert [prediction["label"] for prediction in served] == list(expected.labels)


def test_size_and_provenance(psc: PSC) -> None:
    assert sum(file.stat().st_size for file in SHIPPED_BUNDLE.iterdir()) <= 25_000_000
    provenance = psc.report["provenance"]
    assert provenance["model"] == "torchvision:resnet18"
    assert len(provenance["weights_sha256"]) == len(provenance["train"]["sha256"]) == 64
    assert psc.report["metrics"]["validation_images"] == 4000
    assert len(psc.calibration) == 4000


@pytest.mark.data
@pytest.mark.parametrize("every", [10, pytest.param(1, marks=pytest.mark.slow)])
def test_readme_numbers(psc: PSC, full_data: Path, every: int) -> None:
    from psc_core.evaluation.evaluate import evaluate

    digits, clothes = (
        open_dataset(f"{name}:{full_data}", split="test", preprocess=psc.preprocess)
        for name in ("dirty-mnist", "fashion-mnist")
    )
    digits, clothes = (data.subset(torch.arange(0, len(data), every)) for data in (digits, clothes))
    report = evaluate(psc, digits, {"fashion-mnist": clothes}).report
    assert (report.images, report.ood_images["fashion-mnist"]) == (16_000 // every, 10_000 // every)
    published = json.loads((RESULTS / "shipped.json").read_text())
    assert published["model"]["version"] == psc.version
    for found, expected in (
        (report.separation["fashion-mnist"]["psc"].auroc, published["separation"]["fashion-mnist"]["psc"]["auroc"]),
        (report.ambiguity["psc"], published["ambiguity"]["psc"]),
        (report.classification["psc"]["accuracy"], published["classification"]["psc"]["accuracy"]),
        (report.false_alarms.rate, published["false_alarms"]["rate"]),
    ):
        # Every tenth image has a standard error of at most 0.01.
        assert found == pytest.approx(expected, abs=1e-3 if every == 1 else 0.03)


def test_batch_sizes_agree(psc: PSC, mixed: list[tuple[str, bytes]]) -> None:
    images = torch.stack([torch.from_numpy(psc.preprocess.from_bytes(data)) for _, data in mixed[:64]])
    whole = psc.predict(images).probabilities
    for size in (1, 2, 3, 7, 8, 9, 31, 32, 33, 63):
        start = (size * 7) % (65 - size)  # other neighbours at every size
        part = psc.predict(images[start : start + size]).probabilities
        torch.testing.assert_close(part, whole[start : start + size], atol=1e-5, rtol=0)


def jpeg() -> bytes:
    return encode(Image.effect_noise((64, 64), 50), "JPEG")


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"hello", 415), (jpeg()[:600], 422), (png_of(b"", 10_000, 10_000, 8, 0), 413), (b"", 400)],
    ids=["not an image", "truncated JPEG", "100-megapixel header", "empty body"],
)
def test_bad_images_get_a_problem(url: str, body: bytes, status: int) -> None:
    before = ask(url, example("clean.png"))
    answer = HTTP.post(f"{url}/predict", content=body, headers={"content-type": "image/png"})
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.status_code == answer.json()["status"] == status
    together = HTTP.post(f"{url}/predict", files=[("images", example("clean.png")), ("images", ("bad.png", body))])
    assert together.status_code >= 400 and "bad.png" in together.json()["detail"]
    assert ask(url, example("clean.png")) == before
