"""What a pause measured and found fast is told apart from what it did not measure."""

from __future__ import annotations

from typing import Any

from tests.localize.made_results import Culprits, Lab
from tests.localize.test_judge import WHOLE, job

from failslow.localize.judge import judge
from failslow.localize.script import WorkerPlace, reference_script
from failslow.records import Verdict

KEYS = {
    "device rank 0", "device rank 1", "device rank 2", "host n0", "host n1", "host n2",
    "link n0>", "link >n0", "link n1>", "link >n1", "link n2>", "link >n2",
    "link n0>n1", "link n0>n2", "link n1>n0", "link n1>n2", "link n2>n0", "link n2>n1",
}  # fmt: skip


class Pause:
    """A job of which everything was measured, and what is left of that."""

    def __init__(self, workers: list[WorkerPlace], culprits: Culprits | None = None) -> None:
        lab = Lab(workers=workers, noise=0.02, seed=0)
        script = reference_script(workers, WHOLE)
        self.workers, self.before = workers, lab.run(script)
        self.results: list[dict[str, Any]] = lab.run(script, culprits)

    def verdict(self, episode: str = "e1") -> Verdict:
        return judge(self.results, self.before, self.workers, episode=episode)


def test_all_that_was_measured_and_is_fast_is_well() -> None:
    assert set(Pause(job(3)).verdict().well) == KEYS
    assert Pause(job(3)).verdict(episode="").well == ()


def test_what_is_slow_is_not_well_and_neither_is_what_it_is_part_of() -> None:
    slow = Culprits(devices={1: 1.5}, links={("n0", "n2"): 3.0})
    found = Pause(job(3), slow).verdict()
    assert {f.key for f in found.findings} == {"device rank 1", "link n0>n2"}
    # the cards have another link that is fast: they are not what is slow
    assert KEYS - {*found.well} == {"device rank 1", "host n1", "link n0>n2"}


def test_a_slow_card_and_its_links_are_not_well() -> None:
    found = Pause(job(3), Culprits(out={"n1": 4.0})).verdict()
    assert KEYS - {*found.well} == {"link n1>", "link n1>n0", "link n1>n2"}


def test_what_was_not_measured_is_not_well() -> None:
    pause = Pause(job(3))
    largest = max(r["size_bytes"] for r in pause.results if r["do"] == "p2p")
    kept = []
    for result in pause.results:
        # rank 1 sends no results; the large transfer 0>2 was cut off
        if result["rank"] == 1 or result.get("peer") == 1:
            continue
        pair = (result["rank"], result.get("peer"), result.get("size_bytes"))
        late = {"do": "p2p", "rank": 0, "peer": 2, "size_bytes": largest, "error": "late"}
        kept.append(late if pair == (0, 2, largest) else result)
    pause.results = kept
    found = pause.verdict()
    assert found.findings == ()
    assert {*found.well} == {
        "device rank 0", "device rank 2", "host n0", "host n2", "link n2>n0", "link n2>", "link >n0"
    }  # fmt: skip


def test_the_links_inside_a_node_are_well_when_all_are() -> None:
    workers = job(1, 3, "cpu")
    assert "link n0>n0" in Pause(workers).verdict().well
    pause = Pause(workers)
    pause.results = [
        r | ({"error": "late", "seconds": None} if r.get("peer") == 2 and r["rank"] == 0 else {})
        for r in pause.results
    ]
    assert "link n0>n0" not in pause.verdict().well


def test_results_without_sense_are_nobodys() -> None:
    pause = Pause(job(3))
    odd: list[Any] = [None, "0", True, 1e9]
    pause.results += [
        {"do": "p2p", "rank": a, "peer": b, "size_bytes": c} for a in odd for b in odd for c in odd
    ]
    assert set(pause.verdict().well) <= KEYS
