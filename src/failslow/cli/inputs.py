"""Paths and options -> analysed jobs; one bad file never loses the others.

In: what the user named. Out: a `Batch`: analyses in the order found, pictures when a page is
wanted, and (source, message) of what could not be read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from failslow.cli.output import note, progress, report_error
from failslow.errors import ConfigError, FailslowError

if TYPE_CHECKING:
    from failslow.ingest import Reader
    from failslow.ingest.formats.table import TimeUnit
    from failslow.records import JobAnalysis
    from failslow.report import JobPicture

__all__ = ["Batch", "Request", "analyze_paths"]

_PICTURE_BUDGET = 45_000
"""Buckets shared by all jobs of a page: a page of a thousand jobs still opens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the user asked to read, and how."""

    paths: Sequence[str]
    format: str | None = None
    time_column: str | None = None
    step_column: str | None = None
    work_column: str | None = None
    timestamp_column: str | None = None
    time_unit: TimeUnit | None = None
    min_slowdown: float | None = None
    min_duration_s: float | None = None
    config: Path | None = None
    pictures: bool = False
    quiet: bool = False


@dataclass(slots=True)
class Batch:
    """Everything read and analysed."""

    analyses: list[JobAnalysis] = field(default_factory=list)
    pictures: list[JobPicture] = field(default_factory=list)
    errors: list[tuple[str, str]] = field(default_factory=list)

    @contextmanager
    def collecting(self, source: str) -> Iterator[None]:
        """An error inside becomes one of the batch; the other jobs go on."""
        try:
            yield
        except FailslowError as error:
            self.errors.append((source, str(error)))
        except Exception as error:  # a bug met in one log must not cost the others
            if os.environ.get("FAILSLOW_DEBUG"):
                raise
            what = f"internal error: {type(error).__name__}: {error}"
            self.errors.append((source, f"{source}: {what}; FAILSLOW_DEBUG=1 shows where"))

    def report_errors(self) -> None:
        """One line each, after the results."""
        for _, message in self.errors:
            report_error(message)

    def exit_code(self, *, fail_on_slow: bool = False) -> int:
        """1 when anything could not be read, else 3 when asked for and a fail-slow was found."""
        if self.errors:
            return 1
        return 3 if fail_on_slow and any(a.fail_slows for a in self.analyses) else 0


def analyze_paths(request: Request) -> Batch:
    """Read and analyse every log of the request. Raises ConfigError on a bad setting."""
    from failslow.config import DetectConfig, load_config

    config = load_config(
        "detect",
        DetectConfig,
        arguments={
            "min_slowdown": request.min_slowdown,
            "min_duration_s": request.min_duration_s,
        },
        file=request.config,
    )
    # imported after the settings are known to be good: numpy takes its time
    from failslow.detect import analyze
    from failslow.ingest import read_log
    from failslow.report.picture import job_picture

    batch = Batch()
    reader = _reader(request)
    files = _files(request, reader, batch)
    buckets = max(150, min(1500, _PICTURE_BUDGET // max(len(files), 1)))
    with progress(len(files), enabled=not request.quiet) as begin:
        for file in files:
            begin(str(file))
            with batch.collecting(str(file)):
                series = read_log(file, format=reader)
                analysis = analyze(series, config)
                if request.pictures:
                    batch.pictures.append(job_picture(series, analysis, buckets=buckets))
                batch.analyses.append(analysis)
    return batch


def _reader(request: Request) -> str | Reader | None:
    """The `format` of `read_log`: a table reader when columns are named."""
    named = (request.time_column, request.step_column, request.work_column)
    if not any((*named, request.timestamp_column, request.time_unit)):
        return request.format
    if request.format not in (None, "csv", "jsonl"):
        raise ConfigError(
            f"--format {request.format} has columns of its own; leave out --time-column, "
            "--step-column, --work-column, --timestamp-column and --time-unit, or use "
            "--format csv or jsonl"
        )
    from failslow.ingest.formats.table import CsvReader, JsonLinesReader, TableColumns

    columns = TableColumns(
        time=request.time_column,
        step=request.step_column,
        work=request.work_column,
        timestamp=request.timestamp_column,
        time_unit=request.time_unit,
    )
    is_json = all(Path(path).suffix in (".jsonl", ".ndjson", ".json") for path in request.paths)
    if request.format == "jsonl" or (request.format is None and is_json):
        return JsonLinesReader(columns)
    return CsvReader(columns)


def _files(request: Request, reader: str | Reader | None, batch: Batch) -> list[Path]:
    """The logs behind the paths, each once; a path that leads nowhere becomes an error."""
    from failslow.ingest import expand_paths
    from failslow.ingest.registry import distinct

    files: list[Path] = []
    skipped: list[str] = []
    for path in request.paths:
        with batch.collecting(path):
            files += expand_paths([path], format=reader, on_skip=skipped.append)
    if skipped and files and not request.quiet:
        more = "" if len(skipped) == 1 else f" (and {len(skipped) - 1:,} more)"
        note(f"{skipped[0]}{more}")
    return distinct(files)
