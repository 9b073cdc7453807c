"""The contract of executors: what a campaign may ask of whatever runs its probes.

In: a `ProbeSpec` and a folder. Out: a `Job`; its result is what its node of rank 0 wrote. Every
executor passes one suite of tests (tests/probe/test_probe_executors.py):

    job = executor.start(spec, folder)
    while job.state() != "ended":
        …                              # job.stop() to preempt it
    job.result()                       # None: job.why() says why there is none
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

from failslow.probe.result import ProbeResult, ProbeSpec

__all__ = ["RESULT_FILE", "Command", "Executor", "Job", "JobState", "last_line", "read_result"]

JobState = Literal["queued", "running", "ended"]
RESULT_FILE = "result.json"
_LAST_BYTES = 4096


class Job(Protocol):
    """A probe that was started. No call waits for longer than a moment."""

    def state(self) -> JobState:
        """queued: has no nodes yet · ended: nothing of it runs any more. To be asked now and then:
        an executor may go on only when it is."""

    def stop(self) -> None:
        """Preempt it: SIGTERM on all its nodes, so that it ends with what it has measured; out of
        a queue at once. Asked again, or of one that has ended, it changes nothing."""

    def kill(self) -> None:
        """End it at once, without a result."""

    def result(self) -> ProbeResult | None:
        """Of one that has ended; None where it left none, or none that can be used."""

    def why(self) -> str:
        """Of one that has ended: why there is no result, in one line; "" when there is."""

    def preempted(self) -> bool:
        """Of one that has ended without a result: whether others took its nodes away."""


class Executor(Protocol):
    """Starts probes."""

    @property
    def name(self) -> str:
        """As records of the store say it."""

    @property
    def nodes(self) -> int | None:
        """That probes can have together; None: the scheduler knows."""

    def start(self, spec: ProbeSpec, folder: Path, *, history: Sequence[Path] = ()) -> Job:
        """Start it, or put it in a queue.

        folder: its own, made if absent, for what it writes. history: files of earlier results.
        Raises ProbeError where it cannot be, with the remedy.
        """

    def close(self) -> None:
        """End what still runs, and give back what was taken."""


class Command(Protocol):
    """What makes a probe's command line: `failslow.probe.result.command`."""

    def __call__(
        self,
        spec: ProbeSpec,
        *,
        out: str | Path | None = None,
        folder: str | Path | None = None,
        history: Sequence[str | Path] = (),
        node_rank: int | None = None,
        rendezvous: str | None = None,
    ) -> tuple[str, ...]:
        """The arguments."""


def read_result(path: Path) -> tuple[ProbeResult | None, str]:
    """The result in a file, or None and why not."""
    try:
        return ProbeResult.from_json(path.read_bytes(), where=str(path)), ""
    except FileNotFoundError:
        return None, "it wrote no result"
    except (OSError, ValueError) as error:
        return None, f"its result cannot be used: {error}"


def last_line(log: Path) -> str:
    """The last thing that was printed, for errors; "" for nothing."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _LAST_BYTES))
            lines = file.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1].strip()[:300] if lines else ""
