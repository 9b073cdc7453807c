"""Throttle a process: a quota of CPU time by control group, or stop and continue by signals.

In: a pid and the speed to leave it. Out: a process that computes at that speed, until undone.

    Throttle(4711, to=0.7)      # what computed for 100 ms now takes about 143
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from failslow.errors import InjectError
from failslow.inject.cgroups import cpu_group
from failslow.inject.fault import Guarding
from failslow.inject.processes import holds_terminal, identify, refuse_process
from failslow.inject.quota import limit_process
from failslow.inject.steps import Resume

__all__ = ["METHODS", "Throttle"]

METHODS = ("auto", "cgroup", "signal")


@dataclass(frozen=True)
class Throttle:
    """Leave process `pid` the fraction `to` of its speed.

    `to` counts for each of the `threads` it computes with: together they get `to * threads`
    seconds of CPU time a second. The quota also covers its descendants of the same session and
    control group (data loaders); signals stop the process alone.
    """

    kind: ClassVar[str] = "throttle"
    pid: int
    to: float
    threads: int = 1
    method: str = "auto"

    def check(self) -> None:
        """Raises InjectError for a value out of range or a process that is refused."""
        if not 0.01 <= self.to < 1.0:
            raise InjectError(
                f"to ({self.to:g}) must be from 0.01 to below 1: the fraction of its speed "
                "that the process keeps"
            )
        if not 1 <= self.threads <= 4096:
            raise InjectError(f"threads ({self.threads}) must be from 1 to 4096")
        if self.method not in METHODS:
            raise InjectError(f"method {self.method!r} is none of {', '.join(METHODS)}")
        refuse_process(self.pid)

    def targets(self) -> tuple[str, ...]:
        """The process."""
        return (f"process {self.pid}",)

    def summary(self) -> str:
        """The process and what it keeps."""
        of = "a core" if self.threads == 1 else f"{self.threads} cores"
        return f"process {self.pid} to {self.to:.2f} of {of}"

    def target_pid(self) -> int:
        """The process."""
        return self.pid

    def start(self, guard: Guarding) -> str:
        """Set the quota, else begin to stop and continue. Raises InjectError."""
        refusal = "asked for"
        if self.method != "signal":
            try:
                return self._limit(guard)
            except (InjectError, OSError) as error:
                refusal = str(error)
                if self.method == "cgroup":
                    raise InjectError(f"no cpu quota for process {self.pid}: {refusal}") from None
        if holds_terminal(self.pid):
            raise InjectError(
                f"process {self.pid} is in the foreground of a terminal, where stopping it would "
                "hand the terminal back to the shell; start it in the background (&, or setsid)"
            )
        guard.promise(Resume(identify(self.pid)))
        guard.act("stop", str(self.pid), str(self.to))
        return f"stopped {100 * (1 - self.to):.0f} % of the time by signals ({refusal})"

    def _limit(self, guard: Guarding) -> str:
        group = cpu_group(self.pid)
        if group is None:
            raise InjectError("no cpu control group is to be seen here")
        cores = self.to * self.threads
        with guard.lock():
            path = limit_process(guard, group, self.pid, cores=cores, threads=self.threads)
        return f"cpu quota of {cores:.2f} cores in {path}"
