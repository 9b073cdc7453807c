"""The fleet's reference, from earlier results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tests.probe.test_probe_result import FULL

from failslow.errors import ProbeError
from failslow.probe import ProbeResult, ProbeSpec
from failslow.probe.fleet import fleet_reference, load_history

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
    assert [r.probe_id for r in load_history([tmp_path, file])] == ["p0", "p1", "p0", "p1"]
    assert load_history([]) == ()


def test_what_is_no_history_is_told(tmp_path: Path) -> None:
    with pytest.raises(ProbeError, match=r"nowhere: cannot be read: No such file"):
        load_history([tmp_path / "nowhere"])
    bad = tmp_path / "bad.jsonl"
    bad.write_text(f"{FULL.to_json()}\n{{}}\n")
    with pytest.raises(ProbeError, match=r"bad.jsonl, line 2: no record of schema"):
        load_history([bad])
