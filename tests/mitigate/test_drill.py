"""What a drill holds a plan against."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from failslow.demo.drill import _best_split


def test_the_best_split_is_measured_by_the_workers_own_times() -> None:
    # 7 micro-batches each; 0.1 s of the iteration are nobody's own
    assert _best_split([0.7, 0.7, 1.4, 0.7], 1.5, 28) == pytest.approx(0.1 + 0.8)


@given(
    st.lists(st.floats(0.1, 3.0), min_size=2, max_size=3), st.integers(3, 9), st.floats(0.0, 0.5)
)
def test_no_split_is_better(own_s: list[float], microbatches: int, rest_s: float) -> None:
    replicas = len(own_s)
    even = [microbatches // replicas + (i < microbatches % replicas) for i in range(replicas)]
    each = [s / count for s, count in zip(own_s, even, strict=True)]
    best = min(
        max(count * s for count, s in zip(counts, each, strict=True))
        for counts in product(range(1, microbatches + 1), repeat=replicas)
        if sum(counts) == microbatches
    )
    found = _best_split(own_s, max(own_s) + rest_s, microbatches)
    assert found == pytest.approx(best + rest_s)
