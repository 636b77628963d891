"""The review queue on the page in a real Chromium: shown to holders of a key, reviewed by mouse and by keyboard."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from psc_core.log.erase import erase
from psc_core.log.labels import read_label_file
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

TAB, ENTER = "\ue004", "\ue007"


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return open_log(tmp_path / "log")


@pytest.fixture
def url(log: Log) -> Iterator[str]:
    models = {"m": FakeModel(), "v": FakeValueModel(version="w1")}
    with live_server(
        models, log=log.where, log_images="abstained", log_sample=0.0, feedback_keys="reviewer", log_flush_seconds=3600
    ) as url:
        for path, values in (("predict", (64, 65, 255)), ("models/v/predict", (255,))):
            for value in values:
                answer = HTTP.post(f"{url}/{path}", content=png(value), headers={"content-type": "image/png"})
                assert answer.status_code == 200
        yield url


def look(driver: Driver, url: str, key: str = "reviewer", cases: int = 3) -> None:
    driver.get(url)
    driver.execute_script("sessionStorage.clear()")
    until(find(driver, "#review")[0].is_displayed)
    find(driver, "#review summary")[0].click()
    until(find(driver, "#review-key-form")[0].is_displayed)
    find(driver, "#review-key")[0].send_keys(key + ENTER)
    if cases:
        until(lambda: len(find(driver, ".case")) == cases)


def labels(log: Log) -> list[tuple[str, str | None, str]]:
    return [
        (label.kind, label.label, label.source)
        for name, _ in sorted(log.names("labels"), key=lambda each: each[1])
        for label in read_label_file(log, name)
    ]


def test_a_person_reviews_the_last_abstentions(driver: Driver, url: str, log: Log) -> None:
    look(driver, url, "wrong", cases=0)
    until(lambda: says(driver, "#review-status", "is not accepted"))
    find(driver, "#review-key")[0].send_keys("reviewer" + ENTER)
    until(lambda: len(find(driver, ".case")) == 3)
    driver.get_log("browser")  # It complains about each 401.
    assert text(driver, "#review-status") == "0 of 3 reviewed."
    assert not find(driver, "#review-key-form")[0].is_displayed()
    value, first, _ = find(driver, ".case")
    assert "? Unclear guess: 100 %" in value.text and "The interval is wider than 14 %" in value.text
    assert "? Unclear guess: middle" in first.text and "a person should choose" in first.text
    until(lambda: all(each.get_property("naturalWidth") == 8 for each in find(driver, ".case img")))
    options = [each.text for each in first.find_elements("css selector", "option")]
    assert options == ["choose a class", "middle", "dark", "bright"]
    first.find_element("css selector", "[type=submit]").click()  # Nothing is chosen yet.
    assert labels(log) == []
    first.find_elements("css selector", "option")[2].click()
    first.find_element("css selector", "[type=submit]").click()
    until(lambda: "✓ dark" in first.text)
    first.find_element("css selector", "[name=cannot_tell]").click()  # On second thoughts.
    until(lambda: "✓ Cannot tell" in first.text)
    value.find_element("css selector", "input").send_keys("97.5")
    value.find_element("css selector", "[type=submit]").click()
    until(lambda: text(driver, "#review-status") == "2 of 3 reviewed.")
    assert labels(log) == [("label", "dark", "page"), ("cannot_tell", None, "page"), ("label", "97.5", "page")]
    find(driver, "#review-again")[0].click()
    until(lambda: len(find(driver, ".case")) == 1)
    assert errors(driver) == []


def test_the_keyboard_is_enough(driver: Driver, url: str, log: Log) -> None:
    look(driver, url)
    driver.execute_script("document.querySelector('.case input').focus()")

    def press(keys: str) -> None:
        driver.switch_to.active_element.send_keys(keys)

    press("90" + ENTER)
    until(lambda: driver.switch_to.active_element.tag_name == "select")  # Of the next image.
    press("bright")
    press(TAB)
    press(ENTER)
    until(lambda: len(labels(log)) == 2)
    until(lambda: driver.switch_to.active_element.tag_name == "select" and says(driver, "#review-status", "2 of 3"))
    for _ in range(2):
        press(TAB)
    press(ENTER)
    until(lambda: driver.switch_to.active_element.get_attribute("id") == "review-again")
    assert [each[:2] for each in labels(log)] == [("label", "90.0"), ("label", "bright"), ("none_of_the_classes", None)]
    press(ENTER)
    until(lambda: text(driver, "#review-status") == "No logged image waits for a label.")


def test_what_cannot_be_reviewed_says_why(driver: Driver, url: str, log: Log) -> None:
    look(driver, url)
    first = find(driver, ".case")[1]
    for name, _ in list(log.names("images")):
        erase(log, name.rsplit("/", 1)[1].split(".")[0])
    first.find_element("css selector", "[name=cannot_tell]").click()
    until(lambda: "was erased" in first.text)
    assert text(driver, "#review-status") == "0 of 3 reviewed."


def test_is_offered_though_requests_failed_once(driver: Driver, url: str) -> None:
    with before_the_page(driver, FAILING):
        look(driver, url)


def test_only_where_the_service_keeps_a_log(driver: Driver) -> None:
    with live_server({"m": FakeModel()}) as url:
        driver.get(url)
        until(lambda: "3 classes" in content(driver, "#model"))
        assert not find(driver, "#review")[0].is_displayed()


def test_can_be_read_and_used_everywhere(driver: Driver, url: str, screen: tuple[int, str]) -> None:
    look(driver, url)
    find(driver, ".case")[0].find_element("css selector", "[name=cannot_tell]").click()
    until(lambda: text(driver, "#review-status") == "1 of 3 reviewed.")
    found, inner = driver.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
    assert found <= inner == screen[0]
    assert all(each.rect["width"] <= inner for each in find(driver, ".case, .case *"))
    if AXE:
        assert violations(driver) == []
