"""One record, one JSON line.

In: a dataclass of `records` or a mapping. Out: a line, and from a line a `JournalEntry`.

>>> line = encode_entry(records.Level(start_step=7, slowdown=1.4), t=12.5, rank=3)
>>> line
b'{"t":12.5,"kind":"level","rank":3,"start_step":7,"slowdown":1.4}'
>>> decode_entry(line)
JournalEntry(t=12.5, kind='level', record=Level(start_step=7, slowdown=1.4), tags={'rank': 3})
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from failslow import records
from failslow.errors import JournalError
from failslow.profile_wire import profile_body, read_profile_body
from failslow.records import RankProfile

__all__ = ["JournalEntry", "decode_entry", "encode_entry", "rotated_path"]

_RESERVED = ("t", "kind")
_NAMES = {"StepSample": "step"}


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEntry:
    """One line. `record` is a dataclass of `records`, or the bare fields of what is none."""

    t: float
    """Epoch seconds."""
    kind: str
    record: Any
    tags: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of the line which are not fields of the record: rank, node."""

    @property
    def rank(self) -> int | None:
        """Whose entry it is: the `rank` tag, or the record's own field; None when neither."""
        own = self.record if isinstance(self.record, Mapping) else self.tags
        rank = own.get("rank", getattr(self.record, "rank", None))
        return rank if isinstance(rank, int) else None


def encode_entry(record: Any, *, t: float, kind: str | None = None, **tags: Any) -> bytes:
    """One JSON line without its line end. `record`: a dataclass, or a mapping with a `kind`.

    Raises JournalError when something in it has no JSON form.
    """
    if isinstance(record, Mapping):
        if not kind:
            raise JournalError("a mapping has no kind; pass kind=...")
        plain = dict(record)
    else:
        kind = kind or _kind_of(type(record))
        if isinstance(record, RankProfile):  # its groups may be of thousands of ranks each
            plain = profile_body(record)
        else:
            plain = {f.name: getattr(record, f.name) for f in fields(record)}
    line = {"t": t, "kind": kind}
    for name, value in (*tags.items(), *plain.items()):
        line[_key(kind, name)] = _plain(value)
    try:
        return json.dumps(line, allow_nan=False, separators=(",", ":"), ensure_ascii=False).encode(
            errors="backslashreplace"
        )
    except (TypeError, ValueError) as error:
        raise JournalError(f"a {kind} record has no JSON form: {error}; use plain values") from None


def decode_entry(line: bytes | str) -> JournalEntry:
    """The entry of one line; a known kind with fields that do not fit keeps them bare.

    Raises JournalError when the line is not a JSON object with `t` and `kind`.
    """
    try:
        found = json.loads(line, parse_constant=_refuse)
        t, kind = float(found.pop("t")), str(found.pop("kind"))
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
        text = line if isinstance(line, str) else line.decode(errors="replace")
        raise JournalError(f"not a journal line: {text[:80]!r}") from None
    cls = _classes().get(kind)
    if cls is None:
        return JournalEntry(t=t, kind=kind, record=found)
    keys = {_key(kind, f.name): f.name for f in fields(cls)}
    try:
        if packed := cls is RankProfile and "groups" in found:
            record = read_profile_body(found)
        else:
            record = _validate(cls, {keys[key]: found[key] for key in keys.keys() & found.keys()})
    except ValueError:  # pydantic's, too
        return JournalEntry(t=t, kind=kind, record=found)
    known = {*keys, "groups"} if packed else keys
    tags = {key: value for key, value in found.items() if key not in known}
    return JournalEntry(t=t, kind=kind, record=record, tags=tags)


def _kind_of(cls: type) -> str:
    return _NAMES.get(cls.__name__, cls.__name__.lower())


def _key(kind: str, name: str) -> str:
    return f"{kind}_{name}" if name in _RESERVED else name


@lru_cache
def _classes() -> dict[str, type]:
    named = (getattr(records, name) for name in records.__all__)
    return {_kind_of(cls): cls for cls in named if isinstance(cls, type) and is_dataclass(cls)}


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


@lru_cache
def _adapter(cls: type) -> TypeAdapter[Any]:
    return TypeAdapter(cls)


def _validate(cls: type, values: dict[str, Any]) -> Any:
    try:
        return _adapter(cls).validate_python(values)
    except ValidationError as error:
        # null in a field that must be a float was written for NaN or an infinity
        for problem in error.errors():
            if problem["type"] != "float_type" or problem["input"] is not None:
                raise
            _set(values, problem["loc"], math.nan)
        return _adapter(cls).validate_python(values)


def _set(values: Any, location: tuple[int | str, ...], value: float) -> None:
    for step in location[:-1]:
        values = values[step]
    values[location[-1]] = value


def _plain(value: Any) -> Any:
    """`value` as what JSON has; tuples become lists, NaN and infinities null."""
    if is_dataclass(value):
        value = {f.name: getattr(value, f.name) for f in fields(value)}
    elif hasattr(value, "tolist"):  # numpy scalars and arrays
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def rotated_path(path: Path, number: int) -> Path:
    """The journal file `number` rotations ago."""
    return path.with_name(f"{path.name}.{number}") if number else path
