"""Level S4 of real training under a real Slurm: saved, its slow node drained, requeued, resumed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.runtime.elastic_run import SETTINGS, ElasticRun, assert_went_on
from tests.slurm_cluster import SlurmCluster
from tests.transport.servers import free_port

from failslow.inject import throttle
from failslow.runtime.slurm import expand

FAILSLOW = str(Path(sys.executable).with_name("failslow"))
TRAIN = Path(__file__).with_name("elastic_train.py")
# All nodes are this machine: a folder of rings each, as machines of their own would have.
_SCRIPT = f"""#!/bin/sh
#SBATCH --nodes 3 --ntasks-per-node 1
exec {FAILSLOW} run -q --mode auto --restarts 2 --slurm requeue -- srun sh -c '
    export RANK=$SLURM_PROCID WORLD_SIZE=3 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1
    export FAILSLOW_CAPTURE_FOLDER=$TESTBED_FOLDER/rings/$SLURMD_NODENAME
    mkdir -p $FAILSLOW_CAPTURE_FOLDER
    exec {sys.executable} {TRAIN}'
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_slow_node_is_drained_and_training_goes_on_elsewhere_with_the_same_losses(
    tmp_path: Path,
) -> None:
    if reason := SlurmCluster.available():
        pytest.skip(reason)
    run = ElasticRun(tmp_path)
    environ = {
        **SETTINGS,
        "FAILSLOW_AGENT": "1",
        "FAILSLOW_DIR": str(tmp_path / "run"),
        "FAILSLOW_JOB": "elastic",
        "FAILSLOW_RUNTIME_NICE": "-15",
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "TESTBED_FOLDER": str(tmp_path),
    }
    with SlurmCluster(nodes=4) as slurm:
        job = slurm.submit(_SCRIPT, environ=environ)
        slurm.until(run.is_known, 120.0, lambda: slurm.output(job))
        *_, slow = expand(slurm.job(job)["NodeList"])
        (ring,) = (tmp_path / "rings" / slow).glob("*.ring")
        with throttle(int(ring.stem.rpartition("-p")[2]), to=0.15, method="cgroup"):
            slurm.until(run.restarts, 120.0, lambda: slurm.output(job))
            slurm.until_job(job, "PENDING", limit_s=60.0)
        saved, told = run.saved_steps(), len(run.losses(3))
        slurm.until(lambda: len(run.losses(3)) > told + 20, 120.0, lambda: slurm.output(job))
        running, node, output = slurm.job(job), slurm.node(slow), slurm.output(job)
        slurm.run("scancel", job)
        slurm.until_job(job, "CANCELLED")
    (restart,) = run.restarts()
    assert restart.record["evict"] == [slow]
    assert (running["JobState"], running["Restarts"]) == ("RUNNING", "1")
    assert slow not in expand(running["NodeList"])
    assert "DRAIN" in node["State"]
    assert node["Reason"].startswith(f"failslow, job {job}: device rank 2")
    assert f"done: scontrol requeue {job}" in output
    (again,) = [e.record for e in run.entries("action") if e.record.get("what") == "restarted"]
    assert again == {"what": "restarted", "id": restart.record["id"], "starts": 1}

    losses = run.losses(3)
    assert 0 <= told - saved <= 1  # a step under way when all was saved is done twice
    once = [*losses[:saved], *losses[told:]]
    assert_went_on(once, tmp_path / "plain", world=3, saved=saved)
