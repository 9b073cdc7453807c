"""`failslow run`: start a job watched. The command replaces this process, unless --restarts.

$ failslow run -- torchrun --nproc-per-node 4 train.py
failslow: watching; the journal will be failslow-runs/train-20260301-142507/journal.jsonl

The command then runs in this very process: signals, the terminal and the exit code are its own, and
there is nobody in between who could get them wrong.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from failslow.cli.output import make_folder, note, report_error
from failslow.errors import ConfigError

__all__ = ["EXAMPLES", "run"]

EXAMPLES = """\
[bold]Examples[/bold]

failslow run -- torchrun --nproc-per-node 4 train.py

failslow run --job pretrain7 -- srun python train.py

failslow run --transport redis://10.0.0.5:6379 -- torchrun --nnodes 16 --nproc-per-node 8 train.py

failslow run --mode auto --restarts 2 -- torchrun --nnodes 6:8 --nproc-per-node 8 train.py

failslow run --mode auto --restarts 2 --slurm requeue -- srun python train.py

FAILSLOW_METRICS_PORT=9464 failslow run -- torchrun --nproc-per-node 8 train.py
"""
_SCHEMES = ("tcpstore", "redis", "rediss", "unix")
_MODES = ("observe", "advise", "auto")
_SLURM = ("off", "drain", "requeue")
_NO_RESTART = {
    "observe": "does nothing in mode observe, in which no host is proved slow",
    "advise": "leaves no host out by itself in mode advise, only at `failslow act S4`",
}
_NOT_FOUND, _NOT_RUNNABLE = 127, 126  # what a shell answers
_MISSING = (FileNotFoundError, NotADirectoryError)


def run(
    command: Annotated[
        list[str],
        typer.Argument(metavar="CMD", help="The command of the job and its arguments."),
    ],
    *,
    job: Annotated[
        str | None,
        typer.Option(
            "--job",
            metavar="NAME",
            help="Name of the job, the same on all its nodes; from the launcher if left out.",
        ),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            metavar="FOLDER",
            help="Where the journal goes; failslow-runs/NAME if left out.",
        ),
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option("--mode", metavar="|".join(_MODES), help="observe if left out."),
    ] = None,
    transport: Annotated[
        str | None,
        typer.Option(
            "--transport",
            metavar="URL",
            help="tcpstore://HOST:PORT or redis://HOST:PORT; from MASTER_ADDR if left out.",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="TOML file of settings."),
    ] = None,
    reference: Annotated[
        bool | None,
        typer.Option(
            "--reference/--no-reference",
            help="Benchmark the healthy workers once at the start, in a pause of a few seconds, "
            "as modes advise and auto do if left out; mode observe never pauses.",
        ),
    ] = None,
    restarts: Annotated[
        int,
        typer.Option(
            "--restarts",
            metavar="N",
            min=0,
            help="Allow level S4: a host proved slow twice is left out, and the job started again "
            "from a checkpoint, its command at most N times, in mode auto. 0: never.",
        ),
    ] = 0,
    slurm: Annotated[
        str | None,
        typer.Option(
            "--slurm",
            metavar="|".join(_SLURM),
            help="What --restarts does in a Slurm job. drain: hosts left out are drained. requeue: "
            "and the job is requeued, to start on others. off: the commands are only shown.",
        ),
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Do not say where the journal is.")
    ] = False,
) -> None:
    """Run a training job watched: CMD gets the environment that brings failslow up in its workers.

    Workers are what a launcher gives a RANK, as torchrun does, and what joins a process group, as
    under srun, mpirun and mp.spawn; plain python runs as ever.

    Several nodes need one token. It is kept beside the journals: where that folder is not shared,
    set FAILSLOW_TOKEN. Exit code: that of CMD; 127 when there is no such command.
    """
    from failslow.config import check_settings, load_decide
    from failslow.runtime.doctor.settings import unknown_variables

    given = {
        "FAILSLOW_JOB": job,
        "FAILSLOW_DIR": None if folder is None else str(folder),
        "FAILSLOW_MODE": _one_of("mode", mode, _MODES),
        "FAILSLOW_TRANSPORT": _address(transport),
        "FAILSLOW_CONFIG": None if config is None else str(_file(config)),
        "FAILSLOW_LOCALIZE_REFERENCE": None if reference is None else str(reference).lower(),
        "FAILSLOW_DECIDE_SLURM": _one_of("slurm", slurm, _SLURM),
    }
    if slurm not in (None, "off") and not restarts:
        raise ConfigError(f"--slurm {slurm} without --restarts does nothing; add --restarts 1")
    environ = {**os.environ, "FAILSLOW": "1"}
    environ |= {name: value for name, value in given.items() if value is not None}
    check_settings(environ)
    for name, remedy in unknown_variables(environ).items():
        note(f"{name} is set, and nothing reads it: {remedy}")
    if restarts and (decides := load_decide(environ).mode) != "auto":
        note(f"--restarts {restarts} {_NO_RESTART[decides]}; add --mode auto")
    _address(environ.get("FAILSLOW_TRANSPORT") or None, "FAILSLOW_TRANSPORT=")
    if named := environ.get("FAILSLOW_DIR"):
        make_folder(Path(named), "FAILSLOW_DIR=" if folder is None else "--dir ")
    shared = Path(named or "failslow-runs")
    if not named:
        environ["FAILSLOW_DIR"] = str(shared / _run_name(command, environ))
    environ["FAILSLOW_DIR"] = str(Path(environ["FAILSLOW_DIR"]).absolute())
    has_folder = _share_token(environ, shared)
    if not quiet and has_folder:
        journal = os.path.relpath(Path(environ["FAILSLOW_DIR"]) / "journal.jsonl")
        note(f"watching; the journal will be {journal}")
        _say_capture(environ)
    if restarts:
        raise typer.Exit(_supervise(command, environ, restarts))
    _become(command, environ)


def _say_capture(environ: Mapping[str, str]) -> None:
    """Whether calls will be captured at the cost meant; the first worker has it built."""
    from failslow.capture.builder import build_later

    told = build_later(environ, start=False)
    if told:
        note(told)


def _run_name(command: Sequence[str], environ: Mapping[str, str]) -> str:
    """The job's name, else the script's with the scheduler's number, else with the time."""
    if environ.get("FAILSLOW_JOB"):
        return environ["FAILSLOW_JOB"].replace("/", "_")
    scripts = [part for part in command if part.endswith(".py")]
    name = Path(scripts[0]).stem if scripts else Path(command[0]).name
    number = environ.get("SLURM_JOB_ID") or time.strftime("%Y%m%d-%H%M%S")
    return f"{name}-{number}"


def _share_token(environ: dict[str, str], folder: Path) -> bool:
    """One token for all nodes that share the folder; where it cannot be kept, none.

    False: nobody asked for that folder, and it cannot be had: that costs the watching, not the job.
    """
    from failslow.runtime.security import load_token

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        note(
            f"not watched: {folder} cannot be made: {error.strerror or error}; name another "
            "folder with --dir"
        )
        return False
    try:
        environ["FAILSLOW_TOKEN"] = load_token(environ, folder / ".token")
    except (OSError, ConfigError) as error:
        if environ.get("FAILSLOW_TOKEN"):
            raise ConfigError(str(error)) from None
        note(f"no token for several nodes: {error}")
    return True


def _supervise(command: Sequence[str], environ: Mapping[str, str], limit: int) -> int:
    """Run the command as a child that can be started again; its exit code."""
    from failslow.comeback import launched, needed_nodes
    from failslow.config import DecideConfig, load_config
    from failslow.runtime.rendezvous import node_name
    from failslow.runtime.restart import RECENT_S, Supervised, last_order
    from failslow.runtime.slurm import Slurm, read_allocation

    folder, slurm, resumed = Path(environ["FAILSLOW_DIR"]), None, ""
    environ = {**environ, "FAILSLOW_DECIDE_ALLOW_RESTART": "true"}
    setting = load_config("decide", DecideConfig, environ=environ).slurm
    allocation = None if setting == "off" else read_allocation(environ)
    if allocation is not None:
        slurm = Slurm(allocation, requeue=setting == "requeue", limit=limit, say=note)
        if why := slurm.why_not():
            note(f"level S4 is off, for the job could not start again: {why}")
            environ["FAILSLOW_DECIDE_ALLOW_RESTART"] = "false"
        again = slurm.requeue and allocation.restarts > 0
        order = last_order(folder, time.time() - RECENT_S) if again else None
        resumed = order.id if order is not None else ""
    elif setting != "off":
        note(
            f"this is no Slurm job: nothing will be {setting}{'d' if setting[-1] == 'e' else 'ed'}"
        )
        environ["FAILSLOW_DECIDE_SLURM"] = "off"
    requeued = slurm is not None and slurm.requeue
    environ |= launched(command, environ, requeued=requeued)
    if not requeued and (needed := needed_nodes(command)):
        note(
            f"--nnodes asks for {needed} nodes: unless a spare one waits, the job cannot start "
            "again without one; give --nnodes MIN:MAX, or tell of spare nodes by "
            "FAILSLOW_DECIDE_SPARES"
        )
    supervised = Supervised(
        command,
        environ,
        folder=folder,
        node=node_name(environ),
        limit=limit,
        say=note,
        slurm=slurm,
        resumed=resumed,
    )
    try:
        return supervised.run()
    except OSError as error:
        report_error(f"{command[0]}: cannot be run: {error.strerror or error}")
        return _NOT_FOUND if isinstance(error, _MISSING) else _NOT_RUNNABLE


def _become(command: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """Replace this process by the command."""
    # Python ignores these, and what is ignored stays so in the command
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(command[0], list(command), dict(environ))
    except OSError as error:
        report_error(f"{command[0]}: cannot be run: {error.strerror or error}")
        raise typer.Exit(_NOT_FOUND if isinstance(error, _MISSING) else _NOT_RUNNABLE) from None


def _one_of(name: str, value: str | None, allowed: Sequence[str]) -> str | None:
    if value is not None and value not in allowed:
        raise ConfigError(f"--{name} {value!r} is none of {', '.join(allowed)}; use one of them")
    return value


def _address(url: str | None, source: str = "--transport ") -> str | None:
    if url is not None and url.partition("://")[0] not in _SCHEMES:
        raise ConfigError(
            f"{source}{url} has no known scheme; write tcpstore://HOST:PORT or redis://HOST:PORT"
        )
    return url


def _file(path: Path) -> Path:
    if not path.is_file():
        raise ConfigError(f"--config {path}: no such file; name a TOML file or leave it out")
    return path.absolute()
