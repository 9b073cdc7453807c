"""A controller killed after any line of its journal: the case goes on, and ends as it would."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import pytest
from tests.runtime.test_inquiry import HEALTHY_S, Inquired
from tests.runtime.test_remedy import FACTS

from failslow.config import DecideConfig, LocalizeConfig
from failslow.journal import JournalEntry
from failslow.pipeline import Instruction, Order, Pipeline, Report, Write


class Doomed:
    """A pipeline whose process is killed once it has written so many lines."""

    def __init__(self, pipeline: Pipeline, lines: int) -> None:
        self._pipeline, self._lines = pipeline, lines
        self.killed = False

    def handle(self, event: Any, now_s: float) -> list[Instruction]:
        if self.killed:
            return []
        done = []
        for instruction in self._pipeline.handle(event, now_s):
            done.append(instruction)
            self._lines -= isinstance(instruction, Write)
            if not self._lines:
                self.killed = True
                break
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipeline, name)


class Killed(Inquired):
    """Its controller dies after `lines` lines and is back `down` iterations later."""

    lines = 0
    down = 3
    commits = 0

    def begin(self, launch: str, entries: Iterable[JournalEntry] = ()) -> None:
        super().begin(launch, entries)
        if self.lines:
            self.pipeline: Any = Doomed(self.pipeline, self.lines)
            self.lines = 0

    def iterate(self, count: int, healthy_s: float, **how: Any) -> None:
        for _ in range(count):
            super().iterate(1, healthy_s, **how)
            if getattr(self.pipeline, "killed", False):
                self.down -= 1
                if self.down < 0:
                    self.begin("launch-1", self.journal)

    def do_pause(self, body: Any) -> None:
        self.commits += body["do"] == "commit" and self.slow > 1.0
        super().do_pause(body)

    def do_steer(self, _body: Any) -> None:
        raise AssertionError("advice is not carried out")


def told(lines: int, *, pauses: int = 100) -> Killed:
    """The story of a slow device, with the controller killed after so many lines; 0: never."""
    Killed.lines = lines
    try:
        job = Killed(
            decide=DecideConfig.model_validate({"mode": "advise", "redistribute_cost_s": 0.2}),
            localize=LocalizeConfig(pauses_per_hour=pauses, max_pause_share=1.0),
        )
    finally:
        Killed.lines = 0
    body = {"what": "facts"} | asdict(FACTS)
    job.give(Report(node="node0", rank=0, topic="steer", body=body))
    job.story()
    job.iterate(100, HEALTHY_S, slow=1.4, culprit=job.culprit)
    return job


def ends_alike(job: Killed, whole: Killed) -> None:
    """The same culprit, soon after it would have been named, on profiles of all workers."""
    named_t = [[e.t for e in each.said("verdict") if e.record.episode] for each in (job, whole)]
    assert named_t[0][0] - named_t[1][0] < 10.0
    assert not any(entry.record.missing for entry in job.said("diagnosis"))
    verdicts = [entry.record for entry in job.said("verdict") if entry.record.episode]
    assert {(f.what, f.ranks) for v in verdicts for f in v.findings} == {("device", (2,))}
    assert verdicts[-1].findings
    assert len({entry.record.episode for entry in job.said("verdict")} - {""}) == 1
    decision = job.said("decision")[-1].record
    assert (decision.level, decision.culprits) == ("S2", ("device rank 2",))


def turns(job: Killed) -> list[int]:
    """After which lines the case had just taken a turn."""
    kinds = [entry.kind for entry in job.journal]
    first, last = kinds.index("suspicion"), max(i for i, k in enumerate(kinds) if k == "decision")
    return [first, *(i + 1 for i in range(first, last + 1) if kinds[i] != kinds[i + 1])]


@pytest.fixture(scope="module")
def whole() -> Killed:
    """Nobody is killed."""
    return told(0)


def line_of(job: Killed, kind: str, **fields: Any) -> int:
    """How many lines there are up to the first of this kind about the case."""
    for number, entry in enumerate(job.journal, 1):
        about = entry.record if isinstance(entry.record, dict) else asdict(entry.record)
        if entry.kind == kind and all(about[name] == value for name, value in fields.items()):
            return number
    raise AssertionError(f"no {kind} with {fields}")


def test_a_controller_that_lives_pauses_once_and_advises(whole: Killed) -> None:
    ends_alike(whole, whole)
    assert whole.commits == 1
    kinds = {entry.kind for entry in whole.journal}
    assert {"suspicion", "diagnosis", "validation", "telemetry", "verdict", "decision"} <= kinds
    begun = [e.record for e in whole.said("action") if e.record["what"] == "pausing"]
    assert [line["why"] for line in begun] == ["reference", "suspects"]
    assert begun[-1]["episode"] == whole.pipeline.episode


def test_killed_at_any_turn_of_a_case_it_ends_alike(whole: Killed) -> None:
    for lines in turns(whole):
        job = told(lines)
        assert not isinstance(job.pipeline, Doomed), f"killed after line {lines} it is back"
        ends_alike(job, whole)
        assert job.commits <= 2, f"killed after line {lines}"


def test_a_pause_nobody_told_the_end_of_is_one_of_those_allowed(whole: Killed) -> None:
    for lines in turns(whole):
        job = told(lines, pauses=1)
        assert job.commits <= 1, f"killed after line {lines}"
        named = {(f.what, f.ranks) for e in job.said("verdict") for f in e.record.findings}
        assert named <= {("device", (2,))}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_after_any_line_it_ends_alike(whole: Killed) -> None:
    for lines in range(1, len(whole.journal)):
        job = told(lines)
        ends_alike(job, whole)
        assert job.commits <= 2, f"killed after line {lines}"


def test_after_a_diagnosis_nobody_is_profiled_again(whole: Killed) -> None:
    episode = whole.pipeline.episode
    job = told(line_of(whole, "diagnosis", episode=episode))
    ends_alike(job, whole)
    assert [e.record for e in job.said("diagnosis")] == [e.record for e in whole.said("diagnosis")]
    asked = [out for out in job.out if isinstance(out, Order) and out.topic == "profile"]
    assert len(asked) == 1


def test_what_a_pause_measured_is_judged_by_the_next_controller(whole: Killed) -> None:
    job = told(line_of(whole, "validation", why="suspects"))
    ends_alike(job, whole)
    assert job.commits == 1


def test_a_reference_that_was_not_taken_any_more_is_taken_later(whole: Killed) -> None:
    job = told(line_of(whole, "diagnosis", episode=""))
    assert [e.record["why"] for e in job.said("validation")] == ["reference", "suspects"]
