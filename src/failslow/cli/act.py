"""`failslow act`: tell a watched job what to do about its fail-slow.

$ failslow act S2
taken: goes to S2: S2 was asked for; micro-batches [9, 5, 9, 9]
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from failslow.cli import options
from failslow.cli.output import emit, note
from failslow.errors import InputError

if TYPE_CHECKING:
    from failslow.runtime.runs import RunPlace

__all__ = ["EXAMPLES", "act"]

EXAMPLES = """\
[bold]Examples[/bold]

failslow act S2               redistribute the micro-batches now

failslow act resume           let the policy decide again

failslow act ignore pretrain7 do nothing more about these culprits until they have recovered
"""
_ANSWER_S = 10.0
_DECISION_S = 2.0


def act(
    order: Annotated[
        str,
        typer.Argument(
            metavar="S2|S3|S4|resume|ignore",
            help="Go to a level and stay there; decide by itself again; or do nothing more about "
            "the present culprits until they have recovered: a plan in force stays as it is.",
        ),
    ],
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="DIR",
            help="Folder of the run, or the job's name; FAILSLOW_DIR, or the newest under "
            "failslow-runs/, if left out.",
            show_default=False,
        ),
    ] = None,
    *,
    json: options.Json = False,
) -> None:
    """Override the policy of a watched job; its controller answers.

    It works in any mode: what you ask for is carried out. Exit code: 1 when nobody answers, or
    the order cannot be followed.
    """
    from failslow.runtime.acts import ORDERS, waiting, withdraw, write_order
    from failslow.runtime.runs import find_run

    wanted = order.upper() if order.upper() in ORDERS else order.lower()
    if wanted not in ORDERS:
        raise InputError(f"{order!r} is no order; use one of {', '.join(ORDERS)}")
    place = find_run(run, os.environ)
    # whoever may not look into the folder is told so when the order is to be left there
    known = place is not None and (not os.access(place.folder, os.X_OK) or place.has_journal)
    if place is None or not known:
        raise InputError(
            f"no watched job at {run or 'failslow-runs/'}; name the folder of its run, or start "
            "one with failslow run"
        )
    number = write_order(place.folder, wanted)
    deadline_s = time.monotonic() + _ANSWER_S
    while waiting(place.folder, number):
        if time.monotonic() > deadline_s:
            withdraw(place.folder, number)
            raise InputError(
                f"{place.folder}: no controller took the order within {_ANSWER_S:g} s; it was "
                "withdrawn; `failslow status` tells whether the job still runs"
            )
        time.sleep(0.05)
    answer = _answer(place, number)
    if json:
        from failslow.report.json import dumps

        emit(dumps({"schema": "failslow.act/1", "order": wanted, **answer}) + "\n")
    else:
        note(f"{'taken' if answer['followed'] else 'refused'}: {answer['reason']}")
        if wanted == "ignore" and answer["followed"] and answer["level"] != "S1":
            note(
                "a plan in force stays as it is until then, for other culprits apart; "
                "`failslow act resume` lets the policy decide again"
            )
    if not answer["followed"]:
        raise typer.Exit(1)


def _answer(place: RunPlace, number: str) -> dict[str, Any]:
    """What the journal says was decided."""
    from failslow.records import Decision
    from failslow.runtime.controller import read_tail

    deadline_s = time.monotonic() + _DECISION_S
    while True:
        taken = False
        for entry in read_tail(place.journal, 1 << 20):
            record = entry.record
            if entry.kind == "action" and isinstance(record, dict) and record.get("id") == number:
                taken = True
            elif taken and isinstance(record, Decision):
                followed = record.action == "obey"
                return {"followed": followed, "level": record.level, "reason": record.reason}
        if time.monotonic() > deadline_s:
            reason = "no fail-slow with a proved culprit is on, so there is nothing to do"
            return {"followed": False, "level": "S1", "reason": reason}
        time.sleep(0.1)
