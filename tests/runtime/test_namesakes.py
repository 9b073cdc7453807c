"""Two jobs of one name on a machine stay two, and one job that comes up again stays one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from failslow.capture.origin import Origin, kin, process_identity
from failslow.errors import ConfigError
from failslow.runtime.claim import Claim, pid_namespace
from failslow.runtime.doctor.running import running_checks
from failslow.runtime.folder import RunFolder
from failslow.runtime.launch import launch
from failslow.runtime.rings import OwnRings

WORKER = """
import io, json, os, sys
sys.stderr = io.StringIO()
from failslow.capture.ring import RingWriter, job_name
from failslow.runtime import launch as launching
started = [{}]
launching._Supervisor.start = lambda self: started.append(dict(self.environ))
launching.launch()
ring = RingWriter.create(job=job_name(), rank=int(os.environ["RANK"]), world_size=1,
                         description={"mode": "native"}, capacity=16)
child = {k: v for k, v in started[-1].items() if k.startswith("FAILSLOW")}
print(json.dumps([child, str(ring.path), sys.stderr.getvalue()]), flush=True)
sys.stdin.read()
"""
LAUNCHER = """
import json, os, subprocess, sys
workers = []
for line in sys.stdin:
    order = json.loads(line)
    if order is None:
        workers[-1].stdin.close()
        print(workers.pop().wait(), flush=True)
        continue
    workers.append(subprocess.Popen(
        [sys.executable, "-c", os.environ["WORKER"]], env={**os.environ, **order},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ))
    print(workers[-1].stdout.readline(), end="", flush=True)
for worker in workers:
    worker.stdin.close()
    worker.wait()
"""


@dataclass(frozen=True, slots=True)
class Worker:
    """One that has come up."""

    child: Mapping[str, str]
    """What the supervisor it starts would be given."""
    ring: Path
    said: str

    @property
    def watched(self) -> list[Path]:
        return OwnRings.given(self.child)()


class Launcher:
    """Whatever starts workers on a machine."""

    def __init__(self, folder: Path) -> None:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("FAILSLOW", "MASTER"))}
        self._process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER],
            env={**kept, "WORKER": WORKER, "FAILSLOW_CAPTURE_FOLDER": str(folder / "rings")},
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, **environ: str) -> Worker:
        child, ring, said = self._ask({"RANK": "0", "MASTER_ADDR": "127.0.0.1", **environ})
        return Worker(child, Path(ring), said)

    def end_last(self) -> None:
        assert self._ask(None) == 0

    def _ask(self, order: dict[str, str] | None) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate("")


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Launcher, Launcher]]:
    (tmp_path / "rings").mkdir()
    with ExitStack() as stack:
        yield (
            stack.enter_context(Launcher(tmp_path)),
            stack.enter_context(Launcher(tmp_path)),
        )


def test_two_torchruns_of_one_run_id_are_two_jobs(
    two: tuple[Launcher, Launcher], tmp_path: Path
) -> None:
    elastic = {"TORCHELASTIC_RUN_ID": "exp1", "GROUP_WORLD_SIZE": "1"}
    first = two[0].start(**elastic, MASTER_PORT="1001")
    second = two[1].start(**elastic, MASTER_PORT="1002")
    assert first.child["FAILSLOW_RUN"] == "exp1"
    assert second.child["FAILSLOW_RUN"] == "exp1-2"
    assert first.child["FAILSLOW_JOB"] == second.child["FAILSLOW_JOB"] == "exp1"
    assert first.child["FAILSLOW_DIR"] == str(tmp_path / "failslow-runs" / "exp1")
    assert second.child["FAILSLOW_DIR"] == str(tmp_path / "failslow-runs" / "exp1-2")
    assert first.said == ""
    assert "another job called exp1 runs here; this one is watched as exp1-2" in second.said
    assert first.watched == [first.ring]
    assert second.watched == [second.ring]

    environ = {"FAILSLOW_CAPTURE_FOLDER": str(tmp_path / "rings")}
    checks = {c.name: c for c in running_checks("exp1", environ, now_s=0.0)}
    assert "1 worker of this node" in checks["rings"].found
    assert checks["name"].found == "another job here is called exp1 too, watched as exp1-2"

    # torchrun starts its workers again: another port, the same launcher
    two[1].end_last()
    again = two[1].start(**elastic, MASTER_PORT="1003")
    assert again.child["FAILSLOW_RUN"] == "exp1-2"
    assert OwnRings.given(second.child)() == [again.ring]
    assert first.watched == [first.ring]
    # whoever comes when it is over takes its place
    two[0].end_last()
    assert two[0].start(**elastic, MASTER_PORT="1004").child["FAILSLOW_RUN"] == "exp1"


def test_two_jobs_given_one_name_and_folder_do_not_share_a_journal(
    two: tuple[Launcher, Launcher], tmp_path: Path
) -> None:
    given = {"FAILSLOW_JOB": "mine", "FAILSLOW_DIR": str(tmp_path / "run")}
    # one shell starts both: only their addresses tell them apart
    first, second = (two[0].start(**given, MASTER_PORT=port) for port in ("1001", "1002"))
    assert second.child["FAILSLOW_RUN"] == "mine-2"
    assert second.child["FAILSLOW_DIR"] == str(tmp_path / "run-2")
    assert first.watched == [first.ring]
    assert second.watched == [second.ring]


def test_two_torchruns_that_meet_at_one_address_are_one_job(
    two: tuple[Launcher, Launcher],
) -> None:
    elastic = {"TORCHELASTIC_RUN_ID": "exp1", "GROUP_WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    first = two[0].start(**elastic, MASTER_PORT="1001", FAILSLOW_NODE="n0")
    other = two[1].start(**elastic, MASTER_PORT="1001", FAILSLOW_NODE="n1", RANK="1")
    assert first.child["FAILSLOW_RUN"] == other.child["FAILSLOW_RUN"] == "exp1"
    assert first.watched == other.watched == [first.ring, other.ring]
    # after a restart the other node comes up first, at an address not heard of here yet
    two[1].end_last()
    other = two[1].start(**elastic, MASTER_PORT="1002", FAILSLOW_NODE="n1", RANK="1")
    assert other.child["FAILSLOW_RUN"] == "exp1"


def test_a_trainer_may_set_its_address_late() -> None:
    early, late = Origin("7-1", "", elastic=False), Origin("7-1", "h:1", elastic=False)
    assert early.shares(late)
    assert not late.shares(Origin("7-1", "h:2", elastic=False)), "a shell starts many"
    assert Origin("7-1", "h:1", elastic=True).shares(Origin("7-1", "h:2", elastic=True))
    assert not Origin("7-1", "h:1", elastic=True).shares(Origin("8-1", "h:2", elastic=True))
    for origin in (early, late, Origin("", "a@b:1", elastic=True)):
        assert Origin.parse(origin.text) == origin


def test_what_a_launchers_workers_share_spreads() -> None:
    own, other = Origin("7-1", "h:1", elastic=True), Origin("8-1", "h:2", elastic=True)
    again, stranger = Origin("7-1", "h:2", elastic=True), Origin("9-1", "h:9", elastic=True)
    assert kin([own], [other, stranger]) == {own}
    assert kin([own], [other, stranger, again]) == {own, again, other}


def claim(worker: str, **given: Any) -> Claim:
    about = {"job": "exp1", "origin": "1-1@h:1@", "node": "n", "several": False, "journal": "/j"}
    return Claim(**{**about, "namespace": pid_namespace(), "worker": worker, **given})


def test_the_folder_of_a_job_about_to_come_up_is_not_tidied(tmp_path: Path) -> None:
    run = RunFolder("exp1", {"FAILSLOW_CAPTURE_FOLDER": str(tmp_path)})
    me = process_identity(os.getpid())
    assert run.enter(claim("1-0")) == []
    assert run.enter(claim(me, origin="2-2@h:2@")) == [], "a dead one's claim does not count"
    assert not run.tidy(leaving="1-0")
    assert run.tidy(leaving=me)


def test_one_in_another_container_holds_the_folder_while_its_locks_are_held(
    tmp_path: Path,
) -> None:
    run = RunFolder("exp1", {"FAILSLOW_CAPTURE_FOLDER": str(tmp_path)})
    far, near = claim("1-0", namespace="pid:[7]"), claim("1-1", origin="2-2@h:2@")
    assert run.enter(far) == []
    lock = run.lock("agent-far")
    assert lock is not None
    assert run.enter(near) == [far]
    os.close(lock)
    assert run.enter(near) == []


def test_where_every_name_is_taken_the_remedy_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("failslow.runtime.launch._MOST_OF_A_NAME", 1)
    environ = {"FAILSLOW_CAPTURE_FOLDER": str(tmp_path), "FAILSLOW_JOB": "exp1", "RANK": "0"}
    RunFolder("exp1", environ).enter(claim(process_identity(os.getpid())))
    with pytest.raises(ConfigError, match="jobs called exp1 run here; set FAILSLOW_JOB"):
        launch({**environ, "MASTER_ADDR": "h", "MASTER_PORT": "2"})
