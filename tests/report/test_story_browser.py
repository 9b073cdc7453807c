"""The page of a watched job in a real browser, offline: every picture is drawn, nothing fails."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.report.sample_journals import dp4, ppdp, write
from tests.report.sample_script import Script

from failslow.report.story import read_story, write_story

BROWSER = next(
    (
        found
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (found := shutil.which(name))
    ),
    None,
)
pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason="no chromium to open the page with"),
    pytest.mark.timeout(240),  # a browser without a GPU on a busy machine
]

WATCH = """
<script>
window.failures = [];
addEventListener("error", (e) => failures.push(e.message));
addEventListener("unhandledrejection", (e) => failures.push(String(e.reason)));
addEventListener("securitypolicyviolation", (e) => failures.push(e.blockedURI));
</script>
"""
# scrolls to every picture, presses every switch, and reports what was drawn
PROBE = """
<script>
addEventListener("load", () => probe().catch((e) => {
  document.title = "told " + JSON.stringify({errors: [...window.failures, String(e.stack)]});
}));
async function probe() {
  const told = {pictures: {}}, wait = (ms) => new Promise((done) => setTimeout(done, ms));
  const chart = document.querySelector(".chart");
  await wait(700);
  if (chart) {
    told.marks = chart.data[8].x.length;
    told.lanes = chart.layout.yaxis3.ticktext;
    told.bars = chart.layout.shapes.filter((s) => s.yref === "y3").length;
    told.timeTitle = chart.layout.xaxis.title.text;
    told.hover = chart.data[8].text[1];
  }
  dispatchEvent(new Event("beforeprint"));  // no frames here, so nothing scrolls into view
  await wait(700);
  for (const element of document.querySelectorAll("[data-picture]")) {
    told.pictures[element.dataset.picture] = element.data ? element.data.length : 0;
  }
  const heat = document.querySelector('[data-picture="profiles"]');
  if (heat) {
    told.cells = heat.data[0].z[0].length;
    heat.closest(".card").querySelector('[data-value="node"]').click();
    await wait(250);
    told.nodes = heat.data[0].x;
    heat.closest(".card").querySelector('[data-value="late"]').click();
    await wait(250);
    told.late = heat.data[0].customdata.flat().map((c) => c[0]).filter(Boolean);
  }
  document.querySelector("button.theme").click();
  await wait(400);
  for (const button of document.querySelectorAll(".switch button, button.zoom")) button.click();
  await wait(400);
  told.wide = document.documentElement.scrollWidth - innerWidth;
  told.errors = window.failures;
  document.title = "told " + JSON.stringify(told);
}
</script>
"""


def told(script: Script, folder: Path, *, width: int = 1240) -> dict[str, Any]:
    """What the page says of itself in a window of that width."""
    assert BROWSER is not None
    page = folder / "report.html"
    write_story(page, read_story(write(script, folder / "pretrain7")))
    text = page.read_text().replace("<header>", WATCH + "<header>")
    page.write_text(text.replace("</body>", PROBE + "</body>"))
    done = subprocess.run(
        [
            BROWSER,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={folder / 'profile'}",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--no-first-run",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            "--virtual-time-budget=8000",
            f"--window-size={width},1400",
            "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    title = re.search(r"<title>told (.*?)</title>", done.stdout)
    assert title, done.stdout[-500:]
    found: dict[str, Any] = json.loads(html.unescape(title[1]))
    return found


def test_all_pictures_of_a_device_fault_are_drawn_without_any_request(tmp_path: Path) -> None:
    found = told(dp4(), tmp_path)

    assert found["errors"] == []
    assert found["pictures"] == {"telemetry": 7, "profiles": 1, "own": 1}
    assert found["marks"] == 12
    assert found["lanes"][-2:] == ["action", "in force"]
    assert found["bars"] == 3
    assert found["timeTitle"] == "time since watching began (s)"
    assert "suspected ×1.18" in found["hover"]
    assert found["cells"] == 4
    assert found["nodes"] == ["gpu-0", "gpu-1"]
    assert "+30.8 ms" in found["late"]


@pytest.mark.slow
def test_links_are_drawn_and_a_phone_need_not_scroll_sideways(tmp_path: Path) -> None:
    found = told(ppdp(), tmp_path, width=500)

    assert found["errors"] == []
    assert found["pictures"] == {"telemetry": 8, "profiles": 1, "own": 1, "links": 1}
    assert found["cells"] == 8
    assert found["wide"] <= 0


@pytest.mark.slow
def test_a_job_that_never_iterated_has_a_page_too(tmp_path: Path) -> None:
    found = told(Script(2, 1, 0.1), tmp_path)

    assert found["errors"] == []
    assert found["pictures"] == {}
