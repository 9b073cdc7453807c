"""`failslow status --watch`: follows a run and shows it anew until the job ends or the user leaves.

In: where to find the run, what prints it. Out: a table that stays in place on a terminal, the
table or a JSON line at every change elsewhere. q, Ctrl-C and a reader that leaves end it quietly;
so does the job's end, which is said.
"""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, Protocol

from failslow.cli.output import emit_view, note, plain_console
from failslow.errors import FailslowError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from failslow.report.livejob import LiveJob, LiveState
    from failslow.runtime.runs import RunPlace

__all__ = ["ALL_STEPS_BYTES", "Seen", "Shows", "watch_run"]

ALL_STEPS_BYTES = 8 << 20
"""Steps further from a journal's end than this say nothing of now."""
_EAGER_S = 0.1
"""Until there is something to show it is looked for this often."""
_OVER_S = 1.0
"""A job that has ended for so long is over: in a journal another start of it may follow at once."""


class Seen(NamedTuple):
    """A job at one moment, and where it was found."""

    place: RunPlace
    job: LiveJob


class Shows(Protocol):
    """What the watch needs of a printer."""

    json: bool

    def view(self, seen: Seen, height: int | None = None) -> RenderableType: ...
    def print(self, seen: Seen, *, one_line: bool = False) -> bool: ...


_Draw = Callable[["Seen | None"], bool]
"""Shows it, or that there is nothing yet; False when nobody looks any more."""


def watch_run(
    find: Callable[[], RunPlace | None], printer: Shows, *, where: str, interval_s: float
) -> Seen | None:
    """Show the run, once there is one; returns what was shown last.

    Raises JournalError when its journal cannot be read.
    """
    follower: _Follower | None = None
    seen: Seen | None = None
    over_at: float | None = None
    try:
        with _keys() as quit_within, _screen(printer, where) as draw:
            while True:
                if follower is None and (place := find()) is not None:
                    follower = _Follower(place)
                seen = None if follower is None else follower.look()
                wait_s = interval_s if seen else _EAGER_S
                if seen is None or seen.job.phase != "ended":
                    over_at = None
                else:
                    over_at = over_at or time.monotonic() + _OVER_S
                    wait_s = min(wait_s, max(0.0, over_at - time.monotonic()))
                is_over = over_at is not None and time.monotonic() >= over_at
                if not draw(seen) or is_over or quit_within(wait_s):
                    break
        if is_over and not printer.json:
            note("the job has ended")
    except KeyboardInterrupt:
        pass  # the usual way to leave
    finally:
        if follower is not None:
            follower.close()
    return seen


class _Follower:
    """Reads a run's journal in a thread as it grows."""

    def __init__(self, place: RunPlace) -> None:
        from failslow.report.livejob import LiveState

        self._place = place
        self._state: LiveState = LiveState(place.name)
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._error: FailslowError | None = None
        self._thread = threading.Thread(target=self._follow, name="failslow-status", daemon=True)
        self._thread.start()

    def look(self) -> Seen | None:
        """The job now, None before its journal says anything; raises what reading failed with."""
        with self._lock:
            if self._error is not None:
                raise self._error
            job = self._state.look(time.time())
        return None if job.last_t is None else Seen(self._place, job)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _follow(self) -> None:
        from failslow.journal import read_journal

        try:
            for entry in read_journal(
                self._place.journal,
                follow=True,
                stop=self._stop,
                all_steps_bytes=ALL_STEPS_BYTES,
            ):
                with self._lock:
                    self._state.observe(entry)
                if self._stop.is_set():
                    break
        except FailslowError as error:
            self._error = error


@contextmanager
def _screen(printer: Shows, where: str) -> Iterator[_Draw]:
    from failslow.report.live import waiting_view

    if sys.stdout.isatty() and not printer.json:
        from rich.live import Live

        console = plain_console()
        with Live(console=console, auto_refresh=False) as live:

            def refresh(seen: Seen | None) -> bool:
                view = printer.view(seen, console.size.height) if seen else waiting_view(where)
                live.update(view, refresh=True)
                return True

            yield refresh
        return
    shown: list[object] = []

    def write(seen: Seen | None) -> bool:
        news = seen and (seen.job.last_t, seen.job.phase, seen.job.monitoring)
        if shown == [news]:
            return True
        shown[:] = [news]
        if seen is None:
            return printer.json or emit_view(waiting_view(where))
        return printer.print(seen, one_line=True)

    yield write


@contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Yields `quit_within(seconds)`: waits, and returns True at once when q is pressed."""
    descriptor = sys.stdin.fileno() if sys.stdin and sys.stdin.isatty() else -1
    # in the background the terminal's settings are not ours to change
    if descriptor < 0 or os.tcgetpgrp(descriptor) != os.getpgrp():
        yield threading.Event().wait
        return
    import termios
    import tty

    def quit_within(seconds: float) -> bool:
        ready, _, _ = select.select([descriptor], [], [], seconds)
        if not ready:
            return False
        keys = os.read(descriptor, 64)
        return not keys or b"q" in keys.lower()

    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield quit_within
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
