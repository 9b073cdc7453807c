"""From a journal's entries to what a live view says of the job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from failslow.journal import JournalEntry, JournalWriter, decode_entry, encode_entry, read_journal
from failslow.records import Culprit, Diagnosis, Episode, StepSample
from failslow.report.live import live_document, live_view, waiting_view
from failslow.report.livejob import LiveJob, LiveState

BEGUN = 1_745_735_000.0


class Script:
    """A journal as the controller writes it, entry by entry."""

    def __init__(self) -> None:
        self.t = BEGUN
        self.step = 0
        self.entries: list[JournalEntry] = []

    def write(self, record: Any, **tags: Any) -> None:
        line = encode_entry(record, t=self.t, **tags)
        self.entries.append(decode_entry(line))

    def started(self) -> None:
        self.health("controller", event="started", launch="1-2", message="watching begins")

    def health(self, what: str, ok: bool = True, **more: Any) -> None:
        self.write({"what": what, "ok": ok, "message": what, **more}, kind="health")

    def steps(
        self,
        count: int,
        duration_s: float = 0.1,
        *,
        ranks: range = range(4),
        healthy_s: float | None = 0.1,
        silent: tuple[int, ...] = (),
    ) -> None:
        """Iterations of the job, then a record of each worker."""
        for _ in range(count):
            self.t += duration_s
            sample = StepSample(step=self.step, duration_s=duration_s, end_s=self.t - BEGUN)
            self.write(sample, workers=len(ranks), healthy_s=healthy_s)
            self.step += 1
        for rank in ranks:
            sample = StepSample(
                step=self.step - 1,
                duration_s=duration_s,
                end_s=self.t - BEGUN,
                iterations=count,
                compute_s=0.05,
            )
            state = "silent" if rank in silent else "ok"
            self.write(sample, rank=rank, node=f"gpu-{rank // 2}", healthy_s=healthy_s, state=state)

    def suspicion(self, event: str = "suspected") -> None:
        self.write(
            {
                "event": event,
                "id": "e1",
                "step": self.step,
                "first_step": self.step - 5,
                "first_t": self.t - 0.7,
                "slowdown": 1.4,
                "baseline_s": 0.1,
                "culprits": [Culprit(rank=3, what="compute", slowdown=1.8)],
            },
            kind="suspicion",
        )

    def episode(self, event: str, *, lost_s: float, start_step: int = 40, **tags: Any) -> None:
        over = event == "relief"
        self.write(
            Episode(
                start_step=start_step,
                end_step=self.step if over else None,
                start_s=4.0,
                end_s=self.t - BEGUN if over else None,
                duration_s=self.t - BEGUN - 4.0,
                iteration_s=0.14,
                baseline_s=0.1,
                slowdown=1.4,
                peak_slowdown=1.5,
                lost_s=lost_s,
                confidence=0.99,
                culprits=(Culprit(rank=3, what="compute", slowdown=1.8),),
            ),
            **{"event": event, "id": "e1", "start_t": BEGUN + 4.0, "slowdown_now": 1.41, **tags},
        )

    def look(self, later_s: float = 1.0) -> LiveJob:
        state = LiveState("pretrain7")
        for entry in self.entries:
            state.observe(entry)
        return state.look(self.t + later_s)


@pytest.fixture
def script() -> Script:
    made = Script()
    made.started()
    return made


def shown(job: LiveJob, *, width: int = 100, max_rows: int | None = None) -> str:
    console = Console(width=width, highlight=False)
    with console.capture() as captured:
        console.print(live_view(job, max_rows=max_rows))
    return captured.get()


def test_before_there_is_anything_it_waits_and_then_learns(script: Script) -> None:
    assert LiveState("x").look(0.0).phase == "waiting"
    assert script.look().phase == "waiting"
    script.steps(5, healthy_s=None)
    job = script.look()
    assert (job.phase, job.healthy_s, job.step, job.iterations) == ("learning", None, 4, 5)
    assert job.workers[0].ratio is None
    assert "learning what is healthy" in shown(job)


def test_a_healthy_job(script: Script) -> None:
    script.steps(50)
    job = script.look()

    assert (job.phase, job.monitoring, job.slowdown, job.lost_s) == ("healthy", "healthy", 1.0, 0.0)
    assert (job.iteration_s, job.healthy_s, job.iterations) == (0.1, 0.1, 50)
    assert [(w.rank, w.node, w.state, w.ratio) for w in job.workers] == [
        (0, "gpu-0", "ok", 1.0),
        (1, "gpu-0", "ok", 1.0),
        (2, "gpu-1", "ok", 1.0),
        (3, "gpu-1", "ok", 1.0),
    ]


def test_from_suspicion_over_an_episode_to_relief(script: Script) -> None:
    script.steps(40)
    script.steps(5, 0.14)
    script.suspicion()
    job = script.look()
    assert (job.phase, job.slowdown, job.slow_since_step, job.confirmed) == (
        "suspected",
        1.4,
        40,
        False,
    )
    assert [w.state for w in job.workers] == ["ok", "ok", "ok", "suspected"]
    assert "suspected ×1.40" in shown(job)

    script.steps(10, 0.14)
    script.episode("onset", lost_s=0.6)
    job = script.look()
    assert (job.phase, job.slowdown, job.lost_s, job.episodes) == ("slow", 1.41, 0.6, 1)
    assert job.slow_since_t == BEGUN + 4.0
    assert [w.state for w in job.workers] == ["ok", "ok", "ok", "slow"]
    assert job.workers[3].suspicion == Culprit(rank=3, what="compute", slowdown=1.8)
    text = shown(job)
    assert "fail-slow ×1.41" in text
    assert "rank 3 (compute ×1.80)" in text
    assert "600 ms lost" in text

    script.steps(10, 0.14)
    script.episode("update", lost_s=1.0)
    assert script.look().lost_s == 1.0
    script.steps(20)
    script.episode("relief", lost_s=0.9)
    job = script.look()
    assert (job.phase, job.slowdown, job.lost_s, job.episodes) == ("healthy", 1.0, 0.9, 1)
    assert {w.state for w in job.workers} == {"ok"}

    # opened again: the same episode, one more stretch
    script.episode("onset", lost_s=0.5, start_step=80)
    job = script.look()
    assert (job.phase, job.lost_s, job.episodes) == ("slow", 1.4, 1)
    script.episode("abandoned", lost_s=0.7, start_step=80)
    assert (script.look().phase, script.look().lost_s) == ("healthy", 1.6)


def test_a_suspicion_that_is_cleared_is_gone(script: Script) -> None:
    script.steps(40)
    script.suspicion()
    script.suspicion("cleared")

    assert script.look().phase == "healthy"


def test_a_workload_change_is_no_fail_slow(script: Script) -> None:
    script.steps(40)
    entry = JournalEntry(
        t=script.t,
        kind="episode",
        record=Episode(
            start_step=30,
            end_step=None,
            start_s=3.0,
            end_s=None,
            duration_s=1.0,
            iteration_s=0.2,
            baseline_s=0.1,
            slowdown=2.0,
            peak_slowdown=2.0,
            lost_s=0.0,
            confidence=1.0,
            kind="workload_change",
        ),
    )
    script.entries.append(entry)

    assert (script.look().phase, script.look().episodes) == ("healthy", 0)


def test_a_silent_agent_blinds_its_workers_until_it_answers(script: Script) -> None:
    script.steps(40)
    script.health("agent", False, node="gpu-1", ranks=[2, 3], since_t=script.t - 3)
    job = script.look()
    assert job.monitoring == "blind"
    assert [w.state for w in job.workers] == ["ok", "ok", "blind", "blind"]
    assert job.troubles[0].since_t == script.t - 3
    assert "monitoring: blind" in shown(job)

    script.health("agent", True, node="gpu-1", ranks=[2, 3])
    assert (script.look().monitoring, script.look().workers[3].state) == ("healthy", "ok")


def test_a_worker_whose_records_stop_is_blind(script: Script) -> None:
    script.steps(40)
    script.health("worker", False, node="gpu-1", rank=3, since_t=script.t)
    assert script.look().workers[3].state == "blind"
    script.health("worker", True, node="gpu-1", rank=3)
    script.steps(5, silent=(2,))
    assert [w.state for w in script.look().workers] == ["ok", "ok", "blind", "ok"]


def test_lost_records_impair_and_do_not_blind(script: Script) -> None:
    script.steps(40)
    script.health("ring", False, node="gpu-1", rank=3)

    assert script.look().monitoring == "impaired"
    script.health("coverage", False, ranks=[7])
    job = script.look()
    assert job.monitoring == "blind"
    assert [trouble.what for trouble in job.troubles] == ["coverage", "ring"]


def test_workers_that_left_or_are_not_missed_are_gone(script: Script) -> None:
    script.steps(40)
    script.health("agent", True, node="gpu-1", ranks=[2, 3], left=True)
    assert [w.state for w in script.look().workers] == ["ok", "ok", "gone", "gone"]
    script.steps(1)  # restarted on the same node
    assert {w.state for w in script.look().workers} == {"ok"}
    for _ in range(10):
        script.steps(30, ranks=range(3))
    assert [w.state for w in script.look().workers] == ["ok", "ok", "ok", "gone"]


def test_a_job_that_hangs_is_stalled_and_well_monitored(script: Script) -> None:
    script.steps(40)
    script.health("job", False, since_t=script.t)
    job = script.look()

    assert (job.phase, job.monitoring) == ("stalled", "healthy")
    assert "no iteration ends" in shown(job)


def test_a_job_that_evaluates_is_between_iterations_until_one_ends(script: Script) -> None:
    script.steps(40)
    script.health("job", True, event="between", since_t=script.t)
    job = script.look()
    assert (job.phase, job.monitoring) == ("between", "healthy")
    assert "collectives go on" in shown(job)
    script.health("job", False, since_t=script.t)
    assert script.look().phase == "stalled"
    script.health("job", True)
    script.steps(1)
    assert script.look().phase == "healthy"


def test_that_all_compute_longer_alike_is_shown(script: Script) -> None:
    script.steps(40)
    script.write(Diagnosis(episode="e1", suspects=(), everyone=True, compute_alike=True))
    assert "perhaps the work changed" in shown(script.look())


def test_when_nobody_writes_any_more_nothing_is_claimed_of_now(script: Script) -> None:
    script.steps(40, 0.14)
    script.episode("onset", lost_s=1.0)
    assert script.look(29.0).phase == "slow"
    job = script.look(300.0)

    assert (job.phase, job.monitoring) == ("silent", "blind")
    assert {w.state for w in job.workers} == {"blind"}
    text = shown(job)
    assert "pretrain7 · silent" in text
    assert "last 140 ms" in text
    assert "last seen 5 min ago" in text


def test_an_ended_job_is_no_trouble_however_old(script: Script) -> None:
    script.steps(40)
    script.health("agent", False, node="gpu-1", ranks=[2, 3])
    script.health("controller", event="ended")
    job = script.look(1e6)

    assert (job.phase, job.troubles) == ("ended", ())
    assert {w.state for w in job.workers} == {"gone"}
    assert "monitoring" not in shown(job)


def test_another_start_of_the_job_begins_anew_and_a_resumed_controller_goes_on(
    script: Script,
) -> None:
    script.steps(40)
    script.episode("onset", lost_s=1.0)
    script.health("agent", False, node="gpu-1", ranks=[2, 3])
    script.health("controller", event="resumed")
    job = script.look()
    assert (job.phase, job.monitoring, job.iterations) == ("slow", "healthy", 40)
    script.started()
    assert script.look().phase == "waiting"
    script.step = 1000
    script.steps(3)
    job = script.look()
    assert (job.phase, job.iterations, job.episodes, job.lost_s) == ("healthy", 3, 0, 0.0)
    assert "step 1,002, 3 iterations watched" in shown(job)


@pytest.mark.parametrize(
    "line",
    [
        '{"t":1,"kind":"suspicion","event":"suspected","first_step":"x"}',
        '{"t":1,"kind":"suspicion","event":"suspected","culprits":[{"rank":1}]}',
        '{"t":1,"kind":"health","ranks":7,"left":true,"what":"agent"}',
        '{"t":1,"kind":"verdict","what":"host"}',
        '{"t":1,"kind":"step","rank":0,"step":"many"}',
        '{"t":1,"kind":"episode","start_step":null}',
    ],
)
def test_entries_of_another_version_harm_nothing(script: Script, line: str) -> None:
    script.steps(40)
    script.entries.append(decode_entry(line))

    assert script.look().phase == "healthy"


def test_the_document_has_the_keys_promised(script: Script) -> None:
    script.steps(40, 0.14)
    script.episode("onset", lost_s=1.0)
    script.health("agent", False, node="gpu-0", ranks=[0, 1])
    found = live_document(script.look(), folder="failslow-runs/pretrain7")

    json.dumps(found, allow_nan=False)
    assert list(found) == [
        "schema", "job", "dir", "t", "last_t", "phase", "step", "iterations", "iteration_s",
        "healthy_iteration_s", "slow", "episodes", "lost_s", "monitoring", "workers",
        "suspects", "verdict", "level", "decision", "outcome", "layout",
    ]  # fmt: skip
    assert found["schema"] == "failslow.status/1"
    assert found["slow"] == {
        "since_t": BEGUN + 4.0,
        "since_step": 40,
        "slowdown": 1.41,
        "confirmed": True,
        "culprits": [{"rank": 3, "what": "compute", "slowdown": 1.8}],
    }
    assert found["monitoring"]["state"] == "blind"
    assert found["monitoring"]["troubles"][0]["ranks"] == [0, 1]
    assert found["workers"][3] == {
        "rank": 3,
        "node": "gpu-1",
        "state": "slow",
        "step": 39,
        "last_t": script.t,
        "iteration_s": 0.14,
        "healthy_iteration_s": 0.1,
        "ratio": pytest.approx(1.4),
        "compute_s": 0.05,
        "suspicion": {"rank": 3, "what": "compute", "slowdown": 1.8},
        "suspect": None,
        "finding": None,
    }
    assert [found[key] for key in ("suspects", "verdict", "level", "decision")] == [
        [], None, "S1", None
    ]  # fmt: skip


def test_of_many_workers_the_worst_off_are_shown(script: Script) -> None:
    script.steps(40, ranks=range(1000))
    script.episode("onset", lost_s=1.0)
    script.health("worker", False, rank=777, node="gpu-388")
    job = script.look()
    rows = shown(job, max_rows=10).splitlines()

    table = [fields for fields in map(str.split, rows) if fields[1:2] and "gpu-" in fields[1]]
    assert [fields[0] for fields in table[:3]] == ["3", "777", "0"]
    assert len(table) == 10
    assert rows[-1].strip() == "and 990 workers more, all ok"
    assert len(shown(job).splitlines()) > 1000


def test_it_fits_a_terminal_of_80_columns(script: Script) -> None:
    script.steps(40, 0.14)
    script.episode("onset", lost_s=1.0)

    assert all(len(row.rstrip()) <= 80 for row in shown(script.look(), width=80).splitlines())


def test_waiting_says_what_to_do() -> None:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(waiting_view("failslow-runs/"))

    assert "failslow doctor" in captured.get()


def test_a_thinned_journal_tells_the_same(script: Script, tmp_path: Path) -> None:
    for _ in range(20):
        script.steps(20)
        script.health("controller", event="alive")
    script.episode("onset", lost_s=1.0)
    script.steps(20, 0.14)
    writer = JournalWriter(tmp_path / "journal.jsonl")
    for entry in script.entries:
        kind = None if isinstance(entry.record, (StepSample, Episode)) else entry.kind
        writer.append(entry.record, t=entry.t, kind=kind, **entry.tags)
    writer.close()
    looks = []
    for limit in (None, 4000):
        state = LiveState("pretrain7")
        for entry in read_journal(writer.path, all_steps_bytes=limit):
            state.observe(entry)
        looks.append(state.look(script.t))

    assert looks[0] == looks[1]
    assert looks[0].iterations == 420
