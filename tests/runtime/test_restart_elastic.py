"""Level S4 for real: torchrun on several nodes; a slow one is left out, the others go on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.runtime.elastic_run import SETTINGS, ElasticRun, assert_went_on
from tests.testbed import TestBed, until

from failslow.inject import throttle
from failslow.records import Decision, Outcome

NODE = Path(__file__).with_name("elastic_node.py")


class Elastic(ElasticRun):
    """One on a test bed."""

    def __init__(self, bed: TestBed, folder: Path) -> None:
        super().__init__(folder)
        self.bed = bed

    @contextmanager
    def slowed(self, node: int) -> Iterator[None]:
        """The training process on a node, the one that has a ring there, slowed by half and more.

        It computes for a third of the time: a quota has to be below that to be felt.
        """
        (ring,) = self.bed.nodes[node].rings.glob("*.ring")
        with throttle(int(ring.stem.rpartition("-p")[2]), to=0.15, method="cgroup"):
            yield


@contextmanager
def _job(folder: Path, *, nodes: str, hosts: int, spare: str = "") -> Iterator[Elastic]:
    if reason := TestBed.available():
        pytest.skip(reason)
    with TestBed(nodes=hosts, folder=folder) as bed:
        environ = {"FAILSLOW_DIR": str(folder / "run"), "NODES": nodes, "SPARE": spare}
        environ["FAILSLOW_DECIDE_SPARES"] = "1" if spare else "0"
        bed.launch(NODE, env={**SETTINGS, **environ})
        job = Elastic(bed, folder)
        until(job.is_known, 120.0)
        yield job


def _assert_left_out(job: Elastic, node: int) -> None:
    """One restart without that node, after two verdicts; its launcher ended and said why."""
    (restart,) = job.restarts()
    assert restart.record["evict"] == [job.bed.nodes[node].namespace]
    named = [e for e in job.entries("verdict") if e.t <= restart.t and e.record.findings]
    assert len(named) >= 2
    (decision,) = [
        entry.record
        for entry in job.entries("decision")
        if isinstance(entry.record, Decision) and entry.record.apply
    ]
    assert decision.level == "S4"
    (outcome,) = [e.record for e in job.entries("outcome") if isinstance(e.record, Outcome)]
    assert (outcome.level, outcome.ok) == ("S4", True)
    left = job.bed.workers[node]
    until(lambda: left.process.poll() is not None, 60.0)
    assert left.process.returncode == 0
    assert "is left out of the job" in left.text()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_slow_host_is_left_out_and_a_smaller_world_goes_on_from_the_checkpoint(
    tmp_path: Path,
) -> None:
    with _job(tmp_path, nodes="2:3", hosts=3) as job:
        with job.slowed(node=2):
            until(job.restarts, 120.0)
            until(lambda: len(job.losses(2)) > 20, 90.0)
        _assert_left_out(job, 2)
        before, after = job.losses(3), job.losses(2)
        done = job.saved_steps()
    assert len(before) - 1 <= done <= len(before)
    # the same global batches whatever the world: from the step where it was saved
    once = [*before[:done], *after[:20]]
    assert_went_on(once, tmp_path / "plain", world=2, saved=done)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_spare_takes_the_slow_hosts_place_and_no_loss_differs(tmp_path: Path) -> None:
    with _job(tmp_path, nodes="3:3", hosts=4, spare="3") as job:
        with job.slowed(node=2):
            until(job.restarts, 120.0)
            known = len(job.losses(3))
            until(lambda: len(job.losses(3)) > known + 20, 90.0)
        _assert_left_out(job, 2)
        losses, done = job.losses(3), job.saved_steps()
        told = [e.record for e in job.entries("action") if e.record.get("what") == "restarted"]
        (restart,) = job.restarts()
    assert told[0] == {"what": "restarted", "id": restart.record["id"], "starts": 1}
    # the step after the checkpoint was done twice, with the same state
    assert losses[done] == pytest.approx(losses[done + 1], abs=1e-6)
    once = [*losses[:done], *losses[done + 1 :]]
    assert_went_on(once, tmp_path / "plain", world=3, saved=done)
