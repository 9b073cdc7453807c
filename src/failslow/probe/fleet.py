"""What a probe's iteration usually takes in this cluster, from earlier probes.

In: files of earlier results (JSON lines; a campaign's store has one). Out: a `FleetReference` for
probes of the same sizes, so that one that is slow from its first iteration is found out:

    FleetReference(iteration_s=0.121, limit=1.1, probes=34)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from failslow.errors import ProbeError
from failslow.probe.job import grid_of
from failslow.probe.result import ProbeResult, ProbeSpec
from failslow.stats.robust import mad

__all__ = ["FleetReference", "fleet_reference", "load_history"]

_FEWEST, _NEWEST = 5, 200
_LEAST = 1.10
_ALONE = 1.10
_SPREADS = 4.0
_FILE = "history.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetReference:
    """Of probes that compare."""

    iteration_s: float
    """Median of their healthy iterations."""
    limit: float = _LEAST
    """A probe is slow from so many times that: 10 %, or more where healthy probes differ more."""
    probes: int
    """How many it rests on."""

    @property
    def limit_alone(self) -> float:
        """The same where nothing in the probe itself looks slow: runs differ as a whole, too."""
        return _ALONE * self.limit


def load_history(paths: Iterable[Path]) -> tuple[ProbeResult, ...]:
    """Earlier results, as the files have them: JSON lines, or folders with a history.jsonl.

    A last line without its end is being written, and is left out. Raises ProbeError for what
    cannot be read.
    """
    found: list[ProbeResult] = []
    for path in paths:
        file = path / _FILE if path.is_dir() else path
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ProbeError(
                f"--history {path}: cannot be read: {getattr(error, 'strerror', None) or error}; "
                "give a file of probe results, one JSON object a line, or a campaign's store"
            ) from None
        for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), 1):
            if line.strip():
                try:
                    found.append(ProbeResult.from_json(line, where=f"{file}, line {number}"))
                except ValueError as error:
                    raise ProbeError(
                        f"{error}; --history needs results of failslow probe"
                    ) from None
    return tuple(found)


def fleet_reference(spec: ProbeSpec, history: Sequence[ProbeResult]) -> FleetReference | None:
    """The reference for `spec`; None as long as fewer than five probes compare to it."""
    grid = grid_of(spec)
    like = [
        result.healthy_iteration_s
        for result in history
        if result.healthy_iteration_s
        and result.preset == spec.preset
        and len(result.nodes) == spec.nodes
        and (result.tp, result.pp, result.dp) == grid
    ][-_NEWEST:]
    if len(like) < _FEWEST:
        return None
    log_s = np.log(like)
    return FleetReference(
        iteration_s=float(np.exp(np.median(log_s))),
        # the median deviation of few may be far too small
        limit=max(_LEAST, math.exp(_SPREADS * mad(log_s) * (1.0 + 4.0 / len(like)))),
        probes=len(like),
    )
