"""A job's controller: hosts the bus, feeds the pipeline, writes the journal.

In: `--worker PID-TICKS --launch ID` and the job's environment, then the agents' messages. Out:
`journal.jsonl` in the run's folder. It ends when rank 0's worker has and no agent is left; killed
and started again, it goes on from the journal.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from failslow.capture.origin import worker_lives
from failslow.config import DetectConfig, LocalizeConfig, RuntimeConfig, load_config, load_decide
from failslow.errors import (
    ConfigError,
    FailslowError,
    JournalError,
    MessageTooLargeError,
    TransportError,
)
from failslow.journal import JournalEntry, JournalWriter, decode_entry, encode_entry
from failslow.pipeline import (
    BusReport,
    Instruction,
    Order,
    Pipeline,
    Report,
    Say,
    Tick,
    Write,
)
from failslow.records import Decision
from failslow.runtime.acts import take_order
from failslow.runtime.folder import RunFolder
from failslow.runtime.rendezvous import Meeting, is_loopback, meeting
from failslow.runtime.restart import RESTARTED
from failslow.runtime.slurm import Allocation, advised, read_allocation
from failslow.runtime.supervise import StepBack
from failslow.runtime.transport import Endpoint, from_url
from failslow.runtime.wire import AGENTS, NEWS, ORDERS, decode, encode_order

__all__ = ["Controller", "main", "read_tail"]

_TURN_S = 0.2
_REPORT_S = 1.0
_GRACE_S = 5.0
_TAIL_BYTES = 16 << 20
_CAPACITY = 4096
_NEWS_KINDS = ("suspicion", "episode", "health")
"""What agents show as metrics; profiles and results of a large job would be no message at all."""
_SKEW_S = 30.0
"""By how much the clocks of nodes may differ."""


class _Server(Protocol):
    url: str

    def close(self) -> None: ...


class Controller:
    """The loop's body; `turn` waits for messages and does what they ask."""

    def __init__(
        self,
        *,
        worker: str,
        pipeline: Pipeline,
        endpoint: Endpoint,
        journal: JournalWriter,
        slurm: tuple[Allocation, str] | None = None,
    ) -> None:
        """slurm: the job's allocation, and the setting of what may be done with it."""
        self._worker, self._slurm = worker, slurm
        self._pipeline, self._endpoint, self._journal = pipeline, endpoint, journal
        self._report_s = 0.0
        self._idle_since_s: float | None = None

    def start(self, entries: Iterable[JournalEntry], now_s: float, *, restarted: str = "") -> None:
        """Begin, or go on from what the journal says. restarted: see `restart.RESTARTED`."""
        self._do(self._pipeline.start(entries, now_s))
        starts, _, order = restarted.partition(" ")
        if starts.isdecimal() and order:
            record = {"what": "restarted", "id": order, "starts": int(starts)}
            self._do([Write(kind="action", record=record, t=now_s)])

    def turn(self, clock: SteadyClock) -> bool:
        """Take what comes within a fifth of a second; False when the job has ended."""
        for message in self._endpoint.poll(AGENTS, _TURN_S):
            for event in decode(message.payload):
                self._do(self._pipeline.handle(event, clock.now_s()))
        now_s = clock.now_s()
        if now_s - self._report_s >= _REPORT_S:
            self._report_s = now_s
            self._take_orders(now_s)
            health = self._endpoint.health()
            report = BusReport(
                refused=health.refused,
                stale=health.stale,
                missed=health.missed,
                outage_s=health.transport.outage_s,
            )
            self._do(self._pipeline.handle(report, now_s))
        self._do(self._pipeline.handle(Tick(), now_s))
        return self._has_job(now_s)

    def _take_orders(self, now_s: float) -> None:
        """A person overrides the policy."""
        order = take_order(self._journal.path.parent)
        if order is not None:
            self._do([Write(kind="action", record={"what": "act", **order}, t=now_s)])
            report = Report(node="", topic="act", body={"order": order["order"]})
            self._do(self._pipeline.handle(report, now_s))

    def end(self, now_s: float) -> None:
        """Write the last records."""
        self._do(self._pipeline.finish(now_s))
        self._endpoint.close(1.0)
        self._journal.close()

    def _has_job(self, now_s: float) -> bool:
        """Whether rank 0 lives or any agent is at work."""
        if worker_lives(self._worker) or self._pipeline.health.watching:
            self._idle_since_s = None
        elif self._idle_since_s is None:
            self._idle_since_s = now_s
        # of several nodes the first agents may be about to report
        grace_s = 0.0 if self._pipeline.health.agents else _GRACE_S
        return self._idle_since_s is None or now_s - self._idle_since_s < grace_s

    def _do(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Say):
                _say(instruction.text)
                continue
            if isinstance(instruction, Order):
                self._publish(ORDERS, encode_order(instruction))
                continue
            record, t, kind, tags = (
                instruction.record,
                instruction.t,
                instruction.kind,
                instruction.tags,
            )
            if not self._journal.append(record, t=t, kind=kind, **tags):
                health = self._journal.health
                if health.dropped & (health.dropped - 1) == 0:  # 1, 2, 4, 8 ...
                    _say(f"{health.dropped} journal lines lost: {health.last_error}")
            if kind in _NEWS_KINDS:
                self._publish(NEWS, encode_entry(record, t=t, kind=kind, **tags))
            if isinstance(record, Decision) and self._slurm is not None:
                self._show_commands(record, *self._slurm, t)

    def _publish(self, topic: str, payload: bytes) -> None:
        try:
            self._endpoint.publish(topic, payload)
        except MessageTooLargeError as error:  # it costs this message, not the watching
            _say(str(error))

    def _show_commands(
        self, decision: Decision, allocation: Allocation, setting: str, now_s: float
    ) -> None:
        """What an administrator may want to type, or `failslow run` will."""
        line = advised(decision, allocation, setting)
        if line is not None:
            self._do([Write(kind="action", record=line, t=now_s)])
            how = "will be told" if line["run"] else "may be told"
            text = "; ".join(line["commands"]) or line["error"]
            _say(f"Slurm {how}: {text}")


class SteadyClock:
    """Epoch seconds that never go back, whatever happens to the system's clock.

    A clock that is set forward is followed, for whoever reads the journal goes by it; at five times
    the pace of time, so that nobody seems to have been silent all the while.
    """

    _AHEAD_S, _CATCH_UP = 5.0, 4.0

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wall, self._steady = wall, steady
        self._seen_s = steady()
        self._offset_s = wall() - self._seen_s

    def now_s(self) -> float:
        """Epoch seconds."""
        steady_s = self._steady()
        ahead_s = self._wall() - steady_s - self._offset_s
        if ahead_s > self._AHEAD_S:
            passed_s = min(1.0, steady_s - self._seen_s)
            self._offset_s += min(ahead_s, self._CATCH_UP * passed_s)
        self._seen_s = steady_s
        return steady_s + self._offset_s


def main(argv: Sequence[str] | None = None) -> int:
    """Run until the job has ended; the exit code."""
    parser = argparse.ArgumentParser(prog="failslow.runtime.controller")
    parser.add_argument("--worker", required=True)
    parser.add_argument("--launch", required=True)
    options = parser.parse_args(argv)
    environ = os.environ
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    job = environ["FAILSLOW_JOB"]
    journal = JournalWriter(Path(environ["FAILSLOW_DIR"]) / "journal.jsonl")
    try:
        runtime = load_config("runtime", RuntimeConfig, environ=environ)
        detect = load_config("detect", DetectConfig, environ=environ)
        decide = load_decide(environ)
        localize = load_config("localize", LocalizeConfig, environ=environ)
        allocation = _allocation(environ)
        folder = RunFolder.given(environ)
        meet = meeting(job, environ)
        token = folder.token()
        server, url = _open_bus(meet, folder)
        endpoint = Endpoint(from_url(url), job=job, sender="controller", token=token)
    except FailslowError as error:
        record = {"what": "controller", "ok": False, "event": "refused", "launch": options.launch}
        record["message"] = f"the job is not watched: {error}"
        journal.append(record, t=time.time(), kind="health")
        _say(str(error))
        return 1
    pipeline = Pipeline(
        launch=options.launch,
        detect=detect,
        runtime=runtime,
        decide=decide,
        localize=localize,
        # a bus that outlives the job may hold messages of an earlier start of it
        since_t=_started_t(options.launch) - _SKEW_S if meet.serve is None else 0.0,
        alone=meet.alone,
    )
    clock = SteadyClock()
    controller = Controller(
        worker=options.worker,
        pipeline=pipeline,
        endpoint=endpoint,
        journal=journal,
        slurm=(allocation, decide.slurm) if allocation is not None else None,
    )
    restarted = environ.get(RESTARTED, "")
    controller.start(read_tail(journal.path), clock.now_s(), restarted=restarted)
    step_back = StepBack(time.monotonic())
    while controller.turn(clock) and not stopping.is_set():
        at_work = bool(pipeline.health.agents)
        step_back.look(time.monotonic(), at_work=at_work, urgent=pipeline.urgent)
    controller.end(clock.now_s())
    if server is not None:
        server.close()
    return 0


def _allocation(environ: Mapping[str, str]) -> Allocation | None:
    """The Slurm job this is; a list of nodes that makes no sense costs the advice only."""
    try:
        return read_allocation(environ)
    except ConfigError as error:
        _say(str(error))
        return None


def _open_bus(meet: Meeting, folder: RunFolder) -> tuple[_Server | None, str]:
    """The server, if it is ours to run, and the address to connect to. Raises FailslowError."""
    if meet.serve is None:
        assert meet.url is not None
        return None, meet.url
    _refuse_taken(meet.serve)
    from failslow.runtime.transport.tcpstore import serve

    former = folder.read("address") if meet.url is None else None
    try:
        # agents that know the old address need not look for another
        server = serve(former or meet.serve, capacity=_CAPACITY)
    except TransportError:
        if former is None:
            raise
        server = serve(meet.serve, capacity=_CAPACITY)
    if meet.url is None:
        try:
            folder.write("address", server.url)
        except OSError as error:
            raise TransportError(
                f"{folder.path}: the address cannot be kept there: {error}; free space there"
            ) from None
    return server, server.url


def _refuse_taken(url: str) -> None:
    """Raise TransportError if nobody could listen there; sooner than torch, slow to import, would.

    Whoever had the port may be about to leave: the supervisor tries again.
    """
    parts = urlsplit(url)
    try:
        address = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(address[0], socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address[4])
    except (OSError, ValueError) as error:
        raise TransportError(
            f"{url}: cannot listen there: {getattr(error, 'strerror', None) or error}; set "
            "FAILSLOW_TRANSPORT on all nodes to tcpstore://HOST:PORT with an address of rank 0's "
            "machine and a free port"
        ) from None
    if ip_address(address[4][0]).is_loopback and not is_loopback(str(parts.hostname)):
        raise TransportError(
            f"{url}: {parts.hostname} is loopback on its own machine, where no other node can "
            "connect; set MASTER_ADDR to its address, or FAILSLOW_TRANSPORT on all nodes to "
            "tcpstore://ADDRESS:PORT"
        )


def read_tail(path: Path, max_bytes: int = _TAIL_BYTES) -> Iterator[JournalEntry]:
    """The last entries of a journal, oldest first, from its last file and the one before."""
    pieces: list[bytes] = []
    left = max_bytes
    for part in (path, path.with_name(f"{path.name}.1")):
        try:
            with part.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - left))
                pieces.insert(0, file.read())
        except OSError:
            break
        left -= len(pieces[0])
        if left <= 0:
            break
    for line in b"".join(pieces).splitlines():
        with contextlib.suppress(JournalError):  # the first one is cut
            yield decode_entry(line)


def _started_t(launch: str) -> float:
    """Epoch seconds at which the process PID-TICKS started."""
    ticks = int(launch.partition("-")[2])
    for line in Path("/proc/stat").read_text().splitlines():
        if line.startswith("btime "):
            return int(line.split()[1]) + ticks / os.sysconf("SC_CLK_TCK")
    return 0.0


def _say(text: str) -> None:
    print(f"failslow controller: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
