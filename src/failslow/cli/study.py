"""`failslow study`: many logs, or a store of probes, in; the table of a characterisation study out.

$ failslow study logs/ --json | jq '.hit, .jct_increase_pct.mean_hit'
4
11.8
"""

from __future__ import annotations

from collections.abc import Mapping
from glob import glob
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from failslow.cli import options
from failslow.cli.inputs import Request, analyze_paths
from failslow.cli.output import emit, emit_view, note
from failslow.cli.page import check_target, made_at, write_page

__all__ = ["EXAMPLES", "study"]

EXAMPLES = """\
[bold]Examples[/bold]

failslow study logs/

failslow study 'runs/*/train.log' --html study.html

failslow study logs/ --json | jq '.jct_increase_pct'

failslow study --simulate 1

failslow study probes/ --html study.html      a store of failslow probe campaign
"""


def study(
    paths: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PATH",
            help="Logs, folders of logs, globs, or - for stdin; or one store of probes.",
        ),
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

    Every log is one job; of a store of failslow probe campaign, every probe is one, and the nodes
    that recur are named. Exit code: 0 done, 1 a log or the store could not be read; parts of a
    store that are left out are warned of.
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
    if _store(paths):
        _refuse_for_store(
            {
                "--format": format,
                "--time-column": time_column,
                "--step-column": step_column,
                "--work-column": work_column,
                "--timestamp-column": timestamp_column,
                "--time-unit": time_unit,
                "--min-slowdown": min_slowdown,
                "--min-duration": min_duration,
                "--config": config,
            }
        )
        _probes(Path(paths[0]), json=json, html=html, quiet=quiet)
        return
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

    batch.errors = [(source, _or_store(source, message)) for source, message in batch.errors]
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


def _store(paths: list[str]) -> bool:
    """Whether a store of probes is asked for."""
    from failslow.probe.store import is_store

    stores = [path for path in paths if path != "-" and is_store(Path(path))]
    if stores and len(paths) > 1:
        raise typer.BadParameter(
            f"{stores[0]} is a store of probes: name it alone", param_hint="PATH"
        )
    return bool(stores)


def _or_store(source: str, message: str) -> str:
    """The message of what holds no log, with another remedy where a store may have been meant."""
    from failslow.probe.store import is_store

    path = Path(source)
    said = message.partition("; ")[0]
    if source == "-" or "\0" in source:
        return message
    try:
        for folder in path.absolute().parents:
            if is_store(folder):
                return f"{said}; {folder} is a store of probes: name that one alone"
        inside = path.iterdir() if path.is_dir() else map(Path, glob(source, recursive=True))
        stores = sorted(folder for folder in inside if is_store(folder))
    except OSError:
        return message
    if not stores:
        return message
    what = "a store of probes is" if len(stores) == 1 else f"{len(stores)} stores of probes are"
    return f"{said}; {what} among them: name one alone, as failslow study {quote(str(stores[0]))}"


def _refuse_for_store(given: Mapping[str, object]) -> None:
    """The probes of a store were read, and judged, when they ended."""
    for name, value in given.items():
        if value is not None:
            raise typer.BadParameter(
                "has no meaning for a store of probes, which is judged already; leave it out",
                param_hint=name,
            )


def _probes(store: Path, *, json: bool, html: Path | None, quiet: bool) -> None:
    from failslow.probe.store import read_store
    from failslow.probe.study import study_probes
    from failslow.report.probestudy import probe_study_document, probe_study_view

    reading = read_store(store)
    result = study_probes(reading.records, duration_s=float(reading.job.get("duration_s", 0.0)))
    if json:
        from failslow.report.json import dumps

        document = probe_study_document(result, source=str(store), warnings=reading.warnings)
        emit(dumps(document) + "\n")
    elif not quiet:
        emit_view(probe_study_view(result, source=str(store), warnings=reading.warnings))
    if html is not None:
        from failslow.report.probestudy_html import write_probe_study_html

        check_target(html)
        write_probe_study_html(
            html, result, title=str(store), warnings=reading.warnings, made_at=made_at()
        )
        if not quiet:
            note(f"wrote {html}")


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
