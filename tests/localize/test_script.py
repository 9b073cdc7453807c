"""What a pause measures: suspects first, with what tells culprits apart, and nobody disturbed."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.localize.made_results import Culprits, Lab

from failslow.config import LocalizeConfig
from failslow.errors import ConfigError
from failslow.localize.judge import judge
from failslow.localize.passes import both_ways, double_tree_passes
from failslow.localize.script import (
    Script,
    ScriptSettings,
    WorkerPlace,
    endpoint,
    expected_s,
    plan,
    reference_script,
)
from failslow.localize.script_wire import pack, share, unpack
from failslow.mailbox import MAX_LETTER
from failslow.records import Diagnosis, Suspect
from failslow.runtime.transport.endpoint import MAX_PAYLOAD_BYTES


def job(
    nodes: int, per_node: int, device: str = "NVIDIA H200", host: str = ""
) -> list[WorkerPlace]:
    """host: all nodes are on this machine."""
    return [
        WorkerPlace(
            rank=node * per_node + local,
            node=f"n{node}",
            host=host,
            device=device,
            device_id="" if device.startswith("cpu") else f"GPU-{local}",
        )
        for node in range(nodes)
        for local in range(per_node)
    ]


def suspect(what: str, *ranks: int, peers: tuple[int, ...] = (), score: float = 0.5) -> Suspect:
    assert what in ("compute", "link", "group")
    return Suspect(
        what=what,  # type: ignore[arg-type]  # one of the three, as was seen
        ranks=ranks,
        peer_ranks=peers,
        slowdown=1.5,
        extra_s=0.1,
        score=score,
    )


def diagnosis(*suspects: Suspect, everyone: bool = False) -> Diagnosis:
    return Diagnosis(episode="e1", suspects=suspects, everyone=everyone)


def computing(script: Script) -> list[int]:
    return [rank for stage in script if stage["do"] == "gemm" for rank in stage["ranks"]]


def links(script: Script) -> list[tuple[int, int]]:
    pairs = [pair for stage in script if stage["do"] == "p2p" for pair in stage["pairs"]]
    return [(sender, receiver) for sender, receiver in pairs]


def check(script: Script, workers: list[WorkerPlace], budget_s: float) -> None:
    """What holds of every script."""
    places = {worker.rank: worker for worker in workers}
    assert expected_s(script) <= budget_s or len(script) == 1
    assert script == json.loads(json.dumps(script))
    for stage in script:
        assert 0.0 < stage["expect_s"] <= stage["limit_s"]
        shared = [
            places[rank].unit if stage["do"] == "gemm" else places[rank].machine
            for rank in stage.get("ranks", ())
        ]
        assert len(shared) == len(set(shared))
        pairs = stage.get("pairs", ())
        ends = Counter(rank for pair in pairs for rank in pair)
        between = [pair for pair in pairs if places[pair[0]].node != places[pair[1]].node]
        ends.update(endpoint(places[rank]) for pair in between for rank in pair)
        assert all(count == 1 for count in ends.values())
    rounds = 2 if workers[0].device == "cpu" else 1
    assert max(Counter(computing(script)).values(), default=0) <= rounds
    assert max(Counter(links(script)).values(), default=0) <= 1


def test_where_time_is_short_the_most_suspect_are_measured() -> None:
    workers = job(9, 1, "NVIDIA H200", "one machine")  # one after the other
    found = diagnosis(suspect("compute", 5, 8, score=0.0), suspect("compute", 0, 5, 8, score=1.0))
    assert computing(plan(found, workers, ScriptSettings(budget_s=0.5))) == [0, 5]


@settings(max_examples=40)
@given(
    nodes=st.integers(1, 12),
    per_node=st.sampled_from([1, 2, 8]),
    device=st.sampled_from(["cpu", "NVIDIA H200"]),
    host=st.sampled_from(["", "one machine"]),
    budget_s=st.floats(0.5, 8.0),
    data=st.data(),
)
def test_nobody_disturbs_another_and_the_budget_holds(
    *, nodes: int, per_node: int, device: str, host: str, budget_s: float, data: st.DataObject
) -> None:
    workers = job(nodes, per_node, device, host)
    ranks = st.lists(st.sampled_from(range(len(workers))), min_size=1, max_size=9, unique=True)
    suspects = data.draw(
        st.lists(
            st.builds(
                lambda what, here, there, score: suspect(
                    what, *here, peers=tuple(there), score=score
                ),
                st.sampled_from(["compute", "link", "group"]),
                ranks,
                ranks,
                st.floats(0.0, 1.0),
            ),
            max_size=4,
        )
    )
    chosen = ScriptSettings(budget_s=budget_s)
    script = plan(diagnosis(*suspects), workers, chosen)
    check(script, workers, budget_s)
    check(plan(None, workers, chosen), workers, budget_s)
    check(reference_script(workers, chosen), workers, budget_s)
    likely = [s for s in suspects if s.what == "compute"]
    if likely and all(s.what == "compute" for s in suspects):
        first = max(likely, key=lambda s: s.score)
        assert first.ranks[0] in computing(script)


def test_a_suspect_computes_with_its_like_on_other_hosts() -> None:
    workers = [*job(20, 8)]
    workers[12:20] = [replace(w, device="NVIDIA A100") for w in workers[12:20]]
    script = plan(diagnosis(suspect("compute", 37)), workers)
    assert 37 in computing(script)
    others = set(computing(script)) - set(range(32, 40))
    assert len(others) == ScriptSettings().peers
    assert all(workers[rank].device == "NVIDIA H200" for rank in others)
    assert set(range(32, 40)) <= set(computing(script))  # one device, or the whole host?
    checked = next(stage for stage in script if stage["do"] == "host")
    assert len({workers[rank].node for rank in checked["ranks"]}) == len(checked["ranks"])


def test_a_suspect_link_is_measured_both_ways_and_against_links_that_share_an_end() -> None:
    workers = job(64, 2)
    script = plan(diagnosis(suspect("link", 6, peers=(20,))), workers)
    measured = links(script)
    assert measured[0] == (6, 20)
    assert (20, 6) in measured
    assert any(here == 6 and there != 20 for here, there in measured)
    assert any(here != 6 and there == 20 for here, there in measured)
    assert any(not {here, there} & {6, 20} for here, there in measured)
    assert {6, 20} <= set(computing(script))
    check(script, workers, 4.0)


@pytest.mark.parametrize(
    "culprits",
    [
        Culprits(links={("n3", "n10"): 3.0}),
        Culprits(out={"n3": 3.0}),
        Culprits(into={"n10": 3.0}),
        Culprits(devices={6: 1.4}),
    ],
)
def test_what_is_measured_tells_a_link_from_a_card_in_a_large_job(culprits: Culprits) -> None:
    workers = job(64, 2)
    lab = Lab(workers=workers, noise=0.03)
    script = plan(diagnosis(suspect("link", 6, peers=(20,))), workers)
    (finding,) = judge(lab.run(script, culprits), [], workers, episode="e").findings
    if culprits.devices:
        assert (finding.what, finding.ranks) == ("device", (6,))
    else:
        ends = {"n3" if culprits.links or culprits.out else "", "n10"}
        ends -= {"n10"} if culprits.out else set()
        assert finding.what == "link"
        assert {finding.host, finding.peer_host} - {""} == ends - {""}


def test_a_group_is_measured_along_its_ring_and_a_small_one_in_all_pairs() -> None:
    workers = job(32, 1)
    small = set(links(plan(diagnosis(suspect("group", 3, 9, 11, 30)), workers)))
    ends = (3, 9, 11, 30)
    assert {(a, b) for a in ends for b in ends if a != b} <= small
    large = links(plan(diagnosis(suspect("group", *range(0, 32, 2))), workers))
    ring = {(a, (a + 2) % 32) for a in range(0, 32, 2)}
    assert ring | {(b, a) for a, b in ring} == set(large)


def test_workers_of_one_node_are_measured_between_each_other() -> None:
    script = plan(diagnosis(suspect("group", 0, 1, 2, 3)), job(1, 4))
    assert {(0, 1), (1, 0), (0, 3), (3, 0)} <= set(links(script))


@pytest.mark.parametrize(
    "found", [None, diagnosis(), diagnosis(suspect("compute", 1), everyone=True)]
)
def test_a_small_job_is_measured_whole_when_nobody_is_suspected(found: Diagnosis | None) -> None:
    workers = job(4, 1, "cpu", "one machine")
    script = plan(found, workers)
    assert set(computing(script)) == {0, 1, 2, 3}
    ring = {(0, 1), (1, 2), (2, 3), (3, 0)}
    assert set(links(script)) == ring | {(b, a) for a, b in ring}
    check(script, workers, 4.0)
    # a CPU has slow spells: everybody computes again, after the links
    first_link = next(i for i, stage in enumerate(script) if stage["do"] == "p2p")
    assert set(computing(script[:first_link])) == set(computing(script[first_link:]))


def test_a_very_large_job_computes_on_few_and_sends_along_the_whole_ring() -> None:
    workers = job(1280, 8)
    group = suspect("group", *range(0, 10240, 8))
    for found, ends in ((diagnosis(group, suspect("compute", 77)), 1280), (None, 16)):
        script = plan(found, workers)
        assert len(computing(script)) <= 64
        assert len({rank for pair in links(script) for rank in pair}) == ends
        assert len(json.dumps(share(script, range(72, 80)))) < MAX_LETTER // 8
        assert len(json.dumps(pack(script))) < MAX_PAYLOAD_BYTES // 8


@pytest.mark.parametrize(
    ("nodes", "per_node", "device"),
    [(128, 8, "NVIDIA H200"), (127, 8, "NVIDIA H200"), (128, 8, "cpu"), (1024, 1, "cpu"),
     (1280, 8, "NVIDIA H200")],
)  # fmt: skip
def test_the_reference_covers_every_rank_and_the_ring_at_any_size(
    nodes: int, per_node: int, device: str
) -> None:
    workers = job(nodes, per_node, device)
    script = reference_script(workers, ScriptSettings.from_config(LocalizeConfig()))
    check(script, workers, 4.0)
    assert set(computing(script)) == set(range(nodes * per_node))
    checked = {workers[r].node for stage in script if stage["do"] == "host" for r in stage["ranks"]}
    assert len(checked) == nodes
    firsts = [node * per_node for node in range(nodes)]
    ring = set(zip(firsts, [*firsts[1:], firsts[0]], strict=True))
    assert set(links(script)) == ring | {(b, a) for a, b in ring}
    # what is said of it: to all agents at once, and to the workers of one node
    message = json.dumps(pack(script))
    assert len(message) < MAX_PAYLOAD_BYTES // 16
    assert unpack(json.loads(message)) == script
    last = range((nodes - 1) * per_node, nodes * per_node)
    part = share(script, last)
    assert len(json.dumps(part)) < MAX_LETTER // 16
    assert len(part) == len(script)
    assert set(computing(part)) == set(last)
    assert {pair for pair in links(script) if firsts[-1] in pair} == set(links(part))
    # who takes turns waits for its node's others, who does not for nobody
    waves = [stage for stage in part if stage["do"] == "gemm"]
    takes_turns = device == "cpu" and per_node > 1
    assert {len(stage["ranks"]) for stage in waves} == {1 if takes_turns else per_node}
    assert {stage.get("wait", True) for stage in waves} == {takes_turns}


def test_a_thousand_ranks_later_compare_with_their_own_reference() -> None:
    workers = job(128, 8)
    lab = Lab(workers=workers, noise=0.02)
    healthy = lab.run(reference_script(workers))
    assert judge(healthy, [], workers, episode="").findings == ()
    slow = Culprits(devices={77: 1.3}, links={("n5", "n6"): 3.0})
    group = suspect("group", *range(0, 1024, 8))
    script = plan(diagnosis(suspect("compute", 77, score=0.9), group), workers)
    results = lab.run(script, slow)
    named = judge(results, healthy, workers, episode="e").findings
    assert {finding.key for finding in named} == {"device rank 77", "link n5>n6"}
    # alone, with nobody to compare it with but what it was itself
    alone = [r for r in results if r["rank"] == 77 and r["do"] == "gemm"]
    (device,) = judge(alone, healthy, workers, episode="e").findings
    assert device.slowdown == pytest.approx(1.3, abs=0.1)


def test_ranks_that_share_a_device_take_turns_and_others_do_not() -> None:
    apart = job(2, 8)
    script = plan(None, apart)
    assert [len(stage["ranks"]) for stage in script if stage["do"] == "gemm"] == [16]
    shared = [replace(w, device_id=f"GPU-{w.rank % 2}") for w in apart]
    waves = [stage["ranks"] for stage in plan(None, shared) if stage["do"] == "gemm"]
    assert [len(wave) for wave in waves] == [4] * 4
    check(plan(None, shared), shared, 4.0)
    unknown = [replace(w, device_id="") for w in apart]
    waves = [stage["ranks"] for stage in plan(None, unknown) if stage["do"] == "gemm"]
    assert {len(wave) for wave in waves} == {2}


def test_containers_of_one_machine_take_turns_on_its_processor() -> None:
    workers = job(4, 1, "cpu", "one machine")
    waves = [stage["ranks"] for stage in plan(None, workers) if stage["do"] in ("gemm", "host")]
    assert {len(wave) for wave in waves} == {1}
    # GPUs of their own, but one processor
    gpus = [replace(w, device="NVIDIA H200", device_id=f"GPU-{w.rank}") for w in workers]
    script = plan(None, gpus)
    assert [len(stage["ranks"]) for stage in script if stage["do"] == "gemm"] == [4]
    assert [len(stage["ranks"]) for stage in script if stage["do"] == "host"] == [1] * 4


def around(size: int) -> set[tuple[int, int]]:
    """A ring, both ways."""
    return {link for a in range(size) for b in [(a + 1) % size] for link in ((a, b), (b, a))}


def trees(size: int) -> set[tuple[int, int]]:
    return {link for way in both_ways(double_tree_passes(size)) for link in way}


def test_a_job_told_to_use_trees_is_measured_along_them() -> None:
    workers = [replace(w, trees=True) for w in job(12, 1, "cpu")]
    found = diagnosis(suspect("group", *range(12)))
    for script in (plan(found, workers), reference_script(workers)):
        assert set(links(script)) == trees(12)
        check(script, workers, 8.0)


def test_where_the_ring_is_well_trees_bring_the_links_that_nobody_measured() -> None:
    workers, group = job(12, 1, "cpu"), suspect("group", *range(12))
    off = Culprits(links={("n0", "n8"): 4.0})  # not between neighbours
    lab = Lab(workers=workers, noise=0.02)
    ring = plan(diagnosis(group), workers)
    assert set(links(ring)) == around(12)
    first = judge(lab.run(ring, off), [], workers, episode="e")
    assert first.findings == ()
    tree = plan(diagnosis(group), workers, well=first.well)
    assert set(links(tree)) == trees(12)
    second = judge(lab.run(tree, off), [], workers, episode="e")
    assert [finding.key for finding in second.findings] == ["link n0>n8"]
    check(tree, workers, 4.0)
    # where not the whole ring is known to be well, nor where the trees are, too
    for known in (
        [key for key in first.well if key != "link n3>n4"],
        [*first.well, *judge(lab.run(tree), [], workers, episode="e").well],
    ):
        assert set(links(plan(diagnosis(group), workers, well=known))) == around(12)
    assert set(links(plan(None, workers, well=first.well))) == trees(12)


def test_a_long_ring_is_measured_whole_in_as_many_passes_as_a_short_one() -> None:
    workers = job(300, 8)
    members = range(0, 2400, 8)

    script = plan(diagnosis(suspect("group", *members)), workers)

    ring = {(rank, (rank + 8) % 2400) for rank in members}
    assert ring | {(b, a) for a, b in ring} <= set(links(script))
    assert sum(stage["do"] == "p2p" for stage in script) == 4
    check(script, workers, 4.0)


def test_settings_come_from_the_configuration_and_the_device() -> None:
    given = ScriptSettings.from_config(
        LocalizeConfig(
            gemm_size=1024, gemm_dtype="bfloat16", p2p_sizes_bytes=(1000,), p2p_repeats=2
        )
    )
    script = plan(None, job(2, 1), given)
    gemm = next(stage for stage in script if stage["do"] == "gemm")
    assert (gemm["size"], gemm["dtype"]) == (1024, "bfloat16")
    p2p = next(stage for stage in script if stage["do"] == "p2p")
    assert (p2p["sizes_bytes"], p2p["repeats"]) == ([1000], 2)
    assert given.budget_s == pytest.approx(4.0)
    gpu = ScriptSettings().for_device("NVIDIA H200")
    assert gpu.sizes_bytes == (16 << 20, 32 << 20, 64 << 20)
    assert (gpu.gemm_dtype, ScriptSettings().for_device("cpu").gemm_dtype) == ("float16", "float32")


@pytest.mark.parametrize(
    "wrong", [{"budget_s": 0.0}, {"gemm_size": 1 << 20}, {"sizes_bytes": (0,)}, {"peers": -1}]
)
def test_settings_out_of_range_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ScriptSettings(**wrong)  # type: ignore[arg-type]  # that is the point
