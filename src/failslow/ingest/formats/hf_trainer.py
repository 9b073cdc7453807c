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
from dataclasses import dataclass, field
from typing import Any

from failslow.errors import InputError
from failslow.ingest.base import NUMBER, SeriesBuilder, Source, split_prefix
from failslow.ingest.progress import ElapsedRecords, json_object, number, parse_bar, whole

__all__ = ["READER", "HfTrainerReader"]

_ENTRY = re.compile(r"\{'[^'{}]+': ")
_FIELD = re.compile(rf"'(\w+)': '?({NUMBER})")
_FLAT_OBJECT = re.compile(r"\{[^{}]*\}")
_RESOLUTION_S = 1e-4
"""`train_runtime` has four decimals."""
_NO_TIME = (
    "no time per log entry in it; train with "
    "TrainingArguments(include_num_input_tokens_seen=True) (transformers 4.53 or newer), which "
    "adds train_runtime to every entry, or give the printed log with its progress bar"
)


@dataclass(slots=True)
class _Progress:
    """What one bar showed: (iterations, elapsed, seconds paused before it)."""

    points: list[tuple[int, float, bool]] = field(default_factory=list)
    interrupted: bool = False


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
        return _training_bar(line)

    def read(self, source: Source, builder: SeriesBuilder) -> None:
        """Raises InputError, with the option to set, when no entry carries a time."""
        if source.head().lstrip().startswith(b"{") and b'"log_history"' in source.head():
            self._read_state(source, builder)
        else:
            self._read_printed(source, builder)
        if not len(builder):
            raise InputError(f"{source.name}: {_NO_TIME}")

    def _read_state(self, source: Source, builder: SeriesBuilder) -> None:
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
            if step is None or "train_loss" in entry:  # the summary of the whole run
                continue
            _add_entry(entry, step, builder, records)
        records.close()

    def _read_printed(self, source: Source, builder: SeriesBuilder) -> None:
        bars: dict[tuple[str, int], _Progress] = {}
        entries: list[tuple[int, dict[str, float]]] = []
        without_step = 0
        for line in source.lines():
            writer, rest = split_prefix(line)
            if "%|" in rest and _training_bar(rest):
                bar = parse_bar(rest)
                if bar is None:
                    continue
                for key, progress in bars.items():
                    progress.interrupted |= key != (writer, bar.total)
                progress = bars.setdefault((writer, bar.total), _Progress())
                progress.points.append((bar.count, bar.elapsed_s, progress.interrupted))
                progress.interrupted = False
                if without_step:  # an entry is printed above the redrawn bar of its step
                    entries[-without_step:] = [(bar.count, e) for _, e in entries[-without_step:]]
                    without_step = 0
            if _ENTRY.search(rest):
                entry = {name: number(value) for name, value in _FIELD.findall(rest)}
                if "train_loss" not in entry:
                    entries.append((len(entries) + 1, entry))
                    without_step += 1
                if any(name.startswith("eval_") for name in entry):
                    for progress in bars.values():
                        progress.interrupted = True
        timed = [e for e in entries if "train_runtime" in e[1] or "step_time" in e[1]]
        if len(timed) > 1:
            self._add_printed(entries, builder, counted=not bars)
        elif bars:
            longest = max(bars, key=lambda key: _span_s(bars[key]))
            _add_bar(bars[longest], builder)

    def _add_printed(
        self, entries: list[tuple[int, dict[str, float]]], builder: SeriesBuilder, *, counted: bool
    ) -> None:
        if counted:
            builder.warn("the entries have no step numbers: log entries were counted instead")
        records = ElapsedRecords(builder)
        for step, entry in entries:
            _add_entry(entry, step, builder, records)
        records.close()


def _training_bar(line: str) -> bool:
    """Whether the line holds an unlabelled bar that counts iterations."""
    if "%|" not in line or not ("it/s" in line or "s/it" in line):
        return False
    bar = parse_bar(split_prefix(line)[1])
    return bar is not None and not bar.label


def _add_entry(
    entry: dict[str, Any], step: int, builder: SeriesBuilder, records: ElapsedRecords
) -> None:
    """One entry of the history, evaluation's included: its time is no iteration's."""
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


def _span_s(progress: _Progress) -> float:
    return max(elapsed_s for _, elapsed_s, _ in progress.points)


def _add_bar(progress: _Progress, builder: SeriesBuilder) -> None:
    records = ElapsedRecords(builder)
    before = (-1, 0.0)
    for count, elapsed_s, interrupted in progress.points:
        if interrupted and count == before[0]:
            records.pause(elapsed_s - before[1])
        records.point(count, elapsed_s)
        before = (count, elapsed_s)
    records.close()


READER = HfTrainerReader()
