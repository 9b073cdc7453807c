"""A pause of our own, told by a record in the stream: no iteration looks slow for it."""

from __future__ import annotations

import numpy as np
import pytest
from tests.track.streams import OPS, Call, Stretch, fsdp, hybrid, play, start_up

from failslow.records import KIND_PAUSE
from failslow.track import Tracker


@pytest.mark.parametrize("skew_s", [0.0, 1.5], ids=["together", "the-first-to-go-on"])
@pytest.mark.parametrize("marked", [True, False], ids=["marks", "calls"])
@pytest.mark.parametrize("program", [fsdp(4), hybrid(4)], ids=["fsdp", "hybrid"])
def test_an_iteration_in_which_the_worker_stood_still_is_as_long_as_usual(
    program: list[Call], marked: bool, skew_s: float
) -> None:
    played = play([start_up(), *[Stretch(program, rest=0.2)] * 60], noise=0.01)
    calls = played.calls if marked else played.unmarked
    begin = len(calls) // 2
    last = begin + len(program) + marked
    for at in {*range(begin, last, 5), last - 1}:  # before this call of an iteration
        stream, pause_ns, skew_ns = calls.copy(), 2_000_000_000, round(skew_s * 1e9)
        stood = np.zeros(1, stream.dtype)
        stood["kind"] = KIND_PAUSE
        stood["start_ns"] = stream["start_ns"][at] - 1000
        stood["end_ns"] = stood["start_ns"] + pause_ns
        for name in ("start_ns", "end_ns"):
            stream[name][at:] += pause_ns
            stream[name][at + 1 :] += skew_ns  # it waits for the others in its next call
        if stream["kind"][at] == stream["kind"][0]:
            stream["wait_ns"][at] += skew_ns
            stream["end_ns"][at] += skew_ns
        tracker = Tracker(ops=OPS)
        samples = tracker.update(np.concatenate((stream[:at], stood, stream[at:])))
        samples += tracker.finish()
        durations = [sample.duration_s for sample in samples]
        assert max(durations) < 0.13, at
        assert min(durations) > 0.07, at
        steps = [sample.step for sample in samples]
        assert steps == list(range(steps[0], steps[0] + len(steps))), at
        assert len(steps) >= 57
        assert sum(sample.compute_s is None for sample in samples) >= 1
        assert {sample.run for sample in samples} == {0}
