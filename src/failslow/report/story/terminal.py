"""A `Story` -> what a terminal of 80 columns or more shows.

In: `Story`. Out: what `console.print` takes; nothing is printed here.

    pretrain7 · 4 workers on 2 nodes · 1,280 iterations · healthy 80 ms · 2 min 4 s
      1 fail-slow, 4.3 s lost: completion time +3.60 %
      #  start                length   slowdown  lost   what            done
      1  step 586             27.9 s   ×1.39     4.3 s  device of …     S2, 72 % removed
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from failslow.records import Decision, Outcome
from failslow.report import units, words
from failslow.report.story.evidence import amount, panels
from failslow.report.story.heat import worst_cells
from failslow.report.story.model import Case, Story
from failslow.report.story.places import decided_moves
from failslow.report.story.restarts import Restart, commands_text, restart_text

__all__ = [
    "blame_text",
    "done_text",
    "header_facts",
    "length_text",
    "lost_text",
    "slowdown_text",
    "story_view",
    "verdict_line",
]

_SLOW, _WORK, _GOOD, _WARN = "bold red", "magenta", "green", "yellow"
_SLOW_LINK = 1.3
_SUSPECTS, _TROUBLES, _LINKS, _CELLS, _PANELS = 5, 6, 4, 5, 3


def story_view(story: Story) -> RenderableType:
    """The whole story; each part only where the journal tells it."""
    parts: list[RenderableType] = [_headline(story), *_lines(story)]
    shown = [case for case in story.cases if case.stretches]
    if shown:
        parts.append(_indented(_episodes(shown), 1))
        for number, case in enumerate(shown, start=1):
            parts += _case(number, case, story)
    parts += _start(story)
    parts += _lookup(story)
    parts += _monitoring(story)
    for warning in story.analysis.warnings:
        parts.append(_indented(Text.assemble(("warning: ", _WARN), warning)))
    return Group(*parts)


def header_facts(story: Story) -> list[str]:
    """What kind of job it was: "4 workers on 2 nodes", "1,280 iterations" …"""
    a = story.analysis
    facts = []
    if story.workers:
        nodes = f" on {units.plural(len(story.nodes), 'node')}" if story.nodes else ""
        facts.append(f"{units.plural(len(story.workers), 'worker')}{nodes}")
    if a.iterations:
        facts.append(units.plural(a.iterations, "iteration"))
        facts.append(f"healthy {units.duration(a.healthy_iteration_s)}")
        facts.append(units.duration(a.wall_s))
    if story.starts > 1:
        facts.append(f"{story.starts} starts")
    return facts


def verdict_line(story: Story) -> str:
    """One sentence: what slowness cost this job."""
    if not story.analysis.iterations:
        return "no iteration was seen"
    slow = story.faults
    if not slow:
        return "no fail-slow"
    lost = units.duration(story.analysis.lost_s)
    increase = units.percent(story.analysis.jct_increase_pct)
    text = f"{units.plural(len(slow), 'fail-slow')}, {lost} lost: completion time {increase}"
    restarted_s = sum(case.restarted_s for case in slow)
    return f"{text}, and {units.duration(restarted_s)} by restarts" if restarted_s else text


def slowdown_text(case: Case) -> str:
    """ "×2.75", and what is left where something was done."""
    return units.slowdown(case.worst) + (f"\n{units.slowdown(case.left)} left" if case.left else "")


def lost_text(case: Case) -> str:
    """ "20.5 s"; a restart's apart: that is none of slowness."""
    if not case.is_fault:
        return "–"
    more = f"\n+ {units.duration(case.restarted_s)} restart" if case.restarted_s else ""
    return units.duration(case.lost_s) + more


def blame_text(case: Case) -> str:
    """Who is to blame, by the best that is known."""
    if case.findings:
        return "; ".join(words.finding_text(finding) for finding in case.findings)
    if case.verdicts:
        return words.verdict_text(case.verdicts[-1][1])
    if case.diagnoses:
        return words.diagnosis_text(case.diagnoses[-1][1])
    episode = case.episode
    if episode is not None and episode.culprits:
        worst = sorted(episode.culprits, key=lambda c: -c.slowdown)
        named = ", ".join(f"rank {c.rank} {c.what} {units.slowdown(c.slowdown)}" for c in worst[:4])
        return f"by the workers' times: {named}" + (" …" if len(worst) > 4 else "")
    return "no worker stands out" if case.is_fault else ""


def done_text(case: Case) -> str:
    """What was done about it, and what that brought."""
    parts = []
    done = [o for _, o in case.outcomes if o.ok and o.level != "S1"]
    if done:
        parts.append(", then ".join(dict.fromkeys(outcome.level for outcome in done)))
    parts += [_restarted(restart) for restart in case.restarts]
    failed = [o for _, o in case.outcomes if not o.ok]
    if failed and not done:
        parts.append(words.outcome_text(failed[-1]))
    if not case.outcomes and case.decisions:
        parts.append(words.decision_text(case.decisions[-1][1]))
    if case.removal is not None:
        share = 100 * case.removal.share
        parts.append(f"{share:.0f} % removed" if share >= 0 else f"{-share:.0f} % slower")
    return ": ".join(parts) if parts else "nothing"


def _restarted(restart: Restart) -> str:
    text = f"without {', '.join(restart.evict)}"
    if restart.lost_s is None:
        return f"{text}, not seen to train again"
    return f"{text}, {units.duration(restart.lost_s)} lost"


def length_text(case: Case, story: Story) -> str:
    """How long it lasted; "… at least" where its end was not seen."""
    if case.end_t is not None:
        return units.duration(max(0.0, case.end_t - case.start_t))
    so_far = units.duration(max(0.0, (story.end_t or case.start_t) - case.start_t))
    return f"{so_far}, ongoing"


def _headline(story: Story) -> Text:
    text = " · ".join(["", *header_facts(story)])
    return Text.assemble((story.name, "bold"), text, no_wrap=True, overflow="ignore")


def _lines(story: Story) -> Iterator[RenderableType]:
    line = Text(verdict_line(story), style=_SLOW if story.faults else _GOOD)
    if not story.analysis.iterations:
        line.stylize(_WARN)
    extras = []
    if story.analysis.spikes:
        lost = units.duration(story.analysis.spike_lost_s)
        extras.append(f"{units.plural(story.analysis.spikes, 'spike')} ({lost})")
    if story.paused_s:
        extras.append(f"paused {units.duration(story.paused_s)} for validation")
    if story.spent_s:
        extras.append(f"{units.duration(story.spent_s)} spent on actions")
    yield _indented(Text.assemble(line, *(f" · {extra}" for extra in extras)))
    when = []
    if story.begin_t is not None:
        when.append(f"from {units.clock(story.begin_t)} UTC")
    if story.end_t is not None:
        when.append(f"to {units.clock(story.end_t)} UTC" + (", ended" if story.ended else ""))
    facts = [" ".join(when), f"mode {story.mode}" if story.mode else ""]
    if story.facts is not None:
        facts.append(words.facts_text(story.facts))
    yield _indented(Text(" · ".join(filter(None, facts)), style="dim"))


def _episodes(cases: Sequence[Case]) -> Table:
    table = _table("#", "start", "relief", ">slowdown", ">lost", "who", "done")
    for number, case in enumerate(cases, start=1):
        episode = case.episode
        assert episode is not None
        style = _SLOW if case.is_fault else _WORK
        what = blame_text(case) if case.is_fault else f"workload change: {episode.note}"
        end = "ongoing" if case.end_t is None else units.clock(case.end_t)[11:]
        first = case.stretches[0].episode
        table.add_row(
            str(number),
            f"step {units.count(first.start_step)}\n{units.clock(case.start_t)[11:]}",
            end if episode.end_step is None else f"step {units.count(episode.end_step)}\n{end}",
            Text(slowdown_text(case), style=style),
            lost_text(case),
            what,
            done_text(case) if case.is_fault else "",
        )
    return table


def _case(number: int, case: Case, story: Story) -> Iterator[RenderableType]:
    """What is behind an episode: suspects, findings with their facts, decisions."""
    lines: list[Text] = []
    for _, diagnosis in case.diagnoses[-1:]:
        for suspect in diagnosis.suspects[:_SUSPECTS]:
            numbers = "; ".join(words.measurement_text(m) for m in suspect.measurements)
            text = (
                f"suspect {words.suspect_text(suspect)} {units.slowdown(suspect.slowdown)}, "
                f"+{units.duration(suspect.extra_s)}, score {suspect.score:.2f}"
            )
            lines.append(Text("; ".join(filter(None, (text, numbers, suspect.note)))))
        hidden = len(diagnosis.suspects) - _SUSPECTS
        if hidden > 0:
            lines.append(Text(f"and {hidden} suspects more", style="dim"))
        if diagnosis.everyone:
            lines.append(Text(words.diagnosis_text(diagnosis)))
        if diagnosis.imbalance:
            lines.append(Text(f"uneven by design: {diagnosis.imbalance}"))
        if diagnosis.missing:
            lines.append(Text(f"no profile of {words.ranks_text(diagnosis.missing)}", style=_WARN))
    for finding in case.findings:
        lines.append(Text(f"proven: {words.finding_text(finding)}", style=_SLOW))
        lines += [Text(f"  {words.measurement_text(m)}") for m in finding.measurements]
        lines += [Text(f"  {fact}") for fact in finding.evidence]
    lines += _acts(case, story)
    if case.removal is not None:
        r = case.removal
        lines.append(
            Text(
                f"iterations: healthy {units.duration(r.healthy_s)}, slow "
                f"{units.duration(r.slow_s)}, afterwards {units.duration(r.after_s)}: "
                f"{100 * r.share:.0f} % of the slowdown removed"
            )
        )
    lines += [Text(line) for line in _moved(case, story)]
    if lines:
        yield Text()
        yield _indented(Text(f"{number}: {case.id}", style="bold"))
        yield from (_indented(line, 1) for line in lines)


def _acts(case: Case, story: Story) -> Iterator[Text]:
    """What was decided and done, with its arithmetic."""
    for t, event in case.acts:
        clock = units.clock(t)[11:]
        if isinstance(event, Outcome):
            text = f"{clock} {words.outcome_text(event)}"
            yield Text(text, style="" if event.ok else _WARN)
            continue
        if isinstance(event, Restart):
            lost = event.back_t is None
            yield Text(f"{clock} {restart_text(event)}", style=_WARN if lost else "")
            continue
        if not isinstance(event, Decision):
            yield Text(f"{clock} {commands_text(event)}")
            continue
        text = f"{clock} {words.decision_text(event)} ({words.arithmetic_text(event)})"
        yield Text(text)
        if event.plan is not None:
            yield from (Text(f"  {m}") for m in decided_moves(story, t, event.plan.placement))
        if event.reason:
            yield Text(f"  {event.reason}", style="dim")
        yield from (Text(f"  {words.option_text(option)}", style="dim") for option in event.options)


def _start(story: Story) -> Iterator[RenderableType]:
    """Who is slow from the start, if anybody."""
    case = story.start
    if case is None or not (case.findings or any(d.suspects for _, d in case.diagnoses[-1:])):
        return
    yield Text()
    yield _indented(Text(f"from the start, against peers: {blame_text(case)}", style=_WARN))


def _moved(case: Case, story: Story) -> Iterator[str]:
    """The telemetry that moved most with the onset."""
    for t, body in story.telemetry:
        if story.case_at(t) is not case:
            continue
        for panel in panels(body, onset_t=case.start_t, relief_t=case.end_t, most=_PANELS):
            if panel.score >= 3.0:
                who = panel.node if panel.rank is None else f"{panel.node} rank {panel.rank}"
                before, during = amount(panel.before, panel.unit), amount(panel.during, panel.unit)
                yield f"{who} {panel.name}: {before} → {during} at the onset"


def _lookup(story: Story) -> Iterator[RenderableType]:
    """Worst cells of the heat map and the slowest links; all of them are on the page."""
    cells = worst_cells(story.rounds[-1], most=_CELLS) if story.rounds else []
    if cells:
        yield Text()
        yield _indented(Text("furthest from their peers in the last profile", style="dim"))
        table = _table("rank", "node", "where", "metric", ">value")
        for cell in cells:
            table.add_row(str(cell.rank), cell.node, cell.column, cell.title, cell.text)
        yield _indented(table)
    measured = [pause for pause in story.pauses if pause.links]
    if measured:
        links = measured[-1].links
        size = max(link.size_bytes for link in links)
        most = [link for link in links if link.size_bytes == size]
        slowest = sorted(most, key=lambda link: -link.ratio)[:_LINKS]
        yield Text()
        text = f"slowest of {units.plural(len(most), 'link')} measured with {words.size_text(size)}"
        yield _indented(Text(text, style="dim"))
        table = _table("from", "to", ">bandwidth", ">time", "against")
        for link in slowest:
            style = _SLOW if link.ratio >= _SLOW_LINK else ""
            table.add_row(
                link.source,
                link.target,
                amount(link.bytes_per_s, "B/s"),
                Text(units.slowdown(link.ratio), style=style),
                link.against,
            )
        yield _indented(table)


def _monitoring(story: Story) -> Iterator[RenderableType]:
    if not story.troubles:
        return
    yield Text()
    blind = f": blind for {units.duration(story.blind_s)}" if story.blind_s else ""
    yield _indented(Text(f"monitoring{blind}", style=_WARN))
    for trouble in story.troubles[:_TROUBLES]:
        until = trouble.until_t if trouble.until_t is not None else story.end_t
        length = units.duration(max(0.0, (until or trouble.since_t) - trouble.since_t))
        open_end = "" if trouble.until_t is not None else ", to the end"
        text = f"{units.clock(trouble.since_t)[11:]} {trouble.message} ({length}{open_end})"
        yield _indented(Text(text), 1)
    more = len(story.troubles) - _TROUBLES
    if more > 0:
        yield _indented(Text(f"and {more} more", style="dim"), 1)


def _indented(part: RenderableType, more: int = 0) -> Padding:
    return Padding(part, (0, 0, 0, 2 + 2 * more))


def _table(*columns: str) -> Table:
    """Columns by name; ">" before it: right-aligned."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in columns:
        number = name.startswith(">")
        table.add_column(
            name.lstrip(">"),
            justify="right" if number else "left",
            no_wrap=name not in ("who", "done"),
            overflow="fold",
        )
    return table
