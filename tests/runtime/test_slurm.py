"""What Slurm would be told of a host left out, and what becomes of it when Slurm says no."""

from __future__ import annotations

import doctest
import os
import signal
from pathlib import Path
from typing import Any, cast

import pytest

from failslow.errors import ConfigError, PlanError
from failslow.journal import JournalWriter, read_journal
from failslow.pipeline import Write
from failslow.records import Decision, Plan
from failslow.runtime import slurm
from failslow.runtime.controller import Controller
from failslow.runtime.slurm import Allocation, Slurm, advised, expand, leave_out, read_allocation

# recorded from a batch script, and from the second task of its step, on Slurm 22.05
BATCH = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOBID": "4711",
    "SLURM_JOB_NODELIST": "node[1-2,4]",
    "SLURM_NODELIST": "node[1-2,4]",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_RESTART_COUNT": "1",
    "SLURMD_NODENAME": "node1",
}
STEP = BATCH | {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURMD_NODENAME": "node2"}
DRAIN = (
    *("scontrol", "update", "NodeName=node2", "State=DRAIN"),
    "Reason=failslow, job 4711: device rank 1 x1.84",
)
REQUEUE = ("scontrol", "requeue", "4711")
EXCLUDE = ("scontrol", "update", "JobId=4711", "ExcNodeList=node2")
WHY = "device rank 1 x1.84"


def allocation(**changed: Any) -> Allocation:
    return Allocation(**{"job": "4711", "nodes": ("node1", "node2", "node4"), **changed})


def test_the_documented_example_is_true() -> None:
    assert doctest.testmod(slurm).failed == 0


def test_a_job_is_known_by_what_slurm_gives_its_processes() -> None:
    assert read_allocation(BATCH) == allocation(restarts=1, leads=True)
    assert read_allocation(STEP) == allocation(restarts=1, leads=False)
    assert read_allocation(STEP | {"SLURM_PROCID": "0"}) == allocation(restarts=1, leads=True)
    assert read_allocation({"SLURM_JOB_ID": "4711"}) is None
    assert read_allocation({}) is None


@pytest.mark.parametrize(
    "text", ["", "gpu-[1-", "gpu-1-3]", "gpu-[3-1]", "gpu-[a-b]", "gpu-[1-999999]", "[", "a b"]
)
def test_a_list_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no list of nodes"):
        expand(text)


def test_a_node_is_drained_with_its_reason_and_only_then_is_the_job_requeued() -> None:
    assert leave_out(allocation(), ["node2"], WHY, requeue=True) == (DRAIN, REQUEUE, EXCLUDE)
    assert leave_out(allocation(), ["node2"], WHY, requeue=False) == (DRAIN,)
    (two,) = leave_out(allocation(), ["node4", "node1", "node4"], "why\nnot", requeue=False)
    assert two[2] == "NodeName=node4,node1"
    assert two[-1] == "Reason=failslow, job 4711: why not"
    (long,) = leave_out(allocation(), ["node2"], "x" * 1000, requeue=False)
    assert len(long[-1]) < 220


def test_only_nodes_of_the_job_are_ever_drained() -> None:
    for node in ("login1", "node3", "node", "node2,login1", "ALL"):
        with pytest.raises(PlanError, match="none of the 3 nodes of Slurm job 4711"):
            leave_out(allocation(), [node], WHY, requeue=True)
    full = allocation(nodes=("gpu-1.cluster", "gpu-2.cluster"))
    (drain,) = leave_out(full, ["gpu-2"], WHY, requeue=False)
    assert drain[2] == "NodeName=gpu-2.cluster"
    with pytest.raises(PlanError, match="name one"):
        leave_out(allocation(), [], WHY, requeue=True)


def test_the_last_node_is_only_left_by_a_requeue() -> None:
    alone = allocation(nodes=("node2",))
    with pytest.raises(PlanError, match="no node but node2 to go on with; set slurm to requeue"):
        leave_out(alone, ["node2"], WHY, requeue=False)
    assert REQUEUE in leave_out(alone, ["node2"], WHY, requeue=True)


class Cluster:
    """Answers commands as a Slurm does that refuses some."""

    def __init__(self, *failing: tuple[str, ...], error: str = "Invalid user id") -> None:
        self.failing, self.error = failing, error
        self.asked: list[tuple[str, ...]] = []
        self.said: list[str] = []
        self.waited_s = 0.0
        self.job = {"JobId": "4711", "BatchFlag": "1", "Requeue": "1"}

    def run(self, command: tuple[str, ...]) -> str:
        self.asked.append(command)
        return self.error if command in self.failing else ""

    def sleep(self, seconds: float) -> None:
        self.waited_s += seconds

    def look(self, job: str) -> dict[str, str]:
        assert job == "4711"
        return self.job

    def actor(self, *, requeue: bool = True, **changed: Any) -> Slurm:
        return Slurm(
            allocation(**changed),
            requeue=requeue,
            limit=2,
            say=self.said.append,
            run=self.run,
            look=self.look,
            sleep=self.sleep,
        )

    def leave_out(self, node: str = "node2", *, requeue: bool = True, **changed: Any) -> bool:
        return self.actor(requeue=requeue, **changed).leave_out([node], WHY)


def test_commands_are_run_once_and_said() -> None:
    cluster = Cluster()
    assert cluster.leave_out()
    assert cluster.asked == [DRAIN, REQUEUE, EXCLUDE]
    assert all(said.startswith("done: scontrol") for said in cluster.said)
    drained = Cluster()
    assert drained.leave_out(requeue=False)
    assert drained.asked == [DRAIN]


def test_one_process_of_a_job_speaks_with_slurm() -> None:
    cluster = Cluster()
    assert cluster.leave_out(leads=False)
    assert cluster.asked == []


def test_who_may_not_drain_is_told_the_command_and_the_node_is_left_out_all_the_same() -> None:
    cluster = Cluster(DRAIN)
    assert cluster.leave_out()
    assert cluster.asked == [DRAIN, REQUEUE, EXCLUDE]
    assert "State=DRAIN" in cluster.said[0]
    assert "failed (Invalid user id); an operator has to run it" in cluster.said[0]


def test_a_requeue_that_fails_is_tried_again_and_then_the_job_is_left_stopped() -> None:
    cluster = Cluster(REQUEUE, error="Unable to contact slurm controller")
    assert not cluster.leave_out()
    assert cluster.asked == [DRAIN, *[REQUEUE] * 4]
    assert cluster.waited_s > 0.0
    assert "Unable to contact slurm controller" in cluster.said[-1]
    assert "saved and left stopped; start it by hand" in cluster.said[-1]


def test_nodes_the_job_was_to_be_kept_from_stay_excluded() -> None:
    cluster = Cluster()
    cluster.job["ExcNodeList"] = "rack1n[3-4],login1"
    assert cluster.leave_out()
    assert cluster.asked[-1][-1] == "ExcNodeList=rack1n[3-4],login1,node2"


def test_a_job_that_could_not_be_requeued_is_known_before_it_is_ended() -> None:
    cluster = Cluster()
    assert cluster.actor().why_not() == ""
    assert (
        "started it again 2 times, and --restarts allows 2" in cluster.actor(restarts=2).why_not()
    )
    cluster.job["Requeue"] = "0"
    assert "sbatch --requeue" in cluster.actor().why_not()
    cluster.job["BatchFlag"] = "0"
    assert "submit it by sbatch" in cluster.actor().why_not()
    assert cluster.actor(requeue=False, restarts=9).why_not() == ""
    cluster.job.clear()  # Slurm does not answer
    assert cluster.actor().why_not() == ""
    assert cluster.asked == []


def test_a_job_is_requeued_no_more_often_than_allowed() -> None:
    cluster = Cluster()
    assert not cluster.leave_out(restarts=2)
    assert cluster.asked == [DRAIN]
    assert "was started again 2 times, and --restarts allows 2" in cluster.said[-1]
    assert "scontrol requeue 4711" in cluster.said[-1]


def test_a_node_that_is_not_the_jobs_costs_the_drain_alone() -> None:
    cluster = Cluster()
    assert cluster.leave_out("login1", requeue=False)
    assert not cluster.leave_out("login1", requeue=True)
    assert cluster.asked == []
    assert "login1 is none of the 3 nodes" in cluster.said[0]


def test_without_slurm_s_commands_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    said: list[str] = []
    actor = Slurm(allocation(), requeue=False, limit=1, say=said.append)
    assert actor.leave_out(["node2"], WHY)
    assert "failed (No such file or directory)" in said[0]


def _decided(level: Any, *, apply: bool, evict: tuple[str, ...] = ("node2",)) -> Decision:
    return Decision(
        episode="e1",
        action="escalate",
        level=level,
        from_level="S1",
        mode="auto" if apply else "advise",
        apply=apply,
        culprits=("device rank 1",),
        lost_s=700.0,
        threshold_s=600.0,
        options=(),
        plan=Plan(level=level, predicted_slowdown=1.0, evict=evict),
        reason="",
    )


def test_advice_shows_the_commands_and_runs_none() -> None:
    line = advised(_decided("S4", apply=False), allocation(), "off")
    assert line == {
        "what": "slurm",
        "episode": "e1",
        "run": False,
        "commands": [
            "scontrol update NodeName=node2 State=DRAIN 'Reason=failslow, job 4711: device rank 1'"
        ],
    }
    requeued = advised(_decided("S4", apply=True), allocation(), "requeue")
    assert requeued is not None
    assert requeued["run"]
    assert requeued["commands"][1:] == [
        "scontrol requeue 4711",
        "scontrol update JobId=4711 ExcNodeList=node2",
    ]
    shown = advised(_decided("S4", apply=True), allocation(), "off")
    assert shown is not None
    assert not shown["run"]
    assert advised(_decided("S2", apply=True), allocation(), "requeue") is None
    lost = advised(_decided("S4", apply=True, evict=("vm",)), allocation(), "drain")
    assert lost is not None
    assert lost["commands"] == []
    assert "vm is none of the 3 nodes" in lost["error"]


class _Bus:
    """An endpoint that nobody listens at."""

    def publish(self, topic: str, payload: bytes) -> None:
        pass


class _Deciding:
    """A pipeline that decides at once."""

    def __init__(self, decision: Decision) -> None:
        self.decision = decision

    def start(self, _entries: Any, now_s: float) -> list[Any]:
        return [Write(kind="decision", record=self.decision, t=now_s)]


def _journal_of(folder: Path, job: Allocation | None, setting: str, restarted: str) -> list[Any]:
    journal = JournalWriter(folder / "journal.jsonl")
    controller = Controller(
        worker="1-1",
        pipeline=cast(Any, _Deciding(_decided("S4", apply=False))),
        endpoint=cast(Any, _Bus()),
        journal=journal,
        slurm=None if job is None else (job, setting),
    )
    controller.start([], 5.0, restarted=restarted)
    journal.close()
    return [e.record for e in read_journal(folder / "journal.jsonl") if e.kind == "action"]


def test_the_controller_writes_advice_and_restarts_into_the_journal(tmp_path: Path) -> None:
    shown, restarted = _journal_of(tmp_path, allocation(), "off", "2 e1-4")
    assert shown["what"] == "slurm"
    assert not shown["run"]
    assert shown["commands"][0].startswith("scontrol update NodeName=node2 State=DRAIN")
    assert restarted == {"what": "restarted", "id": "e1-4", "starts": 2}


@pytest.mark.parametrize("restarted", ["", "2", "many e1-4"])
def test_outside_of_slurm_and_before_any_restart_it_writes_neither(
    tmp_path: Path, restarted: str
) -> None:
    assert _journal_of(tmp_path, None, "off", restarted) == []


def test_a_command_to_slurm_outlives_the_signal_that_ends_the_jobs_processes() -> None:
    """Requeueing sends SIGTERM to what is to say which nodes the next start leaves out."""
    told: list[str] = []
    speaker = Slurm(allocation(), requeue=False, limit=1, say=told.append)
    signalled: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: signalled.append(number))
    try:
        both = f"kill -TERM $$ {os.getpid()}; exit 0"
        assert speaker._do(("sh", "-c", both), 1, "")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert signalled == [signal.SIGTERM]
    assert told[0].startswith("done: sh -c")
