"""Samples one node's telemetry where it is started (in the node's network namespace).

Prints "ready" after the first sample, then the report's body for each line of standard input.
"""

from __future__ import annotations

import json
import sys
import time
from types import SimpleNamespace
from typing import Any

from failslow.pipeline import Order
from failslow.runtime.duty_telemetry import TelemetryDuty


def main(node: str, job: str, interval_s: str, *workers: str) -> None:
    """workers: "RANK:PID" each."""
    duty = TelemetryDuty(node=node, job=job, interval_s=float(interval_s))
    watched: list[Any] = []
    epoch_s = time.time() - time.monotonic()
    for worker in workers:
        rank, pid = map(int, worker.split(":"))
        about = {"rank": rank, "pid": pid, "ended": False, "description": {}}
        watched.append(SimpleNamespace(**about, to_epoch_s=lambda ns: epoch_s + ns / 1e9))
    list(duty.turn(watched, time.monotonic()))
    while not len(duty.collector.window().t):
        time.sleep(0.01)
    print("ready", flush=True)
    for line in sys.stdin:
        duty.order(Order(topic="telemetry", body=json.loads(line)), time.monotonic())
        (report,) = duty.turn(watched, time.monotonic())
        print(json.dumps({"node": report.node, **report.body}), flush=True)
    duty.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
