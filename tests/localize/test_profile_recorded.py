"""Recorded real jobs: who is named, and what the profiles say.

Each file of `recordings` holds the ring records of all four ranks of a job of `profile_job.py`
(gloo, profiling on, four seconds each) before and during a fault: a worker stopped and continued
by signals to half its speed, or, in the test bed, a link or a node's egress limited to 100 Mbit/s.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mode
from typing import Any, NamedTuple

import numpy as np
import pytest

from failslow.capture.layout import OPS, from_runs
from failslow.capture.reader import RECORD_DTYPE, Group
from failslow.localize.digest import MAX_POSITIONS, digest
from failslow.localize.profile import diagnose
from failslow.records import Diagnosis, RankProfile
from failslow.track import Tracker

FOLDER = Path(__file__).parent / "recordings"
OTHERS = Path(__file__).parents[1] / "track" / "recordings"
WORKERS = ("dp", "pp_dp", "tp_dp", "fsdp")
SLOWDOWN = 1.5


class Recorded(NamedTuple):
    healthy: list[RankProfile]
    slow: list[RankProfile]
    culprit: Any


def load(name: str) -> Recorded:
    with np.load(FOLDER / f"{name}.npz") as file:
        tables = json.loads(str(file["groups"]))
        profiles = {
            what: [
                profile_of(file[f"{what}{rank}"], int(rank), tables[rank])
                for rank in sorted(tables, key=int)
            ]
            for what in ("healthy", "slow")
        }
        return Recorded(profiles["healthy"], profiles["slow"], json.loads(str(file["culprit"])))


def profile_of(records: np.ndarray, rank: int, table: list[Any]) -> RankProfile:
    groups = [
        Group(
            number=number, name=name, desc=desc, backend=backend, size=size, rank=own,
            ranks=tuple(from_runs(runs)), time_ns=0,
        )
        for number, name, desc, backend, size, own, runs in table
    ]  # fmt: skip
    samples = Tracker(ops=OPS).update(records)
    made = digest(
        records, ops=OPS, groups=groups, samples=samples, rank=rank, node=f"n{rank}", device="cpu"
    )
    assert made is not None
    return made


def named(diagnosis: Diagnosis) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    return [(s.what, s.ranks, s.peer_ranks) for s in diagnosis.suspects]


@pytest.mark.parametrize("known", [True, False], ids=["healthy-known", "by-peers"])
@pytest.mark.parametrize("name", WORKERS)
def test_the_throttled_worker_is_named_alone(name: str, known: bool) -> None:
    job = load(name)
    found = diagnose(job.slow, job.healthy if known else [], episode="e", slowdown=SLOWDOWN)
    assert named(found) == [("compute", (job.culprit,), ())]
    assert 1.4 < found.suspects[0].slowdown < 2.4


@pytest.mark.parametrize("known", [True, False], ids=["healthy-known", "by-peers"])
@pytest.mark.parametrize("name", ["pp_link", "pp_egress"])
def test_the_slow_link_of_the_pipeline_is_named_first(name: str, known: bool) -> None:
    job = load(name)
    found = diagnose(job.slow, job.healthy if known else [], episode="e", slowdown=SLOWDOWN)
    src, dst = job.culprit
    assert named(found)[0] == ("link", (src,), (src + 2 if dst is None else dst,))
    assert not [s for s in found.suspects if s.what == "compute"]


def test_a_slow_link_of_the_ring_is_the_group_s() -> None:
    job = load("dp_link")
    found = diagnose(job.slow, job.healthy, episode="e", slowdown=SLOWDOWN)
    assert named(found) == [("group", (0, 1, 2, 3), ())]


@pytest.mark.parametrize("name", [*WORKERS, "dp_link", "pp_link", "pp_egress"])
def test_before_the_fault_nobody_is_named(name: str) -> None:
    job = load(name)
    halves = diagnose(job.healthy, [], episode="e", slowdown=1.0)
    assert not halves.suspects
    assert not halves.everyone


def test_a_wait_that_one_replica_shows_to_be_none_counts_for_no_other() -> None:
    """DDP reduces while it computes on: the culprit's own time holds that computing too."""
    job = load("dp")
    overlapped = {p.rank: max(cell.overlap for cell in p.cells) for p in job.slow}
    assert overlapped[job.culprit] < 0.3 < min(o for r, o in overlapped.items() if r != job.culprit)
    found = diagnose(job.slow, job.healthy, episode="e", slowdown=SLOWDOWN)
    own = found.suspects[0].measurements[0]
    assert own.value > 1.05 * (job.slow[job.culprit].compute_s or 0.0)


@pytest.mark.parametrize("path", sorted(OTHERS.glob("*.npz")), ids=lambda p: p.stem)
def test_every_kind_of_job_has_a_profile(path: Path) -> None:
    with np.load(path) as file:
        columns, ops = file["records"], [str(op) for op in file["ops"]]
        groups = [
            Group(
                number=number, name=str(number), desc="undefined", backend="gloo",
                size=int((g >= 0).sum()), rank=0, ranks=tuple(g[g >= 0].tolist()), time_ns=0,
            )
            for number, g in enumerate(file["group_ranks"])
        ]  # fmt: skip
    records = np.zeros(len(columns), RECORD_DTYPE)
    for name in columns.dtype.names:
        records[name] = columns[name]
    records["seq"] = np.arange(1, len(records) + 1)  # nothing was lost
    samples = Tracker(ops=ops).update(records)
    made = digest(records, ops=ops, groups=groups, samples=samples, rank=0)
    assert made is not None
    clean = [s for s in samples if not s.foreign_calls]
    usual = mode([s.calls for s in clean])  # a programme may change for good
    times = [s.duration_s for s in clean if s.calls == usual]
    assert made.iteration_s == pytest.approx(np.median(times), rel=0.1)
    assert made.iterations == pytest.approx(len(times), abs=3)
    assert made.compute_s is None or 0 <= made.compute_s <= made.iteration_s
    assert {cell.op for cell in made.cells} <= set(ops)
    assert {cell.label for cell in made.cells} == {""}  # nobody named a group
    for cell in made.cells:
        assert set(cell.group) <= set(range(8))
        assert cell.peer is None or cell.peer in cell.group
        assert cell.wait_s >= 0
        assert cell.gap_s >= 0
        assert cell.calls <= made.iterations * 8 * MAX_POSITIONS
    ordinals = [(c.group, c.label, c.op, c.size_bytes, c.peer, c.position) for c in made.cells]
    assert len(set(ordinals)) == len(ordinals)
