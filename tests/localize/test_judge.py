"""Verdicts on made-up results: who is named, who is not, and what cannot be told."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.localize.made_results import Culprits, Lab

from failslow.localize.judge import judge
from failslow.localize.levels import Limits, Reading, compare
from failslow.localize.script import ScriptSettings, WorkerPlace, reference_script
from failslow.records import Finding, Verdict

WHOLE = ScriptSettings(budget_s=60.0, most_ranks=512, most_endpoints=64, all_pairs=0)


def job(nodes: int, per_node: int = 1, device: str = "NVIDIA H200") -> list[WorkerPlace]:
    """A job of like nodes."""
    return [
        WorkerPlace(
            rank=node * per_node + local,
            node=f"n{node}",
            device=device,
            device_id="" if device.startswith("cpu") else f"GPU-{local}",
        )
        for node in range(nodes)
        for local in range(per_node)
    ]


def verdict(
    workers: list[WorkerPlace],
    culprits: Culprits | None = None,
    *,
    noise: float = 0.02,
    seed: int = 0,
    reference: bool = True,
    before: Culprits | None = None,
) -> Verdict:
    """Of a job that is measured as a whole. before: what was slow when the reference was taken."""
    lab = Lab(workers=workers, noise=noise, seed=seed)
    script = reference_script(workers, WHOLE)
    healthy = lab.run(script, before) if reference else []
    return judge(lab.run(script, culprits), healthy, workers, episode="e1", step=7, pause_s=2.5)


def named(found: Verdict) -> set[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    return {(f.what, f.ranks, f.peer_ranks) for f in found.findings}


def only(found: Verdict) -> Finding:
    assert len(found.findings) == 1, found
    return found.findings[0]


@pytest.mark.parametrize("reference", [True, False])
@pytest.mark.parametrize("device", ["NVIDIA H200", "cpu"])
def test_a_slow_device_is_named_with_its_numbers(device: str, reference: bool) -> None:
    found = verdict(job(4, 2, device), Culprits(devices={5: 1.5}), reference=reference)
    finding = only(found)
    assert (finding.what, finding.ranks, finding.host) == ("device", (5,), "n2")
    assert finding.device == device
    assert finding.slowdown == pytest.approx(1.5, rel=0.05)
    (gemm,) = finding.measurements
    assert gemm.expected is not None
    assert gemm.value / gemm.expected == pytest.approx(finding.slowdown)
    assert (found.episode, found.step, found.pause_s) == ("e1", 7, 2.5)


@pytest.mark.parametrize("reference", [True, False])
def test_a_link_at_half_its_bandwidth_is_named_in_its_direction(reference: bool) -> None:
    found = verdict(job(4, 2), Culprits(links={("n1", "n2"): 2.0}), reference=reference)
    finding = only(found)
    assert (finding.what, finding.host, finding.peer_host) == ("link", "n1", "n2")
    assert (finding.ranks, finding.peer_ranks) == ((2, 3), (4, 5))
    assert finding.slowdown == pytest.approx(2.0, rel=0.1)
    assert finding.measurements[0].what == "send 67.1 MB n1>n2"


def test_links_with_an_end_in_common_are_its_card_and_direction_is_told() -> None:
    sends = only(verdict(job(5, 2), Culprits(out={"n3": 4.0})))
    assert (sends.ranks, sends.host, sends.peer_ranks, sends.peer_host) == ((6, 7), "n3", (), "")
    takes = only(verdict(job(5, 2), Culprits(into={"n3": 4.0})))
    assert (takes.ranks, takes.host, takes.peer_ranks, takes.peer_host) == ((), "", (6, 7), "n3")
    both = verdict(job(5, 2), Culprits(out={"n3": 4.0}, into={"n3": 4.0}))
    assert named(both) == {("link", (6, 7), ()), ("link", (), (6, 7))}
    assert sends.key != takes.key


def test_slow_since_the_start_is_found_by_peers() -> None:
    slow = Culprits(devices={3: 1.4}, links={("n0", "n1"): 3.0})
    found = verdict(job(6), slow, before=slow)
    assert named(found) == {("device", (3,), ()), ("link", (0,), (1,))}


def test_two_slow_of_two_are_found_by_the_reference() -> None:
    found = verdict(job(2), Culprits(devices={0: 1.5, 1: 1.3}))
    assert named(found) == {("device", (0,), ()), ("device", (1,), ())}


def test_all_slower_alike_is_nobodys_fault() -> None:
    found = verdict(job(6), Culprits(devices=dict.fromkeys(range(6), 1.4)))
    assert found.findings == ()
    assert "all devices are x1." in found.note


def test_all_devices_of_the_only_node_being_slower_is_the_nodes() -> None:
    finding = only(verdict(job(1, 8), Culprits(devices=dict.fromkeys(range(8), 1.4))))
    assert (finding.what, finding.host, finding.ranks) == ("host", "n0", tuple(range(8)))


def test_a_slow_host_is_told_from_its_devices() -> None:
    # the host check is slow, the devices are healthy
    lab = Lab(workers=job(4, 2), noise=0.02)
    script = reference_script(lab.workers, WHOLE)
    results = lab.run(script)
    for result in results:
        if result["do"] == "host" and result["rank"] == 2:
            result["seconds"] *= 1.8
    finding = only(judge(results, lab.run(script), lab.workers, episode="e"))
    assert (finding.what, finding.host, finding.ranks) == ("host", "n1", (2, 3))
    assert finding.measurements[0].what.startswith("host check: ")
    # both are slow
    finding = only(verdict(job(4, 2), Culprits(hosts={"n1": 1.6})))
    assert (finding.what, finding.host, finding.ranks) == ("host", "n1", (2, 3))
    # all its devices are slow, and the host is not
    found = verdict(job(4, 2), Culprits(devices={2: 1.6, 3: 1.6}))
    assert named(found) == {("device", (2,), ()), ("device", (3,), ())}


def test_waiting_for_a_core_is_the_hosts_fault_and_a_quota_the_devices() -> None:
    finding = only(verdict(job(4, 2, "cpu"), Culprits(crowded={"n2": 2.0})))
    assert (finding.what, finding.host, finding.ranks) == ("host", "n2", (4, 5))
    assert finding.slowdown == pytest.approx(2.0, rel=0.1)
    assert finding.measurements[0].what == "rank 4 waiting for a core"

    lab = Lab(workers=job(4, 1, "cpu"), noise=0.02)
    script = reference_script(lab.workers, WHOLE)
    results = lab.run(script)
    for result in results:
        if result["do"] == "gemm" and result["rank"] == 1:
            held_s = result["wall_s"]  # as long as it ran
            result["wall_s"] += held_s
            result["queued_s"] += held_s
            result["throttled_s"] = held_s
    finding = only(judge(results, lab.run(script), lab.workers, episode="e"))
    assert (finding.what, finding.ranks) == ("device", (1,))
    assert finding.slowdown == pytest.approx(2.0, rel=0.1)
    assert finding.evidence == ("a quota held the process for 50% of the time",)


def test_transfers_of_a_worker_whose_processor_is_slow_are_no_links_fault() -> None:
    lab = Lab(workers=job(4, 1, "cpu"), noise=0.02)
    script = reference_script(lab.workers, WHOLE)
    slow = Culprits(devices={2: 3.0}, out={"n2": 2.5}, into={"n2": 2.5})
    found = judge(lab.run(script, slow), lab.run(script), lab.workers, episode="e")
    assert named(found) == {("device", (2,), ())}
    assert "as their worker is" in found.note
    # on a GPU's host a slow device leaves transfers alone
    found = verdict(job(4), slow)
    assert named(found) == {("device", (2,), ()), ("link", (2,), ()), ("link", (), (2,))}


@pytest.mark.parametrize(("slow", "is_told"), [(5.0, False), (12.0, True)])
def test_a_worker_that_is_held_holds_its_transfers_for_a_moment_and_no_longer(
    slow: float, is_told: bool
) -> None:
    lab = Lab(workers=job(4, 1, "cpu"), noise=0.02)
    script = reference_script(lab.workers, WHOLE)
    results = lab.run(script, Culprits(links={("n1", "n2"): slow}))
    for result in results:
        if result["do"] == "gemm" and result["rank"] == 2:
            result["wall_s"] *= 2.7  # stopped by signals
    found = named(judge(results, lab.run(script), lab.workers, episode="e"))
    assert found == {("device", (2,), ())} | ({("link", (1,), (2,))} if is_told else set())


@pytest.mark.parametrize(("shares", "is_told"), [((0.46, 0.09), True), ((0.46, 0.0), False)])
def test_what_signals_took_in_every_round_is_averaged_and_in_one_is_chance(
    shares: tuple[float, float], is_told: bool
) -> None:
    lab = Lab(workers=job(4, 1, "cpu"), noise=0.02)
    script = reference_script(lab.workers, WHOLE)
    results = lab.run(script)
    rounds = [r for r in results if r["do"] == "gemm" and r["rank"] == 2]
    for result, share in zip(rounds, shares, strict=True):
        result["wall_s"] /= 1.0 - share
    found = judge(results, lab.run(script), lab.workers, episode="e")
    assert named(found) == ({("device", (2,), ())} if is_told else set())
    if is_told:
        assert found.findings[0].slowdown == pytest.approx(1.0 / (1.0 - 0.275), rel=0.05)


def test_only_devices_of_the_same_model_compare() -> None:
    workers = [
        WorkerPlace(rank=r, node=f"n{r}", device="NVIDIA H200" if r < 3 else "NVIDIA A100")
        for r in range(6)
    ]
    slow = Culprits(devices=dict.fromkeys((3, 4, 5), 2.5))
    assert verdict(workers, slow, before=slow).findings == ()
    worse = Culprits(devices={3: 2.5, 4: 2.5 * 1.4, 5: 2.5})
    assert named(verdict(workers, worse, before=slow)) == {("device", (4,), ())}


def test_nothing_found_says_what_was_looked_at() -> None:
    found = verdict(job(4, 2))
    assert found.findings == ()
    assert found.note == "8 devices, 4 hosts and 8 links are as fast as their like"
    assert judge([], [], [], episode="e").note == "nothing was measured"
    broken: list[dict[str, Any]] = [
        {"do": "gemm", "rank": 0, "error": "no memory"},
        {"do": "gemm", "rank": 1, "error": "no memory"},
        {"do": "gemm", "rank": 99, "seconds": 1.0},
        {"do": "p2p", "rank": "0", "peer": None, "seconds": -1},
        {"do": "host", "rank": True, "seconds": float("nan")},
        {},
    ]
    found = judge(broken, broken, job(2), episode="e")
    assert found.note == "nothing was measured; ranks 0, 1 not measured: no memory"


@settings(max_examples=60)
@given(
    nodes=st.integers(2, 24),
    per_node=st.sampled_from([1, 2, 8]),
    device=st.sampled_from(["cpu", "NVIDIA H200"]),
    noise=st.floats(0.0, 0.15),
    seed=st.integers(0, 2**32),
    reference=st.booleans(),
)
def test_a_healthy_job_is_accused_of_nothing(
    *, nodes: int, per_node: int, device: str, noise: float, seed: int, reference: bool
) -> None:
    workers = job(nodes, per_node, device)
    found = verdict(workers, noise=noise, seed=seed, reference=reference)
    assert found.findings == (), found


@settings(max_examples=40)
@given(
    nodes=st.integers(3, 16),
    device=st.sampled_from(["cpu", "NVIDIA H200"]),
    seed=st.integers(0, 2**32),
    reference=st.booleans(),
    data=st.data(),
)
def test_a_fifth_slower_and_half_the_bandwidth_are_found_in_five_percent_noise(
    nodes: int, device: str, seed: int, reference: bool, data: st.DataObject
) -> None:
    slow = data.draw(st.integers(0, nodes - 1))
    here = data.draw(st.integers(0, nodes - 1))
    there = (here + data.draw(st.sampled_from([1, -1]))) % nodes
    # with one or two peers to learn the noise from, and no reference, it takes somewhat more
    slowdown = 1.22 if reference or nodes > 4 else 1.3
    slowdown = 1.4 if device == "cpu" else slowdown
    found = verdict(
        job(nodes, 1, device),
        Culprits(devices={slow: slowdown}, links={(f"n{here}", f"n{there}"): 2.1}),
        noise=0.05,
        seed=seed,
        reference=reference,
    )
    assert named(found) == {("device", (slow,), ()), ("link", (here,), (there,))}


Component = tuple[str, str, str]
"""("device", rank, ""), ("link", node, node), ("out" or "in", node, "")."""


@settings(max_examples=100)
@given(
    nodes=st.integers(3, 12),
    per_node=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 2**32),
    noise=st.floats(0.0, 0.08),
    reference=st.booleans(),
    all_pairs=st.booleans(),
    data=st.data(),
)
def test_the_culprits_are_named_exactly_or_their_links_where_nobody_can_tell(
    *,
    nodes: int,
    per_node: int,
    seed: int,
    noise: float,
    reference: bool,
    all_pairs: bool,
    data: st.DataObject,
) -> None:
    workers = job(nodes, per_node)
    pairs = [(a, b) for a in range(nodes) for b in range(nodes) if a != b]
    if not all_pairs:
        pairs = [(a, b) for a, b in pairs if (a - b) % nodes in (1, nodes - 1)]
    links = {(f"n{a}", f"n{b}") for a, b in pairs}
    names = [f"n{node}" for node in range(nodes)]
    possible: list[Component] = [
        *(("device", str(w.rank), "") for w in workers),
        *(("link", a, b) for a, b in sorted(links)),
        *(("out", name, "") for name in names),
        *(("in", name, "") for name in names),
    ]
    most = 3 if len(workers) > 6 else 1
    chosen = data.draw(st.lists(st.sampled_from(possible), min_size=1, max_size=most, unique=True))
    slowdown = data.draw(st.floats(2.0, 20.0))
    culprits = Culprits(
        devices={int(c[1]): slowdown for c in chosen if c[0] == "device"},
        links={c[1:]: slowdown for c in chosen if c[0] == "link"},
        out={c[1]: slowdown for c in chosen if c[0] == "out"},
        into={c[1]: slowdown for c in chosen if c[0] == "in"},
    )
    # without a reference the majority is the norm
    slowed = _slowed(links, set(chosen))
    assume(reference or 2 * len(slowed) < len(links))
    lab = Lab(workers=workers, noise=noise, seed=seed)
    script = reference_script(workers, WHOLE)
    if all_pairs:
        script = [stage for stage in script if stage["do"] != "p2p"]
        sizes: dict[str, Any] = {"sizes_bytes": [1 << 24, 1 << 26], "repeats": 3, "do": "p2p"}
        script += [{**sizes, "pairs": [[a * per_node, b * per_node]]} for a, b in pairs]
    healthy = lab.run(script) if reference else []
    found = judge(lab.run(script, culprits), healthy, workers, episode="e")

    accused = {_component(finding) for finding in found.findings}
    devices = {c for c in chosen if c[0] == "device"}
    assert {c for c in accused if c[0] == "device"} == devices
    assert not any(f.what == "host" for f in found.findings)
    explanations = list(_explanations(links, _slowed(links, set(chosen) - devices)))
    blamed = {c for c in accused if c[0] != "device"}
    if len(explanations) == 1:
        assert blamed == explanations[0]
    else:
        certain = set.intersection(*explanations)
        assert certain <= blamed
        assert _slowed(links, blamed) == _slowed(links, explanations[0])
        assert {c for c in blamed if c[0] != "link"} <= certain
        assert "nobody can say" in found.note


def _component(finding: Finding) -> Component:
    if finding.what != "link":
        return (finding.what, str(finding.ranks[0]), "")
    if not finding.peer_host:
        return ("out", finding.host, "")
    if not finding.host:
        return ("in", finding.peer_host, "")
    return ("link", finding.host, finding.peer_host)


def _slowed(links: set[tuple[str, str]], culprits: set[Component]) -> set[tuple[str, str]]:
    return {(a, b) for a, b in links if {("link", a, b), ("out", a, ""), ("in", b, "")} & culprits}


def _explanations(
    links: set[tuple[str, str]], slow: set[tuple[str, str]]
) -> Iterator[set[Component]]:
    """Every smallest set of components that makes these links slow and no other, by trying."""
    ends = sorted({end for link in links for end in link})
    cards = [(kind, end, "") for kind in ("out", "in") for end in ends]
    several = [c for c in cards if len(_slowed(links, {c})) > 1 and _slowed(links, {c}) <= slow]
    possible: list[Component] = [*several, *(("link", a, b) for a, b in sorted(slow))]
    for count in range(len(slow) + 1):
        fitting = [
            set(chosen)
            for chosen in combinations(possible, count)
            if _slowed(links, set(chosen)) == slow
        ]
        if fitting:
            yield from fitting
            return


def test_noise_is_measured_by_the_faster_half() -> None:
    random = np.random.default_rng(5)
    now = {r: Reading(float(np.exp(0.05 * random.standard_normal()))) for r in range(40)}
    assert not any(c.is_slow for c in compare(now, {}, Limits()).values())
    slow = {r: Reading(v.value_s * (1.6 if r < 12 else 1.0)) for r, v in now.items()}
    assert {r for r, c in compare(slow, {}, Limits()).items() if c.is_slow} == set(range(12))


def test_results_without_sense_are_left_out() -> None:
    lab = Lab(workers=job(4), noise=0.02)
    script = reference_script(lab.workers, WHOLE)
    odd: list[object] = [[], {}, "x", None, True, -1.0, math.inf]
    keys = ("rank", "peer", "by", "stage", "size_bytes", "seconds", "median_s", "wall_s", "repeats")
    good = lab.run(script, Culprits(devices={2: 1.6}))
    spoilt = [
        {**result, key: odd[(n + k) % len(odd)]}
        for n, result in enumerate(good[:40])
        for k, key in enumerate(keys)
    ]
    found = judge([*good, *spoilt], lab.run(script), lab.workers, episode="e")
    assert ("device", (2,), ()) in named(found)
