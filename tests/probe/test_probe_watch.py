"""How a probe ends, by what its workers, its nodes and the signals do. No processes."""

from __future__ import annotations

import fcntl
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from tests.probe.made_journal import HEALTHY_S, Made, link, verdict

from failslow.config import DetectConfig, load_config
from failslow.errors import ProbeError
from failslow.probe import ProbeSpec, run
from failslow.probe import job as probe_job
from failslow.probe.fleet import FleetReference
from failslow.probe.job import Place, ProbeJob
from failslow.probe.run import Progress, _await_journal, _entries, _known, _Watch, run_probe
from failslow.probe.signals import Stop


@dataclass
class FakeJob:
    """Workers that do what they are told to, at looks of a watcher."""

    journal: Path
    then: list[Callable[[], str]]
    """What each look finds; the last one stays."""
    spec: ProbeSpec = field(default_factory=lambda: ProbeSpec(probe_id="p", duration_s=60.0))
    place: Place = field(default_factory=Place)
    reason: str = ""
    error: str = ""
    last_words: str = "its workers said nothing"
    watchers_words: str = "run/runtime.log says nothing"
    steps: int = 0
    did: list[str] = field(default_factory=list)

    def state(self) -> Any:
        return (self.then.pop(0) if len(self.then) > 1 else self.then[0])()

    def tell(self) -> None:
        self.did.append("tell")

    def kill(self) -> None:
        self.did.append("kill")

    def __enter__(self) -> FakeJob:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Clock:
    """Stands for the module `time`: who sleeps lets it pass, and it can be set."""

    def __init__(self) -> None:
        self.now_s, self.ahead_s = 1000.0, 0.0

    def monotonic(self) -> float:
        return self.now_s

    def time(self) -> float:
        return self.now_s + 1.7e9 + self.ahead_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time of what looks after workers."""
    clock = Clock()
    monkeypatch.setattr(run, "time", clock)
    return clock


def states(*names: str) -> list[Callable[[], str]]:
    return [lambda name=name: name for name in names]  # type: ignore[misc]  # a default argument


def watched(job: FakeJob, stop: Stop | None = None) -> tuple[str, str]:
    return _Watch(job, stop or Stop(), lambda _: None).run()  # type: ignore[arg-type]  # a fake


@pytest.mark.parametrize(
    ("reason", "signals", "state"),
    [
        ("time", 0, "done"),
        ("steps", 0, "done"),
        ("steps", 1, "done"),  # it came as training had just ended
        ("told", 0, "preempted"),  # another node was
        ("told", 1, "preempted"),
        ("", 1, "preempted"),
    ],
)
def test_workers_that_end_say_why(tmp_path: Path, reason: str, signals: int, state: str) -> None:
    job = FakeJob(tmp_path / "none", states("ended"), reason=reason)
    stop = Stop()
    for _ in range(signals):
        stop(signal.SIGTERM)
    assert watched(job, stop) == (state, "")


def test_a_signal_is_passed_on_once_and_a_second_one_kills(tmp_path: Path) -> None:
    stop = Stop()
    job = FakeJob(tmp_path / "none", [])

    def signalled() -> str:
        stop(signal.SIGTERM)
        return "running"

    job.then = [signalled, *states("running", "running"), signalled, *states("running")]
    assert watched(job, stop) == ("preempted", "")
    assert job.did == ["tell", "kill"]


def test_workers_that_do_not_end_are_killed_within_seconds(tmp_path: Path) -> None:
    stop = Stop()
    stop(signal.SIGTERM)
    begin_s = time.monotonic()
    job = FakeJob(tmp_path / "none", states("running"))
    assert watched(job, stop) == ("preempted", "")
    assert job.did == ["tell", "kill"]
    assert 2.5 < time.monotonic() - begin_s < 5.0


def test_a_worker_that_failed_is_an_error_unless_its_nodes_are_taken(tmp_path: Path) -> None:
    job = FakeJob(tmp_path / "none", states("running", "failed"), error="worker 1 ended")
    assert watched(job) == ("failed", "worker 1 ended")
    assert job.did == ["kill"]

    stop = Stop()
    job = FakeJob(tmp_path / "none", [], error="worker 1: Connection closed by peer")

    def failed() -> str:
        signal_comes_later.append(time.monotonic())
        return "failed"

    signal_comes_later: list[float] = []
    job.then = [failed]
    before = signal.signal(signal.SIGALRM, lambda *_: stop(signal.SIGTERM))
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        assert watched(job, stop) == ("preempted", "")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def test_training_that_hangs_is_killed(tmp_path: Path, clock: Clock) -> None:
    made = Made()
    made.train(20, HEALTHY_S)
    list(made.entries(tmp_path))
    job = FakeJob(tmp_path / "journal.jsonl", states("running"))
    assert watched(job) == ("failed", "training did not end within 60 s; it hangs")
    assert job.did == ["tell", "kill"]
    assert clock.now_s == pytest.approx(1090.0, abs=0.5)


def test_a_clock_that_is_set_ends_no_training(tmp_path: Path, clock: Clock) -> None:
    made = Made()
    made.train(20, HEALTHY_S)
    made.now_t += 7200.0  # the journal's clock too
    made.train(20, HEALTHY_S)
    list(made.entries(tmp_path))
    clock.ahead_s = 7200.0
    job = FakeJob(tmp_path / "journal.jsonl", [*states(*["running"] * 100), *states("ended")])
    job.reason = "steps"
    assert watched(job) == ("done", "")
    assert job.did == []


def test_the_time_counts_from_the_first_iteration_seen(tmp_path: Path, clock: Clock) -> None:
    made = Made()
    made.train(20, HEALTHY_S)
    seen_s: list[float] = []
    job = FakeJob(tmp_path / "journal.jsonl", [], steps=200)

    def running() -> str:
        if clock.now_s > 1050.0 and not seen_s:
            list(made.entries(tmp_path))
            seen_s.append(clock.now_s)
        if job.did:  # they end after the step they are at, and say who asked for it
            job.reason = "told"
            return "ended"
        return "running"

    job.then = [running]
    assert watched(job) == ("done", "")
    assert job.did == ["tell"]
    assert clock.now_s - seen_s[0] == pytest.approx(60.0, abs=0.5)


def test_iterations_count_once_they_are_seen(tmp_path: Path, clock: Clock) -> None:
    spec = ProbeSpec(probe_id="p", iterations=30)
    assert "30" not in ProbeJob(spec, Place(), tmp_path, {})._arguments(), "workers train on"
    made = Made()
    job = FakeJob(tmp_path / "journal.jsonl", [], spec=spec)

    def running() -> str:
        made.train(1, HEALTHY_S)
        list(made.entries(tmp_path))
        return "ended" if job.did else "running"

    job.then = [running]
    job.reason = "told"
    assert watched(job) == ("done", "")
    assert (job.did, made.step) == (["tell"], 31)
    assert clock.now_s < 1010.0


def test_training_that_nobody_watches_is_given_up(tmp_path: Path, clock: Clock) -> None:
    job = FakeJob(tmp_path / "none", states("running"), steps=30)
    assert watched(job) == (
        "failed",
        "trained 60 s, but nothing was seen: agent or controller got no core "
        "(run/runtime.log says nothing)",
    )
    assert job.did == ["kill"]
    assert clock.now_s == pytest.approx(1060.0, abs=0.5)


def test_training_that_does_not_come_on_has_the_time_to_start(tmp_path: Path, clock: Clock) -> None:
    job = FakeJob(tmp_path / "none", states("running"), steps=1, last_words="its last words: x")
    assert watched(job) == ("failed", "no iteration within 180 s; its last words: x")
    assert clock.now_s == pytest.approx(1180.0, abs=0.5)


@pytest.mark.parametrize(
    ("trained", "told"),
    [
        (
            (0, 100),
            ("failed", "nothing was seen: agent or controller got no core (run/runtime.log "),
        ),
        ((5, 100), ("failed", "only 5 iterations were seen: agent or controller got no core")),
        (
            (9, 11),
            ("failed", "only 9 iterations were seen: that is too few to tell anything; give a "),
        ),
        ((30, 31), ("done", "")),
    ],
)
def test_a_probe_of_which_too_little_was_seen_has_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, clock: Clock, trained: tuple[int, int],
    told: tuple[str, str],
) -> None:  # fmt: skip
    (seen, steps), (state, error) = trained, told
    made = Made()
    made.train(seen, HEALTHY_S)
    list(made.entries(tmp_path))
    job = FakeJob(tmp_path / "journal.jsonl", states("running", "ended"), reason="time")
    job.steps = steps
    monkeypatch.setattr(run, "ProbeJob", lambda *_: job)
    found = run_probe(job.spec, job.place, tmp_path, {}, stop=Stop())
    assert (found.state, found.iterations) == (state, seen)
    assert error in found.error
    # a node of another rank knows nothing of it
    job.then, job.place = states("ended"), Place(node_rank=1, port=1)
    assert run_probe(job.spec, job.place, tmp_path, {}, stop=Stop()).state == "done"
    assert clock.now_s < 1100.0


class Started(ProbeJob):
    """One that trains nothing."""

    def __init__(self, folder: Path, place: Place | None = None) -> None:
        spec = ProbeSpec(probe_id="p", workers_per_node=2)
        super().__init__(spec, place or Place(), folder, {}, python="/bin/true")


def test_a_folder_that_is_used_again_keeps_the_journal_it_had(tmp_path: Path) -> None:
    for number in range(3):
        with Started(tmp_path) as job:
            assert not job.journal.exists()
            job.journal.parent.mkdir()
            job.journal.write_text(f"{number}\n")
    with Started(tmp_path, Place(node_rank=1, port=1)):
        pass  # the others use what the first node makes
    kept = [(tmp_path / name / "journal.jsonl").read_text() for name in ("run.1", "run.2", "run")]
    assert kept == ["0\n", "1\n", "2\n"]


def test_a_folder_that_another_probe_writes_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe_job, "_LINGER_S", 0.3)
    journal = tmp_path / "run/journal.jsonl"
    journal.parent.mkdir()
    with journal.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ProbeError, match="another probe writes there; wait until it has"):
            Started(tmp_path).__enter__()
    assert journal.exists()
    with Started(tmp_path):  # it has ended
        assert not journal.exists()


def test_workers_say_how_far_they_are(tmp_path: Path) -> None:
    with Started(tmp_path) as job:
        assert job.steps == 0
        lines = [f"step {n:5d}  loss 1.0000  40.0 ms\n" for n in (0, 10, 120)]
        (tmp_path / "rank0.log").write_text("".join(lines) + "ended: time\n")
        assert job.steps == 121
        assert job.watchers_words == "run/runtime.log says nothing"
        job.journal.parent.mkdir()
        (tmp_path / "run/runtime.log").write_text("failslow agent: no token\n\n")
        assert job.watchers_words == "run/runtime.log: failslow agent: no token"


def test_progress_is_what_the_journal_says_so_far(tmp_path: Path) -> None:
    made = Made()
    made.train(20, HEALTHY_S)
    made.slow(20, 2.0, verdict("e1", link(3, 2)), id="e1")
    path = tmp_path / "journal.jsonl"
    text = b"".join(line + b"\n" for line in made.lines)
    parts = [text[:1500], text[1500:]]  # cut inside a line

    def grow() -> str:
        with path.open("ab") as file:
            file.write(parts.pop(0))
        return "running"

    told: list[Progress] = []
    job = FakeJob(path, [grow, grow, *states("ended")], reason="time")
    watch = _Watch(job, Stop(), lambda now: told.append(replace(now)))  # type: ignore[arg-type]
    assert watch.run() == ("done", "")
    first, last = told
    assert (first.note, last.note) == ("healthy", "well again")
    assert 0 < first.iterations < last.iterations == 40
    assert last.train_s == pytest.approx(2.0 + 4.0, rel=0.02)
    assert last.iteration_s == pytest.approx(2 * HEALTHY_S, rel=0.03)


def test_a_journal_that_cannot_be_read_costs_progress_but_no_probe(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.mkdir()
    told: list[Progress] = []
    job = FakeJob(path, states("running", "ended"), reason="time")
    watch = _Watch(job, Stop(), lambda now: told.append(replace(now)))  # type: ignore[arg-type]
    assert watch.run() == ("done", "")
    assert [(now.note, now.iterations) for now in told] == [("starting", 0)]
    assert _entries(path) == []
    _await_journal(path, 0.2, Stop())


def test_the_detector_calls_slow_what_the_fleets_limit_does() -> None:
    """The limit for what nothing else in the probe proves."""
    fleet = FleetReference(iteration_s=0.12, limit=1.15, probes=9)
    detect = load_config("detect", DetectConfig, environ=_known(fleet))
    assert detect.healthy_iteration_s * detect.min_slowdown == pytest.approx(
        0.12 * fleet.limit_alone, rel=1e-4
    )
    assert _known(None) == {}
