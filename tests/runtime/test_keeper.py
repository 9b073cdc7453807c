"""Who starts the supervisor again where it was killed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from tests.transport.servers import until

from failslow.runtime.folder import RunFolder
from failslow.runtime.launch import Keeper, _Supervisor


class Kept:
    """A keeper of a supervisor that only leaves a line in `starts`."""

    def __init__(self, folder: Path) -> None:
        self.starts = folder / "starts"
        self.environ = {
            "FAILSLOW_CAPTURE_FOLDER": str(folder),
            "FAILSLOW_NODE": "n1",
            "PATH": os.environ["PATH"],
        }
        self.run = RunFolder("job", self.environ)
        command = ("/bin/sh", "-c", f"echo started >> {self.starts}")
        self.keeper = Keeper(_Supervisor(command, folder / "run", self.environ), self.run.path)

    def looks(self, count: int) -> list[bool]:
        return [self.keeper.look() for _ in range(count)]

    def started(self) -> int:
        return len(self.starts.read_text().split()) if self.starts.exists() else 0


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path)


def test_an_agent_alone_is_not_enough(kept: Kept) -> None:
    supervisor, agent = kept.run.lock("supervisor-n1"), kept.run.lock("agent-n1")
    assert supervisor is not None
    assert agent is not None
    assert kept.looks(1) == [False]
    os.close(supervisor)  # and with it, perhaps, the controller
    assert kept.looks(2) == [False, True]
    os.close(agent)


def test_while_the_supervisor_lives_nothing_is_started(kept: Kept) -> None:
    lock = kept.run.lock("supervisor-n1")
    assert lock is not None
    assert not any(kept.looks(50))
    os.close(lock)


def test_killed_it_is_started_again_and_given_time_to_come_up(kept: Kept) -> None:
    lock = kept.run.lock("supervisor-n1")
    assert lock is not None
    assert kept.looks(1) == [False]
    os.close(lock)  # what a kill does
    assert kept.looks(2) == [False, True]
    until(lambda: kept.started() == 1, 20.0)
    assert not any(kept.looks(8)), "on a busy machine it takes long to come up"
    assert any(kept.looks(8))
    until(lambda: kept.started() == 2, 20.0)


def test_one_that_was_told_to_end_is_not_started_again(kept: Kept) -> None:
    lock = kept.run.lock("supervisor-n1")
    assert lock is not None
    kept.keeper.look()
    os.close(lock)
    assert kept.run.tidy()
    assert not any(kept.looks(50))
    RunFolder("job", kept.environ)  # another start of the job
    assert not any(kept.looks(50))


def test_a_look_costs_microseconds(kept: Kept) -> None:
    lock = kept.run.lock("supervisor-n1")
    assert lock is not None
    kept.keeper.look()
    took_s = []
    for _ in range(200):
        begun_s = time.perf_counter()
        kept.keeper.look()
        took_s.append(time.perf_counter() - begun_s)
    os.close(lock)
    assert sorted(took_s)[100] < 1e-3 * kept.keeper.EVERY_S / 100, "under 0.001 % of the time"
