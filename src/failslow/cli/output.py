"""What the commands write: results on stdout, errors and progress on stderr.

In: text or rich renderables. Out: bytes on the streams; a reader that goes away (`| head`) is
no error. No name or note from a log can move the cursor: control characters become marks.

    failslow: notes.txt: no known training log in it; known formats: megatron, ...
"""

from __future__ import annotations

import io
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TextIO

from failslow.errors import OutputError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

__all__ = [
    "emit",
    "emit_view",
    "lenient_streams",
    "make_folder",
    "note",
    "plain_console",
    "progress",
    "report_error",
    "stderr_console",
]

_PIPE_WIDTH = 100
"""Columns where no terminal says how wide it is."""
_LEAST_WIDTH = 60
"""Narrower terminals wrap lines: a table squeezed into less would lose its words."""
_CONTROL = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160)), "\ufffd")
_PATIENCE_S = 1.0
"""Work shorter than this shows no progress bar."""


def lenient_streams() -> None:
    """A terminal that knows no "×" gets a "?" instead of an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def emit(text: str) -> bool:
    """Write to stdout; quietly stop, and return False, when its reader has gone.

    Raises OutputError when stdout cannot be written.
    """
    stdout = _stdout()
    try:
        stdout.write(text)
        stdout.flush()
        return True
    except OSError as error:
        # the interpreter flushes once more at exit, which must not fail
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return False
        raise OutputError(
            f"standard output cannot be written: {error.strerror or error}; send it elsewhere"
        ) from None


def _stdout() -> TextIO:
    stdout: TextIO | None = sys.stdout  # None: the process was started with it closed
    if stdout is None:
        raise OutputError("standard output is closed; send it to a file, or use --quiet")
    return stdout


def plain_console(**more: Any) -> Console:
    """Shows names as they are: in "[gpu]/7" nothing is a style, nor an emoji in "rack:eight:"."""
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False, **more)


def emit_view(view: RenderableType) -> bool:
    """Render for the terminal, or plainly for a pipe, without trailing blanks."""
    from rich.segment import Segment, Segments

    wide = _stdout().isatty() or "COLUMNS" in os.environ
    console = plain_console(width=None if wide else _PIPE_WIDTH)
    console.width = max(console.width, _LEAST_WIDTH)
    harmless = (
        Segment(part.text.translate(_CONTROL), part.style, part.control)
        for part in console.render(view)
    )
    with console.capture() as captured:
        console.print(Segments(harmless), crop=False)
    return emit("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


def report_error(message: str) -> None:
    """One line on stderr, whatever the message holds."""
    _to_stderr(f"failslow: {' '.join(message.split())}")


def note(message: str) -> None:
    """Something worth knowing that is no result, on stderr."""
    _to_stderr(message)


def _to_stderr(line: str) -> None:
    if sys.stderr is not None:  # closed: print would take stdout instead
        with suppress(OSError):
            print(line.translate(_CONTROL), file=sys.stderr, flush=True)


def make_folder(folder: Path, source: str) -> None:
    """The folder somebody named by `source`; to be had before the work begins.

    Raises OutputError where it cannot be.
    """
    why = "is no folder that this user can write to"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        why = "is a file"
    except OSError as error:
        why = f"cannot be made: {error.strerror or error}"
    else:
        if os.access(folder, os.W_OK | os.X_OK):
            return
    raise OutputError(f"{source}{folder}: {why}; name a folder that can be written")


class _Unheard:
    """stderr, to which nobody need listen: a terminal may be closed while work goes on."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


def stderr_console() -> Console:
    """For bars; one that cannot be drawn any more costs the work nothing."""
    # a str is all that is asked of it
    return plain_console(file=_Unheard(sys.stderr))


def _silent(_: str) -> None:
    pass


@contextmanager
def progress(total: int, *, enabled: bool) -> Iterator[Callable[[str], None]]:
    """Yields `begin(name)`, to be called as each of `total` items begins.

    A bar appears on stderr only if that is a terminal and the work takes over a second.
    """
    if not enabled or sys.stderr is None or not sys.stderr.isatty():
        yield _silent
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    bar = Progress(
        SpinnerColumn(),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
        console=stderr_console(),
        transient=True,
    )
    task = bar.add_task("", total=total)
    begun = 0

    def begin(name: str) -> None:
        nonlocal begun
        bar.update(task, description=name, completed=begun)
        begun += 1

    timer = threading.Timer(_PATIENCE_S, bar.start)
    timer.daemon = True
    timer.start()
    try:
        yield begin
    finally:
        timer.cancel()
        timer.join()
        bar.stop()
