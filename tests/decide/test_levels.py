"""What the levels can do about a culprit in a given job."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.decide.jobs import device, facts, link, settings

from failslow.decide.levels import Assessment, InForce, LayoutPlanner, Outlook
from failslow.errors import PlanError
from failslow.records import Finding, JobFacts, Rung


def assess(
    job: JobFacts | None, *findings: Finding, in_force: InForce | None = None
) -> dict[Rung, Assessment]:
    planner = LayoutPlanner(job, settings())
    found = planner.assess(findings, in_force or planner.initial())
    assert [assessment.level for assessment in found] == ["S2", "S3", "S4"]
    return {assessment.level: assessment for assessment in found}


def grid(pp: int, dp: int, **changed: object) -> JobFacts:
    """One block a host; rings take 0.3 s between hosts, passing a micro-batch on 4 ms."""
    return facts(
        pp=pp,
        dp=dp,
        stage_s=(0.1,) * pp,
        hosts=tuple(f"gpu-{n}" for n in range(pp * dp)),
        dp_s=0.3,
        pp_s=0.004,
        **changed,
    )


def test_slow_replica_is_given_fewer_micro_batches() -> None:
    found = assess(facts(), device(1))["S2"]
    assert found.applicable
    assert found.plan is not None
    assert found.plan.microbatches == (9, 5, 9, 9)
    assert found.plan.predicted_slowdown == pytest.approx(10 / 8)
    assert found.share == pytest.approx((16 - 10) / (16 - 8))
    assert found.undone == pytest.approx(2.0)
    assert found.now == pytest.approx(2.0)


def test_two_culprits_are_planned_for_together() -> None:
    found = assess(facts(), device(1), device(2))["S2"]
    assert found.plan is not None
    assert found.plan.microbatches == (11, 5, 5, 11)


def test_share_of_the_ring_is_not_sped_up_by_redistribution() -> None:
    with_ring = assess(facts(dp_s=0.4), device(1))["S2"]
    assert with_ring.plan is not None
    assert with_ring.plan.predicted_slowdown == pytest.approx((1.0 + 0.4) / (0.8 + 0.4))


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"no_redistribution": "FSDP shard axis"}, "FSDP shard axis"),
        ({"dp": 1, "hosts": ("gpu-0",), "microbatches": 8}, "one replica"),
        ({"least_microbatches": 8}, "below a gain of 5 %"),
        ({"least_microbatches": 9}, "32 micro-batches are fewer than the 36"),
    ],
)
def test_redistribution_that_cannot_be_says_why(changed: dict[str, object], told: str) -> None:
    found = assess(facts(**changed), device(0))["S2"]
    assert not found.applicable
    assert told in found.reason


def test_all_replicas_equally_slow_leave_nothing_to_redistribute() -> None:
    found = assess(facts(), *(device(rank) for rank in range(4)))["S2"]
    assert not found.applicable
    assert "below a gain of 5 %" in found.reason


def test_congested_ring_link_is_helped_by_the_topology_alone() -> None:
    found = assess(grid(4, 2), link("gpu-2", "gpu-3"))
    assert not found["S2"].applicable
    assert found["S3"].applicable
    assert found["S3"].plan is not None
    assert found["S3"].plan.microbatches == (16, 16)
    assert sorted(found["S3"].plan.placement) == list(range(8))
    assert found["S3"].share == pytest.approx(1.0, abs=0.05)


def test_topology_comes_with_the_best_split_on_top() -> None:
    found = assess(grid(2, 2), link("gpu-0", "gpu-1"), device(3, 1.6))["S3"]
    assert found.plan is not None
    assert found.plan.microbatches != (16, 16)
    held = assess(grid(2, 2, no_redistribution="SyncBN"), link("gpu-0", "gpu-1"), device(3, 1.6))[
        "S3"
    ]
    assert held.plan is not None
    assert held.plan.microbatches == (16, 16)
    assert held.share < found.share


def test_whole_tensor_parallel_blocks_change_places() -> None:
    job = facts(
        pp=2,
        dp=2,
        tp=2,
        stage_s=(0.1, 0.1),
        hosts=tuple(f"gpu-{n // 2}" for n in range(8)),
        dp_s=0.3,
        pp_s=0.004,
    )
    plan = assess(job, link("gpu-0", "gpu-1"))["S3"].plan
    assert plan is not None
    blocks = [plan.placement[at : at + 2] for at in range(0, 8, 2)]
    assert sorted(blocks) == [(0, 1), (2, 3), (4, 5), (6, 7)]


def test_topology_in_force_is_kept_while_it_is_the_best() -> None:
    first = assess(grid(4, 2), link("gpu-2", "gpu-3"))["S3"].plan
    assert first is not None
    in_force = InForce(microbatches=(16, 16), placement=first.placement)
    again = assess(grid(4, 2), link("gpu-2", "gpu-3"), in_force=in_force)["S3"]
    assert again.applicable
    assert again.plan is not None
    assert again.plan.placement == first.placement
    assert again.now == pytest.approx(again.plan.predicted_slowdown)


def test_topology_that_cannot_change_says_why() -> None:
    found = assess(grid(4, 2, no_topology_change="no state callbacks"), link("gpu-2", "gpu-3"))
    assert (found["S3"].applicable, found["S3"].reason) == (False, "no state callbacks")
    single = facts(dp=1, hosts=("gpu-0",), microbatches=8)
    assert "one block" in assess(single, device(0))["S3"].reason


def test_restart_leaves_out_the_hosts_at_fault() -> None:
    found = assess(facts(), device(1, host="gpu-1"), link("gpu-3", "gpu-0"))["S4"]
    assert found.plan is not None
    assert found.plan.evict == ("gpu-1", "gpu-3")
    unknown = assess(facts(), device(1, host=""))["S4"]
    assert "no host is known for device rank 1" in unknown.reason
    barred = assess(facts(no_restart="no checkpoint"), device(1))["S4"]
    assert barred.reason == "no checkpoint"


def test_host_where_all_meet_to_start_again_is_not_left_out() -> None:
    job = facts(meeting=(0, 1))
    assert assess(job, device(2, host="gpu-2"))["S4"].applicable
    ingress = Finding(what="link", slowdown=5.0, ranks=(), peer_ranks=(0,), peer_host="gpu-0")
    for culprits in ((device(1),), (device(2, host="gpu-2"), device(1)), (ingress,)):
        refused = assess(job, *culprits)["S4"]
        assert not refused.applicable
        assert refused.plan is None  # nor may a person order it
        assert refused.reason == f"all meet at the host of {culprits[-1].key} to start again"


def test_no_restart_is_planned_that_would_find_too_few_hosts() -> None:
    alone = facts(hosts=("gpu-0",) * 4)
    refused = assess(alone, device(1, host="gpu-0"))["S4"]
    assert refused.plan is None  # nor may a person order it
    assert refused.reason == "the job has no host but gpu-0 to start again on"
    assert assess(replace(alone, least_hosts=0), device(1, host="gpu-0"))["S4"].applicable
    fixed = facts(least_hosts=4)
    refused = assess(fixed, device(1))["S4"]
    assert "it has 3 hosts and its launcher needs 4" in refused.reason

    def spared(evictions: int) -> Assessment:
        planner = LayoutPlanner(fixed, settings(spares=1), evictions=evictions)
        return planner.assess((device(1),), planner.initial())[2]

    assert spared(0).applicable
    assert not spared(1).applicable  # it took the place of the first


def test_fewer_hosts_have_more_to_do_each() -> None:
    found = assess(facts(), device(1), link("gpu-3", "gpu-0"))["S4"].plan
    assert found is not None
    assert found.predicted_slowdown == pytest.approx(4 / 2, rel=0.1)


def test_job_that_nothing_steers_can_only_be_restarted() -> None:
    found = assess(None, device(1))
    assert "no coordinator" in found["S2"].reason
    assert "no coordinator" in found["S3"].reason
    assert found["S4"].applicable
    assert LayoutPlanner(None, settings()).initial() == InForce()


def test_culprit_outside_the_grid_is_named() -> None:
    found = assess(facts(), device(17))
    assert "device rank 17 is not in the job's grid" in found["S2"].reason


def test_slow_egress_is_a_slow_link_to_every_host() -> None:
    egress = Finding(what="link", slowdown=5.0, ranks=(2,), host="gpu-2")
    one, every = assess(grid(4, 2), link("gpu-2", "gpu-3")), assess(grid(4, 2), egress)
    assert every["S3"].share < one["S3"].share


def test_slow_ingress_is_a_slow_link_from_every_host() -> None:
    ingress = Finding(what="link", slowdown=5.0, ranks=(), peer_ranks=(3,), peer_host="gpu-3")
    one, every = assess(grid(4, 2), link("gpu-2", "gpu-3")), assess(grid(4, 2), ingress)
    assert every["S3"].share < one["S3"].share
    assert every["S4"].plan is not None
    assert every["S4"].plan.evict == ("gpu-3",)


def test_links_are_found_by_ranks_where_hosts_have_no_names() -> None:
    job = grid(4, 2)
    unnamed = facts(pp=4, dp=2, stage_s=job.stage_s, hosts=(), dp_s=job.dp_s, pp_s=job.pp_s)
    finding = Finding(what="link", slowdown=5.0, ranks=(2,), peer_ranks=(3,))
    assert assess(unnamed, finding)["S3"].share == pytest.approx(1.0, abs=0.05)


def test_unknown_stages_share_the_measured_iteration() -> None:
    job = facts(stage_s=(), iteration_s=1.2, dp_s=0.4)
    plan = assess(job, device(1))["S2"].plan
    assert plan is not None
    assert plan.predicted_slowdown == pytest.approx((1.0 + 0.4) / 1.2)


def test_facts_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(PlanError, match="3 ranks and 4 hosts do not fit a grid of 1 x 4 x 1"):
        LayoutPlanner(facts(ranks=(0, 1, 2)), settings())


def test_places_are_not_changed_for_less_than_it_costs() -> None:
    job, congested = grid(4, 2), link("gpu-2", "gpu-3")
    planner = LayoutPlanner(job, settings())

    def topology(cost_s: float, horizon_s: float) -> Assessment:
        outlook = Outlook(topology_cost_s=cost_s, horizon_s=horizon_s)
        return planner.assess([congested], planner.initial(), outlook)[1]

    free = topology(0.0, 0.0)
    assert free.applicable
    assert free.plan is not None
    assert free.undone is not None
    share = 1.0 - free.plan.predicted_slowdown / free.undone
    assert topology(60.0, 60.0 / share + 1.0).applicable
    dear = topology(60.0, 60.0 / share - 1.0)
    assert not dear.applicable
    assert "less than the 60 s that moving costs" in dear.reason
    assert dear.plan == free.plan  # a person may order it all the same
    assert dear.pays_from_s == pytest.approx(60.0 / share)


def test_places_that_were_changed_are_kept_though_another_change_would_not_pay() -> None:
    first = assess(grid(4, 2), link("gpu-2", "gpu-3"))["S3"].plan
    assert first is not None
    planner = LayoutPlanner(grid(4, 2), settings())
    in_force = InForce(microbatches=(16, 16), placement=first.placement)
    rings = [link("gpu-2", "gpu-3"), link("gpu-0", "gpu-1", 3.0)]
    free = planner.assess(rings, in_force)[1].plan
    assert free is not None
    assert free.placement != first.placement
    kept = planner.assess(rings, in_force, Outlook(topology_cost_s=1e6, horizon_s=1.0))[1]
    assert kept.applicable
    assert kept.plan is not None
    assert kept.plan.placement == first.placement


def test_a_link_of_the_ring_as_it_lies_after_an_earlier_change_is_moved_off_it() -> None:
    job = facts(dp_s=0.4)
    planner = LayoutPlanner(job, settings())
    moved = InForce(microbatches=(8, 8, 8, 8), placement=(0, 2, 1, 3))
    bad = [link("gpu-2", "gpu-0", 30.0)]  # neighbours only since then
    there = planner.assess(bad, moved)[1]
    assert there.applicable
    assert there.plan is not None
    assert there.plan.placement != moved.placement
    assert not planner.assess(bad, planner.initial())[1].applicable
