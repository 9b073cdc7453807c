"""The card of one fail-slow: who was suspected, what was proven and why, what was done.

In: a `Case` and its `Story`. Out: pieces of HTML.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from failslow.records import Decision, Finding, Measurement, Outcome
from failslow.report import units, words
from failslow.report.story.model import Case, Story
from failslow.report.story.pieces import meter, small, table
from failslow.report.story.places import decided_moves
from failslow.report.story.restarts import Restart, commands_text, restart_text
from failslow.report.story.terminal import length_text, slowdown_text

__all__ = ["case_card", "start_card"]

_SUSPECTS, _EVENTS = 24, 100


def case_card(number: int, case: Case, story: Story, *, telemetry: Sequence[int]) -> Iterator[str]:
    """Pieces of its card. `telemetry`: the numbers of its pictures."""
    episode = case.episode
    assert episode is not None
    facts = [
        case.id,
        f"from {units.clock(case.start_t)} UTC, {length_text(case, story)}",
        f"{slowdown_text(case)}, {units.duration(case.lost_s)} lost".replace("\n", ", "),
        f"confidence {episode.confidence:.3f}",
    ]
    if len(episode.levels) > 1:
        levels = ", ".join(
            f"{units.slowdown(v.slowdown)} from step {units.count(v.start_step)}"
            for v in episode.levels
        )
        facts.append(f"levels {levels}")
    yield (
        f'<section class="card" id="case-{number}"><div class="head">'
        f'<h2>Fail-slow {number}</h2><span class="tag fail_slow">'
        f"{units.slowdown(case.worst)}</span></div>"
        f'<p class="facts">{escape(" · ".join(facts))}</p>'
    )
    yield from _verdicts(case)
    if telemetry:
        yield "<h3>Telemetry around the onset</h3>"
        yield f'<p class="facts">{_telemetry_facts(case)}</p>'
    for picture in telemetry:
        yield (
            f'<div data-picture="telemetry" data-number="{picture}" style="height:300px" '
            'role="img" aria-label="telemetry around the onset"></div>'
        )
    yield from _suspects(case)
    yield from _decisions(case, story)
    yield "</section>\n"


def start_card(story: Story) -> Iterator[str]:
    """Who is slow from the start; nothing where nobody asked."""
    case = story.start
    if case is None or not (case.diagnoses or case.verdicts):
        return
    slow = case.findings or any(d.suspects for _, d in case.diagnoses[-1:])
    mood, word = ("fail_slow", "slow by peers") if slow else ("ok", "nobody slow by peers")
    yield (
        '<section class="card" id="start"><div class="head"><h2>From the start</h2>'
        f'<span class="tag {mood}">{word}</span></div>'
    )
    yield from _verdicts(case)
    yield from _suspects(case)
    yield "</section>\n"


def _telemetry_facts(case: Case) -> str:
    end = ", green: relief" if case.end_t is not None else ""
    return f"What moved most when it began; red dots: onset{end}. Values: median before → during."


def _verdicts(case: Case) -> Iterator[str]:
    for finding in case.findings:
        yield from _finding(finding)
    if case.verdicts and not case.findings:
        yield f'<p class="found">{escape(words.verdict_text(case.verdicts[-1][1]))}</p>'
    if case.verdicts:
        pauses = ", ".join(
            f"{units.clock(t)[11:]} UTC"
            + (f" at step {units.count(v.step)}" if v.step is not None else "")
            + f" ({units.duration(v.pause_s)})"
            for t, v in case.verdicts[-8:]
        )
        notes = "; ".join(dict.fromkeys(v.note for _, v in case.verdicts if v.note))
        text = f"Validated {pauses}" + (f". {notes}" if notes else "")
        yield f'<p class="facts">{escape(text)}</p>'


def _finding(finding: Finding) -> Iterator[str]:
    cause = f' <span class="tag workload_change">{escape(finding.cause)}</span>'
    yield (
        f'<p class="found">{escape(words.finding_text(finding, cause=False))}'
        f"{cause if finding.cause else ''}</p>"
    )
    if finding.measurements:
        heads = ("measured", ">value", ">expected", ">ratio")
        yield table(heads, (("", _measurement(m)) for m in finding.measurements))
    if finding.evidence:
        yield '<ul class="facts-for">'
        for fact in finding.evidence:
            way = next((w for w in ("for", "against") if fact.lower().startswith(w)), "")
            yield f'<li class="{way}">{escape(fact)}</li>'
        yield "</ul>"


def _measurement(m: Measurement) -> list[str]:
    expected = "" if m.expected is None else words.quantity_text(m.expected, m.unit)
    ratio = f"×{m.value / m.expected:.2f}" if m.expected else ""
    value = words.quantity_text(m.value, m.unit)
    return [escape(m.what), escape(value), escape(expected), ratio]


def _suspects(case: Case) -> Iterator[str]:
    if not case.diagnoses:
        return
    t, diagnosis = case.diagnoses[-1]
    yield "<h3>Suspects</h3>"
    facts = [f"{units.clock(t)[11:]} UTC", f"{units.count(len(diagnosis.ranks))} profiles"]
    if diagnosis.missing:
        facts.append(f"none of {words.ranks_text(diagnosis.missing)}")
    if diagnosis.everyone:
        facts.append(words.diagnosis_text(diagnosis))
    if diagnosis.imbalance:
        facts.append(f"uneven by design: {diagnosis.imbalance}")
    if diagnosis.note:
        facts.append(diagnosis.note)
    yield f'<p class="facts">{escape(" · ".join(facts))}</p>'
    rows = []
    for suspect in diagnosis.suspects[:_SUSPECTS]:
        numbers = "; ".join(words.measurement_text(m) for m in suspect.measurements)
        rows.append(
            (
                "",
                [
                    escape(words.suspect_text(suspect)),
                    f"{suspect.score:.2f}{meter(suspect.score)}",
                    units.slowdown(suspect.slowdown),
                    f"+{units.duration(suspect.extra_s)}",
                    escape("; ".join(filter(None, (numbers, suspect.note)))),
                ],
            )
        )
    if rows:
        heads = ("who", ">score", ">slowdown", ">an iteration", "numbers")
        yield table(heads, rows)
    more = len(diagnosis.suspects) - len(rows)
    if more > 0:
        yield f'<p class="facts">and {units.count(more)} more</p>'


def _decisions(case: Case, story: Story) -> Iterator[str]:
    events = case.acts
    if not events:
        return
    yield "<h3>What was decided and done</h3>"
    rows = []
    for t, event in events[-_EVENTS:]:
        when = f"{units.clock(t)[11:]}\u00a0UTC"
        if isinstance(event, Outcome):
            kind = "ok" if event.ok else "fail_slow"
            text = f'<span class="tag {kind}">{escape(words.outcome_text(event))}</span>'
            rows.append(("", [when, text, "", ""]))
        elif isinstance(event, Restart):
            kind = "ok" if event.back_t is not None else "fail_slow"
            text = f'<span class="tag {kind}">{escape(restart_text(event))}</span>'
            rows.append(("", [when, text, "", ""]))
        elif isinstance(event, Decision):
            moves = () if event.plan is None else decided_moves(story, t, event.plan.placement)
            rows.append(("", [when, *_decision(event, moves)]))
        else:
            rows.append(("", [when, escape(commands_text(event)), "", ""]))
    yield table(("when", "what", "why", "levels as they looked"), rows)
    if len(events) > _EVENTS:
        yield f'<p class="facts">the last {_EVENTS} of {units.count(len(events))}</p>'
    if case.removal is not None:
        r = case.removal
        share = f"{100 * r.share:.0f} % of the slowdown removed"
        text = (
            f"iterations: {units.duration(r.healthy_s)} healthy, {units.duration(r.slow_s)} slow, "
            f"{units.duration(r.after_s)} afterwards (median of {units.count(r.iterations)})"
        )
        yield f'<p><span class="tag ok">{share}</span>{small(text)}</p>'


def _decision(decision: Decision, moves: Sequence[str]) -> list[str]:
    predicted = ""
    if decision.plan is not None and decision.plan.level != "S1":
        predicted = f"predicted {units.slowdown(decision.plan.predicted_slowdown)}"
    options = "".join(
        f'<span class="small">{"→ " if option.level == decision.level else ""}'
        f"{escape(words.option_text(option))}</span>"
        for option in decision.options
    )
    return [
        escape(words.decision_text(decision)) + "".join(map(small, moves)) + small(predicted),
        escape(words.arithmetic_text(decision)) + small(decision.reason),
        options,
    ]
