"""Workers of a pause meet at the training's store, and leave it as small as it was."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from tests.transport.servers import until
from torch._C._distributed_c10d import TCPStore

from failslow.localize.benchmarks.helper import Helper
from failslow.localize.benchmarks.meeting import Meeting, NoMeeting

LIMIT_S = 20.0


def meet(meeting: Meeting, rank: int) -> None:
    """What a worker does in a stage in which it sends to the other one."""

    def connect(pair: Any, limit_s: float) -> Any:
        return dist.ProcessGroupGloo(pair, rank, 2, timedelta(seconds=limit_s))

    meeting.connect(1 - rank, 3, connect, LIMIT_S)
    meeting.finish(3)
    meeting.await_others(3, [0, 1], LIMIT_S)
    meeting.give_up(1 - rank, 3)


def test_of_a_pause_nothing_is_left_in_the_store_after_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Thousands of workers left some keys each at every pause, for as long as training went on."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("trainer", "1")
    former: list[list[str]] = [[], []]
    for number in range(3):
        helpers = [Helper(f"rank {rank}") for rank in (0, 1)]
        meetings = [
            Meeting(store, name=f"pause-{number}", rank=r, helper=helpers[r], limit_s=LIMIT_S)
            for r in (0, 1)
        ]
        threads = [threading.Thread(target=meet, args=(meetings[r], r)) for r in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(3 * LIMIT_S)
        for rank in (0, 1):  # each is a process of its own
            monkeypatch.setattr(Meeting, "_former", former[rank])
            meetings[rank].close()
            former[rank] = Meeting._former
            helpers[rank].end()
        left = [key for key in store.list_keys() if key != "trainer"]
        assert len(left) >= 6
        assert {key.split("/")[1] for key in left} == {f"pause-{number}"}, left
    assert store.check(["trainer"])


class Slow(TCPStore):
    """Its host's resolver does not answer."""

    def clone(self) -> Any:
        time.sleep(1.0)
        return super().clone()  # type: ignore[misc]  # its stub lacks it


def test_a_connection_that_takes_longer_than_a_pause_is_there_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where DNS does not answer it takes ten seconds: no link was ever measured."""
    monkeypatch.setattr(Meeting, "_kept", None)
    monkeypatch.setattr(Meeting, "_former", [])
    store = Slow("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    helper = Helper("too slow")
    with pytest.raises(NoMeeting, match="connecting to the store: no answer"):
        Meeting(store, name="1", rank=0, helper=helper, limit_s=0.1)
    until(lambda: Meeting._kept is not None)
    for name in ("2", "3"):
        helper = Helper(name)
        meeting = Meeting(store, name=name, rank=0, helper=helper, limit_s=0.1)
        meeting.finish(0)
        meeting.close()
        helper.end()
    assert store.list_keys() == ["failslow/3/done/0/0"]
