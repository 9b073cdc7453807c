"""What sampling a node's telemetry costs.

    python -m benchmarks.telemetry_cost [--workers 8] [--threads 60] [--samples 30] [--json]

Starts real processes with so many threads each, a third of them busy now and then, and a TCP
connection each; takes samples of everything this machine has, once a second, and prints the
processor time of one sample, by part, and the size of a report. NVML and RDMA cost nothing where
they are not.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from failslow.telemetry.collect import Collector, node_samplers

_WORKER = """
import socket, sys, threading, time
count = int(sys.argv[1])
server = socket.create_server(("127.0.0.1", 0))
near = socket.create_connection(server.getsockname())
far, _ = server.accept()
def work(i):
    while True:
        if i % 3 == 0:
            sum(range(2000))
        time.sleep(0.5)
for i in range(count):
    threading.Thread(target=work, args=(i,), daemon=True).start()
print("up", flush=True)
while True:
    near.sendall(b"x" * 1000)
    far.recv(1000)
    time.sleep(0.1)
"""


@dataclass
class Cost:
    """Milliseconds of processor time; the limit is 5 a sample at one sample a second."""

    workers: int
    threads: int
    series: int
    sample_ms: float
    """Median of one sample of everything..."""
    fastest_ms: float
    """...the fastest, which what else runs here has hindered least..."""
    slowest_ms: float
    """...and the slowest."""
    parts_ms: dict[str, float]
    """Medians by sampler."""
    peek_ms: float
    """One look whether workers are stopped; about 20 a second."""
    report_ms: float
    report_bytes: int


def measure(workers: int, threads: int, samples: int, interval_s: float) -> Cost:
    """Costs of this process's own thread, so that what else the machine does hardly counts."""
    with ExitStack() as ending:
        pids = {}
        for rank in range(workers):
            process = subprocess.Popen(
                [sys.executable, "-c", _WORKER, str(threads)], stdout=subprocess.PIPE
            )
            ending.callback(process.communicate)
            ending.callback(process.kill)
            assert process.stdout is not None
            process.stdout.readline()
            pids[rank] = process.pid
        every = node_samplers(lambda: pids)
        parts: dict[str, list[float]] = {type(s).__name__: [] for s in every}
        collector = Collector(every, keep=600)
        collector.take(time.monotonic(), t=time.time())
        whole, peeks = [], []
        for _ in range(samples):
            time.sleep(interval_s)
            begin = time.thread_time()
            collector.take(time.monotonic(), t=time.time())
            whole.append(time.thread_time() - begin)
            begin = time.thread_time()
            collector.peek()
            peeks.append(time.thread_time() - begin)
        for _ in range(samples):
            time.sleep(interval_s / 10)
            for sampler in every:
                begin = time.thread_time()
                sampler.sample(time.monotonic())
                parts[type(sampler).__name__].append(time.thread_time() - begin)
        begin = time.thread_time()
        body = collector.report(since_t=None, until_t=None, interval_s=interval_s)
        report_s = time.thread_time() - begin
        return Cost(
            workers=workers,
            threads=threads,
            series=len(collector.window().series),
            sample_ms=_ms(statistics.median(whole)),
            fastest_ms=_ms(min(whole)),
            slowest_ms=_ms(max(whole)),
            parts_ms={name: _ms(statistics.median(times)) for name, times in parts.items()},
            peek_ms=_ms(statistics.median(peeks)),
            report_ms=_ms(report_s),
            report_bytes=len(json.dumps(body)),
        )


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)


def main(
    workers: Annotated[int, typer.Option(help="Worker processes.")] = 8,
    threads: Annotated[int, typer.Option(help="Threads of each.")] = 60,
    samples: Annotated[int, typer.Option(help="How many samples to time.")] = 30,
    interval: Annotated[float, typer.Option(help="Seconds between them.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Print what a sample costs."""
    cost = measure(workers, threads, samples, interval)
    if as_json:
        print(json.dumps(asdict(cost)))
        return
    print(f"{cost.workers} workers of {cost.threads} threads, {cost.series} series")
    print(
        f"one sample   median {cost.sample_ms:.2f} ms, fastest {cost.fastest_ms:.2f}, slowest "
        f"{cost.slowest_ms:.2f}"
    )
    for name, part_ms in cost.parts_ms.items():
        print(f"  {name:20} {part_ms:.2f} ms")
    share = 100 * (cost.sample_ms / interval + 20 * cost.peek_ms) / 1000
    print(f"one peek     {cost.peek_ms:.3f} ms; together {share:.2f} % of a core")
    print(f"a report     {cost.report_ms:.1f} ms, {cost.report_bytes:,} bytes")


if __name__ == "__main__":
    typer.run(main)
