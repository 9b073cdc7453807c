"""What samplers share: their interface, counters turned into rates, files read for little.

>>> rates = Rates()
>>> rates.update("eth0/tx_bytes", 1000, now_s=10.0)      # nothing to compare to yet
>>> rates.update("eth0/tx_bytes", 3000, now_s=12.0)
1000.0
>>> rates.update("eth0/tx_bytes", 500, now_s=13.0)       # began anew: nobody knows how much
>>> rates.update("eth0/tx_bytes", 600, now_s=14.0)
100.0
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

__all__ = ["Rates", "Sampler", "read", "read_number"]


class Sampler(Protocol):
    """One source of numbers. It never raises for what is not there: that costs its numbers."""

    @property
    def missing(self) -> tuple[str, ...]:
        """What this machine, or this container, does not show; a sentence each."""
        ...

    def sample(self, now_s: float) -> Mapping[str, float]:
        """What is known at `now_s` (CLOCK_MONOTONIC seconds), by name; rates since the last call.

        Names carry units (`failslow.telemetry`); what is unknown now is left out.
        """
        ...


class Rates:
    """Counters in, units a second out. A counter may begin anew, or wrap around at 32 or 64 bits.

    It has wrapped when it fell from its last quarter to its first; any other fall is a new
    beginning, whose count before the first reading nobody knows: no rate rather than a wrong one.
    A counter that moves more than half its range between two readings cannot be told.
    """

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, float]] = {}

    def update(
        self, key: str, count: float, now_s: float, *, wrap_bits: int | None = None
    ) -> float | None:
        """Rate since the last reading of `key`; None at its first, or where it cannot be told.

        wrap_bits: where the counter wraps; None, never.
        """
        last = self._last.get(key)
        self._last[key] = (count, now_s)
        if last is None:
            return None
        moved, passed_s = count - last[0], now_s - last[1]
        if moved < 0:
            if wrap_bits is None:
                return None
            whole = 1 << wrap_bits
            if not (0.75 * whole <= last[0] < whole and count < 0.25 * whole):
                return None
            moved += whole
        return moved / passed_s if passed_s > 0 else None

    def forget_all(self, prefix: str) -> None:
        """What comes next under keys that begin so are other counters: a process has ended."""
        self._last = {key: last for key, last in self._last.items() if not key.startswith(prefix)}


def read(path: str | Path) -> bytes | None:
    """What a file of /proc or /sys holds (the first 64 KiB); None where it is not to be read."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return os.read(handle, 1 << 16)
    except OSError:  # the process has just ended, the driver knows no answer
        return None
    finally:
        os.close(handle)


def read_number(path: str | Path) -> float | None:
    """The number that is all a file holds; None where it holds none."""
    text = read(path)
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
