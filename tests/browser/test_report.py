"""The report in a real Chromium: on a telephone and a desk, in light and in dark."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from psc_core.bundle import read_bundle
from psc_core.report import page as report
from psc_core.report.content import facts_of
from tests.browser.test_page import Driver, chromium, contrast, driver, screen
from tests.psc_core.report.support import content

__all__ = ["chromium", "driver", "screen"]

LONG = "encoder.blocks.11.a_layer_of_a_name_that_has_no_place_to_break.output_projection"


def test_the_report_fits_everywhere(
    driver: Driver, screen: tuple[int, str], shipped_bundle: Path, tmp_path: Path
) -> None:
    bundle = read_bundle(shipped_bundle)
    facts = facts_of(bundle, content(bundle.manifest.version))
    facts = replace(facts, warnings=(LONG,), manifest=facts.manifest.model_copy(update={"name": LONG}))
    driver.get(report.write(facts, tmp_path).as_uri())
    page = "const page = document.documentElement; return page.scrollWidth - page.clientWidth"
    assert driver.execute_script(page) == 0
    ink, paper = (
        driver.execute_script(f"return getComputedStyle(document.body).{name}") for name in ("color", "backgroundColor")
    )
    is_light = contrast(paper, "rgb(0,0,0)") > contrast(ink, "rgb(0,0,0)")
    assert is_light == (screen[1] == "light")
