"""A real job over two nodes of the test bed: who listens where, and what a missing token costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.runtime.watched import AT_ONCE
from tests.testbed import TRAIN_DDP, TestBed

from failslow.journal import GrowingJournal, JournalEntry
from failslow.runtime.rendezvous import derived_port


class Nodes:
    def __init__(self, bed: TestBed, journal: Path) -> None:
        self.bed, self._journal = bed, GrowingJournal(journal)

    def entries(self) -> list[JournalEntry]:
        self._journal.refresh()
        return self._journal.entries

    def until(self, condition: Callable[[], object], limit_s: float = 80.0) -> None:
        deadline_s = time.monotonic() + limit_s
        while not condition():
            self.bed.check()
            assert time.monotonic() < deadline_s, [
                e.record for e in self.entries() if e.kind == "health"
            ]
            time.sleep(0.2)

    def controller(self) -> int:
        (lock,) = self.bed.nodes[0].rings.glob("*.run/controller.lock")
        return int(lock.read_text())

    def listening(self) -> set[tuple[str, int]]:
        """What the controller listens on, read in its own network namespace."""
        fds = Path(f"/proc/{self.controller()}/fd").iterdir()
        sockets = set()
        for fd in fds:
            try:
                target = str(fd.readlink())
            except OSError:
                continue
            sockets.add(target.removeprefix("socket:[").removesuffix("]"))
        found = set()
        for name in ("tcp", "tcp6"):
            table = Path(f"/proc/{self.controller()}/net/{name}").read_text().splitlines()[1:]
            for line in table:
                fields = line.split()
                if fields[3] == "0A" and fields[9] in sockets:
                    address, port = fields[1].split(":")
                    found.add((address, int(port, 16)))
        return found


@contextmanager
def two_nodes(folder: Path, environ: Mapping[str, str]) -> Iterator[Nodes]:
    if reason := TestBed.available():
        pytest.skip(reason)
    with TestBed(nodes=2, folder=folder) as bed:
        bed.launch(
            TRAIN_DDP,
            args=["--seconds", "100"],
            env={"FAILSLOW": "1", "FAILSLOW_DIR": str(folder / "run"), **AT_ONCE, **environ},
        )
        yield Nodes(bed, folder / "run" / "journal.jsonl")


def hexadecimal(address: str) -> str:
    return "".join(f"{int(part):02X}" for part in reversed(address.split(".")))


def test_agents_of_two_nodes_report_to_the_interface_of_master_addr_alone(tmp_path: Path) -> None:
    job = {"FAILSLOW_JOB": "two", "FAILSLOW_TOKEN": "0" * 32}
    with two_nodes(tmp_path, job) as nodes:
        nodes.until(
            lambda: (
                sum(
                    e.kind == "step" and e.rank is None and e.tags["workers"] == 2
                    for e in nodes.entries()
                )
                > 10
            )
        )
        address = nodes.bed.nodes[0].address
        where = {"MASTER_ADDR": address, "MASTER_PORT": "29500"}
        assert nodes.listening() == {(hexadecimal(address), derived_port("two", where))}
        watched = {
            e.record["node"]
            for e in nodes.entries()
            if e.kind == "health" and e.record["what"] == "agent"
        }
        assert len(watched) == 2


@pytest.mark.slow
def test_without_a_token_the_other_node_is_missed_and_the_remedy_said(tmp_path: Path) -> None:
    settings = {"FAILSLOW_TOKEN": "", "FAILSLOW_RUNTIME_BLIND_AFTER_S": "3"}
    with two_nodes(tmp_path, settings) as nodes:
        coverage: list[dict[str, object]] = []

        def missed() -> bool:
            coverage[:] = [
                e.record
                for e in nodes.entries()
                if e.kind == "health" and e.record["what"] == "coverage"
            ]
            return bool(coverage)

        nodes.until(missed)
        assert coverage[0]["ranks"] == [1]
        assert "set FAILSLOW_TOKEN" in str(coverage[0]["message"])
        assert {address for address, _ in nodes.listening()} == {hexadecimal("127.0.0.1")}
        # who cannot report says so where it can
        files = (tmp_path / "run").glob
        nodes.until(lambda: any("is not set" in file.read_text() for file in files("agent-*n1*")))
