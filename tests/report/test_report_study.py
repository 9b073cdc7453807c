"""A study counts what its definitions say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from failslow.records import Culprit
from failslow.report import summarize


def test_means_are_over_hit_jobs_and_over_all(make_job: Any) -> None:
    slow = np.r_[np.full(60, 1.0), np.full(40, 2.0)]
    _, hit = make_job(slow, episodes=[(60, 99, "fail_slow")], source="a.log")
    _, clean = make_job(np.full(100, 1.0), source="b.log")
    _, changed = make_job(slow, episodes=[(60, 99, "workload_change")], source="c.log")
    _, hard = make_job(
        np.r_[np.full(60, 1.0), np.full(40, 3.0)], episodes=[(60, 99, "fail_slow")], spikes=[3]
    )

    study = summarize([hit, clean, changed, hard])

    assert (study.jobs, study.hit, study.hit_pct) == (4, 2, 50.0)
    assert (study.episodes, study.ongoing, study.workload_changes, study.spikes) == (2, 2, 1, 1)
    assert study.mean_duration_s == pytest.approx((80 + 120) / 2)
    assert study.longest_duration_s == pytest.approx(120)
    assert study.mean_jct_increase_hit_pct == pytest.approx((40 + 80) / 2)
    assert study.mean_jct_increase_all_pct == pytest.approx((40 + 80) / 4)
    assert study.worst_jct_increase_pct == pytest.approx(80)
    assert study.worst_slowdown == max(row.worst_slowdown or 0 for row in study.per_job)
    assert (study.over_50_jobs, study.over_50_share_of_hit_pct) == (1, 50.0)
    assert study.lost_s == pytest.approx(40 + 80)
    assert [row.hit for row in study.per_job] == [True, False, False, True]


def test_an_episode_counts_once_for_each_thing_it_blames(make_job: Any) -> None:
    _, job = make_job(np.r_[np.full(60, 1.0), np.full(40, 2.0)], episodes=[(60, 99, "fail_slow")])
    blamed = (
        Culprit(rank=1, what="compute", slowdown=2.0),
        Culprit(rank=2, what="compute", slowdown=1.5),
        Culprit(rank=2, what="communication", slowdown=1.2),
    )
    twice = replace(job.episodes[0], culprits=blamed)

    study = summarize([replace(job, episodes=(twice, job.episodes[0]))])

    assert study.culprits == (("compute", 2), ("communication", 1))


def test_a_study_without_a_hit_has_no_duration(make_job: Any) -> None:
    study = summarize([make_job(np.full(10, 1.0))[1]])

    assert study.mean_duration_s is None
    assert study.over_50_share_of_hit_pct is None
    assert study.mean_jct_increase_all_pct == 0.0
