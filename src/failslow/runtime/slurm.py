"""What Slurm is told of a host that a job leaves out (level S4), and telling it.

In: the environment Slurm gives a job's processes, the nodes to leave out. Out: commands, as
argument lists; they are run only where the setting `[decide] slurm` says so, else shown:

    allocation = read_allocation(os.environ)
    # Allocation(job="4711", nodes=("gpu-1", "gpu-2", "gpu-3"), restarts=0, leads=True)
    leave_out(allocation, ["gpu-3"], "device rank 25 x1.84", requeue=True)
    # (("scontrol", "update", "NodeName=gpu-3", "State=DRAIN",
    #   "Reason=failslow, job 4711: device rank 25 x1.84"),
    #  ("scontrol", "requeue", "4711"),
    #  ("scontrol", "update", "JobId=4711", "ExcNodeList=gpu-3"))

A drained node takes no more jobs until an administrator resumes it. Only operators may drain: the
list of excluded nodes keeps a node out of the job's next start without that, and only a job that is
pending again has one to change. Changing it sets it, so what it held goes along. Of the processes
of a job one speaks with Slurm (`leads`).
"""

from __future__ import annotations

import itertools
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from failslow.errors import ConfigError, PlanError
from failslow.records import Decision

__all__ = ["Allocation", "Slurm", "advised", "expand", "leave_out", "read_allocation", "shown"]

Command = tuple[str, ...]

_MOST_NODES = 100_000
_REASON_CHARS = 200
_TRIES, _WAIT_S, _LIMIT_S = 4, 2.0, 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """What a job has of a cluster."""

    job: str
    """Its id."""
    nodes: tuple[str, ...]
    """By the names Slurm has for them."""
    restarts: int = 0
    """How often Slurm has started it again so far."""
    leads: bool = True
    """This process speaks for the job: its batch script's, or a step's first."""

    def named(self, node: str) -> str:
        """Slurm's name of a node. Raises PlanError for one that is not the job's: hands off it."""
        if node in self.nodes:
            return node
        short = [name for name in self.nodes if name.partition(".")[0] == node.partition(".")[0]]
        if len(short) == 1:
            return short[0]
        raise PlanError(
            f"{node} is none of the {len(self.nodes)} nodes of Slurm job {self.job} "
            f"({', '.join(self.nodes[:8])}{', …' if len(self.nodes) > 8 else ''}); give workers "
            "FAILSLOW_NODE=$SLURMD_NODENAME"
        )


def read_allocation(environ: Mapping[str, str]) -> Allocation | None:
    """The allocation a process runs in; None outside of a Slurm job.

    Raises ConfigError for a list of nodes that is none.
    """
    job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
    nodes = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if not job or not nodes:
        return None
    restarts = environ.get("SLURM_RESTART_COUNT", "0")
    return Allocation(
        job=job,
        nodes=expand(nodes),
        restarts=int(restarts) if restarts.isdecimal() else 0,
        leads="SLURM_STEP_ID" not in environ or environ.get("SLURM_PROCID", "0") == "0",
    )


def expand(nodelist: str) -> tuple[str, ...]:
    """The names in Slurm's short form of a list, in its order.

    >>> expand("gpu-[08-10,12],rack[1-2]n[1-2],login")
    ('gpu-08', 'gpu-09', 'gpu-10', 'gpu-12', 'rack1n1', 'rack1n2', 'rack2n1', 'rack2n2', 'login')
    """
    names: list[str] = []
    for word in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", nodelist):
        parts = [
            _numbers(part[1:-1], nodelist) if part.startswith("[") else [part]
            for part in re.findall(r"\[[^\]]*\]|[^\[]+", word)
        ]
        if any(set(part) & set("[], ") for values in parts for part in values):
            raise _no_list(nodelist)
        names += map("".join, itertools.islice(itertools.product(*parts), _MOST_NODES + 1))
        if len(names) > _MOST_NODES:
            raise _no_list(nodelist)
    if not names or nodelist.count("[") != nodelist.count("]"):
        raise _no_list(nodelist)
    return tuple(dict.fromkeys(names))


def _numbers(text: str, whole: str) -> list[str]:
    """ "08-10,12" -> 08, 09, 10, 12."""
    found: list[str] = []
    for piece in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", piece.strip())
        if match is None:
            raise _no_list(whole)
        first, last = match[1], match[2] or match[1]
        if not 0 <= int(last) - int(first) <= _MOST_NODES:
            raise _no_list(whole)
        found += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return found


def _no_list(text: str) -> ConfigError:
    return ConfigError(
        f"SLURM_JOB_NODELIST = {text[:200]!r} is no list of nodes as Slurm writes them "
        f"(gpu-[1-3,7]), or of more than {_MOST_NODES:,}; unset SLURM_JOB_ID to run as if there "
        "were no Slurm"
    )


def leave_out(
    allocation: Allocation, evict: Sequence[str], why: str, *, requeue: bool, excluded: str = ""
) -> tuple[Command, ...]:
    """Drain those nodes and, with `requeue`, start the job again on others.

    evict: nodes of the job. excluded: those it was to be kept from before, as Slurm writes them.
    Raises PlanError where one is not, or no node would be left of a job
    that is not requeued.
    """
    names = tuple(dict.fromkeys(allocation.named(node) for node in evict))
    if not names:
        raise PlanError(f"no node is to be left out of Slurm job {allocation.job}; name one")
    if not requeue and set(names) >= set(allocation.nodes):
        raise PlanError(
            f"Slurm job {allocation.job} has no node but {', '.join(names)} to go on with; set "
            "slurm to requeue, or ask for a spare node"
        )
    reason = re.sub(r"\s+", " ", f"failslow, job {allocation.job}: {why}").strip(" :")
    several = ",".join(names)
    commands: list[Command] = [
        (
            *("scontrol", "update", f"NodeName={several}", "State=DRAIN"),
            f"Reason={reason[:_REASON_CHARS]}",
        )
    ]
    if requeue:
        commands.append(("scontrol", "requeue", allocation.job))
        exclude = ",".join(filter(None, (excluded, several)))
        commands.append(("scontrol", "update", f"JobId={allocation.job}", f"ExcNodeList={exclude}"))
    return tuple(commands)


def advised(decision: Decision, allocation: Allocation, setting: str) -> dict[str, Any] | None:
    """The journal's action line for a decision about S4: what Slurm is, or should be, told.

    setting: that of `[decide] slurm`. None for any other decision.
    """
    plan = decision.plan
    if plan is None or plan.level != "S4":
        return None
    run = decision.apply and setting != "off"
    line: dict[str, Any] = {"what": "slurm", "episode": decision.episode, "run": run}
    why = ", ".join(decision.culprits)
    try:
        commands = leave_out(allocation, plan.evict, why, requeue=setting == "requeue")
    except PlanError as error:
        return line | {"commands": [], "error": str(error)}
    return line | {"commands": shown(commands)}


def shown(commands: Sequence[Command]) -> list[str]:
    """As one would type them."""
    return [shlex.join(command) for command in commands]


def _done(command: Command) -> subprocess.CompletedProcess[str]:
    """Slurm sends SIGTERM to all processes of a job that it requeues, and to the very command that
    is to say more of it: that one does not hear it, and this process does so afterwards.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LIMIT_S,
            check=False,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _look(job: str) -> Mapping[str, str]:
    """What Slurm says of a job that it has a value for; nothing where it does not answer."""
    try:
        done = _done(("scontrol", "--oneliner", "show", "job", job))
    except (OSError, subprocess.SubprocessError):
        return {}
    pairs = (word.partition("=") for word in done.stdout.split())
    return {name: value for name, _, value in pairs if value not in ("", "(null)")}


def _run(command: Command) -> str:
    """What went wrong; "" nothing."""
    try:
        done = _done(command)
    except subprocess.TimeoutExpired:
        return f"no answer within {_LIMIT_S:g} s"
    except OSError as error:
        return error.strerror or str(error)
    said = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return "" if done.returncode == 0 else (said[-1] if said else f"exit code {done.returncode}")


class Slurm:
    """Leaves nodes of one job out, by Slurm's own commands.

    requeue: start the job again on others; else it goes on with the nodes it has left. limit: how
    often it may be started again. say: told what a person should know. run: runs a command; what
    went wrong, "" nothing. look: what Slurm says of a job.
    """

    def __init__(
        self,
        allocation: Allocation,
        *,
        requeue: bool,
        limit: int,
        say: Callable[[str], None],
        run: Callable[[Command], str] = _run,
        look: Callable[[str], Mapping[str, str]] = _look,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.allocation, self.requeue = allocation, requeue
        self._limit, self._say, self._sleep = limit, say, sleep
        self._run, self._look = run, look

    def why_not(self) -> str:
        """Why the job could not be requeued: better known before it is saved and ended; "" it can,
        as far as is known."""
        if not self.requeue:
            return ""
        starts, told = self.allocation.restarts, self._look(self.allocation.job)
        if starts >= self._limit:
            return f"Slurm has started it again {starts} times, and --restarts allows {self._limit}"
        if told.get("BatchFlag") == "0":
            return "Slurm requeues batch jobs only; submit it by sbatch"
        if told.get("Requeue") == "0":
            return "it may not be requeued; submit it with sbatch --requeue"
        return ""

    def leave_out(self, evict: Sequence[str], why: str) -> bool:
        """Do it, if this process speaks for the job; False where the job was to be requeued and
        could not be: it is left stopped, and that was said."""
        if not self.allocation.leads:
            return True
        job = self.allocation.job
        before = self._look(job).get("ExcNodeList", "") if self.requeue else ""
        try:
            drain, *more = leave_out(
                self.allocation, evict, why, requeue=self.requeue, excluded=before
            )
        except PlanError as error:
            self._say(f"{error}; nothing is drained")
            return not self.requeue
        self._do(drain, 1, "an operator has to run it")
        if not more:
            return True
        starts = self.allocation.restarts
        if starts >= self._limit:
            self._say(
                f"Slurm job {job} was started again {starts} times, and --restarts allows "
                f"{self._limit}: it is saved and left stopped; to start it again: "
                f"{shlex.join(more[0])}"
            )
            return False
        requeue, exclude = more
        stopped = "the job is saved and left stopped; start it by hand (sbatch --requeue)"
        if not self._do(requeue, _TRIES, stopped):
            return False
        self._do(exclude, _TRIES, "only a drained node is sure to be left out of the next start")
        return True

    def _do(self, command: Command, tries: int, otherwise: str) -> bool:
        """Run it, several times if need be; whether it was done."""
        error = ""
        for number in range(tries):
            if number:
                self._sleep(_WAIT_S)
            error = self._run(command)
            if not error:
                self._say(f"done: {shlex.join(command)}")
                return True
        self._say(f"{shlex.join(command)} failed ({error}); {otherwise}")
        return False
