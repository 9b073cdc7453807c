"""A job whose workers get no RANK before they import torch is watched all the same."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.runtime.watched import watched
from tests.transport.servers import free_port, until

pytest.importorskip("torch", reason="capture needs torch")

from failslow.capture.reader import RingReader

SCRIPT = Path(__file__).with_name("spawned_train.py")


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_spawned_workers_are_watched_by_one_agent() -> None:
    port = {"MASTER_PORT": str(free_port()), "FAILSLOW_CAPTURE_BUILD": "0"}
    with watched(world=2, environ=port, command=[sys.executable, str(SCRIPT)]) as job:
        job.until(lambda: len(job.steps()) >= 3)
        rings = [RingReader(path) for path in (job.folder / "rings").glob("*.ring")]
        assert sorted(ring.rank for ring in rings) == [0, 1]
        assert {ring.world_size for ring in rings} == {2}
        assert len(job.ours("failslow.runtime.supervise")) == 1
        assert len(job.ours("failslow.runtime.agent")) == 1
        job.stop()
        until(lambda: not job.ours(), 30.0)
        assert list((job.folder / "rings").iterdir()) == []
