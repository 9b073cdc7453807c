"""Checks of a job that runs: its rings, its agent and controller on this node, its journal.

In: the job's name, or its run's folder. Out: one `Check` a question:

    Check("rings", "pass", "2 workers of this node, newest record 0.1 s old")
    Check("agent", "fail", "no agent runs here: failslow agent: …", "see …/runtime.log")
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from failslow.capture.reader import RingReader
from failslow.capture.ring import ring_folders
from failslow.errors import FailslowError, InputError
from failslow.journal import read_journal
from failslow.report import units
from failslow.report.livejob import LiveJob, LiveState, Trouble
from failslow.runtime.claim import parse_claims
from failslow.runtime.doctor.base import Check, Status, read_text
from failslow.runtime.rings import OwnRings
from failslow.runtime.runs import RunPlace, find_run

__all__ = ["job_rings", "part_lives", "run_folder", "running_checks"]

_STILL_S = 10.0
_STILL_ITERATIONS = 20.0
_ALL_STEPS_BYTES = 4 << 20
_REMEDIES = {
    "agent": "look into runtime.log beside the journal on that node",
    "bus": "see that the controller's node, or the Redis server, can be reached",
    "clock": "start chronyd or systemd-timesyncd on every node",
    "controller": "look into runtime.log beside the journal",
    "coverage": "start the job with FAILSLOW=1 on every node",
    "names": "set FAILSLOW_NODE to another name on each node",
    "ring": "raise FAILSLOW_CAPTURE_RECORDS",
    "token": "set FAILSLOW_TOKEN to the same value on every node",
    "tracker": "mark iterations in the trainer with step()",
    "worker": "run failslow doctor --job on that node",
}


def running_checks(job: str, environ: Mapping[str, str], *, now_s: float) -> Iterator[Check]:
    """journal, rings, agent, controller, monitoring; now_s: epoch seconds."""
    place = find_run(job, environ)
    name = _job_of(place, environ) if place else job
    seen = _look(place, now_s)
    if seen is None:
        yield _no_journal(job, place, starting=_lives("controller.lock", run_folder(name, environ)))
    elif isinstance(seen, str):
        yield Check("journal", "fail", seen, "see its permissions")
    else:
        yield _journal(seen)
    state = seen if isinstance(seen, LiveJob) else None
    ended = state is not None and state.phase == "ended"
    own = OwnRings.of_run(run_folder(name, environ), name, environ)
    rings = _open_rings(own())
    yield _rings(rings, name, state)
    yield from _namesakes(own, name, environ)
    here = bool(rings)
    yield from _parts(name, environ, place, watched=here and not ended, rank_0=0 in rings)
    for ring in rings.values():
        ring.close()
    for trouble in state.troubles if state else ():
        yield _trouble(trouble, now_s)


def run_folder(job: str, environ: Mapping[str, str]) -> Path | None:
    """The folder by which the job's processes of this node find each other, if it is there."""
    for parent in ring_folders(environ):
        folder = parent / f"failslow-{os.getuid()}-{job}.run"
        if folder.is_dir():
            return folder
    return None


def job_rings(job: str | None, environ: Mapping[str, str]) -> OwnRings:
    """Those of a job's workers here, by its name or its run's folder; of the newest if left out.

    Raises InputError when there is none to leave out.
    """
    place = find_run(job, environ)
    if place is None and job is None:
        raise InputError("no watched job under failslow-runs/; name one")
    name = _job_of(place, environ) if place else str(job)
    return OwnRings.of_run(run_folder(name, environ), name, environ)


def _job_of(place: RunPlace, environ: Mapping[str, str]) -> str:
    """The job whose journal is there: workers name it by themselves, their launcher the folder."""
    own, found = f"failslow-{os.getuid()}-", []
    for parent in ring_folders(environ):
        for folder in parent.glob(f"{own}*.run"):
            with contextlib.suppress(OSError):
                ours = folder.stat().st_uid == os.getuid()
                if ours and os.path.samefile((folder / "journal").read_text(), place.folder):
                    found.append((_lives("*.lock", folder), folder.stat().st_mtime, folder.name))
    # an earlier start of the job may have had another name and been killed
    return max(found)[2].removeprefix(own).removesuffix(".run") if found else place.name


def part_lives(lock: Path) -> bool:
    """Whether somebody holds the lock of an agent or a controller."""
    try:
        handle = os.open(lock, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


def _lives(pattern: str, folder: Path | None) -> bool:
    return folder is not None and any(map(part_lives, folder.glob(pattern)))


def _look(place: RunPlace | None, now_s: float) -> LiveJob | str | None:
    """The job as its journal has it; why that cannot be read; None without one."""
    if place is None or not place.has_journal:
        return None
    state = LiveState(place.name)
    try:
        for entry in read_journal(place.journal, all_steps_bytes=_ALL_STEPS_BYTES):
            state.observe(entry)
    except FailslowError as error:
        return str(error)
    return state.look(now_s)


def _no_journal(job: str, place: RunPlace | None, *, starting: bool) -> Check:
    where = f"in {place.folder}" if place else f"of {job!r} in this folder"
    if starting and place:
        found = f"no journal {where} yet, and a controller that has just come up"
        return Check("journal", "warn", found, "wait, and leave a little of a core to it")
    remedy = "name the folder of its run, or run doctor where the job was started"
    return Check("journal", "fail", f"no journal {where}", remedy)


def _journal(job: LiveJob) -> Check:
    if job.last_t is None:
        found = "the journal is empty"
        return Check("journal", "fail", found, "look into runtime.log beside it")
    age = units.duration(max(0.0, job.now_s - job.last_t))
    found = f"newest entry {age} old, {job.phase}"
    if job.step is not None:
        found += f" at step {units.count(job.step)}"
    if job.phase == "silent":
        return Check("journal", "fail", found, "look into runtime.log beside the journal")
    if job.phase == "waiting":
        return Check("journal", "warn", found, "wait for a dozen iterations, then look again")
    return Check("journal", "info" if job.phase == "ended" else "pass", found)


def _open_rings(paths: Iterable[Path]) -> dict[int, RingReader]:
    """Those of living workers, by rank."""
    rings: dict[int, RingReader] = {}
    for path in paths:
        with contextlib.suppress(FailslowError):
            ring = RingReader(path)
            if ring.alive and not ring.closed:
                rings[ring.rank] = ring
            else:
                ring.close()
    return rings


def _namesakes(own: OwnRings, name: str, environ: Mapping[str, str]) -> Iterator[Check]:
    """Whether another job of the same name runs here, and under which one it is watched."""
    others = _open_rings(own.namesakes)
    for ring in others.values():
        ring.close()
    if not others:
        return
    prefix, names = f"failslow-{os.getuid()}-", []
    for parent in ring_folders(environ):
        for file in parent.glob(f"{prefix}*.run/claims"):
            called = file.parent.name.removeprefix(prefix).removesuffix(".run")
            with contextlib.suppress(OSError):
                claims = parse_claims(file.read_text())
                if called != name and any(c.job == own.job and c.lives for c in claims):
                    names.append(called)
    watched = f"watched as {' and '.join(sorted(names))}" if names else "watched by nobody"
    found = f"another job here is called {own.job} too, {watched}"
    remedy = "set FAILSLOW_JOB to another name for each of them"
    yield Check("name", "info" if names else "warn", found, remedy)


def _rings(rings: Mapping[int, RingReader], job: str, state: LiveJob | None) -> Check:
    if not rings:
        found = f"no worker of a job called {job} is captured on this node"
        if state is not None and state.phase == "ended":
            return Check("rings", "info", found)
        remedy = "start it with FAILSLOW=1, or name it: see FAILSLOW_JOB, or ls /dev/shm"
        return Check("rings", "fail", found, remedy)
    ages = {rank: _newest_age_s(ring) for rank, ring in rings.items()}
    usual_s = state.healthy_s if state is not None and state.healthy_s else 0.0
    still_s = max(_STILL_S, _STILL_ITERATIONS * usual_s)
    still = sorted(rank for rank, age in ages.items() if age is None or age > still_s)
    faults = sum(ring.faults for ring in rings.values())
    modes = sorted({str(ring.description.get("mode", "unknown")) for ring in rings.values()})
    found = f"{units.plural(len(rings), 'worker')} of this node, mode {' and '.join(modes)}"
    if still:
        oldest = ages[still[0]]
        since = "has recorded nothing" if oldest is None else f"was last heard {oldest:.0f} s ago"
        found += f"; rank {still[0]} {since}" + (f", {len(still) - 1} more" * (len(still) > 1))
        return Check("rings", "warn", found, "see whether the job hangs, or is in a long phase")
    newest = min(age for age in ages.values() if age is not None)
    found += f", newest record {units.duration(newest)} old"
    if faults:
        return Check("rings", "warn", f"{found}; {faults} lost to faults", "report it, please")
    return Check("rings", "pass", found)


def _newest_age_s(ring: RingReader) -> float | None:
    """Seconds since its last record began; None when it has none."""
    records = ring.read().records
    if not len(records):
        return None
    return max(0.0, (time.monotonic_ns() - int(records["start_ns"].max())) / 1e9)


def _parts(
    job: str, environ: Mapping[str, str], place: RunPlace | None, *, watched: bool, rank_0: bool
) -> Iterator[Check]:
    """Whether the agent of this node, and on rank 0's the controller, are there."""
    folder = run_folder(job, environ)
    locks = {"agent": "agent-*.lock", "controller": "controller.lock"}
    for part, pattern in locks.items():
        if _lives(pattern, folder):
            yield Check(part, "pass", f"the {part} runs on this node")
        elif not watched:
            yield Check(part, "info", f"no {part} runs on this node")
        elif part == "controller" and not rank_0:
            yield Check(part, "info", "the controller runs on rank 0's node")
        else:
            log = "" if place is None else str(place.folder / "runtime.log")
            last = read_text(log).rpartition("\n")[2] if log else ""
            status: Status = "fail"
            found = f"no {part} runs here" + (f": {last}" if last else "")
            yield Check(
                part, status, found, f"look into {log or 'runtime.log'}; see FAILSLOW_AGENT"
            )


def _trouble(trouble: Trouble, now_s: float) -> Check:
    age = units.duration(max(0.0, now_s - trouble.since_t))
    remedy = _REMEDIES.get(trouble.what, "look into runtime.log beside the journal")
    return Check(
        "monitoring", "fail" if trouble.blinds else "warn", f"{trouble.message} ({age})", remedy
    )
