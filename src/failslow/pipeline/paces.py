"""Which paces of culprits are told to the policy, and so to the journal. Pure.

In: culprits and the workers' own times, a few times a second. Out: what of them is news:

    paces = Paces(config)
    paces.news(own, {"device rank 2": finding}, now_s)  # [CulpritPace(…)], and [] a moment later

The policy goes by nothing else, so that a journal tells all of what it decided on. However many
culprits there are, they make no more than about a line a second.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from failslow.config import DecideConfig
from failslow.pipeline.own import OwnTimes
from failslow.records import CulpritPace, Finding

__all__ = ["Paces"]

_LEAST_S, _MOST_S = 1.0, 10.0
"""Seconds between two lines, for each culprit there is; and after which it is told in any case."""


class Paces:
    """Of the culprits of one job."""

    def __init__(self, config: DecideConfig) -> None:
        self._config = config
        self._told: dict[str, tuple[float, float]] = {}
        """(slowdown, when) of what was told last of each."""

    def news(
        self,
        own: OwnTimes,
        findings: Mapping[str, Finding],
        now_s: float,
        *,
        well: Collection[str] = (),
    ) -> list[CulpritPace]:
        """How culprits fare by their own time, where that has changed or was not told for long.

        well: those that a pause has proved well since they were named.
        """
        blamed = {rank for finding in findings.values() for rank in finding.ranks}
        least_s = _LEAST_S * len(findings)
        return [
            CulpritPace(key=key, slowdown=slowdown)
            for key, finding in findings.items()
            if (slowdown := own.culprit(finding, blamed, proved_well=key in well)) is not None
            and self._is_news(key, slowdown, now_s, least_s)
        ]

    def forget(self, keys: Iterable[str]) -> None:
        """A verdict named them: what was told of them before counts no more."""
        for key in keys:
            self._told.pop(key, None)

    def _is_news(self, key: str, slowdown: float, now_s: float, least_s: float) -> bool:
        """Whether it is to be told; then it counts as told."""
        before, at_s = self._told.get(key, (0.0, -1e9))
        if now_s - at_s < least_s:
            return False
        is_slow = slowdown >= self._config.min_slowdown
        moved = self._bounds(slowdown) != self._bounds(before) or (
            is_slow and abs(slowdown / before - 1.0) > self._config.min_gain
        )
        if not moved and now_s - at_s < max(_MOST_S, least_s):
            return False
        self._told[key] = (slowdown, now_s)
        return True

    def _bounds(self, slowdown: float) -> tuple[bool, bool]:
        """Whether it is well, whether it is slow; there is a gap between."""
        return slowdown <= self._config.relief_slowdown, slowdown >= self._config.min_slowdown
