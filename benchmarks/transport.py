"""What the message bus costs: throughput, and a thousand agents on one server.

    python -m benchmarks.transport [--agents 1000] [--seconds 10] [--only tcpstore] [--json]

Prints for each transport: messages a second from one sender to one reader; then, with every agent
sending one message a second and listening for instructions, the server's share of a core, that of
all agents together, the latency from publish to poll, that of an instruction to every agent, and
how many messages were lost. The server has a process of its own; the agents share four, a thread
each (Python's lock would throttle them in one). Memory reaches no other process: its agents'
share is that of everything.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Annotated

import numpy as np
import psutil
import typer
from tests.transport.servers import (
    REDIS_SERVER,
    TOKEN,
    MemoryServer,
    ProcessServer,
    Server,
    redis_server,
    tcpstore_server,
    until,
)

from failslow.runtime.transport import Endpoint, Limits, from_url

__all__ = ["Cost", "main", "measure"]

PAYLOAD = json.dumps(
    {"t": 1745735250.9, "kind": "step", "node": "node-0123", "steps": [[120, 0.571, 0.31]] * 8}
).encode()
INTERVAL_S = 1.0
"""How often an agent looks for instructions; a thousand Python agents share one process here."""
PROCESSES = 4
LISTENERS = 10
"""Agents of each process that wait for the instruction: its latency is not that of their loop."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one transport did; shares are of one core, latencies from publish to poll."""

    transport: str
    messages_per_s: float
    agents: int
    sent: int
    lost: int
    server_core_pct: float | None
    agents_core_pct: float
    latency_p50_ms: float
    latency_p99_ms: float
    instruction_p50_ms: float
    instruction_p99_ms: float

    def __str__(self) -> str:
        server = "none" if self.server_core_pct is None else f"{self.server_core_pct:.1f} %"
        return (
            f"{self.transport}: {self.messages_per_s:,.0f} messages/s; {self.agents:,} agents "
            f"sent {self.sent:,}, {self.lost} lost; server {server}, agents "
            f"{self.agents_core_pct:.0f} % of a core; latency p50 {self.latency_p50_ms:.1f} ms, "
            f"p99 {self.latency_p99_ms:.1f} ms; instruction p50 {self.instruction_p50_ms:.0f} ms, "
            f"p99 {self.instruction_p99_ms:.0f} ms"
        )


@dataclass(frozen=True)
class _Crowd:
    """Agents that share a process (or with the memory transport, this one)."""

    member: threading.Thread | multiprocessing.process.BaseProcess
    go: Event
    done: Event
    pipe: Connection
    """Brings the process id once all agents are connected, then the instruction's latencies."""


@dataclass(frozen=True)
class _Load:
    url: str
    first: int
    agents: int
    seconds: int


def main(
    agents: int = 1_000,
    seconds: int = 10,
    messages: Annotated[int, typer.Option(help="Sent for the throughput.")] = 20_000,
    only: str = "",
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Measure the transports and print one line each."""
    os.environ |= {"TORCH_CPP_LOG_LEVEL": "FATAL", "RES_OPTIONS": "timeout:1 attempts:1"}
    for kind in [only] if only else ["memory", "tcpstore", "redis"]:
        if kind == "redis" and REDIS_SERVER is None:
            print("redis: redis-server is not installed: apt-get install redis-server")
            continue
        with tempfile.TemporaryDirectory() as folder:
            server = _serve(kind, Path(folder))
            try:
                cost = measure(kind, server, agents, seconds, messages)
            finally:
                server.close()
        print(json.dumps(asdict(cost)) if as_json else cost, flush=True)


def measure(kind: str, server: Server, agents: int, seconds: int, messages: int) -> Cost:
    """Throughput first, then `agents` of them for `seconds`."""
    rate = _throughput(server.url, messages)
    crowds = _start_crowds(kind, server.url, agents, seconds)
    controller = _endpoint(server.url, "load", "controller")
    controller.poll("steps", timeout_s=0.1)
    agent_processes = [psutil.Process(crowd.pipe.recv()) for crowd in crowds]  # once connected
    server_processes = (
        [psutil.Process(server.process.pid)] if isinstance(server, ProcessServer) else []
    )
    before = _core_s(server_processes), _core_s(agent_processes)
    began_s = time.monotonic()
    for crowd in crowds:
        crowd.go.set()
    latency_s: list[float] = []
    instructed = False
    while len(latency_s) < agents * seconds and time.monotonic() < began_s + seconds + 20:
        found = controller.poll("steps", timeout_s=0.5)
        now_s = time.time()
        latency_s += [now_s - message.sent_s for message in found]
        if not instructed and time.monotonic() > began_s + seconds / 2:
            controller.publish("instructions", b"pause")
            instructed = True
    wall_s = time.monotonic() - began_s
    server_s, agents_s = _core_s(server_processes) - before[0], _core_s(agent_processes) - before[1]
    for crowd in crowds:
        crowd.done.set()
    instruction_s = [latency for crowd in crowds for latency in crowd.pipe.recv()]
    for crowd in crowds:
        crowd.member.join(60)
    controller.close()
    latency = np.percentile(latency_s, [50, 99])
    instruction = np.percentile(instruction_s, [50, 99])
    return Cost(
        transport=kind,
        messages_per_s=rate,
        agents=agents,
        sent=agents * seconds,
        lost=agents * seconds - len(latency_s),
        server_core_pct=100 * server_s / wall_s if server_processes else None,
        agents_core_pct=100 * agents_s / wall_s,
        latency_p50_ms=1e3 * float(latency[0]),
        latency_p99_ms=1e3 * float(latency[1]),
        instruction_p50_ms=1e3 * float(instruction[0]),
        instruction_p99_ms=1e3 * float(instruction[1]),
    )


def _serve(kind: str, folder: Path) -> Server:
    if kind == "memory":
        return MemoryServer("benchmark")
    return tcpstore_server(folder, 65_536) if kind == "tcpstore" else redis_server(folder)


def _endpoint(url: str, job: str, sender: str) -> Endpoint:
    interval_s = INTERVAL_S if sender.startswith("node") else Limits().interval_s
    limits = Limits(capacity=65_536, backlog=65_536, interval_s=interval_s, stall_s=60)
    return Endpoint(from_url(url, limits), job=job, sender=sender, token=TOKEN)


def _core_s(processes: list[psutil.Process]) -> float:
    return float(sum(sum(process.cpu_times()[:2]) for process in processes))


def _throughput(url: str, messages: int) -> float:
    with _endpoint(url, "rate", "sender") as sender, _endpoint(url, "rate", "reader") as reader:
        sender.publish("steps", PAYLOAD)
        came = 0
        while came < 1:
            came += len(reader.poll("steps", timeout_s=1))
        began_s = time.monotonic()
        for _ in range(messages):
            sender.publish("steps", PAYLOAD)
        while came < messages + 1:
            came += len(reader.poll("steps", timeout_s=1))
            if time.monotonic() > began_s + 60:
                sys.exit(f"{url}: {messages + 1 - came} of {messages} messages did not come")
        return messages / (time.monotonic() - began_s)


def _start_crowds(kind: str, url: str, agents: int, seconds: int) -> list[_Crowd]:
    context = multiprocessing.get_context("spawn")
    edges = np.linspace(0, agents, (1 if kind == "memory" else PROCESSES) + 1).astype(int).tolist()
    crowds = []
    for first, last in itertools.pairwise(edges):
        go, done = context.Event(), context.Event()
        inside, outside = context.Pipe()
        arguments = (_Load(url, first, last - first, seconds), go, done, inside)
        member: threading.Thread | multiprocessing.process.BaseProcess
        if kind == "memory":
            member = threading.Thread(target=_run_agents, args=arguments)
        else:
            member = context.Process(target=_run_agents, args=arguments)
        member.start()
        crowds.append(_Crowd(member, go, done, outside))
    return crowds


def _run_agents(load: _Load, go: Event, done: Event, controller: Connection) -> None:
    agents = load.agents
    names = [f"node-{n}" for n in range(load.first, load.first + agents)]
    endpoints = [_endpoint(load.url, "load", name) for name in names]
    for agent in endpoints:
        agent.poll("instructions", timeout_s=0)
    until(lambda: all(agent.health().transport.connected for agent in endpoints), 120)
    instruction_s: list[float] = []

    def listen(agent: Endpoint) -> None:
        while not done.is_set():
            found = agent.poll("instructions", timeout_s=1)
            instruction_s.extend(time.time() - message.sent_s for message in found)

    listeners = [threading.Thread(target=listen, args=(agent,)) for agent in endpoints[:LISTENERS]]
    for thread in listeners:
        thread.start()
    controller.send(os.getpid())
    go.wait()
    began_s = time.monotonic()
    for turn, (_, agent) in enumerate(itertools.product(range(load.seconds), endpoints)):
        early_s = began_s + turn / agents - time.monotonic()
        if early_s > 0:
            time.sleep(early_s)
        agent.publish("steps", PAYLOAD)
    done.wait()
    for thread in listeners:
        thread.join()
    controller.send(instruction_s)
    for agent in endpoints:
        agent.close(linger_s=0)


if __name__ == "__main__":
    typer.run(main)
