"""A verdict keeps what was proved slow and slows the job, and notes the rest."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from failslow.localize.accord import accord
from failslow.records import Diagnosis, Finding, Suspect, Verdict

DEVICE = Finding(what="device", slowdown=1.5, ranks=(2,), host="b")
HOST = Finding(what="host", slowdown=1.9, ranks=(2, 3), host="b", cause="CPU contention")
OTHER = Finding(what="host", slowdown=3.0, ranks=(0, 1), host="a")
LINK = Finding(what="link", slowdown=5.0, ranks=(2,), peer_ranks=(1,), host="b", peer_host="a")
CARD = Finding(what="link", slowdown=5.0, ranks=(2, 3), host="b")


def suspects(*found: Suspect, everyone: bool = False) -> Diagnosis:
    return Diagnosis(episode="e1", suspects=found, everyone=everyone)


def suspect(what: str, *ranks: int, peers: tuple[int, ...] = ()) -> Suspect:
    return Suspect(
        what=what,  # type: ignore[arg-type]  # a parameter
        ranks=ranks,
        peer_ranks=peers,
        slowdown=1.4,
        extra_s=0.04,
        score=0.9,
    )


def kept(findings: tuple[Finding, ...], diagnosis: Diagnosis, slowdown: float = 1.4) -> list[str]:
    verdict = accord(Verdict(episode="e1", findings=findings), diagnosis, slowdown=slowdown)
    return [finding.key for finding in verdict.findings]


@pytest.mark.parametrize(
    ("findings", "suspect_", "expected"),
    [
        ((DEVICE, OTHER), suspect("compute", 2), ["device rank 2"]),
        ((HOST, OTHER), suspect("compute", 3), ["host b"]),
        ((LINK, OTHER), suspect("group", 0, 1, 2, 3), ["link b>a"]),
        ((LINK, DEVICE), suspect("link", 2, peers=(1,)), ["link b>a"]),
        ((CARD,), suspect("link", 2, peers=(1,)), ["link b>1"]),
        ((LINK,), suspect("compute", 2), []),
        ((LINK,), suspect("group", 4, 5), []),
        ((OTHER,), suspect("compute", 2), []),
    ],
)
def test_what_call_streams_accuse_stays(
    findings: tuple[Finding, ...], suspect_: Suspect, expected: list[str]
) -> None:
    found = kept(findings, suspects(suspect_))
    assert [key.replace("link b>1", "link b>") for key in found] == [
        key.replace("link b>1", "link b>") for key in expected
    ]


def test_what_is_left_out_is_noted() -> None:
    verdict = accord(
        Verdict(episode="e1", findings=(OTHER,), note="3 links are healthy"),
        suspects(suspect("compute", 2)),
        slowdown=1.4,
    )
    assert verdict.findings == ()
    assert "host a x3.00" in verdict.note


@pytest.mark.parametrize(("slowdown", "expected"), [(1.4, ["device rank 2"]), (3.0, [])])
def test_without_suspects_a_finding_must_explain_the_slowness(
    slowdown: float, expected: list[str]
) -> None:
    assert kept((DEVICE,), suspects(), slowdown) == expected
    assert kept((DEVICE,), suspects(everyone=True), slowdown) == expected


def test_a_worker_is_as_slow_as_it_is_in_training() -> None:
    verdict = accord(
        Verdict(episode="e1", findings=(DEVICE,)),
        suspects(suspect("compute", 2)),
        slowdown=1.4,
        own={2: 1.7, 0: 9.0},
    )
    assert [finding.slowdown for finding in verdict.findings] == [1.7]
    healthy = accord(
        Verdict(episode="e1", findings=(DEVICE,)),
        suspects(suspect("compute", 2)),
        slowdown=1.4,
        own={2: 1.02},
    )
    assert healthy.findings == ()


@given(
    findings=st.lists(st.sampled_from([DEVICE, HOST, OTHER, LINK, CARD]), unique=True),
    accused=st.lists(st.sampled_from(["compute", "link", "group"])),
    slowdown=st.floats(1.0, 5.0),
)
def test_nothing_is_added_and_all_is_told(
    findings: list[Finding], accused: list[str], slowdown: float
) -> None:
    diagnosis = suspects(*(suspect(what, 2) for what in accused))
    verdict = accord(Verdict(episode="e1", findings=tuple(findings)), diagnosis, slowdown=slowdown)
    assert set(verdict.findings) <= set(findings)
    for finding in set(findings) - set(verdict.findings):
        assert finding.key in verdict.note


def test_without_a_suspect_a_host_needs_a_cause_where_there_is_telemetry() -> None:
    waited = replace(HOST, cause="", evidence=("Against CPU contention: rank 2 waited no longer.",))
    assert kept((waited,), suspects(everyone=True)) == []
    assert kept((waited,), suspects(suspect("compute", 2))) == ["host b"]
    assert kept((replace(waited, evidence=()),), suspects(everyone=True)) == ["host b"]
    assert kept((replace(waited, cause="CPU contention"),), suspects(everyone=True)) == ["host b"]


@pytest.mark.parametrize(("measured", "is_named"), [(1.11, False), (1.3, True)])
def test_what_all_feel_alike_is_blamed_on_nobody_without_a_measurement(
    measured: float, is_named: bool
) -> None:
    finding = replace(DEVICE, slowdown=measured)
    own = dict.fromkeys(range(4), 1.3)
    verdict = Verdict(episode="e1", findings=(finding,))
    found = accord(verdict, suspects(everyone=True), slowdown=1.3, own=own)
    assert [f.key for f in found.findings] == (["device rank 2"] if is_named else [])


@pytest.mark.parametrize(
    ("finding", "expected"),
    [
        (replace(DEVICE, slowdown=6.1, cause="device degradation (quota)"), ["device rank 2"]),
        (
            replace(DEVICE, slowdown=1.3, cause="device degradation (quota)"),
            [],
        ),  # of x2.4: too little
        (replace(DEVICE, slowdown=6.1), []),  # nothing tells why: perhaps it was for a moment
        (replace(HOST, slowdown=6.1), []),  # what runs beside it may be there for others as well
    ],
)
def test_a_device_with_a_cause_is_named_whatever_streams_accuse(
    finding: Finding, expected: list[str]
) -> None:
    """Two workers held by quotas in two tensor-parallel groups: one group stood out, or one rank.

    Benchmarks said x6.27 and x6.25 of both, and the verdict named nobody, or one of them.
    """
    for accused in (suspect("group", 2, 3), suspect("compute", 1), suspect("group", 0, 1)):
        assert kept((finding,), suspects(accused), 2.4) == expected
