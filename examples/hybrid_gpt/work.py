"""Compute that is there to take time: matrix products, diluted with sleep in a fixed ratio.

Several workers fit on few cores, and what slows a worker slows its whole micro-batch. Two ways to
sleep: "fixed", in pieces of 1 ms, so that a worker that is stopped half of the time (signals) takes
twice as long; "follow", as a multiple of what the products just took, so that a CPU quota or a
neighbour that stretches them stretches the whole.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

__all__ = ["Work"]

_PIECE_S = 0.001


class Work:
    """Call it once a micro-batch. Calibrated alike on all ranks, which must make it together."""

    def __init__(
        self, duration_s: float, dilution: float, *, follow: bool, device: torch.device
    ) -> None:
        """duration_s: of a healthy micro-batch. dilution: sleep over products."""
        self.dilution, self.follow = dilution, follow
        self._burst_s = duration_s / (1.0 + dilution)
        size = 192 if device.type == "cpu" else 2048
        self._left = torch.ones(size, size, device=device)
        self._wait = device.type != "cpu"
        self._multiply(50)
        # CPU time: whoever shares the core does not matter; the best of several, of all ranks
        clock = time.perf_counter if self._wait else time.thread_time
        costs = []
        for _ in range(8):
            begin = clock()
            self._multiply(20)
            costs.append((clock() - begin) / 20)
        best = torch.tensor([min(costs)], device=device)
        dist.all_reduce(best, op=dist.ReduceOp.MIN)
        self._repeats = max(1, round(self._burst_s / float(best)))

    def __call__(self) -> None:
        begin_s = time.perf_counter()
        self._multiply(self._repeats)
        if self.follow:
            time.sleep(self.dilution * (time.perf_counter() - begin_s))
            return
        left_s = self.dilution * self._burst_s
        while left_s > 0.0:
            begin_s = time.perf_counter()
            time.sleep(min(_PIECE_S, left_s))
            # at most a piece and a bit counts, however long the worker was stopped meanwhile
            left_s -= min(time.perf_counter() - begin_s, 1.5 * _PIECE_S)

    def _multiply(self, repeats: int) -> None:
        with torch.no_grad():
            for _ in range(repeats):
                self._left @ self._left
        if self._wait:
            torch.cuda.synchronize()
