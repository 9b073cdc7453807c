"""`failslow study`: many logs in, the table of a characterisation study out.

$ failslow study logs/ --json | jq '.hit, .jct_increase_pct.mean_hit'
4
11.8
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

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

failslow study --simulate 1
"""


def study(
    paths: Annotated[
        list[str] | None,
        typer.Argument(metavar="PATH", help="Logs, folders of logs, globs, or - for stdin."),
    ] = None,
    *,
    simulate: Annotated[
        int | None,
        typer.Option(
            "--simulate",
            metavar="SEED",
            min=0,
            help="Instead of logs: the jobs of a published field study, simulated.",
            rich_help_panel="Reading",
        ),
    ] = None,
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
    if simulate is not None:
        _simulated(
            simulate,
            paths,
            min_slowdown=min_slowdown,
            min_duration_s=min_duration,
            config=config,
            json=json,
            html=html,
            quiet=quiet,
        )
        return
    if not paths:
        raise typer.BadParameter("name logs, or --simulate SEED", param_hint="PATH")
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


def _simulated(
    seed: int,
    paths: list[str] | None,
    *,
    min_slowdown: float | None,
    min_duration_s: float | None,
    config: Path | None,
    json: bool,
    html: Path | None,
    quiet: bool,
) -> None:
    if paths:
        raise typer.BadParameter("takes no logs", param_hint="--simulate")
    from failslow.cli.fieldstudy import simulate_study
    from failslow.report import fieldstudy
    from failslow.report.study import summarize

    batch, found = simulate_study(
        seed,
        min_slowdown=min_slowdown,
        min_duration_s=min_duration_s,
        config=config,
        pictures=html is not None,
        quiet=quiet or json,
    )
    result = summarize(batch.analyses)
    if json:
        from failslow.report.json import dumps, study_document

        document = study_document(result)
        document["simulation"] = fieldstudy.field_study_document(found)
        emit(dumps(document) + "\n")
    elif not quiet:
        emit_view(fieldstudy.field_study_view(found))
    if html is not None:
        card = fieldstudy.field_study_card(found)
        write_page(batch, html, study=result, after_summary=card, quiet=quiet)
    batch.report_errors()
    raise typer.Exit(batch.exit_code())
