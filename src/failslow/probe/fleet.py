"""What a probe's iteration usually takes in this cluster, from earlier probes.

In: files of earlier results (JSON lines; a campaign's store has one). Out: a `FleetReference` for
probes of the same sizes on the same model of device, so that one that is slow from its first
iteration is found out:

    FleetReference(iteration_s=0.121, limit=1.1, probes=34, devices=("NVIDIA H200",))
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
_ENOUGH = 50
"""Iterations of which the median is no longer that of a start; fewer where they took half of the
time that a probe takes."""
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
    devices: tuple[str, ...] = ()
    """Models they ran on; () unknown."""

    @property
    def limit_alone(self) -> float:
        """The same where nothing in the probe itself looks slow: runs differ as a whole, too."""
        return _ALONE * self.limit


def load_history(paths: Iterable[Path]) -> tuple[ProbeResult, ...]:
    """Earlier results, each probe once: files of JSON lines, or folders with a history.jsonl.

    A last line without its end is being written, and is left out. Raises ProbeError for what
    cannot be read.
    """
    found: dict[object, ProbeResult] = {}
    for path in paths:
        file = path / _FILE if path.is_dir() else path
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ProbeError(
                f"--history {path}: cannot be read: {getattr(error, 'strerror', None) or error}; "
                "give a file of probe results, one JSON object a line, or a campaign's store"
            ) from None
        # not splitlines(): JSON leaves U+2028, U+0085 and others inside a line
        for number, line in enumerate(text[: text.rfind("\n") + 1].split("\n"), 1):
            if line.strip():
                try:
                    result = ProbeResult.from_json(line, where=f"{file}, line {number}")
                except ValueError as error:
                    raise ProbeError(
                        f"{error}; --history needs results of failslow probe"
                    ) from None
                found.setdefault(_identity(result), result)
    return tuple(found.values())


def _identity(result: ProbeResult) -> object:
    """The same of a probe that is in several files: in a store, say, and in one of its own."""
    named = result.campaign and result.probe_id
    return (result.campaign, result.probe_id) if named else result


def fleet_reference(
    spec: ProbeSpec, history: Sequence[ProbeResult], devices: tuple[str, ...] = ()
) -> FleetReference | None:
    """The reference for `spec`; None as long as fewer than five probes compare to it.

    devices: as of a result. As long as they are not known nothing compares where the history has
    several models: the slower one would be accused.
    """
    like = [result for result in history if _compares(result, spec)][-_NEWEST:]
    models = {result.devices for result in like if result.devices}
    if len(models | ({devices} if devices else set())) > 1:
        like = [result for result in like if devices and result.devices == devices]
    healthy_s = [s for result in like if (s := result.healthy_iteration_s)]
    if len(healthy_s) < _FEWEST:
        return None
    log_s = np.log(healthy_s)
    return FleetReference(
        iteration_s=float(np.exp(np.median(log_s))),
        # the median deviation of few may be far too small
        limit=max(_LEAST, math.exp(_SPREADS * mad(log_s) * (1.0 + 4.0 / len(healthy_s)))),
        probes=len(healthy_s),
        devices=next((result.devices for result in like if result.devices), ()),
    )


def _compares(result: ProbeResult, spec: ProbeSpec) -> bool:
    """Same sizes, and long enough; its model is another matter."""
    long = result.iterations >= _ENOUGH or result.trained_s >= spec.duration_s / 2
    return (
        bool(result.healthy_iteration_s)
        and result.state != "failed"
        and long
        and result.preset == spec.preset
        and len(result.nodes) == spec.nodes
        and (result.tp, result.pp, result.dp) == grid_of(spec)
    )
