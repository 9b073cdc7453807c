"""What the campaign benchmark injects, drawn alike every time, and how it scores."""

from __future__ import annotations

from collections import Counter
from typing import Any

from benchmarks.probe_campaign import Truth, _scored, expected_table, truths
from tests.probe.probe_samples import result

from failslow.probe.campaign import CampaignPlan, SizeClass
from failslow.probe.study import StudyJob

PLAN = CampaignPlan(sizes=(SizeClass(nodes=1, probes=10), SizeClass(nodes=4, probes=20)))


def test_a_third_of_each_size_is_struck_alike_every_time() -> None:
    told = truths(PLAN, 1)

    assert told == truths(PLAN, 1) != truths(PLAN, 2)
    struck = Counter((name[:2], truth.kind) for name, truth in told.items() if truth.kind)
    assert (
        sum(n for (size, _), n in struck.items() if size == "1n") == struck["1n", "throttle"] == 3
    )
    assert sum(n for (size, _), n in struck.items() if size == "4n") == 7
    assert {kind for size, kind in struck if size == "4n"} == {"throttle", "link", "egress"}
    assert expected_table(PLAN, told)[1] == {"device degradation": 3}
    assert sum(expected_table(PLAN, told)[4].values()) == 7


def test_right_is_hit_or_miss_and_cause() -> None:
    nodes = ("node0", "node1", "node2", "node3")
    found = {
        "result": "communication", "cause": "network congestion", "onset_delay_s": 9.0,
        "slowdown": 1.8, "culprits": ("link node3>node2",), "culprit_causes": ("",),
        "culprit_nodes": ("node2", "node3"),
    }  # fmt: skip

    def scored(truth: Truth, **more: Any) -> tuple[bool, bool | None]:
        job = StudyJob(probe="p", attempt=1, partial=False, result=result(nodes=nodes, **more))
        one = _scored(job, truth)
        return one.right, one.node_named

    link = Truth(kind="link", rank=3, peer=2)
    assert scored(link, **found) == (True, True)
    assert scored(Truth(kind="egress", rank=0, peer=1), **found) == (True, False)
    assert scored(Truth(kind="throttle", rank=3), **found) == (False, True)
    assert scored(Truth(kind=""), **found) == (False, None)
    assert scored(Truth(kind="")) == (True, None)
    assert scored(link) == (False, False)
