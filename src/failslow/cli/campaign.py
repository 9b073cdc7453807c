"""`failslow probe campaign`: many probes over time, into a store that `failslow study` reads.

$ failslow probe campaign probes/ --probes 1x100 --probes 4x30 --executor slurm --spacing 120
4n-0007.1: ×1.62, network congestion: link gpu-12>gpu-17
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from failslow.cli import options
from failslow.cli.output import emit, emit_view, note, report_error
from failslow.errors import ConfigError, InputError

if TYPE_CHECKING:
    from failslow.probe.campaign import Campaign, CampaignPlan, Halt, Over, Tally
    from failslow.probe.executors import Executor
    from failslow.probe.runner import Audience, TrainingJob
    from failslow.probe.store_parts import ProbeRecord

__all__ = ["EXAMPLES", "campaign", "ended_text"]

EXAMPLES = """\
[bold]Examples[/bold]

failslow probe campaign probes/ --probes 1x20

failslow probe campaign probes/ --probes 1x400 --probes 4x100 --executor slurm --preset gpu
--workers 8 --slurm partition=preemptible --slurm qos=low --spacing 300 --concurrency 2

failslow probe campaign probes/ --probes 2x50 --executor ray --max-nodes 8 --concurrency 4

failslow study probes/ --html study.html      while it runs, or afterwards
"""


class ExecutorName(str, Enum):
    """Where probes run."""

    LOCAL = "local"
    SLURM = "slurm"
    RAY = "ray"


class PresetName(str, Enum):
    """Sizes of the job."""

    CPU = "cpu"
    GPU = "gpu"


_JOB, _LIMITS, _WHERE = "What a probe trains", "Limits", "Where probes run"
_MOST_DIGITS = 18
"""Of a number: int() takes a few thousand, and no message has room for them."""


def campaign(
    store: Annotated[
        Path,
        typer.Argument(
            metavar="STORE",
            help="Folder for what is found; made if absent. With Slurm one that all nodes see.",
        ),
    ],
    *,
    probes: Annotated[
        list[str],
        typer.Option(
            "--probes",
            metavar="NODESxCOUNT",
            help="So many probes of so many nodes each, as 4x30; once for each size.",
        ),
    ],
    workers: Annotated[
        int,
        typer.Option(
            "--workers",
            metavar="N",
            min=1,
            help="Training processes a node.",
            rich_help_panel=_JOB,
        ),
    ] = 4,
    duration: Annotated[
        float,
        typer.Option(
            "--duration",
            metavar="SECONDS",
            min=10.0,
            help="Of training, from the first iteration seen; start-up comes on top.",
            rich_help_panel=_JOB,
        ),
    ] = 60.0,
    preset: Annotated[
        PresetName | None,
        typer.Option(
            "--preset",
            help="Sizes of the job; gpu where this machine has one, if left out.",
            rich_help_panel=_JOB,
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", help="Of the training.", rich_help_panel=_JOB)
    ] = 0,
    concurrency: Annotated[
        int,
        typer.Option(
            "--concurrency",
            metavar="N",
            min=1,
            help="Probes that run, or wait in a queue, at the same time.",
            rich_help_panel=_LIMITS,
        ),
    ] = 1,
    max_nodes: Annotated[
        int | None,
        typer.Option(
            "--max-nodes",
            metavar="N",
            min=1,
            help="Nodes they may have together.",
            rich_help_panel=_LIMITS,
        ),
    ] = None,
    spacing: Annotated[
        float,
        typer.Option(
            "--spacing",
            metavar="SECONDS",
            min=0.0,
            help="From one start to the next, at least.",
            rich_help_panel=_LIMITS,
        ),
    ] = 0.0,
    retries: Annotated[
        int,
        typer.Option(
            "--retries",
            metavar="N",
            min=0,
            help="How often a probe that was preempted or failed is tried again.",
            rich_help_panel=_LIMITS,
        ),
    ] = 2,
    executor: Annotated[
        ExecutorName,
        typer.Option(
            "--executor", help="This machine, one node; or a cluster.", rich_help_panel=_WHERE
        ),
    ] = ExecutorName.LOCAL,
    slurm: Annotated[
        list[str] | None,
        typer.Option(
            "--slurm",
            metavar="KEY=VALUE",
            help="Option of sbatch, as partition=preemptible; once for each. Not those that the "
            "campaign sets itself: nodes, ntasks, job-name, output, signal and their like.",
            rich_help_panel=_WHERE,
        ),
    ] = None,
    ray_address: Annotated[
        str | None,
        typer.Option(
            "--ray-address",
            metavar="ADDRESS",
            help="Of the Ray cluster; left out, or auto: the one this machine is a node of.",
            rich_help_panel=_WHERE,
        ),
    ] = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Run many probes of given sizes, and keep what they find.

    The sizes are mixed evenly. Ctrl-C or SIGTERM preempts what runs, keeps what it has measured,
    and the same command goes on later; a crash loses no more than the running probes. Exit code:
    0 all probes came to an end, 1 none finished or it could not go on, 130 stopped.
    """  # fmt: skip
    from failslow.probe.campaign import Campaign, Halt
    from failslow.probe.runner import CampaignStop, TrainingJob, run_campaign
    from failslow.probe.store import StoreWriter
    from failslow.runtime.security import load_token

    training = TrainingJob(
        workers_per_node=workers, duration_s=duration, preset=_preset(preset), seed=seed
    )
    load_token()  # one that is set and too short would fail every probe
    runs_on = _executor(executor, slurm or (), ray_address)
    plan = _plan(
        probes,
        runs_on,
        concurrency=concurrency,
        max_nodes=max_nodes,
        spacing_s=spacing,
        retries=retries,
        training=training,
    )
    with StoreWriter(store, job=training.as_dict()) as writer, CampaignStop.on_signals() as stop:
        for warning in writer.warnings:
            note(f"warning: {warning}")
        what = Campaign(plan, writer.attempts)
        try:
            with _audience(what, quiet=quiet) as audience:
                end = run_campaign(what, training, writer, runs_on, stop=stop, audience=audience)
        finally:
            runs_on.close()
        records = writer.records
    _show(store, what, records, training=training, end=end, json=json, quiet=quiet)
    tally = what.tally()
    given_up = _given_up_text(what, records)
    if isinstance(end, Halt):
        why = next(r.why for r in reversed(records) if r.ending == "failed")
        report_error(
            f"{end.failures} attempts failed one after the other, the last one: {why}; "
            f"the same command goes on once that is mended{given_up and f'; {given_up}'}"
        )
        raise typer.Exit(1)
    if end is not None and not tally.finished:
        report_error(f"no probe finished: {given_up}")
        raise typer.Exit(1)
    if given_up:
        note(f"warning: {given_up}")
    if end is None:
        note(f"stopped with {tally.left} of {tally.total} probes left; the same command goes on")
        raise typer.Exit(130)


def _given_up_text(what: Campaign, records: Sequence[ProbeRecord]) -> str:
    """How many probes are not tried again, why, and what would do so; "" for none."""
    from failslow.report import units

    given_up = what.given_up
    if not given_up:
        return ""
    last = next((r for r in reversed(records) if r.probe in given_up), None)
    why = "" if last is None else f", the last one {last.ending}: {last.why}"
    number = units.plural(len(given_up), "probe")
    return (
        f"{number} given up at --retries {what.plan.retries}{why}; "
        f"--retries {what.retries_for_all} tries again"
    )


def ended_text(record: ProbeRecord) -> str:
    """What came of an attempt, in a line."""
    from failslow.report import units

    name, found = f"{record.probe}.{record.attempt}", record.result
    if record.ending == "failed" or found is None:
        return f"{name}: {record.ending}: {record.why}"
    cut = "" if record.ending == "finished" else f" ({record.ending})"
    if not found.is_slow:
        return f"{name}: {'healthy' if found.result == 'healthy' else found.result}{cut}"
    who = ", ".join(found.culprits) or "nobody named"
    return f"{name}: {units.slowdown(found.slowdown)}, {found.cause or 'unknown'}: {who}{cut}"


def _preset(named: PresetName | None) -> Any:
    if named is not None:
        return named.value
    return "gpu" if Path("/proc/driver/nvidia/version").exists() else "cpu"


def _executor(name: ExecutorName, slurm: Sequence[str], ray_address: str | None) -> Executor:
    if slurm and name is not ExecutorName.SLURM:
        raise ConfigError("--slurm has no meaning without --executor slurm; leave it out")
    if ray_address is not None and name is not ExecutorName.RAY:
        raise ConfigError("--ray-address has no meaning without --executor ray; leave it out")
    if name is ExecutorName.SLURM:
        from failslow.probe.executors.slurm import SlurmExecutor

        return SlurmExecutor(dict(map(_pair, slurm)))
    if name is ExecutorName.RAY:
        from failslow.probe.executors.ray import RayExecutor

        return RayExecutor("auto" if ray_address is None else ray_address)
    from importlib.util import find_spec

    from failslow.probe.executors import LocalExecutor

    if find_spec("torch") is None:
        raise InputError("a probe trains with torch: pip install 'failslow[torch]'")
    return LocalExecutor()


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key.strip("-") or not equals:
        raise ConfigError(f"--slurm {text!r} is no KEY=VALUE, as partition=preemptible")
    return key.strip("-"), value


def _plan(
    probes: Sequence[str],
    executor: Executor,
    *,
    concurrency: int,
    max_nodes: int | None,
    spacing_s: float,
    retries: int,
    training: TrainingJob,
) -> CampaignPlan:
    from failslow.probe.campaign import CampaignPlan

    sizes = tuple(map(_size, probes))
    for size in sizes:
        if executor.nodes is not None and size.nodes > executor.nodes:
            raise ConfigError(
                f"--probes {size.nodes}x{size.probes}: this machine is one node; "
                "add --executor slurm or ray"
            )
        if size.nodes * training.workers_per_node < 2:
            raise ConfigError("--workers 1 leaves nothing to synchronise; give at least 2 in all")
    has = [limit for limit in (max_nodes, executor.nodes) if limit is not None]
    plan = CampaignPlan(
        sizes=sizes,
        concurrency=concurrency,
        max_nodes=min(has, default=None),
        spacing_s=spacing_s,
        retries=retries,
    )
    # a scheduler comes back by itself; what fails on this machine, somebody is to mend
    return plan if executor.nodes is None else replace(plan, backoff_s=0.0)


def _size(text: str) -> Any:
    from failslow.probe.campaign import SizeClass

    nodes, cross, count = text.lower().replace("×", "x").partition("x")
    if not cross or not nodes.isdecimal() or not count.isdecimal():
        raise ConfigError(f"--probes {text!r} is no NODESxCOUNT, as 4x30: 30 probes of 4 nodes")
    if max(len(nodes), len(count)) > _MOST_DIGITS:
        raise ConfigError(
            f"--probes {text[:20]}…: a number of {max(len(nodes), len(count))} digits; no cluster "
            f"has as many nodes: give {_MOST_DIGITS} digits at most"
        )
    return SizeClass(nodes=int(nodes), probes=int(count))


@contextmanager
def _audience(what: Campaign, *, quiet: bool) -> Iterator[Audience]:
    """A progress bar where a terminal is there to show it, lines where not, or neither."""
    from failslow.probe.runner import Audience

    if quiet:
        yield Audience()
        return

    class Lines(Audience):
        def ended(self, record: ProbeRecord, tally: Tally) -> None:
            del tally
            note(ended_text(record))

    if sys.stderr is None or not sys.stderr.isatty():
        yield Lines()
        return
    from failslow.cli.campaignbar import campaign_bar

    with campaign_bar(what, ended_text) as bar:
        yield bar


def _show(
    store: Path,
    what: Campaign,
    records: Sequence[ProbeRecord],
    *,
    training: TrainingJob,
    end: Over | Halt | None,
    json: bool,
    quiet: bool,
) -> None:
    from failslow.probe.study import study_probes
    from failslow.report.probestudy import probe_study_document, probe_study_view

    study = study_probes(records, duration_s=training.duration_s)
    if json:
        from failslow.report.json import dumps

        tally = what.tally()
        document = probe_study_document(study, source=str(store))
        document["campaign"] = {
            "end": "stopped" if end is None else type(end).__name__.lower(),
            "probes": tally.total,
            "finished": tally.finished,
            "given_up": tally.given_up,
            "left": tally.left,
        }
        emit(dumps(document) + "\n")
    elif not quiet:
        emit_view(probe_study_view(study, source=str(store)))
