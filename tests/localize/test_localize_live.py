"""Real faults on a real watched job in the test bed: the culprit is proved, and nobody else.

The short version of `benchmarks/localize.py`, which strikes a hundred times and more.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from benchmarks.localize import EGRESS_MBIT, Strike, WatchedLayout, strike
from tests.testbed import TestBed

STRIKES = {
    "dp4": ("throttle", "link", "nothing", "burner", "egress", "two", "flood"),
    "pp2dp2": ("throttle", "two", "nothing"),
    "tp2dp2": ("throttle", "two", "nothing"),
}


def struck(folder: Path, layout: str) -> list[Strike]:
    pick = random.Random(4)
    with TestBed(nodes=4, egress_mbit=EGRESS_MBIT, folder=folder) as bed:
        job = WatchedLayout(bed, folder, layout)
        job.ready()
        return [strike(job, fault, pick) for fault in STRIKES[layout]]


@pytest.mark.slow  # test_benchmarks_bed.py and test_evidence_real.py have a fault each in less time
@pytest.mark.timeout(400)
@pytest.mark.parametrize("layout", STRIKES)
def test_culprits_of_real_faults_are_named(layout: str, tmp_path: Path) -> None:
    why = TestBed.available()
    if why is not None:
        pytest.skip(why)
    strikes = struck(tmp_path, layout)
    told = "\n".join(map(str, strikes))
    assert len([s for s in strikes if not s.right]) <= len(strikes) // 6, told
    for s in strikes:
        if s.fault == "nothing":
            assert not s.named, told
        if s.pause_s is not None:
            assert s.pause_s <= 5.0, told
