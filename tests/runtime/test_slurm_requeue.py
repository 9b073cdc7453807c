"""Level S4 through a real Slurm: the slow node is drained, and the job starts again on others."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.slurm_cluster import SlurmCluster

from failslow.runtime.restart import RestartOrder, leave_order
from failslow.runtime.slurm import expand

FAILSLOW = str(Path(sys.executable).with_name("failslow"))
_SCRIPT = """#!/bin/sh
#SBATCH --nodes 2
echo "start on $SLURM_JOB_NODELIST"
exec {failslow} run -q --restarts 2 --slurm {setting} --dir {folder} -- sh -c '{train}'
"""
# A training that saves itself when told to, and goes on from there when it is started again.
_TRAIN = """
echo "restarted: ${{FAILSLOW_RESTARTED:-no}}"
if [ -e {folder}/saved ]; then echo "goes on"; exec sleep 600; fi
touch {folder}/up
until [ -e {folder}/saved ]; do sleep 0.1; done
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    if reason := SlurmCluster.available():
        pytest.skip(reason)
    with SlurmCluster(nodes=4) as cluster:
        yield cluster


def _evicted(
    slurm: SlurmCluster, folder: Path, setting: str, *options: str
) -> tuple[str, str, str]:
    """A job that has saved itself to go on without its second node; its id, that node, its text."""
    train = _TRAIN.format(folder=folder)
    script = _SCRIPT.format(failslow=FAILSLOW, folder=folder, setting=setting, train=train)
    job = slurm.submit(script, *options)
    slurm.until((folder / "up").exists, 60.0, lambda: slurm.output(job))
    first, slow = expand(slurm.job(job)["NodeList"])
    (folder / "saved").touch()
    order = RestartOrder(id="e1-4", evict=(slow,), why="device rank 1 x1.84")
    leave_order(folder, first, order)
    slurm.until(lambda: "goes on" in slurm.output(job), 90.0, lambda: slurm.output(job))
    assert slurm.job(job)["JobState"] == "RUNNING"
    node = slurm.node(slow)
    assert "DRAIN" in node["State"]
    assert node["Reason"].startswith(f"failslow, job {job}: device rank 1 x1.84")
    output = slurm.output(job)
    assert "restarted: no" in output
    assert "restarted: 1 e1-4\ngoes on" in output
    return job, slow, output


@pytest.mark.timeout(180)
def test_a_slow_node_is_drained_and_the_job_starts_again_on_others(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    job, slow, output = _evicted(slurm, tmp_path, "requeue", "--exclude", "node4")
    running = slurm.job(job)
    assert running["Restarts"] == "1"
    assert sorted(expand(running["ExcNodeList"])) == [slow, "node4"], output
    nodes = expand(running["NodeList"])
    assert len(nodes) == 2
    assert slow not in nodes
    assert output.count("start on") == 2
    slurm.run("scancel", job)


@pytest.mark.timeout(120)
def test_a_slow_node_is_drained_and_the_job_goes_on_with_the_others_it_has(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    job, slow, output = _evicted(slurm, tmp_path, "drain")
    running = slurm.job(job)
    assert running["Restarts"] == "0"
    assert slow in expand(running["NodeList"])
    assert output.count("start on") == 1
    slurm.run("scancel", job)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("text", ["node[1-4]", "gpu-[08-10,12],rack[1-2]n[1-3],login"])
def test_lists_of_nodes_are_read_as_slurm_reads_them(slurm: SlurmCluster, text: str) -> None:
    assert expand(text) == tuple(slurm.run("scontrol", "show", "hostnames", text).split())
