"""A test bed on one machine: real nodes, real workers, real faults. See README.md.

from tests.testbed import TRAIN_DDP, TestBed

if reason := TestBed.available():
    pytest.skip(reason)
with TestBed(nodes=4, folder=tmp_path) as bed:
    bed.launch(TRAIN_DDP, args=["--steps", "20"], env={"FAILSLOW": "1"})
    bed.wait(60)
"""

from __future__ import annotations

from tests.testbed.bed import TRAIN_DDP, Iteration, TestBed, until

from failslow.lab import Node, Worker

__all__ = ["TRAIN_DDP", "Iteration", "Node", "TestBed", "Worker", "until"]
