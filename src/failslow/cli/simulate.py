"""`failslow simulate`: a scenario in; its analysis, as of any log, and the truth beside it, out.

$ failslow simulate examples/scenarios/slow_gpu.yaml --json | jq '.simulation.missed'
0
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from failslow.cli import options
from failslow.cli.output import emit, emit_view, progress

if TYPE_CHECKING:
    from failslow.report.simulation import Truth
    from failslow.simulate.score import Score

__all__ = ["EXAMPLES", "simulate"]

EXAMPLES = """\
[bold]Examples[/bold]

failslow simulate examples/scenarios/slow_gpu.yaml

failslow simulate examples/scenarios/compound_1024.yaml --html compound.html

failslow simulate scenario.toml --seed 7 --json | jq '.simulation.truth'
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
