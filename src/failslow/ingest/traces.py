"""Operation traces -> `OperationTrace`: what every traced worker did in every traced step.

In: a table with a row an operation, in the schema of ByteDance's what-if analysis (arXiv
2505.05713): parquet, CSV or JSON lines (the last two plain or gzip), and the job's layout as a
flat YAML file. Out: the columns, checked.

    dp_rank,stage,rank,step,optype,start_ts,duration,seq_id,mc,mb_id,gmc
    0,2,4,259,forward-compute,0.187,0.0694,1,0,1,2
    0,2,4,259,forward-send,0.256,0.0016,1,-1,-1,-1

    dp_size: 2
    pp_size: 4
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import yaml
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from failslow.errors import InputError, MissingDependencyError
from failslow.ingest.text import Source
from failslow.records import OperationTrace, ParallelLayout

__all__ = ["read_layout", "read_trace"]

Column: TypeAlias = "NDArray[Any]"

_REQUIRED = ("dp_rank", "stage", "step", "optype", "start_ts", "duration")
_OPTIONAL = ("rank", "seq_id", "mc", "mb_id", "gmc")
_UNKNOWN = -1


class _Meta(BaseModel):
    """The layout file; what else is in it is of no use here."""

    model_config = ConfigDict(extra="ignore")

    dp_size: int = Field(ge=1)
    pp_size: int = Field(ge=1)
    tp_size: int = Field(1, ge=1)
    vpp_size: int = Field(1, ge=1)
    trial_name: str = ""


def read_layout(path: str | Path) -> ParallelLayout:
    """The layout in a YAML file with `dp_size`, `pp_size`, and maybe `tp_size`, `vpp_size`.

    Raises InputError (one line) when it is not such a file.
    """
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise InputError(f"{path}: cannot be read: {reason}; give the layout file") from None
    except yaml.YAMLError as error:
        raise InputError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise InputError(f"{path}: not a layout; write `dp_size: 2` and `pp_size: 4` into it")
    try:
        meta = _Meta(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = first["loc"][0]
        given = f"{name} ({values[name]!r})" if name in values else f"{name} (missing)"
        raise InputError(
            f"{path}: {given}: {first['msg']}; see the job's parallel layout"
        ) from None
    return ParallelLayout(
        dp=meta.dp_size, pp=meta.pp_size, tp=meta.tp_size, vpp=meta.vpp_size, name=meta.trial_name
    )


def read_trace(path: str | Path, layout: ParallelLayout | None = None) -> OperationTrace:
    """The operations in `path`; without a layout it is what the trace shows.

    Raises InputError (file, what, what to do) for a table of another kind, impossible values,
    or a layout that does not fit; MissingDependencyError for parquet without pyarrow.
    """
    path = Path(path)
    columns = _read(path)
    return _trace(str(path), columns, layout)


def _read(path: Path) -> Mapping[str, Column]:
    readers: Mapping[str, Callable[[Path], Mapping[str, Column]]] = {
        ".parquet": _parquet,
        ".csv": _csv,
        ".jsonl": _json_lines,
        ".ndjson": _json_lines,
    }
    suffixes = [s for s in path.suffixes if s != ".gz"]
    reader = readers.get(suffixes[-1] if suffixes else "")
    if reader is None:
        known = ", ".join(readers)
        raise InputError(f"{path}: no operation trace by its name; known endings: {known}")
    return reader(path)


def _parquet(path: Path) -> Mapping[str, Column]:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise MissingDependencyError(
            f"{path}: reading parquet needs pyarrow; pip install 'failslow[traces]', "
            "or save the trace as CSV"
        ) from None
    wanted = (*_REQUIRED, *_OPTIONAL)
    try:
        present = set(parquet.read_schema(path).names)
        _demand(path, present)
        table = parquet.read_table(path, columns=[name for name in wanted if name in present])
    except (OSError, pa.ArrowException) as error:
        what = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise InputError(f"{path}: cannot be read as parquet: {what}") from None
    columns: dict[str, Column] = {}
    for name in table.column_names:
        column = table.column(name)
        if name == "optype" and pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        if column.null_count and name in _REQUIRED:
            raise InputError(f"{path}: {column.null_count:,} rows lack {name}; remove them")
        columns[name] = np.asarray(column.fill_null(_UNKNOWN) if column.null_count else column)
    return columns


def _csv(path: Path) -> Mapping[str, Column]:
    rows = csv.reader(Source.from_path(path).lines())
    header = next(rows, [])
    _demand(path, header)
    return _typed(path, header, (row for row in rows if row))


def _json_lines(path: Path) -> Mapping[str, Column]:
    lines = (line for line in Source.from_path(path).lines() if line.strip())
    first = next(lines, "{}")
    header = list(_json_row(path, 1, first))
    _demand(path, header)

    def rows() -> Iterator[list[Any]]:
        yield list(_json_row(path, 1, first).values())
        for number, line in enumerate(lines, start=2):
            row = _json_row(path, number, line)
            yield [row.get(name, "") for name in header]

    return _typed(path, header, rows())


def _json_row(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{path}: line {number} is not JSON: {error.msg}") from None
    if not isinstance(row, dict):
        raise InputError(f"{path}: line {number} is not a JSON object")
    return row


def _typed(
    path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]
) -> Mapping[str, Column]:
    """Rows of text or JSON values -> columns; the first bad cell is an error."""
    gathered = list(zip(*rows, strict=False))
    columns: dict[str, Column] = {}
    for name, cells in zip(header, gathered, strict=False):
        if name not in _REQUIRED and name not in _OPTIONAL:
            continue
        if name == "optype":
            columns[name] = np.asarray([str(cell) for cell in cells])
            continue
        known = cells
        if name in _OPTIONAL:
            known = tuple(_UNKNOWN if cell in ("", None) else cell for cell in cells)
        try:
            columns[name] = np.asarray(known, dtype=np.float64)
        except (TypeError, ValueError):
            number, bad = next((n, c) for n, c in enumerate(known, start=1) if not _is_number(c))
            raise InputError(f"{path}: row {number}: {name} is {bad!r}, not a number") from None
    return columns


def _is_number(cell: object) -> bool:
    try:
        float(cell)  # type: ignore[arg-type]  # whatever it is, float() decides
    except (TypeError, ValueError):
        return False
    return True


def _demand(path: Path, header: Iterable[str]) -> None:
    missing = [name for name in _REQUIRED if name not in set(header)]
    if missing:
        raise InputError(
            f"{path}: no operation trace: it lacks the column{'s' * (len(missing) > 1)} "
            f"{', '.join(missing)}; needed are {', '.join(_REQUIRED)}"
        )


def _trace(
    source: str, columns: Mapping[str, Column], layout: ParallelLayout | None
) -> OperationTrace:
    rows = len(columns.get("step", ()))
    if not rows:
        raise InputError(f"{source}: the trace has no operation in it")
    for name, column in columns.items():
        if name == "optype":
            continue
        finite = np.isfinite(column)
        if not finite.all():
            raise InputError(f"{source}: row {int(np.argmin(finite)) + 1}: {name} is not finite")
    whole = {name: _whole(source, name, columns[name]) for name in ("dp_rank", "stage", "step")}
    duration_s = columns["duration"].astype(np.float64)
    for name, column in (*whole.items(), ("duration", duration_s)):
        if column.min() < 0 and name != "step":
            row = int(np.argmin(column))
            raise InputError(
                f"{source}: row {row + 1}: {name} is {column[row]:g}; it must not be negative"
            )
    dp, stage = whole["dp_rank"].astype(np.int32), whole["stage"].astype(np.int32)
    chunk = _optional(source, columns, "mc", rows)
    layout = _layout(source, layout, dp, stage, chunk)
    names, codes = np.unique(columns["optype"], return_inverse=True)
    global_chunk = _optional(source, columns, "gmc", rows)
    derived = np.where(chunk >= 0, chunk * layout.pp + stage, _UNKNOWN).astype(np.int32)
    rank = _optional(source, columns, "rank", rows)
    kind = codes.reshape(-1).astype(np.int16)
    start_s = columns["start_ts"].astype(np.float64)
    if "seq_id" in columns:
        seq = _optional(source, columns, "seq_id", rows)
    else:
        seq = _ordinals(start_s, np.stack([whole["step"], dp, stage, kind]))
    return OperationTrace(
        source=source,
        layout=layout,
        kinds=tuple(str(name) for name in names),
        step=whole["step"],
        dp=dp,
        stage=stage,
        rank=np.where(rank >= 0, rank, (stage * layout.dp + dp) * layout.tp).astype(np.int32),
        kind=kind,
        start_s=start_s,
        duration_s=duration_s,
        seq=seq,
        chunk=chunk,
        microbatch=_optional(source, columns, "mb_id", rows),
        global_chunk=np.where(global_chunk >= 0, global_chunk, derived),
    )


def _whole(source: str, name: str, column: Column) -> NDArray[np.int64]:
    whole = column.astype(np.int64)
    if not np.array_equal(whole, column):
        row = int(np.argmax(whole != column))
        raise InputError(f"{source}: row {row + 1}: {name} is {column[row]:g}, not a whole number")
    return whole


def _optional(
    source: str, columns: Mapping[str, Column], name: str, rows: int
) -> NDArray[np.int32]:
    if name not in columns:
        return np.full(rows, _UNKNOWN, dtype=np.int32)
    return _whole(source, name, columns[name]).astype(np.int32)


def _layout(
    source: str,
    given: ParallelLayout | None,
    dp: NDArray[np.int32],
    stage: NDArray[np.int32],
    chunk: NDArray[np.int32],
) -> ParallelLayout:
    found = ParallelLayout(
        dp=int(dp.max()) + 1, pp=int(stage.max()) + 1, vpp=max(1, int(chunk.max()) + 1)
    )
    if given is None:
        return found
    for name, told, shown, column in (
        ("dp_size", given.dp, found.dp, "dp_rank"),
        ("pp_size", given.pp, found.pp, "stage"),
        ("vpp_size", given.vpp, found.vpp, "mc"),
    ):
        if shown > told:
            raise InputError(
                f"{source}: {column} goes up to {shown - 1}, but the layout says {name}: {told}; "
                "give the layout file of this job"
            )
    return given


def _ordinals(start_s: NDArray[np.float64], keys: NDArray[np.int64]) -> NDArray[np.int32]:
    """Ordinals by start among the operations of equal keys (each a column of `keys`)."""
    order = np.lexsort((start_s, *keys[::-1]))
    keys = keys[:, order]
    fresh = np.concatenate(([True], np.any(keys[:, 1:] != keys[:, :-1], axis=0)))
    place = np.arange(len(order))
    ordinal = np.empty(len(order), dtype=np.int32)
    ordinal[order] = place - np.maximum.accumulate(np.where(fresh, place, 0))
    return ordinal
