"""`failslow analyze`: logs in, fail-slows out, as a table, JSON or a page.

$ failslow analyze train.log --json | jq '.jobs[0].episodes[0].slowdown'
1.39
"""

from __future__ import annotations

from typing import Annotated

import typer

from failslow.cli import options
from failslow.cli.inputs import Request, analyze_paths
from failslow.cli.output import emit, emit_view
from failslow.cli.page import write_page

__all__ = ["EXAMPLES", "analyze"]

EXAMPLES = """\
[bold]Examples[/bold]

failslow analyze train.log

failslow analyze logs/ --html report.html

zcat train.log.gz | failslow analyze - --json

failslow analyze times.csv --time-column seconds --step-column step

failslow analyze train.log --fail-on-slow --quiet || echo slow
"""


def analyze(
    paths: options.Paths,
    *,
    format: options.Format = None,
    time_column: options.TimeColumn = None,
    step_column: options.StepColumn = None,
    work_column: options.WorkColumn = None,
    timestamp_column: options.TimestampColumn = None,
    time_unit: options.TimeUnit = None,
    min_slowdown: options.MinSlowdown = None,
    min_duration: options.MinDuration = None,
    config: options.Config = None,
    json: options.Json = False,
    html: options.Html = None,
    fail_on_slow: Annotated[
        bool,
        typer.Option(
            "--fail-on-slow",
            help="Exit with 3 when a fail-slow is found.",
            rich_help_panel="Output",
        ),
    ] = False,
    quiet: options.Quiet = False,
) -> None:
    """Find the fail-slows in training logs: when, how long, how slow, and what they cost.

    The format is detected from the content. Exit code: 0 done, 1 something could not be read,
    3 a fail-slow found (with --fail-on-slow).
    """
    batch = analyze_paths(
        Request(
            paths=paths,
            format=format,
            time_column=time_column,
            step_column=step_column,
            work_column=work_column,
            timestamp_column=timestamp_column,
            time_unit=time_unit.value if time_unit else None,
            min_slowdown=min_slowdown,
            min_duration_s=min_duration,
            config=config,
            pictures=html is not None,
            quiet=quiet,
        )
    )
    if json:
        from failslow.report.json import analysis_document, dumps

        emit(dumps(analysis_document(batch.analyses)) + "\n")
    elif batch.analyses and not quiet:
        from failslow.report.terminal import analysis_view

        emit_view(analysis_view(batch.analyses))
    if html is not None:
        write_page(batch, html, quiet=quiet)
    batch.report_errors()
    raise typer.Exit(batch.exit_code(fail_on_slow=fail_on_slow))
