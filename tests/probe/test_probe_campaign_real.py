"""Campaigns of real probes by the command itself: here, on a real Slurm, on a real Ray cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.probe.probing import until
from tests.slurm_cluster import SlurmCluster

from failslow.probe.store import read_store

pytest.importorskip("torch")
pytestmark = pytest.mark.slow  # by stand-ins, the same is in test_probe_study_cli.py


def campaign(
    store: Path,
    *options: str,
    env: Mapping[str, str] | None = None,
    duration_s: int = 12,
    code: int = 0,
) -> dict[str, Any]:
    """Its JSON."""
    environ = {n: v for n, v in os.environ.items() if not n.startswith("FAILSLOW")}
    done = subprocess.run(
        [sys.executable, "-m", "failslow", "probe", "campaign", str(store),
         "--workers", "2", "--duration", str(duration_s), "--preset", "cpu", "--json", *options],
        env={**environ, **(env or {})}, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_a_real_probe_lands_in_the_store(tmp_path: Path) -> None:
    document = campaign(tmp_path / "s", "--probes", "1x1", "--retries", "0")

    (record,) = read_store(tmp_path / "s").records
    assert (record.ending, record.executor, record.why) == ("finished", "local", "")
    assert record.result is not None
    assert record.result.probe_id.endswith("-1n-0001.1")
    assert record.result.iterations > 30
    assert document["campaign"]["finished"] == 1
    assert [job["nodes"] for job in document["jobs"]] == [list(record.result.nodes)]


def test_a_real_probe_runs_on_slurm(tmp_path: Path) -> None:
    if reason := SlurmCluster.available():
        pytest.skip(reason)
    with SlurmCluster(nodes=1) as cluster:
        document = campaign(
            tmp_path / "s", "--probes", "1x1", "--retries", "0", "--executor", "slurm",
            "--slurm", "partition=main", env=cluster.environ,
        )  # fmt: skip

    (record,) = read_store(tmp_path / "s").records
    assert (record.ending, record.executor, record.why) == ("finished", "slurm", "")
    assert record.result is not None
    assert record.result.iterations > 30
    assert document["campaign"]["finished"] == 1


def test_a_real_probe_that_slurm_takes_the_node_from_brings_home_what_it_has(
    tmp_path: Path,
) -> None:
    if reason := SlurmCluster.available():
        pytest.skip(reason)
    more = """
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
PartitionName=low Nodes=ALL PriorityTier=1 PreemptMode=CANCEL GraceTime=40
PartitionName=high Nodes=ALL PriorityTier=9 PreemptMode=OFF
"""
    store = tmp_path / "s"
    with SlurmCluster(nodes=1, more=more) as cluster, ThreadPoolExecutor() as threads:
        running = threads.submit(
            campaign, store, "--probes", "1x1", "--retries", "0", "--executor", "slurm",
            "--slurm", "partition=low", env=cluster.environ, duration_s=60,
            code=1,  # none finished
        )  # fmt: skip
        until(lambda: _trained(store) > 20, 60.0, lambda: f"{_trained(store)} iterations")

        cluster.submit("#!/bin/sh\ntrue\n", "--partition=high", "--exclusive")
        running.result()

    (record,) = read_store(store).records
    assert (record.ending, record.executor) == ("preempted", "slurm")
    assert record.result is not None
    assert (record.result.state, record.result.result) == ("preempted", "healthy")
    assert record.result.iterations > 20


@pytest.mark.filterwarnings("ignore")  # Ray leaves sockets and files to the collector
def test_a_real_probe_runs_on_ray(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    from tests.ray_cluster import ray_cluster

    with ray_cluster(nodes=2) as address:
        campaign(
            tmp_path / "s", "--probes", "2x1", "--retries", "0", "--executor", "ray",
            "--ray-address", address,
        )  # fmt: skip

    (record,) = read_store(tmp_path / "s").records
    assert (record.ending, record.executor, record.why) == ("finished", "ray", "")
    assert record.result is not None
    assert (record.result.size_class, record.result.workers) == ("multi-node", 4)
    assert record.result.iterations > 20


def _trained(store: Path) -> int:
    """Iterations of the probe that is running."""
    return sum(
        text.count('"kind": "step"') + text.count('"kind":"step"')
        for text in (p.read_text(errors="replace") for p in store.rglob("journal*.jsonl"))
    )
