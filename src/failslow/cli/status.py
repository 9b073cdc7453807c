"""`failslow status`: a watched job as it is now, once or live.

$ failslow status --json | jq -r '.phase, .slow.slowdown'
slow
1.39
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Annotated

import typer

from failslow.cli import options
from failslow.cli.output import emit, emit_view
from failslow.cli.watch import ALL_STEPS_BYTES, Seen, watch_run
from failslow.errors import InputError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from failslow.runtime.runs import RunPlace

__all__ = ["EXAMPLES", "status"]

EXAMPLES = """\
[bold]Examples[/bold]

failslow status

failslow status --watch

failslow status pretrain7 --json | jq .phase

failslow status --fail-on-slow > /dev/null || echo slow
"""

_ROWS = 32
"""Workers shown at most where no terminal limits them."""
_LINES_AROUND = 12
"""Of a terminal, for all but the workers."""


def status(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="DIR",
            help="Folder of the run, or the job's name; FAILSLOW_DIR, or the newest under "
            "failslow-runs/, if left out.",
            show_default=False,
        ),
    ] = None,
    *,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch", "-w", help="Go on showing it until the job ends; q or Ctrl-C leaves."
        ),
    ] = False,
    interval: Annotated[
        float,
        typer.Option(
            "--interval", metavar="SECONDS", min=0.1, help="How often --watch looks anew."
        ),
    ] = 1.0,
    all_workers: Annotated[
        bool,
        typer.Option("--all", help="Show every worker, however many; else the worst off of many."),
    ] = False,
    json: options.Json = False,
    fail_on_slow: Annotated[
        bool,
        typer.Option(
            "--fail-on-slow",
            help="Exit with 3 when a fail-slow is on.",
            rich_help_panel="Output",
        ),
    ] = False,
) -> None:
    """Show a watched job: each worker's iteration time against healthy, what is slow and why, and
    what is done about it.

    With --watch --json one line a change. Exit code: 0 shown, 1 no such run, 3 a fail-slow is on
    (with --fail-on-slow).
    """
    from failslow.runtime.runs import RUNS, find_run

    def find() -> RunPlace | None:
        return find_run(run, os.environ)

    where = run or os.environ.get("FAILSLOW_DIR") or f"{RUNS}/"
    printer = Printer(json=json, all_workers=all_workers)
    if watch:
        seen = watch_run(find, printer, where=where, interval_s=interval)
    else:
        seen = _look(find(), where)
        printer.print(seen)
    if fail_on_slow and seen is not None and seen.job.phase == "slow":
        raise typer.Exit(3)


class Printer:
    """Shows a job in the form that was asked for."""

    def __init__(self, *, json: bool, all_workers: bool) -> None:
        self.json, self._all = json, all_workers

    def view(self, seen: Seen, height: int | None = None) -> RenderableType:
        """For a terminal of `height` lines, or for none."""
        from failslow.report.live import inquiry_lines, live_view

        around = _LINES_AROUND + len(list(inquiry_lines(seen.job)))
        rows = _ROWS if height is None else max(1, height - around)
        return live_view(seen.job, max_rows=None if self._all else rows)

    def print(self, seen: Seen, *, one_line: bool = False) -> bool:
        """To stdout; False when its reader has gone."""
        if not self.json:
            return emit_view(self.view(seen))
        import json

        from failslow.report.live import live_document

        document = live_document(seen.job, folder=str(seen.place.folder))
        indent = None if one_line else 2
        return emit(json.dumps(document, indent=indent, allow_nan=False) + "\n")


def _look(place: RunPlace | None, where: str) -> Seen:
    """The run as its journal has it. Raises InputError or JournalError when there is none."""
    from failslow.journal import nothing_in, read_journal
    from failslow.report.livejob import LiveState

    if place is None or not place.has_journal:
        raise InputError(
            f"{where}: no watched job there; start one with FAILSLOW=1 or failslow run, and see "
            "failslow doctor if it does not appear"
        )
    state = LiveState(place.name)
    journal = read_journal(place.journal, all_steps_bytes=ALL_STEPS_BYTES)
    for entry in journal:
        state.observe(entry)
    job = state.look(time.time())
    if job.last_t is None and journal.skipped:
        raise nothing_in(str(place.journal), journal.skipped)
    return Seen(place, job)
