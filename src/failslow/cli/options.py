"""The options that `analyze` and `study` share, grouped as `--help` shows them.

In: nothing. Out: annotated types for typer.
"""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "Config",
    "Format",
    "Html",
    "Json",
    "MinDuration",
    "MinSlowdown",
    "Paths",
    "Quiet",
    "StepColumn",
    "TimeColumn",
    "TimeUnit",
    "TimestampColumn",
    "Unit",
    "WorkColumn",
]

_READING, _DETECTING, _OUTPUT = "Reading", "Detecting", "Output"

Paths = Annotated[
    list[str],
    typer.Argument(metavar="PATH", help="Logs, folders of logs, globs, or - for stdin."),
]
Format = Annotated[
    str | None,
    typer.Option(
        "--format",
        metavar="NAME",
        help="Log format (megatron, deepspeed, mllog, nanogpt, csv, ...); detected if left out.",
        rich_help_panel=_READING,
    ),
]
TimeColumn = Annotated[
    str | None,
    typer.Option(
        "--time-column",
        metavar="NAME",
        help="Of a CSV table (or --format jsonl): the column with the time of an iteration.",
        rich_help_panel=_READING,
    ),
]
StepColumn = Annotated[
    str | None,
    typer.Option(
        "--step-column",
        metavar="NAME",
        help="...the column with the step number.",
        rich_help_panel=_READING,
    ),
]
WorkColumn = Annotated[
    str | None,
    typer.Option(
        "--work-column",
        metavar="NAME",
        help="...the column with tokens or samples per iteration.",
        rich_help_panel=_READING,
    ),
]
TimestampColumn = Annotated[
    str | None,
    typer.Option(
        "--timestamp-column",
        metavar="NAME",
        help="...the column with the time of day.",
        rich_help_panel=_READING,
    ),
]


class Unit(str, Enum):
    """Units a time column can have."""

    S = "s"
    MS = "ms"
    US = "us"


TimeUnit = Annotated[
    Unit | None,
    typer.Option(
        "--time-unit",
        help="Unit of the time column; what its name says if left out, else s.",
        rich_help_panel=_READING,
    ),
]
MinSlowdown = Annotated[
    float | None,
    typer.Option(
        "--min-slowdown",
        metavar="RATIO",
        help="Slowdown over the healthy level that makes a fail-slow; 1.10 if left out.",
        rich_help_panel=_DETECTING,
    ),
]
MinDuration = Annotated[
    float | None,
    typer.Option(
        "--min-duration",
        metavar="SECONDS",
        help="How long it must last; 10 if left out.",
        rich_help_panel=_DETECTING,
    ),
]
Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="TOML file of settings; FAILSLOW_CONFIG if left out. Options outrank it.",
        rich_help_panel=_DETECTING,
    ),
]
Json = Annotated[
    bool,
    typer.Option("--json", help="Print JSON and nothing else.", rich_help_panel=_OUTPUT),
]
Html = Annotated[
    Path | None,
    typer.Option(
        "--html",
        metavar="FILE",
        help="Also write one self-contained HTML page with the pictures.",
        rich_help_panel=_OUTPUT,
    ),
]
Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet", "-q", help="No tables, notes or progress; errors stay.", rich_help_panel=_OUTPUT
    ),
]
