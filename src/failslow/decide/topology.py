"""What an iteration takes when the workers are arranged so: the cost model of S3.

In: healthy times as measured, how slow each tensor-parallel block and each directed link is. Out:
seconds per iteration of any placement, and of thousands at once.

    >>> import numpy as np
    >>> link = np.ones((4, 4)); link[1, 2] = 6.0       # congested: host 1 -> host 2
    >>> model = TopologyModel(stage_s=(0.1, 0.1), microbatches=8, slowdown=np.ones(4),
    ...                       host=np.arange(4), link=link, dp_s=(0.2, 0.2), pp_s=0.01)
    >>> round(model.predict([[0, 3], [1, 2]]), 6)      # hosts 1 and 2 reduce stage 1's gradients
    2.145
    >>> round(model.predict([[0, 3], [2, 1]]), 6)      # ... in either order: a ring of two
    2.145
    >>> round(model.predict([[0, 1], [3, 2]]), 6)      # now the link carries activations
    1.2575

A block is what moves: the `tp` workers of one tensor-parallel group, as slow as its slowest. A
placement is an array (pp, dp) of block numbers: row = stage, column = replica.

The model. A replica's 1F1B pipeline takes fill + (M − 1) · period: the fill is all stages' and
transfers' time, the period the slowest of any stage, any transfer, and, because stage p keeps at
most P − p micro-batches in flight, of (all time from p on, there and back) / (P − p). Against the
exact recurrence of the schedule it is within 10 % for 8 micro-batches and more (22 % for 4).
Replicas then wait for the slowest, and for the slowest stage's gradient ring, which goes at the
pace of its slowest link. Rings of several stages sharing a host's link at the same time are not
modelled beyond what the healthy `dp_s` holds of it, nor is their overlap with the drain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from failslow.errors import PlanError

__all__ = ["TopologyModel"]

Floats = NDArray[np.float64]
Blocks = NDArray[np.int64]

SLOW = 1.05
"""A block this slow is a straggler, a link this slow congested."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TopologyModel:
    """A job on its machines: P = pp stages, D = dp replicas, B = P · D blocks on H hosts.

    Raises PlanError when the shapes do not fit or a number is none.
    """

    stage_s: Sequence[float] | Floats
    """(P,): healthy compute seconds of each stage for one micro-batch, forward and backward."""
    microbatches: int
    """Of each replica in an iteration."""
    slowdown: Floats
    """(B,): compute time of each block over the healthy one; its slowest worker's."""
    host: Blocks
    """(B,): host of each block."""
    link: Floats
    """(H, H): transfer time from host to host over that of a healthy link between hosts; the
    diagonal is the same inside a host, usually far below 1."""
    dp_s: Sequence[float] | Floats
    """(P,): healthy seconds an iteration waits for each stage's gradient ring between hosts."""
    pp_s: float
    """Healthy seconds in which one micro-batch passes a stage boundary between hosts, there and
    back."""
    ring_step: int = 1
    """A ring sends from replica d to d + ring_step: 1 for NCCL, -1 for gloo."""
    other_s: float = 0.0
    """Seconds of an iteration that no placement changes."""

    def __post_init__(self) -> None:
        stages, blocks = len(self.stage_s), len(self.slowdown)
        hosts = len(self.link)
        if not stages or not blocks or blocks % stages:
            raise PlanError(
                f"{blocks} blocks cannot form a grid of {stages} stages; give a multiple of it"
            )
        if len(self.host) != blocks or np.shape(self.link) != (hosts, hosts):
            raise PlanError(
                f"host has {len(self.host)} entries and link shape {np.shape(self.link)}; give a "
                f"host for each of {blocks} blocks and a square link"
            )
        if len(self.dp_s) != stages:
            raise PlanError(f"dp_s has {len(self.dp_s)} entries; give one for each of {stages}")
        if self.microbatches < 1 or np.min(self.host) < 0 or np.max(self.host) >= hosts:
            raise PlanError(
                f"microbatches {self.microbatches} must be at least 1 and hosts "
                f"{np.min(self.host)} to {np.max(self.host)} rows of link, 0 to {hosts - 1}"
            )
        for name in ("stage_s", "slowdown", "link", "dp_s", "pp_s", "other_s"):
            values = np.asarray(getattr(self, name), dtype=np.float64)
            if not ((values >= 0.0) & (values < np.inf)).all():
                raise PlanError(f"{name} holds {values.min()}; give finite numbers >= 0")

    @property
    def pp(self) -> int:
        """Pipeline stages."""
        return len(self.stage_s)

    @property
    def dp(self) -> int:
        """Data-parallel replicas."""
        return len(self.slowdown) // self.pp

    def predict(self, placement: ArrayLike) -> float:
        """Seconds an iteration takes with `placement`, shape (pp, dp)."""
        return float(self.predict_many(np.asarray(placement)[None])[0])

    def predict_many(self, placements: Blocks) -> Floats:
        """Seconds an iteration takes with each of `placements`, shape (n, pp, dp) -> (n,)."""
        replicas = self.replica_s(placements.swapaxes(-1, -2)).max(axis=-1)
        total: Floats = replicas + self.ring_s(placements).max(axis=-1) + self.other_s
        return total

    def replica_s(self, columns: Blocks) -> Floats:
        """Seconds of the pipelines whose stages are the blocks of `columns`, (..., pp) -> (...)."""
        fill, period = self._fill_and_period(columns, self.microbatches)
        result: Floats = fill + (self.microbatches - 1) * period
        return result

    def replica_costs(self, columns: Blocks) -> tuple[Floats, Floats]:
        """(fixed_s, per_microbatch_s) of those pipelines, for pp micro-batches and more."""
        fill, period = self._fill_and_period(columns, self.pp + 1)
        return fill - period, period

    def _fill_and_period(self, columns: Blocks, microbatches: int) -> tuple[Floats, Floats]:
        stage_s = self.slowdown[columns] * np.asarray(self.stage_s, dtype=np.float64)
        fill: Floats = stage_s.sum(axis=-1)
        period: Floats = stage_s.max(axis=-1)
        if self.pp == 1:
            return fill, period
        here, there = self.host[columns[..., :-1]], self.host[columns[..., 1:]]
        forward_s = 0.5 * self.pp_s * self.link[here, there]
        backward_s = 0.5 * self.pp_s * self.link[there, here]
        both_s = forward_s + backward_s
        period = np.maximum(period, np.maximum(forward_s, backward_s).max(axis=-1))
        from_here = stage_s.copy()
        from_here[..., :-1] += both_s
        from_here = np.cumsum(from_here[..., ::-1], axis=-1)[..., : microbatches - 1]
        if microbatches > 1:
            in_flight = np.arange(1, from_here.shape[-1] + 1)
            period = np.maximum(period, (from_here / in_flight).max(axis=-1))
        return fill + both_s.sum(axis=-1), period

    def ring_s(self, rows: Blocks) -> Floats:
        """Seconds of every stage's gradient ring; `rows`: (..., pp, dp) blocks -> (..., pp)."""
        return self.ring_factor(rows) * np.asarray(self.dp_s, dtype=np.float64)

    def ring_factor(self, rows: Blocks) -> Floats:
        """The slowest link of rings over the blocks of `rows`, (..., dp) -> (...)."""
        if self.dp == 1:
            return np.zeros(rows.shape[:-1])
        host = self.host[rows]
        slowest: Floats = self.link[host, np.roll(host, -self.ring_step, axis=-1)].max(axis=-1)
        return slowest

    def stragglers(self) -> NDArray[np.bool_]:
        """(B,): which blocks compute slowly."""
        slow: NDArray[np.bool_] = np.asarray(self.slowdown >= SLOW)
        return slow

    def slow_stages(self, placement: Blocks) -> int:
        """How many stages hold a straggler."""
        return int(np.count_nonzero(self.stragglers()[placement].any(axis=-1)))

    def calibrated(self, measured_s: float, placement: Blocks) -> TopologyModel:
        """The model that predicts `measured_s` for `placement`, as an iteration has shown.

        What it takes longer is time no placement changes; if it is faster than predicted, all
        times shrink alike. Raises PlanError unless measured_s > 0.
        """
        if not 0.0 < measured_s < np.inf:
            raise PlanError(f"an iteration of {measured_s} s cannot be; measure it again")
        bare = replace(self, other_s=0.0)
        predicted_s = bare.predict(placement)
        if predicted_s <= measured_s:
            return replace(self, other_s=measured_s - predicted_s)
        share = measured_s / predicted_s
        return replace(
            bare,
            stage_s=np.asarray(self.stage_s) * share,
            dp_s=np.asarray(self.dp_s) * share,
            pp_s=self.pp_s * share,
        )
