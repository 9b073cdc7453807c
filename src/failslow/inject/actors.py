"""The processes that do harm for as long as they live: burner, stopper, sender, sink.

In: a command line from the guard. Out: one line on stdout once it works ("ready", or the port of a
sink), then the harm. Each ends when its guard is no longer its parent, so that not even SIGKILL of
the guard leaves one behind. Standard library only: they must start fast.

    python -c 'from failslow.inject.actors import main; main()' burn 4720 1 0.5
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress

__all__ = ["main"]

_PERIOD_S = 0.02
_LOOK_S = 0.05
"""How long an actor may go without looking for its guard."""
_UDP_SOCKET, _UDP_SEGMENT = 17, 103
_SEGMENT_BYTES = 1400
_SEGMENTS = 40


def _ready(text: str = "ready") -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _guarded(guard: int) -> bool:
    return os.getppid() == guard


def _burn(guard: int, core: str, load: str, group: str) -> None:
    """Use `load` of one core's time, as a member of control group `group` unless that is empty.

    Under contention it is what the scheduler gives.
    """
    os.sched_setaffinity(0, {int(core)})
    if group:
        with open(f"{group}/cgroup.procs", "w", encoding="ascii") as members:
            members.write(str(os.getpid()))
    share = float(load)
    _ready()
    while _guarded(guard):
        begin_s, busy_until_s = time.monotonic(), time.thread_time() + share * _PERIOD_S
        while time.thread_time() < busy_until_s:
            sum(range(2000))
        if share < 1.0:
            time.sleep(max(0.0, begin_s + _PERIOD_S - time.monotonic()))


def _stop(guard: int, pid: str, to: str) -> None:
    """Let `pid` run `to` of the time: stopped and continued 50 times a second."""
    target, stopped_share = int(pid), 1.0 - float(to)
    _be_punctual()
    _ready()
    try:
        begin_s, stopped_s = time.monotonic(), 0.0
        while _guarded(guard):
            time.sleep(_PERIOD_S * (1.0 - stopped_share))
            now_s = time.monotonic()
            # what is due by the end of this stop, so that late wake-ups even out
            due_s = (stopped_share * (now_s - begin_s) - stopped_s) / (1.0 - stopped_share)
            if due_s <= 0.0005:
                continue
            os.kill(target, signal.SIGSTOP)
            time.sleep(min(due_s, 10 * _PERIOD_S))
            os.kill(target, signal.SIGCONT)
            stopped_s += time.monotonic() - now_s
    except ProcessLookupError:
        return
    finally:
        with suppress(ProcessLookupError):
            os.kill(target, signal.SIGCONT)


def _be_punctual() -> None:
    """A late wake-up is made up for by a longer stop: 50 short ones must not become 5 long ones."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except OSError:
        with suppress(OSError):
            os.nice(-10)


def _sink(guard: int, host: str, protocol: str) -> None:
    """Take in what a sender sends, and throw it away."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    kind = socket.SOCK_DGRAM if protocol == "udp" else socket.SOCK_STREAM
    with socket.socket(family, kind) as port:
        port.bind((host, 0))
        if protocol == "udp":
            # nobody reads: the kernel drops what does not fit, at no cost to us
            _ready(str(port.getsockname()[1]))
            while _guarded(guard):
                time.sleep(_LOOK_S)
            return
        port.listen(64)
        _ready(str(port.getsockname()[1]))
        streams: list[socket.socket] = []
        buffer = bytearray(1 << 20)
        while _guarded(guard):
            readable = select.select([port, *streams], [], [], _LOOK_S)[0]
            for stream in readable:
                if stream is port:
                    streams.append(port.accept()[0])
                # with MSG_TRUNC the kernel discards instead of copying
                elif not stream.recv_into(buffer, 0, socket.MSG_TRUNC):
                    streams.remove(stream)
                    stream.close()


def _send(guard: int, host: str, port: str, protocol: str, amount: str) -> None:
    """Send to `host`. amount: "4x0" is four streams as fast as the path takes, "4x1000000" four
    that share a million bits a second."""
    udp = protocol == "udp"
    streams, rate_bits = amount.split("x")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    payload = memoryview(bytes(_SEGMENT_BYTES * _SEGMENTS))
    sockets = []
    for _ in range(int(streams)):
        link = socket.socket(family, socket.SOCK_DGRAM if udp else socket.SOCK_STREAM)
        if udp:
            try:  # one call for 40 packets
                link.setsockopt(_UDP_SOCKET, _UDP_SEGMENT, _SEGMENT_BYTES)
            except OSError:
                payload = payload[:_SEGMENT_BYTES]
        link.settimeout(5.0)
        link.connect((host, int(port)))
        link.setblocking(False)
        sockets.append(link)
    _ready()
    bytes_per_s = int(rate_bits) / 8
    begin_s, sent_bytes = time.monotonic(), 0.0
    while _guarded(guard):
        if bytes_per_s:
            due_bytes = (time.monotonic() - begin_s) * bytes_per_s - sent_bytes
            if due_bytes < len(payload):
                time.sleep(min(_LOOK_S, (len(payload) - due_bytes) / bytes_per_s))
                continue
            # what a congested path did not take is not made up for later
            sent_bytes += max(0.0, due_bytes - 64 * len(payload))
        for link in select.select([], sockets, [], _LOOK_S)[1]:
            # ECONNREFUSED: nobody listens there, which harms the path no less
            with suppress(BlockingIOError, ConnectionRefusedError):
                sent_bytes += link.send(payload)


_ACTS: dict[str, Callable[..., None]] = {
    "burn": _burn,
    "send": _send,
    "sink": _sink,
    "stop": _stop,
}


def main() -> None:
    """Act as the command line says; a failure to start is told in one line on stdout."""
    act, guard, *arguments = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the guard decides, not the terminal
    try:
        _ACTS[act](int(guard), *arguments)
    except (OSError, ValueError) as error:
        with suppress(OSError):
            _ready(f"failed: {error}")
        sys.exit(1)
