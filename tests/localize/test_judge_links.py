"""Links: what was cut off, what waited for a core, what was asked for late, what is an echo."""

from __future__ import annotations

from typing import Any

import pytest
from tests.localize.made_results import Culprits, Lab
from tests.localize.test_judge import WHOLE, job, named, verdict

from failslow.localize.judge import judge
from failslow.localize.script import reference_script


def test_cut_off_transfers_are_slow_links_and_missing_ones_are_said() -> None:
    lab = Lab(workers=job(5), noise=0.02)
    script = reference_script(lab.workers, WHOLE)
    results = [r for r in lab.run(script) if (r.get("rank"), r.get("peer")) != (1, 2)]
    cut = {"do": "p2p", "rank": 1, "peer": 2, "size_bytes": 1 << 24, "seconds": None}
    results.append({**cut, "at_least_s": 2.0, "error": "Timed out"})
    assert named(judge(results, [], lab.workers, episode="e")) == {("link", (1,), (2,))}

    results[-1] |= {"waited": 0.97}  # but not because of the link
    assert judge(results, [], lab.workers, episode="e").findings == ()

    results[-1] = {"do": "p2p", "rank": 1, "peer": 2, "seconds": None, "error": "did not come"}
    found = judge(results, [], lab.workers, episode="e")
    assert found.findings == ()
    assert "1>2 not measured: did not come" in found.note


@pytest.mark.parametrize(
    ("asked", "since_s", "is_slow"),
    [(3, 2.0, True), (3, 0.02, False), (2, 1.9, False), (3, 0.5, True)],
)
def test_a_transfer_that_was_asked_for_late_was_under_way_only_since(
    asked: int, since_s: float, is_slow: bool
) -> None:
    lab = Lab(workers=job(5), noise=0.02)
    script = reference_script(lab.workers, WHOLE)
    results = [r for r in lab.run(script) if (r.get("rank"), r.get("peer")) != (1, 2)]
    cut: dict[str, Any] = {"do": "p2p", "stage": 4, "rank": 1, "peer": 2, "seconds": None}
    results.append(
        {**cut, "by": 2, "size_bytes": 1 << 24, "at_least_s": 2.0, "asked": 3, "error": "Timed out"}
    )
    results.append({**cut, "by": 1, "asked": asked, "since_s": since_s, "error": "Timed out"})
    found = named(judge(results, [], lab.workers, episode="e"))
    assert found == ({("link", (1,), (2,))} if is_slow else set())


@pytest.mark.parametrize(("slowdown", "is_told"), [(3.0, False), (5.0, False), (7.0, True)])
def test_what_is_late_as_its_acknowledgements_are_is_the_cards_fault(
    slowdown: float, is_told: bool
) -> None:
    slow = Culprits(out={"n2": 7.0}, links={("n3", "n2"): slowdown})
    found = verdict(job(5), slow)
    assert named(found) == {("link", (2,), ())} | ({("link", (3,), (2,))} if is_told else set())
    assert ("as their way back is" in found.note) is not is_told


def test_a_note_on_a_thousand_links_can_be_read() -> None:
    """Each had its own reason, and a status line of a hundred thousand letters."""
    workers = job(600)
    failed = [
        {"do": "p2p", "rank": n, "peer": n + 1, "seconds": None, "error": why}
        for n in range(599)
        for why in [f"rank {n} did not come" if n % 2 else "no answer of the store"]
    ]
    note = judge(failed, [], workers, episode="e").note
    assert "transfers of ranks 0>1, 2>3, " in note
    assert "292 more not measured: no answer of the store" in note
    assert "not measured either" in note
    assert len(note) < 600


def test_many_slow_cards_of_a_large_job_are_all_named() -> None:
    """Twenty among 320 nodes, as behind a slow switch, each both ways."""
    bad = [f"n{n}" for n in range(0, 320, 16)]
    lab = Lab(workers=job(320), noise=0.02)
    script = reference_script(lab.workers, WHOLE)
    slow = Culprits(out=dict.fromkeys(bad, 4.0), into=dict.fromkeys(bad, 4.0))
    verdict = judge(lab.run(script, slow), lab.run(script), lab.workers, episode="e")
    links = [(f.host, f.peer_host) for f in verdict.findings]
    assert sorted(links) == sorted([*((n, "") for n in bad), *(("", n) for n in bad)])


def test_a_transfer_that_waited_for_a_core_does_not_clear_the_card_it_left_by() -> None:
    lab = Lab(workers=job(4, 1, "cpu"), noise=0.02)
    script = reference_script(lab.workers, WHOLE)
    last = [stage for stage in script if stage["do"] == "p2p"][-1]
    script.append({**last, "pairs": [[2, 0]]})
    slow = Culprits(links={("n2", f"n{n}"): 16.0 for n in (0, 1, 3)})
    results = lab.run(script, slow)
    for result in results:
        if (result.get("rank"), result.get("peer")) == (2, 1):
            result["waited"] = 1.0
    assert named(judge(results, lab.run(script), lab.workers, episode="e")) == {("link", (2,), ())}
