"""`failslow replay`: the faults of a journal under other policies, costs and histories.

$ failslow replay failslow-runs/pretrain7 --cost S3=40 --json | jq '.totals.ladder.of_best'
1.16
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, cast

import typer

from failslow.cli import options
from failslow.cli.output import emit, emit_view, note, progress

if TYPE_CHECKING:
    from failslow.config import DecideConfig
    from failslow.decide import Incident, LayoutPlanner, PolicyName
    from failslow.records import Rung

__all__ = ["EXAMPLES", "replay"]

EXAMPLES = """\
[bold]Examples[/bold]

failslow replay pretrain7

failslow replay journal.jsonl --policy ladder --policy clairvoyant --cost S3=40 --decisions

failslow replay new/journal.jsonl --history old/journal.jsonl --trust 0.5 --json
"""

_TRUST = 0.5
_POLICIES, _JOB = "Policies", "Job, where the journal does not tell"


def replay(
    journals: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN", help="Folder of a watched job's run, its journal, or the job's name."
        ),
    ],
    *,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            metavar="NAME",
            help="recorded, wait, redistribute, restart, ladder, learned or clairvoyant (the best "
            "single level, from the onset on); may be repeated; all if left out.",
            rich_help_panel=_POLICIES,
        ),
    ] = None,
    cost: Annotated[
        list[str] | None,
        typer.Option(
            "--cost",
            metavar="LEVEL=SECONDS",
            help="What going to S2, S3 or S4 costs; as measured, else as estimated, if left out.",
            rich_help_panel=_POLICIES,
        ),
    ] = None,
    history: Annotated[
        list[str] | None,
        typer.Option(
            "--history",
            metavar="RUN",
            help="Runs to learn durations from; if left out, from the other faults given.",
            rich_help_panel=_POLICIES,
        ),
    ] = None,
    trust: Annotated[
        float | None,
        typer.Option(
            "--trust",
            metavar="SHARE",
            help="How far the policy learned believes its durations: 1 not at all, near 0 wholly; "
            f"{_TRUST} if neither this nor the settings say.",
            rich_help_panel=_POLICIES,
        ),
    ] = None,
    allow_restart: Annotated[
        bool,
        typer.Option(
            "--allow-restart",
            help="The ladder and the clairvoyant may go to S4.",
            rich_help_panel=_POLICIES,
        ),
    ] = False,
    dp: Annotated[
        int | None,
        typer.Option("--dp", min=1, help="Data-parallel replicas.", rich_help_panel=_JOB),
    ] = None,
    pp: Annotated[
        int, typer.Option("--pp", min=1, help="Pipeline stages.", rich_help_panel=_JOB)
    ] = 1,
    tp: Annotated[
        int, typer.Option("--tp", min=1, help="Tensor-parallel shards.", rich_help_panel=_JOB)
    ] = 1,
    microbatches: Annotated[
        int | None,
        typer.Option(
            "--microbatches",
            min=1,
            help="Micro-batches of an iteration, all replicas together; 8 each if left out.",
            rich_help_panel=_JOB,
        ),
    ] = None,
    config: options.Config = None,
    decisions: Annotated[
        bool,
        typer.Option(
            "--decisions",
            help="Also tell what each policy did about each fault.",
            rich_help_panel="Output",
        ),
    ] = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Decide recorded faults again: what each policy would have lost and spent.

    A level is worth what it was measured to be, else what was planned for it. Exit code: 0 done,
    1 no such journal or a bad setting.
    """
    from failslow.config import DecideConfig, load_config

    settings = load_config(
        "decide",
        DecideConfig,
        arguments={"trust": trust, "allow_restart": allow_restart or None},
        file=config,
    )
    if "trust" not in settings.model_fields_set:
        settings = settings.model_copy(update={"trust": _TRUST})
    names, costs_s = _policies(policy), _costs(cost)
    from failslow.decide import compare, learn_history
    from failslow.report.replay import ReplayedJob, replay_document, replay_view

    learned = None
    if history:
        learned = learn_history([fault for path in history for fault in _faults(path)])
    given = None if dp is None else _given_layout(pp, dp, tp, microbatches, settings)
    jobs = []
    with progress(len(journals), enabled=not (quiet or json)) as begin:
        for path in journals:
            begin(path)
            incidents = _faults(path)
            results = compare(
                incidents,
                names,
                config=settings,
                costs_s=costs_s,
                history=learned,
                planner=_layout(path, settings) or given,
            )
            by_name = {str(name): found for name, found in results.items()}
            jobs.append(ReplayedJob(source=path, incidents=tuple(incidents), results=by_name))
    if json:
        from failslow.report.json import dumps

        told = {"costs_s": costs_s, "trust": settings.trust, "restart": settings.allow_restart}
        emit(dumps(replay_document(jobs, told)) + "\n")
    elif not quiet:
        emit_view(replay_view(jobs, decisions=decisions))
        if any(not incident.kinds for job in jobs for incident in job.incidents):
            note("faults without a culprit can only be waited out")
        blind = sum(i.kinds != () and not i.paced for job in jobs for i in job.incidents)
        if blind:
            note(
                f"{blind} of the faults have no own times of their culprits (culpritpace) on "
                "record: when the even split comes back cannot be reproduced for them"
            )


def _faults(run: str) -> list[Incident]:
    """Raises InputError or JournalError where there is no journal, or nothing in it."""
    from failslow.cli.report import find_journal
    from failslow.decide import read_incidents
    from failslow.journal import read_journal

    path, _, source = find_journal(run)
    journal = read_journal(path)
    journal.check(source)
    return read_incidents(journal)


def _layout(run: str, settings: DecideConfig) -> LayoutPlanner | None:
    from failslow.cli.report import find_journal
    from failslow.decide import LayoutPlanner, read_facts
    from failslow.journal import read_journal

    facts = read_facts(read_journal(find_journal(run)[0]))
    return None if facts is None else LayoutPlanner(facts, settings)


def _given_layout(
    pp: int, dp: int, tp: int, microbatches: int | None, settings: DecideConfig
) -> LayoutPlanner:
    from failslow.decide import LayoutPlanner
    from failslow.records import JobFacts

    count = 8 * dp if microbatches is None else microbatches
    return LayoutPlanner(JobFacts(pp=pp, dp=dp, tp=tp, microbatches=count), settings)


def _policies(names: list[str] | None) -> tuple[PolicyName, ...]:
    from failslow.decide import POLICIES

    for name in names or ():
        if name not in POLICIES:
            raise typer.BadParameter(
                f"{name!r} is no policy; choose from {', '.join(POLICIES)}", param_hint="--policy"
            )
    return tuple(cast("PolicyName", name) for name in names) if names else POLICIES


def _costs(given: list[str] | None) -> Mapping[Rung, float]:
    costs: dict[Rung, float] = {}
    for text in given or ():
        level, _, seconds = text.partition("=")
        try:
            value = float(seconds)
        except ValueError:
            value = -1.0
        if level not in ("S2", "S3", "S4") or not 0.0 <= value < float("inf"):
            raise typer.BadParameter(
                f"{text!r} is no cost; give one as S3=40: S2, S3 or S4 and seconds >= 0",
                param_hint="--cost",
            )
        costs[cast("Rung", level)] = value
    return costs
