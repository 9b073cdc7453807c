"""Level S4 for real: torchrun on three nodes; a slow one is left out, the others go on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.testbed import TestBed, until

from failslow.inject import throttle
from failslow.journal import JournalEntry, read_journal

NODE = Path(__file__).with_name("elastic_node.py")
SETTINGS = {
    "FAILSLOW_DETECT_MIN_DURATION_S": "2",
    "FAILSLOW_LOCALIZE_PAUSES_PER_HOUR": "1000",
    "FAILSLOW_LOCALIZE_MAX_PAUSE_SHARE": "1",
    "FAILSLOW_LOCALIZE_RECHECK_S": "3",
    "FAILSLOW_DECIDE_REDISTRIBUTE_COST_S": "100000",
    "FAILSLOW_DECIDE_TOPOLOGY_COST_S": "100000",
    "FAILSLOW_DECIDE_RESTART_COST_S": "2",
}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_slow_host_is_left_out_and_training_goes_on_from_the_checkpoint(tmp_path: Path) -> None:
    if reason := TestBed.available():
        pytest.skip(reason)
    with TestBed(nodes=3, folder=tmp_path) as bed:
        # all nodes share the folder, as a cluster's file system does
        bed.launch(NODE, env={**SETTINGS, "FAILSLOW_DIR": str(tmp_path / "run")})

        def entries(kind: str) -> list[JournalEntry]:
            journal = tmp_path / "run" / "journal.jsonl"
            if not journal.exists():
                return []
            return [entry for entry in read_journal(journal) if entry.kind == kind]

        until(lambda: any(e.record.get("why") == "reference" for e in entries("validation")), 120.0)
        slow = _worker_pid(bed, 2)
        with throttle(slow, to=0.5, method="signal"):
            until(lambda: any(e.record.get("what") == "restart" for e in entries("action")), 120.0)
            two = tmp_path / "losses2.jsonl"
            until(lambda: two.exists() and two.read_text().count("\n") > 20, 120.0)
        (restart,) = [e.record for e in entries("action") if e.record.get("what") == "restart"]
        assert restart["evict"] == [bed.nodes[2].namespace]
        text = bed.workers[2].text()
        assert "is left out of the job" in text
        until(lambda: bed.workers[2].process.poll() is not None, 60.0)
        assert bed.workers[2].process.returncode == 0
        before = (tmp_path / "losses3.jsonl").read_text().splitlines()
        after = (tmp_path / "losses2.jsonl").read_text().splitlines()
        # it goes on where it was saved, not from the start: the loss is as low as it had become
        assert abs(json.loads(after[0]) - json.loads(before[-1])) < 0.5
        assert json.loads(before[0]) - json.loads(after[0]) > 0.2


def _worker_pid(bed: TestBed, node: int) -> int:
    """The training process on a node: the one that has a ring there."""
    (ring,) = bed.nodes[node].rings.glob("*.ring")
    return int(ring.stem.rpartition("-p")[2])
