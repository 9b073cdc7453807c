"""From "the job is slow" to who it is: profiles asked for and compared, suspects put to the proof.

In: what the episode book says, the agents' reports. Out: `Order`s to profile, to pause, to tell of
their telemetry; journal lines; and a `Verdict`, given to whoever decides what is done:

    {"kind":"diagnosis","episode":"e1745735301","suspects":[{"what":"compute","ranks":[3],…}],…}
    {"kind":"validation","episode":"e1745735301","why":"suspects","pause_s":1.9,"results":[…]}
    {"kind":"verdict","episode":"e1745735301","findings":[{"what":"device","ranks":[3],…}],…}

In mode observe training is never paused: the diagnosis is all there is. The same script run in
healthy times, soon after the start, is the reference that verdicts compare with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from failslow.config import LocalizeConfig
from failslow.localize import script
from failslow.localize.accord import accord
from failslow.localize.judge import judge
from failslow.localize.pause import TOPIC, PauseLead, PauseResult
from failslow.localize.profile import diagnose
from failslow.localize.readings import listed
from failslow.localize.script_wire import members
from failslow.pipeline.case import MOST_RECHECK_S, Case, opened, written
from failslow.pipeline.healthy import AGAIN_S, SOON_S, HealthyProfiles
from failslow.pipeline.measured import Measured, begun, concluded, ended
from failslow.pipeline.messages import Instruction, Order, Report, Say, Write
from failslow.pipeline.past import Past
from failslow.pipeline.resumption import go_on
from failslow.pipeline.witnesses import JOURNALED, Witnesses
from failslow.pipeline.wording import described, proved
from failslow.profile_wire import read_profile_body
from failslow.records import Diagnosis, RankProfile, SteerMode, Verdict

__all__ = ["Inquiry"]

_BACK_S = 3.0
"""After so long a new controller knows who lives: agents say it every second."""
_EMPTY = 3
"""Verdicts on one slowdown that may find nothing; then another level or episode asks again."""
_WELL = 1.05
_FOR_NEWS = 2
"""Of an hour's pauses so many are not spent on looking again at a culprit that is known; one where
nothing else tells how that fares."""


class Inquiry:
    """Finds one job's culprits.

    ranks: the workers that live. ahead_s: by how much a node's clock is ahead of the job's, None
    unknown. own: how slow workers are by their own time, where known.
    decide: takes each verdict.
    """

    def __init__(
        self,
        config: LocalizeConfig,
        mode: SteerMode,
        *,
        ranks: Callable[[], Collection[int]],
        ahead_s: Callable[[str], float | None],
        own: Callable[[], Mapping[int, float]],
        decide: Callable[[Verdict, float], list[Instruction]],
    ) -> None:
        self._config, self._mode = config, mode
        self._ranks, self._ahead_s, self._own, self._decide = ranks, ahead_s, own, decide
        self._lead = PauseLead(config, mode=mode)
        self._taking_part: frozenset[int] = frozenset()
        self._why = ""
        """What the pause that is on is for: "reference" or "suspects"."""
        self._paused: Case | None = None
        """Whose suspects it puts, or has put, to the proof."""
        self._case: Case | None = None
        self._kept: Case | None = None
        """The case before it, if something is still done about that one."""
        self._healthy = HealthyProfiles()
        self._start: Diagnosis | None = None
        """Who calls late in healthy times: slow from the start."""
        self._reference: list[dict[str, Any]] = []
        self._reference_due_s: float | None = None
        self._witnesses = Witnesses()
        self._measured: Measured | None = None

    @property
    def urgent(self) -> bool:
        """Whether answers are waited for."""
        asked = self._case is not None and self._case.asked_s is not None
        return asked or self._lead.active or self._measured is not None

    @property
    def healthy(self) -> list[RankProfile]:
        """How the workers' calls went in healthy times, if need be by an earlier program."""
        return list(self._healthy.known.values())

    # -- what happens ------------------------------------------------------------------------------

    def note(self, write: Write, now_s: float, *, holding: bool = False) -> list[Instruction]:
        """A suspicion or an episode has taken a turn. holding: something is done about a fault."""
        event, case = write.event, self._case
        if event == "suspected":
            if case is not None and (case.kept or case.confirmed):
                self._kept = case  # of a fault that something is done about
            self._case = opened(write, now_s)
            return [self._case.ask(now_s)]
        if event == "cleared":
            if case is not None and not case.confirmed:
                self._case, self._kept = self._kept, None
            self._healthy.want(now_s + SOON_S)
        elif event == "onset":
            self._kept = None
            if case is None or case.id != write.tags["id"]:
                self._case = opened(write, now_s)
                return [self._case.ask(now_s)]
            case.confirmed, case.slowdown = True, write.record.slowdown
            case.due_s = now_s
        elif event == "level" and self._case is not None:
            if not self._case.confirmed and write.tags["slowdown_now"] > _WELL:
                self._case.confirmed, self._case.due_s, self._kept = True, now_s, None
            # deeper: there may be another one
            slower = write.tags["slowdown_now"] > self._case.slowdown
            self._case.slowdown = write.tags["slowdown_now"]
            self._case.iteration_s = self._case.slowdown * write.record.baseline_s
            if slower:
                self._case.empty = 0
                return [self._case.ask(now_s)]
        elif event in ("relief", "abandoned"):
            if case is not None and case.confirmed and holding:
                case.kept, case.asked_s = True, None  # profiles now are of something else
            else:
                self._case = None
            self._healthy.want(now_s + SOON_S)
        return []

    def restarted(self, now_s: float) -> None:
        """Workers were started again, perhaps elsewhere: what is healthy is to be seen anew.

        Agents profile new workers by themselves; of those that were not it is asked for.
        """
        self._healthy, self._reference, self._start = HealthyProfiles(), [], None
        self._reference_due_s = None
        self._healthy.want(now_s + AGAIN_S)

    def changed(self, now_s: float) -> None:
        """The program is another one: its calls do not compare with those of before."""
        self._healthy.change(now_s)
        self._start = None

    def report(self, event: Report, now_s: float) -> list[Instruction]:
        """An agent answers."""
        if event.topic == "profile":
            return self._profile(event, now_s)
        if event.topic == "telemetry":
            self._witnesses.take(event.node, event.body)
            return self._prove(now_s)
        if event.topic == TOPIC and self._lead.active:
            return self._led(self._lead.report(event.rank, event.body, now_s), now_s)
        return []

    def tick(self, now_s: float, *, holding: bool) -> list[Instruction]:
        """Time passed. holding: something is done about the fault."""
        out: list[Instruction] = []
        if self._lead.active and self._why == "suspects" and not self._is_open(self._paused):
            out += self._led(self._lead.call_off("what was slow is well", now_s), now_s)
        if self._lead.active:
            gone = self._taking_part - set(self._ranks())
            bodies = self._lead.lost(gone, now_s) if gone else []
            out += self._led([*bodies, *self._lead.tick(now_s)], now_s)
        if not holding:  # what was done is taken back
            self._kept = None
            if self._case is not None and self._case.kept:
                self._case = None
        case = self._case
        if case is None:
            out += self._ask_healthy(now_s)
        elif case.is_late(now_s) or self._have_come(case, now_s):
            out += self._diagnose(case, now_s)
        if self._measured is not None:
            out += self._prove(now_s)
        elif not self._lead.active and self._mode != "observe":
            if case is not None:
                out += self._validate(case, now_s, holding=holding)
            elif self._reference_due_s is not None and now_s >= self._reference_due_s:
                out += self._refer(now_s)
        return out

    def resume(self, past: Past, now_s: float, *, episode: str | None) -> list[Instruction]:
        """Go on where an earlier controller of this launch was, once it is known who lives.

        episode: id of the one that is on.
        """
        back_s = now_s + _BACK_S
        self._reference = [dict(result) for result in past.reference]
        self._healthy = HealthyProfiles(past.profiles)
        for t, pause_s, counted in past.pauses:
            self._lead.remember(t, pause_s, counted=counted)
        case = self._case
        if case is None:
            # what is due by the iterations told once more is long past
            self._healthy.want(back_s if past.episode is None else None)
            return []
        if episode is not None and case.confirmed:
            case.id = episode
        known = go_on(case, past.inquiry, self._config)
        out: list[Instruction] = []
        if case.due_s is not None:
            case.due_s = max(case.due_s, back_s)
        if case.diagnosis is None or case.asked_s is not None:
            out.append(case.ask(now_s))  # nobody answers the earlier controller
        if known.unjudged is not None:
            out += self._ask_telemetry(case, [], now_s)
            self._measured, self._paused = Measured.of(known.unjudged, back_s), case
        for verdict in known.verdicts:
            out += self._decide(verdict, now_s)
        return out

    # -- profiles ----------------------------------------------------------------------------------

    def _ask_healthy(self, now_s: float) -> list[Instruction]:
        """Agents make healthy profiles by themselves, unless a suspicion came first."""
        if not self._healthy.due(now_s):
            return []
        if self._healthy.are_of(self._ranks()):
            self._healthy.want(None)
            self._want_reference(now_s)
            return []
        return [self._healthy.order(now_s)]

    def _profile(self, event: Report, now_s: float) -> list[Instruction]:
        try:
            profile = read_profile_body(event.body)
        except ValueError as error:
            return [Say(f"a profile of node {event.node} makes no sense: {error}")]
        if event.body.get("why") == "healthy":
            # a new agent makes one by itself, of whatever times these are
            return [] if self._case is not None else self._first_look(profile, now_s)
        case = self._case
        if case is None or case.asked_s is None:
            return []
        case.profiles[profile.rank] = profile
        return self._diagnose(case, now_s) if self._are_all(case.profiles) else []

    def _are_all(self, profiles: Mapping[int, RankProfile]) -> bool:
        """They are of all workers that live, as far as that is known."""
        ranks = self._ranks()
        return len(profiles) >= len(ranks) > 0 and profiles.keys() >= set(ranks)

    def _have_come(self, case: Case, now_s: float) -> bool:
        """All profiles were there before it was known who lives."""
        waited = case.asked_s is not None and now_s - case.asked_s >= _BACK_S
        return waited and self._are_all(case.profiles)

    def _want_reference(self, now_s: float) -> None:
        """Take the reference, unless there is one, or it is to be tried again anyway."""
        wanted = self._config.reference and not self._reference
        if wanted and self._reference_due_s is None:
            self._reference_due_s = now_s

    def _first_look(self, profile: RankProfile, now_s: float) -> list[Instruction]:
        """Healthy profiles: once all are there, who is slow from the start, by its peers?"""
        healthy = self._healthy
        if not self._ranks():  # it is seen later whether they are all
            healthy.want(now_s + SOON_S)
        if not healthy.take(profile) or not healthy.are_of(self._ranks()):
            return []
        self._want_reference(now_s)
        profiles = healthy.of_now
        diagnosis = diagnose(list(profiles.values()), [], episode="", slowdown=1.0)
        self._start = diagnosis
        out = written(profiles, sorted(profiles), "", now_s)
        out.append(Write(kind="diagnosis", record=diagnosis, t=now_s))
        if diagnosis.suspects:
            out.append(Say("at the start: " + described(diagnosis)))
        return out

    def _diagnose(self, case: Case, now_s: float) -> list[Instruction]:
        case.asked_s = None
        missing = tuple(sorted(set(self._ranks()) - case.profiles.keys()))
        diagnosis = diagnose(
            list(case.profiles.values()),
            # an elastic job may have fewer workers than it had
            [profile for rank, profile in self._healthy.of_now.items() if rank in case.profiles],
            episode=case.id,
            slowdown=case.slowdown,
        )
        case.diagnosis = diagnosis = replace(diagnosis, missing=missing)
        case.due_s = now_s
        accused = {rank for suspect in diagnosis.suspects for rank in suspect.ranks}
        shown = sorted(case.profiles, key=lambda rank: (rank not in accused, rank))
        return [
            *written(case.profiles, shown, case.id, now_s),
            Write(kind="diagnosis", record=diagnosis, t=now_s),
            Say(described(diagnosis)),
        ]

    # -- proof -------------------------------------------------------------------------------------

    def _validate(self, case: Case, now_s: float, *, holding: bool) -> list[Instruction]:
        """Pause training for the suspects' benchmarks, when that is due."""
        diagnosis = case.diagnosis
        if diagnosis is None or not case.is_due(now_s):
            return []
        case.due_s = None
        if case.empty and not holding:
            if case.empty >= _EMPTY:
                return []
            if diagnosis is case.judged:
                return [case.ask(now_s)]
        if case.recheck_s and diagnosis is case.judged and self._are_few(case, now_s):
            case.due_s = now_s + case.recheck_s
            return []
        well = case.well if case.empty else ()
        stages = script.plan(diagnosis, self._places(), self._settings(), well=well)
        if not stages:
            if case.recheck_s or not self._ranks():  # agents may be silent for a moment
                case.due_s = now_s + (case.recheck_s or _BACK_S)
            return [Say("nothing to put to the proof: " + described(diagnosis))]
        asked = self._ask_telemetry(case, stages, now_s)
        return [*asked, *self._pause(stages, "suspects", now_s)]

    def _are_few(self, case: Case, now_s: float) -> bool:
        """The hour's pauses that are left are for faults of which nothing is known yet."""
        most, kept = self._config.pauses_per_hour, 1 if case.linked else _FOR_NEWS
        return most - self._lead.taken(now_s) <= min(kept, most // 3)

    def _ask_telemetry(self, case: Case, stages: script.Script, now_s: float) -> list[Order]:
        """Of the suspects' nodes, then of those that are measured."""
        node_of = {place.rank: place.node for place in self._places()}
        suspects = case.diagnosis.suspects if case.diagnosis is not None else ()
        ranks = [rank for s in suspects for rank in (*s.ranks, *s.peer_ranks)]
        ranks += [rank for stage in stages for rank in members(stage)]
        nodes = (node_of[rank] for rank in ranks if rank in node_of)
        every = set(node_of.values())
        return self._witnesses.ask(nodes, case.telling_s(now_s), every=every)

    def _refer(self, now_s: float) -> list[Instruction]:
        """Run the benchmarks once in healthy times."""
        self._reference_due_s = None
        stages = script.reference_script(self._places(), self._settings())
        return self._pause(stages, "reference", now_s)

    def _settings(self) -> script.ScriptSettings:
        return script.ScriptSettings.from_config(self._config)

    def _pause(self, stages: script.Script, why: str, now_s: float) -> list[Instruction]:
        self._why, self._taking_part = why, frozenset(self._ranks())
        self._paused = self._case if why == "suspects" else None
        bodies = self._lead.begin(stages, self._taking_part, now_s, reference=why == "reference")
        if not bodies:
            return self._led(bodies, now_s)
        record = begun(why, self._paused_for(), script.expected_s(stages))
        return [Write(kind="action", record=record, t=now_s), *self._led(bodies, now_s)]

    def _paused_for(self) -> str:
        """The episode; a reference is of none."""
        return "" if self._paused is None else self._paused.id

    def _is_open(self, case: Case | None) -> bool:
        """It is still asked who is to blame for it: what was measured for one is not another's."""
        return case is not None and (case is self._case or case is self._kept)

    def _led(self, bodies: Iterable[Mapping[str, Any]], now_s: float) -> list[Instruction]:
        """Orders of the pause, and what follows once it is over or came to nothing."""
        out: list[Instruction] = [Order(topic=TOPIC, body=body) for body in bodies]
        result = self._lead.result
        if result is None or self._lead.active or not self._why:
            return out
        why, self._why = self._why, ""
        record = ended(why, self._paused_for(), result)
        out.append(Write(kind="validation", record=record, t=now_s))
        if not result.ok:
            return out + self._failed(why, result.reason, now_s)
        if why == "reference":
            return out + self._referred(result, record["results"], now_s)
        self._measured = Measured.of(record, now_s)
        return out + self._prove(now_s)

    def _referred(
        self, result: PauseResult, results: list[dict[str, Any]], now_s: float
    ) -> list[Instruction]:
        """The reference is there; peers already tell who is slow from the start."""
        self._reference = results
        verdict = judge(
            results, (), self._places(), episode="", step=result.step, pause_s=result.pause_s
        )
        # benchmarks of a moment alone accuse nobody: the job has to wait for it as well
        start = self._start or Diagnosis(episode="", suspects=())
        verdict = accord(verdict, start, slowdown=math.inf)
        names = listed(f"{f.key} x{f.slowdown:.2f}" for f in verdict.findings)
        more = f"; slow from the start, by its peers: {names}" if names else ""
        return [
            Write(kind="verdict", record=verdict, t=now_s),
            Say(f"reference taken in a pause of {result.pause_s:.2f} s{more}"),
        ]

    def _failed(self, why: str, reason: str, now_s: float) -> list[Instruction]:
        if why == "reference":
            self._reference_due_s = now_s + MOST_RECHECK_S
        elif self._paused is not None:
            self._paused.take_failure(now_s)
        return [Say(f"training was not paused for the {why}: {reason}")]

    def _prove(self, now_s: float) -> list[Instruction]:
        """The verdict, once telemetry is there or has been waited for."""
        measured, case = self._measured, self._paused
        if measured is None or measured.waits(now_s, told=self._witnesses.told):
            return []
        if case is None or not self._is_open(case):
            self._measured = None
            return []  # relief came first: what was slow is well
        places = {place.rank: place for place in self._places()}
        verdict = judge(
            measured.results, self._reference, list(places.values()),
            episode=case.id, step=measured.step, pause_s=measured.pause_s,
        )  # fmt: skip
        ranks = [rank for f in verdict.findings for rank in (*f.ranks, *f.peer_ranks)]
        blamed = list(dict.fromkeys(places[rank].node for rank in ranks))
        if self._witnesses.lacks(blamed):  # measured to be slow, but no suspect
            self._measured = measured.again(now_s)
            return [*self._witnesses.ask_more(blamed, case.telling_s(now_s))]
        self._measured = None
        windows = self._witnesses.windows(self._ahead_s, first=blamed)
        verdict = concluded(verdict, case, windows, places, own=self._own())
        case.take_verdict(verdict, recheck_s=self._config.recheck_s, now_s=now_s)
        out: list[Instruction] = [
            Write(kind="telemetry", record=window, t=now_s) for window in windows[:JOURNALED]
        ]
        out.append(Write(kind="verdict", record=verdict, t=now_s))
        out.append(Say(proved(verdict)))
        return out + self._decide(verdict, now_s)

    def _places(self) -> list[script.WorkerPlace]:
        living = set(self._ranks())
        profiles = self._healthy.known | (self._case.profiles if self._case else {})
        return [
            script.WorkerPlace.of(profile)
            for rank, profile in sorted(profiles.items())
            if rank in living
        ]
