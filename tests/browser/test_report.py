"""The report in a real Chromium: on a telephone and a desk, in light and in dark."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from psc_core.bundle import read_bundle
from psc_core.report import page
from psc_core.report.content import facts_of
from tests.browser.test_page import Driver, chromium  # noqa: F401 (a fixture)
from tests.psc_core.report.support import content

LONG = "encoder.blocks.11.a_layer_of_a_name_that_has_no_place_to_break.output_projection"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_the_report_fits_and_follows_the_scheme(
    chromium: Driver,  # noqa: F811
    shipped_bundle: Path,
    tmp_path: Path,
    width: int,
    scheme: str,
) -> None:
    bundle = read_bundle(shipped_bundle)
    facts = facts_of(bundle, content(bundle.manifest.version))
    facts = replace(facts, warnings=(LONG,), manifest=facts.manifest.model_copy(update={"name": LONG}))
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        chromium.get(page.write(facts, tmp_path).as_uri())
        assert (
            chromium.execute_script("const page = document.documentElement; return page.scrollWidth - page.clientWidth")
            == 0
        )
        ink, paper = (
            chromium.execute_script(f"return getComputedStyle(document.body).{name}")
            for name in ("color", "backgroundColor")
        )
        assert (brightness(paper) > brightness(ink)) == (scheme == "light")
    finally:
        chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def brightness(color: str) -> int:
    """The sum of red, green and blue of ``rgb(r, g, b)``."""
    return sum(int(part) for part in color[color.index("(") + 1 : -1].split(",")[:3])
