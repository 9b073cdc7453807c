"""The controller's brain. Events in, instructions out; no clock, no socket, no torch.

    pipeline = Pipeline(launch="41822-991")
    for instruction in pipeline.handle(event, now_s): ...

`handle` is the only thing that changes it, and the same events at the same times give the same
instructions. `now_s` is epoch seconds on a clock that never goes back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import median

from failslow.config import DecideConfig, DetectConfig, LocalizeConfig, RuntimeConfig
from failslow.detect import Detector
from failslow.journal import JournalEntry
from failslow.localize.windows import on_job_clock
from failslow.pipeline.episodes import EpisodeBook
from failslow.pipeline.health import HealthBook
from failslow.pipeline.inquiry import Inquiry
from failslow.pipeline.messages import (
    AgentBeat,
    BusReport,
    Event,
    Instruction,
    Report,
    Say,
    WorkerSamples,
    Write,
)
from failslow.pipeline.past import read_past
from failslow.pipeline.remedy import Remedy
from failslow.pipeline.series import JobSeries, JobStep, Worker
from failslow.records import Culprit, StepSample

__all__ = ["Pipeline"]

_SLOW_SAMPLES = 5
_ALIVE_S = 10.0


@dataclass(slots=True)
class _Summary:
    """One worker's iterations since its last record."""

    due_s: float = 0.0
    iterations: int = 0
    total_s: float = 0.0
    compute_s: float | None = 0.0
    last: StepSample | None = None

    def take(self, sample: StepSample) -> None:
        self.iterations += sample.iterations
        self.total_s += sample.duration_s * sample.iterations
        if sample.compute_s is None or self.compute_s is None:
            self.compute_s = None
        else:
            self.compute_s += sample.compute_s * sample.iterations
        self.last = sample


class Pipeline:
    """Watches one job.

    launch: names this start of the job, the same when only the controller is started again.
    since_t: epoch seconds at which the job was started; older samples are of an earlier start.
    alone: workers of other nodes cannot report, for want of a token.
    """

    def __init__(
        self,
        *,
        launch: str,
        detect: DetectConfig | None = None,
        runtime: RuntimeConfig | None = None,
        decide: DecideConfig | None = None,
        localize: LocalizeConfig | None = None,
        since_t: float = 0.0,
        alone: bool = False,
    ) -> None:
        self._launch = launch
        self._detect = detect or DetectConfig()
        self._runtime = runtime or RuntimeConfig()
        self.series = JobSeries(wait_s=self._runtime.wait_s, since_t=since_t)
        self.health = HealthBook(
            blind_after_s=self._runtime.blind_after_s,
            stall_after_s=self._runtime.stall_after_s,
            alone=alone,
        )
        self._detector = Detector(self._detect)
        self._episodes = EpisodeBook(self._detect, update_s=self._runtime.update_s)
        decide = decide or DecideConfig()
        self.remedy = Remedy(decide, workers=self.series.workers)
        self.inquiry = Inquiry(
            localize or LocalizeConfig(),
            decide.mode,
            ranks=lambda: self.health.living,
            ahead_s=self.series.ahead_s,
            own=self.remedy.own_slowdowns,
            decide=self.remedy.verdict,
        )
        self._summaries: dict[int, _Summary] = {}
        self._foreign = False
        self._last: JobStep | None = None
        self._advanced_s: float | None = None
        self._alive_s = 0.0
        self._job_start_t: float | None = None

    @property
    def episode(self) -> str | None:
        """Id of the episode that is on."""
        return self._episodes.active

    @property
    def urgent(self) -> bool:
        """Whether workers stand still, or a culprit is being looked for."""
        return self.inquiry.urgent

    @property
    def healthy_iteration_s(self) -> float | None:
        """What an iteration of the present work takes when healthy; None before that is known."""
        base_log_s, more = self._detector.base_log_s, self._detector.explained_log_s
        return None if base_log_s is None else math.exp(base_log_s + more)

    def handle(self, event: Event, now_s: float) -> list[Instruction]:
        """Take one event; what is to be done now."""
        if isinstance(event, WorkerSamples):
            return self._samples(event, now_s)
        if isinstance(event, AgentBeat):
            out = self.health.beat(event, now_s)
            self.series.expect(worker.rank for worker in event.workers if worker.alive)
            gone = [w.rank for w in event.workers if event.leaving or not w.alive]
            self.series.dismiss(gone)
            return out
        if isinstance(event, BusReport):
            return self.health.bus(event, now_s)
        if isinstance(event, Report) and _is_unasked(event):
            body = on_job_clock(event.body, self.series.ahead_s(event.node)) | {"node": event.node}
            return [Write(kind=event.topic, record=body, t=now_s)]
        if isinstance(event, Report):
            asked = self.remedy if event.topic in ("steer", "act", "restart") else self.inquiry
            return asked.report(event, now_s)
        return self._tick(now_s)

    def finish(self, now_s: float) -> list[Instruction]:
        """The job has ended: the last records."""
        self.series.dismiss(list(self.series.workers))
        out = self._close(now_s, thorough=True)
        for worker in self.series.workers.values():
            out += self._worker_record(worker, now_s)
        if self._last is not None:
            out += self._episodes.refresh(self._last)
        return [*out, self._controller("ended", now_s, "the job has ended")]

    # -- events ------------------------------------------------------------------------------------

    def _samples(self, event: WorkerSamples, now_s: float) -> list[Instruction]:
        starts = self.series.starts
        worker, fresh = self.series.add(event, now_s)
        out: list[Instruction] = []
        if self.series.starts > starts:
            self.inquiry.restarted(now_s)
            out += self.remedy.restarted(now_s)
        summary = self._summaries.setdefault(event.rank, _Summary())
        healthy = not self._detector.suspected and not self.remedy.holding
        for sample in fresh:
            summary.take(sample)
            if healthy:
                worker.healthy.append(sample)
        out += self._close(now_s)
        if fresh and now_s >= summary.due_s:
            out += self._worker_record(worker, now_s)
        return out

    def _tick(self, now_s: float) -> list[Instruction]:
        out = self._close(now_s, thorough=True)
        out += self.health.look(
            self.series.workers.values(),
            advanced_s=self._advanced_s,
            usual_s=self._last.sample.duration_s if self._last else 0.0,
            now_s=now_s,
        )
        out += self.inquiry.tick(now_s, holding=self.remedy.holding)
        out += self.remedy.tick(now_s)
        if now_s - self._alive_s >= _ALIVE_S:
            out.append(self._controller("alive", now_s, ""))
            out += self.remedy.standing(now_s)
        return out

    def _close(self, now_s: float, *, thorough: bool = False) -> list[Instruction]:
        out: list[Instruction] = []
        for step in self.series.close(now_s, thorough=thorough):
            self._advanced_s = now_s
            found = self._take(step, now_s)
            tags = {"workers": step.workers, "healthy_s": self.healthy_iteration_s}
            out.append(Write(kind="step", record=step.sample, t=step.t, tags=tags))
            out += found
        return out

    # -- the job's series --------------------------------------------------------------------------

    def _take(self, step: JobStep, now_s: float) -> list[Instruction]:
        """Give one iteration to the detector."""
        self._last = step
        if self._job_start_t is None:
            self._job_start_t = step.t - step.sample.end_s
        foreign, self._foreign = self._foreign, step.sample.foreign_calls > 0
        if self._foreign and not foreign and step.run is None:
            return []  # it holds an evaluation or a checkpoint, and says so itself
        if step.run is not None and step.run.config_changed:
            for worker in self.series.workers.values():
                worker.healthy.clear()
            self.remedy.changed()
            self.inquiry.changed(now_s)
        events = self._detector.update(step.sample, step.run)
        self._episodes.held = self.remedy.holding
        heft = math.exp(self._detector.explained_log_s)
        said = self._episodes.take(step, events, self._culprits, heft=heft)
        return said + self._follow_up(step, said, now_s)

    def _follow_up(self, step: JobStep, said: list[Instruction], now_s: float) -> list[Instruction]:
        """What an iteration and what was said of it lead to."""
        out: list[Instruction] = []
        for instruction in said:
            if not isinstance(instruction, Write):
                continue
            out += self.inquiry.note(instruction, now_s, holding=self.remedy.holding)
            if instruction.event in ("suspected", "onset") and not self.remedy.holding:
                again = instruction.event == "onset"
                first_t = instruction.tags["start_t"] if again else instruction.record["first_t"]
                self.remedy.healthy(self.inquiry.healthy, before_t=first_t, again=again)
            elif instruction.event in ("relief", "abandoned"):
                out += self.remedy.relieved(
                    str(instruction.tags["id"]),
                    instruction.record.lost_s,
                    now_s,
                    abandoned=instruction.event == "abandoned",
                )
        if self._episodes.active or self.remedy.holding:
            out += self.remedy.pace(
                step,
                episode=self._episodes.active,
                slowdown=self._episodes.slowdown_now,
                lost_s=self._episodes.lost_s,
                healthy_s=self.healthy_iteration_s,
                now_s=now_s,
            )
        return out

    def _culprits(self, extra_s: float) -> tuple[Culprit, ...]:
        """Workers whose own compute time grew by half of what the job's iteration grew."""
        found, known = [], 0
        # by its micro-batches: who was given more of them is not slow
        own = self.remedy.own_slowdowns() if self.remedy.holding else None
        for worker in self.series.workers.values():
            healthy = [s.compute_s for s in worker.healthy if s.compute_s is not None]
            recent = [s.compute_s for s in worker.recent if s.compute_s is not None]
            if len(healthy) < _SLOW_SAMPLES or len(recent) < _SLOW_SAMPLES:
                continue
            now_s, usual_s = median(recent[-_SLOW_SAMPLES:]), median(healthy)
            slowdown = now_s / usual_s if usual_s > 0.0 else None
            if own is not None:
                slowdown = own.get(worker.rank)
            if slowdown is None:
                continue
            known += 1
            if slowdown < self._detect.min_slowdown:
                continue
            if now_s - now_s / slowdown >= 0.5 * extra_s:
                found.append(Culprit(rank=worker.rank, what="compute", slowdown=slowdown))
        # where all are, waiting is not told from computing, or the work has changed
        return tuple(found) if 2 * len(found) <= known else ()

    # -- records -----------------------------------------------------------------------------------

    def _worker_record(self, worker: Worker, now_s: float) -> list[Instruction]:
        summary = self._summaries.setdefault(worker.rank, _Summary())
        last = summary.last
        if last is None:
            return []
        interval_s = max(
            self._runtime.worker_interval_s,
            len(self.series.workers) / self._runtime.worker_records_per_s,
        )
        iterations = summary.iterations
        compute_s = None if summary.compute_s is None else summary.compute_s / iterations
        start_t = last.end_s if self._job_start_t is None else self._job_start_t
        record = replace(
            last,
            step=self.series.step_of(worker),
            duration_s=summary.total_s / iterations,
            end_s=max(0.0, last.end_s - start_t),
            iterations=iterations,
            compute_s=compute_s,
        )
        tags = {
            "rank": worker.rank,
            "node": worker.node,
            "worker": worker.process,
            "healthy_s": worker.healthy_s,
            "state": self._state(worker),
        }
        self._summaries[worker.rank] = _Summary(due_s=now_s + interval_s)
        return [Write(kind="step", record=record, t=last.end_s, tags=tags)]

    def _state(self, worker: Worker) -> str:
        if self.health.silent(worker.rank):
            return "silent"
        if any(culprit.rank == worker.rank for culprit in self._episodes.culprits):
            return "slow"
        return "ok"

    def _controller(self, event: str, now_s: float, message: str) -> Write:
        self._alive_s = now_s
        record = {
            "what": "controller",
            "ok": True,
            "event": event,
            "launch": self._launch,
            "healthy_s": self.healthy_iteration_s,
            "evicted": self.remedy.evictions,
            "message": message,
        }
        return Write(kind="health", record=record, t=now_s)

    # -- start -------------------------------------------------------------------------------------

    def start(self, entries: Iterable[JournalEntry], now_s: float) -> list[Instruction]:
        """Begin; `entries` is the journal's end: what it says of this launch is gone on from."""
        entries = list(entries)
        # hosts given up stay so over every start of the job
        self.remedy.evictions = _evicted(entries)
        past = read_past(entries, self._launch)
        self.remedy.recall(entries, past)
        if past is None:
            return [self._controller("started", now_s, "watching begins")]
        for entry in past.telling_steps():
            then_s = min(now_s, entry.t + past.late_s)
            self._take(self.series.restore_step(entry.record, entry.t), then_s)
        for rank, entry in past.workers.items():
            self.series.restore_worker(
                rank,
                node=str(entry.tags.get("node", "")),
                process=str(entry.tags.get("worker", "")),
                step=entry.record.step,
                end_t=entry.t,
            )
        resumed = self.remedy.resume(past, now_s)
        blind_s = max(0.0, now_s - past.last_t)
        text = f"monitoring was blind for {blind_s:.1f} s: the controller was restarted"
        if past.ended:
            text = f"the job goes on: its workers are started again after {blind_s:.1f} s"
        out: list[Instruction] = [self._controller("resumed", now_s, text), Say(text), *resumed]
        if past.episode is not None and self._episodes.ongoing is None:
            record = replace(past.episode.record, note="its beginning is lost: " + text)
            tags = {**past.episode.tags, "event": "abandoned"}
            out.append(Write(kind="episode", record=record, t=now_s, tags=tags))
        elif past.episode is not None:
            self._episodes.rename(str(past.episode.tags.get("id", "")))
        elif self._last is not None:  # its onset was not written down any more
            out += self._episodes.refresh(self._last)
        return [*out, *self.inquiry.resume(past, now_s, episode=self._episodes.active)]


def _evicted(entries: Iterable[JournalEntry]) -> int:
    """Hosts given up in all starts of the job: as last told, and what has come since."""
    count = 0
    for entry in entries:
        record = entry.record
        if not isinstance(record, dict):
            continue
        if record.get("what") == "controller" and isinstance(record.get("evicted"), int):
            count = record["evicted"]
        elif entry.kind == "action":
            count += len(record.get("evict", ()))
    return count


def _is_unasked(report: Report) -> bool:
    """Telemetry for the journal alone: no verdict may take it for the window it asked for."""
    return report.topic == "telemetry" and report.body.get("why") == "record"
