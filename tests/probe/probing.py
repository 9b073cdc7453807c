"""Runs `failslow probe run` for tests, on this machine or on the nodes of a test bed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import failslow
from failslow.journal import GrowingJournal, JournalEntry
from failslow.lab import TestBed
from failslow.probe import ProbeResult

MAIN = Path(failslow.__file__).with_name("__main__.py")


class Probe:
    """One that runs: its folder, and the result once it is there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._journal = GrowingJournal(folder / "run/journal.jsonl")
        self.out = folder / "result.json"

    def pid(self, rank: int) -> int:
        """Of a training process."""
        for path in self.folder.glob("workers-*.json"):
            pids = json.loads(path.read_text())["pids"]
            if str(rank) in pids:
                return int(pids[str(rank)])
        raise AssertionError(f"no worker {rank}")

    def entries(self, *kinds: str) -> list[JournalEntry]:
        self._journal.refresh()
        return [e for e in self._journal.entries if e.kind in kinds]

    def iterations(self) -> int:
        return sum(e.rank is None for e in self.entries("step"))

    def has_trained(self, iterations: int) -> Callable[[], bool]:
        return lambda: self.iterations() >= iterations

    def result(self) -> ProbeResult:
        return ProbeResult.from_json(self.out.read_text())

    def text(self) -> str:
        """What went wrong, for an assertion's message."""
        logs = sorted(self.folder.glob("*.log")) + sorted(self.folder.glob("run/*.log"))
        return "\n".join(f"== {p.name}\n{p.read_text(errors='replace')[-2000:]}" for p in logs)


def until(condition: Callable[[], object], limit_s: float, text: Callable[[], str]) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, text()
        time.sleep(0.1)


@contextmanager
def probe_here(folder: Path, *options: str) -> Iterator[tuple[Probe, subprocess.Popen[str]]]:
    """On this machine."""
    folder.mkdir(exist_ok=True)
    probe = Probe(folder)
    environ = {n: v for n, v in os.environ.items() if not n.startswith("FAILSLOW")}
    process = subprocess.Popen(
        [sys.executable, "-m", "failslow", "probe", "run", "--dir", str(folder),
         "--out", str(probe.out), "--json", *options],
        env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield probe, process
    finally:
        process.kill()  # what it started dies with it
        process.communicate()


@contextmanager
def probe_in_bed(
    bed: TestBed, *options: str, env: Mapping[str, str] | None = None,
    cores: Sequence[int] | None = (0, 1),
) -> Iterator[Probe]:  # fmt: skip
    """On every node of the bed, a worker each."""
    probe = Probe(bed.folder)
    arguments = ["probe", "run", "--workers", "1", "--dir", str(bed.folder)]
    arguments += ["--out", str(probe.out), "--probe-id", bed.name, *options]
    bed.launch(MAIN, args=arguments, env=env, cores=cores)
    try:
        yield probe
    finally:
        bed.kill()
