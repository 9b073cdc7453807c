"""Real faults on a real watched job: how soon failslow suspects, confirms and sees the relief.

    python -m benchmarks.live [--healthy-s 180] [--faults throttle,cpu,link,flood] [--json]
                             [--keep FOLDER]

Four DDP workers (gloo), each a node of its own in the test bed (network namespaces, root needed),
FAILSLOW=1 and an unmodified script. For each fault: healthy, injected, undone. A fault bites at
the first iteration the trainer's own clock shows 15 % over healthy; delays count from there, and
relief from the moment the fault is undone. Last a healthy run. An alarm there is a confirmed
fail-slow; an early suspicion is none, since it only starts profiling, and is listed beside.

    throttle  bite 0.2 s  suspected 5 iterations  confirmed 2.6 s  relief 3.1 s
    healthy: 1024 iterations in 180 s, 0 alarms, 1 early suspicions
      suspected after 61.0 s: by the trainer's own clock x1.31 in the 2 s around it
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tests.testbed import TRAIN_DDP, TestBed, until

from failslow.inject import burn, congest, flood, throttle
from failslow.journal import GrowingJournal, JournalEntry

__all__ = ["main"]

_HEALTHY_ITERATIONS = 80
_MIN_DURATION_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What was said of one fault; None: nothing within the limit."""

    fault: str
    slowdown: float
    """Median iteration under the fault over the median before, by the trainer's own clock."""
    suspected_iterations: int | None
    """Iterations from the first one that is 15 % slow to the suspicion."""
    confirmed_s: float | None
    relief_s: float | None
    false_alarms: int
    """Suspicions and onsets before the fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What was said of a healthy run; and whether it was slow all the same, as machines are."""

    event: str
    after_s: float
    slowdown: float
    """Median iteration of the 2 s around it over that of the run, by the trainer's own clock."""


class Job:
    """A watched job in the test bed, and what its journal says."""

    def __init__(self, bed: TestBed, folder: Path) -> None:
        self.bed = bed
        self._journal = GrowingJournal(folder / "run" / "journal.jsonl")
        self.workers = bed.launch(
            TRAIN_DDP,
            args=["--seconds", "1200", "--gradient-mb", "2"],
            env={
                "FAILSLOW": "1",
                "FAILSLOW_DIR": str(folder / "run"),
                "FAILSLOW_DETECT_MIN_DURATION_S": str(_MIN_DURATION_S),
            },
            cores=[0, 1],
        )

    def said(self, *events: str) -> list[JournalEntry]:
        """Journal entries of these events: suspected, cleared, onset, relief."""
        self._journal.refresh()
        return [
            entry
            for entry in self._journal.entries
            if entry.kind in ("suspicion", "episode") and _event(entry) in events
        ]

    def durations_s(self, since: int = 0) -> list[float]:
        """The trainer's own iteration times, rank 0's."""
        return [i.duration_s for i in self.bed.iterations(0)[since:]]

    def count(self) -> int:
        """Iterations so far, by the trainer's own account."""
        return len(self.bed.iterations(0))


def _event(entry: JournalEntry) -> str:
    tags = entry.record if isinstance(entry.record, dict) else entry.tags
    return str(tags.get("event", ""))


def _faults(job: Job) -> dict[str, Callable[[], AbstractContextManager[object]]]:
    node = job.bed.nodes
    return {
        "throttle": lambda: throttle(job.workers[2].pid, to=0.3),
        "cpu": lambda: burn([0, 1], beside=job.workers[2].pid),
        "link": lambda: congest(node[2].namespace, "eth0", 50, dst=node[1].address),
        "flood": lambda: flood(node[2].namespace, node[1].namespace),
    }


def _reached(condition: Callable[[], object], limit_s: float) -> bool:
    try:
        until(condition, limit_s)
    except AssertionError:
        return False
    return True


def _one(job: Job, name: str, limit_s: float) -> Outcome:
    job.bed.until_iterations(_HEALTHY_ITERATIONS)
    earlier = len(job.said("suspected", "onset"))
    healthy_s = statistics.median(job.durations_s()[-_HEALTHY_ITERATIONS:])
    before = job.count()
    with _faults(job)[name]():
        began = time.time()
        confirmed = _reached(lambda: _after(job, "onset", began), limit_s)
        job.bed.until_iterations(5)
        slow = job.durations_s(before)
    undone = time.time()
    relieved = confirmed and _reached(lambda: _after(job, "relief", undone - 1.0), limit_s)
    ends = [i.end_s for i in job.bed.iterations(0)]
    bite = next((i for i, s in enumerate(slow) if s >= 1.15 * healthy_s), None)
    offset = time.time() - time.monotonic()
    suspicion, onset = _after(job, "suspected", began), _after(job, "onset", began)
    relief = _after(job, "relief", undone - 1.0)
    suspected = None
    if suspicion is not None and bite is not None:
        # an iteration counts when it had ended by the time of the suspicion
        seen = sum(end + offset <= suspicion.t for end in ends[before + bite :])
        suspected = max(1, seen)
    start = began if bite is None else ends[before + bite] - slow[bite] + offset
    return Outcome(
        fault=name,
        slowdown=statistics.median(slow[(bite or 0) :] or [healthy_s]) / healthy_s,
        suspected_iterations=suspected,
        confirmed_s=None if onset is None else onset.t - start,
        relief_s=relief.t - undone if relieved and relief else None,
        false_alarms=earlier,
    )


def _after(job: Job, event: str, t: float) -> JournalEntry | None:
    return next((e for e in job.said(event) if e.t >= t), None)


def _said(job: Job, began: float) -> list[Said]:
    """All since the job's start; times count from `began`, seconds since 1970."""
    iterations = job.bed.iterations(0)
    offset = time.time() - time.monotonic()
    usual_s = statistics.median(i.duration_s for i in iterations)
    found = []
    for entry in job.said("suspected", "onset"):
        near = [i.duration_s for i in iterations if abs(i.end_s + offset - entry.t) <= 1.0]
        found.append(
            Said(
                event=_event(entry),
                after_s=entry.t - began,
                slowdown=statistics.median(near or [usual_s]) / usual_s,
            )
        )
    return found


@contextmanager
def _job(keep: Path | None, name: str) -> Iterator[Job]:
    with ExitStack() as stack:
        if keep is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        else:
            folder = keep / name
            folder.mkdir(parents=True)
        bed = stack.enter_context(TestBed(nodes=4, egress_mbit=1000, folder=folder))
        job = Job(bed, folder)
        bed.until_iterations(_HEALTHY_ITERATIONS, limit_s=120)
        yield job
        bed.kill()


def main() -> None:
    """Run the faults, then the healthy stretch; print a table or JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", default="throttle,cpu,link,flood")
    parser.add_argument("--healthy-s", type=float, default=180.0)
    parser.add_argument("--limit-s", type=float, default=40.0, help="waited for each event")
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--keep", type=Path, help="a folder for journals, logs and trainers' clocks"
    )
    options = parser.parse_args()
    if reason := TestBed.available():
        sys.exit(f"no test bed here: {reason}")
    outcomes = []
    for name in filter(None, options.faults.split(",")):
        with _job(
            options.keep, name
        ) as job:  # a job for each: what one fault leaves behind is not the next's
            outcomes.append(_one(job, name, options.limit_s))
            if not options.json:
                print(outcomes[-1], file=sys.stderr)
    said: list[Said] = []
    iterations = 0
    if options.healthy_s > 0:
        with _job(options.keep, "healthy") as job:
            first, began = job.count(), time.time()
            ends = time.monotonic() + options.healthy_s
            until(lambda: time.monotonic() > ends, options.healthy_s + 10)
            said, iterations = _said(job, began), job.count() - first
    healthy = {
        "seconds": options.healthy_s,
        "iterations": iterations,
        "alarms": [asdict(s) for s in said if s.event != "suspected"],
        "suspicions": [asdict(s) for s in said if s.event == "suspected"],
    }
    if options.json:
        document = {"faults": [asdict(o) for o in outcomes], "healthy": healthy}
        print(json.dumps({"schema": "failslow.benchmark.live/3", **document}))
        return
    table = Table(title="four watched DDP workers, real faults")
    for column in ("fault", "slowdown", "suspected (iterations)", "confirmed (s)", "relief (s)"):
        table.add_column(column, justify="right")
    for o in outcomes:
        cells = (o.suspected_iterations, o.confirmed_s, o.relief_s)
        texts = [
            "-" if c is None else f"{c:.1f}" if isinstance(c, float) else str(c) for c in cells
        ]
        table.add_row(o.fault, f"x{o.slowdown:.2f}", *texts)
    Console().print(table)
    early = sum(s.event == "suspected" for s in said)
    print(
        f"healthy: {iterations} iterations in {options.healthy_s:.0f} s, {len(said) - early} "
        f"alarms, {early} early suspicions"
    )
    for one in said:
        print(
            f"  {one.event} after {one.after_s:.1f} s: by the trainer's own clock "
            f"x{one.slowdown:.2f} in the 2 s around it"
        )


if __name__ == "__main__":
    main()
