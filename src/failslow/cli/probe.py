"""`failslow probe`: a training job of one's own, to see how the cluster does.

$ failslow probe run --json | jq '.result, .culprits'
"communication"
["link gpu-1>gpu-2"]
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from failslow.cli import campaign, options
from failslow.cli.output import emit, emit_view, note, report_error, stderr_console
from failslow.errors import ConfigError, InputError, OutputError

if TYPE_CHECKING:
    from rich.table import Table

    from failslow.probe import ProbeResult, ProbeSpec
    from failslow.probe.run import Progress

__all__ = ["commands"]

EXAMPLES = """\
[bold]Examples[/bold]

failslow probe run

failslow probe run --duration 120 --out probe.json

failslow probe run --history earlier.jsonl --json | jq .slowdown

srun -N 4 --ntasks-per-node 1 failslow probe run --preset gpu --workers 8 --out probe.json

failslow probe run --nodes 2 --node-rank 0 --rendezvous 10.0.0.1:29400      and on the other node
with --node-rank 1
"""
_FEWEST_S, _FEWEST_ITERATIONS = 10.0, 20

commands = typer.Typer(
    help="Train a small job of one's own to see how the cluster does: one probe, or many.",
    epilog="Start with [bold]failslow probe run[/bold]: about a minute, on this machine.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
commands.command("campaign", epilog=campaign.EXAMPLES)(campaign.campaign)


@commands.command("run", epilog=EXAMPLES)
def run(
    *,
    workers: Annotated[
        int, typer.Option("--workers", metavar="N", min=1, help="Training processes a node.")
    ] = 4,
    duration: Annotated[
        float,
        typer.Option(
            "--duration",
            metavar="SECONDS",
            help="Of training, from the first iteration seen; start-up comes on top.",
        ),
    ] = 60.0,
    iterations: Annotated[
        int | None,
        typer.Option(
            "--iterations",
            metavar="N",
            min=1,
            help="End once so many were seen, if sooner; at least 20.",
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            "--preset",
            metavar="cpu|gpu",
            help="Sizes of the job; gpu where there is one, if left out. Probes compare only "
            "within a preset.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Of the training.")] = 0,
    nodes: Annotated[
        int | None,
        typer.Option(
            "--nodes",
            metavar="N",
            min=1,
            help="Run the command on each of them; from the Slurm step or the launcher's "
            "environment if left out, else 1.",
            rich_help_panel="Several nodes",
        ),
    ] = None,
    node_rank: Annotated[
        int | None,
        typer.Option(
            "--node-rank",
            metavar="I",
            min=0,
            help="This one's number, from 0; node 0 writes the result.",
            rich_help_panel="Several nodes",
        ),
    ] = None,
    rendezvous: Annotated[
        str | None,
        typer.Option(
            "--rendezvous",
            metavar="HOST:PORT",
            help="An address of node 0 with a free port, the same on all nodes. They also need "
            "one secret: FAILSLOW_TOKEN, or a --dir that they share.",
            rich_help_panel="Several nodes",
        ),
    ] = None,
    history: Annotated[
        list[Path] | None,
        typer.Option(
            "--history",
            metavar="FILE",
            help="Earlier results, JSON lines, or a campaign's store: what probes usually take "
            "here, so that one slow from its start is found.",
        ),
    ] = None,
    probe_id: Annotated[
        str | None, typer.Option("--probe-id", metavar="NAME", help="Made up if left out.")
    ] = None,
    campaign: Annotated[
        str, typer.Option("--campaign", metavar="NAME", help="That it belongs to.")
    ] = "",
    folder: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            metavar="FOLDER",
            help="Keep the journal (run/) and the workers' output there; the journal of an earlier "
            "probe is set aside (run.1/, run.2/, ...).",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Write the result there, as one JSON line."),
    ] = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Run one probe: train a small GPT for a minute, watched, and say what slowed it.

    One node trains data-parallel replicas, several a pipeline of replicas. SIGTERM or Ctrl-C ends
    it within seconds, with what was found until then. Exit code: 0 ran (healthy or not) or was
    preempted, 1 it could not, or too little of it was seen. Needs torch; culprits are proved in
    pauses of a second or two.
    """
    from failslow.cli.probeplace import made_up_name, place_of
    from failslow.probe.fleet import fleet_reference, load_history
    from failslow.probe.run import run_probe
    from failslow.probe.signals import Stop
    from failslow.runtime.security import load_token

    _need_torch()
    load_token()  # one that is set and too short would be refused by all that watches
    count, place = place_of(nodes, node_rank, rendezvous, os.environ)
    spec = _spec(
        probe_id=probe_id or made_up_name(place, os.environ),
        campaign=campaign,
        nodes=count,
        workers_per_node=workers,
        duration_s=duration,
        iterations=iterations,
        preset=_preset(preset),
        seed=seed,
    )
    earlier = load_history(history or ())
    is_first = place.node_rank == 0
    if out is not None and is_first:
        _check_out(out)
    if is_first and not quiet and history and fleet_reference(spec, earlier) is None:
        note(
            "the history holds fewer than five probes of these sizes, or several models of "
            "devices: nothing is known before it ran"
        )
    with _folder(folder) as where, Stop.on_signals() as stop:
        environ = _with_token(spec, where, shared=folder is not None)
        with _bar(spec, enabled=is_first and not quiet) as show:
            result = run_probe(spec, place, where, environ, stop=stop, history=earlier, show=show)
    if is_first:
        _tell(result, out=out, json=json, quiet=quiet)
    if result.state == "failed":
        report_error(f"probe {spec.probe_id}: {result.error}")
        raise typer.Exit(1)
    if stop.number == signal.SIGINT:
        raise typer.Exit(130)


def _spec(
    *,
    probe_id: str,
    campaign: str,
    nodes: int,
    workers_per_node: int,
    duration_s: float,
    iterations: int | None,
    preset: Literal["cpu", "gpu"],
    seed: int,
) -> ProbeSpec:
    from failslow.probe import ProbeSpec

    if nodes * workers_per_node < 2:
        raise ConfigError("--workers 1 leaves nothing to synchronise; give at least 2 in all")
    if duration_s < _FEWEST_S and iterations is None:
        raise ConfigError(
            f"--duration {duration_s:g} is too short to tell anything; give at least "
            f"{_FEWEST_S:g} seconds"
        )
    if iterations is not None and iterations < _FEWEST_ITERATIONS:
        raise ConfigError(
            f"--iterations {iterations} are too few to tell anything; give at least "
            f"{_FEWEST_ITERATIONS}"
        )
    try:
        return ProbeSpec(
            probe_id=probe_id,
            campaign=campaign,
            nodes=nodes,
            workers_per_node=workers_per_node,
            duration_s=duration_s,
            iterations=iterations,
            preset=preset,
            seed=seed,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _preset(named: str | None) -> Literal["cpu", "gpu"]:
    if named is None:
        return "gpu" if Path("/proc/driver/nvidia/version").exists() else "cpu"
    if named == "cpu":
        return "cpu"
    if named == "gpu":
        return "gpu"
    raise ConfigError(f"--preset {named!r} is none of cpu, gpu; use one of them")


@contextmanager
def _folder(named: Path | None) -> Iterator[Path]:
    if named is not None:
        try:
            named.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(
                f"--dir {named}: cannot be made: {error.strerror or error}; name another one"
            ) from None
        yield named.absolute()
        return
    # what watches may still write there for a moment after a kill
    with tempfile.TemporaryDirectory(
        prefix="failslow-probe-", ignore_cleanup_errors=True
    ) as scratch:
        yield Path(scratch)


def _with_token(spec: ProbeSpec, folder: Path, *, shared: bool) -> dict[str, str]:
    """The environment, for several nodes with the secret they share."""
    environ = dict(os.environ)
    if spec.nodes == 1 or environ.get("FAILSLOW_TOKEN"):
        return environ
    if not shared:
        raise ConfigError(
            "several nodes need one secret; set FAILSLOW_TOKEN to the same 16 characters or more "
            "on all of them, or give a --dir that they share"
        )
    from failslow.runtime.security import load_token

    environ["FAILSLOW_TOKEN"] = load_token(environ, folder / ".token")
    return environ


def _check_out(path: Path) -> None:
    """Before a minute is spent on what cannot be written."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise OutputError(f"--out {path}: its folder does not exist, or it is one; name a file")
    if path.exists() and not path.is_file():
        return  # a device or a pipe
    try:
        # as the result will be written, and gone at once
        with tempfile.TemporaryFile(dir=path.resolve().parent) as tried:
            tried.write(b"tried")
            tried.flush()
    except OSError as error:
        raise OutputError(
            f"--out {path}: cannot be written: {error.strerror or error}; name a file in a folder "
            "that is yours to write and has room"
        ) from None


@contextmanager
def _bar(spec: ProbeSpec, *, enabled: bool) -> Iterator[Callable[[Progress], None]]:
    """Progress on a terminal: time of training, iterations, what failslow thinks of it."""
    import sys

    if not enabled or sys.stderr is None or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    with Bar(
        TextColumn("probe"),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
        console=stderr_console(),
        transient=True,
    ) as bar:
        task = bar.add_task("starting", total=spec.duration_s)

        def show(told: Progress) -> None:
            pace = "" if told.iteration_s is None else f", {1e3 * told.iteration_s:.0f} ms"
            text = f"{told.iterations} iterations{pace}: {told.note}"
            bar.update(task, completed=told.train_s, description=text)

        yield show


def _tell(result: ProbeResult, *, out: Path | None, json: bool, quiet: bool) -> None:
    line = result.to_json() + "\n"
    try:
        if json:
            emit(line)
        elif not quiet:
            emit_view(_table(result))
            for text in result.evidence:
                note(f"  {text}")
    finally:  # whichever of the two fails, the other is there
        if out is not None:
            from failslow.report.files import write_atomically

            write_atomically(out, [line])
    if out is not None and not json and not quiet:
        note(f"wrote {out}")


def _table(result: ProbeResult) -> Table:
    from rich.table import Table

    grid = f"tp {result.tp} × pp {result.pp} × dp {result.dp}"
    table = Table(title=f"Probe {result.probe_id}", title_justify="left", show_header=False)
    table.add_column(style="dim")
    table.add_column()
    found = result.result if result.state == "done" else f"{result.result} ({result.state})"
    table.add_row("result", found)
    if result.cause:
        table.add_row("cause", result.cause)
    if result.culprits:
        table.add_row("culprits", "\n".join(result.culprits))
    if result.is_slow:
        table.add_row("slowdown", f"×{result.slowdown:.2f} for {result.slow_s:.0f} s")
        table.add_row("completion time", f"+{100 * result.jct_increase_share:.1f} %")
    table.add_row("where", f"{', '.join(result.nodes)}: {result.workers} workers, {grid}")
    pace = result.healthy_iteration_s
    healthy = "" if pace is None else f", {1e3 * pace:.0f} ms healthy"
    fleet = result.fleet_iteration_s
    usual = "" if fleet is None else f", {1e3 * fleet:.0f} ms usual here"
    table.add_row("iterations", f"{result.iterations}{healthy}{usual}")
    for name, text in _measures(result):
        table.add_row(name, text)
    return table


def _measures(result: ProbeResult) -> Iterator[tuple[str, str]]:
    if result.sm_utilisation_share is not None:
        yield "SM utilisation", f"{100 * result.sm_utilisation_share:.0f} %"
    if result.temperature_c is not None:
        yield "temperature", f"{result.temperature_c:.0f} °C, at most {result.temperature_max_c} °C"
    if result.cnp_per_s is not None:
        yield "congestion notifications", f"{result.cnp_per_s:.1f}/s"
    kinds = {"inside": result.latency_cv_intra_node, "between": result.latency_cv_inter_node}
    shown = [f"{cv:.2f} {name} nodes" for name, cv in kinds.items() if cv is not None]
    if shown:
        yield "latency variation", ", ".join(shown)


def _need_torch() -> None:
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise InputError("a probe trains with torch: pip install 'failslow[torch]'")
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        raise InputError("TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps failslow from loading; unset it")
