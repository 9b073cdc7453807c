"""Telemetry around an onset -> the few series worth looking at, with what changed.

In: windows of nodes (journal kind "telemetry", shape in `runtime.duty_telemetry`), onset and
relief. Out: `Panel`s, the most telling first: a series whose level moved furthest out of its noise
when the slowness began.

    panel.name, panel.before, panel.during   # "cpu/neighbour_cores", 0.02, 1.94
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from failslow.report import units

__all__ = ["Panel", "amount", "node_of", "panels"]

_UNITS = (
    ("_bytes_per_s", "B/s"),
    ("_per_s", "/s"),
    ("_share", "share"),
    ("_cores", "cores"),
    ("_mhz", "MHz"),
    ("_cv", "sd/mean"),
    ("_w", "W"),
    ("_c", "°C"),
    ("_s", "s"),
)
_FEW = 2
_MOST_SCORE = 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One series of one node or worker."""

    node: str
    rank: int | None
    name: str
    unit: str
    t: tuple[float, ...]
    """Epoch seconds, by the node's clock."""
    values: tuple[float | None, ...]
    before: float | None
    during: float | None
    """Medians before the onset, and between onset and relief; None too little known."""
    score: float
    """How far the level moved, in units of its noise before; 0 unknown."""


def node_of(body: Mapping[str, Any]) -> str:
    """Whose window it is."""
    return str(body.get("node") or "?")


def panels(
    body: Mapping[str, Any], *, onset_t: float, relief_t: float | None, most: int
) -> list[Panel]:
    """At most `most` panels of one window; what is malformed is left out."""
    # the journal keeps `t` for the time of the entry
    t = _numbers(body.get("telemetry_t", body.get("t")))
    found = []
    for rank, name, values in _series(body):
        column = _numbers(values)
        if len(column) != len(t) or not np.isfinite(column).any():
            continue
        before, during, score = _change(t, column, onset_t, relief_t)
        found.append(
            Panel(
                node=node_of(body),
                rank=rank,
                name=name,
                unit=next((unit for end, unit in _UNITS if name.endswith(end)), ""),
                t=tuple(t.tolist()),
                values=tuple(v if np.isfinite(v) else None for v in column.tolist()),
                before=before,
                during=during,
                score=score,
            )
        )
    found.sort(key=lambda panel: (-panel.score, panel.name, panel.rank or -1))
    return found[:most]


def amount(value: float | None, unit: str) -> str:
    """A value in its unit: "1.94 cores", "91 MB/s", "12 %"."""
    if value is None:
        return "?"
    if unit == "s":
        return units.duration(value)
    if unit == "share":
        return f"{100 * value:.3g} %"
    if unit == "B/s":
        for size, name in ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s")):
            if abs(value) >= size:
                return f"{value / size:.3g} {name}"
    shown = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{shown} {unit}".strip()


def _series(body: Mapping[str, Any]) -> Iterator[tuple[int | None, str, Sequence[Any]]]:
    holders: list[tuple[int | None, Any]] = [(None, body)]
    ranks = body.get("ranks")
    if isinstance(ranks, Mapping):
        holders += [(int(rank), own) for rank, own in ranks.items() if str(rank).isdecimal()]
    for rank, holder in holders:
        series = holder.get("series") if isinstance(holder, Mapping) else None
        for name, values in series.items() if isinstance(series, Mapping) else ():
            if isinstance(values, Sequence) and not isinstance(values, str):
                yield rank, str(name), values


def _numbers(values: object) -> np.ndarray[Any, np.dtype[np.float64]]:
    listed = values if isinstance(values, Sequence) and not isinstance(values, str) else ()
    return np.array(
        [v if isinstance(v, (int, float)) else np.nan for v in listed], dtype=np.float64
    )


def _change(
    t: np.ndarray[Any, np.dtype[np.float64]],
    values: np.ndarray[Any, np.dtype[np.float64]],
    onset_t: float,
    relief_t: float | None,
) -> tuple[float | None, float | None, float]:
    known = np.isfinite(values)
    early = values[known & (t < onset_t)]
    late = values[known & (t >= onset_t) & (t < (np.inf if relief_t is None else relief_t))]
    if len(early) < _FEW or len(late) < _FEW:
        return None, None, 0.0
    before, during = float(np.median(early)), float(np.median(late))
    spread = 1.4826 * float(np.median(np.abs(early - before)))
    # a floor, so that a perfectly steady counter does not win by its first tick
    floor = 0.02 * max(abs(before), float(np.abs(values[known]).max()), 1e-12)
    return before, during, min(_MOST_SCORE, abs(during - before) / (spread + floor))
