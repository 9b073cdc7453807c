"""Messages between agents and controller: pipeline events and orders <-> JSON.

In: `AgentBeat`s, `WorkerSamples`, `Report`s, `Order`s. Out: bytes for `Endpoint.publish`, and back:

    {"beat":{"node":"gpu-17","session":81,"workers":[{"rank":3,"worker":"41822-991",…}]}}
    {"samples":{"node":"gpu-17","session":81,"rank":3,"worker":"41822-991","counted":true,
     "told":false,"rows":[[812,0.0601,1745735301.2,1,66560.0,0.0512,2,0,0],…]}}
    {"report":{"node":"gpu-17","rank":3,"topic":"profile","body":{…}}}
    {"order":{"topic":"profile","body":{"for_s":20.0},"node":""}}

What an agent says in one turn goes together, as a list: its node's eight workers end an iteration
at the same time, and those of a thousand nodes would fill the controller's topic with each.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from failslow.errors import TransportError
from failslow.pipeline import AgentBeat, Order, Report, WorkerSamples, WorkerState
from failslow.records import StepSample

__all__ = [
    "AGENTS",
    "NEWS",
    "ORDERS",
    "bundle",
    "decode",
    "decode_order",
    "encode_beat",
    "encode_order",
    "encode_report",
    "encode_samples",
]

AGENTS = "agents"
"""Topic on which agents report."""
NEWS = "news"
"""Topic on which the controller repeats what it journals of the job's state."""
ORDERS = "orders"
"""Topic on which the controller gives orders; agents take those for all and for their node."""
_ROWS = 1000
"""Samples in a message: about 100 bytes each, well under the transport's limit."""
_BUNDLE_BYTES = 128 * 1024


def encode_beat(beat: AgentBeat) -> bytes:
    """One message."""
    return _dump({"beat": asdict(beat)})


def encode_samples(event: WorkerSamples) -> Iterator[bytes]:
    """Messages of at most a thousand samples each."""
    head = {
        "node": event.node,
        "session": event.session,
        "rank": event.rank,
        "worker": event.worker,
        "counted": event.counted,
        "told": event.told,
    }
    rows = [
        (
            s.step,
            s.duration_s,
            s.end_s,
            s.iterations,
            s.work,
            s.compute_s,
            s.calls,
            s.foreign_calls,
            s.run,
        )
        for s in event.samples
    ]
    for begin in range(0, len(rows), _ROWS):
        yield _dump({"samples": {**head, "rows": rows[begin : begin + _ROWS]}})


def encode_report(report: Report) -> bytes:
    """One message. Raises TransportError when the body has no JSON form."""
    return _dump({"report": asdict(report)})


def encode_order(order: Order) -> bytes:
    """One message. Raises TransportError when the body has no JSON form."""
    return _dump({"order": asdict(order)})


def decode_order(payload: bytes) -> Order | None:
    """The order; None when it is none that this version understands."""
    try:
        order = json.loads(payload)["order"]
        topic, body, node = order["topic"], order["body"], order["node"]
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    if not (isinstance(topic, str) and isinstance(body, dict) and isinstance(node, str)):
        return None
    return Order(topic=topic, body=body, node=node)


def bundle(payloads: Iterable[bytes]) -> Iterator[bytes]:
    """What `encode_…` made, in the same order in fewer messages."""
    parts: list[bytes] = []
    size_bytes = 0
    for payload in payloads:
        if parts and size_bytes + len(payload) > _BUNDLE_BYTES:
            yield _joined(parts)
            parts, size_bytes = [], 0
        parts.append(payload)
        size_bytes += len(payload) + 1
    if parts:
        yield _joined(parts)


def _joined(parts: list[bytes]) -> bytes:
    return parts[0] if len(parts) == 1 else b"[%b]" % b",".join(parts)


def decode(payload: bytes) -> list[AgentBeat | WorkerSamples | Report]:
    """The events of a message, in order, without those this version does not understand."""
    try:
        found = json.loads(payload)
    except ValueError:
        return []
    messages = found if isinstance(found, list) else [found]
    return [event for one in messages if (event := _event(one)) is not None]


def _event(message: Any) -> AgentBeat | WorkerSamples | Report | None:
    try:
        if "report" in message:
            report = Report(**message["report"])
            return report if isinstance(report.body, dict) else None
        if "beat" in message:
            beat = message["beat"]
            workers = tuple(WorkerState(**state) for state in beat.pop("workers"))
            return AgentBeat(**beat, workers=workers)
        event = message["samples"]
        samples = tuple(_sample(row) for row in event.pop("rows"))
        return WorkerSamples(**event, samples=samples)
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def _sample(row: list[Any]) -> StepSample:
    step, duration_s, end_s, iterations, work, compute_s, calls, foreign_calls, run = row
    if not (0 < duration_s < math.inf and iterations >= 1 and math.isfinite(end_s)):
        raise ValueError(f"no sample: {row}")
    return StepSample(
        step=step,
        duration_s=duration_s,
        end_s=end_s,
        iterations=iterations,
        work=work,
        compute_s=compute_s,
        calls=calls,
        foreign_calls=foreign_calls,
        run=run,
    )


def _dump(message: dict[str, Any]) -> bytes:
    try:
        return json.dumps(message, separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        raise TransportError(f"a message has no JSON form: {error}; use plain values") from None
