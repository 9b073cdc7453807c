"""Real links and quotas on made-up nodes: what a pause measures tells the culprits apart."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
from tests.localize.benching import JOB, Bench, is_crowded
from tests.testbed import TestBed

from failslow.inject import congest, throttle
from failslow.localize.judge import judge
from failslow.localize.script import ScriptSettings, WorkerPlace, plan, reference_script
from failslow.records import Diagnosis, Suspect, Verdict

pytestmark = pytest.mark.timeout(240)


class Nodes:
    """A bed whose job runs scripts, and the healthy results it gave at first."""

    def __init__(self, bed: TestBed, job: Bench) -> None:
        self.bed, self.job = bed, job
        self.workers = job.places()
        self.healthy = job.run(reference_script(self.workers))

    def verdict(self, diagnosis: Diagnosis | None = None) -> Verdict:
        """What two pauses agree on: what else this machine does hits one worker, then another."""
        once, twice = self._verdict(diagnosis), self._verdict(diagnosis)
        agreed = {finding.key for finding in once.findings}
        findings = tuple(finding for finding in twice.findings if finding.key in agreed)
        return replace(twice, findings=findings)

    def _verdict(self, diagnosis: Diagnosis | None) -> Verdict:
        """Of one pause; of another one, if the machine was too crowded to prove anything."""
        for attempt in range(6):
            results = self.job.run(plan(diagnosis, self.workers))
            (self.bed.folder / f"results-{attempt}.json").write_text(json.dumps(results))
            if not is_crowded(results):
                return judge(results, self.healthy, self.workers, episode="e")
        pytest.skip("other work on this machine takes the cores these workers need")


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    if reason := TestBed.available():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("bed")
    with TestBed(nodes=4, egress_mbit=1000, folder=folder) as bed:
        bed.launch(JOB, args=[str(folder)])
        job = Bench(folder, 4)
        yield Nodes(bed, job)
        job.stop()
        bed.wait(60)


def named(found: Verdict) -> set[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Devices and links. (What else this machine does is rightly called host contention.)"""
    return {(f.what, f.ranks, f.peer_ranks) for f in found.findings if f.what != "host"}


def test_places_are_those_of_the_nodes(nodes: Nodes) -> None:
    assert [w.node for w in nodes.workers] == [n.namespace for n in nodes.bed.nodes]
    assert {w.nic for w in nodes.workers} == {"eth0"}
    assert isinstance(nodes.workers[0], WorkerPlace)


def test_healthy_nodes_are_accused_of_nothing(nodes: Nodes) -> None:
    found = nodes.verdict()
    assert named(found) == set(), found


@pytest.mark.parametrize("rate_mbit", [200, pytest.param(480, marks=pytest.mark.slow)])
def test_one_directed_link_is_told(nodes: Nodes, rate_mbit: float) -> None:
    one, two = nodes.bed.nodes[1], nodes.bed.nodes[2]
    group = Suspect(
        what="group", ranks=(0, 1, 2, 3), slowdown=2.0, extra_s=0.1, score=0.9, label="default"
    )
    with congest(one.namespace, "eth0", rate_mbit, dst=two.address):
        found = nodes.verdict(Diagnosis(episode="e", suspects=(group,)))
    assert named(found) == {("link", (1,), (2,))}, found
    (link,) = (f for f in found.findings if f.what == "link")
    assert (link.host, link.peer_host, link.nic) == (one.namespace, two.namespace, "eth0")
    assert link.slowdown == pytest.approx(1000 / rate_mbit, rel=0.35)


def test_a_link_off_the_ring_is_found_along_the_trees(nodes: Nodes) -> None:
    zero, two = nodes.bed.nodes[0], nodes.bed.nodes[2]
    apart = ScriptSettings(all_pairs=0)  # as if there were more nodes than can be paired
    group = Suspect(what="group", ranks=(0, 1, 2, 3), slowdown=2.0, extra_s=0.1, score=0.9)
    suspicion = Diagnosis(episode="e", suspects=(group,))

    def pause(well: tuple[str, ...]) -> tuple[set[tuple[int, int]], Verdict]:
        for _ in range(6):
            script = plan(suspicion, nodes.workers, apart, well=well)
            results = nodes.job.run(script)
            if not is_crowded(results):
                pairs = [pair for stage in script for pair in stage.get("pairs", ())]
                found = judge(results, nodes.healthy, nodes.workers, episode="e")
                return {(here, there) for here, there in pairs}, found
        pytest.skip("other work on this machine takes the cores these workers need")

    with congest(zero.namespace, "eth0", 200, dst=two.address):
        for _ in range(3):
            ring, first = pause(())
            if not named(first):
                break
        assert named(first) == set(), first
        tree, second = pause(first.well)
    assert (0, 2) in tree - ring
    assert named(second) == {("link", (0,), (2,))}, second


def test_a_nodes_egress_is_told_from_a_link(nodes: Nodes) -> None:
    node = nodes.bed.nodes[3]
    with congest(node.namespace, "eth0", 300):
        found = nodes.verdict()
    assert named(found) == {("link", (3,), ())}, found
    (card,) = (f for f in found.findings if f.what == "link")
    assert card.host == node.namespace
    assert card.slowdown == pytest.approx(1000 / 300, rel=0.35)


def test_a_throttled_worker_and_a_slow_link_are_both_told(nodes: Nodes) -> None:
    zero, one = nodes.bed.nodes[0], nodes.bed.nodes[1]
    with (
        throttle(nodes.bed.workers[2].pid, to=0.3),
        congest(zero.namespace, "eth0", 100, dst=one.address),
    ):
        found = nodes.verdict()
    assert named(found) == {("device", (2,), ()), ("link", (0,), (1,))}, found
    (device,) = (f for f in found.findings if f.what == "device")
    # a product takes up to twice as long while the core's other half is at work
    assert 0.65 / 0.3 < device.slowdown < 2.0 / 0.3
    (share,) = re.findall(r"a quota held the process for (\d+)% of the time", device.evidence[0])
    assert int(share) == pytest.approx(70, abs=12)
