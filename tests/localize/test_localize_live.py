"""Real faults on a real watched job in the test bed: the culprit is proved, and nobody else.

The short version of `benchmarks/localize.py`, which strikes a hundred times and more.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from benchmarks.localize import EGRESS_MBIT, Strike, WatchedLayout, strike
from tests.testbed import TestBed

STRIKES = [
    ("dp4", ("throttle", "link", "egress", "nothing")),
    pytest.param("dp4", ("burner", "two", "flood", "off path"), marks=pytest.mark.slow),
    pytest.param("pp2dp2", ("throttle", "two", "burner", "nothing"), marks=pytest.mark.slow),
    pytest.param("tp2dp2", ("throttle", "two", "link", "nothing"), marks=pytest.mark.slow),
]


def struck(folder: Path, layout: str, faults: tuple[str, ...]) -> list[Strike]:
    pick = random.Random(4)
    with TestBed(nodes=4, egress_mbit=EGRESS_MBIT, folder=folder) as bed:
        job = WatchedLayout(bed, folder, layout)
        job.ready()
        return [strike(job, fault, pick) for fault in faults]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("layout", "faults"), STRIKES)
def test_culprits_of_real_faults_are_named(
    layout: str, faults: tuple[str, ...], tmp_path: Path
) -> None:
    why = TestBed.available()
    if why is not None:
        pytest.skip(why)
    strikes = struck(tmp_path, layout, faults)
    told = "\n".join(map(str, strikes))
    assert len([s for s in strikes if not s.right]) <= len(strikes) // 6, told
    for s in strikes:
        if s.fault == "nothing":
            assert not s.named, told
        if s.pause_s is not None:
            assert s.pause_s <= 5.0, told
