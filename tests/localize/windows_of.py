"""Telemetry of made-up nodes in the shape agents report it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["ONSET_T", "RELIEF_T", "node", "step"]

BEGIN_T = 1_745_735_241.0
ONSET_T = BEGIN_T + 60.4
RELIEF_T = BEGIN_T + 90.4
_TIMES = BEGIN_T + np.arange(120.0)


def step(before: float, during: float, *, noise: float = 0.02, seed: int = 0) -> list[float | None]:
    """A series of 120 s that changes at ONSET_T and back at RELIEF_T."""
    slow = (_TIMES > ONSET_T) & (_TIMES < RELIEF_T)
    level = np.where(slow, during, before)
    spread = np.random.default_rng(seed).normal(size=len(level))
    values: list[float | None] = [float(v) for v in level * (1 + noise * spread)]
    values[0] = None  # a rate needs two readings
    return values


def node(
    name: str,
    *,
    series: Mapping[str, list[float | None] | float] | None = None,
    ranks: Mapping[int, Mapping[str, list[float | None] | float]] | None = None,
    gpus: Mapping[int, list[int]] | None = None,
    addresses: tuple[str, ...] = (),
    missing: tuple[str, ...] = (),
) -> dict[str, Any]:
    """The body of a report. A series that is one number is steady. gpus: index -> ranks."""
    return {
        "node": name,
        "since_t": BEGIN_T,
        "until_t": None,
        "interval_s": 1.0,
        "t": [float(t) for t in _TIMES],
        **_parts(series or {}),
        "ranks": {str(rank): _parts(each) for rank, each in (ranks or {}).items()},
        "gpus": {str(i): {"name": "NVIDIA H200", "ranks": r} for i, r in (gpus or {}).items()},
        "addresses": list(addresses),
        "missing": list(missing),
    }


def _parts(series: Mapping[str, list[float | None] | float]) -> dict[str, Any]:
    return {
        "series": {k: v for k, v in series.items() if isinstance(v, list)},
        "steady": {k: v for k, v in series.items() if not isinstance(v, list)},
    }
