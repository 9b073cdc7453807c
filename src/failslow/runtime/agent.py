"""A node's agent: reads its workers' rings, times their iterations, reports to the controller.

In: `--worker PID-TICKS --launch ID` and the job's environment. Out: messages (`wire.py`) on the
job's bus, `/metrics` if FAILSLOW_METRICS_PORT is set, and, when the controller is not to be
reached, a line in `agent-<node>.jsonl` in the run's folder. It ends when its workers have.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import secrets
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from failslow.capture.origin import worker_lives
from failslow.capture.ring import remove_stale
from failslow.config import RuntimeConfig, TelemetryConfig, TrackConfig, load_config
from failslow.errors import FailslowError, JournalError
from failslow.journal import JournalWriter, decode_entry
from failslow.pipeline import AgentBeat
from failslow.records import StepSample
from failslow.runtime.bus import Bus
from failslow.runtime.duties import Duty
from failslow.runtime.duty_pause import PauseDuty
from failslow.runtime.duty_profile import ProfileDuty
from failslow.runtime.duty_restart import RestartDuty
from failslow.runtime.duty_steer import SteerDuty
from failslow.runtime.duty_telemetry import TelemetryDuty
from failslow.runtime.folder import RunFolder, remove_stale_folders
from failslow.runtime.metrics import Metrics
from failslow.runtime.node import Follower, NodeWatch
from failslow.runtime.rendezvous import Meeting, given_name, meeting, node_name
from failslow.runtime.rings import OwnRings
from failslow.runtime.supervise import StepBack
from failslow.runtime.transport import MAX_PAYLOAD_BYTES, Endpoint, from_url
from failslow.runtime.transport.base import check_size
from failslow.runtime.wire import (
    AGENTS,
    NEWS,
    ORDERS,
    bundle,
    decode_order,
    encode_beat,
    encode_report,
    encode_samples,
)

__all__ = ["Agent", "main"]

_BEAT_S = 1.0
_DISCOVER_S = 0.5
_LINGER_S = 2.0
_FLUSH_S = 3.0
_NO_TOKEN = (
    "FAILSLOW_TOKEN is not set, which jobs of several nodes need; set it to the same secret on all "
    "nodes, or start the job by failslow run"
)


class Agent:
    """The loop's body; `turn` does what is due.

    worker: who brought the agent up; it stays at least as long as that process lives. since_t:
    epoch seconds; older orders to act were another agent's, and the bus may keep them for minutes.
    """

    def __init__(
        self,
        *,
        node: str,
        worker: str,
        watch: NodeWatch,
        session: int,
        bus: Bus,
        journal: JournalWriter,
        blind_after_s: float,
        metrics: Metrics | None = None,
        duties: Sequence[Duty] = (),
        since_t: float = 0.0,
    ) -> None:
        self._since_t = since_t
        self._node, self._worker, self._session = node, worker, session
        self._watch, self._bus, self._journal, self._metrics = watch, bus, journal, metrics
        self._blind_after_s = blind_after_s
        self._duties = {duty.topic: duty for duty in duties}
        self._failed: set[str] = set()
        self._said: list[bytes] = []
        """In this turn: what is about to be sent."""
        self._beat_s = self._discover_s = -1e9
        self._idle_since_s: float | None = None
        self._blind = False

    def turn(self, now_s: float) -> bool:
        """Do what is due at `now_s` (monotonic); False when there is nothing left to watch."""
        self._bus.tend()
        found = False
        if now_s - self._discover_s >= _DISCOVER_S:
            self._discover_s = now_s
            found = self._watch.discover()
            self._look_after(now_s)
        if found or now_s - self._beat_s >= _BEAT_S:
            self._beat(now_s)  # a worker is announced before its samples come
        for event in self._watch.read():
            self._said += encode_samples(event)
            if self._metrics is not None:
                for sample in event.samples:
                    self._observe(sample, event.rank)
        self._do_duties(now_s)
        self._send()
        return self._idle_since_s is None or now_s - self._idle_since_s < _LINGER_S

    def _do_duties(self, now_s: float) -> None:
        workers = self._watch.workers
        for message in self._bus.poll(ORDERS):
            order = decode_order(message.payload)
            duty = self._duties.get(order.topic) if order is not None else None
            if duty is not None and duty.acts and message.sent_s < self._since_t:
                continue  # only those: the controller's clock may be behind this node's
            if order is not None and duty is not None and order.node in ("", self._node):
                self._guard(duty, partial(duty.order, order, now_s))
        for worker in workers:
            for letter in worker.mailbox.receive() if worker.mailbox else ():
                duty = self._duties.get(str(letter.get("topic")))
                if duty is not None:
                    self._guard(duty, partial(duty.letter, worker, letter, now_s))
        for duty in self._duties.values():
            self._guard(duty, partial(self._do, duty, workers, now_s))

    def _do(self, duty: Duty, workers: Sequence[Follower], now_s: float) -> None:
        for worker in workers:
            duty.observe(worker)
        for report in duty.turn(workers, now_s):
            payload = encode_report(report)
            check_size(AGENTS, len(payload), MAX_PAYLOAD_BYTES)
            self._said.append(payload)

    def _send(self) -> None:
        said, self._said = self._said, []
        for payload in bundle(said):
            self._bus.publish(AGENTS, payload)

    def _guard(self, duty: Duty, action: Callable[[], None]) -> None:
        """A duty's fault must not end the watching."""
        try:
            action()
        except Exception as error:
            if repr(error) not in self._failed:
                self._failed.add(repr(error))
                where = "".join(traceback.format_tb(error.__traceback__)[-1:]).strip()
                _say(f"{duty.topic}: {error!r} {where}")

    def pace_s(self, usual_s: float) -> float:
        """How soon the next turn shall come: as usual, unless a duty is in a hurry."""
        return min([usual_s, *(duty.pace_s for duty in self._duties.values())])

    @property
    def urgent(self) -> bool:
        """Whether a duty is."""
        return any(duty.urgent for duty in self._duties.values())

    def leave(self) -> None:
        """Say good-bye and send what waits."""
        for duty in self._duties.values():
            self._guard(duty, duty.close)
        self._beat(0.0, leaving=True)
        self._send()
        self._bus.close(_FLUSH_S)

    def _beat(self, now_s: float, *, leaving: bool = False) -> None:
        self._beat_s = now_s
        states = self._watch.states
        beat = AgentBeat(node=self._node, session=self._session, workers=states, leaving=leaving)
        self._said.append(encode_beat(beat))
        if self._metrics is not None:
            for state in states:
                self._metrics.ring(
                    state.rank,
                    records=state.records,
                    dropped=state.lost_records,
                    faults=state.faults,
                )
                if not state.alive:
                    self._metrics.forget(state.rank)

    def _look_after(self, now_s: float) -> None:
        """Whether anything is left to watch, and whether anybody hears."""
        if self._watch.alive or worker_lives(self._worker):
            self._idle_since_s = None
        elif self._idle_since_s is None:
            self._idle_since_s = now_s
        outage_s, why = self._bus.outage()
        blind = outage_s > self._blind_after_s
        if blind != self._blind:
            self._blind = blind
            message = (
                f"node {self._node} reports to nobody: {why or 'no answer'}; training is not "
                "affected"
                if blind
                else f"node {self._node} reports again"
            )
            record = {"what": "bus", "ok": not blind, "node": self._node, "message": message}
            self._journal.append(record, t=time.time(), kind="health")
            _say(message)
        if self._metrics is not None:
            for message_ in self._bus.poll(NEWS):
                with contextlib.suppress(JournalError):  # of a newer failslow
                    self._metrics.observe(decode_entry(message_.payload))

    def _observe(self, sample: StepSample, rank: int) -> None:
        assert self._metrics is not None
        self._metrics.observe(sample, t=sample.end_s, rank=rank, node=self._node)


def main(argv: Sequence[str] | None = None) -> int:
    """Run until the node's workers have ended; the exit code."""
    parser = argparse.ArgumentParser(prog="failslow.runtime.agent")
    parser.add_argument("--worker", required=True)
    parser.add_argument("--launch", required=True)
    options = parser.parse_args(argv)
    environ, since_t = os.environ, time.time()
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    job, node = environ["FAILSLOW_JOB"], node_name(environ)
    try:
        runtime = load_config("runtime", RuntimeConfig, environ=environ)
        track = load_config("track", TrackConfig, environ=environ)
        telemetry = load_config("telemetry", TelemetryConfig, environ=environ)
        folder = RunFolder.given(environ)
        meet = meeting(job, environ)
        token = folder.token()
    except FailslowError as error:
        _say(str(error))
        return 1
    session = secrets.randbits(48)
    metrics = Metrics(job=job, node=node) if environ.get("FAILSLOW_METRICS_PORT") else None
    watch = NodeWatch(
        node=node,
        session=session,
        find=OwnRings.given(environ),
        config=track,
        say=_say,
    )
    file = re.sub(r"[^A-Za-z0-9_.-]+", "_", f"agent-{node}") + ".jsonl"
    bus = Bus(
        partial(_locate, meet, folder),
        lambda url: Endpoint(from_url(url), job=job, sender=node, token=token),
        **({"error": _NO_TOKEN} if meet.alone else {}),
    )
    agent = Agent(
        node=node,
        worker=options.worker,
        watch=watch,
        session=session,
        bus=bus,
        journal=JournalWriter(Path(environ["FAILSLOW_DIR"]) / file),
        blind_after_s=runtime.blind_after_s,
        metrics=metrics,
        duties=[
            ProfileDuty(node=node, named=bool(given_name(environ))),
            RestartDuty(node, Path(environ["FAILSLOW_DIR"])),
            PauseDuty(node),
            SteerDuty(node),
            TelemetryDuty(
                node=node,
                job=job,
                say=_say,
                interval_s=telemetry.interval_s,
                record_s=telemetry.record_s,
            ),
        ],
        since_t=since_t,
    )
    server = metrics.serve() if metrics is not None else None
    step_back = StepBack(time.monotonic())
    while agent.turn(time.monotonic()) and not stopping.wait(agent.pace_s(runtime.poll_s)):
        step_back.look(time.monotonic(), at_work=bus.ready, urgent=agent.urgent)
    agent.leave()
    remove_stale(environ)
    remove_stale_folders(environ)
    if server is not None:
        server.close()
    return 0


def _locate(meet: Meeting, folder: RunFolder) -> str | None:
    return meet.url or folder.read("address")


def _say(text: str) -> None:
    print(f"failslow agent: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
