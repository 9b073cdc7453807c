"""Scripts on their way to the workers. Pure.

In: a script. Out: a message short enough for any number of workers (lists of ranks as runs where
that is shorter), the script again, and of it what the workers of one node must know:

    pack([{"do":"gemm","ranks":[0,1,…,1023]}])  # [{"do":"gemm","ranks":{"runs":[[0,1024,1]]}}]
    pack([{"do":"p2p","pairs":[[0,8],[16,24],…]}])
    # [{"do":"p2p","pairs":{"from":[[0,1024,16]],"to":[[8,1032,16]]}}]

A letter to a worker has room for some thousand ranks, a message on the bus for twice as many.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from failslow.capture.layout import from_runs, to_runs
from failslow.localize.script_settings import MOST_AWAITED

__all__ = ["members", "pack", "share", "unpack"]

_FEW = 16
"""Ranks that are written out: for people."""


def pack(script: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """JSON of a script."""
    return [_packed(stage) for stage in script]


def unpack(packed: Iterable[Any]) -> list[Any]:
    """The script again. Raises KeyError, TypeError or ValueError where it is none."""
    return [_unpacked(stage) if isinstance(stage, dict) else stage for stage in packed]


def share(script: Iterable[Any], ranks: Collection[int]) -> list[Any]:
    """The script for these workers of one node: of a stage with many members their own part.

    They wait for each other, and for whom they send to or hear from. The stages are as many.
    """
    mine = set(ranks)
    return [_of(stage, mine) if len(members(stage)) > MOST_AWAITED else stage for stage in script]


def members(stage: Any) -> list[int]:
    """Ranks with something to do in a stage."""
    if not isinstance(stage, Mapping):
        return []
    pairs = [rank for pair in stage.get("pairs", ()) for rank in pair]
    return list(dict.fromkeys([*stage.get("ranks", ()), *pairs]))


def _of(stage: Mapping[str, Any], mine: set[int]) -> dict[str, Any]:
    part = dict(stage)
    if "ranks" in stage:
        part["ranks"] = [rank for rank in stage["ranks"] if rank in mine]
    if "pairs" in stage:
        part["pairs"] = [pair for pair in stage["pairs"] if not mine.isdisjoint(pair)]
    return part


def _packed(stage: Mapping[str, Any]) -> dict[str, Any]:
    packed = dict(stage)
    if "ranks" in stage and (runs := _shorter(stage["ranks"])):
        packed["ranks"] = {"runs": runs}
    if "pairs" in stage:
        senders, receivers = ([pair[end] for pair in stage["pairs"]] for end in (0, 1))
        runs, others = _shorter(senders), _shorter(receivers)
        if runs and others:
            packed["pairs"] = {"from": runs, "to": others}
    return packed


def _unpacked(stage: Mapping[str, Any]) -> dict[str, Any]:
    whole = dict(stage)
    if isinstance(ranks := stage.get("ranks"), dict):
        whole["ranks"] = from_runs(ranks["runs"])
    if isinstance(pairs := stage.get("pairs"), dict):
        ends = zip(from_runs(pairs["from"]), from_runs(pairs["to"]), strict=True)
        whole["pairs"] = [list(pair) for pair in ends]
    return whole


def _shorter(ranks: Sequence[int]) -> list[list[int]] | None:
    """As runs, if that is shorter."""
    if len(ranks) <= _FEW:
        return None
    runs = to_runs(list(ranks))
    return runs if 3 * len(runs) < len(ranks) else None
