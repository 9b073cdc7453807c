"""Campaigns of real probes by the command itself: on this machine, and on a real Slurm cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.slurm_cluster import SlurmCluster

from failslow.probe.store import read_store

pytest.importorskip("torch")
pytestmark = pytest.mark.slow  # by stand-ins, the same is in test_probe_study_cli.py


def campaign(store: Path, *options: str, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Its JSON."""
    environ = {n: v for n, v in os.environ.items() if not n.startswith("FAILSLOW")}
    done = subprocess.run(
        [sys.executable, "-m", "failslow", "probe", "campaign", str(store),
         "--workers", "2", "--duration", "12", "--preset", "cpu", "--json", *options],
        env={**environ, **(env or {})}, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
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
