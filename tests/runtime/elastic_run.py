"""What a job that a slow host is left out of says of itself, whatever launches it.

In: the folder of `elastic_train`, and the run's journal in it. Out: entries, losses, restarts.
"""

from __future__ import annotations

from pathlib import Path

from failslow.journal import GrowingJournal, JournalEntry

__all__ = ["SETTINGS", "ElasticRun", "apart"]

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


def apart(one: list[float], other: list[float]) -> float:
    """The largest difference of two runs' losses, as far as both go."""
    return max(abs(a - b) for a, b in zip(one, other, strict=False))
