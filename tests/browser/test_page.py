"""The page at ``/`` in a real Chromium: what a person sees, does, and is protected from."""

from __future__ import annotations

import io
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from tests.app.fakes import FakeModel, FakePipelineWithGates, FakeValueModel, pixels, png
from tests.app.live import live_server
from tests.served import GUARD_SECONDS

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
CHROMEDRIVER = shutil.which("chromedriver")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--force-color-profile=srgb",
)
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
def driver(chromium: Driver) -> Driver:
    """Chromium with an empty log."""
    chromium.get_log("browser")
    return chromium


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with live_server() as url:
        yield url


@pytest.fixture
def page(driver: Driver, url: str) -> Driver:
    driver.get(url)
    until(lambda: "3 classes" in text(driver, "#model"))
    return driver


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """A clear image, one between two classes, one unlike the others, and one that is no image."""
    stripes = pixels(0)
    stripes[:4] = 255
    buffer = io.BytesIO()
    Image.fromarray(stripes).save(buffer, "PNG")
    contents = {
        "clear.png": png(255),
        "between.png": png(64),
        "strange.png": buffer.getvalue(),
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


def says(driver: Driver, selector: str, words: str) -> bool:
    return words in text(driver, selector)


def text_in(element: Any, selector: str) -> str:
    content: str = element.find_element("css selector", selector).text
    return content


def choose(driver: Driver, *paths: Path) -> None:
    find(driver, "#files")[0].send_keys("\n".join(map(str, paths)))


def card(driver: Driver, name: str) -> Any:
    return next(each for each in find(driver, ".card") if name in each.text)


def errors(driver: Driver) -> list[str]:
    return [entry["message"] for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]


def test_classifies_chosen_images(page: Driver, files: dict[str, Path]) -> None:
    choose(page, files["clear"], files["between"], files["strange"])
    until(lambda: text(page, "#status") == "3 of 3 images classified.")
    clear, between, strange = (card(page, f"{name}.png") for name in ("clear", "between", "strange"))
    assert text_in(clear, ".decision") == "✓ Accept"
    assert "Abstain: several classes fit" in between.text
    assert "Abstain: unlike the known images" in strange.text
    assert text_in(clear, ".label") == "bright"
    assert text_in(clear, ".confidence") == "100.0 %"
    assert text_in(clear, ".p-value") == "1"
    assert text_in(clear, ".p-limit") == "out of distribution up to 0.2"
    assert text_in(between, ".entropy") == "0.693 nats"
    assert "ambiguous above 0.5" in between.text
    assert text_in(strange, ".answer").startswith("if it were one of the classes: ")
    weights = [
        each.find_element("css selector", ".label").value_of_css_property("font-weight") for each in (clear, strange)
    ]
    assert weights == ["650", "400"]
    rows = between.find_elements("css selector", ".classes li")
    assert [row.text.split("\n")[0] for row in rows[:2]] in (["dark", "middle"], ["middle", "dark"])
    fractions = [float(text_in(row, ".share").removesuffix(" %")) for row in rows[:2]]
    assert fractions == pytest.approx([50.0, 50.0], abs=2.0)

    def widths() -> list[float]:
        return [row.find_element("css selector", ".fill").rect["width"] for row in rows]

    track = rows[0].find_element("css selector", ".track").rect["width"]
    until(lambda: widths()[0] == pytest.approx(track / 2, rel=0.05))
    assert widths()[2] < 2
    histogram = strange.find_element("css selector", ".histogram")
    assert len(histogram.find_elements("css selector", ".bin")) == 40
    here, threshold = (
        float(histogram.find_element("css selector", name).get_attribute("x1")) for name in (".here", ".threshold")
    )
    assert here > threshold
    assert "Right of the dashed line: out of distribution" in strange.text
    ticks = [each.text for each in histogram.find_elements("css selector", ".tick")]
    assert [float(tick.replace("\u2212", "-")) for tick in ticks]
    assert "99 calibration images" in histogram.get_attribute("aria-label")
    assert clear.find_element("css selector", "img").get_property("naturalWidth") == 8
    assert errors(page) == []


def test_names_the_gate_that_alarmed(driver: Driver, files: dict[str, Path]) -> None:
    model = FakeModel(pipeline=FakePipelineWithGates(), gates=("texture", "kind"))
    with live_server({"m": model}) as url:
        driver.get(url)
        until(lambda: "3 classes" in text(driver, "#model"))
        choose(driver, files["clear"], files["strange"])
        until(lambda: text(driver, "#status") == "2 of 2 images classified.")
        clear, strange = (card(driver, f"{name}.png") for name in ("clear", "strange"))
        assert text_in(clear, ".decision") == "✓ Accept"
        assert text_in(clear, ".gates") == "strange texture 0, unknown kind 1"
        assert text_in(strange, ".decision") == "! Abstain: strange texture, unknown kind"
        assert errors(driver) == []


def test_shows_numbers_and_decides_by_their_intervals(driver: Driver, files: dict[str, Path]) -> None:
    with live_server({"m": FakeValueModel()}) as url:
        driver.get(url)
        until(lambda: "predicts brightness" in text(driver, "#model"))
        assert text(driver, "#threshold-name") == ""  # Nothing is shown yet.
        names = ("clear", "between", "strange")
        choose(driver, *(files[name] for name in names))
        until(lambda: text(driver, "#status") == "3 of 3 images classified.")
        assert text(driver, "#threshold-name") == "Uncertain where wider than, %"
        clear, between, strange = (card(driver, f"{name}.png") for name in names)
        assert text_in(between, ".label") == "25.1 %" and text_in(between, ".confidence") == "± 3.16"
        assert text_in(between, ".decision") == "✓ Accept"
        assert text_in(clear, ".decision") == "? Abstain: the interval is too wide"
        assert "Abstain: unlike the known images" in strange.text
        assert text_in(clear, ".unsure-name") == "Deviation" and text_in(clear, ".entropy") == "noise 3, model 4"
        assert text_in(clear, ".set") == "90 to 110 %"
        clear.find_element("css selector", ".why summary").click()
        until(lambda: "Nearest training images after layer3" in card(driver, "clear.png").text)
        assert "which counts for 75.0 %: 0 % (image 0), 10 % (image 1)" in card(driver, "clear.png").text
        for max_width in (1, 16, 100):
            driver.execute_script(
                "const field = document.getElementById('threshold'); field.value = arguments[0];"
                "field.dispatchEvent(new Event('input', {bubbles: true}));",
                str(max_width),
            )
            for name in names:
                sent = {"images": (f"{name}.png", files[name].read_bytes())}
                answer = httpx.post(f"{url}/predict", files=sent, params={"max_width": max_width}).json()
                badge = card(driver, f"{name}.png").find_element("css selector", ".decision")
                assert badge.get_attribute("data-decision") == answer["predictions"][0]["decision"], (name, max_width)
        assert errors(driver) == []


def test_classifies_and_clears_dropped_images(page: Driver, files: dict[str, Path]) -> None:
    page.execute_script(DROP, "dropped.png", list(files["clear"].read_bytes()), "image/png")
    until(lambda: "✓ Accept" in text(page, ".card"))
    assert "dropped.png" in text(page, "figcaption")
    assert "over" not in find(page, "#upload")[0].get_attribute("class")
    page.execute_script(DROP, "notes.txt", [65], "text/plain")
    assert text(page, "#status") == "1 of 2 images classified, 1 failed."
    assert "Not an image (text/plain); it was not sent." in card(page, "notes.txt").text
    find(page, "#clear")[0].click()
    assert find(page, ".card") == []
    assert not find(page, "#clear")[0].is_displayed()
    assert page.switch_to.active_element.get_attribute("id") == "files"


def test_changed_thresholds_decide_as_the_service_does(page: Driver, files: dict[str, Path], url: str) -> None:
    names = ("clear", "between", "strange")
    choose(page, *(files[name] for name in names))
    until(lambda: text(page, "#status") == "3 of 3 images classified.")
    for alpha, threshold in ((0.01, 0.5), (0.5, 0.7), (0.9, 0.0), (0.2, 0.69)):
        for field, value in (("alpha", alpha), ("threshold", threshold)):
            page.execute_script(
                "const field = document.getElementById(arguments[0]); field.value = arguments[1];"
                "field.dispatchEvent(new Event('input', {bubbles: true}));",
                field,
                str(value),
            )
        query = {"alpha": alpha, "ambiguity_threshold": threshold}
        for name in names:
            sent = {"images": (f"{name}.png", files[name].read_bytes())}
            answer = httpx.post(f"{url}/predict", files=sent, params=query).json()["predictions"][0]
            badge = card(page, f"{name}.png").find_element("css selector", ".decision")
            assert badge.get_attribute("data-decision") == answer["decision"], (name, alpha, threshold)
    assert "the service keeps its own" in text(page, "#policy-note")
    find(page, "#reset")[0].click()
    assert text(page, "#policy-note") == ""
    assert "✓ Accept" in card(page, "clear.png").text


def test_every_image_is_a_dot_that_leads_to_its_card(page: Driver, files: dict[str, Path]) -> None:
    assert not find(page, "#map-section")[0].is_displayed()
    choose(page, files["clear"], files["between"], files["strange"], files["broken"])
    until(lambda: text(page, "#status") == "3 of 4 images classified, 1 failed.")
    links = find(page, "#map a")
    decisions = {link.get_attribute("aria-label") for link in links}
    assert decisions == {"clear.png: accept", "between.png: abstain_ambiguous", "strange.png: abstain_ood"}
    places = {
        link.get_attribute("aria-label").split(".")[0]: [
            float(link.find_element("css selector", "circle").get_attribute(name)) for name in ("cx", "cy")
        ]
        for link in links
    }
    lines = [
        [float(each.get_attribute(name)) for name in ("x1", "y1", "x2", "y2")] for each in find(page, "#map .threshold")
    ]
    (limit, *_), (_, level, *_) = lines
    assert places["clear"][0] < limit < places["strange"][0]
    assert places["between"][1] < level < places["clear"][1]
    page.execute_script(
        "arguments[0].focus()", next(link for link in links if "strange" in link.get_attribute("aria-label"))
    )
    page.switch_to.active_element.send_keys("\ue007")
    until(lambda: len(find(page, ".card:target")) == 1)
    assert "strange.png" in text(page, ".card:target")


def test_why_shows_the_explanation_and_asks_once(driver: Driver, files: dict[str, Path]) -> None:
    with live_server({"m": FakeModel()}) as url:
        driver.get(url)
        choose(driver, files["clear"])
        until(lambda: text(driver, "#status") == "1 of 1 image classified.")
        assert not find(driver, ".why ul")[0].is_displayed()
        driver.execute_script("document.querySelector('summary').focus()")
        driver.switch_to.active_element.send_keys("\ue007")
        until(lambda: find(driver, ".why ul")[0].is_displayed())
        assert "Nearest classes: " in text(driver, ".why") and "Most unusual components: " in text(driver, ".why")
        assert httpx.get(f"{url}/models/m/live").json()["images"] == 1
        assert errors(driver) == []


def test_examples_models_and_the_last_images(driver: Driver, files: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "examples").mkdir()
    shutil.copy(files["clear"], tmp_path / "examples" / "bright.png")
    models = {"first": FakeModel(), "second": FakeModel("v2")}
    with live_server(models, bundle=(f"first={tmp_path}", "second=/nowhere"), alpha=0.2) as url:
        driver.get(url)
        until(lambda: "3 classes" in text(driver, "#model"))
        assert "images of 8 × 8 pixels" in text(driver, "#expects")
        until(lambda: text(driver, "#live").startswith("No image yet · no drift alarms · queue 0 of "))
        until(lambda: find(driver, "#examples button") != [])
        find(driver, "#examples button")[0].click()
        until(lambda: text(driver, "#status") == "1 of 1 image classified.")
        assert "✓ Accept" in card(driver, "bright.png").text
        until(lambda: text(driver, "#live").startswith("0.0 % of the last 1 images"))
        assert text(driver, "#models") == "first\nsecond"
        find(driver, "#models option")[1].click()
        until(lambda: text(driver, "#model").startswith("second · version v2"))
        until(lambda: httpx.get(f"{url}/models/second/live").json()["images"] == 1)
        until(lambda: text(driver, "#status") == "1 of 1 image classified.")
        assert not find(driver, "#examples")[0].is_displayed()
        assert errors(driver) == []


def test_a_refused_image_says_why_and_spoils_no_other(page: Driver, files: dict[str, Path]) -> None:
    choose(page, files["broken"], files["clear"])
    until(lambda: text(page, "#status") == "1 of 2 images classified, 1 failed.")
    broken = card(page, "broken.png")
    assert "expected one of JPEG, PNG" in broken.text
    assert "No preview" in broken.text
    assert broken.find_element("css selector", ".decision").get_attribute("data-decision") == "error"
    assert "✓ Accept" in card(page, "clear.png").text


def test_asks_for_a_key_and_sends_the_waiting_images_again(driver: Driver, files: dict[str, Path]) -> None:
    with live_server({"m": FakeModel()}, api_keys=("the-right-key",)) as url:
        driver.get(url)
        until(find(driver, "#key-form")[0].is_displayed)
        choose(driver, files["clear"])
        until(lambda: "this needs an API key" in text(driver, ".card"))
        for key, answer in (("a-wrong-key", "is not accepted"), ("the-right-key", "✓ Accept")):
            find(driver, "#key")[0].send_keys(key)
            find(driver, "#key-form button")[0].click()
            until(partial(says, driver, ".card", answer))
        assert not find(driver, "#key-form")[0].is_displayed()
        assert "3 classes" in text(driver, "#model")


def test_a_busy_service_is_asked_again(driver: Driver, files: dict[str, Path]) -> None:
    model = FakeModel()
    with live_server({"m": model}, max_queue_images=1, max_images_per_request=1, max_batch_size=1) as url:
        driver.get(url)
        model.pipeline.gate.clear()
        choose(driver, *[files["clear"]] * 1, files["between"], files["strange"])
        refused = 'psc_rejected_total{reason="queue-full"}'
        until(lambda: refused in httpx.get(f"{url}/metrics").text)
        model.pipeline.gate.set()
        until(lambda: text(driver, "#status") == "3 of 3 images classified.")
        assert find(driver, "[data-decision=error]") == []


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


def test_the_interface_is_shown_without_any_other_host(driver: Driver, url: str) -> None:
    driver.get(f"{url}/docs")
    until(lambda: "Predict with the default model" in text(driver, ".opblock-summary-description"))
    loaded = driver.execute_script("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert all(name.startswith((f"{url}/", "data:")) for name in loaded)
    assert errors(driver) == []
    find(driver, "#operations-predict-predict_predict_post button, .opblock-post .opblock-summary-control")[0].click()
    until(lambda: "ambiguity_threshold" in text(driver, ".opblock-body"))
    assert errors(driver) == []


@pytest.mark.parametrize("size", [(360, 740), (768, 1024), (1400, 900)])
def test_nothing_is_cut_off_at_any_width(page: Driver, files: dict[str, Path], size: tuple[int, int]) -> None:
    metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size[0] < 500}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        choose(page, files["clear"], files["strange"])
        until(lambda: text(page, "#status") == "2 of 2 images classified.")
        width, inner = page.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
        assert width <= inner == size[0]
        assert all(each.rect["width"] <= size[0] for each in find(page, ".card"))
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def contrast(first: str, second: str) -> float:
    """WCAG contrast ratio of two CSS ``rgb(…)`` colours."""

    def luminance(colour: str) -> float:
        parts = np.array([float(part) for part in colour[4:-1].split(",")]) / 255.0
        linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        return float(linear @ [0.2126, 0.7152, 0.0722])

    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_in_both_schemes(page: Driver, files: dict[str, Path], scheme: str) -> None:
    features = {"prefers-color-scheme": scheme, "prefers-reduced-motion": "reduce"}
    media = {"features": [{"name": name, "value": value} for name, value in features.items()]}
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    try:
        choose(page, files["clear"], files["between"], files["strange"], files["broken"])
        until(lambda: text(page, "#status") == "3 of 4 images classified, 1 failed.")
        colours = page.execute_script(
            """
            const solid = (node) => {
              const colour = getComputedStyle(node).backgroundColor;
              return colour.startsWith("rgb(") ? colour : solid(node.parentElement);
            };
            const inked = "h1, h2, p, dt, dd, a, .name, .share, .drop-hint, figcaption";
            return [...document.querySelectorAll(inked)].filter((node) => node.checkVisibility()).map(
              (node) => [node.className, getComputedStyle(node).color, solid(node)]);
            """
        )
        assert len(colours) > 30
        faint = [(name, ink, paper) for name, ink, paper in colours if contrast(ink, paper) < 4.5]
        assert faint == []
        background = next(paper for _, _, paper in colours)
        assert (contrast(background, "rgb(0,0,0)") > 10) == (scheme == "light")
    finally:
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_names_and_labels_for_assistive_technology(page: Driver, files: dict[str, Path]) -> None:
    choose(page, files["clear"])
    until(lambda: text(page, "#status") == "1 of 1 image classified.")
    tree = page.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    seen = {
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in tree
        if not node["ignored"] and "role" in node
    }
    roles = {role for role, _ in seen}
    assert {"main", "contentinfo", "status", "list", "banner"} <= roles
    assert ("image", "clear.png") in seen
    assert ("list", "Most probable classes") in seen
    assert any(role in ("button", "Button") and "Drop images here" in name for role, name in seen)
    nameless = [role for role, name in seen if role in ("button", "textbox", "image", "link") and not name]
    assert nameless == []
