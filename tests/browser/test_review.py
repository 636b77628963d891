"""The review queue and the live view of the page in a real Chromium, by keyboard and on a telephone."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from psc_core.log.erase import erase
from psc_core.log.labels import Label, read_label_file, read_labels, write_labels
from psc_core.log.store import Log, open_log
from tests.app.fakes import FakeModel, FakeValueModel, png
from tests.app.live import live_server
from tests.browser.test_page import (
    AXE,
    FAILING,
    Driver,
    before_the_page,
    chromium,
    content,
    driver,
    errors,
    find,
    says,
    screen,
    text,
    until,
    violations,
)
from tests.served import HTTP

__all__ = ["chromium", "driver", "screen"]

ENTER = "\ue007"
BACKSPACE = "\ue003"
GLANCE_SECONDS = 0.2  # after which the page takes an answer to an image


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return open_log(tmp_path / "log")


@pytest.fixture
def url(log: Log) -> Iterator[str]:
    """A service with two unclear images, an accepted one of the random sample, and too wide an interval."""
    models = {"m": FakeModel(), "v": FakeValueModel(version="w1")}
    with live_server(models, log=log.where, log_sample=1.0, feedback_keys="reviewer", log_flush_seconds=3600) as url:
        for path, values in (("predict", (64, 65, 254)), ("models/v/predict", (255,))):
            for value in values:
                answer = HTTP.post(f"{url}/{path}", content=png(value), headers={"content-type": "image/png"})
                assert answer.status_code == 200
        yield url


def look(driver: Driver, url: str, images: int = 4) -> None:
    driver.get(url)
    driver.execute_script("sessionStorage.setItem('psc-feedback-key', 'reviewer')")
    until(find(driver, "#views [href='#review']")[0].is_displayed)
    find(driver, "#views [href='#review']")[0].click()
    shows(driver, f"0 of {images} done")


def shows(driver: Driver, status: str) -> None:
    until(lambda: text(driver, "#review-status") == status)


def press(driver: Driver, keys: str) -> None:
    until(lambda: all(each.get_property("naturalWidth") == 8 for each in find(driver, "#stage img, #stage:empty")))
    time.sleep(GLANCE_SECONDS)
    driver.switch_to.active_element.send_keys(keys)


def labels(log: Log) -> list[tuple[str, str | None]]:
    files = sorted(log.names("labels"), key=lambda each: each[1])
    return [(label.kind, label.label) for name, _ in files for label in read_label_file(log, name)]


def test_keys_label_and_take_back(driver: Driver, url: str, log: Log) -> None:
    driver.get(f"{url}/#review")
    driver.execute_script("sessionStorage.clear(); location.reload()")
    until(lambda: says(driver, "#review-status", "Enter the key"))
    driver.execute_script("document.getElementById('review-key').value = 'en\u2013dash'")  # No header carries it.
    find(driver, "#review-key-form button")[0].click()
    until(lambda: says(driver, "#review-status", "Copy it again"))
    assert find(driver, "#review-key-form")[0].is_displayed()
    find(driver, "#review-key")[0].clear()
    for key in ("wrong", "reviewer"):
        find(driver, "#review-key")[0].send_keys(key + ENTER)
        until(lambda key=key: says(driver, "#review-status", "is not accepted" if key == "wrong" else "0 of 4"))
    driver.get_log("browser")  # It complains about each 401.
    assert not find(driver, "#review-key-form")[0].is_displayed()
    assert text(driver, "#case-guess") == "" and "is wider than 14 %" in text(driver, "#case-reason")
    press(driver, ENTER)  # The guess is no measurement.
    shows(driver, "Nothing is saved: type the number, %.")
    find(driver, "#label-form button")[0].click()
    shows(driver, "Nothing is saved: type the number, %.")
    find(driver, "#label")[0].click()
    press(driver, "97.5" + ENTER)
    shows(driver, "1 of 4 done, last: 97.5")
    assert text(driver, "#case-badge") == "✓ Spot check" and text(driver, "#case-guess") == "guess: bright"
    press(driver, ENTER)  # It accepts the guess.
    shows(driver, "2 of 4 done, last: bright")
    assert text(driver, "#case-badge") == "? Unclear" and text(driver, "#case-reason").startswith("Middle and dark fit")
    assert [each.text.replace("\n", " ") for each in find(driver, "#answers button")] == [
        "1 dark", "2 middle", "3 bright",
    ]  # fmt: skip
    press(driver, "1")
    shows(driver, "3 of 4 done, last: dark")
    press(driver, "z")
    until(lambda: says(driver, "#review-status", "until you do, “dark” counts"))
    press(driver, "+")
    press(driver, "3")
    shows(driver, "3 of 4 done, last: bright")
    press(driver, "n")
    shows(driver, "4 done. No logged image waits for a label.")
    assert labels(log) == [
        ("label", "97.5"), ("label", "bright"), ("label", "dark"), ("label", "bright"), ("none_of_the_classes", None),
    ]  # fmt: skip
    press(driver, "z")  # Also after the last.
    until(find(driver, "#case")[0].is_displayed)
    press(driver, "u")
    until(lambda: labels(log)[5:] == [("cannot_tell", None)])
    assert errors(driver) == []


def test_a_telephone_shows_image_and_answers_without_scrolling(driver: Driver, url: str, log: Log) -> None:
    size = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    look(driver, url)
    entries = "return performance.getEntriesByType('resource').filter(({name}) => name.endsWith('.png')).length"
    until(lambda: driver.execute_script(entries) == 4)  # The next ones too.
    for kind, count in (("abstain_ambiguous,abstain_uncertain", 3), ("accept", 1), ("", 4)):
        find(driver, f"#review-reason [value='{kind}']")[0].click()
        shows(driver, f"0 of {count} done")
    find(driver, "#review-model [value=m]")[0].click()
    shows(driver, "0 of 3 done")
    for selector, status in (("#skip", "0 of 3 done"), ("#answers button", "1 of 3 done, last: dark")):
        press(driver, "")
        bottoms = [each.rect["y"] + each.rect["height"] for each in find(driver, ".case button") if each.is_displayed()]
        assert len(bottoms) == 9 and max(bottoms) <= 844
        assert find(driver, "#stage")[0].rect["height"] >= 240
        find(driver, selector)[0].click()
        shows(driver, status)
    until(lambda: labels(log) == [("label", "dark")])
    find(driver, "#stage")[0].click()
    stage, image = find(driver, "#stage")[0].rect, find(driver, "#stage img")[0].rect
    assert image["width"] == pytest.approx(2 * stage["width"], rel=0.05)
    assert driver.execute_script("return [document.documentElement.scrollWidth, innerWidth]") == [390, 390]


def test_many_classes_are_found_by_their_names(driver: Driver, url: str) -> None:
    driver.get(url)
    found = driver.execute_async_script(
        "const done = arguments[0]; import('./page/tasks.js').then(({TASKS: {classification: task}}) => {"
        "const classes = [...Array(12).keys()].map((index) => `class ${index}`);"
        "const likely = {'class 3': 0.2, 'class 7': 0.5};"
        "done([task.choices({label: 'class 7', likely}, {classes}),"
        "...['CLASS 11', 'class 1', 'class', 'x'].map((text) => task.label(text, {classes}) ?? null),"
        "...['CLASS 2', 'class 1', 'x'].map((text) => task.completed(text, {classes}) ?? null),"
        "task.label('Class 1', {classes: [...classes, 'Class 1']})]); });"
    )
    assert found == [["class 7", "class 3"], "class 11", "class 1", None, None, "class 2", None, None, "Class 1"]


@pytest.mark.parametrize(
    ("names", "more", "keys"),
    [
        (["dark", "bright"], [], ["1", "2"]),
        (["7", "page", "3"], ["0", *"1245689"], ["7", None, "3"]),
        (["page", "1", "dark"], [], ["2", "1", "3"]),
    ],
)
def test_digits_keep_their_keys_whatever_is_likely(
    driver: Driver, url: str, names: list[str], more: list[str], keys: list[str | None]
) -> None:
    driver.get(url)
    call = (
        "const [names, classes, done] = arguments;"
        "import('./page/tasks.js').then(({keysOf}) => done(keysOf(names, classes).map((key) => key ?? null)));"
    )
    assert driver.execute_async_script(call, names, names + more) == keys


def test_what_is_none_of_the_classes_gets_a_name(driver: Driver, url: str, log: Log) -> None:
    look(driver, url)
    find(driver, "#review-model [value=m]")[0].click()
    shows(driver, "0 of 3 done")
    press(driver, "/")
    press(driver, "hedgehog" + ENTER)
    until(lambda: says(driver, "#review-status", "No class is “hedgehog”"))
    press(driver, ENTER)
    shows(driver, "1 of 3 done, last: hedgehog")
    press(driver, "/")
    offered = "return [...document.querySelectorAll('#label-names option')].map(({value}) => value)"
    assert driver.execute_script(offered) == ["dark", "middle", "bright", "hedgehog"]
    press(driver, "hedgehog" + ENTER)  # A name that was given needs no second time.
    shows(driver, "2 of 3 done, last: hedgehog")
    press(driver, "/")
    press(driver, "mid" + ENTER)  # One class begins so, which is offered.
    until(lambda: find(driver, "#label")[0].get_property("value") == "middle")
    assert labels(log) == [("none_of_the_classes", "hedgehog")] * 2
    press(driver, BACKSPACE + ENTER)  # It was meant as a name.
    named = [("none_of_the_classes", "hedgehog")] * 2 + [("none_of_the_classes", "mid")]
    until(lambda: labels(log) == named)
    press(driver, "z")
    press(driver, "/")
    press(driver, "brig" + ENTER)
    press(driver, ENTER)
    until(lambda: labels(log) == [*named, ("label", "bright")])
    assert errors(driver) == []


def cluster(log: Log, url: str, sizes: dict[str, range]) -> dict[str, str]:
    """Send images, and name them by cluster as ``psc-log review --clusters`` does; return the digest of each."""
    values = [(name, value) for name, some in sizes.items() for value in some]
    files = [("images", (f"{value}.png", png(value))) for _, value in values]
    assert HTTP.post(f"{url}/predict", files=files).status_code == 200
    found = {f"{name} {value}": hashlib.sha256(png(value)).hexdigest() for name, value in values}
    of = [(name.rsplit(" ", 1)[0], sha256) for name, sha256 in found.items()]
    now = datetime.now(UTC)
    write_labels(log, [Label(None, None, each, "none_of_the_classes", name, "x", now, "m") for name, each in of])
    return found


def open_clusters(driver: Driver, url: str, images: int) -> None:
    look(driver, url)
    find(driver, "#review-reason [value=to_name]")[0].click()
    shows(driver, f"0 of {images} done")
    shown = "#alike button img"
    until(lambda: len(find(driver, shown)) == len(find(driver, "#alike button")))
    assert all(each.get_property("naturalWidth") == 8 for each in find(driver, shown))


def named(log: Log, digests: dict[str, str]) -> dict[str, tuple[str, str | None] | None]:
    last = read_labels(log)
    found = {name: last.of("m", "", 0, sha256) for name, sha256 in digests.items()}
    return {name: each and (each.kind, each.label) for name, each in found.items()}


def test_a_name_is_given_to_all_images_of_a_cluster(driver: Driver, url: str, log: Log) -> None:
    digests = cluster(log, url, {"cluster 1": range(70, 72), "cluster 2": range(80, 84), "cluster 3": range(90, 91)})
    open_clusters(driver, url, 7)
    assert text(driver, "#case-badge") == "cluster 2" and text(driver, "#case-guess") == "4 images look alike"
    assert not find(driver, "#answers button") and len(find(driver, "#alike button")) == 3
    press(driver, ENTER)  # No guess stands for a name.
    shows(driver, "Nothing is saved: type a name.")
    small = find(driver, "#alike button")[0]
    for state, words in (("true", "3 images"), ("false", "4 images"), ("true", "3 images")):
        small.send_keys(" ")
        assert small.get_attribute("aria-pressed") == state and text(driver, "#case-guess") == f"{words} look alike"
    find(driver, "#stage")[0].click()
    press(driver, "/")
    press(driver, "cluster 7" + ENTER)
    shows(driver, "Nothing is saved: “cluster 7” counts as no name. Type another.")
    find(driver, "#label")[0].clear()
    find(driver, "#label")[0].click()
    press(driver, "hedgehog" + ENTER)
    until(lambda: says(driver, "#review-status", "No class is “hedgehog”"))
    press(driver, ENTER)
    shows(driver, "3 of 7 done, last: hedgehog")
    assert (
        text(driver, "#case-badge") == "cluster 2" and text(driver, "#case-guess") == "by itself"
    )  # It was taken out.
    press(driver, "u")
    shows(driver, "4 of 7 done, last: cannot tell")
    assert text(driver, "#case-badge") == "cluster 1"
    until(lambda: text(driver, "#case-guess") == "2 images look alike")
    press(driver, "/")
    press(driver, "Dark" + ENTER)  # A class of the model.
    shows(driver, "6 of 7 done, last: dark")
    press(driver, "z")
    until(lambda: text(driver, "#case-guess") == "2 images look alike")
    press(driver, "/")
    press(driver, "hedgehog" + ENTER)
    shows(driver, "6 of 7 done, last: hedgehog")
    assert text(driver, "#case-badge") == "cluster 3" and not find(driver, "#alike")[0].is_displayed()
    press(driver, "n")
    shows(driver, "7 done. No logged image waits for a name, see psc-log review --clusters.")
    hedgehog = ("none_of_the_classes", "hedgehog")
    found = named(log, digests)
    assert found["cluster 1 70"] == found["cluster 1 71"] == hedgehog
    assert sorted(found[f"cluster 2 {value}"] for value in range(80, 84)) == [("cannot_tell", None), *[hedgehog] * 3]
    assert found["cluster 3 90"] == ("none_of_the_classes", None)
    assert errors(driver) == []


def test_a_name_is_given_to_so_many_images_at_a_time(driver: Driver, url: str, log: Log) -> None:
    digests = cluster(log, url, {"cluster 1": range(70, 90)})
    open_clusters(driver, url, 20)
    assert text(driver, "#case-guess") == "13 images look alike" and len(find(driver, "#alike button")) == 12
    press(driver, "u")
    shows(driver, "13 of 20 done, last: cannot tell")
    until(lambda: text(driver, "#case-guess") == "7 images look alike")
    until(lambda: [*named(log, digests).values()].count(("cannot_tell", None)) == 13)


def test_an_odd_image_in_front_of_its_cluster_is_skipped(driver: Driver, url: str, log: Log) -> None:
    digests = cluster(log, url, {"cluster 1": range(70, 74), "cluster 2": range(80, 82)})
    open_clusters(driver, url, 6)
    find(driver, "#alike button")[0].click()
    press(driver, "s")
    until(lambda: text(driver, "#case-guess") == "2 images look alike")
    assert text(driver, "#case-badge") == "cluster 1"
    press(driver, "u")
    shows(driver, "2 of 6 done, last: cannot tell")
    until(lambda: sorted(map(str, named(log, digests).values())).count("('cannot_tell', None)") == 2)
    until(lambda: text(driver, "#case-guess") == "2 images look alike")
    assert text(driver, "#case-badge") == "cluster 2"
    press(driver, "n")
    shows(driver, "4 of 6 done, last: none of these")
    nothing = "No logged image waits for a name, see psc-log review --clusters."
    for done in ("5 of 6 done, last: cannot tell", f"6 done. {nothing}"):
        assert text(driver, "#case-badge") == "cluster 1" and text(driver, "#case-guess") == "by itself"
        press(driver, "u")
        shows(driver, done)


PICTURES_HELD = """
const asked = window.fetch;
window.held = [];
window.fetch = async (path, options) => {
  if (path.startsWith("feedback/images/")) await new Promise((go) => window.held.push(go));
  return asked(path, options);
};
"""


def test_a_name_is_given_only_to_images_that_are_shown(driver: Driver, url: str, log: Log) -> None:
    digests = cluster(log, url, {"cluster 1": range(70, 74)})

    def release(picture: int) -> None:
        until(lambda: driver.execute_script("return window.held.length") > picture)
        driver.execute_script("window.held[arguments[0]]()", picture)

    def is_guess(words: str) -> None:
        until(lambda: text(driver, "#case-guess") == words)

    with before_the_page(driver, PICTURES_HELD):
        look(driver, url)
        find(driver, "#review-reason [value=to_name]")[0].click()
        shows(driver, "0 of 4 done")
        first = driver.execute_script("return window.held.length") - 1
        for picture in (first, first + 1):
            release(picture)
        is_guess("2 images look alike")
        assert len(find(driver, "#alike button")) == 3 and len(find(driver, "#alike img")) == 1
        press(driver, "u")  # The next small picture is on its way.
        shows(driver, "2 of 4 done, last: cannot tell")
        until(lambda: [*named(log, digests).values()].count(("cannot_tell", None)) == 2)
        driver.switch_to.active_element.send_keys("z")  # Before the large picture of the rest.
        until(lambda: says(driver, "#review-status", "until you do, “cannot tell” counts"))
        for picture in (first + 2, first + 4):  # That of the first turn, and the large one.
            release(picture)
        press(driver, "n")
        shows(driver, "1 of 4 done, last: none of these")
        for picture in (first + 6, first + 7):
            release(picture)
        is_guess("2 images look alike")
        press(driver, "n")
        shows(driver, "3 of 4 done, last: none of these")
        release(first + 9)
        press(driver, "n")
        shows(driver, "4 done. No logged image waits for a name, see psc-log review --clusters.")
    assert set(named(log, digests).values()) == {("none_of_the_classes", None)}


HELD = """
const asked = window.fetch;
window.fetch = async (path, options) => {
  if (path === "feedback") await new Promise((go) => (window.release = go));
  return asked(path, options);
};
"""


def test_only_what_is_saved_counts_and_the_rest_asks_to_stay(driver: Driver, url: str, log: Log) -> None:
    asks = (
        "const event = new Event('beforeunload', {cancelable: true}); dispatchEvent(event);"
        "return event.defaultPrevented"
    )
    with before_the_page(driver, HELD):
        look(driver, url)
        find(driver, "#review-model [value=m]")[0].click()
        shows(driver, "0 of 3 done")
        assert not driver.execute_script(asks)
        press(driver, "1")
        press(driver, "2")
        shows(driver, "0 of 3 done, saving 2, last: middle")
        assert driver.execute_script(asks) and labels(log) == []
        for status in ("1 of 3 done, saving 1, last: middle", "2 of 3 done, last: middle"):
            driver.execute_script("window.release()")
            shows(driver, status)
        assert not driver.execute_script(asks) and labels(log) == [("label", "dark"), ("label", "middle")]


def test_what_cannot_be_saved_says_why(driver: Driver, url: str, log: Log) -> None:
    look(driver, url)
    find(driver, "#review-model [value=m]")[0].click()
    shows(driver, "0 of 3 done")
    for name, _ in list(log.names("images")):
        erase(log, name.rsplit("/", 1)[1].split(".")[0])
    press(driver, "u")
    until(lambda: says(driver, "#review-status", "was erased"))
    assert labels(log) == []


def test_what_cannot_be_saved_last_says_why_and_comes_again(driver: Driver, url: str, log: Log) -> None:
    cluster(log, url, {"cluster 1": range(70, 73)})
    open_clusters(driver, url, 3)
    fail = (
        "const asked = window.fetch; window.fetch = (path, options) =>"
        "path === 'feedback' ? Promise.reject(new TypeError('down')) : asked(path, options)"
    )
    driver.execute_script(fail)
    press(driver, "n")
    until(lambda: text(driver, "#case-guess") == "3 images look alike")  # They were listed again.
    shows(driver, "✕ “none of these” was not saved: The service cannot be reached.")
    assert not find(driver, "#undo")[0].is_enabled()
    find(driver, "#review-reason [value='']")[0].click()
    shows(driver, "0 of 4 done")
    press(driver, "n")
    until(lambda: says(driver, "#review-status", "was not saved"))
    assert not find(driver, "#undo")[0].is_enabled()
    press(driver, "z")
    assert errors(driver) == []


def test_is_offered_though_requests_failed_once(driver: Driver, url: str) -> None:
    with before_the_page(driver, FAILING):
        look(driver, url)


def test_only_where_the_service_keeps_a_log(driver: Driver) -> None:
    with live_server({"m": FakeModel()}) as url:
        driver.get(f"{url}/#review")
        until(lambda: "3 classes" in content(driver, "#model"))
        assert not find(driver, "#review, #views [href='#review']")[0].is_displayed()
        assert find(driver, "#upload")[0].is_displayed()


def test_live_shows_what_was_sent_and_how_much_of_it_was_right(driver: Driver, url: str) -> None:
    look(driver, url)
    find(driver, "#review-reason [value=accept]")[0].click()
    shows(driver, "0 of 1 done")
    press(driver, "3")
    until(lambda: says(driver, "#review-status", "No logged image waits"))
    find(driver, "#views [href='#live']")[0].click()
    until(lambda: text(driver, "#hour-parts") == "✓ Accept 1, 33.3 %\n? Unclear 2, 66.7 %\n! Unusual 0, 0.0 %")
    assert not find(driver, "#upload")[0].is_displayed()
    # At once, because the live view replaces what it shows.
    heights = (
        "return arguments[0].map((decision) => Math.max(...[...document.querySelectorAll("
        "`#hour [data-decision=${decision}]`)].map((each) => each.getBoundingClientRect().height)))"
    )
    decisions = ["accept", "abstain_ambiguous", "abstain_ood"]
    accepted, unclear, unusual = driver.execute_script(heights, decisions)
    assert unclear == pytest.approx(2 * accepted, rel=0.1) and unusual == 0
    assert text(driver, "#drift-word") == "Too few images"
    HTTP.post(f"{url}/predict", files=[("images", (f"{value}.png", png(value))) for value in range(60)])
    until(lambda: text(driver, "#drift-word") == "✓ Ordinary" and "0.0 % of the last 63" in text(driver, "#drift"))
    until(lambda: says(driver, "#checked", "1 of 1 checked answers were right."))
    assert errors(driver) == []


def test_live_knows_nothing_of_a_service_that_does_not_answer(driver: Driver) -> None:
    with live_server() as url, before_the_page(driver, FAILING):
        HTTP.post(f"{url}/predict", files=[("images", (f"{value}.png", png(value))) for value in range(60)])
        driver.get(f"{url}/#live")
        for broken, word in (("", "✓ Ordinary"), ("models/m/live", "Unknown"), ("", "✓ Ordinary")):
            driver.execute_script("window.broken = arguments[0]", broken)
            until(lambda word=word: text(driver, "#drift-word") == word)
            decision = find(driver, "#drift")[0].get_attribute("data-decision")
            assert decision == ("" if broken else "accept") and says(driver, "#drift", "Since ") == bool(broken)


@pytest.mark.parametrize("view", ["review", "live", "clusters"])
def test_can_be_read_and_used_everywhere(
    driver: Driver, url: str, log: Log, screen: tuple[int, str], view: str
) -> None:
    if view == "clusters":
        cluster(log, url, {"cluster 1": range(70, 90)})
        open_clusters(driver, url, 20)
        find(driver, "#alike button")[1].click()
        view = "review"
    else:
        look(driver, url)
        press(driver, "5" + ENTER)
        shows(driver, "1 of 4 done, last: 5")
    find(driver, f"#views [href='#{view}']")[0].click()
    until(find(driver, f"#{view}")[0].is_displayed)
    found, inner = driver.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
    assert found <= inner == screen[0]
    # At once, because the live view replaces what it shows.
    widths = "return [...document.querySelectorAll('.view *')].map((each) => each.getBoundingClientRect().width)"
    assert max(driver.execute_script(widths)) <= inner
    if AXE:
        assert violations(driver) == []
