"""The progress bar of a campaign, on a terminal's stderr.

In: what the runner tells its audience. Out: one line that moves, and one for each probe that ended:

    4n-0007.1: ×1.62, network congestion: link gpu-12>gpu-17
    ━━━━━━━━━━━━━━━━━━━━╸━━━ 41/130 2:14:07 3 hit · 4n-0008.1 · next in 48 s
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from failslow.cli.output import stderr_console
from failslow.probe.campaign import Campaign, Start, Step, Tally, Wait
from failslow.probe.runner import Audience
from failslow.probe.store_parts import ProbeRecord

__all__ = ["campaign_bar"]


class _Bar(Audience):
    def __init__(self, bar: Progress, what: Campaign, text: Callable[[ProbeRecord], str]) -> None:
        self._bar, self._text = bar, text
        tally = what.tally()
        self._task = bar.add_task("", total=tally.total, completed=tally.total - tally.left)
        self._running: list[str] = []
        self._hit = 0

    def started(self, start: Start, tally: Tally) -> None:
        self._running.append(f"{start.probe}.{start.attempt}")
        self._draw(tally)

    def ended(self, record: ProbeRecord, tally: Tally) -> None:
        name = f"{record.probe}.{record.attempt}"
        if name in self._running:
            self._running.remove(name)
        self._hit += record.result is not None and record.result.is_slow
        self._bar.console.print(Text(_harmless(self._text(record))), soft_wrap=True)
        self._draw(tally)

    def looked(self, tally: Tally, *, queued: int, step: Step) -> None:
        more = [f"{queued} queued"] if queued else []
        if isinstance(step, Wait) and step.until_t is not None:
            more.append(f"next in {max(0.0, step.until_t - time.time()):.0f} s")
        self._draw(tally, *more)

    def _draw(self, tally: Tally, *more: str) -> None:
        running = self._running[:3]
        if len(self._running) > len(running):
            running.append(f"{len(self._running) - len(running)} more")
        parts = [f"{self._hit} hit", ", ".join(running), *more]
        description = " · ".join(part for part in parts if part)
        self._bar.update(self._task, completed=tally.total - tally.left, description=description)


def _harmless(text: str) -> str:
    """Names and last words come from other machines: none of them moves the cursor."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


@contextmanager
def campaign_bar(what: Campaign, text: Callable[[ProbeRecord], str]) -> Iterator[Audience]:
    """Shows the campaign until the block is left. text: of the line of one that ended."""
    with Progress(
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
        console=stderr_console(),
        transient=True,
    ) as bar:
        yield _Bar(bar, what, text)
