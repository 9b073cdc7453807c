"""An unmodified four-worker job with FAILSLOW=1 in its environment and nothing else, end to end."""

from __future__ import annotations

import re
import time
from itertools import pairwise
from statistics import median

from tests.runtime.watched import WatchedJob, watched
from tests.transport.servers import until

from failslow.inject import throttle

HEALTHY_S = 9.0


def worker_pid(job: WatchedJob, rank: int) -> int:
    (ring,) = (job.folder / "rings").glob(f"*-r{rank}-p*.ring")
    found = re.search(r"-p(\d+)\.ring", ring.name)
    assert found
    return int(found[1])


def test_a_slow_worker_is_suspected_confirmed_and_relieved_in_time() -> None:
    settings = {"FAILSLOW_DETECT_MIN_DURATION_S": "2"}
    with watched(world=4, work_ms=120.0, environ=settings) as job:
        job.until(lambda: len(job.steps()) >= 20)
        healthy_t = time.time()
        job.until(lambda: time.time() - healthy_t > HEALTHY_S)
        assert "onset" not in job.events()

        with throttle(worker_pid(job, 2), to=0.5, method="signal"):
            slow_t = time.time()
            job.until(lambda: "onset" in job.events(), 20.0)
            confirmed_s = time.time() - slow_t
            # long enough for a duration that can be told apart
            job.until(lambda: time.time() - slow_t > 4.0)
        healed_t = time.time()
        job.until(lambda: "relief" in job.events(), 30.0)
        relieved_s = time.time() - healed_t
        job.stop()
        until(lambda: not job.ours(), 20.0)

        steps = job.steps()
        bites = next(e.record.step for e in steps if e.t - e.record.duration_s >= slow_t)
        suspicions = [e.record for e in job.entries("suspicion") if e.t > slow_t]
        assert suspicions[0]["step"] - bites <= 8
        assert confirmed_s <= 10.0
        assert relieved_s <= 15.0
        assert not [e for e in job.entries("episode") if e.t < slow_t]

        episode = next(e for e in job.entries("episode") if e.tags["event"] == "relief").record
        assert abs(episode.start_step - bites) <= 3
        assert episode.slowdown > 1.2
        agrees_with_the_script(job)
        workers = {e.rank: e for e in job.entries("step") if e.rank is not None}
        assert sorted(workers) == [0, 1, 2, 3]
        assert all(e.tags["healthy_s"] > 0.05 for e in workers.values())


def agrees_with_the_script(job: WatchedJob) -> None:
    """The journal's iteration times are the script's own, within 1 % at the median."""
    own = [list(pairwise(ends)) for ends in job.own_ends()]
    own_s = [median(later - sooner for sooner, later in pairs) for pairs in zip(*own, strict=True)]
    steps = {e.record.step: e.record.duration_s for e in job.steps()}
    # the first boundary is the end of the script's first iteration
    off = [abs(steps[i] / duration_s - 1.0) for i, duration_s in enumerate(own_s) if i in steps]
    assert len(off) >= len(own_s) - 2
    assert median(off) < 0.01
