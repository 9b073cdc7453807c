"""`failslow.step()`: what a training loop tells of its iterations, and that it costs it nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("torch", reason="capture needs torch")

import torch
import torch.distributed as dist
from hooked import records

import failslow
from failslow import trainer
from failslow.capture import hook
from failslow.capture.layout import TRAINER_STEP
from failslow.capture.reader import RingReader
from failslow.trainer import whole

pytest_plugins = ("hooked",)


@pytest.fixture(autouse=True)
def counted_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer._Count, "next", 0)


def test_each_call_is_a_mark_with_its_index_and_its_work(
    gloo: None, watched: Callable[[], RingReader]
) -> None:
    dist.all_reduce(torch.ones(1))
    failslow.step()
    failslow.step(work=4096)
    failslow.step(500, work=torch.tensor(128.0))
    failslow.step(work=float("nan"))
    marks = records(watched(), TRAINER_STEP)
    assert marks["size_bytes"].tolist() == [0, 1, 500, 501]
    assert marks["wait_ns"].tolist() == [0, 4096, 128, 0]


def test_where_nobody_watches_nothing_happens() -> None:
    hook.uninstall()
    failslow.step(work=4096)
    assert trainer._Count.next == 1


@pytest.mark.parametrize(
    ("work", "held"),
    [(4096, 4096), (0.2, 1), (None, 0), (0, 0), (-3, 0), (float("inf"), 0), ("x", 0)],
)
def test_what_is_no_positive_number_counts_as_not_told(work: object, held: int) -> None:
    assert whole(work) == held  # type: ignore[arg-type]  # as a careless loop would
    assert whole(1e30) == 1 << 62


def test_a_coordinators_step_tells_the_work_of_its_share(
    gloo: None, watched: Callable[[], RingReader]
) -> None:
    dist.all_reduce(torch.ones(1))
    coordinator = failslow.Coordinator(4)
    with coordinator.step(7) as share:
        share.work = 65_536
    with coordinator.step(8):
        pass
    marks = records(watched(), TRAINER_STEP)
    assert marks["size_bytes"].tolist() == [7, 8]
    assert marks["wait_ns"].tolist() == [65_536, 0]
