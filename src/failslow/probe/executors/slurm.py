"""Probes as jobs of a Slurm cluster, submitted by submitit.

In: specs, and options of sbatch as its users know them. Out: one batch job a probe, with one task a
node; the folder of the store must be one that all nodes see.

    SlurmExecutor({"partition": "preemptible", "qos": "low", "time": "10"})

A probe's job is never requeued by Slurm: the campaign tries it again by itself, and knows. What
became of a job is asked of `squeue` and of the file its first node writes, not of submitit: its own
answer needs slurmdbd, and its results are pickles.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from failslow.errors import ConfigError, MissingDependencyError, ProbeError
from failslow.probe.executors.base import RESULT_FILE, Command, JobState, last_line, read_result
from failslow.probe.executors.node import run_node
from failslow.probe.result import ProbeResult, ProbeSpec, command

__all__ = ["SlurmExecutor", "SlurmJob"]

_START_UP_S = 300.0
"""Time limit of a job over the probe's own."""
_WARNING_S = 60
"""So long before its time limit a job is told to end; submitit's own signal would kill workers."""
_ASK_S, _SETTLE_S, _UNSEEN_S, _LIMIT_S = 1.0, 5.0, 10.0, 30.0
"""Between questions to squeue · for the result to show on a shared disk · for a new job to show in
the queue · for one of Slurm's commands."""
_NEVER = re.compile(
    "PartitionNodeLimit|PartitionTimeLimit|BadConstraints|MaxMemPerLimit"
    "|DependencyNeverSatisfied|ReservationDeleted"
    "|InvalidAccount|InvalidQOS|AccountNotAllowed|QOSNotAllowed"
    r"|(?:Assoc|QOS)Max\w+Per(?:Job|Node)(?:Limit)?|QOSMin\w+"
)
"""Reasons to be in the queue that do not pass by themselves."""
_STUCK_S = 60.0
"""So long such a reason must stand: nodes that are down bring some of them up for a moment."""
_MINE = f"--user={os.getuid()}"
_TASKS = "nodes N ntasks n ntasks-per-node ntasks-per-core ntasks-per-gpu ntasks-per-socket"
_ANSWERS = "array a error e job-name J open-mode output o parsable quiet Q test-only wait W wrap"
_ENDS = "requeue no-requeue signal"
_OURS = {
    **dict.fromkeys(
        _TASKS.split(),
        "a probe has one task a node; say sizes by --probes, processes a node by --workers",
    ),
    **dict.fromkeys(f"{_ANSWERS} {_ENDS}".split(), "leave it out"),
}
"""Options of sbatch that are not a user's to set, and what to do instead: another size would be
measured than is asked for, or the campaign could not follow its jobs."""


class SlurmJob:
    """A batch job."""

    def __init__(self, queue: _Queue, number: str, folder: Path) -> None:
        self.number, self._queue, self._folder = number, queue, folder
        self._submitted_s = time.monotonic()
        self._seen = self._stopped = False
        self._gone_s: float | None = None
        self._never = ""
        self._never_since_s = self._cancelled_s = math.nan

    def state(self) -> JobState:
        if self._gone_s is None:
            found = self._queue.state(self.number)
            if found is not None:
                self._seen = True
                self._cancel_if_stuck()
                return found
            # no answer says nothing, and too early a one not that a new job is gone
            asked_s = self._queue.answered_s
            if not self._seen and (asked_s is None or asked_s - self._submitted_s < _UNSEEN_S):
                return "queued"
            self._gone_s = time.monotonic()
        # its last words may take a moment to show here
        settled = time.monotonic() - self._gone_s > _SETTLE_S
        return "ended" if settled or (self._folder / RESULT_FILE).exists() else "running"

    def stop(self) -> None:
        if self._stopped or self._gone_s is not None:
            return
        if self._queue.state(self.number, now=True) == "running":
            self._stopped = True  # a second SIGTERM would cost the result
            self._queue.command("scancel", "--signal=TERM", self.number)
        else:  # if it begins right now, the next call finds it running
            self._queue.command("scancel", "--state=PENDING", self.number)

    def kill(self) -> None:
        # at once; without the signal it would be told first, and have Slurm's KillWait
        self._queue.command("scancel", "--signal=KILL", self.number)
        self._queue.command("scancel", self.number)

    def result(self) -> ProbeResult | None:
        return read_result(self._folder / RESULT_FILE)[0]

    def why(self) -> str:
        found, why = read_result(self._folder / RESULT_FILE)
        if found is not None:
            return ""
        if self._never and not math.isnan(self._cancelled_s):
            return (
                f"Slurm can never start job {self.number}: {self._never}; "
                "change what --slurm asks for, the sizes, --workers or --duration"
            )
        # the probe's own, then submitit's, which are named by job and task
        logs = sorted(self._folder.glob("node*.log"))
        logs += sorted((self._folder / "slurm").glob(f"{self.number}_*_log.*"))
        said = [line for log in logs if (line := last_line(log))]
        return f"{why}: job {self.number}" + (f" said: {said[0]}" if said else " said nothing")

    def preempted(self) -> bool:
        told = self._queue.command("scontrol", "--oneliner", "show", "job", self.number) or ""
        return "JobState=PREEMPTED" in told

    def _cancel_if_stuck(self) -> None:
        """Out of the queue, once Slurm has said for a while that it cannot start."""
        answered_s = self._queue.answered_s
        assert answered_s is not None  # or we were not in the queue
        before, self._never = self._never, self._queue.never(self.number)
        if not before:
            self._never_since_s = answered_s
        # once an answer: a controller that gives none would hold us up
        if (
            self._never
            and answered_s - self._never_since_s > _STUCK_S
            and answered_s != self._cancelled_s
        ):
            self._cancelled_s = answered_s
            self._queue.command("scancel", "--state=PENDING", self.number)


class SlurmExecutor:
    """Submits probes.

    options: of sbatch, without the dashes; they outrank ours, but for those a campaign depends on,
    which are refused (ConfigError). A probe has its nodes for itself, or two would measure each
    other; exclusive=no lets others onto them. Raises MissingDependencyError without submitit,
    ProbeError without Slurm.
    """

    name = "slurm"
    nodes = None

    def __init__(
        self, options: Mapping[str, str] | None = None, *, command: Command = command
    ) -> None:
        own = {key.replace("_", "-"): value for key, value in (options or {}).items()}
        for key in own.keys() & _OURS.keys():
            raise ConfigError(
                f"--slurm {key}={own[key]}: the campaign sets {key} of its jobs itself; "
                f"{_OURS[key]}"
            )
        try:
            import submitit
        except ImportError:
            raise MissingDependencyError(
                "the slurm executor needs submitit: pip install 'failslow[slurm]'"
            ) from None
        for tool in ("sbatch", "srun", "squeue", "scancel"):
            if shutil.which(tool) is None:
                raise ProbeError(
                    f"{tool} is not to be found; run the campaign where Slurm's commands are "
                    "installed, or use another --executor"
                )
        self._submitit = submitit
        self._options, self._command = own, command
        self._queue = _Queue()
        self._jobs: list[SlurmJob] = []
        self._cleared: set[str] = set()

    def start(self, spec: ProbeSpec, folder: Path, *, history: Sequence[Path] = ()) -> SlurmJob:
        self._clear(spec.campaign)
        folder = folder.absolute()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RESULT_FILE).unlink(missing_ok=True)
        argv = self._command(
            spec,
            out=folder / RESULT_FILE,
            folder=folder,
            history=[path.absolute() for path in history],
        )
        environ = {"FAILSLOW_TOKEN": secrets.token_hex(32)} if spec.nodes > 1 else {}
        # submitit keeps command and token in a file of this folder
        private = folder / "slurm"
        private.mkdir(mode=0o700, exist_ok=True)
        try:
            executor = self._submitit.SlurmExecutor(folder=private)
            executor.update_parameters(**self._parameters(spec))
            number = str(executor.submit(run_node, argv, environ, str(folder)).job_id)
        except Exception as error:  # submitit's own errors, and those of sbatch
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise ProbeError(f"Slurm takes no probe: {lines[-1].strip()}") from None
        job = SlurmJob(self._queue, number, folder)
        self._jobs.append(job)
        return job

    def close(self) -> None:
        for job in self._jobs:
            if job.state() != "ended":
                job.kill()

    def _clear(self, campaign: str) -> None:
        """Cancel what a run of this campaign that was killed has left in the queue."""
        if not campaign or campaign in self._cleared:
            return
        self._cleared.add(campaign)
        told = self._queue.command("squeue", "--noheader", "--format=%i %j", _MINE) or ""
        for line in told.splitlines():
            number, _, name = line.strip().partition(" ")
            if name.startswith(f"failslow-{campaign}-"):
                self._queue.command("scancel", number)

    def _parameters(self, spec: ProbeSpec) -> dict[str, object]:
        own = self._options
        options = {
            "no-requeue": True,
            "exclusive": True,
            "signal": f"TERM@{_WARNING_S}",
            "time": math.ceil((spec.duration_s + _START_UP_S) / 60),
            "cpus-per-task": spec.workers_per_node,
            **({"gpus-per-node": spec.workers_per_node} if spec.preset == "gpu" else {}),
            **own,
        }
        if options["exclusive"] == "no":
            del options["exclusive"]
        if "cpus-per-gpu" in own and "cpus-per-task" not in own:
            del options["cpus-per-task"]  # sbatch takes one of them
        # a step does not inherit this one (Slurm 22.05 and later)
        cores = options.get("cpus-per-task")
        return {
            "job_name": f"failslow-{spec.probe_id}",
            "nodes": spec.nodes,
            "ntasks_per_node": 1,
            "srun_args": [f"--cpus-per-task={cores}"] if cores else None,
            "additional_parameters": options,
        }


class _Queue:
    """What squeue says of this user's jobs, asked at most once a second for all."""

    def __init__(self) -> None:
        self._states: dict[str, tuple[str, str]] = {}
        """By job: its state, and the reason for it."""
        self._asked_s: float | None = None
        self.answered_s: float | None = None
        """When (time.monotonic) the question was asked that was answered last."""

    def state(self, number: str, *, now: bool = False) -> Literal["queued", "running"] | None:
        """None: not in the queue (any more). now: ask again in any case."""
        now_s = time.monotonic()
        if now or self._asked_s is None or now_s - self._asked_s > _ASK_S:
            told = self.command("squeue", "--noheader", "--format=%i %T %r", _MINE)
            # a controller that does not answer has not ended our jobs
            if told is not None:
                self.answered_s = now_s
                lines = (line.split(None, 2) for line in told.splitlines())
                self._states = {
                    line[0]: (line[1], " ".join(line[2:])) for line in lines if len(line) > 1
                }
            self._asked_s = now_s
        found, _ = self._states.get(number, (None, ""))
        if found is None:
            return None
        return "queued" if found in ("PENDING", "CONFIGURING") else "running"

    def never(self, number: str) -> str:
        """Why it waits, by the last answer, if that is a reason for which it can never start."""
        found, reason = self._states.get(number, ("", ""))
        return reason if found == "PENDING" and _NEVER.fullmatch(reason.strip()) else ""

    @staticmethod
    def command(*argv: str) -> str | None:
        """What it prints; None where it fails."""
        try:
            done = subprocess.run(
                argv, capture_output=True, text=True, timeout=_LIMIT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout if done.returncode == 0 else None
