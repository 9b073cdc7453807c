"""The page: one file, complete, written whole or not at all; no name in it becomes code."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from failslow.errors import OutputError
from failslow.records import JobAnalysis, Run, StepSeries
from failslow.report import job_picture, summarize, write_html
from failslow.report.files import write_atomically


def payloads(page: str) -> list[dict[str, Any]]:
    """The numbers of every chart."""
    found = re.findall(r'<script type="application/json" id="data-\d+">(.*?)</script>', page)
    return [json.loads(text) for text in found]


class Visible(HTMLParser):
    """Collects the text outside scripts and styles, and every reference to another file."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        self.references: list[str] = []
        self.tags: list[str] = []
        self._silent = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._silent += tag in ("script", "style")
        self.references += [v or "" for k, v in attrs if k in ("src", "href", "data", "srcset")]

    def handle_endtag(self, tag: str) -> None:
        self._silent -= tag in ("script", "style")

    def handle_data(self, data: str) -> None:
        if not self._silent:
            self.text += data


def read(path: Path) -> tuple[str, Visible]:
    page = path.read_text(encoding="utf-8")
    visible = Visible()
    visible.feed(page)
    return page, visible


def test_the_page_holds_everything_and_refers_to_nothing(
    slow_job: tuple[StepSeries, JobAnalysis], tmp_path: Path
) -> None:
    file = tmp_path / "report.html"
    write_html(file, [job_picture(*slow_job)], title="train.log", made_at="2026-01-01 00:00 UTC")

    page, visible = read(file)

    assert visible.references == ["#job-1"]
    assert "connect-src" not in page.split("<title>")[0]
    assert "default-src 'none'" in page.split("<title>")[0]
    assert "Plotly" in page
    assert len(page) > 3_000_000
    (payload,) = payloads(page)
    assert payload["records"] == 5000
    assert len(payload["episodes"]) == 1


def test_the_tables_say_what_was_found(
    slow_job: tuple[StepSeries, JobAnalysis], tmp_path: Path
) -> None:
    file = tmp_path / "report.html"
    write_html(
        file,
        [job_picture(*slow_job)],
        errors=[("bad.log", "bad.log: no known training log in it")],
        made_at="2026-01-01 00:00 UTC",
    )

    _, visible = read(file)

    for words in (
        "train.log",
        "1 fail-slow",
        "step 15,010",
        "×1.40",
        "rank 3 (compute ×2.30)",
        "3 spikes",
        "3 lines without a time",
        "bad.log: no known training log in it",
        "2026-01-01 00:00 UTC",
        "2025-04-27 06:27:30 UTC",
    ):
        assert words in visible.text, words


def test_a_study_page_shows_its_figures(
    slow_job: tuple[StepSeries, JobAnalysis], tmp_path: Path
) -> None:
    file = tmp_path / "study.html"
    write_html(file, [job_picture(*slow_job)], study=summarize([slow_job[1]]))

    _, visible = read(file)

    assert "1 of 1jobs hit" in visible.text
    assert "of hit jobs over +50 %" in visible.text


def test_names_and_notes_cannot_become_markup_or_script(
    slow_job: tuple[StepSeries, JobAnalysis], tmp_path: Path
) -> None:
    evil = "</script><script>alert(1)</script><img src=x>"
    series, analysis = slow_job
    episode = replace(analysis.episodes[0], note=evil)
    analysis = replace(analysis, source=evil, episodes=(episode,), warnings=(evil,))
    file = tmp_path / "report.html"
    plain = tmp_path / "plain.html"
    write_html(plain, [job_picture(*slow_job)])
    write_html(file, [job_picture(series, analysis)], title=evil, errors=[(evil, evil)])

    _, visible = read(file)

    assert "img" not in visible.tags
    assert visible.tags.count("script") == read(plain)[1].tags.count("script")
    assert visible.text.count(evil) >= 5


def test_a_note_that_opens_a_comment_hides_no_script(
    slow_job: tuple[StepSeries, JobAnalysis], tmp_path: Path
) -> None:
    series, analysis = slow_job
    note = "model a -> <!--<script>"
    run = (np.arange(len(series)) >= 10).astype(np.int64)
    series = replace(series, run=run, runs=(Run(), Run(note=note, config_changed=True)))
    file = tmp_path / "report.html"
    write_html(file, [job_picture(series, analysis)])

    page, _ = read(file)

    (payload,) = payloads(page)
    assert payload["restarts"][0]["note"] == note
    assert "<!--" not in page.split("<script>")[0]


def test_a_page_with_no_write_permission_is_one_line_and_leaves_the_old_one(tmp_path: Path) -> None:
    missing = tmp_path / "no" / "such" / "report.html"

    with pytest.raises(OutputError, match=r"report\.html: cannot be written: No such file") as told:
        write_html(missing, [])

    assert "\n" not in str(told.value)


def test_a_failure_half_way_keeps_the_old_file_and_no_litter(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text("old")

    def parts() -> Iterator[str]:
        yield "new"
        raise RuntimeError("half-way")

    with pytest.raises(RuntimeError):
        write_atomically(file, parts())

    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_the_file_is_as_public_as_the_umask_allows_and_links_stay_links(tmp_path: Path) -> None:
    target, link = tmp_path / "real.html", tmp_path / "link.html"
    target.write_text("old")
    link.symlink_to(target)
    before = os.umask(0o027)
    try:
        write_atomically(link, ["new ", "text"])
    finally:
        os.umask(before)

    assert link.is_symlink()
    assert target.read_text() == "new text"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640


def test_a_device_is_written_to_not_replaced() -> None:
    write_atomically(Path(os.devnull), ["x"])

    assert stat.S_ISCHR(Path(os.devnull).stat().st_mode)
