"""What a policy decides on exactly what the job of a journal was told.

In: journal entries, a policy that has decided nothing yet. Out: its decisions, with their times:

    redecide(read_journal(path), Policy(LayoutPlanner(facts, config), config))

While something is done about a fault, an episode's level is for a while that of the time before:
what the job's own policy was told instead stands in the lines of action "pace".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from failslow.decide.events import Event, Pace, Relieved, Tick
from failslow.decide.incident import number_told
from failslow.decide.policy import Policy
from failslow.records import Command, CulpritPace, Decision, Episode, Outcome, Verdict

if TYPE_CHECKING:
    from failslow.journal import JournalEntry

__all__ = ["redecide"]

_COMMAND: TypeAdapter[Command] = TypeAdapter(Command)
_PACE: TypeAdapter[Pace] = TypeAdapter(Pace)


def redecide(entries: Iterable[JournalEntry], policy: Policy) -> list[tuple[float, Decision]]:
    """(epoch seconds, decision), in order.

    With the settings of the time these are the journal's own decisions. Other settings meet the
    same events, though their own decisions would have changed them: `compare` does without that.
    """
    made: list[tuple[float, Decision]] = []
    reader = _Reader()
    for entry in entries:
        told_s = -math.inf
        while (due_s := policy.due_s()) is not None and told_s < due_s <= entry.t:
            made += [(due_s, decision) for decision in policy.update(Tick(), due_s)]
            told_s = due_s
        event = reader.read(entry)
        if event is not None:
            made += [(entry.t, decision) for decision in policy.update(event, entry.t)]
    return made


class _Reader:
    """From lines to events; keeps apart what an episode tells of the time before a plan."""

    def __init__(self) -> None:
        self._level: float | None = None
        """The episode's slowdown as last told, and..."""
        self._level_then: float | None = None
        """...when a plan was carried out: as long as it is that, it is of the time before."""
        self._left: float | None = None
        """What the job's own policy was told since."""
        self._over = ""
        """The episode that ended last."""

    def read(self, entry: JournalEntry) -> Event | None:
        """None where the policy is told nothing."""
        record, tags = entry.record, entry.tags
        if isinstance(record, Episode) and record.kind == "fail_slow":
            return self._episode(record, tags)
        if isinstance(record, Outcome):
            self._outcome(record, answered="id" in tags or record.cost_s > 0.0)
        if isinstance(record, (Verdict, Outcome, CulpritPace, Command)):
            return record
        if entry.kind == "action" and isinstance(record, Mapping):
            return self._action(record)
        return None

    def _episode(self, record: Episode, tags: Mapping[str, Any]) -> Event | None:
        id, event = str(tags.get("id", "")), tags.get("event")
        if event in ("relief", "abandoned"):
            self._over, self._level, self._level_then = id, None, None
            return Relieved(episode=id, lost_s=record.lost_s, abandoned=event == "abandoned")
        self._over = ""
        slowdown = self._level = max(1.0, number_told(tags, "slowdown_now", record.slowdown))
        if self._level != self._level_then:
            self._level_then = None
        elif self._left is None:
            return None
        else:
            slowdown = self._left
        return Pace(episode=id, slowdown=slowdown, lost_s=record.lost_s)

    def _outcome(self, outcome: Outcome, *, answered: bool) -> None:
        """As `pipeline.aftermath` has it. answered: else it tells what a plan left."""
        if not outcome.ok:
            return
        self._left = None if outcome.slowdown is None else max(1.0, outcome.slowdown)
        if answered or outcome.slowdown is None:
            self._level_then = self._level if outcome.level in ("S2", "S3") else None

    def _action(self, record: Mapping[str, Any]) -> Event | None:
        with suppress(ValidationError):
            if record.get("what") == "act":  # a person's order as the controller writes it down
                return _COMMAND.validate_python({"order": record.get("order")})
            if record.get("what") == "pace":
                names = ("episode", "slowdown", "lost_s")
                pace = _PACE.validate_python({name: record.get(name) for name in names})
                self._left = pace.slowdown
                # the episode's own record has told already what was lost in all
                return replace(pace, lost_s=0.0) if pace.episode == self._over else pace
        return None
