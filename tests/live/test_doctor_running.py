"""`failslow doctor --job`: rings really written, locks really held, journals as left."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from failslow.capture.layout import CALL
from failslow.capture.ring import RingWriter
from failslow.journal import JournalWriter
from failslow.records import StepSample
from failslow.runtime.doctor import Check
from failslow.runtime.doctor.running import running_checks
from failslow.runtime.folder import RunFolder

JOB = "pretrain7"


class Machine:
    """A node with a job on it: each part is there or not."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "rings").mkdir()
        self.environ = {"FAILSLOW_CAPTURE_FOLDER": str(folder / "rings")}
        self.run = folder / "failslow-runs" / JOB
        self.run.mkdir(parents=True)
        self.journal = JournalWriter(self.run / "journal.jsonl")
        self.rings: list[RingWriter] = []
        self.held: list[int] = []

    def ring(self, rank: int, *, age_s: float | None = 0.0) -> RingWriter:
        ring = RingWriter.create(
            job=JOB, rank=rank, world_size=2, description={}, capacity=16, environ=self.environ
        )
        if age_s is not None:
            start_ns = time.monotonic_ns() - int(age_s * 1e9)
            ring.append(start_ns, 0, 0, 1024, 10, 1, -1, 2, 1, CALL, 6, 0, 0)
        self.rings.append(ring)
        return ring

    def part(self, lock: str) -> None:
        handle = RunFolder(JOB, self.environ).lock(lock)
        assert handle is not None
        self.held.append(handle)

    def write(self, t: float | None = None, **record: Any) -> None:
        kind = {"message": record.get("what", "")}
        self.journal.append({**kind, **record}, t=time.time() if t is None else t, kind="health")

    def steps(self, t: float | None = None) -> None:
        t = time.time() if t is None else t
        self.write(t, what="controller", ok=True, event="started")
        for step in range(20):
            sample = StepSample(step=step, duration_s=0.1, end_s=0.1 * step)
            self.journal.append(sample, t=t, workers=2, healthy_s=0.1)

    def checks(self, named: str = JOB) -> dict[str, Check]:
        return {
            check.name: check for check in running_checks(named, self.environ, now_s=time.time())
        }


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.chdir(tmp_path)
    made = Machine(tmp_path)
    yield made
    for ring in made.rings:
        ring.close()
    for handle in made.held:
        os.close(handle)


def test_a_job_that_is_watched_passes_by_name_and_by_folder(machine: Machine) -> None:
    machine.steps()
    machine.ring(0)
    machine.ring(1)
    machine.part("agent-vm")
    machine.part("controller")
    for named in (JOB, str(machine.run), f"failslow-runs/{JOB}"):
        checks = machine.checks(named)
        assert {c.name: c.status for c in checks.values()} == dict.fromkeys(
            ("journal", "rings", "agent", "controller"), "pass"
        )
    assert "2 workers of this node" in checks["rings"].found
    assert "healthy at step 19" in checks["journal"].found


def test_a_job_is_found_by_its_folder_whatever_its_workers_call_it(machine: Machine) -> None:
    """`failslow run` names the folder by script and time, torchrun the job by its address."""
    machine.steps()
    machine.ring(0)
    machine.ring(1)
    machine.part("agent-vm")
    machine.part("controller")
    folder = machine.run.rename(machine.run.with_name("train-20260301-142507"))
    killed = RunFolder("127.0.0.1-29400", machine.environ)  # an earlier start of it
    for run in (RunFolder(JOB, machine.environ), killed):
        run.write("journal", str(folder))
    for named in ("train-20260301-142507", str(folder)):
        assert {c.name: c.status for c in machine.checks(named).values()} == dict.fromkeys(
            ("journal", "rings", "agent", "controller"), "pass"
        )


def test_looking_takes_no_lock_away(machine: Machine) -> None:
    machine.ring(0)
    machine.part("controller")
    machine.checks()

    lock = next((machine.folder / "rings").glob("*.run/controller.lock"))
    handle = os.open(lock, os.O_RDWR)
    with pytest.raises(BlockingIOError):
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(handle)
    os.close(machine.held.pop())
    assert machine.checks()["controller"].status == "fail"
    machine.part("controller")  # still to be had


def test_a_dead_agent_fails_with_its_last_words(machine: Machine) -> None:
    machine.steps()
    machine.ring(0)
    machine.part("controller")
    (machine.run / "runtime.log").write_text("failslow agent: first\nfailslow agent: no token\n")
    check = machine.checks()["agent"]

    assert check.status == "fail"
    assert check.found == "no agent runs here: failslow agent: no token"
    assert "runtime.log" in check.remedy


def test_on_a_node_without_rank_0_no_controller_is_expected(machine: Machine) -> None:
    machine.steps()
    machine.ring(3)
    machine.part("agent-vm")

    assert machine.checks()["controller"].status == "info"


@pytest.mark.parametrize("age_s", [None, 120.0])
def test_a_ring_that_does_not_grow_is_a_warning(machine: Machine, age_s: float | None) -> None:
    machine.steps()
    machine.ring(0)
    machine.ring(1, age_s=age_s)
    check = machine.checks()["rings"]

    assert check.status == "warn"
    assert "rank 1 " in check.found


def test_records_lost_to_our_own_faults_are_a_warning(machine: Machine) -> None:
    machine.ring(0).count_fault()

    assert machine.checks()["rings"].status == "warn"


def test_an_unknown_job_fails_with_what_to_do(machine: Machine) -> None:
    checks = machine.checks("pretrain8")

    assert checks["journal"].status == checks["rings"].status == "fail"
    assert "run doctor where the job was started" in checks["journal"].remedy
    assert "FAILSLOW_JOB" in checks["rings"].remedy


def test_a_controller_that_has_written_nothing_yet_is_a_warning(machine: Machine) -> None:
    machine.ring(0)
    machine.part("controller")

    assert machine.checks()["journal"].status == "warn"


def test_a_journal_nobody_writes_fails_and_an_ended_one_does_not(machine: Machine) -> None:
    machine.steps(time.time() - 300)
    machine.ring(0)
    assert machine.checks()["journal"].status == "fail"
    machine.write(time.time() - 299, what="controller", ok=True, event="ended")
    for ring in machine.rings:
        ring.close()
    checks = machine.checks()

    assert {check.status for check in checks.values()} == {"info"}
    assert "ended at step 19" in checks["journal"].found


@pytest.mark.parametrize(
    ("what", "status", "remedy"),
    [("token", "fail", "FAILSLOW_TOKEN"), ("ring", "warn", "FAILSLOW_CAPTURE_RECORDS")],
)
def test_what_the_controller_complains_of_has_a_remedy(
    machine: Machine, what: str, status: str, remedy: str
) -> None:
    machine.steps()
    machine.write(what=what, ok=False)
    check = machine.checks()["monitoring"]

    assert check.status == status
    assert remedy in check.remedy


def test_the_command_prints_it_as_json(machine: Machine) -> None:
    machine.steps()
    machine.ring(0)
    machine.part("agent-vm")
    machine.part("controller")
    done = subprocess.run(
        [Path(sys.executable).with_name("failslow"), "doctor", "--job", JOB, "--json"],
        capture_output=True,
        cwd=machine.folder,
        env=os.environ | machine.environ,
        timeout=60,
        check=False,
    )

    found = json.loads(done.stdout)
    assert (done.returncode, done.stderr, found["ok"]) == (0, b"", True)
    assert [check["name"] for check in found["checks"]] == [
        "journal",
        "rings",
        "agent",
        "controller",
    ]
