"""When a pause is refused, what it costs, and what its parts answer."""

from __future__ import annotations

from typing import Any

import pytest
from tests.localize.pause_model import CONFIG, KEY, SCRIPT, World

from failslow.config import LocalizeConfig
from failslow.localize.pause import PauseLead
from failslow.localize.pause_node import GroupCount, PauseNode, Post, Tell, WorkerView
from failslow.localize.pause_worker import PauseWorker


def rounds(world: World, count: int) -> None:
    for _ in range(count):
        for index in range(len(world.ranks)):
            for _ in range(3):
                world.step(index)
        for index in range(len(world.nodes)):
            world.agent(index)
        world.controller()
        world.wait(0.05)


def lead_of(world: World) -> PauseLead:
    assert world.lead is not None
    return world.lead


def refusal(lead: PauseLead, now_s: float = 1000.0, **more: Any) -> str:
    assert lead.begin(SCRIPT, range(4), now_s, **more) == []
    assert lead.result is not None
    assert not lead.result.ok
    assert not lead.active
    return lead.result.reason


def test_a_whole_pause() -> None:
    world = World(3, 2)
    rounds(world, 8)
    world.begin()
    rounds(world, 40)
    result = lead_of(world).result
    assert result is not None
    assert result.ok
    assert result.reason == ""
    assert result.results == {0: [0], 1: [1], 2: [2]}
    assert result.missing == ()
    assert 0.1 <= result.pause_s < 0.5
    assert result.waited_s < result.pause_s
    assert world.committed == {result.id: 1}


def test_training_is_never_paused_in_mode_observe() -> None:
    assert "mode observe" in refusal(PauseLead())
    assert "mode observe" in refusal(PauseLead(mode="observe"), reference=True)


def test_pauses_are_budgeted() -> None:
    lead = PauseLead(LocalizeConfig(pauses_per_hour=2, max_pause_share=0.002), mode="advise")
    lead.remember(900.0, 3.0)
    lead.remember(950.0, 3.5)
    assert "2 pauses in the last hour" in refusal(lead)
    assert lead.begin(SCRIPT, range(4), 4540.0), "the first one was more than an hour ago"
    lead = PauseLead(LocalizeConfig(max_pause_share=0.002), mode="advise")
    lead.remember(900.0, 3.0)
    lead.remember(950.0, 3.5)
    assert "pauses took 6.5 s of the last hour" in refusal(lead)
    assert lead.begin(SCRIPT, range(4), 1000.0, reference=True), "the reference is always allowed"
    with pytest.raises(RuntimeError, match="is on"):
        lead.begin(SCRIPT, range(4), 1001.0)


def test_a_script_longer_than_a_pause_may_be_is_refused() -> None:
    lead = PauseLead(LocalizeConfig(pause_limit_s=2.0), mode="auto")
    assert lead.begin([{"do": "gemm", "limit_s": 9.0, "expect_s": 3.0}], range(4), 1.0) == []
    assert lead.result is not None
    assert "about 3.0 s" in lead.result.reason


def answer(count: int, groups: list[list[Any]]) -> dict[int, dict[str, Any]]:
    return {rank: {"say": "groups", "groups": groups, "speaks": True} for rank in range(count)}


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        (answer(4, []), "no collective spans all 4 workers"),
        (answer(2, [[KEY, 10, 3, 0.1]]) | {2: answer(1, [])[0], 3: answer(1, [])[0]}, "in use by"),
        (answer(4, [[KEY, 10, 3, 0.1]]) | {3: {"say": "groups", "groups": [], "speaks": False}},
         "rank 3 cannot be spoken to"),
        (answer(4, [["no", "sense"]]), "reports nonsense"),
    ],
)  # fmt: skip
def test_why_there_is_no_boundary(answers: dict[int, dict[str, Any]], reason: str) -> None:
    lead = PauseLead(mode="advise")
    (survey,) = lead.begin(SCRIPT, range(4), 1000.0)
    for rank, body in answers.items():
        lead.report(rank, {**body, "id": survey["id"]}, 1000.1)
    assert lead.result is not None
    assert reason in lead.result.reason


def test_agents_that_do_not_answer_are_named() -> None:
    lead = PauseLead(mode="advise")
    (survey,) = lead.begin(SCRIPT, range(4), 1000.0)
    lead.report(1, {**answer(1, [[KEY, 1, 1, 0.1]])[0], "id": survey["id"]}, 1000.1)
    (release,) = lead.tick(1005.0)
    assert release == {"do": "release", "id": survey["id"]}
    assert lead.result is not None
    assert lead.result.reason == "ranks 0, 2, 3 did not answer"


@pytest.mark.parametrize(("gap_s", "limit_s"), [(0.1, 30.0), (40.0, 240.0), (5000.0, 600.0)])
def test_workers_of_long_iterations_have_the_time_they_take(gap_s: float, limit_s: float) -> None:
    lead = PauseLead(mode="advise")
    (survey,) = lead.begin(SCRIPT, range(4), 1000.0)
    for rank, body in answer(4, [[KEY, 10, 3, gap_s]]).items():
        arm = lead.report(rank, {**body, "id": survey["id"]}, 1000.0)
    assert arm[0]["for_s"] == pytest.approx(limit_s + arm[0]["hold_s"])
    assert lead.tick(1000.0 + limit_s - 1.0) == []
    assert [order["do"] for order in lead.tick(1000.0 + limit_s + 1.0)] == ["release"]
    assert lead.result is not None
    assert "did not come to the boundary within" in lead.result.reason


def test_who_is_late_is_tried_again_farther_ahead() -> None:
    lead = PauseLead(CONFIG, mode="advise")
    ids, leads_s = [], []
    (order,) = lead.begin(SCRIPT, range(4), 1000.0)
    for attempt in range(CONFIG.pause_attempts):
        ids.append(order["id"])
        leads_s.append(order["lead_s"])
        for rank, body in answer(4, [[KEY, 10, 3, 0.1]]).items():
            arm = lead.report(rank, {**body, "id": order["id"]}, 1000.0 + attempt)
        assert arm[0]["at"] == 14
        out = lead.report(2, {"say": "late", "id": order["id"], "count": 20}, 1000.5 + attempt)
        assert out[0] == {"do": "release", "id": order["id"]}
        order = out[-1]
    assert ids == sorted(set(ids))
    assert leads_s == [0.75, 1.5, 3.0]
    assert lead.result is not None
    assert "past the boundary 3 times" in lead.result.reason


def test_a_group_that_is_made_anew_while_a_worker_is_armed_makes_it_late() -> None:
    node = PauseNode()

    def turn(calls: int, now_s: float) -> list[Any]:
        counts = (GroupCount(0, KEY, calls),)
        views = [WorkerView(rank=5, alive=True, speaks=True, counts=counts)]
        return [a.body for a in node.turn(views, now_s) if isinstance(a, Tell)]

    turn(100, 1.0)
    arm = {"do": "arm", "id": 7, "group": KEY, "at": 110, "hold_s": 1.0, "script": [],
           "limit_s": 1.0, "for_s": 9.0}  # fmt: skip
    node.order(arm, 1.1)
    assert turn(101, 1.1) == []
    assert [body["say"] for body in turn(101, 1.1)] == ["armed"]
    assert turn(105, 1.2) == []
    assert [body["say"] for body in turn(2, 1.3)] == ["late"]


def test_no_room_in_a_mailbox_calls_the_pause_off() -> None:
    node = PauseNode()
    view = WorkerView(rank=5, alive=True, speaks=True, counts=(GroupCount(0, KEY, 1),))
    node.turn([view], 1.0)
    node.order({"do": "arm", "id": 7, "group": KEY, "at": 9, "hold_s": 1.0, "script": [],
                "limit_s": 1.0, "for_s": 9.0}, 1.0)  # fmt: skip
    (letter,) = [a.letter for a in node.turn([view], 1.0) if isinstance(a, Post)]
    node.refused(5, letter)
    assert [a.body["say"] for a in node.turn([view], 1.1) if isinstance(a, Tell)] == ["refused"]
    assert not node.busy


@pytest.mark.parametrize(
    "letter",
    [{}, {"do": "arm"}, {"do": "arm", "id": "x"}, {"do": "arm", "id": 3, "group": None, "at": 1},
     {"do": "commit", "id": 3}, {"do": "release", "id": 3}, {"do": 5, "id": 3}],
)  # fmt: skip
def test_letters_without_sense_change_nothing(letter: dict[str, Any]) -> None:
    worker = PauseWorker()
    assert worker.letter(letter, 1.0) == []
    assert worker.state == "idle"
    assert worker.arrive(0, 1, 1.0, 1.0) == []


ARM = {"do": "arm", "id": 3, "group": 0, "at": 5, "hold_s": 2.0, "for_s": 9.0, "script": [],
       "limit_s": 1.0}  # fmt: skip


def test_a_worker_is_not_armed_for_ever() -> None:
    worker = PauseWorker()
    worker.letter(ARM, 0.0)
    assert worker.arrive(1, 1, 9.0, 9.0) == []
    (left,) = worker.arrive(1, 2, 9.1, 9.1)
    assert left["say"] == "left"
    assert worker.state == "idle"
    assert worker.arrive(0, 5, 9.2, 9.2) == []


def test_a_commit_of_an_earlier_start_of_the_job_disarms() -> None:
    worker = PauseWorker()
    worker.letter(ARM, 0.0)
    (left,) = worker.letter({"do": "commit", "id": 3}, 0.1)
    assert "before it was ready" in left["why"]
    assert worker.arrive(0, 5, 0.2, 0.2) == []
    assert worker.letter(ARM, 0.3) == []
    assert worker.state == "idle", "no pause is taken up twice"


def test_no_order_makes_a_worker_wait_for_more_than_a_minute() -> None:
    worker = PauseWorker()
    worker.letter({**ARM, "hold_s": 1e6}, 0.0)
    (ready,) = worker.arrive(0, 5, 0.0, 0.0)
    assert ready["say"] == "ready"
    assert worker.look(59.9, 59.9)[0] == "hold"
    step, letters = worker.look(60.1, 60.1)
    assert step == "go"
    assert letters[0]["say"] == "left"
