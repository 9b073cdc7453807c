"""`failslow inject`: a real fault on this machine, for as long as the command runs.

In: what to hurt, how much, how long. Out: the fault, one line when it is in force and one when it
is undone; with --json each is an object:

    $ failslow inject throttle --rank 2 --to 0.7 --for 30 --json
    {"event": "applied", "kind": "throttle", "target": "process 4711", "summary": …, "how": …}
    {"event": "undone", "kind": "throttle", "after_s": 30.01, "reason": "time is up"}
"""

from __future__ import annotations

import json as codec
import os
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from failslow.cli.leaving import leaving_politely
from failslow.cli.output import emit, note
from failslow.errors import InjectError, InputError

if TYPE_CHECKING:
    from failslow.inject import Injection

__all__ = ["commands"]

_TICK_S = 0.5
_LOST = ("its process was killed", "its guard was killed")

commands = typer.Typer(
    help="Inject a real fault into this machine, and undo it.",
    epilog="Ctrl-C, a kill, even SIGKILL end a fault: a second process watches and undoes it. "
    "Where both are killed at once, as with a whole control group or Slurm step, "
    "`failslow inject undo` does.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

For = Annotated[
    float | None,
    typer.Option("--for", metavar="SECONDS", help="How long; until Ctrl-C if left out."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.")]
Force = Annotated[
    bool, typer.Option("--force", help="Allow it on this machine's own network, which others use.")
]
From = Annotated[
    str,
    typer.Option(
        "--from",
        metavar="A",
        help="Network namespace (of `ip netns`), pid:4711, NAMESPACE/eth0, interface or address.",
    ),
]


@commands.command("throttle", epilog="Example: failslow inject throttle --rank 2 --to 0.7 --for 30")
def throttle(
    *,
    pid: Annotated[
        int | None, typer.Option("--pid", metavar="PID", help="The process to slow.")
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(
            "--rank",
            metavar="RANK",
            help="Instead of --pid: this worker, on this machine, of a watched job.",
        ),
    ] = None,
    job: Annotated[
        str | None,
        typer.Option(
            "--job",
            metavar="DIR|NAME",
            help="The job of --rank: its run's folder, or its name. The newest under "
            "failslow-runs/ if left out.",
        ),
    ] = None,
    to: Annotated[
        float,
        typer.Option(
            "--to",
            metavar="FRACTION",
            help="What it keeps: of one core (of each of --threads) by a quota, of its time by "
            "signals; no share of its speed. A quota of 0.5 halves what always computes, and does "
            "nothing to what computes less than half of the time.",
        ),
    ],
    threads: Annotated[
        int, typer.Option("--threads", metavar="N", help="Threads it computes with.")
    ] = 1,
    method: Annotated[
        str,
        typer.Option(
            "--method", metavar="NAME", help="cgroup (a CPU quota), signal (SIGSTOP), or auto."
        ),
    ] = "auto",
    for_s: For = None,
    json: Json = False,
) -> None:
    """Throttle a process, as a slow device would."""
    from failslow import inject

    if (pid is None) == (rank is None):
        raise InputError("throttle whom? give --pid PID, or --rank RANK of a watched job")
    pid = pid if rank is None else _worker(job, rank)
    assert pid is not None
    _run(inject.throttle(pid, to=to, threads=threads, method=method, for_s=for_s), json=json)


@commands.command("cpu", epilog="Example: failslow inject cpu --cores 0,1 --beside 4711")
def cpu(
    *,
    cores: Annotated[str, typer.Option("--cores", metavar="LIST", help="Cores, as 0,1 or 0-3.")],
    load: Annotated[
        float,
        typer.Option(
            "--load", metavar="SHARE", help="Share of each core's time; 2 is two busy processes."
        ),
    ] = 1.0,
    beside: Annotated[
        int | None,
        typer.Option(
            "--beside",
            metavar="PID",
            help="Weigh as much as this process: join its cgroup. Needed to slow a worker that is "
            "pinned or in another group: in their own the burners may get little time.",
        ),
    ] = None,
    for_s: For = None,
    json: Json = False,
) -> None:
    """Keep cores busy, as a noisy neighbour would."""
    from failslow import inject

    _run(inject.burn(inject.parse_cores(cores), load=load, beside=beside, for_s=for_s), json=json)


@commands.command(
    "link", epilog="Example: failslow inject link --from node0 --to node2 --rate 50mbit"
)
def link(
    *,
    source: From,
    rate: Annotated[
        str, typer.Option("--rate", metavar="RATE", help="What is left, as 50mbit (units of tc).")
    ],
    target: Annotated[
        str | None,
        typer.Option(
            "--to", metavar="B", help="Only towards this namespace or address; all if left out."
        ),
    ] = None,
    force: Force = False,
    for_s: For = None,
    json: Json = False,
) -> None:
    """Congest a link, in one direction."""
    from failslow import inject

    dst = None if target is None else _address(target)
    place = inject.find_place(source, towards=dst)
    if place.interface is None:
        raise InjectError(
            f"no interface here has address {source}; name one, or a network namespace"
        )
    fault = inject.Congest(
        place.namespace, place.interface, inject.parse_rate_bits(rate), dst, force
    )
    _run(inject.Injection(fault, for_s=for_s), json=json)


@commands.command("flood", epilog="Example: failslow inject flood --from node0 --to node2")
def flood(
    *,
    source: From,
    target: Annotated[
        str, typer.Option("--to", metavar="B", help="Namespace or address that gets the flood.")
    ],
    rate: Annotated[
        str | None,
        typer.Option("--rate", metavar="RATE", help="As 500mbit; all the path takes if left out."),
    ] = None,
    streams: Annotated[
        int, typer.Option("--streams", metavar="N", help="Connections at once.")
    ] = 4,
    protocol: Annotated[
        str, typer.Option("--protocol", metavar="NAME", help="tcp or udp.")
    ] = "tcp",
    force: Force = False,
    for_s: For = None,
    json: Json = False,
) -> None:
    """Flood a path with traffic of our own, as a greedy neighbour would."""
    from failslow import inject

    sink = inject.find_place(target)
    address = _address(target)
    fault = inject.Flood(
        inject.find_place(source, towards=address).namespace,
        sink.namespace,
        address,
        has_sink=sink.interface is not None,
        rate_bits=0 if rate is None else inject.parse_rate_bits(rate),
        streams=streams,
        protocol=protocol,
        force=force,
    )
    _run(inject.Injection(fault, for_s=for_s), json=json)


@commands.command("undo", epilog="Example: failslow inject undo --all")
def undo(
    *,
    all_: Annotated[
        bool, typer.Option("--all", help="Also end the injections that are in force.")
    ] = False,
    json: Json = False,
) -> None:
    """Undo what crashed injectors of this user left behind."""
    from failslow import inject

    done = inject.undo_leftovers(include_running=all_)
    if json:
        listed = [{"kind": r.kind, "targets": list(r.targets), "summary": r.summary} for r in done]
        emit(codec.dumps({"event": "undone", "injections": listed}) + "\n")
        return
    for record in done:
        emit(f"undone: {record.kind} of {record.summary}\n")
    if not done:
        emit("nothing to undo\n")


def _worker(job: str | None, rank: int) -> int:
    """The process of a watched job's rank on this machine."""
    from failslow.capture.ring import process_start_ticks, read_about
    from failslow.runtime.doctor.running import job_rings

    rings = job_rings(job, os.environ)
    here = {
        about["rank"]: about["pid"]
        for about in map(read_about, rings())
        # a pid of another container is somebody else's here, or nobody's
        if about and process_start_ticks(about["pid"]) == about["pid_start_ticks"]
    }
    if rank not in here:
        known = f"only {', '.join(map(str, sorted(here)))}" if here else "no other one either"
        raise InputError(
            f"rank {rank} of {rings.job} is not watched on this machine, {known}; "
            "give --pid, or the --job it is of"
        )
    return int(here[rank])


def _address(text: str) -> str:
    from failslow import inject

    address = inject.find_place(text).address
    if address is None:
        raise InjectError(f"{text} has no address; give its interface one, or name an address")
    return address


def _run(injection: Injection, *, json: bool) -> None:
    """Hold the fault until its time is up, Ctrl-C or a signal; then report that it is undone."""
    begin_s = time.monotonic()
    interrupted = False
    try:
        with leaving_politely(), injection:
            begin_s = time.monotonic()
            _applied(injection, json=json)
            _hold(injection, begin_s)
    except KeyboardInterrupt:
        if not injection.how:
            raise
        interrupted = True
    finally:
        if injection.how and injection.ended is not None:
            reason = injection.ended
            if reason == "it was asked to":  # by us, for what came to us
                reason = "Ctrl-C" if interrupted else "a signal"
            _undone(injection, time.monotonic() - begin_s, reason, json=json)
    if injection.ended in _LOST:
        raise InjectError(f"the fault ended too early: {injection.ended}")
    if interrupted and injection.for_s is not None:
        raise typer.Exit(130)


def _hold(injection: Injection, begin_s: float) -> None:
    """Until it has ended, with the time on a terminal's stderr."""
    shown = sys.stderr.isatty()
    try:
        while injection.wait(_TICK_S) is None:
            if shown:
                passed_s = time.monotonic() - begin_s
                left = (
                    f"{passed_s:.0f} s so far"
                    if injection.for_s is None
                    else f"{max(0.0, injection.for_s - passed_s):.0f} s left"
                )
                sys.stderr.write(f"\r\x1b[K{left}; Ctrl-C undoes it")
                sys.stderr.flush()
    finally:
        if shown:
            with suppress(OSError):
                sys.stderr.write("\r\x1b[K")
                sys.stderr.flush()


def _applied(injection: Injection, *, json: bool) -> None:
    fault = injection.fault
    if json:
        told = {
            "event": "applied",
            "kind": fault.kind,
            "target": ", ".join(fault.targets()),
            "summary": fault.summary(),
            "how": injection.how,
            "for_s": injection.for_s,
            "guard_pid": injection.guard_pid,
        }
        emit(codec.dumps(told) + "\n")
        return
    span = "until Ctrl-C" if injection.for_s is None else f"for {injection.for_s:g} s"
    emit(f"{fault.kind}: {fault.summary()} {span}\n")
    note(f"  {injection.how}")


def _undone(injection: Injection, after_s: float, reason: str, *, json: bool) -> None:
    if json:
        told = {
            "event": "undone",
            "kind": injection.fault.kind,
            "after_s": round(after_s, 3),
            "reason": reason,
        }
        emit(codec.dumps(told) + "\n")
        return
    emit(f"undone after {after_s:.1f} s: {reason}\n")
