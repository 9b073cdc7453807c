"""A move among threads: any permutation, any state, any fault; all get the new state or none."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("torch", reason="moving state needs torch")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.mitigate.made_states import same_bits, states

from failslow.errors import MoveError
from failslow.mitigate import move, move_stream
from failslow.mitigate.move import Moved, swap_state
from failslow.mitigate.move_fake import Fault, ThreadHub, ThreadWire, WorkerDied
from failslow.mitigate.move_stream import digest

BIG = 1 << 40


def swap_all(
    given_states: Sequence[Any], now: Sequence[int], new: Sequence[int], **options: Any
) -> tuple[ThreadHub, list[Any]]:
    """Every worker's result; `given_states` by rank. counted: gets each worker's events."""
    hub = ThreadHub(len(now), faults=options.pop("faults", None))
    counted: list[int] = options.pop("counted", [])
    options = {
        "chunk_bytes": 4096,
        "limit_s": 30.0,
        "free": lambda _: BIG,
        "near": False,
        **options,
    }

    def work(wire: ThreadWire) -> Moved:
        moved = swap_state(
            given_states[wire.rank], placement_now=now, placement_new=new, group=wire, **options
        )
        counted.append(wire._events)
        return moved

    return hub, hub.run(work)


@st.composite
def block_permutations(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    """(now, new, tp) of up to six workers."""
    tp = draw(st.sampled_from([1, 1, 2]))
    blocks = draw(st.integers(1, 3 if tp == 2 else 5))
    ranks = draw(st.permutations(range(blocks * tp)))
    order = draw(st.permutations(range(blocks)))
    new = [rank for block in order for rank in ranks[block * tp : (block + 1) * tp]]
    return list(ranks), new, tp


@settings(max_examples=40)
@given(block_permutations(), st.booleans(), st.data())
def test_state_follows_the_position_bit_for_bit(
    placements: tuple[list[int], list[int], int], near: bool, data: st.DataObject
) -> None:
    now, new, tp = placements
    mine = [data.draw(states()) for _ in now]
    kept = copy.deepcopy(mine)
    _, results = swap_all(mine, now, new, tp=tp, chunk_bytes=20_000, near=near)
    for rank, result in enumerate(results):
        assert isinstance(result, Moved), result
        position = new.index(rank)
        assert result.position == position
        assert same_bits(result.state, kept[now[position]])
        assert same_bits(mine[rank], kept[rank])
        if now[position] == rank:
            assert result.state is mine[rank]
            assert result.sent_bytes == result.received_bytes == 0
    assert sum(r.sent_bytes for r in results) == sum(r.received_bytes for r in results)


KINDS = st.sampled_from(["die", "corrupt", "error"])


@settings(max_examples=150)
@given(
    st.permutations(range(4)),
    st.integers(0, 3),
    KINDS,
    st.one_of(
        st.tuples(st.just(False), st.integers(0, 40)),
        st.tuples(st.just(True), st.integers(0, 8)),  # without chunks there are few events
    ),
    st.sets(st.integers(0, 3)),
)
def test_a_fault_anywhere_leaves_all_or_none_moved(
    new: list[int], rank: int, kind: Any, when: tuple[bool, int], seers: set[int]
) -> None:
    """Whatever event of whatever worker fails, and whoever of the others still saw its vote."""
    mine = [{"w": torch.full((200, 100), float(r)), "step": r} for r in range(4)]
    kept = copy.deepcopy(mine)
    near, at = when
    faults = {rank: Fault(kind, at, frozenset(seers))}
    hub, results = swap_all(mine, range(4), new, faults=faults, near=near)
    living = [r for r in range(4) if not isinstance(results[r], WorkerDied)]
    moved = [r for r in living if isinstance(results[r], Moved)]
    assert all(isinstance(results[r], Moved | MoveError) for r in living), results
    undecided = [r for r in living if "does not tell" in str(results[r])]
    assert undecided in ([], [rank])  # its way to the store failed; it says so
    assert moved == [r for r in living if r not in undecided] or not moved, (results, hub.decision)
    for r in living:
        assert same_bits(mine[r], kept[r])  # the old copy is there, whatever happened
        if r in moved:
            assert same_bits(results[r].state, kept[list(new).index(r)])
    if hub.decision is not None:
        assert bool(moved) == hub.decision or not living


def test_the_store_decides_where_workers_saw_different_votes() -> None:
    """Worker 3 dies in the last vote: 0 saw everyone's yes, 1 and 2 only that 3 is gone."""
    mine = [{"w": torch.full((10,), float(r))} for r in range(4)]
    events = _events_of(mine)
    outcomes = set()
    for seers in ({0}, {0, 1, 2}, set[int]()):
        fault = Fault("die", events - 2, frozenset(seers))  # the last event is the settling
        hub, results = swap_all(mine, range(4), [1, 0, 3, 2], faults={3: fault})
        assert isinstance(results[3], WorkerDied)
        assert len({type(r) for r in results[:3]}) == 1, results
        outcomes.add((len(seers), hub.decision))
    assert (3, True) in outcomes
    assert (0, False) in outcomes


def _events_of(mine: Sequence[Any]) -> int:
    counted: list[int] = []
    swap_all(mine, range(4), [1, 0, 3, 2], counted=counted)
    assert len(set(counted)) == 1
    return counted[0]


def test_a_damaged_chunk_is_told_by_its_number() -> None:
    mine = [{"w": torch.full((40_000,), float(r))} for r in range(2)]
    # gather, manifest, gather, then 40 chunks
    _, results = swap_all(mine, [0, 1], [1, 0], faults={1: Fault("corrupt", 3 + 5)})
    for result in results:
        assert isinstance(result, MoveError)
        assert not result.refused
        assert "1 of 40 chunks from rank 1" in str(result)
        assert "number 5" in str(result)


def test_a_worker_that_hangs_costs_the_time_limit_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(move, "VOTE_S", 0.1)
    mine = [{"w": torch.full((40_000,), float(r))} for r in range(3)]
    _, results = swap_all(mine, range(3), [1, 2, 0], faults={2: Fault("hang", 9)}, limit_s=0.5)
    assert all(isinstance(r, MoveError) for r in results), results


def test_memory_that_runs_out_on_one_worker_stops_all(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = [{"w": torch.full((4000,), float(r))} for r in range(4)]
    make = move_stream.Inbox
    taken: list[int] = []

    def scarce(*args: Any) -> Any:
        taken.append(len(args[0]))
        if len(taken) == 3:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 16000 bytes")
        return make(*args)

    monkeypatch.setattr(move, "Inbox", scarce)
    hub, results = swap_all(mine, range(4), [1, 2, 3, 0])
    assert all(isinstance(r, MoveError) for r in results)
    assert all("can't allocate memory" in str(r) for r in results)
    assert hub.decision is None  # it never came to a decision


def test_without_room_it_is_refused_before_anything_is_sent() -> None:
    mine = [{"w": torch.zeros(250_000)} for _ in range(4)]
    hub, results = swap_all(mine, range(4), [1, 0, 2, 3], free=lambda _: 2_200_000)
    for result in results:
        assert isinstance(result, MoveError)
        assert result.refused
        assert "a second copy of the state takes" in str(result)
        assert "ranks 0, 1" in str(result)  # two on one host, 1 MB each
    assert all(arrivals.empty() for arrivals in hub.queues.values())
    _, results = swap_all(mine, range(4), [1, 0, 2, 3], free=lambda _: 2_300_000)
    assert all(isinstance(r, Moved) for r in results)


@pytest.mark.parametrize(
    ("new", "tp", "told"),
    [
        ([0, 1, 2, 2], 1, "not .* in another order"),
        ([0, 1, 2], 1, "not .* in another order"),
        ([1, 0, 2, 3], 2, "no tensor-parallel block"),
        ([0, 2, 1, 3], 2, "no tensor-parallel block"),
        ([2, 3, 0, 1], 3, "do not form tensor-parallel blocks of 3"),
        ([1, 0, 2, 4], 1, "not .* in another order"),
    ],
)
def test_placements_that_do_not_fit_are_refused(new: list[int], tp: int, told: str) -> None:
    _, results = swap_all([{}] * 4, range(4), new, tp=tp)
    for result in results:
        with pytest.raises(MoveError, match=told):
            raise result
        assert result.refused


def test_workers_asked_for_different_moves_refuse() -> None:
    hub = ThreadHub(2)
    orders = {0: [0, 1], 1: [1, 0]}
    results = hub.run(
        lambda wire: swap_state(
            {}, placement_now=[0, 1], placement_new=orders[wire.rank], group=wire
        )
    )
    assert all("rank 1 was asked for another move" in str(r) for r in results)


def test_one_worker_with_a_state_that_cannot_travel_refuses_for_all() -> None:
    mine: list[Any] = [{"w": torch.zeros(3)}, {"w": object()}]
    _, results = swap_all(mine, [0, 1], [1, 0])
    assert all(r.refused and "rank 1: state['w'] is a object" in str(r) for r in results)


def test_stages_of_uneven_size_change_places() -> None:
    mine = [
        {"w": torch.arange(200_000.0), "b": [torch.ones(3)] * 2},
        {},
        {"head": torch.arange(7), "tok": torch.zeros(70_000)},
    ]
    _, results = swap_all(mine, range(3), [2, 0, 1])
    for rank, position in ((0, 1), (1, 2), (2, 0)):
        assert same_bits(results[rank].state, mine[position])


@given(st.integers(1, 400_000), st.integers(0, 1 << 30), st.data())
def test_a_digest_tells_damage_and_disorder(size: int, seed: int, data: st.DataObject) -> None:
    chunk = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=_seeded(seed))
    damaged = chunk.clone()
    damaged[data.draw(st.integers(0, size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert digest(damaged) != digest(chunk)
    shift = data.draw(st.integers(1, 64)) * 8
    shifted = chunk.roll(shift)
    assert torch.equal(shifted, chunk) or digest(shifted) != digest(chunk)


def test_a_digest_does_not_care_where_in_memory_a_chunk_begins() -> None:
    data = torch.randint(0, 256, (200_001,), dtype=torch.uint8, generator=_seeded(1))
    whole = 200_001 // 65_536 * 65_536
    sums = move_stream._sums_there(data[:whole])
    for start in range(1, 9):
        shifted = torch.zeros(300_000, dtype=torch.uint8)[start : start + 200_001]
        shifted.copy_(data)
        assert digest(shifted) == digest(data)
        # the arithmetic of an accelerator gives the same
        assert torch.equal(move_stream._sums_there(shifted[:whole]), sums)
    assert digest(data) == zlib.crc32(sums.numpy().data, zlib.crc32(data[whole:].numpy().data))


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
