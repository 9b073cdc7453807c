"""Clocks of hosts minutes apart: what a verdict rests on is what it is with right ones."""

from __future__ import annotations

from typing import Any

import pytest
from tests.runtime.test_inquiry import HEALTHY_S, Inquired, inquired

from failslow.config import DecideConfig, LocalizeConfig
from failslow.pipeline import Report

APART_S = 120.0


class Sampled(Inquired):
    """Its nodes' samplers have seen who waited for a core: the culprit, since it is slow."""

    struck_s = 0.0

    def window(self, node: str, last_s: float) -> dict[str, Any]:
        """The last seconds, four samples each, by the node's clock."""
        begin, end = int(4 * (self.now_s - last_s)) + 1, int(4 * self.now_s) + 1
        seconds = [number / 4 for number in range(begin, end)]
        ranks = [rank for rank in self.ranks if self.node(rank) == node]
        ahead_s = self.skew_s[ranks[0]]
        return {
            "since_t": self.now_s - last_s + ahead_s,
            "until_t": self.now_s + ahead_s,
            "t": [second + ahead_s for second in seconds],
            "series": {},
            "steady": {},
            "ranks": {
                str(rank): {
                    "series": {
                        "runqueue_cores": [
                            0.01 + 0.002 * (second % 1) + 0.6 * self.waits(rank, second)
                            for second in seconds
                        ]
                    },
                    "steady": {"throttled_cores": 0.0},
                }
                for rank in ranks
            },
        }

    def waits(self, rank: int, second: float) -> bool:
        return rank == self.culprit and 0.0 < self.struck_s <= second

    def do_telemetry(self, body: Any) -> None:
        for node in self.nodes:
            window = self.window(node, body["last_s"])
            self.give(Report(node=node, topic="telemetry", body=window))


def struck(skew_s: tuple[float, float]) -> Sampled:
    job = Sampled(
        decide=DecideConfig.model_validate({"mode": "advise"}),
        localize=LocalizeConfig(pauses_per_hour=100, max_pause_share=1.0),
    )
    job.skew_s = {rank: skew_s[rank // 2] for rank in job.ranks}
    job.iterate(40, HEALTHY_S)
    job.profile("healthy")
    job.iterate(300, HEALTHY_S)
    job.slow, job.struck_s = 1.6, job.now_s
    job.iterate(80, HEALTHY_S, slow=1.4, culprit=job.culprit)
    return job


@pytest.mark.parametrize(
    "skew_s", [(0.0, APART_S), (APART_S, 0.0), (APART_S, APART_S), (0.4, -0.4), (0.0, -50.0)]
)
def test_evidence_is_the_same_whatever_hosts_clocks_say(skew_s: tuple[float, float]) -> None:
    (right,) = struck((0.0, 0.0)).said("verdict")[-1].record.findings
    assert right.cause == "CPU contention"
    assert any("rank 2 waited for a core" in text for text in right.evidence)
    (finding,) = struck(skew_s).said("verdict")[-1].record.findings
    assert (finding.what, finding.ranks, finding.cause) == (right.what, right.ranks, right.cause)
    if max(map(abs, skew_s)) > 1.0:
        assert finding.evidence == right.evidence
        assert finding.measurements == right.measurements


def test_a_journal_s_telemetry_is_by_the_clock_of_its_iterations() -> None:
    job = struck((0.0, APART_S))
    onset_t = next(e.tags["start_t"] for e in job.said("episode") if e.tags["event"] == "onset")
    told = {e.record["node"]: e.record for e in job.said("telemetry")}
    assert told["node0"]["ahead_s"] == 0.0
    assert told["node1"]["ahead_s"] == APART_S
    assert told["node0"]["telemetry_t"] == told["node1"]["telemetry_t"]
    waited = told["node1"]["ranks"]["2"]["series"]["runqueue_cores"]
    first = next(i for i, cores in enumerate(waited) if cores > 0.5)
    assert abs(told["node1"]["telemetry_t"][first] - onset_t) < 1.0
    assert told["node1"]["until_t"] == pytest.approx(told["node0"]["until_t"], abs=0.01)


def test_what_is_told_for_the_journal_alone_is_mended_as_soon_as_the_clock_is_known() -> None:
    job = inquired()
    job.skew_s = dict.fromkeys(range(2), 0.0) | dict.fromkeys((2, 3), APART_S)
    body: dict[str, Any] = {"why": "record", "t": [job.now_s + APART_S], "series": {"x": [1.0]}}
    report = Report(node="node1", topic="telemetry", body=body)
    job.give(report)
    job.iterate(3, HEALTHY_S)
    job.give(report)
    early, late = (entry.record for entry in job.said("telemetry"))
    assert (early["ahead_s"], early["telemetry_t"]) == (None, body["t"])
    assert (late["ahead_s"], late["telemetry_t"]) == (APART_S, [body["t"][0] - APART_S])
