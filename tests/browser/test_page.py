"""The page at ``/`` in a real Chromium: what a person sees, does, and is protected from."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from psc_core.answers import REGRESSION_DECISIONS, ClassificationPolicy, RegressionAnswer, RegressionPolicy
from psc_core.answers import REGRESSION_SCORES as VALUE_SCORES
from psc_core.tasks.base import Outputs
from tests.app.fakes import (
    FakeModel,
    FakePipeline,
    FakePipelineWithChecks,
    FakePipelineWithReviewed,
    FakePipelineWithStoredImages,
    FakeValueModel,
    pixels,
    png,
)
from tests.app.live import live_server
from tests.decisions import Decider
from tests.encoded import encode
from tests.served import GUARD_SECONDS, HTTP

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
CHROMEDRIVER = shutil.which("chromedriver")
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--force-color-profile=srgb",
]
DROP = """
const [name, bytes, type] = arguments;
const data = new DataTransfer();
data.items.add(new File([new Uint8Array(bytes)], name, {type}));
const area = document.getElementById("upload");
for (const kind of ["dragenter", "dragover", "drop"]) {
  area.dispatchEvent(new DragEvent(kind, {dataTransfer: data, bubbles: true, cancelable: true}));
}
"""
Driver = Any


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    if CHROMIUM is None or CHROMEDRIVER is None:
        pytest.skip("chromium is not installed (apt-get install chromium chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(CHROMEDRIVER))
    browser.set_window_size(1200, 900)
    yield browser
    browser.quit()


@pytest.fixture
def driver(chromium: Driver) -> Iterator[Driver]:
    """Chromium with an empty log, of the usual size and colours afterwards."""
    chromium.get_log("browser")
    yield chromium
    chromium.get("about:blank")  # The page of a service that has ended would complain in the next test's log.
    chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def resize(driver: Driver, width: int, scheme: str = "light") -> None:
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    features = {"prefers-color-scheme": scheme, "prefers-reduced-motion": "reduce"}
    media = {"features": [{"name": name, "value": value} for name, value in features.items()]}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with live_server() as url:
        yield url


@pytest.fixture
def page(driver: Driver, url: str) -> Driver:
    driver.get(url)
    until(lambda: "3 classes" in content(driver, "#model"))
    return driver


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """A clear image, one between two classes, one unlike the others, and one that is no image."""
    stripes = pixels(0)
    stripes[:4] = 255
    contents = {
        "clear.png": png(255),
        "between.png": png(64),
        "strange.png": encode(stripes),
        "broken.png": b"this is not a picture",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    return {name.removesuffix(".png"): tmp_path / name for name in contents}


def until(condition: Callable[[], Any], seconds: float = GUARD_SECONDS) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "what was waited for did not happen"
        time.sleep(0.02)


def find(driver: Driver, selector: str) -> list[Any]:
    elements: list[Any] = driver.find_elements("css selector", selector)
    return elements


def text(driver: Driver, selector: str) -> str:
    return " | ".join(element.text for element in find(driver, selector))


def content(driver: Driver, selector: str) -> str:
    return str(find(driver, selector)[0].get_property("textContent"))


def says(driver: Driver, selector: str, words: str) -> bool:
    return words in text(driver, selector)


def choose(driver: Driver, *paths: Path) -> None:
    find(driver, "#files")[0].send_keys("\n".join(map(str, paths)))


def classify(driver: Driver, *paths: Path, failed: int = 0) -> None:
    choose(driver, *paths)
    images = f"{len(paths)} {'image' if len(paths) == 1 else 'images'}"
    ending = f", {failed} failed." if failed else "."
    until(lambda: text(driver, "#status") == f"{len(paths) - failed} of {images} classified{ending}")
    until(lambda: len(find(driver, "#chart .mark")) == len(paths) - failed)


def tile(driver: Driver, name: str) -> Any:
    return next(each for each in find(driver, ".tile") if each.accessible_name.startswith(name))


def order(driver: Driver) -> list[str]:
    return [
        each.find_element("css selector", "img").get_attribute("alt") for each in find(driver, "li:not([hidden]) .tile")
    ]


def decision_of(driver: Driver, name: str) -> str:
    badge = tile(driver, name).find_element("css selector", ".badge")
    return str(badge.get_attribute("data-decision"))


def open_panel(driver: Driver, name: str) -> None:
    tile(driver, name).click()
    until(lambda: text(driver, "#panel-name") == name)


def slide(driver: Driver, slider: str, fraction: float) -> float | None:
    """Move a slider to this fraction of its length; the value that it says then, None where it says "off"."""
    selector, name = ("#limit", "title") if slider == "limit" else ("#alpha-text", "textContent")
    exact = partial(find(driver, selector)[0].get_property, name)
    before = exact()
    driver.execute_script(
        "const slider = document.getElementById(arguments[0]); slider.value = Math.round(arguments[1] * slider.max);"
        "slider.dispatchEvent(new Event('input', {bubbles: true}));"
        "slider.dispatchEvent(new Event('change', {bubbles: true}));",
        slider,
        fraction,
    )
    until(lambda: exact() != before)
    said = exact().split("\u00a0")[0].split(" ")[0]
    value = float(said.replace("\u2212", "-")) if said else None  # no limit
    return value if value is None or slider != "alpha" else value / 100  # said in per cent


def numbers(driver: Driver) -> dict[str, str]:
    """The table in the panel: the names of its rows to their last values."""
    driver.execute_script("document.getElementById('exact').open = true")
    rows = find(driver, "#numbers tr")
    texts = [[cell.text for cell in row.find_elements("css selector", "th, td")] for row in rows]
    return {row[0].split("\n")[0]: row[-1] for row in texts}


def errors(driver: Driver) -> list[str]:
    """What the browser complained about, but for a model without a map, which says 422."""
    messages = [entry["message"] for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
    return [message for message in messages if not ("map=true" in message and "422" in message)]


def test_gives_every_image_a_decision(page: Driver, files: dict[str, Path]) -> None:
    classify(page, files["clear"], files["between"], files["strange"])
    until(lambda: order(page) == ["strange.png", "between.png", "clear.png"])
    assert [each.text for each in find(page, ".tile")] == [
        "! Unusual\nguess: middle\nstrange.png", "? Unclear\nmiddle?\nbetween.png", "✓ Accept\nbright\nclear.png",
    ]  # fmt: skip
    assert [each.text for each in find(page, "#filters button")] == [
        "All 3", "! Unusual 1", "? Unclear 1", "✓ Accept 1",
    ]  # fmt: skip
    assert tile(page, "clear.png").find_element("css selector", "img").get_property("naturalWidth") == 8
    assert text(page, "#panel-name") in ("strange.png", "between.png") and text(page, "#reason")  # It opens by itself.
    assert errors(page) == []


def test_the_panel_shows_the_numbers_of_an_image(page: Driver, files: dict[str, Path]) -> None:
    classify(page, files["clear"], files["between"], files["strange"])
    open_panel(page, "between.png")
    assert text(page, "#answer") == "middle?" and text(page, "#panel-place") == "2 of 3"
    assert not any(find(page, selector)[0].is_displayed() for selector in ("#numbers", "#why"))  # It has no map.
    page.execute_script("document.querySelector('#exact summary').focus()")
    page.switch_to.active_element.send_keys("\ue007")
    until(find(page, "#evidence")[0].is_displayed)
    assert "Nearest classes: " in text(page, "#evidence") and "Most unusual components: " in text(page, "#evidence")
    assert numbers(page)["Entropy"] == "0.693 nats" and numbers(page)["p-value"] == "1"
    assert "unclear above 0.5" in text(page, "#numbers") and "out of distribution up to 0.2" in text(page, "#numbers")
    rows = find(page, "#classes li")
    assert [row.text.split("\n")[0] for row in rows[:2]] in (["dark", "middle"], ["middle", "dark"])
    fractions = [float(row.text.split("\n")[1].removesuffix(" %")) for row in rows[:2]]
    assert fractions == pytest.approx([50.0, 50.0], abs=2.0)
    fills, track = (find(page, f"#classes {name}") for name in (".fill", ".track"))
    assert fills[0].rect["width"] == pytest.approx(track[0].rect["width"] / 2, rel=0.05)
    assert fills[2].rect["width"] < 2
    open_panel(page, "strange.png")
    histogram = find(page, "#histogram")[0]
    assert len(find(page, "#histogram .bin")) == 40
    here, threshold = (
        float(find(page, f"#histogram {name}")[0].get_attribute("x1")) for name in (".here", ".threshold")
    )
    assert here > threshold
    assert [float(each.text.replace("\u2212", "-")) for each in find(page, "#histogram .tick")]
    assert "99 calibration images" in histogram.get_attribute("aria-label")
    assert text(page, "#reason") == "Unlike the training images."
    find(page, "#close")[0].click()
    until(lambda: not find(page, "#panel")[0].is_displayed())
    assert errors(page) == []


def test_names_the_check_that_alarmed(driver: Driver, files: dict[str, Path]) -> None:
    model = FakeModel(pipeline=FakePipelineWithChecks(), checks=("texture", "content"))
    with live_server({"m": model}) as url:
        driver.get(url)
        classify(driver, files["clear"], files["strange"])
        assert decision_of(driver, "clear.png") == "accept"
        open_panel(driver, "strange.png")
        assert text(driver, "#reason").startswith("Texture that no training image has, and content unlike")
        open_panel(driver, "clear.png")
        assert (numbers(driver)["Check texture"], numbers(driver)["Check content"]) == ("0", "1")
        assert text(driver, "#reason") == "Looks like the training images, and the model is confident enough."
        assert errors(driver) == []


def test_says_which_reviewed_images_it_is_like(driver: Driver, files: dict[str, Path]) -> None:
    model = FakeModel(pipeline=FakePipelineWithReviewed(), checks=("content", "reviewed"))
    with live_server({"m": model}) as url:
        driver.get(url)
        classify(driver, files["strange"])
        expected = "Like 19 images that people reviewed as “drone”, most of them on Nov 12, 2026"
        until(lambda: text(driver, "#reason").startswith(expected))
        assert content(driver, "#nearest h3") == "Most similar reviewed images"
        assert [each.text.splitlines()[0] for each in find(driver, "#nearest li")] == ["drone"] * 3
        assert errors(driver) == []


def test_shows_numbers_and_decides_by_their_intervals(driver: Driver, files: dict[str, Path]) -> None:
    with live_server({"m": FakeValueModel()}) as url:
        driver.get(url)
        names = ("clear", "between", "strange")
        classify(driver, *(files[name] for name in names))
        assert "predicts brightness" in content(driver, "#model")
        assert text(driver, "#limit-name") == "Unclear where wider than"
        between, clear = (tile(driver, f"{name}.png").text for name in ("between", "clear"))
        assert between == "✓ Accept\n25 %\nbetween.png" and clear == "? Unclear\n90 to 110 %\nclear.png"
        assert "those with too wide an interval" in text(driver, "#handed")
        open_panel(driver, "clear.png")
        shown = numbers(driver)
        assert (shown["Deviation"], shown["Interval"]) == ("noise 3, model 4", "90 to 110 %")
        assert text(driver, "#reason") == "The interval is wider than 14 %."
        until(lambda: "Nearest training images after layer3" in text(driver, "#evidence"))
        assert "which counts for 75.0 %: 0 % (image 0), 10 % (image 1)" in text(driver, "#evidence")
        find(driver, "#close")[0].click()
        for fraction in (0.02, 0.6, 0.9, 1.0):
            max_width = slide(driver, "limit", fraction)
            for name in names:
                sent = {"images": (f"{name}.png", files[name].read_bytes())}
                query = {} if max_width is None else {"max_width": max_width}
                answer = HTTP.post(f"{url}/predict", files=sent, params=query).json()["predictions"][0]
                known = "accept" if max_width is None and not answer["is_ood"] else answer["decision"]
                assert decision_of(driver, f"{name}.png") == known, (name, max_width)
        assert errors(driver) == []


def test_classifies_and_clears_dropped_images(page: Driver, files: dict[str, Path]) -> None:
    page.execute_script(DROP, "dropped.png", list(files["clear"].read_bytes()), "image/png")
    until(lambda: "✓ Accept" in text(page, ".tile"))
    assert order(page) == ["dropped.png"]
    assert "over" not in find(page, "#upload")[0].get_attribute("class")
    page.execute_script(DROP, "notes.txt", [65], "text/plain")
    assert text(page, "#status") == "1 of 2 images classified, 1 failed."
    assert "Not an image (text/plain), so it was not sent" in text(page, "#reason")
    find(page, "#clear")[0].click()
    until(lambda: not find(page, "#work")[0].is_displayed())
    assert find(page, ".tile") == []
    assert page.switch_to.active_element.get_attribute("id") == "files"


def draw(driver: Driver, *points: tuple[float, float]) -> None:
    """A stroke with the mouse, through these fractions of the canvas."""
    canvas = find(driver, "#canvas")[0]
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
    left, top, width, height = driver.execute_script(
        "const box = arguments[0].getBoundingClientRect(); return [box.left, box.top, box.width, box.height]", canvas
    )
    for kind, (x, y) in zip(
        ("Pressed", *["Moved"] * len(points), "Released"), (points[0], *points, points[-1]), strict=True
    ):
        event = {"type": f"mouse{kind}", "x": left + x * width, "y": top + y * height, "button": "left", "buttons": 1}
        driver.execute_cdp_cmd("Input.dispatchMouseEvent", {**event, "clickCount": 1})


def drawn(driver: Driver, name: str) -> np.ndarray[Any, Any]:
    """The grey values of a tile's picture."""
    until(lambda: tile(driver, name).find_element("css selector", "img").get_property("naturalWidth"))
    values, width = driver.execute_script(
        "const [picture] = arguments, {naturalWidth: width, naturalHeight: height} = picture;"
        "const context = new OffscreenCanvas(width, height).getContext('2d'); context.drawImage(picture, 0, 0);"
        "return [[...context.getImageData(0, 0, width, height).data], width]",
        tile(driver, name).find_element("css selector", "img"),
    )
    return np.array(values).reshape(-1, width, 4)[..., 0]


def test_a_drawing_is_asked_like_a_file(page: Driver) -> None:
    assert not find(page, "#ask")[0].is_enabled()
    draw(page, (0.0, 0.2), (0.9, 0.2))
    draw(page, (0.1, 0.1), (0.2, 0.9))
    find(page, "#unstroke")[0].click()
    find(page, "#ask")[0].click()
    until(lambda: text(page, "#status") == "1 of 1 image classified.")
    grey = drawn(page, "drawing 1.png")
    assert grey.shape == (8, 8) and all(grey == pytest.approx(each, abs=4) for each in (grey[:, ::-1], grey[::-1]))
    assert (grey[:3] == 255).all() and (grey[3, 2:6] < 200).all() and grey[3, 0] == 255  # Smooth, and in the middle.
    find(page, "#invert")[0].click()
    find(page, "#ask")[0].click()
    until(lambda: text(page, "#status") == "2 of 2 images classified.")
    assert drawn(page, "drawing 2.png") == pytest.approx(255 - grey, abs=1)
    find(page, "#wipe")[0].click()
    assert not find(page, "#ask")[0].is_enabled()
    draw(page, (0.2, 0.7))  # a tap
    find(page, "#ask")[0].click()
    until(lambda: text(page, "#status") == "3 of 3 images classified.")
    assert (drawn(page, "drawing 3.png")[3:5, 3:5] > 0).all() and errors(page) == []


def test_a_line_is_drawn_without_a_secure_context(driver: Driver, url: str) -> None:
    """Browsers coalesce events only over HTTPS and on this machine."""
    with before_the_page(driver, "delete PointerEvent.prototype.getCoalescedEvents"):
        driver.get(url)
        until(lambda: "3 classes" in content(driver, "#model"))
        draw(driver, (0.1, 0.5), (0.9, 0.5))
        find(driver, "#ask")[0].click()
        until(lambda: text(driver, "#status") == "1 of 1 image classified.")
        assert (drawn(driver, "drawing 1.png")[4, 2:6] < 200).all() and errors(driver) == []


def test_a_bound_is_not_rounded_down(driver: Driver, files: dict[str, Path]) -> None:
    policy = ClassificationPolicy(alpha=0.033, ambiguity_threshold=0.5, coverage=0.9, risk=0.022)
    with live_server({"m": FakeModel("v1", FakePipeline(), policy)}) as url:
        driver.get(url)
        classify(driver, files["clear"])
        assert text(driver, "#handed").startswith("At most 3 in 100 accepted answers are wrong.")
        assert "50 unclear, up to 4 unusual" in text(driver, "#handed")
        found = driver.execute_async_script(
            "import('./page/format.js').then(({atMost}) => arguments[0]([0.07, 0.002, 1].map(atMost)))"
        )
        assert found == [[7, 100], [2, 1000], [100, 100]]


@pytest.mark.parametrize(
    ("mean", "lower", "upper", "shown"),
    [
        (1987.42, 1984.61, 1990.21, ("1987.4", "1984.6", "1990.2")),
        (84234.0, 84114.0, 84354.0, ("84230", "84110", "84350")),
        (0.000312, 0.000308, 0.000316, ("0.0003120", "0.0003080", "0.0003160")),
        (-0.01, -5.2, 5.3, ("0", "-5", "5")),
    ],
)
def test_numbers_are_as_fine_as_their_interval(
    page: Driver, mean: float, lower: float, upper: float, shown: tuple[str, str, str]
) -> None:
    ends = {"mean": mean, "lower": lower, "upper": upper}
    found = page.execute_async_script(
        "const model = {target: {unit: ''}};"
        "import('./page/tasks.js').then(({TASKS: {regression: task}}) => arguments[1]("
        "['accept', 'abstain_uncertain'].map((decision) => task.answer(arguments[0], decision, model))))",
        ends,
    )
    assert [each.replace("\u2212", "-") for each in found] == [shown[0], f"{shown[1]} to {shown[2]}"]
    rest = dict.fromkeys(("aleatoric", "epistemic", "log_density", "ood_score", "ood_p_value"), 0.5)
    cells = RegressionAnswer(**ends, **rest, is_ood=False, decision="accept").cells()
    assert (cells["mean"], cells["interval"]) == (shown[0], f"{shown[1]} … {shown[2]}")


def test_known_numbers_keep_their_digits(page: Driver) -> None:
    numbers = [1987, 12345.6, 1000004, 123456789, 1986.9999999, 0.1 + 0.2, -4.25]
    found = page.execute_async_script(
        "import('./page/tasks.js').then(({TASKS: {regression: task}}) => arguments[1]("
        "arguments[0].map((value) => task.kept({value}, {target: {unit: 'm'}}))))",
        numbers,
    )
    expected = ["1987", "12345.6", "1000004", "123456789", "1987", "0.3", "-4.25"]
    assert [each.replace("\u2212", "-") for each in found] == [f"{number}\u00a0m" for number in expected]


def test_sliders_decide_as_the_service_does(page: Driver, files: dict[str, Path], url: str) -> None:
    names = ("clear", "between", "strange")
    classify(page, *(files[name] for name in names))
    assert "About 70 in 100 ordinary images go to a person: 50 unclear, up to 20 unusual by" in text(page, "#handed")
    for alpha, threshold in ((0.0, 0.55), (0.9, 0.35), (1.0, 1.0), (0.4, 0.4), (0.5, 0.0)):
        query = {"alpha": slide(page, "alpha", alpha), "ambiguity_threshold": slide(page, "limit", threshold)}
        query = {name: value for name, value in query.items() if value is not None}
        for name in names:
            sent = {"images": (f"{name}.png", files[name].read_bytes())}
            answer = HTTP.post(f"{url}/predict", files=sent, params={"ambiguity_threshold": 9, **query}).json()
            assert decision_of(page, f"{name}.png") == answer["predictions"][0]["decision"], (name, query)
    assert text(page, "#handed") == "About 7 in 100 ordinary images go to a person, unusual by mistake."
    assert "the model keeps its own limits" in text(page, "#own")
    find(page, "#reset")[0].click()
    until(lambda: not find(page, "#own")[0].is_displayed())
    assert decision_of(page, "clear.png") == "accept"


def decided(page: Driver, predictions: list[Any], policies: list[Any], model: Any) -> list[str]:
    """What the page decides on each prediction under the policy beside it."""
    found: list[str] = page.execute_async_script(
        "const [predictions, policies, model, done] = arguments; import('./page/decide.js').then("
        "({decide}) => done(predictions.map((each, index) => decide(each, policies[index], model))));",
        predictions,
        policies,
        {**model, "calibration": {"images": 99}},
    )
    return found


def shortest(numbers: np.ndarray[Any, Any]) -> list[float]:
    """float32 numbers as the service writes them into JSON."""
    return [float(np.format_float_positional(each)) for each in numbers]


def test_rounds_at_a_threshold_as_the_service_does(page: Driver) -> None:
    entropies = np.random.default_rng(0).uniform(0, 2, 200).astype(np.float32)
    predictions = [{"ood_p_value": 1, "predictive_entropy": each} for each in shortest(entropies)]
    policies = [{"alpha": 0.1, "ambiguity_threshold": each} for each in entropies.astype(np.float64).tolist()]
    assert set(decided(page, predictions, policies, {"task": "classification"})) == {"accept"}  # Not above itself.


def test_measures_an_interval_as_the_service_does(page: Driver) -> None:
    """A million is so large that rounding its ends moves the width by a third."""
    rng = np.random.default_rng(0)
    columns = np.zeros((200, len(VALUE_SCORES)), np.float32)
    columns[:, VALUE_SCORES.index("mean")] = 1e6 + rng.uniform(0, 1e3, 200)
    columns[:, VALUE_SCORES.index("aleatoric")] = rng.uniform(0.05, 0.2, 200)
    columns[:, VALUE_SCORES.index("ood_p_value")] = 1
    policy = RegressionPolicy(alpha=0.1, max_width=0.25, coverage=0.9)
    decided_here = Decider(policy, 1.0).decide(Outputs(columns, VALUE_SCORES, ()))
    predictions = [
        {"ood_p_value": 1, "lower": low, "upper": high}
        for low, high in zip(shortest(decided_here.lower), shortest(decided_here.upper), strict=True)
    ]
    found = decided(page, predictions, [policy.model_dump()] * 200, {"task": "regression"})
    assert found == [REGRESSION_DECISIONS[code] for code in decided_here.decision] and len(set(found)) == 2


def test_every_image_is_a_mark_that_opens_it(page: Driver, files: dict[str, Path]) -> None:
    classify(page, files["clear"], files["between"], files["strange"], files["broken"], failed=1)
    marks, lines = page.execute_script(  # At once, for every answer draws the map anew.
        "const all = (name) => [...document.querySelectorAll(`#chart .${name}`)];"
        "return [all('mark').map((mark) => [mark.textContent, mark.getAttribute('transform')]),"
        "all('threshold').map((line) => [Number(line.getAttribute('x1')), Number(line.getAttribute('y1'))])];"
    )
    places = {name.removesuffix(".png"): [float(part) for part in at[10:-1].split(" ")] for name, at in marks}
    (limit, _), (_, level) = lines
    assert places["clear"][0] < limit < places["strange"][0]
    assert places["between"][1] < level < places["clear"][1]
    slide(page, "alpha", 0.1)
    first = "return Number(document.querySelector('#chart .threshold').getAttribute('x1'))"
    until(lambda: page.execute_script(first) > limit)
    find(page, "#reset")[0].click()
    page.execute_script("document.querySelector('#filters [data-filter=accept]').click()")  # Resetting draws them anew.
    until(lambda: order(page) == ["clear.png"])
    page.execute_script(
        "document.querySelector('#chart .mark[data-decision=abstain_ambiguous]')"
        ".dispatchEvent(new MouseEvent('click', {bubbles: true}));"
    )
    until(lambda: text(page, "#panel-name") == "between.png")
    until(lambda: len(order(page)) == 4)  # It was filtered out.
    assert len(find(page, "#chart .mark.current")) == 1


def test_a_folder_is_summed_up_filtered_and_sorted(page: Driver, files: dict[str, Path]) -> None:
    classify(page, files["clear"], files["between"], files["strange"], files["broken"], failed=1)
    until(lambda: order(page) == ["strange.png", "between.png", "clear.png", "broken.png"])
    assert text(page, "#folder button") == "1 of 4 can be automated | 2 need you | 1 failed"
    for name, names in {"accept": ["clear"], "error": ["broken"], "person": ["strange", "between"]}.items():
        find(page, f"#folder [data-filter={name}]")[0].click()
        until(lambda names=names: order(page) == [f"{each}.png" for each in names])
    find(page, "#filters [data-filter=all]")[0].click()
    for value, names in {"unclear": ["between.png", "strange.png"], "unusual": ["strange.png", "between.png"]}.items():
        find(page, f"#sort option[value={value}]")[0].click()
        until(lambda names=names: order(page)[:2] == names[:2])
    for name, shown in {"abstain_ood": "strange.png", "error": "broken.png"}.items():
        find(page, f"#filters [data-filter={name}]")[0].click()
        until(lambda shown=shown: order(page) == [shown])
        assert find(page, "#filters [aria-pressed=true]")[0].get_attribute("data-filter") == name
    assert len(find(page, ".thumb.none")) == 1 and decision_of(page, "broken.png") == "error"  # It has no preview.
    open_panel(page, "broken.png")
    assert text(page, "#reason").startswith("expected one of JPEG, PNG")  # And not with the name again.
    assert "expected one of JPEG, PNG" in tile(page, "broken.png").text
    assert not find(page, "#answered")[0].is_displayed() and order(page) == ["broken.png"]


def test_the_keyboard_reaches_every_image(page: Driver, files: dict[str, Path]) -> None:
    classify(page, files["clear"], files["between"], files["strange"])
    until(lambda: order(page) == ["strange.png", "between.png", "clear.png"])
    reached = [each.get_attribute("tabindex") for each in find(page, ".tile")]
    assert sorted(reached) == ["-1", "-1", "0"] and len(find(page, ".tile[aria-current][tabindex='0']")) == 1
    page.execute_script("document.querySelector('.tile').focus()")

    def press(key: str) -> None:
        page.switch_to.active_element.send_keys(key)

    press("\ue014")  # →
    press("\ue007")  # Enter
    until(lambda: text(page, "#panel-name") == "between.png")
    assert page.switch_to.active_element.get_attribute("id") == "panel-name"
    press("\ue014")
    until(lambda: text(page, "#panel-name") == "clear.png")
    assert find(page, ".tile[aria-current]")[0].accessible_name.startswith("clear.png")
    for modifier in ("alt", "ctrl", "meta"):  # The browser goes back.
        event = (
            f"new KeyboardEvent('keydown', {{key: 'ArrowLeft', {modifier}Key: true, bubbles: true, cancelable: true}})"
        )
        assert page.execute_script(f"return document.activeElement.dispatchEvent({event})")
    press("\ue014")  # There is none beyond.
    press("\ue00c")  # Escape
    until(lambda: not find(page, "#panel")[0].is_displayed())
    assert page.switch_to.active_element.accessible_name.startswith("clear.png")
    press("\ue011")  # Home
    assert page.switch_to.active_element.accessible_name.startswith("strange.png")
    press("\ue007")
    until(lambda: text(page, "#panel-name") == "strange.png")
    for _ in range(2):
        find(page, "#next")[0].click()
    until(lambda: content(page, "#panel-said") == "clear.png, 3 of 3, ✓ Accept, bright")
    find(page, "#filters [data-filter=abstain_ood]")[0].click()  # It hides the open image.
    until(lambda: order(page) == ["strange.png"])
    until(lambda: [each.accessible_name[:7] for each in find(page, ".tile[tabindex='0']")] == ["strange"])
    find(page, "#close")[0].click()
    until(lambda: page.switch_to.active_element.accessible_name.startswith("strange.png"))


def test_shows_where_and_what_it_is_nearest_to(driver: Driver, files: dict[str, Path]) -> None:
    with live_server({"m": FakeModel(pipeline=FakePipelineWithStoredImages())}) as url:
        driver.get(url)
        classify(driver, files["strange"])
        until(find(driver, "#seen")[0].is_displayed)
        assert text(driver, "#reason") == "Unlike the training images, mainly in the upper part."
        frame, seen, box = (find(driver, f"#{name}")[0].rect for name in ("frame", "seen", "box"))
        assert seen == pytest.approx(frame, abs=1)
        assert [box["width"], box["height"]] == pytest.approx([frame["width"], frame["height"] / 2], abs=1)
        until(lambda: find(driver, "#heat canvas"))
        assert driver.execute_script(
            "const {data} = document.querySelector('#heat canvas').getContext('2d').getImageData(0, 0, 8, 8);"
            "return [0, 7].map((row) => data[4 * (8 * row) + 3] > 0)"
        ) == [True, False]  # What is ordinary stays as it is.
        (nearest,) = [each.text for each in find(driver, "#nearest li")]  # No stored image of another class is nearer.
        assert nearest == "middle\nas near as usual"
        until(lambda: find(driver, "#nearest img")[0].get_property("naturalWidth") == 2)
        asked = driver.execute_script("return performance.getEntriesByType('resource').map(({name}) => name)")
        assert [name.split("?")[1] for name in asked if "/predict?" in name] == [
            "explain=true&monitor=false", "explain=true&map=true&monitor=false",
        ]  # fmt: skip
        choose(driver, files["clear"])
        until(lambda: text(driver, "#status") == "2 of 2 images classified.")
        open_panel(driver, "clear.png")
        until(lambda: not find(driver, "#seen")[0].is_displayed())  # What is accepted has no map.
        assert errors(driver) == []


def test_saves_what_is_shown(page: Driver, files: dict[str, Path], tmp_path: Path) -> None:
    formula = tmp_path / "=1+1,2.png"
    shutil.copy(files["clear"], formula)
    page.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path / "saved")})
    classify(page, formula, files["strange"], files["broken"], failed=1)
    slide(page, "alpha", 0.0)
    for kind in ("csv", "json"):
        find(page, f"#{kind}")[0].click()
        until((tmp_path / "saved" / f"psc.{kind}").is_file)
    rows = list(csv.DictReader(io.StringIO((tmp_path / "saved" / "psc.csv").read_text())))
    by_name = {row["file"]: row for row in rows}
    assert set(by_name) == {"'=1+1,2.png", "strange.png", "broken.png"}
    assert by_name["'=1+1,2.png"]["decision"] == "accept" and by_name["'=1+1,2.png"]["prediction_set"] == '["bright"]'
    assert "expected one of JPEG, PNG" in by_name["broken.png"]["error"]
    document = json.loads((tmp_path / "saved" / "psc.json").read_text())
    assert document["model"] == {"name": "m", "version": "v1"} and document["policy"]["alpha"] == 0.01
    strange = next(row for row in document["images"] if row["file"] == "strange.png")
    assert strange["decision"] == by_name["strange.png"]["decision"]
    assert strange["is_ood"] == (strange["decision"] == "abstain_ood")


def test_a_saved_table_tells_files_of_two_folders_and_names_with_spaces_apart(driver: Driver, tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / "001.png").write_bytes(png(64))
    with live_server({"m": FakeModel(classes=("York", "New York", "New"))}) as url:
        driver.get(url)
        until(lambda: "3 classes" in content(driver, "#model"))
        place = find(driver, "#upload")[0].rect
        for kind in ("dragEnter", "dragOver", "drop"):
            data = {"items": [], "files": [str(tmp_path / "data")], "dragOperationsMask": 1}
            event = {"type": kind, "x": place["x"] + 20, "y": place["y"] + 20, "data": data}
            driver.execute_cdp_cmd("Input.dispatchDragEvent", event)
        until(lambda: text(driver, "#status") == "2 of 2 images classified.")
        saved = tmp_path / "saved"
        driver.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(saved)})
        for kind in ("csv", "json"):
            find(driver, f"#{kind}")[0].click()
            until((saved / f"psc.{kind}").is_file)
        rows = list(csv.DictReader(io.StringIO((saved / "psc.csv").read_text())))
        document = json.loads((saved / "psc.json").read_text())
        for found in (rows, document["images"]):
            assert sorted(row["file"] for row in found) == ["data/cat/001.png", "data/dog/001.png"]
        assert [json.loads(row["prediction_set"]) for row in rows] == [["New York"]] * 2


def test_examples_and_a_service_without_a_log(driver: Driver, files: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "examples").mkdir()
    shutil.copy(files["clear"], tmp_path / "examples" / "bright.png")
    for name, question in {"10": "10. 暗いですか?", "2": "2. Is this dark?"}.items():  # in UTF-8 and in Latin-1
        title = PngImagePlugin.PngInfo()
        title.add_text("Title", question)
        Image.open(files["between"]).save(tmp_path / "examples" / f"titled-{name}.png", pnginfo=title)
    models = {"first": FakeModel(), "second": FakeModel("v2")}
    with live_server(models, bundle=(f"first={tmp_path}", "second=/nowhere"), alpha=0.2) as url:
        driver.get(url)
        until(lambda: "3 classes" in content(driver, "#model"))
        assert "images of 8 × 8 pixels" in content(driver, "#expects")
        find(driver, "#views [href='#live']")[0].click()
        until(lambda: text(driver, "#drift-word") == "Too few images" and says(driver, "#checked", "--log"))
        find(driver, "#views [href='#try']")[0].click()
        resize(driver, 390)
        offered = "What does the model say? | 2. Is this dark? | 10. 暗いですか?"
        until(lambda: text(driver, "#examples button") == offered)
        for _ in range(2):  # The second time, the same image is shown.
            find(driver, "#examples button")[0].click()
            until(lambda: text(driver, ".tile") == "✓ Accept\nbright\nbright.png")
            assert text(driver, "#panel-name") == "bright.png" and "training images" in text(driver, "#reason")
        assert all(each.is_displayed() for each in find(driver, "#examples button"))
        window, top = driver.execute_script("return [innerHeight, document.getElementById('panel').offsetTop]")
        assert top < window / 2  # Cards and answer at once, on a telephone too.
        assert text(driver, "#models") == "first\nsecond"
        find(driver, "#models option")[1].click()
        until(lambda: content(driver, "#model").startswith("second · version v2"))
        until(lambda: text(driver, ".tile") == "✓ Accept\nbright\nbright.png")
        until(lambda: not find(driver, "#examples")[0].is_displayed())
        assert errors(driver) == []


def test_two_models_side_by_side(driver: Driver, files: dict[str, Path]) -> None:
    strict = FakePipeline()
    policy = ClassificationPolicy(alpha=0.2, ambiguity_threshold=0.9, coverage=0.9)
    with live_server({"first": FakeModel(), "second": FakeModel("v2", strict, policy)}) as url:
        driver.get(url)
        classify(driver, files["clear"], files["between"])
        assert [each.text for each in find(driver, "#rivals option")] == ["nothing", "second"]
        driver.execute_script(
            "window.shown = []; new MutationObserver((seen) => {"
            "for (const {addedNodes} of seen) for (const {textContent} of addedNodes) window.shown.push(textContent);"
            "}).observe(document.getElementById('grid'), {childList: true, subtree: true});"
        )
        find(driver, "#rivals option")[1].click()
        until(lambda: len([each for each in find(driver, ".rival") if each.is_displayed()]) == 2)
        until(lambda: text(driver, "#status") == "2 of 2 images classified.")
        assert driver.execute_script("return window.shown").count("Waiting…") == 2
        assert tile(driver, "between.png").text == "? Unclear\nmiddle?\n✓ Accept\nmiddle\nbetween.png"
        find(driver, "#filters [data-filter=differ]")[0].click()
        until(lambda: order(driver) == ["between.png"])
        open_panel(driver, "between.png")
        assert numbers(driver)["Entropy"] == "0.693 nats"
        assert text(driver, "#numbers tr:first-child").split() == ["first", "second"]
        find(driver, "#rivals option")[0].click()
        until(lambda: [each for each in find(driver, ".rival") if each.is_displayed()] == [])
        assert errors(driver) == []


def test_asks_for_a_key_and_sends_the_waiting_images_again(driver: Driver, files: dict[str, Path]) -> None:
    with live_server({"m": FakeModel()}, api_keys=("the-right-key",)) as url:
        driver.get(url)
        until(find(driver, "#key-form")[0].is_displayed)
        choose(driver, files["clear"])
        until(lambda: "this needs an API key" in text(driver, ".tile"))
        for key, answer in (("a-wrong-key", "is not accepted"), ("the-right-key", "✓ Accept")):
            find(driver, "#key")[0].send_keys(key)
            find(driver, "#key-form button")[0].click()
            until(partial(says, driver, ".tile", answer))
        assert not find(driver, "#key-form")[0].is_displayed()
        assert "3 classes" in content(driver, "#model")


@pytest.mark.usefixtures("device_thread")
def test_a_busy_service_is_asked_again(driver: Driver, files: dict[str, Path]) -> None:
    model = FakeModel()
    with live_server({"m": model}, max_queue_images=1, max_images_per_request=1, max_batch_size=1) as url:
        driver.get(url)
        model.pipeline.check.clear()
        choose(driver, files["clear"], files["between"], files["strange"])
        refused = 'psc_rejected_total{reason="queue-full"}'
        until(lambda: refused in HTTP.get(f"{url}/metrics").text)
        model.pipeline.check.set()
        until(lambda: text(driver, "#status") == "3 of 3 images classified.")
        assert find(driver, "[data-decision=error]:not([hidden])") == []


FAILING = """
const asked = window.fetch;
const failed = new Set();
window.sent = [];
window.gone = "";
window.fetch = async (path, options) => {
  const [place] = String(path).split("?");
  window.sent.push(options?.body?.get?.("images")?.name ?? place);
  const json = {"Content-Type": "application/json"};
  if (window.gone && place.startsWith(window.gone)) return new Response("{}", {status: 404, headers: json});
  if (window.broken && place.startsWith(window.broken)) return new Response("broken", {status: 500});
  const count = failed.size;
  if (window.failsOnce !== false && failed.add(place).size > count) {
    if (count % 2) throw new TypeError("Failed to fetch");
    return new Response("bad gateway", {status: 502});
  }
  return asked(path, options);
};
"""


@contextmanager
def before_the_page(driver: Driver, script: str) -> Iterator[None]:
    command = "Page.addScriptToEvaluateOnNewDocument"
    added = driver.execute_cdp_cmd(command, {"source": script})
    try:
        yield
    finally:
        driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)


def test_a_request_that_fails_once_is_sent_again(driver: Driver, files: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "bright.png").write_bytes(png(255))
    with live_server(bundle=(f"m={tmp_path}",)) as url, before_the_page(driver, FAILING):
        driver.get(url)
        until(lambda: "3 classes" in content(driver, "#model"))
        until(lambda: find(driver, "#examples")[0].is_displayed())
        classify(driver, files["clear"], files["between"])
        assert HTTP.get(f"{url}/models/m/live").json()["images"] == 0  # None of them counts in drift.
        assert errors(driver) == []


@pytest.mark.parametrize("failure", ["broken", "gone"])
def test_a_model_that_failed_to_load_can_be_tried_again(driver: Driver, files: dict[str, Path], failure: str) -> None:
    with live_server() as url, before_the_page(driver, f"{FAILING} window.{failure} = 'model';"):
        driver.get(url)
        choose(driver, files["clear"])
        until(lambda: says(driver, ".tile", "The service answered"))
        assert not find(driver, "#key-form")[0].is_displayed()
        driver.execute_script("window.broken = window.gone = ''")
        find(driver, "#again")[0].click()
        until(lambda: says(driver, ".tile", "✓ Accept"))


def test_a_comparison_that_fails_changes_nothing(driver: Driver, files: dict[str, Path]) -> None:
    with live_server({"first": FakeModel(), "second": FakeModel("v2")}) as url, before_the_page(driver, FAILING):
        driver.get(url)
        classify(driver, files["clear"])
        driver.execute_script("window.broken = 'models/second'")
        find(driver, "#rivals option")[1].click()
        until(lambda: "500" in text(driver, "#status"))
        until(lambda: find(driver, "#rivals")[0].get_property("value") == "")
        assert not any("Uncaught" in message for message in errors(driver))
        driver.execute_script("window.broken = ''")
        find(driver, "#rivals option")[1].click()
        until(lambda: len([each for each in find(driver, ".rival") if each.is_displayed()]) == 1)


def open_second(driver: Driver, url: str) -> None:
    """Open the page and choose its second model."""
    driver.get(url)
    until(lambda: "3 classes" in content(driver, "#model"))
    find(driver, "#models option")[1].click()
    until(lambda: "second" in content(driver, "#model"))


def test_a_service_with_other_models_is_asked_for_its_default(driver: Driver, files: dict[str, Path]) -> None:
    with live_server({"first": FakeModel(), "second": FakeModel("v2")}) as url, before_the_page(driver, FAILING):
        open_second(driver, url)
        driver.execute_script("window.gone = 'models/second'")
        classify(driver, files["clear"])
        assert "first" in content(driver, "#model") and decision_of(driver, "clear.png") == "accept"


def test_all_images_are_asked_again_when_their_model_is_gone(driver: Driver, files: dict[str, Path]) -> None:
    with live_server({"first": FakeModel(), "second": FakeModel("v2")}) as url, before_the_page(driver, FAILING):
        open_second(driver, url)
        classify(driver, files["clear"], files["between"], files["broken"], failed=1)
        driver.execute_script("window.gone = 'models/second'; window.sent.length = 0")
        choose(driver, files["strange"])
        until(lambda: "first" in content(driver, "#model"))
        until(lambda: text(driver, "#status") == "3 of 4 images classified, 1 failed.")
        assert {each.name for each in files.values()} <= {*driver.execute_script("return window.sent")}


def test_a_new_key_keeps_the_model_and_asks_again_where_it_changed(driver: Driver, files: dict[str, Path]) -> None:
    models = {"first": FakeModel(), "second": FakeModel("v2")}
    with live_server(models, api_keys=("one", "two"), admin_keys=("root",)) as url, before_the_page(driver, FAILING):
        driver.get(url)
        until(find(driver, "#key-form")[0].is_displayed)
        for key in ("zero\u200bwidth", "en\u2013dash"):  # No header carries them.
            driver.execute_script("document.getElementById('key').value = arguments[0]", key)
            find(driver, "#key-form button")[0].click()
            until(lambda: says(driver, "#status", "Copy it again"))
            assert find(driver, "#key-form")[0].is_displayed()
        driver.execute_script("document.getElementById('key').value = ' one '")
        find(driver, "#key-form button")[0].click()
        until(lambda: "3 classes" in content(driver, "#model"))
        find(driver, "#models option")[1].click()
        until(lambda: "second" in content(driver, "#model"))
        classify(driver, files["clear"])
        models["second"] = FakeModel("v3")
        HTTP.post(f"{url}/admin/reload", headers={"x-api-key": "root"}).raise_for_status()
        driver.execute_script("sessionStorage.clear(); window.sent.length = 0")
        choose(driver, files["between"])
        until(lambda: says(driver, ".tile", "this needs an API key"))
        find(driver, "#key")[0].send_keys("two")
        find(driver, "#key-form button")[0].click()
        until(lambda: text(driver, "#status") == "2 of 2 images classified.")
        assert content(driver, "#model").startswith("second · version v3")
        assert "clear.png" in driver.execute_script("return window.sent")


HELD = """
const asked = window.fetch;
window.fetch = async (path, options) => {
  const name = options?.body?.get?.("images")?.name;
  if (name && name === window.held) await new Promise((go) => (window.release = go));
  const status = name && window.refused;
  return status ? new Response("{}", {status, headers: {"Content-Type": "application/json"}}) : asked(path, options);
};
"""


def test_the_answer_of_a_cleared_image_opens_nothing(driver: Driver, files: dict[str, Path], url: str) -> None:
    with before_the_page(driver, f"window.held = 'strange.png'; {HELD}"):
        driver.get(url)
        choose(driver, files["strange"])
        until(lambda: driver.execute_script("return window.release !== undefined"))
        find(driver, "#clear")[0].click()
        choose(driver, files["clear"], files["broken"])
        driver.execute_script("window.release()")
        until(lambda: text(driver, "#status") == "1 of 2 images classified, 1 failed.")
        until(lambda: text(driver, "#panel-name") == "clear.png")


def test_the_image_that_was_chosen_stays_open(driver: Driver, files: dict[str, Path], url: str) -> None:
    with before_the_page(driver, f"window.held = 'strange.png'; {HELD}"):
        for closes in (False, True):
            driver.get(url)
            choose(driver, files["clear"], files["strange"])
            until(lambda: "✓ Accept" in text(driver, ".tile"))
            open_panel(driver, "clear.png")
            if closes:
                find(driver, "#close")[0].click()
            driver.execute_script("window.release()")
            until(lambda: text(driver, "#status") == "2 of 2 images classified.")
            until(lambda: len(find(driver, "#chart .mark")) == 2)
            assert text(driver, "#panel-name") == ("" if closes else "clear.png")


def test_what_took_too_long_can_be_tried_again(driver: Driver, files: dict[str, Path]) -> None:
    with live_server({"first": FakeModel(), "second": FakeModel("v2")}) as url, before_the_page(driver, HELD):
        driver.get(url)
        classify(driver, files["clear"])
        find(driver, "#rivals option")[1].click()
        until(lambda: find(driver, ".rival")[0].is_displayed())
        for status in (504, 408):
            driver.execute_script("window.refused = arguments[0]", status)
            find(driver, "#rivals option")[0 if status == 504 else 1].click()
            until(lambda: text(driver, "#status") == "0 of 1 image classified, 1 failed.")
            assert not find(driver, ".rival")[0].is_displayed()  # Another model's answer is none.
            driver.execute_script("window.refused = undefined")
            find(driver, "#again")[0].click()
            until(lambda: text(driver, "#status") == "1 of 1 image classified.")
        until(lambda: find(driver, ".rival")[0].is_displayed())


def test_images_are_asked_again_when_their_model_was_reloaded(driver: Driver, files: dict[str, Path]) -> None:
    models = {"m": FakeModel()}
    with live_server(models, admin_keys=("root",)) as url, before_the_page(driver, FAILING):
        driver.get(url)
        classify(driver, files["clear"])
        models["m"] = FakeModel("another-version")
        HTTP.post(f"{url}/admin/reload", headers={"x-api-key": "root"}).raise_for_status()
        driver.execute_script("window.sent.length = 0")
        choose(driver, files["between"])
        until(lambda: "another" in content(driver, "#model"))
        until(lambda: text(driver, "#status") == "2 of 2 images classified.")
        assert {"clear.png", "between.png"} <= {*driver.execute_script("return window.sent")}


SENT = """
const asked = window.fetch;
window.sent = {};
window.fetch = async (path, options) => {
  const file = options?.body?.get?.("images");
  if (file) {
    const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", await file.arrayBuffer()));
    window.sent[file.name] = [...digest].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  }
  return asked(path, options);
};
"""


def test_photographs_are_shown_small_and_sent_as_they_are(driver: Driver, tmp_path: Path, url: str) -> None:
    """Of 12 and 25 megapixels, all at once; one is turned by its EXIF, one has colours that show where it is cut."""
    grain = np.random.default_rng(0).integers(0, 256, (750, 1000, 3), np.uint8)
    photograph = Image.fromarray(grain).resize((4000, 3000), Image.Resampling.BILINEAR)
    turned = Image.Exif()
    turned[0x0112] = 6
    sizes = {"wide.jpg": (512, 384), "tall.jpg": (384, 512), "square.jpg": (512, 512), "small.png": (8, 8)}
    photograph.save(tmp_path / "wide.jpg", quality=95)
    photograph.save(tmp_path / "tall.jpg", quality=95, exif=turned)
    photograph.resize((5000, 5000)).save(tmp_path / "square.jpg", quality=95)
    (tmp_path / "small.png").write_bytes(png(255))
    assert max(file.stat().st_size for file in tmp_path.iterdir()) > 5e6
    with before_the_page(driver, SENT):
        driver.get(url)
        classify(driver, *(tmp_path / name for name in sizes))
        until(lambda: all(each.get_property("naturalWidth") for each in find(driver, ".tile .thumb img")))
        natural = {
            each.get_attribute("alt"): (each.get_property("naturalWidth"), each.get_property("naturalHeight"))
            for each in find(driver, ".tile .thumb img")
        }
        assert natural == sizes
        sent = driver.execute_script("return window.sent")
        assert sent == {name: hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in sizes}
        open_panel(driver, "tall.jpg")
        until(lambda: find(driver, "#picture")[0].get_property("naturalHeight") == 512)
        frame = find(driver, "#frame")[0].rect
        assert frame["width"] / frame["height"] == pytest.approx(0.75, abs=0.02)
        find(driver, "#clear")[0].click()
        until(lambda: find(driver, ".tile") == [])
        assert errors(driver) == []


HELD_PICTURES = """
const make = window.createImageBitmap;
window.made = [];
const released = new Promise((go) => (window.release = go));
window.createImageBitmap = async (file, ...options) => {
  window.made.push(file.name);
  await released;
  return make(file, ...options);
};
"""


@pytest.mark.parametrize("clears", [False, True])
def test_what_is_looked_at_is_shown_first(driver: Driver, tmp_path: Path, url: str, clears: bool) -> None:
    first, second = (tmp_path / name for name in ("first.png", "second.png"))
    later = [tmp_path / f"{number}.png" for number in range(4)]
    for file in (first, second, *later):
        Image.new("L", (600, 600)).save(file)
    with before_the_page(driver, HELD_PICTURES):
        driver.get(url)
        classify(driver, first, second)
        choose(driver, *later[:3])
        if clears:
            find(driver, "#clear")[0].click()
        choose(driver, later[3])
        until(lambda: text(driver, "#panel-name") == "3.png")
        driver.execute_script("window.release()")
        names = ["first.png", "second.png", "3.png", *([] if clears else ["0.png", "1.png", "2.png"])]
        until(lambda: len(driver.execute_script("return window.made")) == len(names))
        until(lambda: all(each.get_property("naturalWidth") for each in find(driver, ".tile .thumb img")))
        assert driver.execute_script("return window.made") == names


AXE = os.environ.get("PSC_AXE", "")  # an axe.min.js: npm install axe-core


def violations(driver: Driver) -> list[str]:
    driver.set_script_timeout(GUARD_SECONDS)
    driver.execute_script(Path(AXE).read_text())
    found: list[str] = driver.execute_async_script(
        "const done = arguments[0]; axe.run(document).then((found) => done("
        "found.violations.map(({id, nodes}) => `${id}: ${nodes[0].html}`)));"
    )
    return found


SCREENS = [
    (390, "light"),
    (1280, "dark"),
    *(pytest.param(each, marks=pytest.mark.slow) for each in ((390, "dark"), (1280, "light"))),
]


@pytest.fixture(params=SCREENS, ids=str)
def screen(driver: Driver, request: pytest.FixtureRequest) -> tuple[int, str]:
    """A telephone or a desk, by day or by night; which of these."""
    resize(driver, *request.param)
    size: tuple[int, str] = request.param
    return size


def open_interface(driver: Driver, url: str) -> None:
    """The interface with one operation of each kind open, and the first tried out."""
    driver.get(f"{url}/docs")
    until(lambda: "Predict with the default model" in text(driver, ".opblock-summary-description"))
    for method in ("post", "get"):
        find(driver, f".opblock-{method} .opblock-summary-control")[0].click()
        until(lambda method=method: find(driver, f".opblock-{method} .responses-table"))  # type: ignore[misc]
    find(driver, ".try-out__btn")[0].click()
    until(lambda: find(driver, ".execute"))


def test_the_interface_follows_the_scheme_and_fits(driver: Driver, url: str, screen: tuple[int, str]) -> None:
    open_interface(driver, url)
    paper = driver.execute_script("return getComputedStyle(document.documentElement).backgroundColor")
    is_light = contrast(paper.replace("rgba(0, 0, 0, 0)", "rgb(255,255,255)"), "rgb(0,0,0)") > 10
    assert is_light == (screen[1] == "light")
    for selector in ("h1", "#answer", ".opblock-description p", ".parameter__name"):
        colour = find(driver, selector)[0].value_of_css_property("color").replace("rgba", "rgb").replace(", 1)", ")")
        assert (contrast(colour, "rgb(0,0,0)") > 7) == (screen[1] == "dark"), selector
    page, window = driver.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
    assert page <= window
    loaded = driver.execute_script("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert all(name.startswith((f"{url}/", "data:")) for name in loaded)
    assert "abstain_ambiguous" in text(driver, "#answer") and f"{url}/predict" in text(driver, "#ask")
    assert "ambiguity_threshold" in text(driver, ".opblock-body")
    assert errors(driver) == []
    if AXE:
        assert violations(driver) == []


def test_the_interface_can_be_tried_with_a_key(driver: Driver) -> None:
    with live_server(api_keys=("the-key",)) as url:
        driver.get(f"{url}/docs")
        until(lambda: find(driver, ".authorize"))
        find(driver, ".authorize")[0].click()
        find(driver, ".auth-container input")[0].send_keys("the-key")
        find(driver, ".auth-container .authorize")[0].click()
        find(driver, ".close-modal")[0].click()
        find(driver, "#operations-model-default_model_model_get .opblock-summary-control")[0].click()
        until(lambda: find(driver, ".try-out__btn"))
        find(driver, ".try-out__btn")[0].click()
        find(driver, ".execute")[0].click()
        until(lambda: text(driver, ".live-responses-table .response .response-col_status").startswith("200"))


def test_everything_is_local_and_nothing_inline_runs(page: Driver, url: str) -> None:
    loaded = page.execute_script("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert {f"{url}/page/page.css", f"{url}/page/page.js", f"{url}/page/api.js", f"{url}/model"} <= set(loaded)
    assert all(name.startswith(f"{url}/") for name in loaded)
    page.execute_script(
        "const script = document.createElement('script'); script.textContent = 'window.injected = true';"
        "document.body.append(script); document.body.setAttribute('style', 'color: rgb(1, 2, 3)');"
    )
    assert page.execute_script("return window.injected") is None
    assert page.execute_script("return getComputedStyle(document.body).color") != "rgb(1, 2, 3)"
    refused = page.execute_async_script(
        "const done = arguments[0]; fetch('http://localhost:9/').then(() => done(false), () => done(true))"
    )
    assert refused
    assert any("Content Security Policy" in message for message in errors(page))


@pytest.mark.parametrize("width", [320, 768, 1400])
def test_nothing_is_cut_off_at_any_width(page: Driver, files: dict[str, Path], width: int) -> None:
    resize(page, width)
    long = files["clear"].rename(files["clear"].with_name(f"{'photograph' * 8}.png"))
    classify(page, long, files["strange"])
    for name in ("", "strange.png", long.name):
        if name:
            open_panel(page, name)
        found, inner = page.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
        assert found <= inner == width
        assert all(each.rect["width"] <= width for each in find(page, ".card, .tile"))
        assert page.execute_script("const p = document.getElementById('panel'); return p.scrollWidth <= p.clientWidth")


def contrast(first: str, second: str) -> float:
    def luminance(colour: str) -> float:
        parts = np.array([float(part) for part in colour[4:-1].split(",")]) / 255.0
        linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        return float(linear @ [0.2126, 0.7152, 0.0722])

    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_in_both_schemes(page: Driver, files: dict[str, Path], scheme: str) -> None:
    resize(page, 1200, scheme)
    classify(page, files["clear"], files["between"], files["strange"], files["broken"], failed=1)
    page.execute_script("for (const each of document.querySelectorAll('details')) each.open = true")
    open_panel(page, "strange.png")
    colours = page.execute_script(
        """
        const solid = (node) => {
          const colour = getComputedStyle(node).backgroundColor;
          return colour.startsWith("rgb(") ? colour : solid(node.parentElement);
        };
        const inked = "h1, h2, p, dt, dd, a, th, td, summary, output, .badge, .label, .name, .share, .muted";
        return [...document.querySelectorAll(inked)].filter((node) => node.checkVisibility()).map(
          (node) => [node.className, getComputedStyle(node).color, solid(node)]);
        """
    )
    assert len(colours) > 30
    assert [(name, ink, paper) for name, ink, paper in colours if contrast(ink, paper) < 4.5] == []
    background = next(paper for _, _, paper in colours)
    assert (contrast(background, "rgb(0,0,0)") > 10) == (scheme == "light")
    if AXE:
        assert violations(page) == []


def test_names_and_labels_for_assistive_technology(page: Driver, files: dict[str, Path]) -> None:
    classify(page, files["clear"])
    open_panel(page, "clear.png")
    tree = page.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    seen = {
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in tree
        if not node["ignored"] and "role" in node
    }
    assert {"main", "contentinfo", "status", "list", "banner"} <= {role for role, _ in seen}
    assert {("image", "clear.png"), ("list", "Most probable classes"), ("dialog", "clear.png")} <= seen
    assert ("button", "clear.png ✓ Accept bright") in seen
    sliders = sorted(name for role, name in seen if role == "slider")
    assert [
        name.startswith(said) for name, said in zip(sliders, ("Called unclear", "False alarms allowed"), strict=True)
    ]
    assert any(role in ("button", "Button") and "Drop images here" in name for role, name in seen)
    nameless = [role for role, name in seen if role in ("button", "textbox", "image", "link", "slider") and not name]
    assert nameless == []
