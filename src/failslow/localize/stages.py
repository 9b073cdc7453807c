"""Packs what is to be measured into stages in which nobody disturbs another. Pure.

In: workers and links, each with how useful it is. Out: the most useful stages that fit the budget:

    stages = Stages(places, settings)
    stages.script({5: 100.9, 7: 90.0}, {(0, 2): 100.4})
    # [{"do":"gemm","ranks":[5,7],…}, {"do":"p2p","pairs":[[0,2]],…}, {"do":"host",…}]

Workers that share a device take turns, and so do those of one machine with its host checks. A
network card carries one transfer at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

from failslow.localize.script_settings import (
    MOST_AWAITED,
    ScriptSettings,
    WorkerPlace,
    endpoint,
    is_cpu,
)

__all__ = ["Script", "Stage", "Stages"]

Stage = dict[str, Any]
Script = list[Stage]
"""Stages in order, JSON."""
Links = list[tuple[float, int, int]]
"""(usefulness, sending rank, receiving rank)."""
Ranks = list[tuple[float, int]]
"""(usefulness, rank)."""

_AGAIN = 30.0
"""How useful another round of the same is."""


class Stages:
    """Of one job. settings: with what suits its device filled in."""

    def __init__(self, places: Mapping[int, WorkerPlace], settings: ScriptSettings) -> None:
        self._places, self._settings = places, settings
        self._on_cpu = all(is_cpu(place.device) for place in places.values())
        units: dict[str, set[str]] = {}
        for place in places.values():
            units.setdefault(place.machine, set()).add(place.device_id)
        self._at_once = {machine: max(1, len(ids) // 2) for machine, ids in units.items()}
        """Transfers that a machine takes part in at a time: both ends take a share of it."""

    def script(self, ranks: Mapping[int, float], links: Mapping[tuple[int, int], float]) -> Script:
        """The most useful stages that fit the budget, the most useful first."""
        workers = sorted(((u, r) for r, u in ranks.items()), key=lambda item: -item[0])
        workers = workers[: self._settings.most_ranks]
        pairs = sorted(((u, *link) for link, u in links.items()), key=lambda item: -item[0])
        stages = [*self._computing(workers), *self._hosts(workers), *self._transfers(pairs)]
        stages.sort(key=lambda item: -item[0])
        script: Script = []
        left_s = self._settings.budget_s
        for _, stage in stages:
            if stage["expect_s"] <= left_s or not script:
                script.append(stage)
                left_s -= stage["expect_s"]
        return script

    def _computing(self, ranks: Ranks) -> list[tuple[float, Stage]]:
        settings = self._settings
        waves = self._waves(ranks, lambda place: place.unit)
        turns = max(1, len(waves) * settings.rounds)
        # many workers on one device take turns: shorter ones then
        least_s = min(settings.gemm_s, max(0.1, 0.3 * settings.budget_s / turns))
        expect_s = least_s + 0.05 if self._on_cpu else least_s + 0.15
        about = {
            "dtype": settings.gemm_dtype,
            "size": settings.gemm_size,
            "repeats": settings.gemm_repeats,
            "least_s": round(least_s, 3),
            "limit_s": round(3 * expect_s + 0.1, 3),
            "expect_s": round(expect_s, 3),
        }
        return self._rounds("gemm", waves, about)

    def _hosts(self, ranks: Ranks) -> list[tuple[float, Stage]]:
        if not self._on_cpu:  # one worker speaks for its host
            first: dict[str, tuple[float, int]] = {}
            for useful, rank in ranks:
                first.setdefault(self._places[rank].node, (useful, rank))
            ranks = list(first.values())
        # worth less than the benchmark of the same workers, which comes first
        waves = self._waves(((u - 5.0, r) for u, r in ranks), lambda place: place.machine)
        return self._rounds("host", waves, {"limit_s": 0.4, "expect_s": 0.07})

    def _rounds(
        self, do: str, waves: list[tuple[float, list[int]]], about: Stage
    ) -> list[tuple[float, Stage]]:
        """The stages, and once more what there is of rounds: after the links, well apart."""
        if len(waves) == 1 and len(waves[0][1]) > MOST_AWAITED:
            about = {**about, "wait": False}  # nobody's turn comes after it
        stages = [(useful, {"do": do, "ranks": wave, **about}) for useful, wave in waves]
        again = [(_AGAIN, stage) for _ in range(1, self._settings.rounds) for _, stage in stages]
        return [*stages, *again]

    def _waves(
        self, ranks: Iterable[tuple[float, int]], shared: Callable[[WorkerPlace], Hashable]
    ) -> list[tuple[float, list[int]]]:
        """Workers that may compute at the same time, in as few waves as can be.

        shared: what only one worker at a time may use.
        """
        waves: list[tuple[float, list[int]]] = []
        turns: dict[Hashable, int] = {}
        for useful, rank in ranks:
            key = shared(self._places[rank])
            turn = turns.get(key, 0)
            turns[key] = turn + 1
            if turn == len(waves):
                waves.append((useful, []))
            waves[turn][1].append(rank)
        return waves

    def _transfers(self, links: Links) -> list[tuple[float, Stage]]:
        settings = self._settings
        send_s = sum(settings.sizes_bytes) * settings.repeats / settings.bandwidth
        about = {
            "sizes_bytes": list(settings.sizes_bytes),
            "repeats": settings.repeats,
            "limit_s": round(3 * (settings.connect_s + send_s) + 0.1, 3),
        }
        stages: list[_Transfers] = []
        for useful, here, there in links:
            ends = self._ends(here, there)
            stage = next((s for s in stages if s.has_room(ends)), None)
            if stage is None:
                stages.append(stage := _Transfers(useful))
            stage.add(here, there, ends)
        found, connected = [], set[frozenset[int]]()
        for stage in stages:
            pairs = {frozenset(pair) for pair in stage.pairs}
            connect_s = 0.0 if pairs <= connected else settings.connect_s
            connected |= pairs  # the way back goes through what was connected for the way there
            about = {**about, "expect_s": round(connect_s + send_s, 3)}
            found.append((stage.useful, {"do": "p2p", "pairs": stage.pairs, **about}))
        return found

    def _ends(self, here: int, there: int) -> dict[Hashable, int]:
        """{what a transfer occupies: how many may at once}."""
        ends: dict[Hashable, int] = {here: 1, there: 1}
        one, other = self._places[here], self._places[there]
        if endpoint(one) != endpoint(other):
            ends |= {endpoint(one): 1, endpoint(other): 1}
        for place in (one, other):
            ends[place.machine,] = self._at_once[place.machine]
        return ends


class _Transfers:
    """Pairs that do not disturb each other."""

    def __init__(self, useful: float) -> None:
        self.useful = useful
        self.pairs: list[list[int]] = []
        self._taken: dict[Hashable, int] = {}

    def has_room(self, ends: Mapping[Hashable, int]) -> bool:
        return all(self._taken.get(end, 0) < most for end, most in ends.items())

    def add(self, here: int, there: int, ends: Iterable[Hashable]) -> None:
        self.pairs.append([here, there])
        for end in ends:
            self._taken[end] = self._taken.get(end, 0) + 1
