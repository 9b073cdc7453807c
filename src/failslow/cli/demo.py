"""`failslow demo`: real training here, real faults, and what failslow does about them.

$ failslow demo --json | jq '.events[] | "\\(.fault): \\(.level), \\(.removed_pct) % removed"'
"throttle: S2, 78.1 % removed"
"link: S3, 97.4 % removed"
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from failslow.cli import options
from failslow.cli.leaving import leaving_politely
from failslow.cli.output import emit, make_folder, note
from failslow.cli.page import check_target, made_at
from failslow.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from failslow.demo import Drill

__all__ = ["EXAMPLES", "demo", "shown"]

EXAMPLES = """\
[bold]Examples[/bold]

failslow demo

sudo failslow demo            with nodes of their own: a congested link too

failslow demo --json | jq '.events[].removed_pct'
"""
PAGE = "failslow-demo.html"
_LAYOUT = ("--dp", "4")
_MICROBATCHES, _WORK_MS = 28, 15.0
"""With one of four replicas twice as slow 8, 8, 4, 8 is the best split: 86 % of the slowdown."""


def demo(
    *,
    json: options.Json = False,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html",
            metavar="FILE",
            help=f"Where to write the report; {PAGE} in the working folder if left out.",
            show_default=False,
        ),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--dir", metavar="FOLDER", help="Keep the journal and the workers' output there."
        ),
    ] = None,
    no_losses: Annotated[
        bool,
        typer.Option("--no-losses", help="Do not train again without faults to compare losses."),
    ] = False,
) -> None:
    """Train a small GPT on four workers of this machine, hurt it, and watch failslow heal it.

    A worker gets half of its time; then, where root can make nodes of their own, a link of the
    gradients' ring becomes slow. About two minutes. Needs torch. Its compute is matrix products
    diluted with sleep, so that four workers fit on two cores.
    """
    _need_torch()
    page = html or Path(PAGE)
    check_target(page)
    if folder is not None:
        make_folder(folder, "--dir ")
        with leaving_politely():
            _run(folder.absolute(), json=json, page=page, no_losses=no_losses)
        return
    with (
        leaving_politely(),
        tempfile.TemporaryDirectory(prefix="failslow-demo-", ignore_cleanup_errors=True) as scratch,
    ):
        _run(Path(scratch), json=json, page=page, no_losses=no_losses)


def _run(folder: Path, *, json: bool, page: Path, no_losses: bool) -> None:
    from failslow.demo import SETTINGS, faults_here, losses_without, run_drill, steered_job
    from failslow.lab import TestBed

    why = TestBed.available()
    skipped = [] if why is None else [f"link: {why}"]
    drills: list[Drill] = []
    note("starting four workers")
    with steered_job(
        folder,
        layout=_LAYOUT,
        lab=why is None,
        egress_mbit=1000.0,
        work_ms=_WORK_MS,
        microbatches=_MICROBATCHES,
        settings=SETTINGS,
    ) as job:
        if not job.wait_for(lambda: len(job.losses()) > 20, limit_s=90.0):
            raise InputError("the training did not start within 90 s; is the machine very busy?")
        began_t = job.entries("step")[0].t if job.entries("step") else 0.0
        with shown(job.journal) as say:
            drills.extend(run_drill(job, fault, say=say) for fault in faults_here(job))
        false_alarms = _false_alarms(job, drills, began_t)
        losses = job.losses()
    equal = None
    if not no_losses:
        note(f"training {len(losses)} steps again, without faults, to compare losses")
        plain = losses_without(
            folder, layout=_LAYOUT, microbatches=_MICROBATCHES, steps=len(losses)
        )
        equal = _are_equal(losses, plain)
    _report(job.journal, page)
    document = {
        "schema": "failslow.demo/1",
        "events": [drill.document() for drill in drills],
        "false_alarms": false_alarms,
        "losses_equal": equal,
        "skipped": skipped,
        "report": str(page.absolute()),
    }
    if json:
        from failslow.report.json import dumps

        emit(dumps(document) + "\n")
    else:
        from failslow.cli.output import emit_view

        emit_view(_table(drills))
        for text in skipped:
            note(f"skipped {text}")
        note(f"losses {_compared(equal)}; false alarms: {false_alarms}; report: {page}")


@contextmanager
def shown(journal: Path, console: Console | None = None) -> Iterator[Callable[[str], None]]:
    """Tells what happens; on a terminal above a live table of the workers."""
    from rich.console import Console
    from rich.live import Live

    from failslow.journal import GrowingJournal
    from failslow.report.live import live_view
    from failslow.report.livejob import LiveState

    console = console or Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield note
        return
    growing, state = GrowingJournal(journal), LiveState("demo")

    def view() -> RenderableType:
        for entry in growing.refresh():
            state.observe(entry)
        return live_view(state.look(time.time()))

    with Live(get_renderable=view, console=console, refresh_per_second=2, transient=True):
        yield lambda text: console.print(text, markup=False)


def _false_alarms(job: Any, drills: Sequence[Drill], since_t: float) -> int:
    """Onsets no fault of ours was on for."""
    onsets = [e for e in job.entries("episode") if e.tags.get("event") == "onset" and e.t > since_t]
    return max(0, len(onsets) - sum(drill.onset_delay_s is not None for drill in drills))


def _are_equal(losses: Sequence[float], plain: Sequence[float]) -> bool:
    """To floating-point reassociation, which training amplifies slowly."""
    return len(plain) >= len(losses) > 0 and all(
        abs(a - b) <= 1e-5 * max(1.0, abs(b)) for a, b in zip(losses, plain, strict=False)
    )


def _compared(equal: bool | None) -> str:
    return {None: "not compared", True: "equal to those without faults", False: "DIFFER"}[equal]


def _report(journal: Path, page: Path) -> None:
    from failslow.report.story import read_story, write_story

    story = read_story(journal, name="demo", source="failslow demo")
    write_story(page, story, made_at=made_at())


def _table(drills: Sequence[Drill]) -> Table:
    from rich.table import Table

    table = Table(
        title="What failslow made of it", title_justify="left", box=None, pad_edge=False,
        padding=(0, 2, 0, 0), header_style="dim",
    )  # fmt: skip
    for name in ("fault", "noticed", "verdict", "named", "done", "iterations a second", "removed"):
        table.add_column(name, overflow="fold")
    for drill in drills:
        rates = [drill.healthy_s, drill.slow_s, drill.mitigated_s]
        shown = " → ".join("–" if s is None else f"{1.0 / s:.1f}" for s in rates)
        mark = "" if drill.culprit_correct else " [red](wrong)[/red]"
        removed = "–"
        if drill.removed_pct is not None:
            removed = f"{drill.removed_pct:.0f} %"
            if drill.optimum_pct is not None:
                removed += f" ({drill.optimum_pct:.0f} % foreseen at best)"
        table.add_row(
            f"{drill.fault} {', '.join(f'{k} {v}' for k, v in drill.target.items())}",
            _seconds(drill.onset_delay_s),
            _seconds(drill.verdict_delay_s),
            # a link's two nodes on a line each where there is little room
            (", ".join(drill.named).replace(">", "> ") or "nobody") + mark,
            f"{drill.level} {list(drill.plan)}" if drill.level else "nothing",
            shown,
            removed,
        )
    return table


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} s"


def _need_torch() -> None:
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise InputError("the demonstration trains with torch: pip install 'failslow[torch]'")
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        raise InputError("TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps failslow from loading; unset it")
