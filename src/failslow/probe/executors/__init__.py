"""Where a campaign's probes run: this machine, Slurm, or Ray. One contract for all.

In: a `ProbeSpec`. Out: a `Job` to look at, to stop, and to ask for its `ProbeResult`.
"""

from __future__ import annotations

from failslow.probe.executors.base import Executor, Job, JobState
from failslow.probe.executors.local import LocalExecutor, Seat

__all__ = ["Executor", "Job", "JobState", "LocalExecutor", "Seat"]
