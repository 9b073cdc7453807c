"""`failslow report`: the whole story of a watched job, from its journal.

$ failslow report --json | jq -r '.episodes[] | "\\(.slowdown) \\(.findings[0].cause)"'
1.39 device degradation (thermal)
"""

from __future__ import annotations

import os
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from failslow.cli import options
from failslow.cli.output import emit, emit_view, note, progress
from failslow.cli.page import check_target
from failslow.errors import InputError

if TYPE_CHECKING:
    from failslow.report.story import Story

__all__ = ["EXAMPLES", "find_journal", "report"]

EXAMPLES = """\
[bold]Examples[/bold]

failslow report

failslow report failslow-runs/pretrain7 --html pretrain7.html

failslow report --json | jq '.episodes[] | {slowdown, findings, removed}'
"""
PAGE = "failslow-report.html"


def report(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="Folder of the run, its journal, or the job's name; FAILSLOW_DIR, or the newest "
            "under failslow-runs/, if left out.",
            show_default=False,
        ),
    ] = None,
    *,
    json: options.Json = False,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html",
            metavar="FILE",
            help=f"Where to write the page; {PAGE} in the working folder if left out.",
            show_default=False,
            rich_help_panel="Output",
        ),
    ] = None,
    no_html: Annotated[
        bool, typer.Option("--no-html", help="Write no page.", rich_help_panel="Output")
    ] = False,
    quiet: options.Quiet = False,
    fail_on_slow: Annotated[
        bool,
        typer.Option(
            "--fail-on-slow",
            help="Exit with 3 when a fail-slow is in it.",
            rich_help_panel="Output",
        ),
    ] = False,
) -> None:
    """Tell what happened to a watched job: how slow, who and why, what was done, what it brought.

    Prints a summary and writes one self-contained page: timeline, episodes with their evidence,
    heat maps of workers and groups, links, decisions. With --json the page is written only if
    --html names it.
    """
    from failslow.report.story import read_story

    path, name, source = find_journal(run)
    page = None if no_html or (json and html is None) else html or Path(PAGE)
    if page is not None:
        check_target(page)
    with progress(1, enabled=not (quiet or json)) as begin:
        begin(source)
        story = read_story(path, name=name, source=source)
    if json:
        from failslow.report.json import dumps
        from failslow.report.story import story_document

        emit(dumps(story_document(story)) + "\n")
    elif not quiet:
        from failslow.report.story import story_view

        emit_view(story_view(story))
    if page is not None:
        _page(story, page, quiet=quiet)
    if fail_on_slow and story.faults:
        raise typer.Exit(3)


def _page(story: Story, file: Path, *, quiet: bool) -> None:
    """Raises OutputError when it cannot be written."""
    from failslow.report.story import write_story

    made_at = f"{datetime.now(tz=timezone.utc):%Y-%m-%d %H:%M} UTC"
    write_story(file, story, made_at=made_at)
    if not quiet:
        note(f"wrote {file}")


def find_journal(run: str | None) -> tuple[Path, str, str]:
    """(journal, name of the job, what to call it). Raises InputError when there is none."""
    from failslow.runtime.runs import JOURNAL, RUNS, find_run

    if run is not None and Path(run).is_file():
        path = Path(run)
        name = path.absolute().parent.name if path.name == JOURNAL else path.name
        return path, name, run
    place = find_run(run, os.environ)
    where = run or os.environ.get("FAILSLOW_DIR") or f"{RUNS}/"
    if place is None or not place.has_journal:
        raise InputError(
            f"{where}: no watched job there; name a folder with a {JOURNAL}, or start a job with "
            "FAILSLOW=1 or failslow run"
        )
    return place.journal, place.name, str(place.folder)
