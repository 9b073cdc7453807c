"""`failslow doctor`: whether a job started here would be watched, or a running one is.

$ failslow doctor --json | jq -r '.checks[] | select(.status == "fail") | .remedy'
unset TORCH_DEVICE_BACKEND_AUTOLOAD
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from failslow.cli import options
from failslow.cli.output import emit, emit_view

if TYPE_CHECKING:
    from rich.console import RenderableType

    from failslow.runtime.doctor import Check

__all__ = ["EXAMPLES", "doctor"]

EXAMPLES = """\
[bold]Examples[/bold]

failslow doctor

failslow doctor --job pretrain7

failslow doctor --json | jq -r '.checks[].status'
"""

_MARKS = {
    "pass": ("✓", "green"),
    "info": ("·", "dim"),
    "warn": ("!", "yellow"),
    "fail": ("✗", "bold red"),
}


def doctor(
    *,
    job: Annotated[
        str | None,
        typer.Option(
            "--job",
            metavar="DIR|NAME",
            help="Look at a running job instead: its folder, or its name.",
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Start no job and no server: look at the settings only.")
    ] = False,
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout", metavar="SECONDS", min=1.0, help="How long the job of its own may take."
        ),
    ] = 60.0,
    json: options.Json = False,
) -> None:
    """Check that jobs started here are watched: torch, plugin, rings, transport, real records.

    Runs a two-worker job of its own for a few seconds. Exit code: 0 nothing failed (warnings
    are no failure), 1 something did.
    """
    checks: list[Check] = []
    if job is not None:
        from failslow.runtime.doctor.running import running_checks

        with _patience("looking at the job"):
            checks += running_checks(job, os.environ, now_s=time.time())
    else:
        from failslow.runtime.doctor.machine import machine_checks
        from failslow.runtime.doctor.settings import settings_checks

        checks += settings_checks(os.environ)
        checks += machine_checks(os.environ)
        if not quick and not any(c.name == "torch" and c.status == "fail" for c in checks):
            from failslow.runtime.doctor.trial import trial_checks

            with _patience("running a job of two workers"):
                checks += trial_checks(os.environ, timeout_s=timeout)
    failed = sum(check.status == "fail" for check in checks)
    if json:
        emit(_document(checks))
    else:
        emit_view(_view(checks))
    if failed:
        raise typer.Exit(1)


@contextmanager
def _patience(what: str) -> Iterator[None]:
    """Says on a terminal why nothing is shown yet."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(f"{what} …"):
        yield


def _document(checks: Iterable[Check]) -> str:
    from dataclasses import asdict

    from failslow.report.json import dumps

    rows = [asdict(check) for check in checks]
    ok = all(row["status"] != "fail" for row in rows)
    return dumps({"schema": "failslow.doctor/1", "ok": ok, "checks": rows}) + "\n"


def _view(checks: Sequence[Check]) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        mark, style = _MARKS[check.status]
        found = Text(check.found, style="dim" if check.status == "info" else "")
        if check.remedy:
            found.append(f"\n→ {check.remedy}", style=style)
        table.add_row(Text(mark, style=style), check.name, found)
    failed = sum(check.status == "fail" for check in checks)
    warned = sum(check.status == "warn" for check in checks)
    if failed:
        summary = Text(f"{failed} failed, {warned} to look at: jobs are not watched as they should")
        summary.stylize("bold red")
    elif warned:
        summary = Text(f"nothing failed, {warned} to look at", style="yellow")
    else:
        summary = Text("all is well", style="green")
    return Group(table, Text(), summary)
