"""From the iterations of single workers to those of the job.

In: `WorkerSamples` in any order. Out: a `JobStep` for each iteration, once every worker that is
waited for has reported it, or the wait is over.

Synchronous workers share one iteration time, so a job's sample is the *median* over its workers.
A worker whose boundary is seen late gives one long iteration and one short one; the maximum would
make a slow iteration of each such jitter of any of 1,024 workers. A worker that is really slow
makes all others wait for it, and the median sees that.

Workers of several nodes have different clocks: only their durations are compared. Iterations are
matched by count, where a worker's count is known from its first iteration on; else one follows
the last one known of that worker, by its own clock, which outlives the agent and the controller.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from statistics import median, median_low

from failslow.pipeline.messages import WorkerSamples
from failslow.records import Run, StepSample

__all__ = ["JobSeries", "JobStep", "Worker"]

_RECENT = 16
_HEALTHY = 64
_KEPT = 4096
_OPENED = 512
_NEAR_STEPS = 3
"""A worker's own count is believed if its clock agrees within so many steps."""
_BESIDE = 0.3
"""Of an iteration: workers' ends that are no further apart are of the same one."""
_CLOCKS_AGREE_S = 1.0
"""As far apart as two samples of telemetry."""
_SETTLE_STEPS = 12
"""Workers of which each notices a change of the program within so many steps see one change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStep:
    """One iteration of the job."""

    sample: StepSample
    """`end_s` counts from the beginning of the job's first iteration."""
    t: float
    """Epoch seconds at its end, by the median of its workers' clocks."""
    workers: int
    """How many reported it."""
    run: Run | None = None
    """Given when it is the first of its run."""


class Worker:
    """One rank as the job's series knows it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.node = ""
        self.process = ""
        """`WorkerSamples.worker` of its latest samples."""
        self.starts = 0
        """Processes this rank has had, less one."""
        self.session: int | None = None
        self.index = -1
        """`step` of its last sample as its agent counts."""
        self.position = -1
        """...and in the job's series."""
        self.end_t: float | None = None
        self.skew_s: float | None = None
        """By how much its clock is ahead of the job's, as of their last iteration together."""
        self.run = 0
        self.seen_s: float | None = None
        """When its last sample came, on the controller's clock."""
        self.recent: deque[StepSample] = deque(maxlen=_RECENT)
        self.healthy: deque[StepSample] = deque(maxlen=_HEALTHY)
        """Samples of healthy times of the job."""

    @property
    def typical_s(self) -> float:
        """Usual seconds of its last iterations; 0 before there are any."""
        return median(s.duration_s for s in self.recent) if self.recent else 0.0

    @property
    def healthy_s(self) -> float | None:
        """Usual seconds of an iteration in healthy times."""
        return median(s.duration_s for s in self.healthy) if self.healthy else None


@dataclass(slots=True)
class _Bucket:
    opened_s: float
    samples: dict[int, StepSample] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    """What each worker noticed that makes this the first iteration of a run."""


class JobSeries:
    """Joins workers' iterations.

    wait_s: how long an iteration stays open for a worker that does not report it, at least.
    since_t: samples that ended before are of an earlier start of the job and left out.
    """

    def __init__(self, *, wait_s: float, since_t: float = 0.0) -> None:
        self._wait_s, self._since_t = wait_s, since_t
        self.workers: dict[int, Worker] = {}
        self._waited: set[int] = set()
        self._open: dict[int, _Bucket] = {}
        self._order: list[int] = []
        self._opened: dict[int, float] = {}
        """When the first sample came of each of the last iterations given out."""
        self._closed = -1
        """Position of the last iteration given out."""
        self._head = -1
        """The furthest position of a worker: of 100,000 it is not looked for at every newcomer."""
        self._starts: list[tuple[int, float]] = [(0, 0.0)]
        """Of each start of the workers: the position its count begins at, when that began."""
        self._shift = 0
        """What to add to a position for the step people know."""
        self._times: deque[tuple[float, int]] = deque(maxlen=_KEPT)
        self.starts = 0
        """How often the workers were started again while they were watched."""
        self._run = 0
        self._run_position = -_SETTLE_STEPS
        self._began_t: float | None = None
        self._last_end_s = 0.0
        self._recent_s: deque[float] = deque(maxlen=_RECENT)
        self.late = self.duplicates = 0
        """Samples that came after their iteration was given out; that came again."""

    def expect(self, ranks: Iterable[int]) -> None:
        """These workers exist: wait for them as for those that reported."""
        for rank in ranks:
            if rank not in self.workers:
                self.workers[rank] = Worker(rank)
                self._waited.add(rank)

    def dismiss(self, ranks: Iterable[int]) -> None:
        """These workers are gone: do not wait for them until they report again."""
        self._waited.difference_update(ranks)

    def add(self, event: WorkerSamples, now_s: float) -> tuple[Worker, list[StepSample]]:
        """Take one worker's samples; returns the worker and those that were new."""
        worker = self.workers.setdefault(event.rank, Worker(event.rank))
        restarted = self._recognise(worker, event)
        fresh = []
        for sample in event.samples:
            if sample.end_s < self._since_t:
                continue
            if worker.end_t is not None and sample.end_s <= worker.end_t:
                self._take_old(worker, sample)
                continue
            changed = restarted or ("" if sample.run == worker.run else "the program changed")
            self._follow(worker, event, sample)
            worker.run, restarted = sample.run, ""
            worker.recent.append(sample)
            fresh.append(sample)
            self._put(worker, sample, changed, now_s)
        worker.session = event.session
        if fresh:
            worker.seen_s = now_s
            # one that came too late is waited for again only if that takes no longer than the
            # wait: else the job's iterations would come later and later
            opened_s = self._opened.get(worker.position, -math.inf)
            if worker.position > self._closed or now_s - opened_s < self.patience_s:
                self._waited.add(worker.rank)
        return worker, fresh

    def close(self, now_s: float, *, thorough: bool = False) -> Iterator[JobStep]:
        """The iterations that are complete, in order.

        thorough: also look for those that wait for workers which skipped them, or for too long.
        """
        while self._order:
            position = self._order[0]
            bucket = self._open[position]
            if len(bucket.samples) < len(self._waited):
                if not thorough:
                    return
                missing = [r for r in self._waited if self.workers[r].position < position]
                if missing and now_s - bucket.opened_s < self.patience_s:
                    return
                self._waited.difference_update(missing)
            heappop(self._order)
            del self._open[position]
            self._opened[position] = bucket.opened_s
            if len(self._opened) > _OPENED:
                del self._opened[next(iter(self._opened))]
            yield self._make(position, bucket)

    def step_of(self, worker: Worker) -> int:
        """The step people know of the worker's last iteration."""
        return worker.position + self._shift

    def ahead_s(self, node: str) -> float | None:
        """By how much the node's clock is ahead of the job's; None before an iteration together.

        Iterations end in collectives: ends that are no further apart than ends may be are of clocks
        that agree.
        """
        skews = [w.skew_s for w in self.workers.values() if w.node == node and w.skew_s is not None]
        if not skews:
            return None
        ahead_s = median(skews)
        typical_s = median(self._recent_s) if self._recent_s else 0.0
        return ahead_s if abs(ahead_s) > max(_CLOCKS_AGREE_S, 0.5 * typical_s) else 0.0

    @property
    def patience_s(self) -> float:
        """How long an iteration stays open: ends of ranks may be half an iteration apart."""
        typical_s = median(self._recent_s) if self._recent_s else 0.0
        return max(self._wait_s, 0.5 * typical_s)

    # -- one worker's place in the series --------------------------------------------------------

    def _recognise(self, worker: Worker, event: WorkerSamples) -> str:
        """Note which process it is; returns why its iterations begin a run, if they do."""
        worker.node = event.node
        if worker.process in ("", event.worker):
            if worker.session != event.session and event.samples:
                worker.run = event.samples[0].run  # another agent counts runs anew
            worker.process = event.worker
            return ""
        worker.process = event.worker
        worker.starts += 1
        self.starts = max(self.starts, worker.starts)
        worker.end_t, worker.session = None, None
        worker.recent.clear()
        return "the workers were restarted"

    def _follow(self, worker: Worker, event: WorkerSamples, sample: StepSample) -> None:
        """Give the worker the position of its next sample."""
        if worker.end_t is None:
            worker.position = self._first_position(worker, event, sample)
        elif worker.session == event.session and sample.step == worker.index + 1:
            worker.position += 1
        else:
            # the count jumped, or is that of another agent: by its own clock, what was missed?
            gap_s = sample.end_s - sample.duration_s * sample.iterations - worker.end_t
            missed = max(0, round(gap_s / self._usual_s(worker, sample)))
            position = worker.position + 1 + missed
            if (beside := self._beside(worker, sample)) is not None:
                position, missed = beside, 0
            else:
                anew = sample.run != worker.run
                if (missed or anew) and worker.skew_s is not None:
                    position = self._at_time(worker, sample)
                if anew and position > self._closed:
                    # what passed for iterations before was perhaps not as many on each worker
                    position = max(position, self._head + 1)
            if missed and event.counted and worker.starts < len(self._starts):
                counted = self._starts[worker.starts][0] + sample.step
                if abs(counted - position) <= max(_NEAR_STEPS, missed // 20):
                    position = counted
            worker.position = max(worker.position + 1, position)
        if event.told:
            self._shift = sample.step - worker.position
        worker.index, worker.end_t, worker.session = sample.step, sample.end_s, event.session
        self._head = max(self._head, worker.position)

    def _first_position(self, worker: Worker, event: WorkerSamples, sample: StepSample) -> int:
        head = max(self._closed, self._head)
        if not event.counted:
            return min(self._at_time(worker, sample), head + 1) if self._times else max(head, 0)
        if worker.position < 0:  # a newcomer: to which start does it belong?
            worker.starts = max(i for i, (_, t) in enumerate(self._starts) if t <= sample.end_s)
        if worker.starts >= len(self._starts):
            # a restart counts from 0 again: it goes on where the job was
            worker.starts = len(self._starts)
            self._starts.append((head + 1 - sample.step, sample.end_s - sample.duration_s))
        return self._starts[worker.starts][0] + sample.step

    def _usual_s(self, worker: Worker, sample: StepSample) -> float:
        """Seconds its iterations take; another program's say nothing of that."""
        known_s = worker.typical_s if sample.run == worker.run else 0.0
        return known_s or sample.duration_s

    def _beside(self, worker: Worker, sample: StepSample) -> int | None:
        """The position of the iteration that is open and ended for another when the sample did."""
        if worker.skew_s is None:
            return None
        apart: list[tuple[float, int]] = []
        for position, bucket in self._open.items():
            rank, other = next(iter(bucket.samples.items()))  # of 10,000 one tells
            skew_s = self.workers[rank].skew_s
            if rank != worker.rank and skew_s is not None:
                ends_s = sample.end_s - worker.skew_s - (other.end_s - skew_s)
                apart.append((abs(ends_s), position))
        nearest_s, position = min(apart, default=(math.inf, -1))
        return position if nearest_s < _BESIDE * sample.duration_s else None

    def _at_time(self, worker: Worker, sample: StepSample) -> int:
        """The position of the iteration that ended when the sample did."""
        t = sample.end_s - (worker.skew_s or 0.0)
        last_t, last = self._times[-1]
        if t > last_t:
            return last + max(0, round((t - last_t) / self._usual_s(worker, sample)))
        place = bisect_left(self._times, (t, 0))
        near = [self._times[i] for i in (place - 1, place) if 0 <= i < len(self._times)]
        return min(near, key=lambda known: abs(known[0] - t))[1]

    def _put(self, worker: Worker, sample: StepSample, changed: str, now_s: float) -> None:
        position = worker.position
        if position <= self._closed:
            self.late += 1
            return
        bucket = self._open.get(position)
        if bucket is None:
            bucket = self._open[position] = _Bucket(now_s)
            heappush(self._order, position)
        bucket.samples[worker.rank] = sample
        if changed:
            bucket.changed.append(changed)

    def _take_old(self, worker: Worker, sample: StepSample) -> None:
        """A sample from before the worker's last one: late on its way, or here already."""
        position = worker.position - (worker.index - sample.step)
        bucket = self._open.get(position)
        if bucket is not None and worker.rank not in bucket.samples:
            bucket.samples[worker.rank] = sample
        else:
            self.duplicates += 1

    # -- the job's sample ------------------------------------------------------------------------

    def _make(self, position: int, bucket: _Bucket) -> JobStep:
        samples = list(bucket.samples.values())
        run = None
        if 2 * len(bucket.changed) >= len(samples) and self._closed >= 0:
            if position - self._run_position >= _SETTLE_STEPS:
                note = Counter(bucket.changed).most_common(1)[0][0]
                self._run += 1
                run = Run(note=note, config_changed="program" in note)
            self._run_position = position
        self._closed = position
        duration_s = median(s.duration_s for s in samples)
        t = median_low([s.end_s for s in samples])
        if self._began_t is None:
            self._began_t = t - duration_s
        self._last_end_s = max(self._last_end_s, t - self._began_t)
        self._recent_s.append(duration_s)
        self._times.append((t, position))
        for rank, sample in bucket.samples.items():
            self.workers[rank].skew_s = sample.end_s - t
        job = StepSample(
            step=position + self._shift,
            duration_s=duration_s,
            end_s=self._last_end_s,
            work=_known([s.work for s in samples]),
            run=self._run,
            compute_s=_known([s.compute_s for s in samples]),
            calls=samples[0].calls,
            foreign_calls=median_low([s.foreign_calls for s in samples]),
        )
        return JobStep(sample=job, t=t, workers=len(samples), run=run)

    # -- going on after a restart of the controller ------------------------------------------------

    def restore_step(self, step: StepSample, t: float) -> JobStep:
        """An iteration of the journal, in order, before any sample is added."""
        new_run = self._closed >= 0 and step.run != self._run
        self._run, self._closed = step.run, max(self._closed + 1, step.step)
        self._shift = step.step - self._closed
        if self._began_t is None:
            self._began_t = t - step.end_s
        self._last_end_s = step.end_s
        self._recent_s.append(step.duration_s)
        self._times.append((t, self._closed))
        return JobStep(sample=step, t=t, workers=0, run=Run() if new_run else None)

    def restore_worker(
        self, rank: int, *, node: str, process: str, step: int, end_t: float
    ) -> None:
        """The journal's last word on a worker."""
        worker = self.workers.setdefault(rank, Worker(rank))
        worker.node, worker.process, worker.end_t = node, process, end_t
        worker.position = step - self._shift
        self._head = max(self._head, worker.position)


def _known(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
