"""One training process's part in a pause: what it waits for, and when it goes on. Standard library.

In: letters of its agent, the calls it is about to make, time. Out: whether to wait, letters:

    worker = PauseWorker()
    worker.letter({"do":"arm","id":81,"group":0,"at":812,"hold_s":2.0,"for_s":30.0,…}, now_s)
    worker.arrive(0, 812, now_s, sign_s)   # [{"topic":"pause","id":81,"say":"ready","count":812}]
    worker.look(now_s, sign_s)             # "hold", then "run" once COMMIT has come, or "go"

It never waits for anybody but its agent's word, never longer than `hold_s`, and never for an agent
that gives no sign of life. It runs a script only when COMMIT came while it stood at the boundary.
All times are seconds of one clock, that of the machine (CLOCK_MONOTONIC).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

__all__ = ["MAX_HOLD_S", "TOPIC", "Letter", "PauseWorker"]

Letter = dict[str, Any]
Next = Literal["hold", "run", "go"]
TOPIC = "pause"
"""Of letters, orders and reports."""
MAX_HOLD_S = 60.0
"""No order makes a worker wait longer, whatever it says."""


class PauseWorker:
    """Takes letters and calls one at a time.

    silence_s: an agent that has given no sign for so long is taken for dead.
    """

    def __init__(self, *, silence_s: float = 1.0) -> None:
        self.state: Literal["idle", "armed", "holding", "running"] = "idle"
        self.script: list[Any] = []
        """What to run in state "running", for at most..."""
        self.limit_s = 0.0
        """...so long, whatever the script says of itself."""
        self.id = 0
        """Of the pause in hand, or of the last one: no lower one is ever taken up again."""
        self.held_since_s = 0.0
        """When it began to wait."""
        self._silence_s = silence_s
        self._group, self._at, self._hold_s, self._until_s = -1, 0, 0.0, 0.0
        self._committed = False
        self._why = ""

    def letter(self, letter: Mapping[str, Any], now_s: float) -> list[Letter]:
        """Take a letter; what to answer. One that makes no sense is passed over."""
        try:
            what, number = letter["do"], int(letter["id"])
            if what == "arm" and number > self.id and self.state != "running":
                return self._arm(letter, number, now_s)
            if number == self.id and what == "commit" and self.state == "holding":
                self._committed = True
            elif number == self.id and what == "commit" and self.state == "armed":
                # of an earlier start of the job, kept by the bus: it never was ready for this one
                return self._leave("the commit came before it was ready", now_s)
            elif number == self.id and what == "release" and self.state in ("armed", "holding"):
                return self._leave("released", now_s)
        except (KeyError, TypeError, ValueError):
            pass  # whoever wrote it will miss the answer
        return []

    def _arm(self, letter: Mapping[str, Any], number: int, now_s: float) -> list[Letter]:
        group, at, hold_s = int(letter["group"]), int(letter["at"]), float(letter["hold_s"])
        script, limit_s = list(letter["script"]), float(letter["limit_s"])
        until_s = now_s + float(letter["for_s"])
        answers = [] if self.state == "idle" else self._leave("another pause was ordered", now_s)
        self.id, self.state, self._committed = number, "armed", False
        self._group, self._at, self._hold_s = group, at, min(hold_s, MAX_HOLD_S)
        self.script, self.limit_s, self._until_s = script, limit_s, until_s
        return answers

    def refuse(self, why: str) -> list[Letter]:
        """It cannot stop here: a pause that is not yet held is off, for this worker."""
        if self.state != "armed":
            return []
        self.state = "idle"
        return [self._say("refused", why=why)]

    def is_boundary(self, group: int, count: int) -> bool:
        """Whether the worker would wait before this call."""
        return self.state == "armed" and group == self._group and count == self._at

    def is_behind(self, group: int, count: int) -> bool:
        """Whether the call comes after the one another thread waits before."""
        held = self.state in ("holding", "running")
        return held and group == self._group and count > self._at

    def arrive(self, group: int, count: int, now_s: float, sign_s: float) -> list[Letter]:
        """The worker is about to make its `count`-th call on `group`; what to say.

        sign_s: when the agent last gave a sign of life.
        """
        if self.state == "armed" and now_s > self._until_s:
            return self._leave("it did not come to the boundary in time", now_s)
        if self.state != "armed" or group != self._group or count < self._at:
            return []
        if count > self._at:
            self.state = "idle"
            return [self._say("late", count=count, at=self._at)]
        self.held_since_s = now_s
        if now_s - sign_s > self._silence_s:
            return self._leave("its agent is silent", now_s)
        self.state = "holding"
        return [self._say("ready", count=count)]

    def look(
        self, now_s: float, sign_s: float
    ) -> tuple[Literal["hold", "run", "go"], list[Letter]]:
        """What a worker at the boundary does next; COMMIT outranks a time that just ran out."""
        if self.state != "holding":
            return "go", []
        if self._committed:
            self.state = "running"
            return "run", []
        if now_s - self.held_since_s >= self._hold_s:
            return "go", self._leave(f"no word to begin within {self._hold_s:.1f} s", now_s)
        if now_s - sign_s > self._silence_s:
            return "go", self._leave("its agent is silent", now_s)
        return "hold", []

    def finish(self, results: Sequence[Any], error: str, began_s: float, now_s: float) -> Letter:
        """The script that began at `began_s` has ended, or was left behind."""
        self.state = "idle"
        return self._say(
            "done",
            results=list(results),
            error=error,
            waited_s=began_s - self.held_since_s,
            pause_s=now_s - self.held_since_s,
        )

    def abandon(self, why: str, now_s: float) -> list[Letter]:
        """A worker that stood still goes on although nothing told it to."""
        return self._leave(why, now_s) if self.state in ("holding", "running") else []

    def _leave(self, why: str, now_s: float) -> list[Letter]:
        stood = self.state in ("holding", "running")
        held_s = now_s - self.held_since_s if stood else 0.0
        self.state, self._committed = "idle", False
        return [self._say("left", why=why, held_s=held_s)]

    def _say(self, what: str, **more: Any) -> Letter:
        return {"topic": TOPIC, "id": self.id, "say": what, **more}
