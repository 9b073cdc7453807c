"""How a probe ends, by what its workers, its nodes and the signals do. No processes."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from tests.probe.made_journal import HEALTHY_S, Made, link, verdict

from failslow.config import DetectConfig, load_config
from failslow.probe import ProbeSpec
from failslow.probe.fleet import FleetReference
from failslow.probe.job import Place
from failslow.probe.run import Progress, Stop, _await_journal, _entries, _known, _Watch


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
    did: list[str] = field(default_factory=list)

    def state(self) -> Any:
        return (self.then.pop(0) if len(self.then) > 1 else self.then[0])()

    def tell(self) -> None:
        self.did.append("tell")

    def kill(self) -> None:
        self.did.append("kill")


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


def test_training_that_hangs_is_killed(tmp_path: Path) -> None:
    made = Made()
    made.train(20, HEALTHY_S)
    made.now_t += 200.0
    made.train(1, HEALTHY_S)
    list(made.entries(tmp_path))
    spec = ProbeSpec(probe_id="p", duration_s=60.0)
    job = FakeJob(tmp_path / "journal.jsonl", states("running"), spec=spec)
    assert watched(job) == ("failed", "training did not end within 60 s; it hangs")
    assert job.did == ["kill"]


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
