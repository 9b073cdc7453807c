"""What levels cost: estimates, then what was measured, also by an earlier controller."""

from __future__ import annotations

import json
from typing import Any

import pytest

from failslow.config import DecideConfig
from failslow.decide.costs import CostBook

ESTIMATE_S = CostBook(DecideConfig()).cost("S3")


def test_what_was_learnt_is_recalled_whole() -> None:
    book = CostBook(DecideConfig())
    assert book.learnt() == {}
    for cost_s in (4.0, 6.0, 5.0, 7.0, 6.0, 6.5):
        book.learn_cost("S3", cost_s)
    book.learn_share("S2", promised=0.8, achieved=0.6)
    book.refuse("S4", "no checkpoint callback")
    plain = json.loads(json.dumps(book.learnt()))
    other = CostBook(DecideConfig())
    other.recall(plain)
    assert other.learnt() == plain == book.learnt()
    assert other.cost("S3") == book.cost("S3") == (6.0, "measured")
    assert other.share("S2", 0.4) == book.share("S2", 0.4) == pytest.approx(0.3)
    assert other.refusal("S4") == "no checkpoint callback"
    assert other.cost("S2")[1] == "estimate"


def test_bad_measurements_make_a_level_less_worth_and_never_worth_nothing() -> None:
    book = CostBook(DecideConfig())
    shares = []
    for _ in range(6):
        book.learn_share("S2", promised=0.8, achieved=0.0)
        shares.append(book.share("S2", 0.6))
    assert shares == pytest.approx([0.3, 0.2, 0.15, 0.12, 0.1, 0.1])
    for _ in range(3):
        book.learn_share("S2", promised=0.8, achieved=0.8)
    assert book.share("S2", 0.6) == pytest.approx(0.6)


@pytest.mark.parametrize(
    "learnt",
    [
        {"S3": 4.0},
        {"S3": {"cost_s": "6.2"}},
        {"S3": {"cost_s": [None, True, -1.0, float("inf"), "x"], "kept": 3}},
        {"S9": {"cost_s": [6.2]}},
    ],
)
def test_what_makes_no_sense_is_passed_over(learnt: dict[str, Any]) -> None:
    book = CostBook(DecideConfig())
    book.recall(learnt)
    assert book.cost("S3") == ESTIMATE_S
    assert book.learnt() == {}
