"""What a job that a slow host is left out of says of itself, whatever launches it.

In: the folder of `elastic_train`, and the run's journal in it. Out: entries, losses, restarts.
"""

from __future__ import annotations

from pathlib import Path

from tests.runtime.elastic_train import MICROBATCHES, MODEL

from failslow.demo.job import losses_without
from failslow.journal import GrowingJournal, JournalEntry

__all__ = ["SETTINGS", "ElasticRun", "assert_went_on"]

SETTINGS = {
    "FAILSLOW_DETECT_MIN_DURATION_S": "2",
    "FAILSLOW_LOCALIZE_PAUSES_PER_HOUR": "1000",
    "FAILSLOW_LOCALIZE_MAX_PAUSE_SHARE": "1",
    "FAILSLOW_LOCALIZE_RECHECK_S": "3",
    "FAILSLOW_DECIDE_REDISTRIBUTE_COST_S": "100000",
    "FAILSLOW_DECIDE_TOPOLOGY_COST_S": "100000",
    "FAILSLOW_DECIDE_RESTART_COST_S": "2",
}


class ElasticRun:
    """A job of three workers; all nodes share `folder`, as a cluster's file system has it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._journal = GrowingJournal(folder / "run" / "journal.jsonl")

    def entries(self, kind: str) -> list[JournalEntry]:
        self._journal.refresh()
        return [entry for entry in self._journal.entries if entry.kind == kind]

    def restarts(self) -> list[JournalEntry]:
        return [e for e in self.entries("action") if e.record.get("what") == "restart"]

    def losses(self, world: int) -> list[float]:
        try:
            lines = (self.folder / f"losses{world}.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [float(line) for line in lines]

    def saved_steps(self) -> int:
        return int((self.folder / "checkpoint" / "latest").read_text().removeprefix("step-"))

    def is_known(self) -> bool:
        """All three workers were benchmarked in healthy times, and the healthy level is known."""
        ranks = {
            result["rank"]
            for entry in self.entries("validation")
            if entry.record.get("why") == "reference" and entry.record.get("ok")
            for result in entry.record["results"]
            if result["do"] == "gemm"
        }
        return ranks == {0, 1, 2} and len(self.losses(3)) > 60


def assert_went_on(losses: list[float], folder: Path, *, world: int, saved: int) -> None:
    """They are those of a training in `folder` that nothing happens to, past `saved` steps too."""
    plain = losses_without(
        folder,
        layout=("--dp", str(world)),
        microbatches=MICROBATCHES,
        steps=len(losses),
        model=MODEL,
        workers=world,
    )
    assert len(plain) >= saved + 20
    apart = max(abs(a - b) for a, b in zip(losses, plain, strict=True))
    assert apart < 1e-5
