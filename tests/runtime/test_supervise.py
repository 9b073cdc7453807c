"""When and how the supervisor starts a part again: real processes that end by themselves."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from failslow.runtime.folder import RunFolder
from failslow.runtime.supervise import _Part

NICE = 7


def ended(part: _Part, after_s: float, at_s: float) -> float:
    """Let it be started, and fail, after so long at work; how long it is to wait."""
    part.process, part.started_s = subprocess.Popen(["false"]), at_s - after_s
    part.process.wait()
    part.look(at_s)
    assert not part.done
    return part.retry_s - at_s


@pytest.fixture
def part() -> _Part:
    return _Part("agent", "agent-n1")


def test_one_that_ends_again_and_again_waits_ever_longer_and_starts_low(part: _Part) -> None:
    waits_s, low = [], []
    for number in range(10):
        waits_s.append(ended(part, after_s=60.0, at_s=100.0 * number))
        low.append(part.low)
    assert low == [False] + [True] * 9, "one kill is no habit"
    assert all(later > sooner for sooner, later in pairwise(waits_s[:6]))
    assert waits_s[-1] == 30.0


def test_one_that_ends_at_once_starts_low_at_once(part: _Part) -> None:
    ended(part, after_s=1.0, at_s=100.0)
    assert part.low


def test_one_that_was_at_work_for_minutes_starts_anew_as_at_first(part: _Part) -> None:
    for number in range(5):
        ended(part, after_s=1.0, at_s=100.0 * number)
    assert ended(part, after_s=1000.0, at_s=5000.0) < 1.0
    assert not part.low


def test_it_starts_though_its_pid_cannot_be_written(
    part: _Part, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part.lock = RunFolder("job", {"FAILSLOW_CAPTURE_FOLDER": str(tmp_path)}).lock("agent-n1")

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    monkeypatch.setattr(sys, "executable", "true")
    part.start([], 0.0, NICE)
    assert part.process is not None
    assert part.process.wait() == 0
    part.release()
