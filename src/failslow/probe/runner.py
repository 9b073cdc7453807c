"""Carries a campaign out: a thin shell around the planner, an executor and a store.

In: a `Campaign`, what every probe trains, an `Executor`, a `StoreWriter`. Out: every ended attempt
in the store, until all probes have come to an end or somebody stops it:

    with StoreWriter(path, job=job.as_dict()) as store, Stop.on_signals() as stop:
        campaign = Campaign(plan, store.attempts)
        end = run_campaign(campaign, job, store, executor, stop=stop)

To stop is to preempt what runs (SIGTERM) and to keep what it has measured; the next run of the same
campaign goes on where this one was. A second signal kills.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from failslow.errors import ConfigError, ProbeError
from failslow.probe.campaign import Campaign, Ending, Halt, Over, Start, Step, Tally, Wait
from failslow.probe.executors.base import Executor, Job
from failslow.probe.result import Preset, ProbeResult, ProbeSpec, check_duration
from failslow.probe.signals import Stop, handled
from failslow.probe.store import StoreWriter
from failslow.probe.store_parts import ProbeRecord

__all__ = ["Audience", "CampaignStop", "Limits", "TrainingJob", "run_campaign"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """What every probe of a campaign trains: results of other jobs do not compare."""

    workers_per_node: int = 4
    duration_s: float = 60.0
    preset: Preset = "cpu"
    seed: int = 0

    def __post_init__(self) -> None:
        """ConfigError where a probe would refuse it, and before a store is made of it."""
        try:
            check_duration(self.duration_s)
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def spec(self, campaign: str, start: Start) -> ProbeSpec:
        """Of one attempt."""
        return ProbeSpec(
            probe_id=f"{campaign}-{start.probe}.{start.attempt}",
            campaign=campaign,
            nodes=start.size.nodes,
            **self.as_dict(),
        )

    def as_dict(self) -> dict[str, Any]:
        """For the store."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How patient the shell is."""

    look_s: float = 0.5
    """It asks what runs this often."""
    overtime_s: float = 300.0
    """A running probe may take so much longer than its training; then it is told to end..."""
    leave_s: float = 45.0
    """...and has so long for it before it is killed."""


class Audience:
    """Told what happens; does nothing by itself."""

    def started(self, start: Start, tally: Tally) -> None:
        """An attempt was handed to the executor."""

    def ended(self, record: ProbeRecord, tally: Tally) -> None:
        """An attempt has ended, and is in the store."""

    def looked(self, tally: Tally, *, queued: int, step: Step) -> None:
        """Nothing is to be done right now. queued: of those that run, how many wait for nodes."""


class CampaignStop:
    """Whether the campaign is to end: told by a signal, or by `now`."""

    def __init__(self) -> None:
        self._event, self._signals = threading.Event(), Stop()

    @property
    def number(self) -> int | None:
        """The last signal."""
        return self._signals.number

    @property
    def is_told(self) -> bool:
        """It is to end."""
        return self._event.is_set()

    def now(self) -> None:
        """Stop it."""
        self._event.set()

    def wait(self, seconds: float) -> None:
        """As long, or until it is to end."""
        self._event.wait(seconds)

    def _told(self, number: int, _frame: object) -> None:
        before = self._signals.count
        self._signals(number)
        self._event.set()
        if self._signals.count > max(before, 1):
            raise KeyboardInterrupt

    @classmethod
    @contextmanager
    def on_signals(cls) -> Iterator[CampaignStop]:
        """SIGTERM, SIGINT and SIGHUP stop it until the block is left; the second one interrupts."""
        stop = cls()
        with handled(stop._told):
            yield stop


@dataclass(slots=True)
class _Running:
    start: Start
    job: Job
    folder: Path
    submitted_t: float
    begun_s: float | None = None
    """When it was first seen to run: until then it waits for nodes..."""
    told_s: float | None = None
    """...and when it was told to end, by a clock that nobody sets."""
    overdue: bool = False
    """Because it took too long."""


def run_campaign(
    campaign: Campaign,
    training: TrainingJob,
    store: StoreWriter,
    executor: Executor,
    *,
    stop: CampaignStop,
    audience: Audience | None = None,
    limits: Limits | None = None,
    clock: Callable[[], float] = time.time,
    ticks: Callable[[], float] = time.monotonic,
) -> Over | Halt | None:
    """Until it is over, halted, or, None, stopped. The executor is the caller's to close.

    clock: epoch seconds. ticks: seconds of a clock that is never set. Raises ProbeError where the
    store cannot be written.
    """
    run = _Run(
        campaign,
        training,
        store=store,
        executor=executor,
        audience=audience or Audience(),
        limits=limits or Limits(),
        ticks=ticks,
    )
    while True:
        now_t = clock()
        run.look(now_t)
        step = campaign.next(now_t)
        if not stop.is_told and isinstance(step, Start):
            run.start(step, now_t)
            continue
        if stop.is_told:
            run.tell_all()
        if not run.running and (stop.is_told or isinstance(step, Over | Halt)):
            return step if isinstance(step, Over | Halt) else None
        run.audience.looked(campaign.tally(), queued=run.queued, step=step)
        pause_s = run.limits.look_s
        if isinstance(step, Wait) and step.until_t is not None and not stop.is_told:
            pause_s = min(pause_s, max(0.0, step.until_t - now_t))
        if stop.is_told:
            time.sleep(pause_s)
        else:
            stop.wait(pause_s)


class _Run:
    """What runs now."""

    def __init__(
        self,
        campaign: Campaign,
        training: TrainingJob,
        *,
        store: StoreWriter,
        executor: Executor,
        audience: Audience,
        limits: Limits,
        ticks: Callable[[], float],
    ) -> None:
        self.campaign, self.training, self.store = campaign, training, store
        self.executor, self.audience, self.limits = executor, audience, limits
        self.ticks = ticks
        self.running: list[_Running] = []
        self.queued = 0

    def start(self, start: Start, now_t: float) -> None:
        folder = self.store.folder(start.probe, start.attempt)
        self.campaign.started(start.probe, now_t)
        spec = self.training.spec(self.store.campaign, start)
        try:
            job = self.executor.start(spec, folder, history=[self.store.history])
        except ProbeError as error:
            self._keep(self._record(start, now_t, now_t, ending="failed", why=str(error)))
            return
        self.running.append(_Running(start, job, folder, now_t))
        self.audience.started(start, self.campaign.tally())

    def look(self, now_t: float) -> None:
        self.queued = 0
        now_s = self.ticks()
        for one in list(self.running):
            state = one.job.state()
            if state == "ended":
                self.running.remove(one)
                self._take(one, now_t)
                continue
            if state == "queued":
                self.queued += 1
            elif one.begun_s is None:
                one.begun_s = now_s
            elif now_s - one.begun_s > self.training.duration_s + self.limits.overtime_s:
                one.overdue = one.overdue or one.told_s is None
                self._tell(one, now_s)

    def tell_all(self) -> None:
        now_s = self.ticks()
        for one in self.running:
            self._tell(one, now_s)

    def _tell(self, one: _Running, now_s: float) -> None:
        one.told_s = now_s if one.told_s is None else one.told_s
        if now_s - one.told_s > self.limits.leave_s:
            one.job.kill()
        else:
            one.job.stop()

    def _take(self, one: _Running, now_t: float) -> None:
        result = one.job.result()
        ending, why = _judge(one, result)
        if one.overdue:
            why = f"took over {self.training.duration_s + self.limits.overtime_s:g} s; {why}"
        record = self._record(one.start, one.submitted_t, now_t, ending=ending, why=why)
        self._keep(replace(record, result=result))
        if ending == "finished" and result is not None and not result.worth_keeping:
            shutil.rmtree(one.folder, ignore_errors=True)  # nobody will ask for its journal

    def _record(
        self, start: Start, submitted_t: float, now_t: float, *, ending: Ending, why: str
    ) -> ProbeRecord:
        return ProbeRecord(
            probe=start.probe,
            attempt=start.attempt,
            ending=ending,
            wanted_nodes=start.size.nodes,
            executor=self.executor.name,
            submitted_t=submitted_t,
            ended_t=max(now_t, submitted_t),
            why=why,
        )

    def _keep(self, record: ProbeRecord) -> None:
        self.store.add(record)
        self.campaign.ended(record.probe, record.ending)
        self.audience.ended(record, self.campaign.tally())


def _judge(one: _Running, result: ProbeResult | None) -> tuple[Ending, str]:
    """How it ended, and why not well."""
    if result is not None and result.state == "done":
        return "finished", ""
    if one.told_s is not None and not one.overdue:
        return "stopped", "the campaign was stopped"
    if not one.overdue and (result.state == "preempted" if result else one.job.preempted()):
        return "preempted", "told to end before its time"
    why = result.error if result is not None else one.job.why()
    return "failed", why or "it did not end by itself"
