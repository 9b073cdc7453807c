"""Several nodes on one machine: real namespaces, real workers, for real faults to hit.

if reason := TestBed.available(): ...       # why not here
with TestBed(nodes=4) as bed:
    bed.launch("train.py", env={"FAILSLOW": "1"})
    bed.wait(60)
"""

from __future__ import annotations

from failslow.lab.bed import Node, TestBed, Worker

__all__ = ["Node", "TestBed", "Worker"]
