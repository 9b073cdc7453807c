"""Profiles the node's workers when asked to, and once by itself in healthy times.

In: `Order(topic="profile", body={"why": "suspicion", "for_s": 3.0, "min_iterations": 8, "limit_s":
15.0})`. Out: after that long and so many iterations, or the limit, one `Report` a worker whose
calls repeat:

    {"why":"suspicion","rank":3,"node":"gpu-17","iterations":20,"compute_s":0.051,"cells":[…]}

(`profile_wire` reads it.) Completions are recorded meanwhile. The first profile,
"healthy", is made without an order once a worker's iterations have been told apart for a while; it
is made anew only when that is ordered. A worker whose iterations are not told apart, or take
longer than the limit, is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isnan
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from failslow.localize.digest import digest
from failslow.localize.passes import names_tree
from failslow.pipeline import Order, Report
from failslow.profile_wire import profile_body
from failslow.records import StepSample
from failslow.runtime.duties import Duty, WatchedWorker

__all__ = ["ProfileDuty"]

_FOR_S = 3.0
_ITERATIONS = 8
_LIMIT_S, _MOST_LIMIT_S = 15.0, 900.0
_SETTLED = 20
"""Iterations told apart before a worker's healthy profile is begun."""
_GPUS = Path("/proc/driver/nvidia/gpus")


@dataclass(slots=True, eq=False)
class _Take:
    """What is being collected of one worker."""

    why: str
    for_s: float
    iterations: int
    since_s: float
    worker: str
    """Which process."""
    limit_s: float = _LIMIT_S
    """Iterations may take seconds each: who orders knows."""
    since_t: float | None = None
    """Epoch; None until completions are recorded."""
    records: list[NDArray[np.void]] = field(default_factory=list)
    samples: list[StepSample] = field(default_factory=list)

    def due(self, now_s: float) -> bool:
        """Enough, or never."""
        took_s = now_s - self.since_s
        return took_s >= self.limit_s or (
            took_s >= self.for_s and len(self.samples) >= self.iterations
        )


class ProfileDuty(Duty):
    """node: its name in reports."""

    topic: ClassVar[str] = "profile"

    def __init__(self, *, node: str, named: bool = False, gpus: Path = _GPUS) -> None:
        """named: somebody gave the node its name, so it is a machine of its own, whatever else
        runs on the same kernel. gpus: where the driver lists the node's devices."""
        self._node, self._named, self._gpus = node, named, gpus
        self._ordered: _Take | None = None
        self._takes: dict[int, _Take] = {}
        self._workers: dict[int, WatchedWorker] = {}
        self._seen: dict[int, tuple[str, int]] = {}
        """{rank: (its process, iterations told apart)} until its healthy profile is begun."""
        self._done: set[str] = set()
        """Processes whose healthy profile is not to be begun any more."""

    @property
    def urgent(self) -> bool:
        """While profiles of a slow job are being taken."""
        return bool(self._ordered) or any(t.why != "healthy" for t in self._takes.values())

    def order(self, order: Order, now_s: float) -> None:
        """Begin anew with every worker, whatever is under way."""
        self._ordered = _Take(
            why=str(order.body.get("why", "")),
            for_s=_number(order.body, "for_s", _FOR_S, 0.0, _LIMIT_S),
            iterations=round(_number(order.body, "min_iterations", _ITERATIONS, 1, 1e6)),
            since_s=now_s,
            worker="",
            limit_s=_number(order.body, "limit_s", _LIMIT_S, _LIMIT_S, _MOST_LIMIT_S),
        )

    def observe(self, worker: WatchedWorker) -> None:
        """Keep what is collected."""
        take = self._takes.get(worker.rank)
        if take is not None and take.worker == worker.worker:
            if len(worker.fresh):
                take.records.append(worker.fresh)
            if take.since_t is not None:
                since_t = take.since_t
                take.samples += [s for s in worker.samples if s.end_s - s.duration_s >= since_t]
        process, count = self._seen.get(worker.rank, (worker.worker, 0))
        count = count if process == worker.worker else 0
        self._seen[worker.rank] = (worker.worker, count + len(worker.samples))

    def turn(self, workers: Sequence[WatchedWorker], now_s: float) -> Iterator[Report]:
        """Begin what is to begin; make one profile that is due."""
        self._workers = {w.rank: w for w in workers if not w.ended}
        for rank in [rank for rank in self._takes if rank not in self._workers]:
            del self._takes[rank]
        if self._ordered is not None:
            ordered, self._ordered = self._ordered, None
            for worker in self._workers.values():
                self._begin(worker, ordered, now_s)
        for rank, worker in self._workers.items():
            count = self._seen.get(rank, ("", 0))[1]
            if worker.worker not in self._done and count >= _SETTLED:
                self._begin(worker, _Take("healthy", _FOR_S, _SETTLED, now_s, ""), now_s)
        for rank, take in list(self._takes.items()):
            if take.due(now_s):
                del self._takes[rank]
                yield from self._report(self._workers[rank], take)
                return  # the rings are to be read meanwhile

    def close(self) -> None:
        """Completions are not recorded for nobody."""
        for rank in self._takes:
            if rank in self._workers:
                self._workers[rank].set_profile(False)
        self._takes.clear()

    def _begin(self, worker: WatchedWorker, like: _Take, now_s: float) -> None:
        # once somebody asks, healthy times may be over
        self._done.add(worker.worker)
        worker.set_profile(True)
        self._takes[worker.rank] = _Take(
            why=like.why,
            for_s=like.for_s,
            iterations=like.iterations,
            since_s=now_s,
            worker=worker.worker,
            limit_s=like.limit_s,
            since_t=worker.to_epoch_s(now_s * 1e9),
        )

    def _report(self, worker: WatchedWorker, take: _Take) -> Iterator[Report]:
        worker.set_profile(False)
        if not take.records:
            return
        about = worker.description
        profile = digest(
            np.concatenate(take.records),
            ops=about["ops"],
            groups=worker.groups,
            samples=take.samples,
            epoch_s=worker.to_epoch_s(0),
            rank=worker.rank,
            node=self._node,
            # two containers of one machine have two names
            host=self._node if self._named else str(about.get("boot_id") or about.get("host", "")),
            device=self._device(worker),
        )
        if profile is not None:
            body = profile_body(replace(profile, **_paths(worker)), why=take.why)
            yield Report(node=self._node, rank=worker.rank, topic=self.topic, body=body)

    def _device(self, worker: WatchedWorker) -> str:
        """Model of its device; where it has not told, that of the node's, "" for several models."""
        if told := worker.description.get("device"):
            return str(told.get("model", ""))
        if not _uses_nccl(worker):
            return "cpu"
        models = set()
        for path in sorted(self._gpus.glob("*/information")):
            for line in path.read_text(errors="replace").splitlines():
                name, _, value = line.partition(":")
                if name.strip() == "Model":
                    models.add(value.strip())
        return models.pop() if len(models) == 1 else ""


def _uses_nccl(worker: WatchedWorker) -> bool:
    return any("nccl" in group.backend for group in worker.groups)


def _paths(worker: WatchedWorker) -> dict[str, Any]:
    """Its very device, and what its messages go through and along."""
    about, on_device = worker.description, _uses_nccl(worker)
    # one interface named for all traffic is known; several, or a pattern, are not
    name = str(about.get("gloo_interface", ""))
    return {
        "device_id": str((about.get("device") or {}).get("id", "")),
        "nic": name if name.replace(".", "").isalnum() and not on_device else "",
        "trees": on_device and names_tree(str(about.get("nccl_algorithms", ""))),
    }


def _number(body: Mapping[str, Any], name: str, default: float, least: float, most: float) -> float:
    """A number of an order; of one that makes no sense the default."""
    value = body.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or isnan(value):
        return default
    return float(min(max(value, least), most))
