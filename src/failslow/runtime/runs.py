"""Where the runs of watched jobs lie.

In: what a user named, or nothing. Out: a `RunPlace`:

    find_run(None, {})          # the newest under failslow-runs/
    find_run("pretrain7", {})   # failslow-runs/pretrain7
    find_run("/data/run", {})   # that folder
    find_run("s/probes/4n-0007.1", {})   # a probe's folder: the run/ inside it
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["JOURNAL", "RUNS", "RunPlace", "find_run"]

RUNS = "failslow-runs"
"""The folder in a job's working folder with one folder a job."""
_INSIDE = "run"
"""Where the folder of a probe, or of a demonstration, has the run of its job."""
JOURNAL = "journal.jsonl"


@dataclass(frozen=True, slots=True)
class RunPlace:
    """The folder of one job's run."""

    folder: Path
    named: Path | None = None
    """The folder it was found by, if that is another one."""

    @property
    def name(self) -> str:
        """The job's, unless FAILSLOW_DIR gave the folder another one."""
        return (self.named or self.folder).absolute().name

    @property
    def journal(self) -> Path:
        """Its journal, whether it is there yet or not."""
        return self.folder / JOURNAL

    @property
    def has_journal(self) -> bool:
        """Anything was written; for a moment in its rotation only the older file is there."""
        return self.journal.exists() or self.folder.joinpath(f"{JOURNAL}.1").exists()


def find_run(
    named: str | None, environ: Mapping[str, str], *, inside: Path = Path()
) -> RunPlace | None:
    """The run `named` as a folder, a journal or a job; else FAILSLOW_DIR's; else the newest.

    inside: the working folder. None when there is none (yet).
    """
    if named is None:
        if environ.get("FAILSLOW_DIR"):
            return _place(inside / environ["FAILSLOW_DIR"])
        known = list(_runs(inside / RUNS))
        return RunPlace(max(known)[1]) if known else None
    path = inside / named
    if path.name == JOURNAL:
        return _place(path.parent)
    return _place(path) or _place(inside / RUNS / named)


def _place(folder: Path) -> RunPlace | None:
    inner = RunPlace(folder / _INSIDE, named=folder)
    with suppress(OSError):  # whoever reads the journal tells what the disk refuses
        if not RunPlace(folder).has_journal and inner.has_journal:
            return inner
    return RunPlace(folder) if folder.is_dir() else None


def _runs(folder: Path) -> Iterator[tuple[float, Path]]:
    """(when its journal last grew, folder) of each run."""
    for journal in folder.glob(f"*/{JOURNAL}"):
        with suppress(FileNotFoundError):  # removed meanwhile
            yield journal.stat().st_mtime, journal.parent
