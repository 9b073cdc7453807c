"""What comparing the profiles of a large job costs the controller.

In: world sizes. Out: a line each, seconds on one core to diagnose a job of TP 8 x PP 8 x DP with a
slow worker in it, healthy profiles included, and to read all its messages:

    ranks  cells/rank  read s  diagnose s  named
    10240          40    4.10        1.32  rank 4711

    python benchmarks/profile_cost.py --ranks 64 1024 10240
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np

from failslow.localize.profile import diagnose
from failslow.profile_wire import profile_body, read_profile_body
from failslow.records import CallCell, RankProfile

TP, PP, ITERATIONS = 8, 8, 20
POSITIONS = 8
SLOW = 1.4
"""What the slow worker's own time is of the others'."""


Made = dict[tuple[str, int], tuple[int, ...]]


def groups_of(rank: int, world: int, made: Made) -> dict[str, tuple[int, ...]]:
    """The rank's groups; workers share one object for each, as those read from messages do."""
    step = world // PP
    stage, shard = rank // step, rank % TP
    wanted = {
        "world": (0, range(world)),
        "tp": (rank // TP, range(rank - shard, rank - shard + TP)),
        "dp": (stage * TP + shard, range(stage * step + shard, (stage + 1) * step, TP)),
        "pp": (rank % step, range(rank % step, world, step)),
    }
    return {
        kind: made.setdefault((kind, number), tuple(ranks))
        for kind, (number, ranks) in wanted.items()
    }


def job(world: int, slow: int | None, seed: int) -> list[RankProfile]:
    """Profiles of a job in which all wait for the slow worker."""
    rng = np.random.default_rng(seed)
    made: Made = {}
    own = 0.4 * (1.0 + 0.01 * rng.standard_normal(world))
    if slow is not None:
        own[slow] *= SLOW
    step, late_s = world // PP, 0.0 if slow is None else 0.4 * (SLOW - 1.0)
    profiles = []
    for rank in range(world):
        groups, stage = groups_of(rank, world, made), rank // step
        waits = 0.0 if rank == slow else late_s
        kinds: list[tuple[str, str, int | None, int]] = [
            ("tp", "allreduce_", None, 30),
            ("tp", "_allgather_base_", None, 30),
        ]
        if stage > 0:
            kinds += [("pp", "recv_", rank - step, 4), ("pp", "send", rank - step, 4)]
        if stage < PP - 1:
            kinds += [("pp", "recv_", rank + step, 4), ("pp", "send", rank + step, 4)]
        kinds += [("dp", "allreduce_", None, 1), ("world", "allreduce_", None, 1)]
        cells = []
        for kind, op, peer, folded in kinds:
            places = POSITIONS if folded > 1 else 2
            base = {"tp": 2e-4, "pp": 4e-4, "dp": 8e-3, "world": 3e-4}[kind]
            for position in range(places):
                took = base * (1.0 + 0.02 * rng.random())
                waited = took + waits / (6 * places * folded)
                cells.append(
                    CallCell(
                        group=groups[kind], label=kind, op=op, size_bytes=1 << 24,
                        position=position * folded, peer=peer, calls=ITERATIONS * folded,
                        duration_s=waited, wait_s=waited, gap_s=1e-3, spread_s=took / 30,
                        least_s=took,
                    )
                )  # fmt: skip
        profiles.append(
            RankProfile(
                rank=rank, node=f"n{rank // 8}", host=f"n{rank // 8}", device="GPU", start_t=0.0,
                end_t=10.0, iterations=ITERATIONS, iteration_s=0.5 + late_s,
                compute_s=float(own[rank]), compute_spread_s=0.004, cells=tuple(cells),
            )
        )  # fmt: skip
    return profiles


def measure(world: int, repeats: int) -> str:
    """One line of the table."""
    slow = world // 2 + 3
    healthy, now = job(world, None, 1), job(world, slow, 2)
    bodies = [json.dumps(profile_body(p, why="suspicion")) for p in now[: min(world, 256)]]
    begin = time.process_time()
    for body in bodies:
        read_profile_body(json.loads(body))
    read_s = (time.process_time() - begin) * world / len(bodies)
    times = []
    for _ in range(repeats):
        begin = time.process_time()
        found = diagnose(now, healthy, episode="e", slowdown=1.3)
        times.append(time.process_time() - begin)
    named = ", ".join(str(rank) for suspect in found.suspects for rank in suspect.ranks)
    if named != str(slow):
        raise SystemExit(f"named {named or 'nobody'}, not rank {slow}")
    cells = statistics.median(len(p.cells) for p in now)
    took_s = statistics.median(times)
    return f"{world:5d}  {cells:10.0f}  {read_s:6.2f}  {took_s:10.3f}  rank {named}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 1024, 10240])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    print("ranks  cells/rank  read s  diagnose s  named")
    for world in options.ranks:
        if world < TP * PP or world % (TP * PP):
            parser.error(f"--ranks {world} must be a multiple of {TP * PP}")
        print(measure(world, options.repeats), flush=True)


if __name__ == "__main__":
    main()
