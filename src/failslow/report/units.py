"""Numbers as people read them: at most three figures, the unit that fits, no-break spaces.

In: seconds, ratios, counts. Out: short text for tables and labels, the same everywhere.

>>> duration(0.571), duration(190.4), duration(4000)
('571 ms', '3 min 10 s', '1 h 7 min')
>>> slowdown(1.394), percent(13.24), count(48000)
('×1.39', '+13.2 %', '48,000')
"""

from __future__ import annotations

import math
from datetime import datetime, timezone

__all__ = ["clock", "count", "duration", "percent", "plural", "slowdown"]

_STEPS = ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))


def duration(seconds: float) -> str:
    """`seconds` in its natural unit: "12.3 ms", "45.6 s", "3 min 10 s", "2 d 5 h"."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 0:
        return "-" + duration(-seconds)
    if seconds == 0:
        return "0 s"
    for factor, unit in ((1e6, "µs"), (1e3, "ms"), (1.0, "s")):
        value = seconds * factor
        # three figures: 999.6 ms belongs to the next unit
        if value < 999.5 and (unit != "s" or value < 59.95):
            return f"{_figures(value)} {unit}"
    for size, unit, small, small_unit in _STEPS:
        if seconds >= size - small / 2:
            whole, rest = divmod(round(seconds / small), size // small)
            return f"{whole} {unit} {rest} {small_unit}" if rest else f"{whole} {unit}"
    return f"{_figures(seconds)} s"


def slowdown(ratio: float) -> str:
    """How many times the healthy iteration time: "×1.39", "×17"."""
    if not math.isfinite(ratio):
        return "?"
    return f"×{ratio:.2f}" if ratio < 9.995 else f"×{ratio:.3g}"


def percent(value: float) -> str:
    """A signed increase: "+13.2 %"; "0 %" when nothing changed."""
    if not math.isfinite(value):
        return "?"
    if value == 0:
        return "0 %"
    sign = "+" if value > 0 else "-"
    size = abs(value)
    if size < 0.01:
        return f"{sign}<0.01 %"
    return f"{sign}{_figures(size) if size < 100 else f'{size:,.0f}'} %"


def count(number: int) -> str:
    """Thousands apart: "48,000"."""
    return f"{number:,}"


def plural(number: int, singular: str, many: str = "") -> str:
    """ "1 spike", "12 spikes"."""
    return f"{count(number)} {singular if number == 1 else many or singular + 's'}"


def clock(epoch_s: float) -> str:
    """A point in time as "2026-06-26 15:10:26" UTC; "" outside the calendar."""
    try:
        moment = datetime.fromtimestamp(epoch_s, tz=timezone.utc)
    except (OverflowError, ValueError, OSError):
        return ""
    return f"{moment:%Y-%m-%d %H:%M:%S}"


def _figures(value: float) -> str:
    """Three significant figures without an exponent: 571, 57.1, 5.71, 0.0571."""
    for limit, decimals in ((9.995, 2), (99.95, 1)):
        if value < limit:
            return f"{value:.{decimals}f}" if value >= 0.01 else f"{value:.2g}"
    return f"{value:.0f}"
