"""The fleet's reference, from earlier results, and what it says of other models of devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tests.probe.made_journal import HEALTHY_S, Made, device, verdict
from tests.probe.test_probe_reading import DONE, start
from tests.probe.test_probe_reading import SPEC as FOUR_NODES
from tests.probe.test_probe_result import FULL

from failslow.errors import ProbeError
from failslow.probe import ProbeResult, ProbeSpec
from failslow.probe.fleet import fleet_reference, load_history
from failslow.probe.reading import devices_of
from failslow.probe.run import _read

SPEC = ProbeSpec(probe_id="p", nodes=2, workers_per_node=2)


def history(times_s: Sequence[float | None]) -> list[ProbeResult]:
    return [replace(FULL, healthy_iteration_s=s) for s in times_s]


def test_the_median_of_probes_that_compare() -> None:
    other = [
        replace(FULL, healthy_iteration_s=9.0, preset="gpu"),
        replace(FULL, healthy_iteration_s=9.0, nodes=("n",)),
        replace(FULL, healthy_iteration_s=9.0, pp=1, dp=4),
        replace(FULL, healthy_iteration_s=None),
    ]
    found = fleet_reference(SPEC, [*other, *history([0.10, 0.101, 0.30, 0.1005, 0.102])])
    assert found is not None
    assert found.iteration_s == pytest.approx(0.101)
    assert found.probes == 5


def test_fewer_than_five_are_no_reference() -> None:
    assert fleet_reference(SPEC, history([0.1, 0.1, 0.1, 0.1, None])) is None
    assert fleet_reference(SPEC, []) is None


def test_where_healthy_probes_differ_more_must_be_slower() -> None:
    calm = fleet_reference(SPEC, history([0.1, 0.1005, 0.0995, 0.1, 0.101]))
    rough = fleet_reference(SPEC, history([0.1, 0.11, 0.09, 0.107, 0.094]))
    assert calm is not None
    assert rough is not None
    assert calm.limit == pytest.approx(1.10)
    assert rough.limit > 1.25


def test_files_and_stores_are_read_up_to_what_is_being_written(tmp_path: Path) -> None:
    lines = [replace(FULL, probe_id=f"p{i}").to_json() for i in range(3)]
    file = tmp_path / "history.jsonl"
    file.write_text(f"{lines[0]}\n\n{lines[1]}\n{lines[2][:50]}", encoding="utf-8")
    assert [r.probe_id for r in load_history([file])] == ["p0", "p1"]
    assert load_history([]) == ()


def test_a_line_ends_at_a_newline_alone(tmp_path: Path) -> None:
    """JSON leaves other separators as they are, and a host's words may hold any."""
    found = replace(FULL, evidence=("a\u2028b\u2029c\x85d\x1ce\x0bf",))
    (tmp_path / "history.jsonl").write_text(f"{found.to_json()}\n", encoding="utf-8")
    assert load_history([tmp_path]) == (found,)


def test_a_probe_that_is_in_several_files_counts_once(tmp_path: Path) -> None:
    """A store and its own file, or a file twice; one's own of the same name are others."""
    nameless = replace(FULL, campaign="")
    later = replace(nameless, begin_t=FULL.begin_t + 1.0)
    found = [FULL, replace(FULL, probe_id="p1"), replace(FULL, campaign="c2"), nameless, later]
    lines = "".join(f"{r.to_json()}\n" for r in found)
    (tmp_path / "history.jsonl").write_text(lines, encoding="utf-8")
    (tmp_path / "copy.jsonl").write_text(lines, encoding="utf-8")
    assert load_history([tmp_path, tmp_path / "copy.jsonl"]) == tuple(found)


A100, H100 = ("NVIDIA A100",), ("NVIDIA H100",)


def of(devices: tuple[str, ...], times_s: Sequence[float | None]) -> list[ProbeResult]:
    return [replace(result, devices=devices) for result in history(times_s)]


def test_only_probes_on_the_same_model_compare() -> None:
    """A slower model is none's fault."""
    fast, slow = of(H100, [0.05] * 6), of(A100, [0.1] * 5)
    mixed = [*fast, *slow]
    own = fleet_reference(SPEC, mixed, A100)
    assert own is not None
    assert own.iteration_s == pytest.approx(0.1)
    assert (own.probes, own.devices) == (5, A100)
    assert fleet_reference(SPEC, mixed) is None, "which one is not known before it ran"
    assert fleet_reference(SPEC, [*fast, slow[0]]) is None
    assert fleet_reference(SPEC, fast, A100) is None
    assert fleet_reference(SPEC, mixed, tuple(sorted(A100 + H100))) is None
    one = fleet_reference(SPEC, fast)
    assert one is not None
    assert one == fleet_reference(SPEC, fast, H100)
    assert one.devices == H100


def test_results_of_unknown_model_count_as_long_as_there_is_one_model() -> None:
    """Those that an earlier failslow wrote."""
    old = of((), [0.1] * 4)
    for devices in ((), A100):
        found = fleet_reference(SPEC, [*old, *of(A100, [0.1])], devices)
        assert found is not None
        assert (found.probes, found.devices) == (5, A100)
    assert fleet_reference(SPEC, [*old, *of(A100, [0.1]), *of(H100, [0.05])], A100) is None


def test_what_failed_or_saw_little_is_no_reference() -> None:
    good = history([0.1] * 4)
    short = replace(FULL, healthy_iteration_s=0.05, reference_iteration_s=0.05, lost_s=0.0)
    for other in (
        replace(short, iterations=15, state="preempted"),
        replace(short, iterations=49),
        replace(short, iterations=390, state="failed"),
    ):
        assert fleet_reference(SPEC, [*good, other]) is None
    # slow iterations are few; those of a probe that was preempted late are as good
    for other in (
        replace(short, iterations=20, healthy_iteration_s=2.0, reference_iteration_s=2.0),
        replace(short, iterations=60, state="preempted"),
    ):
        assert fleet_reference(SPEC, [*good, other]) is not None


def test_what_is_no_history_is_told(tmp_path: Path) -> None:
    with pytest.raises(ProbeError, match=r"nowhere: cannot be read: No such file"):
        load_history([tmp_path / "nowhere"])
    bad = tmp_path / "bad.jsonl"
    bad.write_text(f"{FULL.to_json()}\n{{}}\n")
    with pytest.raises(ProbeError, match=r"bad.jsonl, line 2: no record of schema"):
        load_history([bad])


def ran_on(made: Made, *devices: str) -> None:
    """The benchmarks at the start, as each worker's result has it."""
    results: list[object] = [
        {"do": "gemm", "rank": rank, "device": device, "seconds": 0.001}
        for rank, device in enumerate(devices)
    ]
    made.add({"why": "reference", "results": [*results, None, {"rank": "x"}]}, kind="validation")


def test_devices_are_known_where_every_worker_tells_its_own(tmp_path: Path) -> None:
    made = Made()
    gpus = {"0": {"name": "NVIDIA H200", "ranks": [3]}, "1": {"name": 3, "ranks": [0]}, "2": None}
    made.telemetry("n3", {"gpu/0/sm_share": [0.9]}, gpus=gpus)
    ran_on(made, "NVIDIA H200", "NVIDIA A100", "NVIDIA A100")
    found = list(made.entries(tmp_path))
    assert devices_of(found, 4) == ("NVIDIA A100", "NVIDIA H200")
    assert devices_of(found, 5) == ()
    assert devices_of([], 4) == ()


H100S = [
    ProbeResult(
        probe_id="p", nodes=("n0", "n1", "n2", "n3"), devices=("NVIDIA H100",), workers=4, pp=2,
        dp=2, begin_t=1.0, end_t=61.0, state="done", iterations=600, result="healthy",
        healthy_iteration_s=HEALTHY_S,
    )
] * 5  # fmt: skip
TOLD_S = 1.1 * HEALTHY_S
"""What the detector is told by such a history."""


def test_a_slower_model_is_not_accused(tmp_path: Path) -> None:
    """Neither by the fleet's limit nor by a detector that was told what other models take."""
    made = Made(healthy_s=TOLD_S)
    ran_on(made, *["NVIDIA A100"] * 4)
    made.train(20, 1.6 * HEALTHY_S, healthy_s=TOLD_S)
    made.slow(120, 1.6 / 1.1, verdict("e1", device(2)), id="e1")
    entries = list(made.entries(tmp_path))
    result = _read(entries, FOUR_NODES, DONE, H100S)
    assert (result.result, result.devices) == ("healthy", ("NVIDIA A100",))
    assert result.healthy_iteration_s == pytest.approx(1.6 * HEALTHY_S, rel=0.02)
    assert (result.fleet_iteration_s, result.culprits) == (None, ())

    same = [replace(r, devices=("NVIDIA A100",)) for r in H100S]
    found = _read(entries, FOUR_NODES, DONE, same)
    assert found.result == "compute"
    assert found.slowdown == pytest.approx(1.6, rel=0.02)


def test_a_model_of_several_is_held_against_its_own(tmp_path: Path) -> None:
    """Nothing was told beforehand; afterwards its model is known."""
    made = Made()
    ran_on(made, *["NVIDIA A100"] * 4)
    start(made)
    entries = list(made.entries(tmp_path))
    for pace, result in ((1.7, "healthy"), (1.0, "communication")):
        own_s = pace * HEALTHY_S
        own = [replace(r, devices=("NVIDIA A100",), healthy_iteration_s=own_s) for r in H100S]
        found = _read(entries, FOUR_NODES, DONE, [*H100S, *own])
        assert found.result == result
        assert found.fleet_iteration_s == pytest.approx(own_s)


def test_a_faster_model_that_becomes_slow_is_accused(tmp_path: Path) -> None:
    """What the detector was told was above its own level, and did not count."""
    made = Made(healthy_s=0.5 * HEALTHY_S)
    ran_on(made, *["NVIDIA B200"] * 4)
    made.train(100, 0.5 * HEALTHY_S, healthy_s=0.5 * HEALTHY_S)
    made.slow(100, 1.6, verdict("e1", device(2)), id="e1")
    result = _read(list(made.entries(tmp_path)), FOUR_NODES, DONE, H100S)
    assert (result.result, result.culprits) == ("compute", ("device rank 2 of n2",))
    assert result.healthy_iteration_s == 0.5 * HEALTHY_S
