"""`RankProfile`s as plain values for a message or a line of the journal, and back.

In: a profile. Out: a mapping with a JSON form, and from it the same profile:

    {"why":"suspicion","rank":3,"node":"gpu-17","iterations":20,"compute_s":0.051,…,
     "cells":[{"group":[0,1,2,3],"label":"mesh_dp","op":"allreduce_","position":0,…},…]}

Where groups are large they are said once, as runs, and cells give their number:

    {…,"groups":[[[0,512,1]],[[3,512,8]]],"cells":[{"group":1,…},…]}

512 ranks and 500 cells stay under 200 KB; written out, the profiles of 2,048 ranks would be 400 MB.
Equal groups come out as one object, so that 10,000 profiles of a world of 10,000 hold it once.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from failslow.capture.layout import to_runs
from failslow.records import CallCell, RankProfile

__all__ = ["profile_body", "read_profile_body"]

_SMALL = 4096
"""Ranks in all groups of all cells that are written out."""
_MOST = 1 << 24
"""Ranks a group may have: more are no group, but would fill the memory."""
_DIGITS = 6
_PROFILE: TypeAdapter[RankProfile] = TypeAdapter(RankProfile)
_FIELDS, _CELL = tuple(RankProfile.__dataclass_fields__), tuple(CallCell.__dataclass_fields__)


def profile_body(profile: RankProfile, **more: Any) -> dict[str, Any]:
    """Plain values of the profile and of `more`."""
    body = more | {name: getattr(profile, name) for name in _FIELDS}
    cells = [{name: getattr(cell, name) for name in _CELL} for cell in profile.cells]
    if sum(len(cell.group) for cell in profile.cells) <= _SMALL:
        return body | {"cells": cells}
    runs: list[list[list[int]]] = []
    numbers: dict[int, int] = {}  # by object: hashing a world for each cell would take longest
    known: dict[tuple[int, ...], int] = {}
    for cell, made in zip(cells, profile.cells, strict=True):
        if id(made.group) not in numbers:
            numbers[id(made.group)] = known.setdefault(made.group, len(known))
            if len(known) > len(runs):
                runs.append(_runs(made.group))
        for name, value in cell.items():
            cell[name] = _short(value)
        cell["group"] = numbers[id(made.group)]
    return body | {"cells": cells, "groups": runs}


def read_profile_body(body: Mapping[str, Any]) -> RankProfile:
    """The profile in a message's body; raises ValueError (one line) when there is none in it."""
    try:
        values = {name: body[name] for name in _FIELDS if name in body}
        groups = [_from_runs(tuple(map(tuple, runs))) for runs in body.get("groups", ())]
        cells = [dict(cell) for cell in values.get("cells", ())]
        for cell in cells:
            group = cell["group"]
            if isinstance(group, int):
                if not 0 <= group < len(groups):
                    raise ValueError(f"group {group} of a cell is none of {len(groups)}")
                cell["group"] = ()
            else:
                cell["group"] = tuple(group)
        profile = _PROFILE.validate_python({**values, "cells": cells})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"no profile: {where}: {first['msg']}") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no profile: {error!r}") from None
    for made, given in zip(profile.cells, body["cells"], strict=True):
        number = given["group"]
        whole = groups[number] if isinstance(number, int) else _shared(made.group)
        object.__setattr__(made, "group", whole)  # set late: validating would copy it each time
    return profile


def _short(value: Any) -> Any:
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


@lru_cache(maxsize=1 << 12)
def _runs(group: tuple[int, ...]) -> list[list[int]]:
    return to_runs(list(group))


@lru_cache(maxsize=1 << 16)
def _shared(group: tuple[int, ...]) -> tuple[int, ...]:
    return group


@lru_cache(maxsize=1 << 16)
def _from_runs(runs: tuple[tuple[int, int, int], ...]) -> tuple[int, ...]:
    ranks: list[int] = []
    for start, stop, step in runs:
        if not (step > 0 and 0 <= start < stop and (stop - start) // step <= _MOST):
            raise ValueError(f"({start}, {stop}, {step}) is no run of ranks")
        ranks.extend(range(start, stop, step))
    return _shared(tuple(ranks))
