"""A demo without root trains in plain processes: nothing of it is for others to reach."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.transport.servers import listening_addresses

pytest.importorskip("torch", reason="the demo trains")

from failslow.demo import steered_job


@pytest.mark.timeout(180)
def test_training_of_a_demo_listens_on_loopback_alone(tmp_path: Path) -> None:
    with steered_job(
        tmp_path, layout=("--dp", "2"), lab=False, work_ms=1.0, microbatches=4, workers=2
    ) as job:
        assert job.wait_for(lambda: len(job.losses()) > 3, limit_s=120.0)
        heard = [listening_addresses(pid) for pid in job.pids]
    assert heard[0], "rank 0 serves the store"
    assert set().union(*heard) <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
