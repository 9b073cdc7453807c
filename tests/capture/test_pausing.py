"""A process that is made to stand still in its own collective, in each mode of capture."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="capture needs torch")

import torch
import torch.distributed as dist
from hooked import records, until
from torch._C._distributed_c10d import HashStore

from failslow.capture import builder, hook, status
from failslow.capture.layout import CALL, PAUSE
from failslow.capture.pausing import Pauser
from failslow.capture.reader import RingReader
from failslow.mailbox import Mailbox, mail_path

pytest_plugins = ("hooked",)


@pytest.fixture(params=["native", "dispatcher", "python"])
def mode(request: pytest.FixtureRequest) -> str:
    """All three ways of capture."""
    if request.param == "native" and not builder.extension_path().exists():
        pytest.skip("the extension is not built: python -m failslow.capture.native")
    return str(request.param)


class Agent:
    """The other end of this process's mailbox."""

    def __init__(self, reader: RingReader) -> None:
        self.reader = reader
        self.mailbox = Mailbox.open(mail_path(reader.path))
        self.heard: list[dict[str, Any]] = []

    def live(self) -> None:
        self.mailbox.attention = int(time.monotonic() * 1e3)

    def send(self, **letter: Any) -> None:
        assert self.mailbox.send({"topic": "pause", **letter})
        self.live()

    def arm(self, pause: int, at: int, *, group: int = 0, limit_s: float = 5.0) -> None:
        self.send(
            do="arm",
            id=pause,
            group=group,
            at=at,
            hold_s=5.0,
            for_s=9.0,
            script=["a"],
            limit_s=limit_s,
        )

    def hears(self, what: str, pause: int = 7) -> dict[str, Any]:
        """Wait for this word of the worker, living."""

        def found() -> list[dict[str, Any]]:
            return [one for one in self.heard if (one["say"], one["id"]) == (what, pause)]

        def there() -> bool:
            self.live()
            self.heard += self.mailbox.receive()
            return bool(found())

        until(there)
        return found()[0]


@pytest.fixture
def agent(gloo: None, watched: Callable[[], RingReader]) -> Iterator[Agent]:
    """After the first call, which makes ring and mailbox."""
    dist.all_reduce(torch.ones(1))
    yield Agent(watched())
    Pauser.runner = None


@pytest.fixture
def beside() -> Iterator[Callable[[Callable[[], None]], None]]:
    """Runs something in another thread; it must have ended well when the test does."""
    threads: list[threading.Thread] = []
    failed: list[BaseException] = []

    def start(action: Callable[[], None]) -> None:
        def body() -> None:
            try:
                action()
            except BaseException as error:
                failed.append(error)

        threads.append(threading.Thread(target=body))
        threads[-1].start()

    yield start
    for thread in threads:
        thread.join(20.0)
        assert not thread.is_alive()
    assert failed == []


Beside = Callable[[Callable[[], None]], None]


def count(reader: RingReader) -> int:
    return reader.count(0)


def test_collectives_on_all_workers_are_counted_from_the_making_of_their_group(
    agent: Agent,
) -> None:
    assert count(agent.reader) == 1
    dist.barrier()
    with hook.quiet():
        dist.barrier()  # our own
    dist.broadcast(torch.ones(2), 0)
    assert count(agent.reader) == 3
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    dist.barrier()
    assert count(agent.reader) == 1
    assert len(agent.reader.groups()) == 1


def test_threads_lose_no_call(agent: Agent, beside: Beside) -> None:
    groups = [dist.new_group([0]) for _ in range(3)]

    def many(group: Any) -> None:
        for _ in range(300):
            dist.all_reduce(torch.ones(1), group=group)

    for group in groups:
        beside(lambda group=group: many(group))  # type: ignore[misc]  # default argument
    many(dist.group.WORLD)
    numbers = [g.number for g in agent.reader.groups()]
    until(lambda: [agent.reader.count(n) for n in numbers] == [301, 300, 300, 300])


def test_a_worker_stands_before_its_call_until_the_commit_and_runs_the_script(
    agent: Agent, beside: Beside
) -> None:
    ran: dict[str, Any] = {}

    def run(script: list[Any], number: int) -> list[Any]:
        ran.update(
            script=script,
            thread=threading.get_native_id(),
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
        )
        dist.barrier()  # of the script: neither counted nor recorded
        return [{"do": "a", "seconds": 0.5}]

    Pauser.runner = staticmethod(run)
    agent.arm(7, at=3)
    calls_before = len(records(agent.reader, CALL))

    def lead() -> None:
        ready = agent.hears("ready")  # heard in this process: the interpreter's lock is free
        assert ready["count"] == count(agent.reader) == 3
        assert "script" not in ran
        agent.send(do="commit", id=7)
        done = agent.hears("done")
        assert done["results"] == [{"do": "a", "seconds": 0.5}]
        assert done["error"] == ""

    beside(lead)
    dist.barrier()
    assert agent.mailbox.attention != 0
    with torch.inference_mode():
        dist.barrier()
    assert ran["script"] == ["a"]
    assert ran["thread"] != threading.get_native_id()
    assert (ran["grad"], ran["inference"]) == (True, False)
    until(lambda: any(letter["say"] == "done" for letter in agent.heard))
    dist.barrier()
    assert agent.mailbox.attention == 0
    got = agent.reader.read().records
    (stood,) = got[got["kind"] == PAUSE]
    before, after, last = got[got["kind"] == CALL]
    assert calls_before == 1
    assert before["start_ns"] < stood["start_ns"] < stood["end_ns"] <= after["start_ns"]
    assert stood["size_bytes"] == 7
    assert last["seq"] == after["seq"] + 1
    assert count(agent.reader) == 4
    assert status()["faults"] == {}


@pytest.mark.parametrize("word", ["release", "silence", "not yet"])
def test_a_worker_goes_on_without_a_commit(agent: Agent, beside: Beside, word: str) -> None:
    agent.arm(7, at=2)
    if word == "release":

        def lead() -> None:
            agent.hears("ready")
            agent.send(do="release", id=7)

        beside(lead)
    begin_s = time.monotonic()
    if word == "not yet":
        time.sleep(2.0)  # nobody is there any more when it comes to the boundary
        begin_s = time.monotonic()
    dist.barrier()
    stayed_s = time.monotonic() - begin_s
    left = agent.hears("left")
    assert ("silent" in left["why"]) == (word != "release")
    assert stayed_s < {"release": 1.0, "silence": 3.0, "not yet": 0.3}[word]
    agent.mailbox.attention = 0
    agent.send(do="commit", id=7)  # too late
    dist.barrier()
    dist.barrier()
    assert agent.mailbox.receive() == []
    assert agent.mailbox.attention == 0


def test_a_script_that_fails_or_hangs_ends_the_pause_all_the_same(
    agent: Agent, beside: Beside
) -> None:
    hang = threading.Event()

    def run(script: list[Any], number: int) -> list[Any]:
        if number == 8:
            hang.wait(20.0)
        raise RuntimeError("no room on the device")

    Pauser.runner = staticmethod(run)
    for pause, why in ((7, "no room on the device"), (8, "did not end within 0.3 s")):
        agent.arm(pause, at=count(agent.reader) + 1, limit_s=0.3)

        def lead(pause: int = pause, why: str = why) -> None:
            agent.hears("ready", pause)
            agent.send(do="commit", id=pause)
            assert why in agent.hears("done", pause)["error"]

        beside(lead)
        dist.barrier()
    agent.arm(9, at=count(agent.reader) + 1)
    dist.barrier()
    assert "has not ended yet" in agent.hears("refused", 9)["why"]
    hang.set()
    assert status()["faults"] == {}


def test_what_a_signal_raises_goes_to_the_caller(agent: Agent, beside: Beside) -> None:
    def handler(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        agent.arm(7, at=2)

        def lead() -> None:
            agent.hears("ready")
            os.kill(os.getpid(), signal.SIGUSR1)
            assert "interrupted" in agent.hears("left")["why"]

        beside(lead)
        with pytest.raises(KeyboardInterrupt):
            dist.barrier()
    finally:
        signal.signal(signal.SIGUSR1, before)
    dist.all_reduce(torch.ones(1))
    assert count(agent.reader) == 3


def test_other_threads_go_on_unless_they_come_after_the_boundary(
    agent: Agent, beside: Beside
) -> None:
    other = dist.new_group([0])
    dist.all_reduce(torch.ones(1), group=other)
    at = count(agent.reader) + 1
    agent.arm(7, at=at)
    order: list[str] = []

    def lead() -> None:
        agent.hears("ready")
        dist.all_reduce(torch.ones(1), group=other)
        order.append("other group")
        beside(late)
        until(lambda: count(agent.reader) == at + 1)
        time.sleep(0.05)
        order.append("release")
        agent.send(do="release", id=7)

    def late() -> None:
        dist.all_reduce(torch.ones(1))
        order.append("later call")

    beside(lead)
    dist.all_reduce(torch.ones(1))
    until(lambda: len(order) == 3)
    assert order == ["other group", "release", "later call"]


def test_a_forked_child_is_never_made_to_stand(agent: Agent) -> None:
    agent.arm(7, at=2)
    pid = os.fork()
    if pid == 0:
        begin_s = time.monotonic()
        recorder = hook._Installed.recorder
        if recorder is None or recorder.on or recorder.attention[0]:
            os._exit(2)
        recorder.meet(0, 2)  # even then
        os._exit(int(time.monotonic() - begin_s > 0.5))
    assert os.waitpid(pid, 0)[1] == 0
    assert count(agent.reader) == 1
    assert agent.mailbox.receive() == []
