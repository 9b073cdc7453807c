"""Hugging Face Trainer: `trainer_state.json`, or what it prints.

An entry of `log_history` carries no time by default. With
`TrainingArguments(include_num_input_tokens_seen=True)` (transformers 4.53 or newer) it carries the
seconds since the start and the tokens so far; TRL's trainers add the time of a step themselves:

    {"epoch": 0.1, "loss": 2.31, "num_input_tokens_seen": 655360, "step": 20, "train_runtime": 41.2}
    {"epoch": 0.1, "reward": 0.4, "step": 20, "step_time": 2.06}

The printed log has the same entries as Python dictionaries, without the step, among the redrawn
progress bars. Where the entries have no time the bar has it, in whole seconds:

      2%|▏         | 20/1000 [00:41<33:39,  2.06s/it]
    {'loss': 2.31, 'grad_norm': 1.9, 'learning_rate': 2e-05, 'epoch': 0.1}

The bar that ran longest is the training's; evaluation draws bars of its own in between.
"""

from __future__ import annotations

import re
from typing import Any

from failslow.errors import InputError
from failslow.ingest.base import NUMBER, SeriesBuilder, Source, split_prefix
from failslow.ingest.progress import (
    Bar,
    ElapsedRecords,
    json_object,
    number,
    one_writer,
    parse_bar,
    whole,
)

__all__ = ["READER", "HfTrainerReader"]

_ENTRY = re.compile(r"\{'[^'{}]+': ")
_FIELD = re.compile(rf"'(\w+)': '?({NUMBER})[',}}]")
_FLAT_OBJECT = re.compile(r"\{[^{}]*\}")
_TIMES = {"train_runtime", "step_time"}
_RESOLUTION_S = 1e-4
"""`train_runtime` has four decimals."""
_NO_TIME = (
    "no time per log entry in it; train with "
    "TrainingArguments(include_num_input_tokens_seen=True) (transformers 4.53 or newer), which "
    "adds train_runtime to every entry, or give the printed log with its progress bar"
)


class HfTrainerReader:
    """Reads `trainer_state.json` and the printed log of a Hugging Face Trainer."""

    name = "hf_trainer"
    summary = "12%|█▏   | 120/1000 [02:03<15:01,  1.02s/it], or trainer_state.json"
    priority = 5  # any program may draw a bar

    def matches(self, line: str) -> bool:
        """The key of the history, an entry, or a bar that counts iterations."""
        if '"log_history"' in line:
            return True
        if "{'" in line:
            return "'loss': " in line or "'train_runtime': " in line
        return _training_bar(split_prefix(line)[1]) is not None

    def read(self, source: Source, builder: SeriesBuilder) -> None:
        """Raises InputError, with the option to set, when no entry carries a time."""
        first = next((line for line in source.lines() if line.strip()), "")
        if first.lstrip().startswith("{") and any(
            '"log_history"' in line for line in source.lines()
        ):
            _read_state(source, builder)
        else:
            printed: dict[str, _PrintedLog] = {}
            for line in source.lines():
                if "%|" in line or "{'" in line:
                    writer, rest = split_prefix(line)
                    printed.setdefault(writer, _PrintedLog()).line(rest)
            told = {writer: len(log) for writer, log in printed.items() if len(log)}
            if told:
                writer = one_writer(told, builder)
                printed[writer].add_to(builder)
        if not len(builder):
            raise InputError(f"{source.name}: {_NO_TIME}")


def _read_state(source: Source, builder: SeriesBuilder) -> None:
    text = "\n".join(source.lines())
    state = json_object(text)
    history: object
    if state is None:
        builder.warn("the JSON is cut short or broken: its whole log entries were read")
        history = [json_object(found) for found in _FLAT_OBJECT.findall(text)]
    else:
        history = state.get("log_history")
    records = ElapsedRecords(builder)
    for entry in history if isinstance(history, list) else []:
        step = whole(entry.get("step")) if isinstance(entry, dict) else None
        if step is not None:
            _add_entry(entry, step, builder, records)
    records.close()


def _training_bar(line: str) -> Bar | None:
    """An unlabelled bar that counts iterations."""
    if "%|" not in line or not ("it/s" in line or "s/it" in line):
        return None
    bar = parse_bar(line)
    return None if bar is None or bar.label else bar


def _add_entry(
    entry: dict[str, Any], step: int, builder: SeriesBuilder, records: ElapsedRecords
) -> None:
    """One entry of the history, evaluation's included: its time is no iteration's."""
    if "train_loss" in entry:  # the summary of the whole run
        return
    if "step_time" in entry:
        builder.add(step=step, duration_s=number(entry["step_time"]))
    elif "eval_runtime" in entry:
        records.pause(number(entry["eval_runtime"]))
    elif "train_runtime" in entry:
        records.point(
            step,
            number(entry["train_runtime"]),
            resolution_s=_RESOLUTION_S,
            work_total=number(entry.get("num_input_tokens_seen")),
        )


class _PrintedLog:
    """What one process printed: the points of each bar, by its total, and the entries."""

    def __init__(self) -> None:
        self._bars: dict[int, list[tuple[Bar, bool]]] = {}
        self._interrupted: dict[int, bool] = {}
        self._entries: list[tuple[int, dict[str, Any]]] = []
        self._without_step = 0

    def __len__(self) -> int:
        return len(self._entries) + sum(len(points) for points in self._bars.values())

    def line(self, line: str) -> None:
        """Take in a line with a bar or an entry, or neither."""
        bar = _training_bar(line)
        if bar is not None:
            self._bars.setdefault(bar.total, []).append(
                (bar, self._interrupted.get(bar.total, False))
            )
            self._interrupted = {total: total != bar.total for total in self._bars}
            # an entry is printed above the redrawn bar of its step
            for index in range(len(self._entries) - self._without_step, len(self._entries)):
                self._entries[index] = (bar.count, self._entries[index][1])
            self._without_step = 0
        if _ENTRY.search(line):
            entry = {name: number(value) for name, value in _FIELD.findall(line)}
            self._entries.append((len(self._entries) + 1, entry))
            self._without_step += 1
            if any(name.startswith("eval_") for name in entry):
                self._interrupted = dict.fromkeys(self._bars, True)

    def add_to(self, builder: SeriesBuilder) -> None:
        """The entries where they have times, else the bar that ran longest."""
        records = ElapsedRecords(builder)
        timed = [e for _, e in self._entries if "train_loss" not in e and not _TIMES.isdisjoint(e)]
        if len(timed) > 1:
            if not self._bars:
                builder.warn("the entries have no step numbers: log entries were counted instead")
            for step, entry in self._entries:
                _add_entry(entry, step, builder, records)
        elif self._bars:
            for bar, interrupted in max(self._bars.values(), key=_span_s):
                if interrupted and bar.count == records.step:
                    records.pause(bar.elapsed_s - records.elapsed_s)
                records.point(bar.count, bar.elapsed_s)
        records.close()


def _span_s(points: list[tuple[Bar, bool]]) -> float:
    return max(bar.elapsed_s for bar, _ in points)


READER = HfTrainerReader()
