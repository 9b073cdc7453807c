"""The test bed with what train_ddp.py records."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from failslow import lab

__all__ = ["TRAIN_DDP", "Iteration", "TestBed", "until"]

TRAIN_DDP = Path(__file__).with_name("train_ddp.py")


@dataclass(frozen=True)
class Iteration:
    """One iteration as train_ddp.py timed it itself; times are CLOCK_MONOTONIC seconds."""

    step: int
    start_s: float
    end_s: float
    compute_s: float
    sync_s: float

    @property
    def duration_s(self) -> float:
        """Start to end."""
        return self.end_s - self.start_s


class TestBed(lab.TestBed):
    """Knows the iterations of train_ddp.py."""

    __test__ = False  # not a test, for all its name

    def iterations(self, rank: int) -> list[Iteration]:
        """What train_ddp.py has recorded so far on `rank`."""
        try:
            text = (self.folder / f"rank{rank}.jsonl").read_text(encoding="utf-8")
        except FileNotFoundError:
            return []
        whole = text[: text.rfind("\n") + 1]
        rows = (json.loads(line) for line in whole.splitlines())
        return [Iteration(**row) for row in rows if "step" in row]

    def until_iterations(self, count: int, *, rank: int = 0, limit_s: float = 60.0) -> None:
        """Until `rank` has made `count` more iterations from now."""
        goal = len(self.iterations(rank)) + count

        def reached() -> bool:
            self.check()
            return len(self.iterations(rank)) >= goal

        until(reached, limit_s)


def until(condition: Callable[[], object], limit_s: float = 30.0) -> None:
    """Wait for `condition`; AssertionError after `limit_s`."""
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {limit_s} s"
        time.sleep(0.02)
