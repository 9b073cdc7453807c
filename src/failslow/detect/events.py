"""What the detector says.

    DetectEvent(kind="onset", index=1212, first_index=1200, slowdown=1.40, base_log_s=-0.56,
                confidence=0.999)

Order of kinds for one fail-slow: suspected, then cleared or onset; level (any number); relief. A
relief that begins where its onset did takes the onset back, and a run (of another configuration)
ends whatever is on: what follows does not compare.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["DetectEvent", "EventKind"]

EventKind = Literal["suspected", "cleared", "onset", "level", "relief", "speedup", "run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectEvent:
    """Something the detector says. Indices count records from 0 in the order they came."""

    kind: EventKind
    index: int
    """The record at which it was said."""
    first_index: int
    """The record at which it began."""
    slowdown: float
    """New level over healthy; for "speedup" new level over old."""
    base_log_s: float
    """Log of the healthy iteration time at the reference work."""
    confidence: float = 0.0
    gradual: bool = False
    """No single change point: drift, or bursts."""
    note: str = ""
