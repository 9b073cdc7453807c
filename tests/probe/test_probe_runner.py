"""The shell of a campaign: with an executor by script, and with processes that train nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from tests.probe.fake_probe import fake_command
from tests.probe.probe_samples import result

from failslow.errors import ConfigError, ProbeError
from failslow.probe.campaign import (
    Campaign,
    CampaignPlan,
    Halt,
    Over,
    SizeClass,
    Start,
    Step,
    Tally,
    Wait,
)
from failslow.probe.executors import Executor, JobState, LocalExecutor
from failslow.probe.result import ProbeResult, ProbeSpec
from failslow.probe.runner import Audience, CampaignStop, Limits, TrainingJob, run_campaign
from failslow.probe.signals import Stop
from failslow.probe.store import ProbeRecord, StoreWriter, read_store

TRAINING = TrainingJob(workers_per_node=2, duration_s=10.0)


class Clock:
    """Seconds go by as they are asked for."""

    def __init__(self) -> None:
        self.now_t = 1000.0

    def __call__(self) -> float:
        self.now_t += 1.0
        return self.now_t


class ScriptedJob:
    """Ends as its script says: after so many looks, or once it is told to, or when killed."""

    def __init__(
        self,
        found: ProbeResult | None,
        *,
        looks: int,
        obeys: bool = True,
        taken_away: bool = False,
    ) -> None:
        self.found, self.looks, self.obeys = found, looks, obeys
        self.taken_away = taken_away
        self.stops = self.kills = 0

    def state(self) -> JobState:
        self.looks -= 1
        over = self.looks <= 0 or self.kills or (self.stops and self.obeys)
        return "ended" if over else "running"

    def stop(self) -> None:
        self.stops += 1

    def kill(self) -> None:
        self.kills += 1

    def result(self) -> ProbeResult | None:
        return None if self.kills else self.found

    def preempted(self) -> bool:
        return self.taken_away

    def why(self) -> str:
        return "" if self.found is not None and not self.kills else "it wrote no result"


class Scripted:
    """An executor whose probes follow a script, by name of the probe and attempt."""

    name = "scripted"
    nodes = None

    def __init__(self, script: Mapping[str, ScriptedJob | ProbeError | None]) -> None:
        self.script = script
        self.started: list[ProbeSpec] = []

    def start(self, spec: ProbeSpec, folder: Path, *, history: Sequence[Path] = ()) -> ScriptedJob:
        assert all(path.exists() for path in history)
        self.started.append(spec)
        job = self.script.get(spec.probe_id.partition("-")[2])
        if isinstance(job, ProbeError):
            raise job
        folder.mkdir(parents=True)
        (folder / "journal").touch()
        return job or ScriptedJob(result(), looks=3)

    def close(self) -> None:
        pass


class Witness(Audience):
    """Notes what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.tally: Tally | None = None

    def started(self, start: Start, _tally: Tally) -> None:
        self.lines.append(f"{start.probe}.{start.attempt} started")

    def ended(self, record: ProbeRecord, tally: Tally) -> None:
        self.lines.append(f"{record.probe}.{record.attempt} {record.ending}")
        self.tally = tally


def plan(probes: int = 2, *, spacing_s: float = 0.0, **more: int) -> CampaignPlan:
    """Of one node each."""
    sizes = (SizeClass(nodes=1, probes=probes),)
    return CampaignPlan(sizes=sizes, spacing_s=spacing_s, **more)


def carry_out(
    path: Path,
    script: Mapping[str, ScriptedJob | ProbeError | None],
    what: CampaignPlan,
    *,
    stop: CampaignStop | None = None,
    audience: Audience | None = None,
    clock: Callable[[], float] | None = None,
) -> tuple[Over | Halt | None, Sequence[ProbeRecord]]:
    """How the campaign ended, and all records of its store."""
    limits = Limits(look_s=0.0, overtime_s=20.0, leave_s=10.0)
    with StoreWriter(path, job=TRAINING.as_dict()) as store:
        campaign = Campaign(what, store.attempts)
        executor: Executor = Scripted(script)
        end = run_campaign(
            campaign,
            TRAINING,
            store,
            executor,
            stop=stop or CampaignStop(),
            audience=audience,
            limits=limits,
            clock=clock or Clock(),
            ticks=Clock(),
        )
        return end, store.records


def test_every_ending_is_kept_and_tried_again_as_it_should(tmp_path: Path) -> None:
    witness = Witness()
    failed = result(state="failed", result="unknown", error="no disk")
    script: dict[str, ScriptedJob | ProbeError | None] = {
        "1n-0001.1": ScriptedJob(result(state="preempted"), looks=2),
        "1n-0002.1": ScriptedJob(None, looks=2),
        "1n-0002.2": ScriptedJob(failed, looks=2),
        "1n-0003.1": ProbeError("the queue is full"),
    }

    end, records = carry_out(tmp_path / "s", script, plan(3, retries=1), audience=witness)

    assert end == Over()
    assert [(f"{r.probe}.{r.attempt}", r.ending, r.why) for r in records] == [
        ("1n-0001.1", "preempted", "told to end before its time"),
        ("1n-0002.1", "failed", "it wrote no result"),
        ("1n-0003.1", "failed", "the queue is full"),
        ("1n-0001.2", "finished", ""),
        ("1n-0002.2", "failed", "no disk"),
        ("1n-0003.2", "finished", ""),
    ]
    assert witness.tally == Tally(total=3, finished=2, given_up=1, running=0)
    assert witness.lines[:3] == ["1n-0001.1 started", "1n-0001.1 preempted", "1n-0002.1 started"]
    assert read_store(tmp_path / "s").records == tuple(records)


def test_only_healthy_probes_leave_no_folder(tmp_path: Path) -> None:
    slow = result(result="compute", onset_delay_s=1.0, slowdown=1.5)

    carry_out(tmp_path / "s", {"1n-0002.1": ScriptedJob(slow, looks=2)}, plan(3))

    assert [p.name for p in (tmp_path / "s" / "probes").iterdir()] == ["1n-0002.1"]


def test_a_stopped_campaign_keeps_what_was_measured_and_goes_on(tmp_path: Path) -> None:
    stop = CampaignStop()

    class Stopper(Witness):
        def started(self, start: Start, tally: Tally) -> None:
            super().started(start, tally)
            if tally.running == 2:
                stop.now()

    long = {f"1n-000{n}.1": ScriptedJob(result(state="preempted"), looks=999) for n in (2, 3)}
    end, records = carry_out(
        tmp_path / "s", {**long, "1n-0001.1": ScriptedJob(result(), looks=2)},
        plan(4, concurrency=2, retries=0), stop=stop, audience=Stopper(),
    )  # fmt: skip

    assert end is None
    assert [(r.probe, r.ending) for r in records] == [
        ("1n-0001", "finished"),
        ("1n-0002", "stopped"),
    ]

    end, records = carry_out(tmp_path / "s", {}, plan(4, concurrency=2, retries=0))
    assert end == Over()
    finished = [r for r in records if r.ending == "finished"]
    assert sorted(r.probe for r in finished) == ["1n-0001", "1n-0002", "1n-0003", "1n-0004"]
    assert {r.attempt for r in finished if r.probe == "1n-0002"} == {2}


def test_who_does_not_leave_is_killed(tmp_path: Path) -> None:
    stop = CampaignStop()
    stubborn = ScriptedJob(result(), looks=999, obeys=False)

    class Stopper(Audience):
        def started(self, _start: Start, _tally: Tally) -> None:
            stop.now()

    end, records = carry_out(
        tmp_path / "s", {"1n-0001.1": stubborn}, plan(1), stop=stop, audience=Stopper()
    )

    assert end is None
    assert stubborn.kills
    assert [(r.ending, r.result) for r in records] == [("stopped", None)]


def test_a_probe_that_hangs_is_ended_and_counts_as_failed(tmp_path: Path) -> None:
    hung = {
        "1n-0001.1": ScriptedJob(result(state="preempted"), looks=999),
        "1n-0001.2": ScriptedJob(result(state="preempted"), looks=999, obeys=False),
    }

    end, records = carry_out(tmp_path / "s", hung, plan(1, retries=1))

    assert end == Over()
    assert [r.ending for r in records] == ["failed", "failed"]
    assert records[0].why.startswith("took over 30 s; ")
    assert records[0].result is not None, "what it measured is kept"


def test_a_clock_that_is_set_ends_no_probe(tmp_path: Path) -> None:
    days = iter(range(10_000))

    end, records = carry_out(
        tmp_path / "s",
        {"1n-0001.1": ScriptedJob(result(), looks=9)},
        plan(1),
        clock=lambda: 86_400.0 * next(days),
    )

    assert end == Over()
    assert [r.ending for r in records] == ["finished"]


@pytest.fixture
def hang_up() -> Iterator[Callable[[signal.Handlers], object]]:
    """Sets what SIGHUP does: the tests themselves may run under nohup."""
    before = signal.getsignal(signal.SIGHUP)
    yield lambda handler: signal.signal(signal.SIGHUP, handler)
    signal.signal(signal.SIGHUP, before)


def test_a_terminal_that_goes_hurries_nobody(
    hang_up: Callable[[signal.Handlers], object],
) -> None:
    hang_up(signal.SIG_DFL)
    with CampaignStop.on_signals() as stop:
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
        assert (stop.is_told, stop.number) == (True, signal.SIGHUP)
        signal.raise_signal(signal.SIGTERM)  # the first that somebody sent
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGHUP)
    with Stop.on_signals() as told:
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
        assert told.count == 1
        signal.raise_signal(signal.SIGTERM)
        assert (told.count, told.number) == (1, signal.SIGTERM)
        signal.raise_signal(signal.SIGHUP)
        assert told.count == 1
        signal.raise_signal(signal.SIGINT)
        assert (told.count, told.number) == (2, signal.SIGINT)


def test_nohup_is_kept(hang_up: Callable[[signal.Handlers], object]) -> None:
    hang_up(signal.SIG_IGN)
    with CampaignStop.on_signals() as stop, Stop.on_signals() as told:
        signal.raise_signal(signal.SIGHUP)
        assert (stop.is_told, told.count) == (False, 0)
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


@pytest.mark.parametrize("seconds", [0.0, -1.0, 1e9, float("nan"), float("inf")])
def test_training_without_an_end_is_refused(seconds: float) -> None:
    with pytest.raises(ConfigError, match="must be over 0 and at most 604800, a week"):
        TrainingJob(duration_s=seconds)


def test_what_was_taken_away_before_it_measured_is_no_failure(tmp_path: Path) -> None:
    gone = {f"1n-0001.{n}": ScriptedJob(None, looks=2, taken_away=True) for n in (1, 2)}

    end, records = carry_out(tmp_path / "s", gone, plan(1, failures_in_a_row=2))

    assert end == Over()
    assert [r.ending for r in records] == ["preempted", "preempted", "finished"]


def test_a_row_of_failures_ends_it(tmp_path: Path) -> None:
    script = {f"1n-{n:04d}.1": ProbeError("no torch") for n in range(1, 9)}

    end, records = carry_out(tmp_path / "s", script, plan(8, failures_in_a_row=3))

    assert end == Halt(failures=3)
    assert [r.why for r in records] == ["no torch"] * 3

    # no fault of theirs: the same command goes on with all of them
    end, records = carry_out(tmp_path / "s", {}, plan(8, failures_in_a_row=3, retries=0))
    assert end == Over()
    assert sum(r.ending == "finished" for r in records) == 8


class Pauses(Audience):
    """Notes until when nothing may start, each once."""

    def __init__(self) -> None:
        self.until_t: list[float] = []

    def looked(self, _tally: Tally, *, queued: int, step: Step) -> None:
        del queued
        if isinstance(step, Wait) and step.until_t is not None:
            self.until_t = [*(t for t in self.until_t if t != step.until_t), step.until_t]


def test_starts_are_as_far_apart_as_the_plan_says(tmp_path: Path) -> None:
    pauses = Pauses()

    end, records = carry_out(tmp_path / "s", {}, plan(4, spacing_s=30.0), audience=pauses)

    assert end == Over()
    starts_t = [r.submitted_t for r in records]
    assert len(starts_t) == 4
    # the clock goes on by a second a look
    assert all(30.0 <= b - a <= 32.0 for a, b in pairwise(starts_t)), starts_t
    assert pauses.until_t == [t + 30.0 for t in starts_t[:-1]]


def test_a_new_run_keeps_its_distance_from_the_last_start_of_the_old(tmp_path: Path) -> None:
    clock = Clock()
    _, records = carry_out(tmp_path / "s", {}, plan(1, spacing_s=50.0), clock=clock)
    _, records = carry_out(tmp_path / "s", {}, plan(2, spacing_s=50.0), clock=clock)

    first_t, second_t = (r.submitted_t for r in records)
    assert 50.0 <= second_t - first_t <= 52.0


def test_a_stop_does_not_wait_for_the_next_start(tmp_path: Path) -> None:
    stop = CampaignStop()

    class Stopper(Audience):
        def looked(self, tally: Tally, *, queued: int, step: Step) -> None:
            del queued
            if tally.finished and isinstance(step, Wait):
                stop.now()

    end, records = carry_out(
        tmp_path / "s", {}, plan(2, spacing_s=1e6), stop=stop, audience=Stopper()
    )

    assert end is None
    assert [r.ending for r in records] == ["finished"]


def test_a_scheduler_that_is_away_for_a_minute_halts_nothing(tmp_path: Path) -> None:
    clock, pauses = Clock(), Pauses()

    class Away(Scripted):
        def start(
            self, spec: ProbeSpec, folder: Path, *, history: Sequence[Path] = ()
        ) -> ScriptedJob:
            if clock.now_t < 1060.0:
                raise ProbeError("Slurm takes no probe: unable to contact slurm controller")
            return super().start(spec, folder, history=history)

    with StoreWriter(tmp_path / "s", job=TRAINING.as_dict()) as store:
        end = run_campaign(
            Campaign(plan(6)),
            TRAINING,
            store,
            Away({}),
            stop=CampaignStop(),
            audience=pauses,
            limits=Limits(look_s=0.0),
            clock=clock,
            ticks=Clock(),
        )
        records = store.records

    assert end == Over()
    assert [r.ending for r in records] == ["failed"] * 3 + ["finished"] * 6
    failed_t = [r.submitted_t for r in records[:3]]
    assert pauses.until_t == [t + s for t, s in zip(failed_t, (10, 20, 40), strict=True)]


_CAMPAIGN = """
import sys; sys.path.insert(0, {root!r})
from dataclasses import replace
from pathlib import Path
from failslow.probe.campaign import *
from failslow.probe.executors import LocalExecutor
from failslow.probe.runner import *
from failslow.probe.store import StoreWriter
from tests.probe.fake_probe import fake_command

what = sys.argv[2]
def command(spec, **more):
    return fake_command(replace(spec, probe_id=what + "-" + spec.probe_id), **more)

plan = CampaignPlan(sizes=(SizeClass(nodes=1, probes=int(sys.argv[3])),))
training = TrainingJob(workers_per_node=1)
writer = StoreWriter(Path(sys.argv[1]), job=training.as_dict())
with writer as store, CampaignStop.on_signals() as stop:
    executor = LocalExecutor(command=command)
    class Says(Audience):
        def started(self, start, tally):
            print("started", flush=True)
    campaign = Campaign(plan, store.attempts)
    try:
        end = run_campaign(campaign, training, store, executor, stop=stop, audience=Says())
    finally:
        executor.close()
    print(end, flush=True)
"""


def campaign_process(store: Path, what: str, probes: int) -> subprocess.Popen[str]:
    """A campaign of stand-ins in a process of its own."""
    script = _CAMPAIGN.format(root=str(Path(__file__).parents[2]))
    return subprocess.Popen(
        [sys.executable, "-c", script, str(store), what, str(probes)],
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_it_and_the_same_command_goes_on(
    tmp_path: Path, number: signal.Signals
) -> None:
    store = tmp_path / "s"
    with campaign_process(store, "long", 2) as process:
        assert process.stdout is not None
        process.stdout.readline()
        _until_log(store / "probes" / "1n-0001.1" / "node0.log", "all nodes")
        process.send_signal(number)
        told, _ = process.communicate(timeout=30)
    assert told.strip() == "None"
    stopped = read_store(store).records
    assert [(r.probe, r.ending, r.result.state) for r in stopped if r.result] == [
        ("1n-0001", "stopped", "preempted")
    ]

    with campaign_process(store, "quick", 2) as process:
        told, _ = process.communicate(timeout=30)

    assert told.split() == ["started", "started", "Over()"]
    assert [(r.probe, r.attempt, r.ending) for r in read_store(store).records][1:] == [
        ("1n-0001", 2, "finished"),
        ("1n-0002", 1, "finished"),
    ]


def test_a_killed_campaign_loses_the_running_probe_and_no_more(tmp_path: Path) -> None:
    store = tmp_path / "s"
    with campaign_process(store, "quick", 3) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.readline()  # the second has started, so the first is in the store
        process.send_signal(signal.SIGKILL)
    assert [r.probe for r in read_store(store).records] == ["1n-0001"]

    with campaign_process(store, "quick", 3) as process:
        told, _ = process.communicate(timeout=30)

    assert told.split() == ["started", "started", "Over()"]
    # the lost attempt's number is not used again: what is left of it may still be ending
    assert [(r.probe, r.attempt) for r in read_store(store).records] == [
        ("1n-0001", 1), ("1n-0002", 2), ("1n-0003", 1),
    ]  # fmt: skip


def test_the_default_executor_runs_a_real_store(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "s", job=TRAINING.as_dict()) as store:
        executor = LocalExecutor(command=fake_command)
        end = run_campaign(
            Campaign(plan(2, retries=0)), TRAINING, store, executor, stop=CampaignStop()
        )
        history = store.history.read_text().splitlines()

    assert end == Over()
    results = [r.result for r in read_store(tmp_path / "s").records]
    # each was given the results of those before it
    assert [r.iterations for r in results if r] == [0, 1]
    assert len(history) == 2


def _until_log(path: Path, text: str) -> None:
    from tests.testbed import until

    until(lambda: path.exists() and text in path.read_text())
