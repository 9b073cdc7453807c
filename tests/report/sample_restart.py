"""A sample journal of level S4: a host is proved slow twice, left out, and the job starts again."""

from __future__ import annotations

from tests.report.sample_script import Script

from failslow.records import (
    Culprit,
    Decision,
    Finding,
    JobFacts,
    LevelOption,
    Outcome,
    Plan,
    Verdict,
)

__all__ = ["restarted"]

COMMANDS = [
    "scontrol update NodeName=gpu-1 State=DRAIN 'Reason=failslow, job 4711: device rank 3'",
    "scontrol requeue 4711",
    "scontrol update JobId=4711 ExcNodeList=gpu-1",
]


def restarted(*, comes_back: bool = True, starts: int = 2, apply: bool = True) -> Script:
    """Four replicas on two nodes; gpu-1 is left out after two verdicts.

    starts: of the command until it trains again. apply: else it is advice, and nothing is done.
    """
    job = Script(ranks=4, per_node=2, healthy_s=0.1, seed=4)
    job.write(JobFacts(pp=1, dp=4, microbatches=32, iteration_s=0.1))
    job.steps(200)
    start, slow = (job.step, job.t), {3: 2.0}
    id, culprit = f"e{job.t:.0f}", Culprit(rank=3, what="compute", slowdown=2.0)
    job.steps(30, 1.8, slow=slow)
    levels = [(start[0], 1.8)]
    job.episode(id, "onset", start=start, levels=levels, lost_s=2.4, culprits=(culprit,))
    finding = Finding(what="device", slowdown=1.84, ranks=(3,), host="gpu-1", device="GPU 1")
    for _ in range(2):
        step = job.pause(id, [], 0.9)
        job.write(Verdict(episode=id, findings=(finding,), step=step, pause_s=0.9))
        job.steps(20, 1.8, slow=slow)
    options = (
        LevelOption(level="S1", applicable=True, cost_s=0.0, slowdown=1.8),
        LevelOption(level="S4", applicable=True, cost_s=60.0, slowdown=1.0),
    )
    job.write(
        Decision(
            episode=id,
            action="escalate",
            level="S4",
            from_level="S1",
            mode="auto" if apply else "advise",
            apply=apply,
            culprits=(finding.key,),
            lost_s=61.0,
            threshold_s=60.0,
            options=options,
            plan=Plan(level="S4", predicted_slowdown=1.0, evict=("gpu-1",)),
            reason="61 s lost reach the 60 s",
        )
    )
    told = {"what": "slurm", "episode": id, "run": apply, "commands": COMMANDS}
    job.write(told, kind="action")
    if not apply:
        job.steps(50, 1.8, slow=slow)
        return job.finish()
    job.t += 3.5
    job.write(Outcome(episode=id, level="S4", ok=True, cost_s=3.5))
    order = {"what": "restart", "id": f"{id}-7", "evict": ["gpu-1"], "why": "device rank 3 x1.84"}
    job.write(order, kind="action")
    job.steps(1, 1.8)  # the last iteration before the workers end
    job.finish()
    if comes_back:
        job.t += 40.0
        job.ranks = 2
        job.health("controller", event="started", launch="7-9", message="watching begins")
        record = {"what": "restarted", "id": f"{id}-7", "starts": starts}
        job.write(record, kind="action")
        job.step -= 1
        job.steps(120)
        job.finish()
    return job
