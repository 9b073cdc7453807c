"""What the Coordinator and the controller say to each other, by way of rank 0's agent.

    order     {"topic":"steer","id":7,"level":"S2","episode":"e17","plan":{"level":"S2",…}}
    facts     {"topic":"steer","what":"facts","pp":2,"dp":4,"tp":1,"microbatches":32,…}
    outcome   {"topic":"steer","what":"outcome","id":7,"level":"S2","ok":true,"cost_s":0.004,…}
    pace      {"topic":"steer","what":"pace","rank":3,"step":120,"microbatches":9,
               "microbatch_s":0.021}

facts are `JobFacts`, outcome an `Outcome`, both with all their fields. facts come at the start,
again once the healthy iteration time is known, and then unchanged every half minute: `ranks` is who
was where at the start.
pace comes from every rank, about once a second while it iterates over its share: seconds a
micro-batch takes it, its last one of the step left out, as gradients are exchanged in it. Where
CUDA is in use it is by the device's own clock, or there is none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from failslow.errors import PlanError
from failslow.records import JobFacts, Outcome, Plan

__all__ = ["TOPIC", "Instructed", "facts_letter", "outcome_letter", "pace_letter", "read_order"]

TOPIC = "steer"
_PLAN: TypeAdapter[Plan] = TypeAdapter(Plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instructed:
    """One order."""

    id: int
    """An outcome names it."""
    plan: Plan
    episode: str = ""

    def to_plain(self) -> dict[str, Any]:
        """As an order's letter has it, without the topic."""
        return {
            "id": self.id,
            "level": self.plan.level,
            "episode": self.episode,
            "plan": asdict(self.plan),
        }


def read_order(letter: Mapping[str, Any]) -> Instructed:
    """Raises PlanError for what is no order."""
    try:
        plan = _PLAN.validate_python(letter.get("plan"))
    except ValidationError as error:
        raise PlanError(f"the plan is none: {error.errors()[0]['msg']}") from None
    number = letter.get("id")
    if not isinstance(number, int) or letter.get("level", plan.level) != plan.level:
        raise PlanError(
            f"the order has id {number!r} and level {letter.get('level')!r} with a plan of "
            f"{plan.level}; give a whole number, and one level"
        )
    return Instructed(id=number, plan=plan, episode=str(letter.get("episode", "")))


def facts_letter(facts: JobFacts) -> dict[str, Any]:
    """What planning must know of the job."""
    return {"topic": TOPIC, "what": "facts", **asdict(facts)}


def outcome_letter(order: int, outcome: Outcome) -> dict[str, Any]:
    """What became of an order."""
    return {"topic": TOPIC, "what": "outcome", "id": order, **asdict(outcome)}


def pace_letter(*, rank: int, step: int, microbatches: int, microbatch_s: float) -> dict[str, Any]:
    """How long a micro-batch takes a rank now."""
    return {
        "topic": TOPIC,
        "what": "pace",
        "rank": rank,
        "step": step,
        "microbatches": microbatches,
        "microbatch_s": microbatch_s,
    }
