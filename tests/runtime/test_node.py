"""Following the workers of a node by their rings, and the agent's and controller's own loops."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.watched import AT_ONCE
from tests.transport.servers import until

from failslow.capture.layout import CALL, NO_GROUP, OPTIMIZER_STEP
from failslow.capture.ring import RingWriter, find_rings
from failslow.config import RuntimeConfig, TrackConfig, stages
from failslow.errors import MessageTooLargeError
from failslow.journal import JournalWriter, decode_entry, read_journal
from failslow.pipeline import Order, Pipeline, WorkerSamples, Write
from failslow.records import StepSample
from failslow.runtime.agent import Agent
from failslow.runtime.bus import Bus
from failslow.runtime.controller import Controller, SteadyClock, read_tail
from failslow.runtime.duties import Duty
from failslow.runtime.duty_pause import PauseDuty
from failslow.runtime.launch import _SETTINGS, _Supervisor, launch
from failslow.runtime.metrics import Metrics
from failslow.runtime.node import NodeWatch
from failslow.runtime.supervise import worker_lives
from failslow.runtime.transport import Endpoint, from_url
from failslow.runtime.wire import AGENTS, NEWS, ORDERS, decode, encode_order

TOKEN = "0123456789abcdef0123456789abcdef"
GONE = f"{2**22 + 1}-1"
"""A process that never was."""


@pytest.fixture
def environ(tmp_path: Path) -> Mapping[str, str]:
    return {"FAILSLOW_CAPTURE_FOLDER": str(tmp_path)}


class Trainer:
    """A worker's ring, filled as a DDP job with an optimizer hook would."""

    def __init__(self, rank: int, environ: Mapping[str, str], capacity: int = 1024) -> None:
        self.ring = RingWriter.create(
            job="job", rank=rank, world_size=2, description={}, capacity=capacity, environ=environ
        )
        self.now_ns = time.monotonic_ns()

    def iterate(self, count: int, duration_s: float = 0.1) -> None:
        for _ in range(count):
            self.now_ns += round(duration_s * 1e9)
            start, end = self.now_ns - 10_000_000, self.now_ns - 1_000_000
            self.ring.append(start, end, 5_000_000, 4096, 1000, 1, -1, 2, 1, CALL, 6, 0, 0)
            self.ring.append(
                self.now_ns, self.now_ns, 0, 0, 0, 1, -1, 0, 0, OPTIMIZER_STEP, 0, 0, NO_GROUP
            )


@pytest.fixture
def trainers(environ: Mapping[str, str]) -> Iterator[list[Trainer]]:
    made = [Trainer(0, environ), Trainer(1, environ)]
    yield made
    for trainer in made:
        trainer.ring.close()


def node_watch(environ: Mapping[str, str], said: list[str]) -> NodeWatch:
    return NodeWatch(
        node="n1",
        session=7,
        find=lambda: find_rings("job", environ),
        config=TrackConfig(),
        say=said.append,
    )


def test_every_worker_is_followed_with_times_of_day(
    environ: Mapping[str, str], trainers: list[Trainer]
) -> None:
    watch = node_watch(environ, [])
    assert watch.discover()
    assert not watch.discover()
    trainers[0].iterate(20)
    trainers[1].iterate(20, 0.2)
    events = {event.rank: event for event in watch.read()}
    assert len(events[0].samples) >= 18
    assert events[1].samples[-1].duration_s == pytest.approx(0.2)
    off_s = time.time() - time.monotonic()
    assert events[0].samples[-1].end_s == pytest.approx(trainers[0].now_ns / 1e9 + off_s, abs=0.01)
    assert events[0].counted
    assert [(s.rank, s.alive, s.source) for s in watch.states] == [
        (0, True, "optimizer"),
        (1, True, "optimizer"),
    ]
    assert list(watch.read()) == []


def test_overwritten_records_are_told(environ: Mapping[str, str]) -> None:
    trainer = Trainer(0, environ, capacity=64)
    watch = node_watch(environ, [])
    watch.discover()
    trainer.iterate(100)
    (event,) = watch.read()
    assert not event.counted
    assert watch.states[0].lost_records > 100
    trainer.ring.close()


def test_a_worker_that_ended_is_read_to_its_end_and_replaced_by_the_next(
    environ: Mapping[str, str],
) -> None:
    trainer = Trainer(0, environ)
    watch = node_watch(environ, [])
    watch.discover()
    trainer.iterate(20)
    trainer.ring.close()
    (event,) = watch.read()
    assert len(event.samples) >= 18
    assert not watch.alive
    assert not watch.states[0].alive
    following = Trainer(0, environ)
    assert watch.discover()
    assert [s.alive for s in watch.states] == [True]
    following.ring.close()


def test_what_is_no_ring_is_said_once(environ: Mapping[str, str], tmp_path: Path) -> None:
    (tmp_path / f"failslow-{os.getuid()}-job-r0-p{os.getpid()}.ring").write_bytes(b"x" * 20_000)
    said: list[str] = []
    watch = node_watch(environ, said)
    assert not watch.discover()
    assert not watch.discover()
    assert len(said) == 1
    assert "is no ring of failslow" in said[0]


def connect(url: str, sender: str) -> Endpoint:
    return Endpoint(from_url(url), job="job", sender=sender, token=TOKEN)


def agent_at(url: str, environ: Mapping[str, str], folder: Path, **more: Any) -> Agent:
    return Agent(
        node="n1",
        worker=GONE,
        watch=node_watch(environ, []),
        session=7,
        bus=Bus(lambda: url, lambda address: connect(address, "n1")),
        journal=JournalWriter(folder / "agent.jsonl"),
        blind_after_s=10.0,
        **more,
    )


def test_agent_and_controller_carry_iterations_from_rings_to_the_journal(
    environ: Mapping[str, str], trainers: list[Trainer], tmp_path: Path
) -> None:
    url = f"memory://{tmp_path.name}"
    heard = connect(url, "controller")
    metrics = Metrics(job="job", node="n1")
    agent = agent_at(url, environ, tmp_path, metrics=metrics)
    journal = JournalWriter(tmp_path / "journal.jsonl")
    pipeline = Pipeline(launch="1-1", runtime=RuntimeConfig(worker_interval_s=0.001))
    controller = Controller(worker=GONE, pipeline=pipeline, endpoint=heard, journal=journal)
    clock = SteadyClock()
    controller.start([], clock.now_s())
    trainers[0].iterate(15)
    trainers[1].iterate(15)

    def seen(count: int) -> bool:
        agent.turn(time.monotonic())
        controller.turn(clock)
        steps = [e for e in read_journal(journal.path) if e.kind == "step" and e.rank is None]
        return len(steps) >= count

    until(lambda: seen(13))
    for trainer in trainers:
        trainer.iterate(5)
        trainer.ring.close()
    until(lambda: seen(18))
    later_s = time.monotonic() + 60.0
    assert agent.turn(later_s)  # it lingers: torchrun may restart the workers
    assert not agent.turn(later_s + 10.0)
    agent.leave()
    until(lambda: not controller.turn(clock))
    controller.end(clock.now_s())
    entries = list(read_journal(journal.path))
    steps = [e.record for e in entries if e.kind == "step" and e.rank is None]
    assert [s.step for s in steps] == list(range(len(steps)))
    assert steps[-1].duration_s == pytest.approx(0.1)
    assert {e.rank for e in entries if e.kind == "step"} == {None, 0, 1}
    assert [e.record["event"] for e in entries if e.kind == "health" and "event" in e.record][
        -1
    ] == "ended"
    assert not (tmp_path / "agent.jsonl").exists()


def test_a_nodes_workers_cost_the_controller_one_message_a_turn(
    environ: Mapping[str, str], trainers: list[Trainer], tmp_path: Path
) -> None:
    """The topic holds 4,096: an iteration of 10,240 workers came as so many messages."""
    url = f"memory://{tmp_path.name}"
    heard = connect(url, "controller")
    agent = agent_at(url, environ, tmp_path)
    until(lambda: agent.turn(time.monotonic()) and bool(heard.poll(AGENTS, 0.0)))
    for trainer in trainers:
        trainer.iterate(15)
    agent.turn(time.monotonic())
    (message,) = heard.poll(AGENTS, 5.0)
    ranks = [e.rank for e in decode(message.payload) if isinstance(e, WorkerSamples)]
    assert ranks == [0, 1]


def test_what_a_bus_cannot_be_made_of_is_said_and_tried_again(tmp_path: Path) -> None:
    url, tries = f"memory://{tmp_path.name}", []

    def connects_the_second_time(address: str) -> Endpoint:
        tries.append(address)
        if len(tries) == 1:
            raise OSError("libtorch.so: cannot open shared object file")
        return connect(address, "n1")

    bus = Bus(lambda: url, connects_the_second_time)
    with pytest.raises(MessageTooLargeError, match="exceeds the limit"):
        bus.publish(AGENTS, b"x" * 300_000)
    bus.publish(AGENTS, b"kept")
    said: set[str] = set()

    def is_made() -> bool:
        bus.tend()
        said.add(bus.outage()[1])
        return bus.ready

    until(is_made)
    assert any("libtorch.so" in one for one in said)
    heard = connect(url, "controller").poll(AGENTS, 0.0)
    assert [message.payload for message in heard] == [b"kept"]


class Heard(Duty):
    """Notes its orders."""

    topic = "heard"
    acts = True

    def __init__(self) -> None:
        self.ids: list[int] = []

    def order(self, order: Order, now_s: float) -> None:
        del now_s
        self.ids.append(order.body["id"])


class Told(Heard):
    """Only reports."""

    topic = "told"
    acts = False


def test_an_agent_does_not_act_on_orders_given_before_its_start(
    environ: Mapping[str, str], tmp_path: Path
) -> None:
    url, duty, told = f"memory://{tmp_path.name}", Heard(), Told()
    controller = connect(url, "controller")
    controller.publish(ORDERS, encode_order(Order(topic="heard", body={"id": 1})))
    controller.publish(ORDERS, encode_order(Order(topic="told", body={"id": 1})))
    since_t = time.time()
    until(lambda: time.time() > since_t, 5.0)
    agent = agent_at(url, environ, tmp_path, duties=[duty, told], since_t=since_t)
    controller.publish(ORDERS, encode_order(Order(topic="heard", body={"id": 2})))

    def heard() -> bool:
        agent.turn(time.monotonic())
        return bool(duty.ids)

    until(heard)
    assert (duty.ids, told.ids) == ([2], [1])


class Paused(PauseDuty):
    """Notes what it is told to do."""

    def __init__(self) -> None:
        super().__init__("n1")
        self.told: list[str] = []

    def order(self, order: Order, now_s: float) -> None:
        del now_s
        self.told.append(order.body["do"])


def test_an_agent_stops_no_worker_for_a_pause_of_an_earlier_start(
    environ: Mapping[str, str], tmp_path: Path
) -> None:
    """Of one in mode advise, perhaps, while this one is to be observed only."""
    url, duty = f"memory://{tmp_path.name}", Paused()
    controller = connect(url, "controller")
    for do in ("survey", "arm", "commit"):
        controller.publish(ORDERS, encode_order(Order(topic="pause", body={"do": do, "id": 81})))
    since_t = time.time()
    until(lambda: time.time() > since_t, 5.0)
    agent = agent_at(url, environ, tmp_path, duties=[duty], since_t=since_t)
    controller.publish(ORDERS, encode_order(Order(topic="pause", body={"do": "release", "id": 82})))

    def heard() -> bool:
        agent.turn(time.monotonic())
        return bool(duty.told)

    until(heard)
    assert duty.told == ["release"]


def test_a_record_too_large_for_a_message_is_journaled_and_the_next_one_sent(
    tmp_path: Path,
) -> None:
    url = f"memory://{tmp_path.name}"
    heard = connect(url, "n1")
    journal = JournalWriter(tmp_path / "journal.jsonl")
    pipeline = Pipeline(launch="1-1", runtime=RuntimeConfig())
    controller = Controller(
        worker=GONE, pipeline=pipeline, endpoint=connect(url, "controller"), journal=journal
    )
    heard.poll(NEWS, 0.0)
    large = {"what": "coverage", "ok": False, "message": "x" * 2_000_000}
    small = {"what": "bus", "ok": True, "message": "well"}
    controller._do([Write(kind="health", record=record, t=1.0) for record in (large, small)])
    assert [len(e.record["message"]) for e in read_journal(journal.path)] == [2_000_000, 4]
    (message,) = heard.poll(NEWS, 5.0)
    assert decode_entry(message.payload).record["message"] == "well"


def test_a_tail_is_the_end_of_the_journal_over_its_rotation(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path / "journal.jsonl", max_bytes=4000)
    for step in range(60):
        sample = StepSample(step=step, duration_s=0.1, end_s=0.1 * step)
        writer.append(sample, t=float(step))
    writer.close()
    assert (tmp_path / "journal.jsonl.1").exists()
    everything = [e.record.step for e in read_tail(writer.path)]
    assert everything == sorted(everything)
    assert everything[-1] == 59
    tail = [e.record.step for e in read_tail(writer.path, 1000)]
    assert tail == everything[-len(tail) :]
    assert 2 <= len(tail) < 10
    assert list(read_tail(tmp_path / "none.jsonl")) == []


def test_a_process_is_known_by_pid_and_start() -> None:
    stat = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
    assert worker_lives(f"{os.getpid()}-{stat[19]}")
    assert not worker_lives(f"{os.getpid()}-{int(stat[19]) + 1}")
    assert not worker_lives(GONE)


LAUNCH = """
import json, os, sys, time
from failslow.runtime.launch import launch
began = time.monotonic()
said = [launch() is not None, launch() is not None]
took = time.monotonic() - began
try:
    os.wait()
except ChildProcessError:
    said.append("no child")
print(json.dumps([said, took, sorted(m for m in sys.modules if m in ("numpy", "pydantic"))]))
sys.stdin.read()
"""


def test_a_launch_takes_no_time_and_leaves_the_trainer_no_child(tmp_path: Path) -> None:
    environ = {k: v for k, v in os.environ.items() if not k.startswith("FAILSLOW")} | {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "FAILSLOW_JOB": "launched",
        "FAILSLOW_CAPTURE_FOLDER": str(tmp_path),
        **AT_ONCE,
    }
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCH],
        env=environ,
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        said, took_s, modules = json.loads(process.stdout.readline())
        assert said == [True, False, "no child"]
        assert took_s < 2.0  # a few ms; the machine may be busy
        # what checks settings takes its time: only where there are any
        assert modules == (["pydantic"] if AT_ONCE else [])
        lock = tmp_path / f"failslow-{os.getuid()}-launched.run" / "controller.lock"
        until(lambda: lock.exists() and lock.read_text(), 60.0)
        first_taken = Path(f"/proc/{int(lock.read_text())}/oom_score_adj")
        assert first_taken.read_text() == "1000\n", "where memory runs out, not a trainer"
        until((tmp_path / "failslow-runs" / "launched" / "journal.jsonl").exists, 60.0)
        process.communicate("")
    until(lambda: not lock.exists(), 60.0)  # all ended with the worker


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands of the supervisors that would have been started."""
    monkeypatch.delenv("FAILSLOW_AGENT", raising=False)
    commands: list[list[str]] = []
    monkeypatch.setattr(_Supervisor, "start", lambda self: commands.append([*self.command]))
    return commands


@pytest.mark.parametrize(
    "variables",
    [
        {"LOCAL_RANK": "1"},
        {"FAILSLOW_AGENT": "0"},
        {"FAILSLOW_LAUNCHED": "local-0"},
    ],
)
def test_only_the_first_worker_of_a_node_launches(
    variables: dict[str, str], tmp_path: Path
) -> None:
    environ = {"RANK": "1", "FAILSLOW_CAPTURE_FOLDER": str(tmp_path), **variables}
    assert not launch(environ)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("variable", "said"),
    [
        (("FAILSLOW_MODE", "foo"), "the job is not watched: mode = 'foo' from $FAILSLOW_MODE: "),
        (("FAILSLOW_CONFIG", "bad.toml"), "the job is not watched: cannot read the settings file "),
        (("FAILSLOW_DETECT_MIN_SLOWDOWN", "1.2"), ""),
    ],
)
def test_a_trainer_whose_settings_nobody_can_use_says_so_and_goes_on(
    variable: tuple[str, str],
    said: str,
    tmp_path: Path,
    started: list[list[str]],
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "bad.toml").write_text("[detect\n")
    name, value = variable
    if name == "FAILSLOW_CONFIG":
        value = str(tmp_path / value)
    environ = {"RANK": "0", "FAILSLOW_CAPTURE_FOLDER": str(tmp_path), name: value}
    assert launch(environ)
    assert len(started) == 1, "its controller leaves word in the journal"
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == bool(said)
    assert all(line.startswith(f"failslow: {said}") for line in lines)


def test_the_settings_a_trainer_has_checked_are_those_of_all_stages() -> None:
    assert set(_SETTINGS) == {"FAILSLOW_CONFIG", "FAILSLOW_MODE"} | {
        f"FAILSLOW_{stage.upper()}_" for stage in stages()
    }


def test_a_job_started_from_a_worker_of_another_one_launches_its_own(
    tmp_path: Path, started: list[list[str]]
) -> None:
    environ = {
        "RANK": "0",
        "MASTER_PORT": "29500",
        "FAILSLOW_CAPTURE_FOLDER": str(tmp_path),
        "FAILSLOW_DIR": str(tmp_path / "runs" / "train"),
    }
    assert launch(environ)
    assert not launch(environ), "a child of the worker"
    inner = {**environ, "MASTER_PORT": "29501"}  # as torchrun gives its workers
    assert launch(inner)
    assert not launch(inner)
    assert len(started) == 2
    journals = sorted(str(path.read_text()) for path in tmp_path.glob("*.run/journal"))
    outer = tmp_path / "runs" / "train"
    assert journals == [str(outer), str(outer / "local-29501")]


@pytest.mark.parametrize(
    ("variables", "launches"),
    [
        ({"RANK": "0", "MASTER_ADDR": "localhost"}, (True, True)),
        ({"RANK": "2", "MASTER_ADDR": "localhost"}, (False, False)),  # rank 0 is here too
        ({"RANK": "2", "MASTER_ADDR": "10.0.0.1"}, (True, False)),
        ({"RANK": "0", "MASTER_ADDR": "10.0.0.1"}, (True, True)),  # the controller is its own
        ({"RANK": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1"}, (False, False)),
    ],
)
def test_of_workers_nobody_numbered_on_their_node_one_launches(
    variables: dict[str, str],
    launches: tuple[bool, bool],
    tmp_path: Path,
    started: list[list[str]],
) -> None:
    environ = {"FAILSLOW_CAPTURE_FOLDER": str(tmp_path), **variables}
    alone = launch(dict(environ), joined=True)
    again = launch(dict(environ), joined=True)  # its lock is held: another worker's
    assert (alone is not None, again is not None) == launches
    assert all(("--controller" in command) == (variables["RANK"] == "0") for command in started)
