"""The examples in the docstrings are true."""

from __future__ import annotations

import doctest
import importlib

import pytest


@pytest.mark.parametrize(
    "module",
    [
        "failslow.decide.allocate",
        "failslow.decide.learned",
        "failslow.decide.ski",
        "failslow.decide.topology",
        "failslow.stats.survival",
    ],
)
def test_examples_are_true(module: str) -> None:
    found = doctest.testmod(importlib.import_module(module))
    assert found.attempted > 0
    assert found.failed == 0
