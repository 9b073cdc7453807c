"""Journals as a live job writes them, made from the records themselves so that they cannot drift.

    python -m tests.report.sample_journals FOLDER    # writes one folder a sample

The three: DP-4 with a slow device that S2 evens out, PP-2 × DP-4 with a congested link that S3
moves out of the way, and 1,024 ranks with a contended host and advice only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.report.sample_script import MB, Script, cell, window, write

from failslow.records import (
    CallCell,
    Culprit,
    CulpritPace,
    Decision,
    Diagnosis,
    Finding,
    JobFacts,
    LevelOption,
    Measurement,
    Outcome,
    Plan,
    Suspect,
    Verdict,
)

__all__ = ["SAMPLES", "Script", "dp4", "large", "ppdp", "write"]


def _replica_cells(slow: float) -> Callable[[int], list[CallCell]]:
    everyone = range(4)

    def of(rank: int) -> list[CallCell]:
        own_s = 0.056 * (slow if rank == 2 else 1.0)
        wait_s = 0.006 + 0.056 * (slow - (slow if rank == 2 else 1.0))
        return [
            cell(everyone, "mesh_dp", "allreduce_", 26 * MB, wait_s=wait_s,
                 duration_s=wait_s + 0.001, gap_s=own_s),
            cell(everyone, "mesh_dp", "allreduce_", 9 * MB, position=1, wait_s=0.004,
                 duration_s=0.0045, gap_s=0.002),
            cell(everyone, "default_pg", "allreduce_", 4, wait_s=0.0004, duration_s=0.0004,
                 gap_s=0.0011),
        ]  # fmt: skip

    return of


def dp4() -> Script:
    """Four replicas on two nodes; rank 2's device slows by half, S2 evens most of it out."""
    job = Script(ranks=4, per_node=2, healthy_s=0.08, seed=1)
    job.write(
        JobFacts(pp=1, dp=4, microbatches=32, iteration_s=0.08, no_topology_change="one stage")
    )

    job.steps(120, spikes=[90])
    job.profiles("", _replica_cells(1.0), lambda _: 0.056)
    job.steps(180, spikes=[60, 140])
    job.suspicion("e1745735274", 1.18)
    job.steps(6)
    job.suspicion("e1745735274", 1.02, event="cleared")
    job.steps(140)
    job.health("agent", False, node="gpu-1", ranks=[2, 3], since_t=job.t - 3.0,
               message="monitoring of node gpu-1 is blind since 3 s")  # fmt: skip
    job.steps(40)
    job.health("agent", node="gpu-1", ranks=[2, 3], message="the agent of node gpu-1 answers again")
    job.steps(100)

    start, slow = (job.step, job.t), {2: 1.55}
    id, culprit = f"e{job.t:.0f}", Culprit(rank=2, what="compute", slowdown=1.55)
    job.steps(6, 1.39, slow=slow)
    job.suspicion(id, 1.39, culprit)
    job.steps(28, 1.39, slow=slow)
    levels = [(start[0], 1.39)]
    job.episode(id, "onset", start=start, levels=levels, lost_s=1.0, culprits=(culprit,))
    job.profiles(id, _replica_cells(1.55), lambda rank: 0.056 * (1.55 if rank == 2 else 1.0))
    evidence = (Measurement(what="own time", value=0.0868, unit="s", expected=0.056),)
    job.write(
        Diagnosis(
            episode=id,
            suspects=(
                Suspect(what="compute", ranks=(2,), label="mesh_dp", slowdown=1.55, extra_s=0.031,
                        score=0.94, measurements=evidence),
                Suspect(what="group", ranks=(0, 1, 2, 3), label="mesh_dp", slowdown=1.12,
                        extra_s=0.002, score=0.18, note="nothing to compare to"),
            ),
            ranks=(0, 1, 2, 3),
        )
    )  # fmt: skip
    job.steps(3, 1.39, slow=slow)
    gemm = [
        {"do": "gemm", "rank": r, "dtype": "bfloat16", "size": 4096, "host": "", "error": "",
         "seconds": 0.0204 * (1.52 if r == 2 else 1.0), "device": "NVIDIA H200"}
        for r in (2, 3)
    ]  # fmt: skip
    pause_step = job.pause(id, gemm, 0.82)
    job.write(
        window(
            "gpu-1",
            since_t=start[1] - 30.0,
            until_t=job.t,
            onset_t=start[1],
            moved={
                "gpu/0/temperature_c": (71.0, 89.0),
                "gpu/0/sm_clock_mhz": (1980.0, 1290.0),
                "gpu/0/power_w": (640.0, 410.0),
                "gpu/1/sm_clock_mhz": (1980.0, 1980.0),
                "cpu/neighbour_cores": (0.03, 0.03),
                "2": {"runqueue_share": (0.004, 0.004)},
                "3": {"runqueue_share": (0.005, 0.005)},
            },
        ),
        kind="telemetry",
    )
    finding = Finding(
        what="device",
        slowdown=1.52,
        ranks=(2,),
        host="gpu-1",
        device="GPU 0",
        cause="device degradation (thermal)",
        measurements=(
            Measurement(what="gemm bf16 4096", value=0.0310, unit="s", expected=0.0204),
            Measurement(what="SM clock", value=1290, unit="MHz", expected=1980),
        ),
        evidence=(
            "for: the SM clock fell from 1,980 to 1,290 MHz within 1.1 s of the onset",
            "for: throttle reason hw_thermal_slowdown since the onset",
            "against CPU contention: run-queue wait stayed at 0.4 %",
        ),
    )
    job.write(Verdict(episode=id, findings=(finding,), step=pause_step, pause_s=0.82))
    options = (
        LevelOption(level="S1", applicable=True, cost_s=0.0, slowdown=1.39,
                    slowdown_source="measured"),
        LevelOption(level="S2", applicable=True, cost_s=0.1, slowdown=1.11),
        LevelOption(level="S3", applicable=False, reason="one stage", cost_s=6.0, slowdown=1.39),
        LevelOption(level="S4", applicable=False, reason="restarts are not allowed (allow_restart)",
                    cost_s=300.0, slowdown=1.0),
    )  # fmt: skip
    plan = Plan(level="S2", predicted_slowdown=1.11, microbatches=(9, 9, 6, 8))
    job.write(
        Decision(
            episode=id, action="escalate", level="S2", from_level="S1", mode="auto", apply=True,
            culprits=(finding.key,), lost_s=1.21, threshold_s=0.1, options=options, plan=plan,
            reason="1.21 s lost, S2 costs 0.1 s",
        )
    )  # fmt: skip
    job.steps(2, 1.39, slow=slow)
    job.write(Outcome(episode=id, level="S2", ok=True, cost_s=0.06, slowdown=1.11))
    levels.append((job.step, 1.11))
    job.steps(20, 1.11, slow=slow)
    job.episode(id, "level", start=start, levels=levels, lost_s=1.6, culprits=(culprit,))
    job.steps(300, 1.11, slow=slow, spikes=[200])
    job.write(CulpritPace(key=finding.key, slowdown=1.0))
    end = (job.step, job.t)
    job.steps(60)
    job.write(
        Decision(
            episode=id, action="restore", level="S1", from_level="S2", mode="auto", apply=True,
            culprits=(), lost_s=4.3, threshold_s=None, spent_s=0.06, options=options[:1],
            plan=Plan(level="S1", predicted_slowdown=1.0, microbatches=(8, 8, 8, 8)),
            reason="the culprits are well again for 5 s",
        )
    )  # fmt: skip
    job.steps(1)
    job.write(Outcome(episode=id, level="S1", ok=True, cost_s=0.05, slowdown=1.0))
    job.episode(id, "relief", start=start, levels=levels, lost_s=4.3, culprits=(culprit,), end=end)
    job.steps(300)
    return job.finish()


def _transfers(slow: float) -> list[dict[str, Any]]:
    """Every rank to every rank of another node; from gpu-1 to gpu-0 `slow` times as long."""
    results = []
    for source in range(8):
        for target in range(8):
            if source // 2 == target // 2:
                continue
            ratio = slow if (source // 2, target // 2) == (1, 0) else 1.0
            noise = 1.0 + 0.03 * ((source * 7 + target * 3) % 5 - 2) / 2
            for size in (1 * MB, 4 * MB, 16 * MB):
                seconds = (2e-4 + size / 2.4e9) * ratio * noise
                results.append(
                    {"do": "p2p", "rank": source, "peer": target, "by": target, "error": "",
                     "size_bytes": size, "seconds": seconds, "host": "", "device": ""}
                )  # fmt: skip
    return results


def ppdp() -> Script:
    """Two stages of four replicas on four nodes; the link gpu-2 → gpu-1 is congested, then S3."""
    job = Script(ranks=8, per_node=2, healthy_s=0.335, seed=2)
    job.write(JobFacts(pp=2, dp=4, microbatches=16, least_microbatches=2, iteration_s=0.335,
                       no_redistribution=""))  # fmt: skip

    def cells(slow: float) -> Callable[[int], list[CallCell]]:
        def of(rank: int) -> list[CallCell]:
            stage = rank // 4
            replicas, peer = range(4 * stage, 4 * stage + 4), (rank + 4) % 8
            through = slow if stage == 0 else 1.0
            pair = sorted((rank, peer))
            return [
                cell(pair, "pp", "send" if stage == 0 else "recv_", 2 * MB, peer=peer,
                     wait_s=0.004, duration_s=0.006, gap_s=0.07),
                cell(replicas, "mesh_dp", "allreduce_", 48 * MB, wait_s=0.05 * through,
                     duration_s=0.055 * through, gap_s=0.08 * (1.12 if stage else 1.0)),
            ]  # fmt: skip

        return of

    job.steps(60)
    job.profiles("", cells(1.0), lambda rank: 0.23 * (1.12 if rank >= 4 else 1.0))
    job.write(Diagnosis(episode="", suspects=(), imbalance="the last stage computes ×1.12"))
    step = job.pause("", _transfers(1.0), 1.1)
    job.write(Verdict(episode="", step=step, pause_s=1.1))
    job.steps(160, spikes=[80])
    start = (job.step, job.t)
    id = f"e{job.t:.0f}"
    job.steps(6, 1.62)
    job.suspicion(id, 1.62)
    job.steps(10, 1.62)
    levels = [(start[0], 1.62)]
    job.episode(id, "onset", start=start, levels=levels, lost_s=3.3)
    job.profiles(id, cells(4.9), lambda rank: 0.23 * (1.12 if rank >= 4 else 1.0))
    job.write(
        Diagnosis(
            episode=id,
            suspects=(
                Suspect(what="group", ranks=(0, 1, 2, 3), label="mesh_dp", slowdown=4.9,
                        extra_s=0.21, score=0.88),
            ),
            imbalance="the last stage computes ×1.12",
            ranks=tuple(range(8)),
        )
    )  # fmt: skip
    job.steps(2, 1.62)
    failed = {"do": "p2p", "rank": 0, "peer": 2, "by": 2, "size_bytes": MB, "seconds": None,
              "host": "", "device": "", "error": "timed out"}  # fmt: skip
    pause_step = job.pause(id, [*_transfers(4.8), failed], 2.4)
    for node in ("gpu-0", "gpu-1"):
        job.write(
            window(
                node,
                since_t=start[1] - 60.0,
                until_t=job.t,
                onset_t=start[1],
                moved={
                    "net/eth0/tx_bytes_per_s": (9.1e7, 2.4e8 if node == "gpu-1" else 6.0e7),
                    "link/inter/rtt_s": (0.0002, 0.0041 if node == "gpu-1" else 0.0002),
                    "rdma/mlx5_0:1/cnp_handled_per_s": (0.0, 840.0 if node == "gpu-1" else 0.0),
                    "cpu/neighbour_cores": (0.02, 0.02),
                },
            ),
            kind="telemetry",
        )
    finding = Finding(
        what="link",
        slowdown=4.8,
        ranks=(2, 3),
        peer_ranks=(0, 1),
        host="gpu-1",
        peer_host="gpu-0",
        nic="mlx5_0",
        cause="network congestion",
        measurements=(Measurement(what="send 16 MB", value=0.0335, unit="s", expected=0.0072),),
        evidence=(
            "for: 840 CNPs a second handled since the onset, none before",
            "for: round trips between nodes rose from 0.2 to 4.1 ms",
            "against a slow NIC: the way back carries its full bandwidth",
        ),
    )
    job.write(Verdict(episode=id, findings=(finding,), step=pause_step, pause_s=2.4))
    options = (
        LevelOption(level="S1", applicable=True, cost_s=0.0, slowdown=1.62,
                    slowdown_source="measured"),
        LevelOption(level="S2", applicable=False, reason="a link is slow, no replica", cost_s=0.1,
                    slowdown=1.62),
        LevelOption(level="S3", applicable=True, cost_s=6.0, slowdown=1.07),
        LevelOption(level="S4", applicable=False, reason="restarts are not allowed (allow_restart)",
                    cost_s=300.0, slowdown=1.0),
    )  # fmt: skip
    job.steps(14, 1.62)
    job.episode(id, "update", start=start, levels=levels, lost_s=6.4)
    plan = Plan(level="S3", predicted_slowdown=1.07, placement=(0, 1, 4, 5, 2, 3, 6, 7))
    job.write(
        Decision(
            episode=id, action="escalate", level="S3", from_level="S1", mode="auto", apply=True,
            culprits=(finding.key,), lost_s=6.4, threshold_s=6.0, options=options, plan=plan,
            reason="6.4 s lost, S3 costs 6 s",
        )
    )  # fmt: skip
    job.steps(1, 1.62)
    job.write(Outcome(episode=id, level="S3", ok=False, cost_s=0.4,
                      error="rank 6 did not commit within 2 s: rolled back"))  # fmt: skip
    job.steps(20, 1.62)
    job.write(
        Decision(
            episode=id, action="replan", level="S3", from_level="S1", mode="auto", apply=True,
            culprits=(finding.key,), lost_s=10.9, threshold_s=6.0, spent_s=0.4, options=options,
            plan=plan, reason="once more",
        )
    )  # fmt: skip
    job.t += 0.9
    job.write(Outcome(episode=id, level="S3", ok=True, cost_s=0.9, slowdown=1.06))
    levels.append((job.step, 1.06))
    job.steps(10, 1.06)
    job.episode(id, "level", start=start, levels=levels, lost_s=11.8)
    job.steps(120, 1.06)
    job.episode(id, "update", start=start, levels=levels, lost_s=14.2)
    return job


def large(ranks: int = 1024, steps: int = 240) -> Script:
    """PP-4 × DP-64 × TP-4 on nodes of eight; node gpu-17 shares its CPUs, advice only."""
    job = Script(ranks=ranks, per_node=8, healthy_s=1.9, seed=3)
    pp, tp = 4, 4
    dp = ranks // (pp * tp)
    bad = range(136, 144) if ranks > 144 else range(8)
    job.write(JobFacts(pp=pp, dp=dp, tp=tp, microbatches=8 * dp, iteration_s=1.9))

    def cells(slow: float) -> Callable[[int], list[CallCell]]:
        def of(rank: int) -> list[CallCell]:
            stage, replica, shard = rank // (dp * tp), (rank // tp) % dp, rank % tp
            block = [(stage * dp + replica) * tp + s for s in range(tp)]
            column = [(stage * dp + d) * tp + shard for d in range(dp)]
            own = slow if rank in bad else 1.0
            late_s = 0.0 if rank in bad else 1.2 * (slow - 1.0)
            has_bad = any(r in bad for r in column)
            noise = 1.0 + 0.02 * (rank * 2654435761 % 97) / 97
            return [
                cell(block, "mesh_tp", "allreduce_", 16 * MB, wait_s=0.21 * noise,
                     duration_s=0.22, gap_s=1.2 * own * noise),
                cell(column, "mesh_dp", "_reduce_scatter_base_", 64 * MB,
                     wait_s=0.1 + late_s * has_bad, duration_s=0.11, gap_s=0.09 * noise),
            ]  # fmt: skip

        return of

    job.steps(steps // 3, interval_s=30.0)
    job.profiles("", cells(1.0), lambda _: 1.3)
    job.steps(steps // 3, interval_s=30.0)
    start, slow = (job.step, job.t), dict.fromkeys(bad, 1.33)
    id = f"e{job.t:.0f}"
    culprits = tuple(Culprit(rank=r, what="compute", slowdown=1.33) for r in bad)
    job.steps(6, 1.22, slow=slow, interval_s=30.0)
    job.suspicion(id, 1.22, *culprits)
    job.steps(6, 1.22, slow=slow, interval_s=30.0)
    levels = [(start[0], 1.22)]
    job.episode(id, "onset", start=start, levels=levels, lost_s=5.0, culprits=culprits)
    job.profiles(id, cells(1.33), lambda rank: 1.3 * (1.33 if rank in bad else 1.0))
    suspects = tuple(
        Suspect(what="compute", ranks=(r,), label="mesh_tp", slowdown=1.33, extra_s=0.39,
                score=0.9 - 0.001 * at)
        for at, r in enumerate(bad)
    )  # fmt: skip
    job.write(Diagnosis(episode=id, suspects=suspects, ranks=tuple(range(ranks)), missing=()))
    finding = Finding(
        what="host", slowdown=1.33, ranks=tuple(bad), host=job.node(bad[0]),
        cause="CPU contention",
        measurements=(Measurement(what="memory", value=61.0, unit="GB/s", expected=92.0),),
        evidence=("for: another process used 30 cores of gpu-17 since the onset",),
    )  # fmt: skip
    step = job.pause(id, [], 3.1)
    job.write(Verdict(episode=id, findings=(finding,), step=step, pause_s=3.1))
    option = LevelOption(level="S2", applicable=True, cost_s=0.3, slowdown=1.01)
    job.write(
        Decision(
            episode=id, action="escalate", level="S2", from_level="S1", mode="advise", apply=False,
            culprits=(finding.key,), lost_s=5.1, threshold_s=0.3,
            options=(LevelOption(level="S1", applicable=True, cost_s=0.0, slowdown=1.22), option),
            plan=Plan(level="S2", predicted_slowdown=1.01, microbatches=(6, *[8] * (dp - 2), 10)),
            reason="5.1 s lost, S2 costs 0.3 s",
        )
    )  # fmt: skip
    job.steps(steps // 3, 1.22, slow=slow, interval_s=30.0)
    job.episode(id, "update", start=start, levels=levels, lost_s=0.22 * 1.9 * steps / 3,
                culprits=culprits)  # fmt: skip
    return job


SAMPLES: dict[str, Callable[[], Script]] = {"dp4": dp4, "ppdp": ppdp, "large": large}


if __name__ == "__main__":
    for name, make in SAMPLES.items():
        print(write(make(), Path(sys.argv[1]) / name))
