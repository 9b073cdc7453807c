"""`failslow study`: many logs in, the table of a characterisation study out.

$ failslow study logs/ --json | jq '.hit, .jct_increase_pct.mean_hit'
4
11.8
"""

from __future__ import annotations

import typer

from failslow.cli import options
from failslow.cli.inputs import Request, analyze_paths
from failslow.cli.output import emit, emit_view
from failslow.cli.page import write_page

__all__ = ["EXAMPLES", "study"]

EXAMPLES = """\
[bold]Examples[/bold]

failslow study logs/

failslow study 'runs/*/train.log' --html study.html

failslow study logs/ --json | jq '.jct_increase_pct'
"""


def study(
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
    quiet: options.Quiet = False,
) -> None:
    """Characterise many jobs: how many were hit, for how long, at what cost.

    Every log is one job. Exit code: 0 done, 1 something could not be read.
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
    from failslow.report.study import summarize

    result = summarize(batch.analyses, unreadable=batch.errors)
    if json:
        from failslow.report.json import dumps, study_document

        emit(dumps(study_document(result)) + "\n")
    elif batch.analyses and not quiet:
        from failslow.report.terminal import study_view

        emit_view(study_view(result))
    if html is not None:
        write_page(batch, html, study=result, quiet=quiet)
    batch.report_errors()
    raise typer.Exit(batch.exit_code())
