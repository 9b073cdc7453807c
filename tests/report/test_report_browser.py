"""The page in a real browser, offline: charts appear, labels and switches work."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from failslow.records import JobAnalysis, StepSeries
from failslow.report import job_picture, write_html

BROWSER = next(
    (
        found
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (found := shutil.which(name))
    ),
    None,
)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium to open the page with")

# clicks "time" and "log", then reports what the chart became
PROBE = """
<script>
addEventListener("load", () => {
  const chart = document.querySelector(".chart"), told = {errors: window.failures};
  const later = (work) => setTimeout(work, 600);
  later(() => {
    told.labels = chart.layout.annotations.map((a) => a.text);
    told.hover = chart.data[0].text[0];
    told.pinned = chart.data[5].x.length;
    told.stepTitle = chart.layout.xaxis.title.text;
    told.ratios = chart.layout.yaxis2.range.map((v) => v.toFixed(2));
    document.querySelector('[data-value="time"]').click();
    document.querySelector('[data-value="log"]').click();
    later(() => {
      told.timeTitle = chart.layout.xaxis.title.text;
      told.type = chart.layout.yaxis.type;
      told.pinnedLog = chart.data[5].x.length;
      document.querySelector("button.theme").click();
      document.querySelector("button.zoom").click();
      later(() => {
        told.range = chart.layout.xaxis.range.map((v) => Math.round(v));
        told.errors = window.failures;
        document.title = "told " + JSON.stringify(told);
      });
    });
  });
});
</script>
"""
WATCH = """
<script>
window.failures = [];
addEventListener("error", (e) => failures.push(e.message));
addEventListener("securitypolicyviolation", (e) => failures.push(e.blockedURI));
</script>
"""


def test_the_chart_draws_labels_switches_and_zooms_without_any_request(
    slow_job: tuple[StepSeries, JobAnalysis], tmp_path: Path
) -> None:
    assert BROWSER is not None
    page = tmp_path / "report.html"
    write_html(page, [job_picture(*slow_job)])
    text = page.read_text().replace("<header>", WATCH + "<header>")
    page.write_text(text.replace("</body>", PROBE + "</body>"))

    done = subprocess.run(
        [
            BROWSER,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--no-first-run",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            "--virtual-time-budget=10000",
            "--window-size=1200,1400",
            "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )

    title = re.search(r"<title>told (.*?)</title>", done.stdout)
    assert title, done.stdout[-500:]
    told = json.loads(html.unescape(title[1]))
    assert told["errors"] == []
    assert len(told["labels"]) == 1
    assert told["labels"][0].startswith("×1.40 · ")
    assert told["hover"].startswith("<b>step 10</b><br>")
    assert " an iteration (×" in told["hover"]
    assert "mean of 10 iterations" in told["hover"]
    assert "2025-04-27 06:27:3" in told["hover"]
    assert told["pinned"] == 3  # the spikes stand above the first view
    assert told["stepTitle"] == "step"
    bottom, top = map(float, told["ratios"])
    assert bottom < 1
    assert top > 1.4
    assert told["timeTitle"] == "time since the log began (h)"
    assert (told["type"], told["pinnedLog"]) == ("log", 0)
    low, high = told["range"]
    assert 1 <= low <= 3 < high <= 5  # zoomed on the episode, in hours
