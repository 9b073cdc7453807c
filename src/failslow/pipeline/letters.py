"""What the job's Coordinator and people write, checked.

In: the body of a `Report`. Out: `JobFacts`, an `Outcome`, a `Command`:

    read_outcome({"level": "S2", "episode": "e17", "ok": True, "cost_s": 0.004})
    read_command({"order": "S2"})
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from pydantic import TypeAdapter
from pydantic import ValidationError as LetterError

from failslow.records import Command, JobFacts, Outcome

__all__ = ["LetterError", "read_command", "read_facts", "read_outcome"]

_FACTS: TypeAdapter[JobFacts] = TypeAdapter(JobFacts)
_OUTCOME: TypeAdapter[Outcome] = TypeAdapter(Outcome)
_COMMAND: TypeAdapter[Command] = TypeAdapter(Command)


def read_facts(body: Mapping[str, Any]) -> JobFacts:
    """What planning must know of the job. Raises LetterError."""
    return _FACTS.validate_python(_known(body, JobFacts))


def read_outcome(body: Mapping[str, Any]) -> Outcome:
    """What became of an order. Raises LetterError."""
    return _OUTCOME.validate_python(_known(body, Outcome))


def read_command(body: Mapping[str, Any]) -> Command:
    """What a person wants. Raises LetterError."""
    return _COMMAND.validate_python({"order": body.get("order")})


def _known(body: Mapping[str, Any], cls: Any) -> dict[str, Any]:
    """The fields of `cls` among `body`: a newer trainer may say more."""
    return {f.name: body[f.name] for f in fields(cls) if f.name in body}
