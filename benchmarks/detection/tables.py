"""Scores as tables on a terminal and as JSON.

In: the scores of each detector. Out: one table by kind, one by noise, and the totals that the
goals are stated for; or one JSON object (schema `failslow.benchmark.detection/1`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from benchmarks.detection.model import KINDS
from benchmarks.detection.score import JobScore, Rate, Tally, tally
from rich import box
from rich.console import Console
from rich.table import Table

__all__ = ["show", "show_failures", "show_one", "to_json"]

Scores = Mapping[str, Sequence[JobScore]]


def to_json(scores: Scores, taken_s: Mapping[str, float], seed: int) -> dict[str, object]:
    """Totals, by kind and by noise, of each detector, and its failures."""
    return {
        "schema": "failslow.benchmark.detection/1",
        "seed": seed,
        "detectors": {
            name: {
                "seconds": taken_s.get(name, 0.0),
                "total": tally(of).to_json(),
                "kinds": {k: tally(v).to_json() for k, v in _by(of, lambda s: s.kind).items()},
                "noise": {k: tally(v).to_json() for k, v in _by(of, lambda s: s.noise).items()},
                "failures": [
                    {"job": s.index, "outcome": s.outcome, "what": s.description}
                    for s in of
                    if s.outcome in ("false_alarm", "missed")
                ],
            }
            for name, of in scores.items()
        },
    }


def show(console: Console, scores: Scores, taken_s: Mapping[str, float]) -> None:
    """Print the tables."""
    any_scores = next(iter(scores.values()))
    kinds = [k for k in KINDS if any(s.kind == k for s in any_scores)]
    console.print(_grouped("kind", kinds, scores, lambda s: s.kind))
    noises = sorted({s.noise for s in any_scores})
    console.print(_grouped("noise", noises, scores, lambda s: s.noise))
    console.print(_totals(scores, taken_s))


def show_failures(console: Console, scores: Scores) -> None:
    """Print each false alarm, miss, and job with a stray alarm, ready to be run again."""
    for name, of in scores.items():
        for score in of:
            if score.outcome in ("false_alarm", "missed") or score.strays:
                show_one(console, name, score)


def show_one(console: Console, name: str, score: JobScore) -> None:
    """Print one job's outcome on one line."""
    outcome = "stray_alarm" if score.strays and score.outcome == "right" else score.outcome
    console.print(
        f"{name} {outcome}: {score.description}", markup=False, highlight=False, soft_wrap=True
    )


def _by(scores: Sequence[JobScore], key: Callable[[JobScore], str]) -> dict[str, list[JobScore]]:
    groups: dict[str, list[JobScore]] = {}
    for s in scores:
        groups.setdefault(key(s), []).append(s)
    return groups


def _grouped(
    title: str, rows: Sequence[str], scores: Scores, key: Callable[[JobScore], str]
) -> Table:
    table = _table(f"by {title}: false alarms (FP), misses (FN), median onset error in records")
    table.add_column(title, no_wrap=True)
    table.add_column("clean", justify="right")
    table.add_column("slow", justify="right")
    groups = {name: _by(of, key) for name, of in scores.items()}
    for name in scores:
        table.add_column(f"{name}\nFP FN onset", justify="right", no_wrap=True)
    for row in rows:
        tallies = [tally(groups[name].get(row, ())) for name in scores]
        cells = [row, str(tallies[0].fpr.of), str(tallies[0].fnr.of)]
        cells += [f"{_count(t.fpr)} {_count(t.fnr)} {_number(t.onset_median):>5}" for t in tallies]
        table.add_row(*cells)
    return table


def _table(title: str) -> Table:
    """A table that fits a terminal of 80 columns."""
    return Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)


def _totals(scores: Scores, taken_s: Mapping[str, float]) -> Table:
    table = _table("totals: 95 % Wilson intervals, median errors in records")
    table.add_column("")
    table.add_column("goal", justify="right")
    tallies = {name: tally(of) for name, of in scores.items()}
    for name in scores:
        table.add_column(name, justify="right")
    rows: list[tuple[str, str, Callable[[Tally], str]]] = [
        ("jobs (unscored)", "", lambda t: f"{t.jobs} ({t.unscored})"),
        ("FPR per job", "0", lambda t: _rate(t.fpr)),
        ("FNR per job", "<= 0.2 %", lambda t: _rate(t.fnr)),
        ("stray alarm, slow jobs", "", lambda t: _rate(t.stray_jobs)),
        ("precision per episode", "", lambda t: _rate(t.precision)),
        ("recall per episode", "", lambda t: _rate(t.recall)),
        ("onset error (p90)", "<= 2", lambda t: _pair(t.onset_median, t.onset_p90)),
        ("relief error (p90)", "", lambda t: _pair(t.relief_median, t.relief_p90)),
        ("slowdown error", "", lambda t: _percent(t.slowdown_error_median)),
        ("overlap (IoU)", "", lambda t: _percent(t.iou_median)),
        ("alarms an episode", "", lambda t: _number(t.pieces_mean)),
        ("iterations to suspicion", "", lambda t: _number(t.delay_median)),
    ]
    for label, goal, cell in rows:
        table.add_row(label, goal, *(cell(t) for t in tallies.values()))
    table.add_row("time taken", "", *(f"{taken_s.get(name, 0.0):.1f} s" for name in scores))
    return table


def _count(rate: Rate) -> str:
    """The hits, two characters wide, red unless none."""
    if rate.of == 0:
        return " -"
    return f"[{'green' if rate.hits == 0 else 'red'}]{rate.hits:>2}[/]"


def _rate(rate: Rate) -> str:
    if rate.share is None:
        return "-"
    low, high = rate.interval
    return f"{rate.share:.2%} ({rate.hits}/{rate.of})\n{low:.1%}–{high:.1%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _pair(middle: float | None, high: float | None) -> str:
    return f"{_number(middle)} ({_number(high)})"
