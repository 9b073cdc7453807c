"""Iterations of recorded real jobs, against the scripts' own timing.

Each recording is one rank's records of a real torch job over gloo (scripts/record_streams.py)
with the time at which the script saw each step end.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.track.streams import Followed, follow, iterations_in

from failslow.records import KIND_CALL, KIND_OPTIMIZER_STEP, StepSample
from failslow.track import Tracker

FOLDER = Path(__file__).parent / "recordings"
NAMES = sorted(path.stem for path in FOLDER.glob("*.npz"))
PERIODS = {
    "ddp": 2,
    "ddp_accumulate": 2,
    "fsdp": 12,
    "fsdp_accumulate": 68,
    "hybrid_rank0": 22,
    "hybrid_rank7": 26,
    "evaluation": 2,
    "checkpoint": 12,
    "experts": 14,
}
"""Calls of an iteration where the calls alone tell it. `ddp_sync_each` reduces the same two
buckets in every micro-batch and makes no call of its own at the step: only the mark tells."""

WAITED_UNSEEN = {"ddp", "ddp_accumulate", "evaluation"}
"""DDP's reducer waits in C++: all that is known of the anchor is its start, when the rank happened
to be ready. In the others the caller was seen to come back, and each iteration is timed well."""


class Recording(NamedTuple):
    calls: NDArray[np.void]
    ops: tuple[str, ...]
    ends_s: NDArray[np.float64]
    changed_at: int
    every: int

    def follow(self, *, marked: bool) -> Followed:
        calls = self.calls if marked else self.calls[self.calls["kind"] != KIND_OPTIMIZER_STEP]
        return follow(calls, self.ends_s, ops=self.ops)


@pytest.fixture(scope="module")
def recordings() -> dict[str, Recording]:
    loaded = {}
    for name in NAMES:
        with np.load(FOLDER / f"{name}.npz") as file:
            loaded[name] = Recording(
                file["records"],
                tuple(str(op) for op in file["ops"]),
                file["true_step_end_ns"] / 1e9,
                int(file["changed_at"]),
                int(file["every"]),
            )
    return loaded


def assert_timed(
    samples: list[StepSample], ends_s: NDArray[np.float64], median_within: float
) -> None:
    durations = np.array([sample.duration_s for sample in samples])
    begin = samples[0].end_s - samples[0].duration_s
    first, last = (int(np.argmin(np.abs(ends_s - at))) for at in (begin, samples[-1].end_s))
    assert len(samples) == last - first
    true = np.diff(ends_s[first : last + 1])
    assert np.median(durations) == pytest.approx(np.median(true), rel=median_within)
    assert durations.sum() == pytest.approx(true.sum(), rel=0.01)


def test_there_are_recordings() -> None:
    assert set(PERIODS) | {"change", "ddp_sync_each"} <= set(NAMES)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "change"])
def test_marked_iterations_are_timed_within_1_percent(
    name: str, recordings: dict[str, Recording]
) -> None:
    recording = recordings[name]
    found = recording.follow(marked=True)
    state = found.tracker.state
    assert (state.phase, state.source, state.run) == ("locked", "optimizer", 0)
    assert found.locked_at is not None
    assert found.locked_at <= 2
    assert len(found.samples) == len(recording.ends_s) - 1
    assert all(iterations_in(sample, recording.ends_s) == 1 for sample in found.samples)
    assert_timed(found.samples, recording.ends_s, 0.01)


@pytest.mark.parametrize("name", PERIODS)
def test_iterations_are_timed_from_the_calls_alone(
    name: str, recordings: dict[str, Recording]
) -> None:
    recording = recordings[name]
    found = recording.follow(marked=False)
    state = found.tracker.state
    assert (state.source, state.period_calls, state.run) == ("period", PERIODS[name], 0)
    assert found.first_followed(PERIODS[name]) <= 12
    assert len(found.samples) >= len(recording.ends_s) - 3
    assert_timed(found.samples, recording.ends_s, 0.01)
    if name not in WAITED_UNSEEN:
        first = len(recording.ends_s) - len(found.samples)
        true = np.diff(recording.ends_s[first - 1 :])
        durations = np.array([sample.duration_s for sample in found.samples])
        assert np.median(np.abs(durations / true - 1.0)) < 0.002


@pytest.mark.parametrize("name", ["evaluation", "checkpoint"])
@pytest.mark.parametrize("marked", [True, False])
def test_iterations_with_foreign_calls_say_so(
    name: str, marked: bool, recordings: dict[str, Recording]
) -> None:
    recording = recordings[name]
    found = recording.follow(marked=marked)
    foreign = [sample for sample in found.samples if sample.foreign_calls]
    between = (len(recording.ends_s) - 1) // recording.every
    assert between - 1 <= len(foreign) <= between + 1
    assert {sample.foreign_calls for sample in foreign} == {4}
    assert {sample.calls for sample in found.samples[2:]} == {PERIODS[name]}


@pytest.mark.parametrize("marked", [True, False])
def test_a_program_that_changes_is_followed_within_12_iterations(
    marked: bool, recordings: dict[str, Recording]
) -> None:
    recording = recordings["change"]
    found = recording.follow(marked=marked)
    changed = recording.changed_at
    assert found.first_followed(12, changed) <= changed + 12
    last_run = found.samples[-1].run
    later = [sample for sample in found.samples if sample.run == last_run]
    assert len(later) >= len(recording.ends_s) - changed - 12
    assert all(sample.calls == 12 for sample in later)
    # as recorded, this worker was often stopped for tens of milliseconds after its last call
    assert_timed(later, recording.ends_s, 0.01 if marked else 0.015)
    if marked:
        earlier = [sample for sample in found.samples if sample.run != last_run]
        assert_timed(earlier, recording.ends_s, 0.01)


def test_steps_the_trainer_marks_override_every_other_source(
    recordings: dict[str, Recording],
) -> None:
    recording = recordings["ddp_sync_each"]
    calls = recording.calls.copy()
    marks = np.flatnonzero(calls["kind"] == KIND_OPTIMIZER_STEP)
    calls["kind"][marks[::2]] = 5
    calls["size_bytes"][marks[::2]] = 700 + np.arange(len(marks[::2]))
    found = follow(calls, recording.ends_s, ops=recording.ops)
    assert found.tracker.state.source == "step"
    samples = [sample for sample in found.samples if sample.run == found.samples[-1].run]
    assert [sample.step for sample in samples] == list(range(samples[0].step, 700 + 60))
    assert all(iterations_in(sample, recording.ends_s) == 2 for sample in samples)


def test_time_in_collectives_is_no_compute_time(recordings: dict[str, Recording]) -> None:
    recording = recordings["fsdp"]
    calls = recording.calls[recording.calls["kind"] == KIND_CALL]
    blocked = (calls["call_ns"].astype(np.int64) + calls["wait_ns"]) / 1e9
    tracker = Tracker(ops=recording.ops)
    for sample in tracker.update(recording.calls):
        begin = sample.end_s - sample.duration_s
        inside = (calls["start_ns"] / 1e9 >= begin) & (calls["start_ns"] / 1e9 < sample.end_s)
        assert sample.compute_s is not None
        expected = sample.duration_s - blocked[inside].sum()
        assert sample.compute_s == pytest.approx(expected, abs=0.002)
