"""`failslow simulate`: a scenario in; its analysis, as of any log, and the truth beside it, out.

$ failslow simulate examples/scenarios/slow_gpu.yaml --json | jq '.simulation.missed'
0
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from failslow.cli import options
from failslow.cli.output import emit, emit_view, note, progress

if TYPE_CHECKING:
    from failslow.config import DetectConfig
    from failslow.report.simulation import Truth
    from failslow.simulate.scenario import Scenario
    from failslow.simulate.score import Score

__all__ = ["EXAMPLES", "simulate"]

EXAMPLES = """\
[bold]Examples[/bold]

failslow simulate examples/scenarios/slow_gpu.yaml

failslow simulate examples/scenarios/compound_1024.yaml --html compound.html

failslow simulate scenario.toml --seed 7 --json | jq '.simulation.truth'

failslow simulate examples/scenarios/slow_gpu.yaml --watch run && failslow report run
"""


def simulate(
    scenario: Annotated[
        Path, typer.Argument(metavar="SCENARIO", help="Scenario file, .yaml or .toml.")
    ],
    *,
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed",
            metavar="N",
            min=0,
            help="Of the noise; the scenario's if left out.",
            rich_help_panel="Simulating",
        ),
    ] = None,
    iterations: Annotated[
        int | None,
        typer.Option(
            "--iterations",
            metavar="N",
            min=1,
            help="How many; the scenario's if left out.",
            rich_help_panel="Simulating",
        ),
    ] = None,
    min_slowdown: options.MinSlowdown = None,
    min_duration: options.MinDuration = None,
    watch: Annotated[
        Path | None,
        typer.Option(
            "--watch",
            metavar="FOLDER",
            help="Also run it watched and steered, as a live job; its journal goes there.",
            show_default=False,
            rich_help_panel="Output",
        ),
    ] = None,
    config: options.Config = None,
    json: options.Json = False,
    html: options.Html = None,
    quiet: options.Quiet = False,
) -> None:
    """Simulate a training job of any size with its faults, and analyse it as any other.

    The scenario says the machines, the model and its layout, the noise and what goes wrong when;
    examples are in examples/scenarios.
    """
    from failslow.config import DetectConfig, load_config
    from failslow.detect import analyze
    from failslow.simulate import load_scenario, simulate
    from failslow.simulate.score import score

    settings = load_config(
        "detect",
        DetectConfig,
        arguments={"min_slowdown": min_slowdown, "min_duration_s": min_duration},
        file=config,
    )
    told = load_scenario(scenario)
    changes = {"seed": seed, "iterations": iterations}
    told = told.but(**{name: value for name, value in changes.items() if value is not None})
    with progress(1, enabled=not (quiet or json)) as begin:
        begin(f"{told.workload.ranks:,} devices, {told.iterations:,} iterations")
        job = simulate(told)
    analysis = analyze(job.series, settings)
    truth = _truth(score(job, analysis), told.workload.ranks, told.seed)
    if watch is not None:
        _watch(told, watch, settings, config, quiet=quiet or json)
    if json:
        from failslow.report.json import analysis_document, dumps
        from failslow.report.simulation import truth_document

        document = {**analysis_document([analysis]), "simulation": truth_document(truth)}
        emit(dumps(document) + "\n")
    elif not quiet:
        from rich.console import Group
        from rich.text import Text

        from failslow.report.simulation import truth_view
        from failslow.report.terminal import analysis_view

        emit_view(Group(analysis_view([analysis]), Text(), truth_view(truth)))
    if html is not None:
        from failslow.cli.inputs import Batch
        from failslow.cli.page import write_page
        from failslow.report.picture import job_picture
        from failslow.report.simulation import truth_card

        batch = Batch(analyses=[analysis], pictures=[job_picture(job.series, analysis)])
        write_page(batch, html, after_summary=truth_card(truth), quiet=quiet)
        batch.report_errors()
        raise typer.Exit(batch.exit_code())


def _watch(
    told: Scenario, folder: Path, detect: DetectConfig, config: Path | None, *, quiet: bool
) -> None:
    """By the controller's own code, with a journal as of any watched job."""
    from failslow.config import DecideConfig, LocalizeConfig, RuntimeConfig, load_config
    from failslow.errors import InputError
    from failslow.simulate.watched import Settings, watch_job

    journal = folder / "journal.jsonl"
    if journal.exists():
        raise InputError(f"{journal}: there is a journal already; name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    decide = load_config("decide", DecideConfig, file=config)
    if "mode" not in decide.model_fields_set:
        decide = decide.model_copy(update={"mode": "auto"})
    settings = Settings(
        detect=detect,
        runtime=load_config("runtime", RuntimeConfig, file=config),
        decide=decide,
        localize=load_config("localize", LocalizeConfig, file=config),
    )
    with progress(1, enabled=not quiet) as begin:
        begin(f"watching {told.iterations:,} iterations")
        watched = watch_job(told, journal, settings=settings)
    if not quiet:
        note(
            f"watched: {watched.lost_s:,.0f} s lost, {watched.idle_s:,.0f} s of them in pauses and "
            f"actions; failslow report {folder}"
        )


def _truth(result: Score, ranks: int, seed: int) -> Truth:
    from failslow.report.simulation import Truth, TruthRow

    return Truth(
        ranks=ranks,
        seed=seed,
        healthy_iteration_s=result.healthy_iteration_s,
        lost_s=result.true_lost_s,
        false_alarms=result.false_alarms,
        missed=result.missed,
        faults=[
            TruthRow(
                fault=fault.truth.fault,
                cause=fault.truth.cause,
                what=fault.truth.what,
                where=fault.truth.where,
                start_step=fault.truth.start_step,
                end_step=fault.truth.end_step,
                slowdown=fault.truth.slowdown,
                counts=fault.truth.counts,
                episodes=fault.episodes,
                onset_error=fault.onset_error,
            )
            for fault in result.faults
        ],
    )
