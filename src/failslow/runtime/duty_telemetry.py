"""Samples a node's telemetry once a second and answers orders for a window of it.

In: `Order(topic="telemetry", body={"last_s": 137.2})`: of so many seconds until now (hosts' clocks
differ); null: of all that is kept (10 minutes). Out: one `Report` of the node as a
whole (rank None):

    {"since_t":1745735241.0,"until_t":1745735301.0,"interval_s":1.0,
     "t":[1745735241.2,1745735242.2,…],
     "series":{"cpu/neighbour_cores":[0.02,0.01,…,1.94],"net/eth0/tx_bytes_per_s":[9.1e7,null,…],
               "gpu/0/temperature_c":[…],"rdma/mlx5_0:1/cnp_handled_per_s":[…],
               "link/inter/rtt_s":[…],"link/inter/rtt_cv":[…]},
     "steady":{"cpu/steal_share":0.0,"net/eth0/tx_errors_per_s":0.0},
     "ranks":{"3":{"series":{"runqueue_share":[…]},"steady":{"throttled_share":0.0}}},
     "gpus":{"0":{"name":"NVIDIA H200","ranks":[3]}}, "addresses":["10.77.0.1"],
     "missing":["no NVML: the module pynvml is not installed"]}

`t` holds at most 120 times (epoch seconds by the clock of the node's workers, by which their
iterations are timed; the pipeline puts them on the job's and adds "ahead_s", by how much the node's
was ahead, null unknown). Of a longer window the last 60 are as sampled and the older ones averages,
so that steps between times differ. Every list has as many values, null where there was none. A
series that did not change in the window is one number under `steady`. Names are `<source>/<what>`
or `<source>/<which>/<what>`; units are their endings: `_share` 0..1 of the time, `_s` seconds, `_c`
°C, `_w` watts, `_mhz`, `_per_s`, `_cores` CPU seconds a second, `_cv` standard deviation over mean;
without one it is a plain number. What the names mean stands in `failslow.telemetry`. `gpus` says
which workers are on each (as they tell, or as NVML sees), `addresses` those of the node as
its workers' connections show them.

With `record_s` such a report comes unasked every so many seconds and when the last worker has
ended, of the time since the last one, with "why": "record".

Everything is sampled in a thread of its own: a driver that hangs costs telemetry, not the watching.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from failslow.pipeline import Order, Report
from failslow.runtime.duties import Duty, WatchedWorker
from failslow.telemetry.base import Sampler
from failslow.telemetry.collect import Collector, node_samplers

__all__ = ["RECORD", "TelemetryDuty"]

RECORD = "record"
"""`why` of a report that nobody asked for: for the journal, not for a verdict."""
_KEEP_S = 600.0
_PEEK_S = (0.01, 0.09)
_ASK_S = 5.0
"""What is missing is asked for this often."""
_JOIN_S = 1.0


class TelemetryDuty(Duty):
    """node, job: their names. say: told once what is not to be had here.

    samplers: made from a function that gives rank -> pid of the workers; all there are if left out.
    """

    topic: ClassVar[str] = "telemetry"

    def __init__(
        self,
        *,
        node: str,
        job: str = "",
        say: Callable[[str], None] = lambda _: None,
        interval_s: float = 1.0,
        record_s: float = 0.0,
        samplers: Callable[[Callable[[], Mapping[int, int]]], Sequence[Sampler]] | None = None,
    ) -> None:
        if not 0.05 <= interval_s <= 60:
            raise ValueError(f"interval_s ({interval_s}) must be from 0.05 to 60 seconds")
        self._node, self._say, self._interval_s = node, say, interval_s
        self._workers: Mapping[int, int] = {}
        self._devices: Mapping[int, str] = {}
        self._epoch_s: float | None = None
        """What to add to CLOCK_MONOTONIC for the time its workers' iterations are told in."""
        made = samplers or (
            lambda workers: node_samplers(
                workers, devices=lambda: self._devices, job=job, interval_s=interval_s
            )
        )
        self.collector = Collector(made(lambda: self._workers), keep=round(_KEEP_S / interval_s))
        self._orders: list[Order] = []
        self._said: set[str] = set()
        self._asked_s = -1e9
        self._record_s = record_s
        self._recorded_s = time.monotonic()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def order(self, order: Order, now_s: float) -> None:  # noqa: ARG002  # the protocol's
        """A window is wanted; the next turn answers."""
        self._orders.append(order)

    def observe(self, worker: WatchedWorker) -> None:
        """Calls are no business of this duty, nor are..."""

    def letter(self, worker: WatchedWorker, letter: dict[str, Any], now_s: float) -> None:
        """...letters."""

    def turn(self, workers: Sequence[WatchedWorker], now_s: float) -> Iterable[Report]:
        """As `Duty.turn`."""
        living = [worker for worker in workers if not worker.ended]
        had, self._workers = self._workers, {worker.rank: worker.pid for worker in living}
        if living:
            self._epoch_s = living[0].to_epoch_s(0.0)
        if self._workers and self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="failslow-telemetry", daemon=True
            )
            self._thread.start()
        if self._thread is not None and now_s - self._asked_s >= _ASK_S:
            self._asked_s = now_s
            self._devices = {worker.rank: _device(worker) for worker in living}
            for text in self.collector.missing:
                if text not in self._said:
                    self._said.add(text)
                    self._say(text)
        orders, self._orders = self._orders, []
        for order in orders:
            last_s = _seconds(order.body.get("last_s"))
            now_t = self._t(time.monotonic())
            body = self.collector.report(
                since_t=None if last_s is None else now_t - last_s,
                until_t=now_t,
                interval_s=self._interval_s,
            )
            yield Report(node=self._node, topic=self.topic, body=body)
        if self._record_s and self._thread is not None:
            # nothing more is sampled once the last worker has ended, and soon nobody listens
            yield from self._record(time.monotonic(), last=bool(had) and not self._workers)

    def _record(self, now_s: float, *, last: bool) -> Iterable[Report]:
        """What was sampled since the last time, if that is long enough ago or the end."""
        if now_s - self._recorded_s < self._record_s and not last:
            return
        body = self.collector.report(
            since_t=self._t(self._recorded_s), until_t=self._t(now_s), interval_s=self._interval_s
        )
        self._recorded_s = now_s
        yield Report(node=self._node, topic=self.topic, body={**body, "why": RECORD})

    def _t(self, monotonic_s: float) -> float:
        """On the workers' clock: it keeps its pace when the system's is set."""
        if self._epoch_s is None:
            return time.time() - time.monotonic() + monotonic_s
        return self._epoch_s + monotonic_s

    def close(self) -> None:
        """As `Duty.close`."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        due_s = time.monotonic()
        while not self._stopping.wait(random.uniform(*_PEEK_S)):
            self.collector.peek()
            now_s = time.monotonic()
            if now_s >= due_s:
                due_s = max(due_s + self._interval_s, now_s)
                if self._workers:
                    self.collector.take(now_s, t=self._t(now_s))


def _device(worker: WatchedWorker) -> str:
    """UUID of its GPU; "" where it has not told of one."""
    told = worker.description.get("device")
    return str(told.get("id", "")) if isinstance(told, Mapping) else ""


def _seconds(value: object) -> float | None:
    """None for what is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value)
