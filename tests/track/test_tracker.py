"""Sources, pauses, losses, divisions into blocks, and what a sample says."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.track.streams import (
    OPS,
    Call,
    Played,
    Stretch,
    barrier,
    ddp,
    every,
    follow,
    fsdp,
    hybrid,
    iterations_in,
    play,
    scalars,
    start_up,
)

import failslow.track
from failslow.config import TrackConfig
from failslow.records import (
    CALL_COLUMNS,
    KIND_CALL,
    KIND_OPTIMIZER_STEP,
    KIND_TRAINER_STEP,
    KIND_WAIT,
    StepSample,
)
from failslow.track import Tracker

MIXED = play(
    [
        start_up(),
        *every(30, 7, ddp(), scalars(9)),
        *[Stretch(fsdp(3), 0.2)] * 25,
        barrier(),
        *every(40, 11, Stretch(hybrid(3)), Stretch(hybrid(1)[:5] * 9, steps=False)),
        *[ddp((4_000_000,) * 2)] * 40,
    ]
)


def rows(*values: dict[str, Any]) -> NDArray[np.void]:
    """Call records from dictionaries of columns."""
    out = np.zeros(len(values), CALL_COLUMNS)
    out["kind"] = KIND_CALL
    for index, columns in enumerate(values):
        for name, value in columns.items():
            out[name][index] = value
    return out


def test_public_names_are_sorted_and_complete() -> None:
    assert failslow.track.__all__ == sorted(failslow.track.__all__)
    for name in failslow.track.__all__:
        assert hasattr(failslow.track, name)


@pytest.mark.parametrize("marked", [True, False])
@given(sizes=st.lists(st.integers(1, 400), min_size=1, max_size=12))
@settings(max_examples=5)
def test_the_division_into_blocks_leaves_no_trace(marked: bool, sizes: list[int]) -> None:
    calls = MIXED.calls if marked else MIXED.unmarked
    whole = Tracker(ops=OPS)
    expected = whole.update(calls) + whole.finish()
    tracker = Tracker(ops=OPS)
    samples: list[StepSample] = []
    at = turn = 0
    while at < len(calls):
        size = sizes[turn % len(sizes)]
        samples += tracker.update(calls[at : at + size])
        at, turn = at + size, turn + 1
    assert samples + tracker.finish() == expected
    assert tracker.state == whole.state


@pytest.mark.parametrize("marked", [True, False])
def test_one_call_at_a_time_gives_the_same(marked: bool) -> None:
    calls = MIXED.calls if marked else MIXED.unmarked
    whole = Tracker(ops=OPS)
    expected = whole.update(calls) + whole.finish()
    found = follow(calls, MIXED.ends_s, block=1)
    assert found.samples == expected


@given(seed=st.integers(0, 2**32 - 1), loops=st.integers(1, 40), cut=st.integers(1, 60))
@settings(max_examples=40)
def test_any_records_are_taken_and_their_division_leaves_no_trace(
    seed: int, loops: int, cut: int
) -> None:
    rng = np.random.default_rng(seed)
    calls = np.zeros(int(rng.integers(1, 40)), CALL_COLUMNS)
    calls["kind"] = rng.choice([1, 1, 1, 1, 1, 1, 2, 3, 4, 5], len(calls))
    calls["op"] = rng.integers(0, 14, len(calls))
    calls["group"] = rng.choice([0, 1, 0xFFFF], len(calls))
    calls["size_bytes"] = rng.choice([0, -1, 8, 4096, 10**9], len(calls))
    calls["wait_ns"] = rng.integers(0, 10**6, len(calls))
    calls = np.tile(calls, loops)
    broken = rng.random(len(calls)) < rng.choice([0.0, 0.02, 0.3])
    calls["size_bytes"][broken] = rng.integers(0, 10**6, int(broken.sum()))
    # threads write their records late: starts are not always in order
    calls["start_ns"] = np.cumsum(rng.integers(-(10**5), 10**7, len(calls)))
    whole = Tracker(ops=OPS)
    expected = whole.update(calls) + whole.finish()
    tracker = Tracker(ops=OPS)
    samples: list[StepSample] = []
    for begin in range(0, len(calls), cut):
        samples += tracker.update(calls[begin : begin + cut])
    assert samples + tracker.finish() == expected
    assert all(sample.duration_s > 0 for sample in expected)
    assert all((sample.compute_s or 0.0) >= 0 for sample in expected)


def test_the_optimizer_mark_serves_from_the_second_on() -> None:
    played = play([start_up(), *[Stretch(fsdp(32))] * 10])
    found = follow(played.calls, played.ends_s)
    assert found.tracker.state.source == "optimizer"
    assert found.tracker.state.period_calls == 98
    assert found.locked_at == 2
    assert [sample.end_s for sample in found.samples] == pytest.approx(played.ends_s[1:])


def test_a_loop_inside_the_first_iteration_gives_no_samples_before_the_mark() -> None:
    loop = [Call("allreduce_", 500_000)] * 48
    played = play([start_up(), *[Stretch(loop)] * 10])
    samples = follow(played.calls, played.ends_s, block=1).samples
    assert all(iterations_in(sample, played.ends_s) == 1 for sample in samples)
    assert len(samples) == 9
    assert samples[-1].run == 0


def test_trainer_steps_override_and_bring_their_index() -> None:
    played = play([start_up(), *[ddp()] * 20])
    calls = played.calls.copy()
    marks = np.flatnonzero(calls["kind"] == KIND_OPTIMIZER_STEP)
    extra = calls[marks].copy()
    extra["kind"] = KIND_TRAINER_STEP
    extra["size_bytes"] = 5000 + np.arange(20)
    extra["start_ns"] += 100_000
    calls = np.insert(calls, marks[5:] + 1, extra[5:])
    found = follow(calls, played.ends_s)
    assert found.tracker.state.source == "step"
    by_step = [sample for sample in found.samples if sample.run == 1]
    assert [sample.step for sample in by_step] == list(range(5007, 5020))  # 5006: by the optimizer
    assert all(iterations_in(sample, played.ends_s) <= 1 for sample in found.samples)


def test_of_several_optimizers_the_one_that_steps_least_often_bounds_iterations() -> None:
    played = play([start_up(), *[ddp((4_000_000,))] * 120])
    calls = played.calls.copy()
    marks = np.flatnonzero(calls["kind"] == KIND_OPTIMIZER_STEP)
    calls["size_bytes"][marks[5::6]] = 1  # five steps of one network, one of the other
    found = follow(calls, played.ends_s)
    late = [sample for sample in found.samples if sample.run == found.samples[-1].run]
    assert len(late) >= 15
    assert all(iterations_in(sample, played.ends_s) == 6 for sample in late)


def test_optimizers_that_step_in_turn_bound_one_iteration_together() -> None:
    played = play([start_up(), *[ddp((4_000_000,))] * 60])
    calls = played.calls.copy()
    marks = np.flatnonzero(calls["kind"] == KIND_OPTIMIZER_STEP)
    calls["size_bytes"][marks] = np.arange(len(marks)) % 3
    samples = follow(calls, played.ends_s).samples
    assert len(samples) >= 18
    assert all(iterations_in(sample, played.ends_s) == 3 for sample in samples)


def test_an_optimizer_that_steps_rarely_costs_no_iteration_of_the_main_one() -> None:
    played = play([start_up(), *[ddp()] * 300])
    marks = np.flatnonzero(played.calls["kind"] == KIND_OPTIMIZER_STEP)
    rare = played.calls[marks[20::21]].copy()
    rare["size_bytes"] = 1
    rare["start_ns"] += 100_000
    calls = np.insert(played.calls, marks[20::21] + 1, rare)
    found = follow(calls, played.ends_s)
    assert [sample.end_s for sample in found.samples] == pytest.approx(played.ends_s[1:])
    assert found.tracker.state.run == 0
    assert found.tracker.state.note == ""


def test_optimizers_that_come_and_go_are_a_trouble_that_is_told() -> None:
    played = play([start_up(), *[ddp()] * 300])
    calls = played.calls.copy()
    marks = np.flatnonzero(calls["kind"] == KIND_OPTIMIZER_STEP)
    calls["size_bytes"][marks] = np.arange(len(marks)) // 40
    assert "failslow.step()" in follow(calls, played.ends_s).tracker.state.note


def test_a_long_evaluation_is_no_end_of_the_marks() -> None:
    step, batches = ddp(), scalars(6000)
    played = play([start_up(), *[step] * 2000, batches, *[step] * 100])
    found = follow(played.calls, played.ends_s, block=997)
    assert found.tracker.state.source == "optimizer"
    assert {sample.run for sample in found.samples} == {0}
    assert len(found.samples) == 2099


def test_when_marks_end_the_calls_are_followed() -> None:
    first = play([start_up(), *[Stretch(fsdp())] * 30])
    second = play([Stretch(fsdp())] * 400)
    later = second.unmarked.copy()
    shift = int(first.calls["start_ns"][-1] - later["start_ns"][0]) + 5_000_000
    later["start_ns"] += shift
    later["end_ns"] += shift
    found = follow(np.concatenate([first.calls, later]), second.ends_s + shift / 1e9)
    assert found.tracker.state.source == "period"
    assert found.tracker.state.period_calls == 38
    late = [sample for sample in found.samples if sample.run == 1]
    assert len(late) > 200
    assert np.median([sample.duration_s for sample in late]) == pytest.approx(0.1, rel=0.01)


@pytest.mark.parametrize("marked", [True, False])
def test_our_own_pauses_are_left_out(marked: bool) -> None:
    played = play([start_up(), *[ddp()] * 40])
    calls = (played.calls if marked else played.unmarked).copy()
    at = len(calls) // 2
    pause = 3.0
    begin_s = calls["start_ns"][at - 1] / 1e9 + 0.001
    for name in ("start_ns", "end_ns"):
        calls[name][at:] += int(pause * 1e9)
    tracker = Tracker(ops=OPS)
    samples = tracker.update(calls[:at])
    samples += tracker.update(calls[at:], pauses=[(begin_s, begin_s + pause)])
    samples += tracker.finish()
    assert len(samples) >= 38
    assert max(sample.duration_s for sample in samples) < 0.13
    assert min(sample.duration_s for sample in samples) > 0.08
    assert sum(sample.compute_s is None for sample in samples) == 1


@pytest.mark.parametrize("marked", [True, False])
def test_lost_records_cost_samples_but_make_no_false_ones(marked: bool) -> None:
    played = play([start_up(), *[Stretch(fsdp())] * 200])
    calls = played.calls if marked else played.unmarked
    tracker = Tracker(ops=OPS)
    rng = np.random.default_rng(7)
    samples: list[StepSample] = []
    at, losses = 0, 0
    while at < len(calls):
        size = int(rng.integers(300, 1500))
        samples += tracker.update(calls[at : at + size])
        at += size
        if at < len(calls):
            gap = int(rng.integers(1, 400))
            samples += tracker.update(calls[at + gap : at + gap + 1], lost=gap)
            at, losses = at + gap + 1, losses + 1
    assert losses > 4
    assert tracker.state.lost_records > 0
    assert all(iterations_in(sample, played.ends_s) == 1 for sample in samples)
    assert len(samples) > 90
    # Steps missed are counted by their usual length.
    true_steps = [int(np.searchsorted(played.ends_s, sample.end_s)) for sample in samples]
    offsets = np.array([sample.step for sample in samples]) - np.array(true_steps)
    assert np.abs(np.diff(offsets)).max() <= 1
    assert tracker.state.run == 0


def test_a_hole_while_searching_restarts_the_search() -> None:
    played = play([start_up(), *[Stretch(fsdp())] * 30])
    calls = played.unmarked
    tracker = Tracker(ops=OPS)
    tracker.update(calls[:100])
    samples = tracker.update(calls[300:], lost=200)
    assert len(samples) >= 20
    assert all(iterations_in(sample, played.ends_s) == 1 for sample in samples)


def test_an_iteration_that_hangs_is_one_long_iteration() -> None:
    steps = [Stretch(fsdp())] * 30
    steps[20] = Stretch(fsdp(), 7.0)
    played = play([start_up(), *steps])
    samples = follow(played.unmarked, played.ends_s).samples
    assert sum(sample.duration_s > 1 for sample in samples) <= 2
    assert max(sample.duration_s for sample in samples) == pytest.approx(7.0, rel=0.1)
    assert all(sample.foreign_calls == 0 for sample in samples)


def test_a_step_cut_short_gives_no_false_time() -> None:
    whole = fsdp()
    stretches = [Stretch(whole)] * 30 + [Stretch(whole[:11], steps=False)] + [Stretch(whole)] * 30
    played = play([start_up(), *stretches])
    found = follow(played.unmarked, played.ends_s)
    assert all(iterations_in(sample, played.ends_s) == 1 for sample in found.samples)
    assert len(found.samples) == 59
    assert found.tracker.state.run == 0


def test_bytes_and_calls_of_an_iteration_leave_foreign_ones_out() -> None:
    played = play([start_up(), *every(60, 9, Stretch(fsdp()), barrier())])
    samples = follow(played.unmarked, played.ends_s).samples
    moved = float(sum(call.size for call in fsdp()))
    assert {sample.work for sample in samples} == {moved}
    assert {sample.calls for sample in samples} == {38}
    assert {sample.foreign_calls for sample in samples} == {0, 3}


def test_compute_time_is_unknown_where_waits_are_hidden_and_no_mark_tells() -> None:
    played = play([start_up(), *[ddp()] * 80])
    calls = played.calls.copy()
    calls["wait_ns"] = calls["end_ns"] = 0
    unmarked = calls[calls["kind"] == KIND_CALL]
    assert {s.compute_s for s in follow(unmarked, played.ends_s).samples} == {None}
    marked = follow(calls, played.ends_s).samples
    # between the last bucket and the mark the worker may have waited: 3 of 17 parts
    shares = [(s.compute_s or 0.0) / s.duration_s for s in marked]
    assert np.median(shares) == pytest.approx(14 / 17, abs=0.01)


@pytest.mark.parametrize(
    ("groups", "known"),
    [
        ((1, 1, 1), True),  # DDP's buckets: waited for after the last, before the mark
        ((2, 2, 1), False),  # tensor parallelism waits in its layers, unseen
        ((2, 1, 1), False),
        ((1, 1, 2), False),
    ],
)
@pytest.mark.parametrize("block", [1, 2, 100])
def test_a_mark_tells_of_waits_for_the_last_calls_group_alone(
    groups: tuple[int, ...], known: bool, block: int
) -> None:
    mark = {"kind": KIND_OPTIMIZER_STEP}
    calls = [{**mark, "start_ns": 0}]
    for step in range(6):
        begin_ns = 60_000_000 * step
        for number, group in enumerate(groups):
            at_ns = begin_ns + 10_000_000 * (number + 1)
            calls.append({"op": 1, "group": group, "start_ns": at_ns, "size_bytes": 8 * number})
        calls.append({**mark, "start_ns": begin_ns + 60_000_000})
    made, tracker = rows(*calls), Tracker(ops=OPS)
    samples = [
        s for at in range(0, len(made), block) for s in tracker.update(made[at : at + block])
    ]
    assert len(samples) == 6
    told = {None if s.compute_s is None else round(s.compute_s, 6) for s in samples}
    assert told == {0.030 if known else None}


def test_a_wait_seen_later_is_taken_out_once() -> None:
    mark = {"kind": KIND_OPTIMIZER_STEP}
    iteration = [
        {"op": 1, "size_bytes": 4096, "start_ns": 10_000_000, "call_ns": 1_000_000},
        {"op": 1, "size_bytes": 8192, "start_ns": 20_000_000, "call_ns": 1_000_000},
        {"kind": KIND_WAIT, "size_bytes": 7, "start_ns": 30_000_000, "wait_ns": 5_000_000},
        {"kind": KIND_WAIT, "size_bytes": 8, "start_ns": 34_000_000, "wait_ns": 6_000_000},
        {**mark, "start_ns": 50_000_000},
    ]
    calls = rows({**mark, "start_ns": 0}, *iteration)
    (sample,) = Tracker(ops=OPS).update(calls)
    # two calls of 1 ms, and the waits' union from 30 to 40 ms
    assert sample.compute_s == pytest.approx(0.050 - 0.012)
    assert sample.work == 12288


def test_a_call_complete_before_the_next_may_have_blocked_and_an_overlapped_one_did_not() -> None:
    mark = {"kind": KIND_OPTIMIZER_STEP}
    calls = rows(
        {**mark, "start_ns": 0},
        {"op": 1, "start_ns": 10_000_000, "end_ns": 15_000_000},
        {"op": 1, "start_ns": 20_000_000, "end_ns": 45_000_000},
        {"op": 1, "start_ns": 40_000_000, "end_ns": 48_000_000},
        {**mark, "start_ns": 60_000_000},
    )
    (sample,) = Tracker(ops=OPS).update(calls)
    assert sample.compute_s == pytest.approx(0.060 - 0.005 - 0.008)


def test_records_of_other_kinds_and_columns_are_passed_over() -> None:
    played = play([start_up(), *[ddp()] * 20])
    wider = np.dtype([*CALL_COLUMNS.descr, ("seq", np.uint64)])
    calls = np.zeros(len(played.calls) + 1, wider)
    for name in CALL_COLUMNS.names or ():
        calls[name][:-1] = played.calls[name]
    calls["kind"][-1] = 3
    assert Tracker(ops=OPS).update(calls) == Tracker(ops=OPS).update(played.calls)


def test_nothing_comes_of_nothing() -> None:
    tracker = Tracker(ops=OPS)
    assert tracker.update(np.zeros(0, CALL_COLUMNS)) == []
    assert tracker.finish() == []
    state = tracker.state
    assert (state.phase, state.source, state.iterations, state.note) == ("searching", None, 0, "")


def test_a_job_that_makes_no_calls_is_timed_by_its_marks_and_says_so() -> None:
    marks = rows(
        *[
            {"kind": KIND_OPTIMIZER_STEP, "start_ns": index * 50_000_000 + 10**9}
            for index in range(30)
        ]
    )
    tracker = Tracker(ops=OPS)
    samples = tracker.update(marks)
    assert [sample.duration_s for sample in samples] == pytest.approx([0.05] * 29)
    assert "CUDA graphs" in tracker.state.note


def held_bytes(tracker: Tracker) -> int:
    """Bytes of the rows a tracker keeps."""
    buffer = tracker._period._buffer
    return 0 if buffer is None else buffer._room.nbytes


@pytest.mark.parametrize("name", ["steady", "evaluating", "never repeating"])
def test_memory_stays_bounded(name: str) -> None:
    rng = np.random.default_rng(9)
    if name == "never repeating":
        noise = [Call("allreduce_", int(size)) for size in rng.integers(100, 10**9, 20_000)]
        played: Played = play([Stretch(noise)])
        played.calls["op"] = rng.integers(1, 9, len(played.calls))
    else:
        between = 15 if name == "evaluating" else 10**9
        played = play(every(1200, between, Stretch(fsdp()), scalars(200)))
    tracker = Tracker(ops=OPS, config=TrackConfig(buffer_calls=1 << 14))
    most = 0
    calls = played.unmarked
    for begin in range(0, len(calls), 1000):
        tracker.update(calls[begin : begin + 1000])
        most = max(most, held_bytes(tracker))
    assert most <= (1 << 15) * 100
    if name == "steady":
        assert held_bytes(tracker) == 0


def told(batches: list[int]) -> tuple[NDArray[np.void], NDArray[np.float64]]:
    """A job whose trainer tells the work of its iterations."""
    steps = [ddp(seconds=0.1 * batch / 64) for batch in batches]
    played = play([start_up(), *steps])
    calls = played.calls.copy()
    marks = np.flatnonzero(calls["kind"] == KIND_OPTIMIZER_STEP)
    calls["kind"][marks] = KIND_TRAINER_STEP
    calls["size_bytes"][marks] = np.arange(len(marks))
    calls["wait_ns"][marks] = batches
    return calls, played.ends_s


def test_work_the_trainer_tells_replaces_the_bytes_moved() -> None:
    batches = [64] * 10 + [128] * 10
    calls, ends_s = told(batches)
    samples = follow(calls, ends_s).samples
    assert [sample.work for sample in samples] == batches[1:]
    assert {sample.run for sample in samples} == {0}
    # what a mark tells is no time somebody waited
    assert all((s.compute_s or 0.0) > 0.9 * s.duration_s for s in samples)


def test_work_told_only_now_and_then_is_unknown_in_between_and_never_mixed_with_bytes() -> None:
    calls, ends_s = told([64] * 20)
    marks = np.flatnonzero(calls["kind"] == KIND_TRAINER_STEP)
    calls["wait_ns"][marks[:8]] = 0
    calls["wait_ns"][marks[12]] = 0
    samples = follow(calls, ends_s).samples
    assert [sample.work for sample in samples] == [
        *[7_400_000.0] * 7, *[64.0] * 4, None, *[64.0] * 7,
    ]  # fmt: skip
    assert [sample.run for sample in samples] == [0] * 7 + [1] * 12
