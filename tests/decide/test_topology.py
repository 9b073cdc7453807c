"""The topology model against the schedule itself; the search against brute force and the paper."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from failslow.decide.placement import best_placement, plan_topology
from failslow.decide.proof import Proof
from failslow.decide.topology import Blocks, TopologyModel
from failslow.errors import PlanError

LOCAL = 0.02
"""How far from the best the local search may end on small grids."""


def healthy(
    pp: int, dp: int, *, per_host: int = 1, microbatches: int = 8, ring_share: float = 0.3
) -> TopologyModel:
    """Stages of 0.1 s; the gradients' ring takes `ring_share` of the pipeline's time."""
    blocks = pp * dp
    hosts = blocks // per_host
    link = np.ones((hosts, hosts))
    np.fill_diagonal(link, 0.1)
    return TopologyModel(
        stage_s=[0.1] * pp,
        microbatches=microbatches,
        slowdown=np.ones(blocks),
        host=np.arange(blocks) // per_host,
        link=link,
        dp_s=[ring_share * 0.1 * (microbatches + pp - 1)] * pp,
        pp_s=0.004,
    )


def in_order(model: TopologyModel) -> Blocks:
    return np.arange(model.pp * model.dp).reshape(model.pp, model.dp)


@st.composite
def models(draw: st.DrawFn, shapes: Sequence[tuple[int, int, int]]) -> TopologyModel:
    """Small jobs (pp, dp, blocks a host) with stragglers and congested links anywhere."""
    pp, dp, per_host = draw(st.sampled_from(shapes))
    blocks, hosts = pp * dp, pp * dp // per_host
    factor = st.sampled_from([1.0, 1.0, 1.0, 1.3, 1.7, 2.5])
    link = np.ones((hosts, hosts))
    for _ in range(draw(st.integers(0, 3))):
        link[draw(st.integers(0, hosts - 1)), draw(st.integers(0, hosts - 1))] = draw(
            st.floats(1.5, 8.0)
        )
    np.fill_diagonal(link, 0.1)
    return TopologyModel(
        stage_s=draw(st.lists(st.floats(0.08, 0.12), min_size=pp, max_size=pp)),
        microbatches=draw(st.integers(1, 16)),
        slowdown=np.array(draw(st.lists(factor, min_size=blocks, max_size=blocks))),
        host=np.arange(blocks) // per_host,
        link=link,
        dp_s=draw(st.lists(st.floats(0.0, 0.6), min_size=pp, max_size=pp)),
        pp_s=draw(st.floats(0.0, 0.02)),
        ring_step=draw(st.sampled_from([1, -1])),
    )


def by_hand_s(model: TopologyModel, placement: Blocks) -> float:
    """The model's formula, one number after the other."""
    pp, dp, count = model.pp, model.dp, model.microbatches
    slowest = 0.0
    for replica in range(dp):
        stage_s = [model.stage_s[p] * model.slowdown[placement[p, replica]] for p in range(pp)]
        ahead_s, back_s = [], []
        for p in range(pp - 1):
            here, there = (model.host[placement[p + q, replica]] for q in (0, 1))
            ahead_s.append(model.pp_s / 2 * model.link[here, there])
            back_s.append(model.pp_s / 2 * model.link[there, here])
        periods = [*stage_s, *ahead_s, *back_s]
        for p in range(pp):
            if pp - p < count:
                inside = sum(stage_s[p:]) + sum(ahead_s[p:]) + sum(back_s[p:])
                periods.append(inside / (pp - p))
        fill = sum(stage_s) + sum(ahead_s) + sum(back_s)
        slowest = max(slowest, fill + (count - 1) * max(periods))
    rings = [0.0]
    for p in range(pp):
        for replica in range(dp if dp > 1 else 0):
            here = model.host[placement[p, replica]]
            there = model.host[placement[p, (replica + model.ring_step) % dp]]
            rings.append(model.dp_s[p] * model.link[here, there])
    return float(slowest + max(rings) + model.other_s)


def schedule_s(
    stage_s: Sequence[float], ahead_s: Sequence[float], back_s: Sequence[float], count: int
) -> float:
    """The exact 1F1B schedule of one replica, a third of a stage's time being forward."""
    stages = len(stage_s)
    todo = []
    for p in range(stages):
        warm = min(stages - p - 1, count)
        work = [("F", m) for m in range(warm)]
        for m in range(count):
            work += [("F", m + warm)] * (m + warm < count) + [("B", m)]
        todo.append(work)
    free, ahead_free, back_free = [0.0] * stages, [0.0] * stages, [0.0] * stages
    ready = {("F", 0, m): 0.0 for m in range(count)}
    while any(todo):
        for p in range(stages):
            while todo[p] and (todo[p][0][0], p, todo[p][0][1]) in ready:
                kind, m = todo[p].pop(0)
                share = 1 / 3 if kind == "F" else 2 / 3
                free[p] = max(free[p], ready[kind, p, m]) + share * stage_s[p]
                if kind == "F" and p == stages - 1:
                    ready["B", p, m] = free[p]
                elif kind == "F":
                    ahead_free[p] = max(free[p], ahead_free[p]) + ahead_s[p]
                    ready["F", p + 1, m] = ahead_free[p]
                elif p > 0:
                    back_free[p] = max(free[p], back_free[p]) + back_s[p - 1]
                    ready["B", p - 1, m] = back_free[p]
    return max(free)


@given(models([(2, 4, 1), (4, 2, 2), (1, 3, 1), (3, 1, 1), (1, 1, 1)]), st.integers(0, 999))
def test_prediction_is_the_formula_of_the_docstring(model: TopologyModel, seed: int) -> None:
    placement = in_order(model)
    shuffled = np.random.default_rng(seed).permuted(placement.ravel()).reshape(placement.shape)
    assert model.predict(shuffled) == pytest.approx(by_hand_s(model, shuffled))
    both = model.predict_many(np.stack([placement, shuffled]))
    assert both == pytest.approx([by_hand_s(model, placement), by_hand_s(model, shuffled)])


@given(models([(2, 4, 1), (4, 2, 2), (1, 3, 1)]), st.integers(5, 20))
def test_costs_of_a_replica_are_its_time_for_any_number_of_micro_batches(
    model: TopologyModel, microbatches: int
) -> None:
    columns = in_order(model).T
    fixed, per_microbatch = model.replica_costs(columns)
    longer = replace(model, microbatches=microbatches)
    assert fixed + per_microbatch * microbatches == pytest.approx(longer.replica_s(columns))


@pytest.mark.parametrize(("microbatches", "limit"), [(4, 0.25), (8, 0.2), (32, 0.12)])
def test_pipeline_time_is_near_that_of_the_exact_schedule(microbatches: int, limit: float) -> None:
    rng = np.random.default_rng(microbatches)
    errors = []
    for _ in range(80):
        pp = int(rng.integers(2, 6))
        model = healthy(pp, 1, microbatches=microbatches)
        slowdown = np.where(rng.random(pp) < 0.3, rng.uniform(1, 2, pp), 1.0)
        link = np.where(rng.random((pp, pp)) < 0.2, rng.uniform(1, 8, (pp, pp)), 1.0)
        pp_s = float(rng.choice([0.0, 0.02, 0.1]))
        model = replace(model, slowdown=slowdown, link=link, pp_s=pp_s)
        exact_s = schedule_s(
            (0.1 * slowdown).tolist(),
            [pp_s / 2 * link[p, p + 1] for p in range(pp - 1)],
            [pp_s / 2 * link[p + 1, p] for p in range(pp - 1)],
            microbatches,
        )
        errors.append(model.predict(in_order(model)) / exact_s - 1)
    assert np.abs(errors).max() <= limit
    assert np.abs(errors).mean() <= limit / 4


def test_calibration_reproduces_the_measured_iteration() -> None:
    model, placement = healthy(2, 2), in_order(healthy(2, 2))
    bare_s = model.predict(placement)
    longer = model.calibrated(bare_s + 0.7, placement)
    assert longer.other_s == pytest.approx(0.7)
    assert longer.predict(placement) == pytest.approx(bare_s + 0.7)
    shorter = longer.calibrated(0.6 * bare_s, placement)
    assert shorter.other_s == 0.0
    assert shorter.predict(placement) == pytest.approx(0.6 * bare_s)
    with pytest.raises(PlanError, match=r"an iteration of 0\.0 s"):
        model.calibrated(0.0, placement)


@settings(max_examples=15)
@given(models([(2, 3, 1), (3, 2, 1), (1, 5, 1), (2, 2, 2), (6, 1, 2)]))
def test_exact_search_equals_brute_force(model: TopologyModel) -> None:
    current = in_order(model)
    found, exact = best_placement(model, current)
    assert exact

    best = []
    for order in itertools.permutations(range(current.size)):
        placement = np.array(order).reshape(current.shape)
        slow = model.slow_stages(placement)
        best.append((model.predict(placement), slow, int((placement != current).sum())))
    fastest = min(best)[0]
    calmest = min(entry[1:] for entry in best if entry[0] <= fastest * (1 + 1e-9))
    assert model.predict(found) == pytest.approx(fastest, rel=1e-9)
    assert (model.slow_stages(found), int((found != current).sum())) == calmest


@settings(max_examples=15)
@given(models([(2, 4, 1), (4, 2, 1), (2, 4, 2), (4, 2, 4), (8, 1, 1)]), st.integers(0, 99))
def test_local_search_ends_near_the_best(model: TopologyModel, seed: int) -> None:
    current = in_order(model)
    exact, _ = best_placement(model, current, exact=True)
    local, claimed = best_placement(model, current, exact=False, seed=seed)
    again, _ = best_placement(model, current, exact=False, seed=seed)
    assert not claimed
    assert np.array_equal(local, again)
    assert sorted(local.ravel().tolist()) == list(range(current.size))
    assert model.predict(local) <= (1 + LOCAL) * model.predict(exact)
    assert model.predict(local) <= model.predict(current) * (1 + 1e-9)


@settings(max_examples=40)
@given(
    models(
        [(2, 3, 2), (3, 2, 3), (2, 4, 2), (4, 2, 2), (2, 4, 4), (4, 2, 4), (1, 8, 2), (8, 1, 4)]
    ),
    st.permutations([0, 0, 1, 1, 2, 2, 3, 3]),
    st.booleans(),
    st.integers(0, 999),
)
def test_branch_and_bound_ends_at_the_best_of_all_placements(
    model: TopologyModel, anywhere: list[int], uneven: bool, seed: int
) -> None:
    blocks = model.pp * model.dp
    if uneven:  # hosts of other sizes, and blocks of one host at any stages
        model = replace(model, host=np.array(anywhere)[:blocks] % len(model.link))
    start, _ = best_placement(model, in_order(model), exact=False, seed=seed)
    proof, time_s = Proof(model, work=2_000_000), 1.02 * model.predict(start)
    while (found := proof.faster(time_s)) is not None:
        assert sorted(found.ravel().tolist()) == list(range(blocks))
        assert model.predict(found) < time_s
        time_s = model.predict(found)
    assert proof.complete
    best, _ = best_placement(model, in_order(model), exact=True)
    assert time_s == pytest.approx(model.predict(best), rel=1e-8)


@pytest.mark.parametrize(("pp", "dp", "per_host"), [(4, 4, 2), (4, 8, 4), (8, 8, 8)])
def test_eight_hosts_of_several_blocks_are_searched_exactly(
    pp: int, dp: int, per_host: int
) -> None:
    rng = np.random.default_rng(pp * dp)
    for _ in range(5):
        model = healthy(pp, dp, per_host=per_host)
        model.slowdown[rng.choice(pp * dp, 2, replace=False)] = rng.uniform(1.2, 1.8, 2)
        here, there = rng.choice(8, 2, replace=False)
        model.link[here, there] = model.link[there, here] = 4.0
        start = time.process_time()
        search = plan_topology(model, in_order(model))
        assert search.exact
        assert time.process_time() - start <= 2.0


def test_what_would_take_too_long_to_prove_is_not_called_exact() -> None:
    model = healthy(4, 4, per_host=2)
    model.link[0, 1] = 4.0
    proof = Proof(model, work=10)
    assert proof.faster(model.predict(in_order(model))) is None
    assert not proof.complete


def test_congested_ring_link_of_four_stages_is_given_other_traffic() -> None:
    model = healthy(4, 2, ring_share=0.2)
    model.link[2, 3] = 4.0
    search = plan_topology(model, in_order(model))
    assert search.exact
    assert search.placement is not None
    assert search.before_s / search.after_s >= 1.3  # the paper: 1.23
    assert search.moved == 2
    for row in search.placement:
        assert {2, 3} != set(row)


def test_congested_links_carry_activations_where_they_cannot_be_left_idle() -> None:
    model = healthy(2, 2)
    for a, b in ((0, 1), (2, 3), (0, 2), (1, 3)):  # of three ways to pair four hosts, two
        model.link[a, b] = model.link[b, a] = 5.0
    search = plan_topology(model, in_order(model))
    assert search.placement is not None
    assert {frozenset(row) for row in search.placement} == {frozenset({0, 3}), frozenset({1, 2})}
    assert search.before_s / search.after_s >= 1.5


def test_stragglers_of_all_stages_are_brought_into_one() -> None:
    model = healthy(8, 4, microbatches=6, ring_share=0.0)
    current = in_order(model)
    model.slowdown[current[:, 0][::2]] = 1.7
    scattered = model.predict(current)
    search = plan_topology(model, current)
    assert model.slow_stages(current) == 4
    assert search.slow_stages == 1
    assert search.after_s < scattered


def test_consolidation_takes_a_slowdown_of_1_7_to_about_1_3() -> None:
    model = healthy(4, 4, microbatches=3, ring_share=0.0)
    current = in_order(model)
    model.slowdown[current[:, 0]] = 1.7  # one straggler in every stage, as in the paper
    search = plan_topology(model, current)
    healthy_s = healthy(4, 4, microbatches=3, ring_share=0.0).predict(current)
    assert search.before_s / healthy_s == pytest.approx(1.7, abs=0.02)
    assert search.after_s / healthy_s <= 1.36
    assert search.slow_stages == 1
    assert search.exact


def test_healthy_job_stays_as_it_is() -> None:
    model = healthy(4, 2)
    search = plan_topology(model, in_order(model))
    assert search.placement is None
    assert search.moved == 0
    assert "below a gain of 5 %" in search.reason


def test_gain_below_its_cost_is_refused_with_both() -> None:
    model = healthy(2, 2)
    model.link[0, 1] = 5.0
    current = in_order(model)
    paying = plan_topology(model, current, cost_s=15.0, horizon_s=60.0)
    assert paying.placement is not None
    short = plan_topology(model, current, cost_s=15.0, horizon_s=20.0)
    assert short.placement is None
    assert "s in the 20 s ahead: less than the 15 s that moving costs" in short.reason


def test_placement_that_is_none_is_refused() -> None:
    model = healthy(2, 2)
    with pytest.raises(PlanError, match=r"each of the 4 blocks one place in a grid \(2, 2\)"):
        plan_topology(model, [[0, 1], [2, 2]])


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"slowdown": np.ones(5)}, "5 blocks cannot form a grid of 2 stages"),
        ({"host": np.arange(3)}, "host has 3 entries"),
        ({"dp_s": [0.1]}, "dp_s has 1 entries"),
        ({"microbatches": 0}, "microbatches 0 must be at least 1"),
        ({"host": np.array([0, 1, 2, 4])}, "rows of link, 0 to 3"),
        ({"pp_s": float("nan")}, "pp_s holds nan"),
    ],
)
def test_model_that_does_not_fit_together_is_refused(changed: dict[str, Any], told: str) -> None:
    model = healthy(2, 2)
    with pytest.raises(PlanError, match=told):
        replace(model, **changed)


@pytest.mark.parametrize("per_host", [1, 4])
def test_a_thousand_blocks_are_searched_in_seconds(per_host: int) -> None:
    model = healthy(16, 64, per_host=per_host, microbatches=64)
    rng = np.random.default_rng(0)
    current = in_order(model)
    model.slowdown[rng.choice(1024, 12, replace=False)] = 1.5
    for _ in range(12):
        row, column = rng.integers(16), rng.integers(64 // per_host - 1)
        here = model.host[current[row, per_host * column]]
        model.link[here, here + 1] = 6.0
    start = time.process_time()
    search = plan_topology(model, current)
    taken_s = time.process_time() - start
    assert search.placement is not None
    assert not search.exact
    assert search.before_s / search.after_s >= 1.3
    assert search.slow_stages <= 2
    assert taken_s <= 10.0


def test_hosts_of_several_blocks_stay_together_where_that_is_faster() -> None:
    model = healthy(4, 4, per_host=4, ring_share=0.5)
    scattered = in_order(model).T.copy()  # every ring spans all hosts, and one link is congested
    model.link[0, 1] = 4.0
    search = plan_topology(model, scattered)
    assert search.placement is not None
    assert all(len({block // 4 for block in row}) == 1 for row in search.placement)
