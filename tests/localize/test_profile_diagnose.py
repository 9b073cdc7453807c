"""Who is named, in made-up jobs in which it is known who is slow."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.localize.made_streams import Faults, Grid, run

from failslow.localize.compare import Table
from failslow.localize.profile import UNCOMPARED, diagnose
from failslow.pipeline.wording import described
from failslow.records import Diagnosis, RankProfile
from failslow.report.words import diagnosis_text

SMALL = Grid(tp=2, pp=2, dp=4)
DEEP = Grid(tp=2, pp=4, dp=2)
HEALTHY = Faults(seed=1)


_KEPT: dict[tuple[str, str], tuple[list[RankProfile], float]] = {}


def played(grid: Grid, faults: Faults) -> tuple[list[RankProfile], float]:
    """(profiles, seconds of an iteration), made once."""
    key = (repr(grid), repr(faults))
    if key not in _KEPT:
        made = run(grid, faults)
        _KEPT[key] = made.profiles(), made.iteration_s
    return _KEPT[key]


def found(grid: Grid, faults: Faults, *, known: bool = True) -> Diagnosis:
    """known: there are profiles of healthy times."""
    healthy, healthy_s = played(grid, replace(HEALTHY, noise=faults.noise, uneven=faults.uneven))
    now, now_s = played(grid, faults)
    return diagnose(now, healthy if known else [], episode="e7", slowdown=now_s / healthy_s)


def accused(diagnosis: Diagnosis) -> set[int]:
    """Workers named for what they compute."""
    return {r for s in diagnosis.suspects if s.what == "compute" for r in s.ranks}


def links(diagnosis: Diagnosis) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    return [(s.what, s.ranks, s.peer_ranks) for s in diagnosis.suspects if s.what != "compute"]


UNSHRUNK = (Phase.explicit, Phase.reuse, Phase.generate)
"""A failing job says enough; a smaller one takes minutes to find."""

either = pytest.mark.parametrize("known", [True, False], ids=["healthy-known", "by-peers"])


@either
@pytest.mark.parametrize("on_device", [False, True], ids=["host-clock", "device-clock"])
def test_a_slow_worker_is_named_and_nobody_who_waits_for_it(known: bool, on_device: bool) -> None:
    grid = replace(SMALL, on_device=on_device)
    (suspect,) = found(grid, Faults(slow={5: 1.4}), known=known).suspects
    assert (suspect.what, suspect.ranks) == ("compute", (5,))
    assert suspect.slowdown == pytest.approx(1.4, rel=0.05)
    own, blocked, late = suspect.measurements
    assert own.expected is not None
    assert own.value - own.expected == pytest.approx(suspect.extra_s)
    assert blocked.expected is not None
    assert blocked.value < blocked.expected, "it waits less than the others"
    assert late.value > 0.5 * suspect.extra_s, "others wait for it"
    assert suspect.score > 0.8


@either
def test_several_at_once_are_all_named(known: bool) -> None:
    assert accused(found(DEEP, Faults(slow={5: 1.4, 12: 1.6}), known=known)) == {5, 12}
    assert accused(found(SMALL, Faults(slow={0: 1.5, 1: 1.5, 6: 1.5}), known=known)) == {0, 1, 6}


def test_most_of_the_replicas_can_be_slow_where_healthy_times_are_known() -> None:
    most = found(Grid(dp=4), Faults(slow={0: 1.5, 1: 1.5, 3: 1.5}))
    assert accused(most) == {0, 1, 3}


@either
def test_a_slow_link_of_the_pipeline_is_named_with_its_direction(known: bool) -> None:
    diagnosis = found(SMALL, Faults(links={(3, 11): 40.0}), known=known)
    assert links(diagnosis)[0] == ("link", (3,), (11,))
    assert not accused(diagnosis)
    backward = found(SMALL, Faults(links={(11, 3): 40.0}), known=known)
    assert links(backward)[0] == ("link", (11,), (3,))


@either
def test_a_slow_link_of_a_ring_is_the_group_s(known: bool) -> None:
    diagnosis = found(SMALL, Faults(links={(3, 1): 20.0}), known=known)
    assert links(diagnosis) == [("group", (1, 3, 5, 7), ())]
    assert diagnosis.suspects[0].label == "dp"
    assert diagnosis.suspects[0].slowdown > 5
    assert not accused(diagnosis)


def test_slow_links_of_one_worker_point_to_it() -> None:
    egress = {(3, 11): 60.0, (3, 1): 30.0}
    diagnosis = found(SMALL, Faults(links=egress))
    assert set(links(diagnosis)) == {("link", (3,), (11,)), ("group", (1, 3, 5, 7), ())}
    assert all("rank 3 is an end of all 2 slow links" in s.note for s in diagnosis.suspects)


def test_a_slow_worker_and_a_slow_link_elsewhere_are_both_named() -> None:
    diagnosis = found(SMALL, Faults(slow={8: 1.6}, links={(2, 0): 12.0}))
    assert accused(diagnosis) == {8}
    assert links(diagnosis) == [("group", (0, 2, 4, 6), ())]


@either
@pytest.mark.parametrize(
    "faults", [Faults(everyone=1.3), Faults(pause_s=0.06)], ids=["all-slower", "pauses-go-round"]
)
def test_everyone_is_nobody(faults: Faults, known: bool) -> None:
    diagnosis = found(SMALL, faults, known=known)
    assert diagnosis.everyone
    assert not diagnosis.suspects
    assert diagnosis.note
    assert diagnosis.compute_alike == (known and faults.everyone > 1.0)


def test_that_all_compute_longer_alike_is_told_as_a_change_of_the_work() -> None:
    grown = found(SMALL, Faults(everyone=1.9))
    assert "failslow.step(work=" in described(grown)
    assert "perhaps the work changed" in diagnosis_text(grown)
    every_link = {(a, b): 12.0 for a in range(SMALL.world) for b in range(SMALL.world)}
    for faults in (Faults(everyone=1.9, slow={3: 1.5}), Faults(everyone=1.2, links=every_link)):
        assert not found(SMALL, faults).compute_alike


@pytest.mark.parametrize("known", [True, False])
def test_what_is_uneven_by_design_is_said_and_blames_nobody(known: bool) -> None:
    grid = Grid(pp=4, dp=2, stage_work=(1.0, 1.0, 1.0, 1.5))
    again = found(grid, Faults(seed=3), known=known)
    assert again.imbalance.startswith("the last stage computes x1.")
    assert not again.suspects
    assert not again.everyone
    # and it does not keep a slow worker of that stage from being named
    assert accused(found(grid, Faults(slow={6: 1.5}), known=known)) == {6}


@either
def test_devices_of_other_models_are_not_slow(known: bool) -> None:
    grid = Grid(dp=8, devices={0: "old", 1: "old"}, speeds={"old": 1.5, "gpu": 1.0})
    diagnosis = found(grid, Faults(seed=4), known=known)
    assert not diagnosis.suspects
    assert "(old)" in diagnosis.imbalance
    assert accused(found(grid, Faults(slow={5: 1.8}), known=known)) == {5}
    assert accused(found(grid, Faults(slow={1: 1.5}), known=known)) == {1}


def test_a_stage_of_its_own_has_nothing_to_compare_to_but_its_healthy_time() -> None:
    grid = Grid(pp=4, dp=1)
    (known,) = found(grid, Faults(slow={2: 1.5})).suspects
    assert known.ranks == (2,)
    assert known.score > 0.8
    (unknown,) = found(grid, Faults(slow={2: 1.5}), known=False).suspects
    assert unknown.ranks == (2,)
    assert unknown.note.startswith(UNCOMPARED)
    assert unknown.score <= 0.2


def test_a_ring_alone_has_nothing_to_compare_to_but_its_healthy_time() -> None:
    grid, faults = Grid(dp=4), Faults(links={(2, 1): 20.0})
    (known,) = found(grid, faults).suspects
    assert (known.what, known.ranks) == ("group", (0, 1, 2, 3))
    (unknown,) = found(grid, faults, known=False).suspects
    assert (unknown.what, unknown.note) == ("group", UNCOMPARED)
    assert unknown.score <= 0.1


def test_missing_workers_are_named_and_nobody_is_called_blameless() -> None:
    now, _ = played(SMALL, Faults(slow={5: 1.4}))
    healthy, _ = played(SMALL, HEALTHY)
    diagnosis = diagnose(
        [p for p in now if p.rank not in (5, 9)], healthy, episode="e7", slowdown=1.2
    )
    assert diagnosis.missing == (5, 9)
    assert "no profile of ranks 5, 9" in diagnosis.note
    assert not diagnosis.everyone
    assert not diagnosis.suspects


def test_a_job_that_is_healthy_again_blames_nobody() -> None:
    diagnosis = found(SMALL, Faults(seed=9))
    assert not diagnosis.suspects
    assert not diagnosis.everyone
    assert "nothing is slow now" in diagnosis.note


def test_a_slow_worker_for_which_nobody_waits_is_not_named() -> None:
    """Its own time looks long where its waits cannot be seen; the others' waits tell."""
    now, _ = played(SMALL, Faults(seed=9))
    unseen = [replace(p, compute_s=1.5 * (p.compute_s or 0.0)) if p.rank == 6 else p for p in now]
    assert not accused(diagnose(unseen, [], episode="e7", slowdown=1.0))


def test_nobody_is_called_blameless_whose_own_time_cannot_be_seen() -> None:
    """As of GPUs whose completions nobody records: it said all were late alike."""
    blind = [
        [
            replace(p, compute_s=None, cells=tuple(replace(c, duration_s=None) for c in p.cells))
            if p.rank < 3
            else p
            for p in played(SMALL, faults)[0]
        ]
        for faults in (Faults(pause_s=0.06), HEALTHY)
    ]
    diagnosis = diagnose(*blind, episode="e7", slowdown=1.3)
    assert not diagnosis.everyone
    assert "what ranks 0, 1, 2 spend by themselves cannot be seen" in diagnosis.note


def test_groups_of_unknown_workers_are_not_one_group() -> None:
    """As those a library makes by itself, and those beyond what a ring can describe."""
    now, _ = played(SMALL, Faults(slow={5: 1.4}))
    bare = [replace(p, cells=tuple(replace(c, group=(), peer=None) for c in p.cells)) for p in now]
    alone = [p for p in bare if p.rank != 5] + [
        replace(p, cells=tuple(replace(c, duration_s=9.0) for c in p.cells))
        for p in bare
        if p.rank == 5
    ]
    table = Table(alone, [])
    assert not table.lateness_known.any()
    assert not table.lateness.any()


def test_who_is_alone_in_a_group_is_no_slow_group() -> None:
    now, _ = played(SMALL, HEALTHY)
    first = now[0]
    cells = tuple(replace(c, group=(first.rank,), peer=None) for c in first.cells)
    diagnosis = diagnose([replace(first, cells=cells)], [], episode="e7", slowdown=1.6)
    assert diagnosis.suspects == ()


def test_who_spends_nothing_by_itself_in_healthy_times_is_named_with_a_sane_ratio() -> None:
    healthy, _ = played(SMALL, HEALTHY)
    idle = [replace(p, compute_s=0.0) for p in healthy]
    now = [
        replace(
            p,
            compute_s=0.5 * p.iteration_s if p.rank == 5 else 0.0,
            iteration_s=1.5 * p.iteration_s,
            cells=tuple(replace(c, duration_s=0.01 if p.rank == 5 else 1.0) for c in p.cells),
        )
        for p in healthy
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        diagnosis = diagnose(now, idle, episode="e7", slowdown=1.5)
    (suspect, *_) = diagnosis.suspects
    assert (suspect.what, suspect.ranks) == ("compute", (5,))
    assert 10 < suspect.slowdown < 1e4


def test_nothing_is_made_of_nothing() -> None:
    assert diagnose([], [], episode="e7", slowdown=1.3).note == "no worker sent a profile"
    bare = RankProfile(
        rank=0, node="n", start_t=0.0, end_t=1.0, iterations=1, iteration_s=1.0, compute_s=None,
        cells=(),
    )  # fmt: skip
    assert not diagnose([bare], [], episode="e7", slowdown=1.3).suspects
    with pytest.raises(ValueError, match="two profiles"):
        diagnose([bare, bare], [], episode="e7", slowdown=1.3)


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    tp, pp, dp = draw(
        st.sampled_from([(2, 2, 4), (1, 4, 4), (4, 2, 2), (2, 4, 2), (1, 1, 16), (1, 2, 8)])
    )
    return Grid(tp=tp, pp=pp, dp=dp, on_device=draw(st.booleans()), micro_batches=4)


@settings(max_examples=8, phases=UNSHRUNK)
@given(grid=grids(), data=st.data(), known=st.booleans(), factor=st.floats(1.4, 2.5))
def test_whoever_is_slow_is_named_and_no_other(
    grid: Grid, data: st.DataObject, known: bool, factor: float
) -> None:
    rank = data.draw(st.integers(0, grid.world - 1))
    faults = Faults(slow={rank: factor}, seed=data.draw(st.integers(2, 1000)))
    assert accused(found(grid, faults, known=known)) == {rank}


@settings(max_examples=8, phases=UNSHRUNK)
@given(
    grid=grids(),
    spread=st.tuples(st.floats(0.03, 0.05), st.floats(0.0, 0.05)),
    seed=st.integers(2, 1000),
    known=st.booleans(),
    slowdown=st.sampled_from([0.0, 1.0, 1.3]),
)
def test_noise_accuses_nobody(
    grid: Grid, spread: tuple[float, float], seed: int, known: bool, slowdown: float
) -> None:
    noise, uneven = spread
    now, _ = played(grid, Faults(noise=noise, uneven=uneven, seed=seed))
    healthy = played(grid, Faults(noise=noise, uneven=uneven, seed=1))[0] if known else []
    diagnosis = diagnose(now, healthy, episode="e7", slowdown=slowdown)
    assert not [s for s in diagnosis.suspects if not s.note.startswith(UNCOMPARED)]


@pytest.mark.slow
@settings(max_examples=60, phases=UNSHRUNK)
@given(
    grid=grids(),
    data=st.data(),
    known=st.booleans(),
    factors=st.tuples(st.floats(1.4, 2.0), st.floats(1.4, 2.0)),
)
def test_two_slow_workers_are_named_and_no_other(
    grid: Grid, data: st.DataObject, known: bool, factors: tuple[float, float]
) -> None:
    pair = st.sets(st.integers(0, grid.world - 1), min_size=2, max_size=2)
    slow = dict(zip(sorted(data.draw(pair)), factors, strict=True))
    named = accused(found(grid, Faults(slow=slow, seed=data.draw(st.integers(2, 99))), known=known))
    worst = max(slow, key=lambda rank: slow[rank])
    assert worst in named or not known
    assert named <= set(slow)


@pytest.mark.slow
def test_64_workers() -> None:
    grid = Grid(tp=4, pp=4, dp=4)
    for known in (True, False):
        assert accused(found(grid, Faults(slow={7: 1.5, 42: 1.5}), known=known)) == {7, 42}
        assert not found(grid, Faults(seed=5, uneven=0.05), known=known).suspects
        flooded = found(grid, Faults(links={(33, 49): 60.0}), known=known)
        assert links(flooded) == [("link", (33,), (49,))]
