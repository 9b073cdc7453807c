"""The two-phase pause of a job: all workers stop at one boundary, or none does for long. Pure.

In: a script to run while all stand still, what agents report, time. Out: orders to the agents, as
the bodies of messages of topic "pause":

    lead = PauseLead(config, mode="advise")
    lead.begin(script, range(8), now_s)                 # [{"do":"survey","id":1745735301200,…}]
    lead.report(3, body, now_s); lead.tick(now_s)       # … [{"do":"arm",…}] … [{"do":"commit",…}]
    lead.result     # PauseResult(ok=True, results={0: [{"do":"gemm",…}], …}, pause_s=1.31, …)

The boundary is the n-th call on a process group that spans all workers, which all make in the same
order; n lies a little ahead of where the first of them is. A worker waits *before* it makes that
call: whoever got there has issued everything its peers need to get there too. Words:

    survey    agents tell which such groups are in use, how many calls were made and how fast
    arm       agents put the boundary into their workers' mailboxes; each rank: armed, or late
    ready     a worker stands at the boundary
    commit    given once, when every rank was armed and every rank is ready; the workers run the
              script and go on by themselves
    release   the pause is off; whatever time runs out, whoever is late or dies before the commit

A commit may be lost, so workers may disagree about whether it was given, as in any two-phase
commit. Then some of them run the script and its time-outs bound them; the others have gone on to
the boundary's call and wait there for the former, as for any late worker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from failslow.config import LocalizeConfig
from failslow.localize.pause_node import PauseNode
from failslow.localize.pause_worker import TOPIC, PauseWorker
from failslow.localize.script_wire import pack
from failslow.steering import SteerMode

__all__ = ["TOPIC", "PauseLead", "PauseNode", "PauseResult", "PauseWorker"]

Body = dict[str, Any]

_HOUR_S = 3600.0
_SURVEY_S = 4.0
_LEAD_S = 0.75
"""From a survey until all workers are armed; twice as long at each further attempt."""
_HOLD_S = 2.0
"""A worker waits at least so long for the others, and for the words to go round."""
_COMING = 1.5
"""A worker may take so many times longer to the boundary than it took for as many calls so far."""
_MOST_COMING_S = 600.0
_SPARE_S = 2.0
"""The script's time over, reports may still be on their way for so long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseResult:
    """How a pause went."""

    id: int
    ok: bool
    """It was committed, and at least one worker ran the script."""
    reason: str = ""
    """Why not, for people."""
    results: Mapping[int, Sequence[Any]] = field(default_factory=dict)
    """By rank: what the script returned there."""
    errors: Mapping[int, str] = field(default_factory=dict)
    """By rank: why its results are not whole."""
    missing: tuple[int, ...] = ()
    """Ranks that were to run it and did not report."""
    pause_s: float = 0.0
    """The longest that a worker stood still."""
    waited_s: float = 0.0
    """...and the longest of it spent before the commit reached the worker."""
    step: int | None = None
    """The iteration it fell into, as an agent counts them."""
    attempts: int = 1
    began_s: float = 0.0
    """When it was ordered, and..."""
    ended_s: float = 0.0
    """...when this was known, by the clock given to the lead."""


@dataclass(slots=True)
class _Pause:
    id: int
    script: list[Any]
    ranks: frozenset[int]
    counted: bool
    began_s: float
    phase: Literal["survey", "arm", "run"] = "survey"
    attempts: int = 1
    phase_s: float = 0.0
    ready_s: float | None = None
    """Since when a worker is known to wait."""
    surveys: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    armed: set[int] = field(default_factory=set)
    ready: set[int] = field(default_factory=set)
    over: set[int] = field(default_factory=set)
    done: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    hold_s: float = _HOLD_S
    prepare_s: float = 0.0
    """To being at the boundary, all of them."""


class PauseLead:
    """The controller's part: at most one pause at a time, within the budget.

    Times are seconds of a clock that outlives the controller (epoch): pauses are numbered by it,
    so that a worker takes up none of an earlier controller.
    """

    def __init__(
        self, config: LocalizeConfig | None = None, *, mode: SteerMode = "observe"
    ) -> None:
        """mode: in "observe" every pause is refused."""
        self.result: PauseResult | None = None
        """Of the last pause; None while one is on, and before the first."""
        self._config = config or LocalizeConfig()
        self._mode = mode
        self._pause: _Pause | None = None
        self._last_id = 0
        self._spent: deque[tuple[float, float, bool]] = deque()
        """(when, seconds, counted) of the pauses of the last hour."""

    @property
    def active(self) -> bool:
        """A pause is on."""
        return self._pause is not None

    def remember(self, t: float, pause_s: float, *, counted: bool = True) -> None:
        """A pause that an earlier controller led, as the journal has it."""
        self._spent.append((t, pause_s, counted))

    def taken(self, now_s: float) -> int:
        """How many of the hour's pauses there have been."""
        while self._spent and self._spent[0][0] < now_s - _HOUR_S:
            self._spent.popleft()
        return sum(counted for _, _, counted in self._spent)

    def begin(
        self,
        script: Sequence[Mapping[str, Any]],
        ranks: Iterable[int],
        now_s: float,
        *,
        reference: bool = False,
    ) -> list[Body]:
        """Pause all `ranks` and have them run `script`; the orders, [] when it is refused.

        script: stages with `limit_s` and, better, `expect_s`. reference: the one at start-up,
        which no budget forbids. A refusal is a `result` at once. Raises RuntimeError while one is
        on.
        """
        if self._pause is not None:
            raise RuntimeError(f"pause {self._pause.id} is on; wait for its result")
        wanted = frozenset(ranks)
        self._last_id = max(self._last_id + 1, int(now_s * 1000))
        pause = _Pause(
            id=self._last_id,
            script=[dict(stage) for stage in script],
            ranks=wanted,
            counted=not reference,
            began_s=now_s,
        )
        why = self._forbidden(pause, now_s)
        if why:
            self._close(pause, now_s, why)
            return []
        self._pause, self.result = pause, None
        return self._survey(pause, now_s)

    def report(self, rank: int | None, body: Mapping[str, Any], now_s: float) -> list[Body]:
        """An agent reports of a worker; what is not of this pause is passed over."""
        pause = self._pause
        if rank is None or pause is None or body.get("id") != pause.id:
            return []
        if rank not in pause.ranks:
            return []
        try:
            return self._take(pause, rank, body, now_s)
        except (KeyError, TypeError, ValueError) as error:
            if pause.phase == "run":
                return []
            return self._abort(pause, f"rank {rank} reports nonsense ({error!r})", now_s)

    def lost(self, ranks: Iterable[int], now_s: float) -> list[Body]:
        """These workers, or their agents, are known to be gone."""
        pause = self._pause
        if pause is None:
            return []
        gone = sorted(pause.ranks.intersection(ranks))
        if pause.phase != "run":
            return self._abort(pause, f"{_ranks(gone)} gone", now_s) if gone else []
        pause.over.update(gone)
        return self._ended(pause, now_s)

    def call_off(self, why: str, now_s: float) -> list[Body]:
        """What it is for is over: release everyone, unless they run the script already."""
        pause = self._pause
        return [] if pause is None or pause.phase == "run" else self._abort(pause, why, now_s)

    def tick(self, now_s: float) -> list[Body]:
        """Time passed."""
        pause = self._pause
        if pause is None:
            return []
        elapsed_s = now_s - pause.phase_s
        if pause.phase == "survey" and elapsed_s > _SURVEY_S:
            silent = sorted(pause.ranks - pause.surveys.keys())
            return self._abort(pause, f"{_ranks(silent)} did not answer", now_s)
        if pause.phase == "arm":
            left = sorted(pause.ranks - pause.ready)
            if elapsed_s > pause.prepare_s:
                why = f"{_ranks(left)} did not come to the boundary within {elapsed_s:.0f} s"
                return self._abort(pause, why, now_s)
            if pause.ready_s is not None and now_s - pause.ready_s > pause.hold_s:
                why = f"{_ranks(left)} did not come within {pause.hold_s:.1f} s of the first"
                return self._abort(pause, why, now_s)
        if pause.phase == "run" and elapsed_s > self._limit_s(pause) + _SPARE_S:
            self._settle(pause, now_s)
        return []

    # -- parts -------------------------------------------------------------------------------------

    def _forbidden(self, pause: _Pause, now_s: float) -> str:
        """Why this pause may not be; "" when it may."""
        config = self._config
        if self._mode == "observe":
            return "training is not paused in mode observe; set the mode to advise or auto"
        if not pause.ranks:
            return "no worker is known"
        expected_s = sum(float(s.get("expect_s", s.get("limit_s", 0.0))) for s in pause.script)
        if expected_s > config.pause_limit_s:
            return (
                f"the script takes about {expected_s:.1f} s, the limit of a pause is "
                f"{config.pause_limit_s:.1f} s; shorten it or raise pause_limit_s"
            )
        return self._overspent(expected_s, now_s) if pause.counted else ""

    def _overspent(self, expected_s: float, now_s: float) -> str:
        config, count = self._config, self.taken(now_s)
        if count >= config.pauses_per_hour:
            return f"{count} pauses in the last hour; pauses_per_hour allows no more"
        spent_s, allowed_s = sum(s for _, s, _ in self._spent), config.max_pause_share * _HOUR_S
        if spent_s + expected_s > allowed_s:
            return (
                f"pauses took {spent_s:.1f} s of the last hour and this one takes about "
                f"{expected_s:.1f} s; max_pause_share allows {allowed_s:.1f} s"
            )
        return ""

    def _survey(self, pause: _Pause, now_s: float) -> list[Body]:
        pause.phase, pause.phase_s, pause.ready_s = "survey", now_s, None
        pause.surveys, pause.armed, pause.ready = {}, set(), set()
        lead_s = _LEAD_S * 2 ** (pause.attempts - 1)
        return [self._order("survey", pause, lead_s=lead_s)]

    def _take(self, pause: _Pause, rank: int, body: Mapping[str, Any], now_s: float) -> list[Body]:
        what = body["say"]
        if pause.phase == "run":
            if what == "done":
                pause.done[rank] = _checked(body)
            elif what in ("left", "gone"):
                pause.over.add(rank)
            return self._ended(pause, now_s)
        if pause.phase == "survey":
            if what == "groups":
                pause.surveys[rank] = body
            return self._arm(pause, now_s) if pause.surveys.keys() == pause.ranks else []
        return self._gather(pause, rank, what, body, now_s)

    def _gather(
        self, pause: _Pause, rank: int, what: str, body: Mapping[str, Any], now_s: float
    ) -> list[Body]:
        """Before the commit."""
        if what in ("armed", "ready"):
            pause.armed.add(rank)
            if what == "ready":
                pause.ready.add(rank)
                pause.ready_s = now_s if pause.ready_s is None else pause.ready_s
            return self._commit(pause, now_s) if pause.ready == pause.ranks else []
        if what == "late":
            if pause.attempts < self._config.pause_attempts:
                return self._again(pause, now_s)
            why = f"rank {rank} was past the boundary {pause.attempts} times; the agents are slow"
            return self._abort(pause, why, now_s)
        if what in ("left", "gone", "refused"):
            why = "gone" if what == "gone" else str(body["why"])
            return self._abort(pause, f"rank {rank}: {why}", now_s)
        return []

    def _arm(self, pause: _Pause, now_s: float) -> list[Body]:
        """Choose the boundary: on the group whose calls never stay away for long."""
        mute = sorted(rank for rank, body in pause.surveys.items() if not body["speaks"])
        if mute:
            return self._abort(pause, f"{_ranks(mute)} cannot be spoken to: no mailbox", now_s)
        groups: dict[str, list[tuple[int, int, float]]] = {}
        for body in pause.surveys.values():
            for key, count, most, gap_s in body["groups"]:
                groups.setdefault(str(key), []).append((int(count), int(most), float(gap_s)))
        common = {key: seen for key, seen in groups.items() if len(seen) == len(pause.ranks)}
        if not common:
            why = (
                f"no collective spans all {len(pause.ranks)} workers, so there is no boundary at "
                "which all can stop"
                if not groups
                else "no collective that spans all workers was seen in use by all of them"
            )
            return self._abort(pause, why, now_s)
        key = min(common, key=lambda k: (max(gap_s for _, _, gap_s in common[k]), k))
        seen, config = common[key], self._config
        at = max(count for count, _, _ in seen) + max(most for _, most, _ in seen) + 1
        gap_s = max(gap_s for _, _, gap_s in seen)
        pause.hold_s = min(config.ready_timeout_s, _HOLD_S + gap_s)
        # a job may make one such call an iteration, and iterations of a minute
        coming_s = _COMING * gap_s * (at - min(count for count, _, _ in seen))
        pause.prepare_s = max(config.prepare_timeout_s, min(coming_s, _MOST_COMING_S))
        pause.phase, pause.phase_s = "arm", now_s
        return [
            self._order(
                "arm",
                pause,
                group=key,
                at=at,
                hold_s=pause.hold_s,
                for_s=pause.prepare_s + pause.hold_s,
                script=pack(pause.script),
                limit_s=self._limit_s(pause),
            )
        ]

    def _commit(self, pause: _Pause, now_s: float) -> list[Body]:
        pause.phase, pause.phase_s = "run", now_s
        return [self._order("commit", pause, limit_s=self._limit_s(pause))]

    def _again(self, pause: _Pause, now_s: float) -> list[Body]:
        release = self._order("release", pause)
        self._last_id = pause.id = max(pause.id + 1, int(now_s * 1000))
        pause.attempts += 1
        return [release, *self._survey(pause, now_s)]

    def _abort(self, pause: _Pause, why: str, now_s: float) -> list[Body]:
        held_s = 0.0 if pause.ready_s is None else now_s - pause.ready_s
        self._spend(pause, held_s, now_s)
        self._close(pause, now_s, why, pause_s=held_s)
        return [self._order("release", pause)]

    def _ended(self, pause: _Pause, now_s: float) -> list[Body]:
        enough = len(pause.done) + len(pause.over) >= len(pause.ranks)
        if enough and pause.done.keys() | pause.over >= pause.ranks:
            self._settle(pause, now_s)
        return []

    def _settle(self, pause: _Pause, now_s: float) -> None:
        """After the commit: what there is."""
        done = pause.done
        pause_s = max((body["pause_s"] for body in done.values()), default=0.0)
        steps = [body["step"] for body in done.values() if body["step"] is not None]
        self._spend(pause, pause_s, now_s)
        self._close(
            pause,
            now_s,
            "" if done else "the workers did not report",
            ok=bool(done),
            results={rank: body["results"] for rank, body in sorted(done.items())},
            errors={rank: b["error"] for rank, b in sorted(done.items()) if b["error"]},
            missing=tuple(sorted(pause.ranks - done.keys())),
            pause_s=pause_s,
            waited_s=max((body["waited_s"] for body in done.values()), default=0.0),
            step=max(steps) if steps else None,
        )

    def _close(
        self, pause: _Pause, now_s: float, why: str, *, ok: bool = False, **more: Any
    ) -> None:
        self._pause = None
        self.result = PauseResult(
            id=pause.id,
            ok=ok,
            reason=why,
            attempts=pause.attempts,
            began_s=pause.began_s,
            ended_s=now_s,
            **more,
        )

    def _spend(self, pause: _Pause, pause_s: float, now_s: float) -> None:
        self._spent.append((now_s, pause_s, pause.counted))

    def _limit_s(self, pause: _Pause) -> float:
        """How long a worker lets the script run before it goes on without it."""
        limit_s = sum(float(stage.get("limit_s", 0.0)) for stage in pause.script)
        return min(limit_s + 1.0, self._config.pause_limit_s)

    def _order(self, what: str, pause: _Pause, **more: Any) -> Body:
        return {"do": what, "id": pause.id, **more}


def _checked(body: Mapping[str, Any]) -> dict[str, Any]:
    """What a worker says at the end; raises where it lacks something."""
    step = body.get("step")
    return {
        "results": list(body["results"]),
        "error": str(body["error"]),
        "pause_s": float(body["pause_s"]),
        "waited_s": float(body["waited_s"]),
        "step": None if step is None else int(step),
    }


def _ranks(ranks: Sequence[int]) -> str:
    """
    >>> _ranks([3]), _ranks([3, 5]), _ranks(list(range(40)))
    ('rank 3', 'ranks 3, 5', 'ranks 0, 1, 2, 3, 4, 5, 6, 7 and 32 more')
    """
    shown = ", ".join(str(rank) for rank in ranks[:8])
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
