"""`--html FILE`: the page of a batch.

In: a `Batch` with pictures. Out: the file; that it cannot be written is one more error of it.
"""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from failslow.cli.output import note
from failslow.errors import OutputError

if TYPE_CHECKING:
    from failslow.cli.inputs import Batch
    from failslow.report import Study

__all__ = ["check_target", "made_at", "write_page"]


def write_page(
    batch: Batch, file: Path, *, study: Study | None = None, after_summary: str = "", quiet: bool
) -> None:
    """Write the page and say where; without a single job there is nothing to write.

    after_summary: HTML of our own that stands between the summary and the jobs.
    """
    if not batch.pictures:
        return
    from failslow.report.html import write_html

    one = len(batch.pictures) == 1
    title = batch.analyses[0].source if one else "failslow study" if study else "failslow report"
    try:
        check_target(file)
        write_html(
            file,
            batch.pictures,
            title=title,
            study=study,
            errors=batch.errors,
            after_summary=after_summary,
            made_at=made_at(),
        )
    except OutputError as error:
        batch.errors.append((str(file), str(error)))
        return
    if not quiet:
        note(f"wrote {file}")


def made_at() -> str:
    """Now, for the footer of a page."""
    return f"{datetime.now(tz=timezone.utc):%Y-%m-%d %H:%M} UTC"


def check_target(file: Path) -> None:
    """Raises OutputError where the page would replace something else (`--html *.log`), or there is
    no folder for it; asked before the work begins."""
    if not file.parent.is_dir():
        raise OutputError(f"{file}: cannot be written: there is no such folder; make it first")
    try:
        with file.open("rb") as old:
            begin = old.read(64).lstrip().lower() if file.is_file() else b""
    except OSError:  # not there yet, or write_html says what is wrong
        return
    if begin and not begin.startswith((b"<!doctype html", b"<html")):
        raise OutputError(f"{file}: is there and is no HTML page: left as it is; name another file")
