"""The pipeline on scripted jobs: what the journal says of what happened."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from itertools import pairwise
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.runtime.scripted import EPOCH, Scripted

from failslow.config import RuntimeConfig
from failslow.pipeline import AgentBeat, BusReport, Say, Tick, WorkerSamples, WorkerState, Write
from failslow.pipeline.health import HealthBook
from failslow.pipeline.past import read_past
from failslow.records import Episode, StepSample


def test_a_healthy_job_gets_one_step_an_iteration_and_no_alarm() -> None:
    job = Scripted()
    job.iterate(200, 0.1)
    steps = job.job_steps()
    assert [s.step for s in steps] == list(range(200))
    assert median(s.duration_s for s in steps) == pytest.approx(0.1, rel=0.01)
    assert job.events() == []
    assert [h["ok"] for h in job.health("agent")] == [True, True]
    assert all(later.end_s >= sooner.end_s for sooner, later in pairwise(steps))


def test_a_slow_stretch_is_suspected_confirmed_and_relieved_under_one_id() -> None:
    job = Scripted()
    job.iterate(100, 0.1)
    job.iterate(60, 0.1, slow=1.4, culprit=2)
    job.iterate(60, 0.1)
    events = job.events()
    assert [event for event, _ in events] == ["suspected", "onset", "relief"]
    assert len({id for _, id in events}) == 1
    suspicion = job.said("suspicion")[0].record
    assert suspicion["first_step"] == 100
    assert suspicion["step"] <= 107
    onset, relief = (entry.record for entry in job.said("episode"))
    assert isinstance(relief, Episode)
    assert (relief.start_step, relief.end_step) == (100, 160)
    assert relief.slowdown == pytest.approx(1.4, rel=0.02)
    assert relief.lost_s == pytest.approx(60 * 0.04, rel=0.1)
    assert relief.baseline_s == pytest.approx(0.1, rel=0.02)
    assert [(c.rank, c.what) for c in onset.culprits] == [(2, "compute")]
    assert job.pipeline.episode is None
    texts = [i.text for i in job.out if isinstance(i, Say)]
    assert any("rank 2 compute" in text for text in texts)


def test_a_deeper_level_stays_in_the_episode() -> None:
    job = Scripted()
    job.iterate(100, 0.1)
    job.iterate(60, 0.1, slow=1.3)
    job.iterate(60, 0.1, slow=1.9)
    job.iterate(60, 0.1)
    events = [event for event, _ in job.events() if event != "update"]
    assert events == ["suspected", "onset", "level", "relief"]
    relief = job.said("episode")[-1].record
    assert [round(level.slowdown, 1) for level in relief.levels] == [1.3, 1.9]
    assert relief.peak_slowdown == pytest.approx(1.9, rel=0.05)


def test_an_ongoing_episode_is_updated_with_the_time_lost_so_far() -> None:
    job = Scripted()
    job.iterate(100, 0.1)
    job.iterate(300, 0.1, slow=1.5)
    updates = [e for e in job.said("episode") if e.tags["event"] == "update"]
    lost_s = [e.record.lost_s for e in updates]
    assert len(lost_s) >= 3
    assert lost_s == sorted(lost_s)
    job.out += job.pipeline.finish(job.now_s)
    assert job.said("episode")[-1].record.lost_s == pytest.approx(300 * 0.05, rel=0.1)
    assert job.health("controller")[-1]["event"] == "ended"


def test_soon_after_relief_the_same_episode_goes_on() -> None:
    job = Scripted()
    job.iterate(100, 0.1)
    job.iterate(60, 0.1, slow=1.4)
    job.iterate(60, 0.1)
    job.iterate(60, 0.1, slow=1.4)
    onsets = [(event, id) for event, id in job.events() if event == "onset"]
    assert len(onsets) == 2
    assert len(set(onsets)) == 1
    assert "flapping" in job.said("episode")[-1].record.note


def test_long_after_relief_an_episode_is_another_one() -> None:
    job = Scripted()
    job.iterate(100, 0.1)
    job.iterate(60, 0.1, slow=1.4)
    job.iterate(400, 0.1)
    job.iterate(60, 0.1, slow=1.4)
    onsets = {id for event, id in job.events() if event == "onset"}
    assert len(onsets) == 2


def test_evaluations_and_checkpoints_do_not_alarm() -> None:
    job = Scripted()
    job.iterate(400, 0.1, foreign_every=7)
    assert job.events() == []
    assert len(job.job_steps()) == 400


def test_a_rank_that_stops_reporting_blocks_nobody_and_is_named() -> None:
    job = Scripted(runtime=RuntimeConfig(blind_after_s=5.0))
    job.iterate(50, 0.1)
    job.silent = {3}
    job.iterate(150, 0.1)
    steps = job.job_steps()
    assert steps[-1].step >= 198
    assert [e.tags["workers"] for e in job.said("step") if e.rank is None][-1] == 3
    (stopped,) = job.health("worker")
    assert (stopped["rank"], stopped["ok"]) == (3, False)
    assert "rank 3's records stopped" in stopped["message"]
    job.silent = set()
    job.iterate(20, 0.1)
    assert [h["ok"] for h in job.health("worker")] == [False, True]
    assert job.events() == []


def test_ranks_that_never_report_are_listed_once() -> None:
    job = Scripted(ranks=4)
    for rank in (2, 3):
        job.dead_agents.add(job.node(rank))
    job.iterate(10, 0.1)
    job.iterate(700, 0.1)
    (coverage,) = job.health("coverage")
    assert coverage["ranks"] == [2, 3]
    assert "FAILSLOW=1" in coverage["message"]


def test_without_a_token_other_nodes_ranks_are_missed_with_the_remedy() -> None:
    job = Scripted(ranks=2, alone=True)
    job.beat(world=8)
    job.iterate(150, 0.1)
    coverage = job.health("coverage")[0]
    assert coverage["ranks"] == [2, 3, 4, 5, 6, 7]
    assert "FAILSLOW_TOKEN" in coverage["message"]


def test_a_dead_agent_makes_its_node_blind_and_the_job_goes_on() -> None:
    job = Scripted(runtime=RuntimeConfig(blind_after_s=4.0))
    job.iterate(60, 0.1)
    job.dead_agents = {"node1"}
    job.iterate(100, 0.1)
    blind = job.health("agent")[-1]
    assert (blind["ok"], blind["node"], blind["ranks"]) == (False, "node1", [2, 3])
    assert "monitoring of node node1 is blind since" in blind["message"]
    assert blind["since_t"] == pytest.approx(EPOCH + 6.0, abs=2.0)
    assert job.job_steps()[-1].step >= 158
    # the next agent reads the ring from its oldest record on, in a session of its own
    job.dead_agents, job.session["node1"] = set(), 2
    job.iterate(60, 0.1)
    back = job.health("agent")[-1]
    assert (back["ok"], back["node"]) == (True, "node1")
    assert [e.tags["workers"] for e in job.said("step") if e.rank is None][-1] == 4
    assert job.events() == []


def test_nodes_of_one_name_are_both_watched_and_that_is_said_once() -> None:
    """They took turns to be "restarted" each second, and half of the workers was gone each time."""
    health = HealthBook(blind_after_s=4.0, stall_after_s=60.0)

    def beat(session: int, *ranks: int, now_s: float, alive: bool = True) -> list[str]:
        workers = tuple(
            WorkerState(rank=rank, worker=f"{rank}-1", world_size=4, alive=alive) for rank in ranks
        )
        event = AgentBeat(node="localhost", session=session, workers=workers)
        return [said.text for said in health.beat(event, now_s) if isinstance(said, Say)]

    said: list[str] = []
    for second in range(20):
        said += beat(1, 0, 1, now_s=EPOCH + second)
        said += beat(2, *((2, 3) if second else ()), now_s=EPOCH + second + 0.5)
        if second:
            assert health.living == {0, 1, 2, 3}
    assert said == [
        "two nodes are called localhost, that of ranks 0-1 and that of ranks 2-3: give each a name "
        "of its own by FAILSLOW_NODE"
    ]
    # one of them has a new agent, which does not know its workers at once
    again = beat(3, now_s=EPOCH + 20) + beat(3, 2, 3, now_s=EPOCH + 21)
    assert again == ["the agent of node localhost (2) was restarted: ranks 2-3 watched again"]
    # its workers end, and others come in their place
    beat(3, 2, 3, now_s=EPOCH + 22, alive=False)
    assert health.living == {0, 1}
    beat(4, 5, 6, now_s=EPOCH + 23)
    assert health.living == {0, 1, 5, 6}
    assert set(health.agents) == {"localhost", "localhost (2)"}


def test_a_restarted_agent_that_lost_count_finds_its_place_again() -> None:
    job = Scripted()
    job.iterate(80, 0.1)
    job.session["node1"] = 2
    for rank in (2, 3):
        job.step[rank], job.counted[rank] = -1, False
    job.beat()
    job.iterate(80, 0.1)
    assert [s.step for s in job.job_steps()] == list(range(160))
    assert {e.tags["workers"] for e in job.said("step") if e.rank is None} == {4}


def test_a_newcomer_that_lost_count_is_put_where_its_clock_says() -> None:
    job = Scripted(skew_s=0.0)
    job.dead_agents = {"node1"}
    job.iterate(80, 0.1)
    job.dead_agents = set()
    for rank in (2, 3):
        job.step[rank], job.counted[rank] = -1, False
    job.beat()
    job.iterate(80, 0.1)
    assert [s.step for s in job.job_steps()] == list(range(160))
    assert [e.tags["workers"] for e in job.said("step") if e.rank is None][-1] == 4


def test_restarted_workers_go_on_counting_and_keep_the_healthy_level() -> None:
    job = Scripted()
    job.iterate(100, 0.1)
    for rank in job.ranks:
        job.process[rank], job.step[rank] = f"{2000 + rank}-99", -1
    job.now_s += 30.0
    job.beat()
    job.iterate(100, 0.1, slow=1.5)
    steps = job.job_steps()
    assert [s.step for s in steps] == list(range(200))
    assert [s.run for s in steps] == [0] * 100 + [1] * 100
    assert "onset" in [event for event, _ in job.events()]


def test_another_program_is_a_new_start_for_the_detector() -> None:
    job = Scripted()
    job.iterate(100, 0.1)
    job.iterate(60, 0.1, slow=1.5)
    job.run = 1
    job.iterate(100, 0.3)
    events = [event for event, _ in job.events() if event != "update"]
    assert events == ["suspected", "onset", "abandoned"]
    assert "the program changed" in job.said("episode")[-1].record.note
    assert job.pipeline.healthy_iteration_s == pytest.approx(0.3, rel=0.02)


def test_a_hanging_job_is_said_to_hang() -> None:
    job = Scripted(runtime=RuntimeConfig(stall_after_s=20.0))
    job.iterate(50, 0.1)
    job.wait(30.0)
    (hang,) = job.health("job")
    assert not hang["ok"]
    assert "no iteration has ended since" in hang["message"]
    job.iterate(5, 0.1)
    assert [h["ok"] for h in job.health("job")] == [False, True]


def test_a_job_that_evaluates_for_long_does_not_hang_until_its_collectives_end_too() -> None:
    job = Scripted(runtime=RuntimeConfig(stall_after_s=20.0))
    job.iterate(50, 0.1)
    job.wait(60.0, calls=30)
    (told,) = job.health("job")
    assert told["ok"]
    assert "no training iteration since" in told["message"]
    assert "collectives go on" in told["message"]
    assert job.pipeline.health.troubles == []
    job.wait(19.0)
    assert len(job.health("job")) == 1
    job.wait(5.0)
    hang = job.health("job")[-1]
    assert not hang["ok"]
    assert "the job hangs" in hang["message"]
    assert "no collective was made since" in hang["message"]
    job.iterate(5, 0.1)
    assert job.health("job")[-1]["ok"]
    job.wait(30.0, calls=1)
    assert job.health("job")[-1]["event"] == "between"


def test_a_bus_that_is_down_is_blamed_and_not_the_agents() -> None:
    job = Scripted(runtime=RuntimeConfig(blind_after_s=4.0))
    job.iterate(50, 0.1)
    job.dead_agents = {"node0", "node1"}
    for second in range(10):
        job.now_s += 1.0
        job.give(BusReport(outage_s=float(second)))
        job.give(Tick())
    assert "the message bus does not answer" in job.health("bus")[0]["message"]
    assert [h["ok"] for h in job.health("agent")] == [True, True]
    assert job.pipeline.health.watching == []


def test_lost_records_and_foreign_tokens_are_said_with_a_remedy() -> None:
    job = Scripted()
    state = WorkerState(rank=0, worker="1000-77", world_size=4, alive=True, lost_records=512)
    job.give(AgentBeat(node="node0", session=1, workers=(state,)))
    job.give(BusReport(refused=3))
    assert "FAILSLOW_CAPTURE_RECORDS" in job.health("ring")[0]["message"]
    assert "FAILSLOW_TOKEN" in job.health("token")[0]["message"]
    job.wait(40.0)
    assert job.health("token")[-1]["ok"]


def test_samples_from_before_the_job_began_are_left_out() -> None:
    job = Scripted()
    old = StepSample(step=0, duration_s=0.1, end_s=EPOCH - 100.0)
    job.give(job.event(0, [old]))
    job.iterate(3, 0.1)
    assert [s.step for s in job.job_steps()] == [0, 1, 2]


def test_workers_summarise_their_iterations_once_a_second() -> None:
    job = Scripted()
    job.iterate(100, 0.1)
    mine = [e for e in job.said("step") if e.rank == 1]
    assert 8 <= len(mine) <= 13
    assert sum(e.record.iterations for e in mine) >= 90
    assert mine[-1].record.duration_s == pytest.approx(0.1, rel=0.02)
    assert mine[-1].tags["healthy_s"] == pytest.approx(0.1, rel=0.02)
    assert {e.tags["state"] for e in mine} == {"ok"}


def _feed(job: Scripted, events: list[WorkerSamples]) -> list[tuple[int, float]]:
    for event in events:
        job.give(event)
    job.now_s += 60.0
    job.give(Tick())
    return [(s.step, s.duration_s) for s in job.job_steps()]


def _steps(job: Scripted, count: int) -> list[WorkerSamples]:
    events = []
    for _ in range(count):
        job.now_s += 0.1
        events += [job.sample(rank, 0.1 + 0.01 * rank) for rank in job.ranks]
    return events


@given(seed=st.integers(0, 2**32), doubled=st.sets(st.integers(0, 79)))
def test_order_of_ranks_and_duplicates_change_nothing(seed: int, doubled: set[int]) -> None:
    plain = Scripted()
    expected = _feed(plain, _steps(plain, 20))
    job = Scripted()
    events = _steps(job, 20)
    events = [e for i, e in enumerate(events) for _ in range(1 + (i in doubled))]
    # each rank's own samples stay in order, as the transport keeps them
    queues = {rank: [e for e in events if e.rank == rank] for rank in job.ranks}
    shuffle = random.Random(seed)
    mixed = []
    while any(queues.values()):
        rank = shuffle.choice([rank for rank, queue in queues.items() if queue])
        mixed.append(queues[rank].pop(0))
    assert _feed(job, mixed) == expected
    assert job.pipeline.series.duplicates == len(doubled)


@given(dropped=st.sets(st.integers(0, 79), max_size=30))
def test_missing_samples_cost_at_most_their_own_iteration(dropped: set[int]) -> None:
    job = Scripted()
    events = [e for i, e in enumerate(_steps(job, 20)) if i not in dropped]
    kept = {e.samples[0].step for e in events}
    assert [step for step, _ in _feed(job, events)] == sorted(kept)


def test_a_sample_out_of_order_still_counts_while_its_iteration_is_open() -> None:
    job = Scripted(ranks=2)
    events = _steps(job, 3)
    first, second, third = (e for e in events if e.rank == 1)
    for event in (*(e for e in events if e.rank == 0), third, first, second, first):
        job.give(event)
    job.now_s += 60.0
    job.give(Tick())
    assert len(job.job_steps()) == 3
    assert job.pipeline.series.duplicates == 1


def test_the_same_events_give_the_same_instructions() -> None:
    def play() -> list[object]:
        job = Scripted()
        job.iterate(100, 0.1)
        job.iterate(50, 0.1, slow=1.5, culprit=1)
        return list(job.out)

    assert play() == play()


def test_a_restarted_controller_goes_on_with_the_episode_it_finds_in_the_journal() -> None:
    job = Scripted()
    job.iterate(100, 0.1)
    job.iterate(60, 0.1, slow=1.5, culprit=2)
    (onset,) = (id for event, id in job.events() if event == "onset")
    journal = job.journal
    job.begin("launch-1", journal)
    resumed = job.health("controller")[-1]
    assert resumed["event"] == "resumed"
    assert "was blind for" in resumed["message"]
    job.beat()
    job.iterate(30, 0.1, slow=1.5)
    job.iterate(60, 0.1)
    events = job.events()
    assert events[-1] == ("relief", onset)
    assert [event for event, _ in events].count("onset") == 1
    assert [s.step for s in job.job_steps()] == list(range(250))


def test_workers_that_torchrun_starts_again_go_on_in_the_same_journal() -> None:
    job = Scripted()
    job.iterate(100, 0.1)
    job.beat(leaving=True)
    job.out += job.pipeline.finish(job.now_s)
    job.now_s += 12.0
    job.begin("launch-1", job.journal)
    assert "started again after 1" in job.health("controller")[-1]["message"]
    for rank in job.ranks:
        job.process[rank], job.step[rank] = f"{2000 + rank}-99", -1
    job.beat()
    job.iterate(60, 0.1, slow=1.5)
    assert [s.step for s in job.job_steps()] == list(range(160))
    assert "onset" in [event for event, _ in job.events()]


def test_a_journal_of_another_launch_is_not_gone_on_with() -> None:
    job = Scripted()
    job.iterate(100, 0.1)
    job.iterate(60, 0.1, slow=1.5)
    journal = job.journal
    job.begin("launch-2", journal)
    assert job.health("controller")[-1]["event"] == "started"
    assert job.pipeline.episode is None


def test_a_long_journal_is_gone_on_with_from_before_its_episode() -> None:
    job = Scripted()
    job.iterate(50, 0.1)
    job.iterate(60, 0.1, slow=1.5)
    journal = job.journal
    first = next(entry for entry in journal if entry.kind == "step" and entry.rank is None)
    earlier = [replace(first, t=EPOCH - 1e5 + i) for i in range(40_000)]
    past = read_past([journal[0], *earlier, *journal], "launch-1")
    assert past is not None
    steps = past.telling_steps()
    assert len(steps) < 5000
    assert past.episode is not None
    assert steps[0].t < past.episode.tags["start_t"]
    past.episode = None
    assert len(past.telling_steps()) == 4096


def test_an_episode_whose_beginning_is_lost_is_abandoned() -> None:
    job = Scripted()
    job.iterate(100, 0.1)
    job.iterate(100, 0.1, slow=1.5)
    # only the slow end of the journal is left
    journal = [e for e in job.journal if e.kind == "health" or e.t > job.now_s - 10.0]
    id = job.pipeline.episode
    job.begin("launch-1", journal)
    assert job.events()[-1] == ("abandoned", id)
    assert job.pipeline.episode is None


def test_a_thousand_workers_a_step_take_less_than_fifty_milliseconds() -> None:
    job = Scripted(ranks=1024)
    job.iterate(3, 0.5)
    steps = [[job.sample(rank, 0.5) for rank in job.ranks] for _ in range(10)]
    took_s = []
    for events in steps:
        job.now_s += 0.5
        began_s = time.thread_time()
        for event in events:
            job.pipeline.handle(event, job.now_s)
        job.pipeline.handle(Tick(), job.now_s)
        took_s.append(time.thread_time() - began_s)
    assert min(took_s) < 0.050


def test_instructions_are_journal_lines_that_read_back() -> None:
    job = Scripted()
    job.iterate(100, 0.1)
    job.iterate(60, 0.1, slow=1.4)
    writes = [i for i in job.out if isinstance(i, Write)]
    assert len(job.journal) == len(writes)
    episode = next(e for e in job.journal if e.kind == "episode")
    assert isinstance(episode.record, Episode)
    assert replace(episode.record) == episode.record


def test_a_batch_that_grows_is_no_fail_slow_where_the_trainer_tells_the_work() -> None:
    events = {}
    for tells in (True, False):
        job = Scripted()
        job.work = 64.0 if tells else 1e6
        job.iterate(100, 0.1)
        job.work *= 2.0 if tells else 1.0
        job.iterate(120, 0.19)
        events[tells] = [event for event, _ in job.events() if event != "update"]
    assert events == {True: [], False: ["suspected", "onset"]}


def test_a_fail_slow_under_a_larger_batch_is_found_all_the_same() -> None:
    job = Scripted()
    job.iterate(100, 0.1)
    job.work *= 2.0
    job.iterate(100, 0.19)
    job.iterate(80, 0.19, slow=1.4)
    assert [event for event, _ in job.events() if event != "update"] == ["suspected", "onset"]
    job.out += job.pipeline.finish(job.now_s)
    episode = job.said("episode")[-1].record
    assert episode.slowdown == pytest.approx(1.4, rel=0.03)
    assert episode.baseline_s == pytest.approx(0.19, rel=0.03)
    assert episode.iteration_s == pytest.approx(1.4 * 0.19, rel=0.03)
    assert episode.lost_s == pytest.approx(80 * 0.4 * 0.19, rel=0.1)
    assert job.pipeline.healthy_iteration_s == pytest.approx(0.19, rel=0.03)
